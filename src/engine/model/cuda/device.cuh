// What the compiler of a device has other names for than a host's.
#define VECTOR_ALIGN __align__(16)
#define SHARED_BYTES(name) extern __shared__ __align__(16) unsigned char name[]

