// Choosing the next token of each of many rows, with the numbers that the sampler on the host draws.
//
// A thread block of 1024 threads has one target. Weights are exp((logit - max) / temperature) as in `engine/sampling`:
// the exponential is taken in double precision and rounded, which is what the host's library gives but for one in some
// hundred last bits, and sums of weights are in double precision. So the token at which the running sum passes the
// drawn number is the same here and there, unless the number lies within rounding of the border between two.

#define SAMPLERS 1024u
#define NO_TOKEN 0xffffffffu
// Largest vocabulary: SAMPLERS * MAX_CHUNKS.
#define MAX_CHUNKS 1024u

__device__ inline float weight_of(float logit, float max, float temperature) {
    return (float)exp((double)((logit - max) / temperature));
}

// `targets`: for each, the row of `logits` [rows, vocab], the bits of the temperature (0: greedy), and those of a number
// in [0, 1), low half first. `chosen`: the token, NO_TOKEN where logits are not finite, and the bits of its
// log-probability.
extern "C" __global__ void sample(u32 *chosen, const float *logits, const u32 *targets, u32 vocab) {
    __shared__ double sums[MAX_CHUNKS];
    __shared__ float weights[SAMPLERS];
    __shared__ float best_logits[SAMPLERS];
    __shared__ u32 best_tokens[SAMPLERS];
    __shared__ u32 bad[SAMPLERS];
    __shared__ u32 chunk;
    __shared__ double before;
    const u32 thread = threadIdx.x;
    const u32 *target = targets + 4 * blockIdx.x;
    const float *row = logits + (u64)target[0] * vocab;
    const float asked = __uint_as_float(target[1]);
    const bool is_greedy = asked == 0.0f;
    const float temperature = is_greedy ? 1.0f : asked;
    const double uniform = __longlong_as_double((long long)(((u64)target[3] << 32) | target[2]));

    // The largest logit, the first of equals, and whether all are numbers.
    float best = MINUS_INFINITY;
    u32 token = 0, is_bad = 0;
    for (u32 i = thread; i < vocab; i += SAMPLERS) {
        const float logit = row[i];
        if (logit != logit || logit == -MINUS_INFINITY) is_bad = 1;
        if (logit > best) {
            best = logit;
            token = i;
        }
    }
    best_logits[thread] = best;
    best_tokens[thread] = token;
    bad[thread] = is_bad;
    for (u32 step = SAMPLERS / 2; step > 0; step /= 2) {
        __syncthreads();
        if (thread >= step) continue;
        const float other = best_logits[thread + step];
        const u32 other_token = best_tokens[thread + step];
        if (other > best_logits[thread] || (other == best_logits[thread] && other_token < best_tokens[thread])) {
            best_logits[thread] = other;
            best_tokens[thread] = other_token;
        }
        bad[thread] |= bad[thread + step];
    }
    __syncthreads();
    const float max = best_logits[0];
    if (bad[0] || max == MINUS_INFINITY) {
        if (thread == 0) {
            chosen[2 * blockIdx.x] = NO_TOKEN;
            chosen[2 * blockIdx.x + 1] = 0;
        }
        return;
    }

    // The sum of the weights of each SAMPLERS tokens, a warp each: lanes in steps, then over the lanes.
    const u32 chunks = (vocab + SAMPLERS - 1) / SAMPLERS;
    const u32 lane = thread % WARP;
    for (u32 c = thread / WARP; c < chunks; c += SAMPLERS / WARP) {
        double sum = 0;
        for (u32 i = c * SAMPLERS + lane; i < (c + 1) * SAMPLERS && i < vocab; i += WARP) {
            sum += (double)weight_of(row[i], max, temperature);
        }
        for (u32 step = WARP / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
        if (lane == 0) sums[c] = sum;
    }
    __syncthreads();
    double total = 0;
    for (u32 c = 0; c < chunks; c++) total += sums[c];

    if (is_greedy) {
        if (thread == 0) chosen[2 * blockIdx.x] = best_tokens[0];
    } else {
        // The chunk in which the running sum passes the threshold, or the last that has a weight.
        const double threshold = uniform * total;
        if (thread == 0) {
            double sum = 0;
            for (u32 c = 0; c < chunks; c++) {
                if (sums[c] == 0) continue;
                chunk = c;
                before = sum;
                sum += sums[c];
                if (sum > threshold) break;
            }
        }
        __syncthreads();
        const u32 i = chunk * SAMPLERS + thread;
        weights[thread] = i < vocab ? weight_of(row[i], max, temperature) : 0.0f;
        __syncthreads();
        if (thread == 0) {
            double sum = before;
            u32 last = 0;
            for (u32 j = 0; j < SAMPLERS; j++) {
                if (weights[j] == 0.0f) continue;
                sum += (double)weights[j];
                last = j;
                if (sum > threshold) break;
            }
            chosen[2 * blockIdx.x] = chunk * SAMPLERS + last;
        }
    }
    if (thread == 0) {
        const double scaled = (double)((row[chosen[2 * blockIdx.x]] - max) / temperature);
        chosen[2 * blockIdx.x + 1] = __float_as_uint((float)(scaled - log(total)));
    }
}
