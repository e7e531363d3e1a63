// Sums of the numbers of a row.
#pragma once

#include "vectors.h"

enum { RUN = 1 << 16 };  // numbers that are summed at a time, since small numbers are lost in long sums

// The sum of `of(x)` over n numbers; up to LANES - 1 numbers after the last are read, but not used.
template <class Of>
static inline float sum_of(const float *row, int64_t n, Of &&of) {
    float all_runs = 0;
    for (; n > 0; row += RUN, n -= RUN) {
        const int own = n < RUN ? static_cast<int>(n) : RUN;
        V sum = V{};
        int i = 0;
        for (; i + LANES <= own; i += LANES) sum += of(load(row + i));
        if (i < own) sum += masked(of(load(row + i)), count_up() < own - i);
        all_runs += total(sum);
    }
    return all_runs;
}

static inline float sum_of(const float *row, int64_t n) {
    return sum_of(row, n, [](V v) { return v; });
}
