// Embeddings of tokens.
#pragma once

#include "kernel_step.h"

struct EmbeddingStep {
    const float *table;      // (rows, channels)
    const int32_t *out;      // the offset of each channel's map
    int32_t channels, tokens;
    int32_t source;          // the number of the caller's input with the tokens, as 64-bit integers
    int32_t tiles;           // tasks
};

static void run_embedding(const EmbeddingStep &step, float *memory, float *, int task, const CallerTensors &callers) {
    const char *ids = reinterpret_cast<const char *>(callers.inputs[step.source]);
    const int64_t first = cut(step.tokens, task, step.tiles), last = cut(step.tokens, task + 1, step.tiles);
    for (int64_t t = first; t < last; t++) {
        int64_t id;
        memcpy(&id, ids + t * 8, 8);
        const float *row = step.table + id * step.channels;
        for (int c = 0; c < step.channels; c++) memory[step.out[c] + t] = row[c];
    }
}
