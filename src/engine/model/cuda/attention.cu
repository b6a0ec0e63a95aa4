// Causal grouped-query attention through lists of blocks, for prompts and single tokens alike.
//
// Compiled for HEAD_DIM, GROUP (query heads of a key head) and ROWS (query rows of a warp).
//
// A thread block has a tile of query rows of one key head: row i is query i / GROUP and its head i % GROUP. The four
// warps share the keys and values of 32 tokens at a time; lanes are keys while scores are made and dimensions while
// values are added, with an online softmax (Dao et al. 2022) in between. Keys are taken in spans of SPAN, each with a
// softmax of its own that is merged into those before it in their order. So it makes no difference to a bit whether
// one thread block takes all spans of a tile (gridDim.z is 1) or each has its own, merged by `merge_spans`.

#define WARPS 4u
#define KEYS 32u
#define SPAN 256u
#define TILE (WARPS * ROWS)
#define SLICES ((HEAD_DIM + WARP - 1u) / WARP)
// Padded, so that lanes that read the same place of 32 keys, four bytes each, use 32 banks.
#if defined(REAL_BF16)
#define KEY_STRIDE (HEAD_DIM + 2u)
#else
#define KEY_STRIDE (HEAD_DIM + 1u)
#endif

// What one thread loads at a time.
struct VECTOR_ALIGN Vector { u32 words[4]; };

// Copies a head's key or value to shared memory, the part of it that is this thread's.
__device__ inline void load_head(real *to, const real *from, u32 part) {
    if (HEAD_DIM * sizeof(real) % sizeof(Vector) == 0) {
        const Vector v = ((const Vector *)from)[part];
        for (u32 i = 0; i < 4; i++) ((u32 *)to)[4 * part + i] = v.words[i];
    } else {
        to[part] = from[part];
    }
}

// Parts of a head in `load_head`.
#define PARTS (HEAD_DIM * sizeof(real) % sizeof(Vector) == 0 ? (u32)(HEAD_DIM * sizeof(real) / sizeof(Vector)) : HEAD_DIM)

// Two neighbours; the first of them stands at an even place.
__device__ inline void two(const real *x, wide &first, wide &second) {
#if defined(REAL_BF16)
    const u32 word = *(const u32 *)x;
    first = __uint_as_float(word << 16);
    second = __uint_as_float(word & 0xffff0000u);
#else
    first = widen(x[0]);
    second = widen(x[1]);
#endif
}

// A softmax over some keys: largest score, sum of exponentials, weighted values.
struct Softmax {
    wide max;
    wide sum;
    wide values[SLICES];
};

__device__ inline void clear(Softmax &s) {
    s.max = MINUS_INFINITY;
    s.sum = 0;
    #pragma unroll
    for (u32 j = 0; j < SLICES; j++) s.values[j] = 0;
}

// Adds the keys of `next`, of which there is one at least, behind those of `all`.
__device__ inline void merge(Softmax &all, const Softmax &next) {
    if (all.sum == 0) {
        all = next;
        return;
    }
    const wide max = next.max > all.max ? next.max : all.max;
    const wide old_share = exp_wide(all.max - max), new_share = exp_wide(next.max - max);
    all.max = max;
    all.sum = fma_wide(all.sum, old_share, next.sum * new_share);
    #pragma unroll
    for (u32 j = 0; j < SLICES; j++) all.values[j] = fma_wide(all.values[j], old_share, next.values[j] * new_share);
}

__device__ inline void write_out(real *out, const Softmax &s, u32 lane) {
    const wide inverse = (wide)1 / s.sum;
    #pragma unroll
    for (u32 j = 0; j < SLICES; j++) {
        const u32 d = lane + WARP * j;
        if (d < HEAD_DIM) out[d] = narrow(s.values[j] * inverse);
    }
}

// `q` and `out`: [tokens, heads, HEAD_DIM]. `pool` from `keys_at` and `values_at` on: [blocks, 32, kv_heads, HEAD_DIM].
// `meta` holds, from `tiles_at` on, a segment and a first row for each tile, and from `segments_at` on, for each
// segment, its first token, its number of tokens, the number of keys before them, and where the list of its blocks
// begins. `spans`: [SPANs, tokens * heads, HEAD_DIM + 2], used if gridDim.z is not 1.
extern "C" __global__ void attend(real *out, wide *spans, const real *q, const real *pool, const u32 *meta, u64 keys_at,
                                  u64 values_at, u32 tiles_at, u32 segments_at, u32 tokens, double scale) {
    SHARED_BYTES(shared);
    wide *queries = (wide *)shared;                          // [TILE][HEAD_DIM]
    wide *weights = queries + TILE * HEAD_DIM;               // [TILE][KEYS]
    real *keys = (real *)(weights + TILE * KEYS);            // [KEYS][KEY_STRIDE]
    real *values = keys + KEYS * KEY_STRIDE;                 // [KEYS][HEAD_DIM]

    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 kv_head = blockIdx.y, kv_heads = gridDim.y, heads = kv_heads * GROUP;
    const u32 *tile = meta + tiles_at + 2 * blockIdx.x;
    const u32 *segment = meta + segments_at + 4 * tile[0];
    const u32 first_token = segment[0], rows = segment[1] * GROUP, history = segment[2], first_row = tile[1];
    const u32 *blocks = meta + segment[3];
    const u32 last_row = first_row + TILE < rows ? first_row + TILE : rows;
    const u32 longest = history + (last_row - 1) / GROUP + 1;
    if (gridDim.z > 1 && blockIdx.z * SPAN >= longest) return;

    for (u32 i = threadIdx.x; i < (last_row - first_row) * HEAD_DIM; i += WARPS * WARP) {
        const u32 row = first_row + i / HEAD_DIM;
        const u64 head = (u64)(first_token + row / GROUP) * heads + kv_head * GROUP + row % GROUP;
        queries[i] = widen(q[head * HEAD_DIM + i % HEAD_DIM]) * (wide)scale;
    }

    // Rows of a warp are WARPS apart, so that few rows use all warps. A row beyond the last sees no key.
    u32 seen[ROWS];
    Softmax all[ROWS];
    #pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
        const u32 row = first_row + r * WARPS + warp;
        seen[r] = row < last_row ? history + row / GROUP + 1 : 0;
        clear(all[r]);
    }

    const u32 first_span = gridDim.z > 1 ? blockIdx.z : 0;
    const u32 end_span = gridDim.z > 1 ? blockIdx.z + 1 : (longest + SPAN - 1) / SPAN;
    for (u32 span = first_span; span < end_span; span++) {
        Softmax part[ROWS];
        #pragma unroll
        for (u32 r = 0; r < ROWS; r++) clear(part[r]);
        const u32 end = (span + 1) * SPAN < longest ? (span + 1) * SPAN : longest;
        for (u32 first_key = span * SPAN; first_key < end; first_key += KEYS) {
            __syncthreads();
            const u64 block = (u64)blocks[first_key / KEYS] * KEYS;
            for (u32 i = threadIdx.x; i < KEYS * PARTS; i += WARPS * WARP) {
                const u32 key = i / PARTS, part = i % PARTS;
                const u64 at = ((block + key) * kv_heads + kv_head) * HEAD_DIM;
                load_head(keys + key * KEY_STRIDE, pool + keys_at + at, part);
                load_head(values + key * HEAD_DIM, pool + values_at + at, part);
            }
            __syncthreads();
            wide score[ROWS];
            #pragma unroll
            for (u32 r = 0; r < ROWS; r++) score[r] = 0;
            for (u32 d = 0; d < HEAD_DIM; d += 2) {
                wide first, second;
                two(keys + lane * KEY_STRIDE + d, first, second);
                #pragma unroll
                for (u32 r = 0; r < ROWS; r++) {
                    const wide *query = queries + (r * WARPS + warp) * HEAD_DIM + d;
                    score[r] = fma_wide(query[1], second, fma_wide(query[0], first, score[r]));
                }
            }
            #pragma unroll
            for (u32 r = 0; r < ROWS; r++) {
                // The same for all lanes of a warp.
                if (seen[r] <= first_key) continue;
                const u32 visible = seen[r] - first_key < KEYS ? seen[r] - first_key : KEYS;
                Softmax &s = part[r];
                const wide masked = lane < visible ? score[r] : (wide)MINUS_INFINITY;
                const wide largest = warp_max(masked);
                const wide max = largest > s.max ? largest : s.max;
                const wide share = exp_wide(s.max - max);
                const wide weight = lane < visible ? exp_wide(masked - max) : 0;
                s.max = max;
                s.sum = fma_wide(s.sum, share, warp_sum(weight));
                #pragma unroll
                for (u32 j = 0; j < SLICES; j++) s.values[j] *= share;
                wide *shares = weights + (r * WARPS + warp) * KEYS;
                shares[lane] = weight;
                __syncwarp();
                for (u32 key = 0; key < visible; key++) {
                    const wide w = shares[key];
                    #pragma unroll
                    for (u32 j = 0; j < SLICES; j++) {
                        const u32 d = lane + WARP * j;
                        if (d < HEAD_DIM) s.values[j] = fma_wide(w, widen(values[key * HEAD_DIM + d]), s.values[j]);
                    }
                }
            }
        }
        #pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            if (seen[r] > span * SPAN) merge(all[r], part[r]);
        }
    }

    #pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
        const u32 row = first_row + r * WARPS + warp;
        if (row >= last_row || seen[r] <= first_span * SPAN) continue;
        const u64 head = (u64)(first_token + row / GROUP) * heads + kv_head * GROUP + row % GROUP;
        if (gridDim.z == 1) {
            write_out(out + head * HEAD_DIM, all[r], lane);
            continue;
        }
        wide *part = spans + ((u64)blockIdx.z * tokens * heads + head) * (HEAD_DIM + 2);
        #pragma unroll
        for (u32 j = 0; j < SLICES; j++) {
            const u32 d = lane + WARP * j;
            if (d < HEAD_DIM) part[d] = all[r].values[j];
        }
        if (lane == 0) {
            part[HEAD_DIM] = all[r].max;
            part[HEAD_DIM + 1] = all[r].sum;
        }
    }
}

// Puts together what `attend` has left in `spans`; a warp has one head of one token. `meta` begins with each token's
// position.
extern "C" __global__ void merge_spans(real *out, const wide *spans, const u32 *meta, u32 tokens, u32 heads) {
    const u32 lane = threadIdx.x % WARP;
    const u32 head = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (head >= tokens * heads) return;
    const u32 seen = meta[head / heads] + 1;
    Softmax all;
    clear(all);
    for (u32 span = 0; span * SPAN < seen; span++) {
        const wide *part = spans + ((u64)span * tokens * heads + head) * (HEAD_DIM + 2);
        Softmax next;
        #pragma unroll
        for (u32 j = 0; j < SLICES; j++) {
            const u32 d = lane + WARP * j;
            next.values[j] = d < HEAD_DIM ? part[d] : 0;
        }
        next.max = part[HEAD_DIM];
        next.sum = part[HEAD_DIM + 1];
        merge(all, next);
    }
    write_out(out + (u64)head * HEAD_DIM, all, lane);
}
