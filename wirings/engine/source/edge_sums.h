// Sums over edges: out[row] = activation(bias + Σ weight · in[offset + pixel]), for a tile of pixels in registers.
//
// One row at a time is the sparse product, where a record is an edge. Eight rows that share their records are the dense
// product, where an input is loaded once for all of them. Everything between dense and sparse, and every kernel size, is
// the same code with another list of records.
#pragma once

#include "row_sums.h"
#include "stride_phases.h"
#include "tiled_sums.h"

enum {
    BLOCK = REGISTERS == 32 ? 8 : 4,       // rows of a dense group
    TILE = REGISTERS == 32 ? 16 : 12,      // vectors of pixels, one row at a time
    DENSE_TILE = 3,
};

static inline float as_float(int32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// B rows, T vectors. A short tile would wait for its own sums, so U partial sums are accumulated separately.
template <int B, int T, int U>
static inline void add_up(const int32_t *record, const int32_t *end, const float *in, V (&sum)[B][T]) {
    V apart[U][B][T];
    UNROLLED for (int u = 1; u < U; u++)
        UNROLLED for (int b = 0; b < B; b++)
            UNROLLED for (int t = 0; t < T; t++) apart[u][b][t] = V{};
    for (; record + U * (B + 1) <= end; record += U * (B + 1)) {
        UNROLLED for (int u = 0; u < U; u++) {
            const int32_t *own = record + u * (B + 1);
            const float *x = in + own[0];
            if (B == 1) {
                const V w = all(as_float(own[1]));
                UNROLLED for (int t = 0; t < T; t++) {
                    V &s = u ? apart[u][0][t] : sum[0][t];
                    s += w * load(x + t * LANES);
                }
            } else {
                V pixels[T];
                UNROLLED for (int t = 0; t < T; t++) pixels[t] = load(x + t * LANES);
                UNROLLED for (int b = 0; b < B; b++) {
                    const V w = all(as_float(own[1 + b]));
                    UNROLLED for (int t = 0; t < T; t++) sum[b][t] += w * pixels[t];
                }
            }
        }
    }
    for (; U > 1 && record < end; record += B + 1) {
        const V w = all(as_float(record[1]));
        UNROLLED for (int t = 0; t < T; t++) sum[0][t] += w * load(in + record[0] + t * LANES);
    }
    UNROLLED for (int u = 1; u < U; u++)
        UNROLLED for (int b = 0; b < B; b++)
            UNROLLED for (int t = 0; t < T; t++) sum[b][t] += apart[u][b][t];
}

template <int B, int T, int LIMITS>
static inline void put(V (&sum)[B][T], const ClampRange &activation, float *const *to, const int32_t *mask) {
    const V low = all(activation.low), high = all(activation.high);
    UNROLLED for (int b = 0; b < B; b++) {
        if (B > 1 && !to[b]) continue;
        float *out = to[b];
        UNROLLED for (int t = 0; t < T; t++) {
            V v = limited<LIMITS>(sum[b][t], low, high);
            if (mask) v = masked(v, load_mask(mask + t * LANES));
            store(out + t * LANES, v);
        }
    }
}

// The sums of one group for one tile: from `in` + offset to `to` of each row.
template <int B, int T>
static void sum_tile(const int32_t *record, const int32_t *end, const float *bias, const ClampRange &activation,
                     const float *in, float *const *to, const int32_t *mask) {
    V sum[B][T];
    UNROLLED for (int b = 0; b < B; b++)
        UNROLLED for (int t = 0; t < T; t++) sum[b][t] = all(bias[b]);
    add_up<B, T, (B > 1 || T > 6 ? 1 : T > 3 ? 2 : 4)>(record, end, in, sum);
    switch (activation.limits()) {
        case 0: return put<B, T, 0>(sum, activation, to, mask);
        case 1: return put<B, T, 1>(sum, activation, to, mask);
        default: return put<B, T, 2>(sum, activation, to, mask);
    }
}

typedef void (*SumTile)(const int32_t *, const int32_t *, const float *, const ClampRange &, const float *,
                        float *const *, const int32_t *);

template <int B, int T>
struct Tiles {
    static void fill(SumTile *table) {
        table[T] = sum_tile<B, T>;
        Tiles<B, T - 1>::fill(table);
    }
};
template <int B>
struct Tiles<B, 0> {
    static void fill(SumTile *) {}
};

struct Tables {
    SumTile single[TILE + 1] = {}, dense[DENSE_TILE + 1] = {};
    Tables() {
        Tiles<1, TILE>::fill(single);
        Tiles<BLOCK, DENSE_TILE>::fill(dense);
    }
};
static const Tables tables;

// The edges of sums. Rows (output channels) are in groups of `block` that share a list of records: the offset of an input
// map plus that of the place within the kernel, then a weight for each row.
struct EdgeGroups {
    const int32_t *starts;   // where the records of each group begin, in words; one more than there are groups
    const int32_t *records;  // one offset, then `block` weights
    const float *bias;       // one per row
    ClampRange activation;   // of the sums
    int32_t block;           // rows of a group: 1 (sparse) or BLOCK (dense)
    int32_t tile;            // vectors of pixels that are summed at a time: TILE or DENSE_TILE
    TiledEdges tiled;        // if it is not null, instead of the records
};

// The most rows of a chunk; rows of a group where they are summed group by group.
static inline int64_t rows_at_once(const EdgeGroups &edges, const int32_t *chunks, int chunk_count) {
    int64_t most = edges.block;
    for (int i = 0; edges.tiled.starts && i < chunk_count; i++)
        if (chunks[i + 1] - chunks[i] > most) most = chunks[i + 1] - chunks[i];
    return most;
}

// The sums of one group for `vectors` vectors of pixels: from `in` + offset to `to` of each row.
static inline void sum_group(const EdgeGroups &edges, int64_t group, const float *in, float *const *to, const int32_t *mask,
                             int64_t vectors) {
    const SumTile *table = edges.block == 1 ? tables.single : tables.dense;
    const int32_t *record = edges.records + edges.starts[group], *end = edges.records + edges.starts[group + 1];
    const float *bias = edges.bias + group * edges.block;
    const int64_t tiles = ceil_div(vectors, edges.tile);
    if (tiles == 0) return;
    const int64_t each = vectors / tiles, over = vectors % tiles;  // avoids a division per tile
    float *own[BLOCK];
    int64_t from = 0, rest = 0;
    for (int64_t i = 0; i < tiles; i++) {
        rest += over;
        const bool longer = rest >= tiles;
        if (longer) rest -= tiles;
        for (int b = 0; b < edges.block; b++) own[b] = to[b] ? to[b] + from : nullptr;
        table[each + longer](record, end, bias, edges.activation, in + from, own, mask ? mask + from : nullptr);
        from += (each + longer) * LANES;
    }
}

// What becomes of the sums; all but maps need scratch memory.
enum SumsResult {
    MAPS,    // maps
    MEANS,   // the mean of each map
    PHASES,  // maps for a strided convolution
};

struct SumsStep {
    EdgeGroups edges;
    const int32_t *out;      // the offset of the result of each row, or of its phases; -1 for rows that only pad a group
    const int32_t *mask;     // all ones for pixels of the output, zero for the zeros between rows; or null
    const int32_t *chunks;   // the groups of one task are chunks[i] to chunks[i + 1]
    StridePhases phases;     // of the result, if it is PHASES
    int32_t chunk_count;
    int32_t strips;          // into which the pixels of a map are cut; a task is a strip of a chunk
    int32_t result;          // a SumsResult
    int32_t length;          // pixels of a flat map, including zeros between rows
    int32_t height, width, pitch;
    float share;             // of one pixel in the mean of a map
};

static int64_t sums_scratch(const SumsStep &step) {
    if (step.result == MAPS) return 0;
    return rows_at_once(step.edges, step.chunks, step.chunk_count) * ceil_div(step.length, LANES) * LANES;
}

// What becomes of the sums of a row, if they are not a map; `map` is where they are.
static inline void finish_sums(const SumsStep &step, const float *map, float *memory, const int32_t *out) {
    if (step.result == MEANS)
        memory[*out] = sum_of(map, ceil_div(step.length, LANES) * LANES) * step.share;
    else
        for (int y = 0; y < step.height; y++)
            deal_out(map + at(0, y, step.pitch), y, step.width, step.phases, memory, out);
}

static void run_sums(const SumsStep &step, float *memory, float *scratch, int task, const CallerTensors &) {
    const int strip = task / step.chunk_count, chunk = task % step.chunk_count, block = step.edges.block;
    const int64_t vectors = ceil_div(step.length, LANES), phases = step.result == PHASES ? step.phases.count() : 1;
    const int64_t first = cut(vectors, strip, step.strips), last = cut(vectors, strip + 1, step.strips);
    const int64_t from = first * LANES, begin = step.chunks[chunk], end = step.chunks[chunk + 1];
    const int32_t *mask = step.mask ? step.mask + from : nullptr;
    if (step.edges.tiled.starts) {
        const SumPlaces maps = {memory + from, step.out, 0, 0}, rows = {scratch, nullptr, begin, vectors * LANES};
        const SumPlaces &to = step.result == MAPS ? maps : rows;
        sum_chunk(step.edges.tiled, chunk, {memory + from, to, step.edges.bias, step.edges.activation, mask}, last - first);
        for (int64_t row = begin; step.result != MAPS && row < end; row++)
            finish_sums(step, scratch + (row - begin) * vectors * LANES, memory, step.out + row * phases);
        return;
    }
    float *to[BLOCK];
    for (int64_t group = begin; group < end; group++) {
        const int32_t *out = step.out + group * block * phases;
        for (int b = 0; b < block; b++)
            to[b] = out[b * phases] < 0 ? nullptr
                : step.result == MAPS ? memory + out[b] + from : scratch + b * vectors * LANES;
        sum_group(step.edges, group, memory + from, to, mask, last - first);
        for (int b = 0; step.result != MAPS && b < block; b++)
            if (to[b]) finish_sums(step, to[b], memory, out + b * phases);
    }
}
