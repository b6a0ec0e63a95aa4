// What all kernels begin with. It is put before each of them, compiled for one type of numbers: REAL_F64, REAL_F32 or
// REAL_BF16. No header is included, so that NVRTC needs no folder of CUDA's; tests/shim.hpp stands in for the compiler.
//
// Sums run in an order that depends on a row alone, and `fma` is written out (the compiler must not contract), so that
// a row's result is the same bits whatever stands beside it.

typedef unsigned int u32;
typedef unsigned long long u64;

#if defined(REAL_F64)
typedef double real;
typedef double wide;
__device__ inline wide widen(real x) { return x; }
__device__ inline real narrow(wide x) { return x; }
__device__ inline wide exp_wide(wide x) { return exp(x); }
__device__ inline wide fma_wide(wide a, wide b, wide c) { return fma(a, b, c); }
__device__ inline wide sqrt_wide(wide x) { return sqrt(x); }
#else
typedef float wide;
__device__ inline wide exp_wide(wide x) { return expf(x); }
__device__ inline wide fma_wide(wide a, wide b, wide c) { return fmaf(a, b, c); }
__device__ inline wide sqrt_wide(wide x) { return sqrtf(x); }
#if defined(REAL_BF16)
struct real { unsigned short bits; };
__device__ inline wide widen(real x) { return __uint_as_float((u32)x.bits << 16); }
// To nearest, ties to even; NaN stays NaN.
__device__ inline real narrow(wide x) {
    const u32 bits = __float_as_uint(x);
    real y;
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        y.bits = (unsigned short)((bits >> 16) | 0x40u);
    } else {
        y.bits = (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
    return y;
}
#elif defined(REAL_F32)
typedef float real;
__device__ inline wide widen(real x) { return x; }
__device__ inline real narrow(wide x) { return x; }
#else
#error "kernels are for REAL_F64, REAL_F32 or REAL_BF16"
#endif
#endif

#define WARP 32u
#define ALL_LANES 0xffffffffu
#define MINUS_INFINITY (-1.0f / 0.0f)

// The sum over a warp, the same bits in every lane.
__device__ inline wide warp_sum(wide x) {
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        x += __shfl_xor_sync(ALL_LANES, x, step);
    }
    return x;
}

__device__ inline wide warp_max(wide x) {
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        const wide other = __shfl_xor_sync(ALL_LANES, x, step);
        x = other > x ? other : x;
    }
    return x;
}
