// Tokens at indices that the caller gives: picked, summed, or both, as messages along the edges of a graph are.
#pragma once

#include "kernel_step.h"

// Consecutive integers of a caller's input.
struct TokenIndices {
    int32_t source;          // the number of the input, which has 64-bit integers; -1 for none
    int32_t start;           // the number of the first one

    // Writes them as 32-bit integers.
    void read(const CallerTensors &callers, int64_t count, int32_t *to) const {
        if (source < 0) return;
        const char *from = reinterpret_cast<const char *>(callers.inputs[source]) + int64_t{start} * 8;
        for (int64_t i = 0; i < count; i++) {
            int64_t id;
            memcpy(&id, from + i * 8, 8);
            to[i] = static_cast<int32_t>(id);
        }
    }
};

struct IndexedTokensStep {
    const int32_t *in, *out; // the offset of each channel's map
    const int32_t *chunks;   // the channels of one task are chunks[i] to chunks[i + 1]
    TokenIndices picked;     // the tokens that are picked, if any
    TokenIndices summed;     // the sums that they are added to, if any
    int32_t count;           // of indices
    int32_t tokens;          // of the input
    int32_t sums;            // of the output
};

static int64_t indexed_tokens_scratch(const IndexedTokensStep &step) {
    return 2 * int64_t{step.count} + (int64_t{step.tokens} + step.sums) * LANES;
}

// The sums of up to LANES channels, each of which is a lane of one vector for each token.
static void sum_tokens(const IndexedTokensStep &step, float *memory, const int32_t *picked, const int32_t *summed,
                       float *scratch, int64_t first, int n) {
    float *from = scratch, *sums = from + int64_t{step.tokens} * LANES;
    for (int c = 0; c < n; c++) {
        const float *row = memory + step.in[first + c];
        for (int64_t t = 0; t < step.tokens; t++) from[t * LANES + c] = row[t];
    }
    for (int64_t t = 0; t < step.sums; t++) store(sums + t * LANES, V{});
    for (int64_t i = 0; i < step.count; i++) {
        float *to = sums + int64_t{summed[i]} * LANES;
        store(to, load(to) + load(from + (step.picked.source < 0 ? i : int64_t{picked[i]}) * LANES));
    }
    for (int c = 0; c < n; c++) {
        float *row = memory + step.out[first + c];
        for (int64_t t = 0; t < step.sums; t++) row[t] = sums[t * LANES + c];
    }
}

static void run_indexed_tokens(const IndexedTokensStep &step, float *memory, float *scratch, int task, const CallerTensors &callers) {
    int32_t *picked = reinterpret_cast<int32_t *>(scratch), *summed = picked + step.count;
    step.picked.read(callers, step.count, picked);
    step.summed.read(callers, step.count, summed);
    const int64_t last = step.chunks[task + 1];
    if (step.summed.source >= 0) {
        for (int64_t c = step.chunks[task]; c < last; c += LANES)
            sum_tokens(step, memory, picked, summed, scratch + 2 * int64_t{step.count}, c,
                       static_cast<int>(last - c < LANES ? last - c : LANES));
        return;
    }
    for (int64_t c = step.chunks[task]; c < last; c++) {
        const float *row = memory + step.in[c];
        float *out = memory + step.out[c];
        for (int64_t i = 0; i < step.count; i++) out[i] = row[picked[i]];
    }
}
