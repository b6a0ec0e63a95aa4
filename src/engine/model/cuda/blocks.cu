// Writing to the blocks of keys and values. `width` is that of a token's keys.

// Puts each token's key and value, [tokens, width], into its slot of the layer that begins at `keys_at` and `values_at`.
// `meta` holds the slots from `slots_at` on. One thread block a token.
extern "C" __global__ void write_tokens(real *pool, const real *keys, const real *values, const u32 *meta, u64 keys_at,
                                        u64 values_at, u32 slots_at, u32 width) {
    const u64 to = (u64)meta[slots_at + blockIdx.x] * width, from = (u64)blockIdx.x * width;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        pool[keys_at + to + i] = keys[from + i];
        pool[values_at + to + i] = values[from + i];
    }
}

// Copies blocks: `pairs` holds where from and where to. blockIdx.y is one of the planes, which hold the keys or the
// values of a layer in `blocks` blocks.
extern "C" __global__ void copy_blocks(real *pool, const u32 *pairs, u64 blocks, u32 width) {
    const u32 *pair = pairs + 2 * blockIdx.x;
    const u64 plane = blockIdx.y * blocks, length = 32 * (u64)width;
    for (u64 i = threadIdx.x; i < length; i += blockDim.x) {
        pool[(plane + pair[1]) * length + i] = pool[(plane + pair[0]) * length + i];
    }
}
