// Group norms: one task for each group of channels.
#pragma once

#include <cmath>

#include "kernel_step.h"
#include "row_sums.h"

struct GroupNormStep {
    const int32_t *in, *out;  // the offset of each channel's map
    const float *scale, *shift;
    const int32_t *starts;    // the first channel of each group; one more than there are groups
    int32_t height, width, pitch, out_pitch;
    int32_t features;         // channels of every group, those that are always zero and missing included
    float epsilon;
};

static void run_group_norm(const GroupNormStep &step, float *memory, float *, int task, const CallerTensors &) {
    const bool flat = step.pitch == step.width && step.out_pitch == step.width;  // a map is one long row
    const int height = flat ? 1 : step.height;
    const int64_t width = flat ? int64_t{step.height} * step.width : step.width;
    const int first = step.starts[task], last = step.starts[task + 1];
    const float pixels = static_cast<float>(step.height) * static_cast<float>(step.width);
    const float numbers = pixels * static_cast<float>(step.features);
    float sum = 0, squares = 0;
    for (int c = first; c < last; c++) {
        float own = 0;  // map by map, since small numbers are lost in long sums
        for (int y = 0; y < height; y++) own += sum_of(memory + at(step.in[c], y, step.pitch), width);
        sum += own;
    }
    const float mean = sum / numbers;
    for (int c = first; c < last; c++) {
        float own = 0;
        for (int y = 0; y < height; y++)
            own += sum_of(memory + at(step.in[c], y, step.pitch), width,
                          [&](V v) { return (v - all(mean)) * (v - all(mean)); });
        squares += own;
    }
    squares += pixels * static_cast<float>(step.features - (last - first)) * mean * mean;
    const float factor = 1.0f / std::sqrt(squares / numbers + step.epsilon);
    for (int c = first; c < last; c++) {
        const float times = step.scale[c] * factor;
        const V scale = all(times), shift = all(step.shift[c] - mean * times);
        for (int y = 0; y < height; y++) {
            const float *row = memory + at(step.in[c], y, step.pitch);
            float *out = memory + at(step.out[c], y, step.out_pitch);
            for (int64_t x = 0; x < width; x += LANES) {
                const int n = static_cast<int>(width - x < LANES ? width - x : LANES);
                store_part(out + x, load(row + x) * scale + shift, n);
            }
        }
    }
}
