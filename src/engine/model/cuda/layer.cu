// What a layer does between its products. Numbers are rounded to `real` where the passes for training round them.

#define NORM_WARPS 4u

// y[0] = x + delta and y[1] = its RMS norm, both [rows, WIDTH] of [2, rows, WIDTH]; without `has_delta`, y[0] = x. One
// thread block of NORM_WARPS warps a row.
extern "C" __global__ void add_norm(real *y, const real *x, const real *delta, const real *weight, u32 has_delta,
                                    double eps) {
    __shared__ wide sums[NORM_WARPS];
    const u64 row = (u64)blockIdx.x * WIDTH;
    real *total = y + row, *normed = y + (u64)gridDim.x * WIDTH + row;
    wide sum = 0;
    for (u32 i = threadIdx.x; i < WIDTH; i += NORM_WARPS * WARP) {
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
    const wide scale = (wide)1 / sqrt_wide(sum / (wide)WIDTH + (wide)eps);
    // Each thread reads what it wrote.
    for (u32 i = threadIdx.x; i < WIDTH; i += NORM_WARPS * WARP) {
        normed[i] = narrow(widen(total[i]) * scale * widen(weight[i]));
    }
}

// Normalises each head with `weight`, if `has_norm`, and rotates it by its token's position. x and y: [tokens, heads,
// HEAD_DIM]; `table`: for each position HEAD_DIM / 2 cosines, then as many sines. `meta` holds the positions from
// `positions_at` on. A warp has one head.
extern "C" __global__ void rotate(real *y, const real *x, const real *weight, const wide *table, const u32 *meta,
                                  u32 positions_at, u32 tokens, u32 heads, u32 has_norm, double eps) {
    __shared__ wide shared[NORM_WARPS][HEAD_DIM];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, half = HEAD_DIM / 2;
    const u64 head = (u64)blockIdx.x * NORM_WARPS + warp;
    if (head >= (u64)tokens * heads) return;
    wide *values = shared[warp];
    wide sum = 0;
    for (u32 d = lane; d < HEAD_DIM; d += WARP) {
        values[d] = widen(x[head * HEAD_DIM + d]);
        sum = fma_wide(values[d], values[d], sum);
    }
    if (has_norm) {
        const wide scale = (wide)1 / sqrt_wide(warp_sum(sum) / (wide)HEAD_DIM + (wide)eps);
        for (u32 d = lane; d < HEAD_DIM; d += WARP) values[d] = widen(narrow(values[d] * scale * widen(weight[d])));
    }
    __syncwarp();
    const wide *angles = table + (u64)meta[positions_at + head / heads] * HEAD_DIM;
    for (u32 d = lane; d < half; d += WARP) {
        const wide low = values[d], high = values[half + d], cosine = angles[d], sine = angles[half + d];
        y[head * HEAD_DIM + d] = narrow(low * cosine - high * sine);
        y[head * HEAD_DIM + half + d] = narrow(high * cosine + low * sine);
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
