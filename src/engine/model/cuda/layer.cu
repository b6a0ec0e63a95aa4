// What a layer does between its products; compiled for a type of numbers alone. Numbers are rounded to `real` where the passes for training round them.

#define NORM_WARPS 4u

// y[0] = x + delta and y[1] = its RMS norm, both [rows, width] of [2, rows, width]; without `has_delta`, y[0] = x. One
// thread block of NORM_WARPS warps a row.
extern "C" __global__ void add_norm(real *y, const real *x, const real *delta, const real *weight, u32 width,
                                    u32 has_delta, double eps) {
    __shared__ wide sums[NORM_WARPS];
    const u64 row = (u64)blockIdx.x * width;
    real *total = y + row, *normed = y + (u64)gridDim.x * width + row;
    wide sum = 0;
    for (u32 i = threadIdx.x; i < width; i += NORM_WARPS * WARP) {
        real value = x[row + i];
        if (has_delta) value = narrow(widen(value) + widen(delta[row + i]));
        total[i] = value;
        sum = fma_wide(widen(value), widen(value), sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    sum = 0;
    for (u32 i = 0; i < NORM_WARPS; i++) sum += sums[i];
    const wide scale = (wide)1 / sqrt_wide(sum / (wide)width + (wide)eps);
    // Each thread reads what it wrote.
    for (u32 i = threadIdx.x; i < width; i += NORM_WARPS * WARP) {
        normed[i] = narrow(widen(total[i]) * scale * widen(weight[i]));
    }
}

// Normalises each head with `weight`, if `has_norm`, and rotates it by its token's position. x and y: [tokens, heads,
// head_dim]; `table`: for each position head_dim / 2 cosines, then as many sines. `meta` begins with the positions. A
// warp has one head.
extern "C" __global__ void rotate(real *y, const real *x, const real *weight, const wide *table, const u32 *meta,
                                  u32 tokens, u32 heads, u32 head_dim, u32 has_norm, double eps) {
    SHARED_BYTES(shared);
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, half = head_dim / 2;
    const u64 head = (u64)blockIdx.x * NORM_WARPS + warp;
    if (head >= (u64)tokens * heads) return;
    wide *values = (wide *)shared + warp * head_dim;
    wide sum = 0;
    for (u32 d = lane; d < head_dim; d += WARP) {
        values[d] = widen(x[head * head_dim + d]);
        sum = fma_wide(values[d], values[d], sum);
    }
    if (has_norm) {
        const wide scale = (wide)1 / sqrt_wide(warp_sum(sum) / (wide)head_dim + (wide)eps);
        for (u32 d = lane; d < head_dim; d += WARP) values[d] = widen(narrow(values[d] * scale * widen(weight[d])));
    }
    __syncwarp();
    const wide *angles = table + (u64)meta[head / heads] * head_dim;
    for (u32 d = lane; d < half; d += WARP) {
        const wide low = values[d], high = values[half + d], cosine = angles[d], sine = angles[half + d];
        y[head * head_dim + d] = narrow(low * cosine - high * sine);
        y[head * head_dim + half + d] = narrow(high * cosine + low * sine);
    }
}

// y = silu(gate) * up, `count` numbers each.
extern "C" __global__ void swiglu(real *y, const real *gate, const real *up, u64 count) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const wide x = widen(gate[i]);
    const real activated = narrow(x / ((wide)1 + exp_wide(-x)));
    y[i] = narrow(widen(activated) * widen(up[i]));
}
