// Linear layers on single numbers, dense and sparse.
#pragma once

#include "kernel_step.h"

enum { PANEL = 4 };  // vectors of outputs that a dense linear layer keeps in registers

// Weights are stored by panels of outputs, and by inputs within a panel, so that they are read once, in order.
struct LinearStep {
    const int32_t *in;       // the offset of each input
    const float *weights;    // (panels, inputs, PANEL · LANES)
    const float *bias;       // one per output, padded to whole panels
    const int32_t *chunks;   // the panels of one task are chunks[i] to chunks[i + 1]
    ClampRange activation;
    int32_t inputs, outputs;
    int32_t apart;           // whether the inputs are not contiguous
    int32_t out;             // the offset of the first output, after which the others follow
};

static int64_t linear_scratch(const LinearStep &step) { return step.inputs; }

static void run_linear(const LinearStep &step, float *memory, float *scratch, int task, const CallerTensors &) {
    const float *x = memory + step.in[0];
    if (step.apart) {
        for (int i = 0; i < step.inputs; i++) scratch[i] = memory[step.in[i]];
        x = scratch;
    }
    for (int64_t panel = step.chunks[task]; panel < step.chunks[task + 1]; panel++) {
        const float *w = step.weights + panel * step.inputs * PANEL * LANES;
        V even[PANEL], odd[PANEL];
        for (int v = 0; v < PANEL; v++) {
            even[v] = load(step.bias + (panel * PANEL + v) * LANES);
            odd[v] = V{};
        }
        int64_t i = 0;
        for (; i + 2 <= step.inputs; i += 2, w += 2 * PANEL * LANES) {
            const V a = all(x[i]), b = all(x[i + 1]);
            UNROLLED for (int v = 0; v < PANEL; v++) {
                even[v] += a * load(w + v * LANES);
                odd[v] += b * load(w + (PANEL + v) * LANES);
            }
        }
        if (i < step.inputs)
            for (int v = 0; v < PANEL; v++) even[v] += all(x[i]) * load(w + v * LANES);
        for (int v = 0; v < PANEL; v++) {
            const int64_t first = (panel * PANEL + v) * LANES, left = step.outputs - first;
            if (left > 0)
                store_part(memory + step.out + first, limited(even[v] + odd[v], step.activation),
                           static_cast<int>(left < LANES ? left : LANES));
        }
    }
}

// LANES rows at a time, padded to the longest of them; a record has the offsets of their inputs, then their weights.
struct SparseLinearStep {
    const int32_t *starts;   // where the records of each LANES rows begin, in words
    const int32_t *records;  // LANES offsets, then LANES weights
    const float *bias;       // one per row
    const int32_t *out;      // the offset of each row's result; -1 for rows that only pad
    const int32_t *chunks;   // the rows of one task are LANES · chunks[i] to LANES · chunks[i + 1]
    ClampRange activation;
};

static void run_sparse_linear(const SparseLinearStep &step, float *memory, float *, int task, const CallerTensors &) {
    for (int64_t slice = step.chunks[task]; slice < step.chunks[task + 1]; slice++) {
        float sum[LANES];
        memcpy(sum, step.bias + slice * LANES, sizeof sum);
        const int32_t *end = step.records + step.starts[slice + 1];
        for (const int32_t *record = step.records + step.starts[slice]; record < end; record += 2 * LANES) {
            float w[LANES];
            memcpy(w, record + LANES, sizeof w);
            for (int i = 0; i < LANES; i++) sum[i] += w[i] * memory[record[i]];
        }
        V v;
        memcpy(&v, sum, sizeof v);
        v = limited(v, step.activation);
        for (int i = 0; i < LANES; i++)
            if (step.out[slice * LANES + i] >= 0) memory[step.out[slice * LANES + i]] = v[i];
    }
}
