// Linear layers on single numbers whose weights are stored in bfloat16, the upper half of a float. They are widened as
// they are read, so nothing is rounded here: the sums are those of `linear.h`, in half as many bytes of weights.
#pragma once

#include "linear.h"

static inline V low_half(U pair) { return reinterpret_cast<V>(pair << 16); }
static inline V high_half(U pair) { return reinterpret_cast<V>(pair & 0xffff0000u); }

// Weights are stored as in `LinearStep`, but with those of two inputs, one after the other, in one word.
struct Bfloat16LinearStep {
    const int32_t *in;       // the offset of each input
    const int32_t *weights;  // (panels, pairs of inputs, PANEL · LANES); the first of a pair is the lower half
    const float *bias;       // one per output, padded to whole panels
    const int32_t *chunks;   // the panels of one task are chunks[i] to chunks[i + 1]
    ClampRange activation;
    int32_t inputs, outputs;
    int32_t apart;           // whether the inputs are not contiguous
    int32_t out;             // the offset of the first output, after which the others follow
};

static int64_t bfloat16_linear_scratch(const Bfloat16LinearStep &step) { return step.inputs; }

static void run_bfloat16_linear(const Bfloat16LinearStep &step, float *memory, float *scratch, int task,
                                const CallerTensors &) {
    const float *x = memory + step.in[0];
    if (step.apart) {
        for (int i = 0; i < step.inputs; i++) scratch[i] = memory[step.in[i]];
        x = scratch;
    }
    const int64_t pairs = ceil_div(step.inputs, 2);
    for (int64_t panel = step.chunks[task]; panel < step.chunks[task + 1]; panel++) {
        const int32_t *w = step.weights + panel * pairs * PANEL * LANES;
        V even[PANEL], odd[PANEL];
        for (int v = 0; v < PANEL; v++) {
            even[v] = load(step.bias + (panel * PANEL + v) * LANES);
            odd[v] = V{};
        }
        int64_t i = 0;
        for (; i + 2 <= step.inputs; i += 2, w += PANEL * LANES) {
            const V a = all(x[i]), b = all(x[i + 1]);
            UNROLLED for (int v = 0; v < PANEL; v++) {
                const U pair = reinterpret_cast<U>(load_mask(w + v * LANES));
                even[v] += a * low_half(pair);
                odd[v] += b * high_half(pair);
            }
        }
        if (i < step.inputs)
            for (int v = 0; v < PANEL; v++)
                even[v] += all(x[i]) * low_half(reinterpret_cast<U>(load_mask(w + v * LANES)));
        for (int v = 0; v < PANEL; v++) {
            const int64_t first = (panel * PANEL + v) * LANES, left = step.outputs - first;
            if (left > 0)
                store_part(memory + step.out + first, limited(even[v] + odd[v], step.activation),
                           static_cast<int>(left < LANES ? left : LANES));
        }
    }
}

// LANES rows at a time, padded to the longest of them. An edge is one word: the number of its input, and its weight as the
// upper half. Edges that only pad have the number after the last input, which is zero.
struct Bfloat16SparseLinearStep {
    const int32_t *in;       // the offset of each input
    const int32_t *starts;   // where the edges of each LANES rows begin
    const int32_t *edges;    // LANES at a time
    const float *bias;       // one per row
    const int32_t *out;      // the offset of each row's result; -1 for rows that only pad
    const int32_t *chunks;   // the rows of one task are LANES · chunks[i] to LANES · chunks[i + 1]
    ClampRange activation;
    int32_t inputs;          // at most 65,535
    int32_t apart;           // whether the inputs are not contiguous
};

static int64_t bfloat16_sparse_scratch(const Bfloat16SparseLinearStep &step) { return int64_t{step.inputs} + 1; }

static void run_bfloat16_sparse_linear(const Bfloat16SparseLinearStep &step, float *memory, float *scratch, int task,
                                       const CallerTensors &) {
    if (step.apart)
        for (int i = 0; i < step.inputs; i++) scratch[i] = memory[step.in[i]];
    else
        memcpy(scratch, memory + step.in[0], sizeof(float) * static_cast<size_t>(step.inputs));
    scratch[step.inputs] = 0;
    for (int64_t slice = step.chunks[task]; slice < step.chunks[task + 1]; slice++) {
        float sum[LANES];
        memcpy(sum, step.bias + slice * LANES, sizeof sum);
        const int32_t *end = step.edges + step.starts[slice + 1];
        for (const int32_t *edge = step.edges + step.starts[slice]; edge < end; edge += LANES) {
            const V weights = high_half(reinterpret_cast<U>(load_mask(edge)));
            float w[LANES];
            memcpy(w, &weights, sizeof w);
            for (int i = 0; i < LANES; i++) sum[i] += w[i] * scratch[edge[i] & 0xffff];
        }
        V v;
        memcpy(&v, sum, sizeof v);
        v = limited(v, step.activation);
        for (int i = 0; i < LANES; i++)
            if (step.out[slice * LANES + i] >= 0) memory[step.out[slice * LANES + i]] = v[i];
    }
}
