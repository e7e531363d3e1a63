// Sums of the numbers of a row.
#pragma once

#include "vectors.h"

enum { RUN = 1 << 16 };  // numbers that are summed at a time, since small numbers are lost in long sums

// The sum of n numbers; up to LANES - 1 numbers after the last are read, but not used.
static inline float sum_of(const float *row, int64_t n) {
    float all_runs = 0;
    for (; n > 0; row += RUN, n -= RUN) {
        const int own = n < RUN ? static_cast<int>(n) : RUN;
        V sum = V{};
        int i = 0;
        for (; i + LANES <= own; i += LANES) sum += load(row + i);
        if (i < own) sum += masked(load(row + i), count_up() < own - i);
        all_runs += total(sum);
    }
    return all_runs;
}

// Adds up differences of n numbers from `mean`, and their squares; reads up to LANES - 1 numbers after the last.
static inline void add_moments(const float *row, int64_t n, float mean, float &sum, float &squares) {
    for (; n > 0; row += RUN, n -= RUN) {
        const int own = n < RUN ? static_cast<int>(n) : RUN;
        V off = V{}, square = V{};
        int i = 0;
        for (; i + LANES <= own; i += LANES) {
            const V v = load(row + i) - all(mean);
            off += v;
            square += v * v;
        }
        if (i < own) {
            const V v = masked(load(row + i) - all(mean), count_up() < own - i);
            off += v;
            square += v * v;
        }
        sum += total(off);
        squares += total(square);
    }
}
