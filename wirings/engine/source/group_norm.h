// Group norms: one task for each group of channels.
#pragma once

#include <algorithm>
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
    float sum = 0, off = 0, squares = 0;
    for (int c = first; c < last; c++) {
        float own = 0;  // map by map, since small numbers are lost in long sums
        for (int y = 0; y < height; y++) own += sum_of(memory + at(step.in[c], y, step.pitch), width);
        sum += own;
    }
    const float mean = sum / numbers;
    for (int c = first; c < last; c++) {
        float own_off = 0, own = 0;
        for (int y = 0; y < height; y++)
            add_moments(memory + at(step.in[c], y, step.pitch), width, mean, own_off, own);
        off += own_off;
        squares += own;
    }
    const float missing = pixels * static_cast<float>(step.features - (last - first));
    off -= missing * mean;
    squares += missing * mean * mean;
    // What the first sum and rounding have lost of the mean: it would shift all numbers of the group alike.
    const float correction = off / numbers;
    const float factor = 1.0f / std::sqrt(std::max(squares / numbers - correction * correction, 0.0f) + step.epsilon);
    for (int c = first; c < last; c++) {
        // The mean is subtracted first: within one shift, digits of channels that hardly vary would be lost.
        const float times = step.scale[c] * factor;
        const V middle = all(mean), scale = all(times), shift = all(step.shift[c] - correction * times);
        for (int y = 0; y < height; y++) {
            const float *row = memory + at(step.in[c], y, step.pitch);
            float *out = memory + at(step.out[c], y, step.out_pitch);
            for (int64_t x = 0; x < width; x += LANES) {
                const int n = static_cast<int>(width - x < LANES ? width - x : LANES);
                store_part(out + x, (load(row + x) - middle) * scale + shift, n);
            }
        }
    }
}
