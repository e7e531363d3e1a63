// Sums over edges in narrow tiles: what many rows read of their inputs stays in the level-1 cache.
//
// Row by row (`edge_sums.h`), every edge loads a map from the level-2 cache, whose bandwidth is the limit. Here, all rows of
// a chunk are summed for a tile of a few vectors before the next tile begins. If the inputs of a tile do not fit into the
// cache, they are cut into blocks, and the sums of a row wait in memory until its next block.
//
// Rows are sorted by their number of edges within each block, since branches that depend on it are then predicted. A
// segment is a sequence of rows with equally many edges; an entry is one of its rows.
#pragma once

#include "vectors.h"

enum { TILED = 4 };  // vectors of a tile

enum SegmentFlags {
    FIRST = 1,  // sums begin with the bias
    LAST = 2,   // and end with the activation and the mask
};

struct TiledEdges {
    const int32_t *starts;    // the first segment, entry and edge of each chunk, and those after the last; or null
    const int32_t *segments;  // edges of each entry, entries, flags
    const int32_t *rows;      // one per entry
    const int32_t *places;    // one per edge: the offset of an input map plus that of the place within the kernel
    const float *weights;     // one per edge; WEIGHTS more may be read
};

// Where the sums of a row are: at an offset of its own, or one row after the other.
struct SumPlaces {
    float *to;
    const int32_t *offsets;   // of each row, or null
    int64_t first, pitch;     // the first row, and the floats from one row to the next, without offsets

    float *operator[](int32_t row) const { return to + (offsets ? offsets[row] : (row - first) * pitch); }
};

// A few weights, each of which becomes a vector. Shuffling them saves one of the loads, which are the limit.
constexpr int WEIGHTS = 8;

#if defined(__AVX512F__)
struct Spread {
    __m512i lane[WEIGHTS];

    Spread() {
        for (int i = 0; i < WEIGHTS; i++) {
            lane[i] = _mm512_set1_epi32(i);
            asm("" : "+v"(lane[i]));  // stays in a register
        }
    }
    struct Weights {
        __m512 all;
    };
    Weights read(const float *weights) const { return {_mm512_castps256_ps512(_mm256_loadu_ps(weights))}; }
    V operator()(const Weights &weights, int i) const {
        return reinterpret_cast<V>(_mm512_maskz_permutexvar_ps(0xffff, lane[i], weights.all));
    }
};
#else
struct Spread {
    struct Weights {
        const float *all;
    };
    Weights read(const float *weights) const { return {weights}; }
    V operator()(const Weights &weights, int i) const { return all(weights.all[i]); }
};
#endif

// What all segments of a tile have in common.
struct TileSums {
    const float *in;
    SumPlaces to;
    const float *bias;
    ClampRange activation;
    const int32_t *mask;      // or null
};

// T vectors, and REST edges after those that are read WEIGHTS at a time.
template <int T, int REST>
static void sum_segment(const TileSums &tile, int flags, int entries, int full, const int32_t *rows, const int32_t *places,
                        const float *weights) {
    constexpr int APART = T > 2 ? 2 : 4;  // partial sums: one would wait for itself
    const Spread spread;
    const float *const in = tile.in;
    const V low = all(tile.activation.low), high = all(tile.activation.high);
    for (int entry = 0; entry < entries; entry++) {
        const int32_t row = rows[entry];
        float *const to = tile.to[row];
        V sum[APART][T];
        UNROLLED for (int t = 0; t < T; t++) sum[0][t] = flags & FIRST ? all(tile.bias[row]) : load(to + t * LANES);
        UNROLLED for (int a = 1; a < APART; a++)
            UNROLLED for (int t = 0; t < T; t++) sum[a][t] = V{};
        const auto add = [&](const typename Spread::Weights &own, int i) {
            const float *x = in + places[i];
            const V w = spread(own, i);
            UNROLLED for (int t = 0; t < T; t++) sum[i % APART][t] += w * load(x + t * LANES);
        };
        for (int i = 0; i < full; i++, places += WEIGHTS, weights += WEIGHTS) {
            const typename Spread::Weights own = spread.read(weights);
            UNROLLED for (int w = 0; w < WEIGHTS; w++) add(own, w);
        }
        if (REST) {
            const typename Spread::Weights own = spread.read(weights);
            UNROLLED for (int w = 0; w < REST; w++) add(own, w);
            places += REST;
            weights += REST;
        }
        UNROLLED for (int t = 0; t < T; t++) {
            V v = sum[0][t];
            UNROLLED for (int a = 1; a < APART; a++) v += sum[a][t];
            if (flags & LAST) {
                v = limited<2>(v, low, high);
                if (tile.mask) v = masked(v, load_mask(tile.mask + t * LANES));
            }
            store(to + t * LANES, v);
        }
    }
}

typedef void (*SumSegment)(const TileSums &, int, int, int, const int32_t *, const int32_t *, const float *);

template <int T, int REST>
struct Segments {
    static void fill(SumSegment (*table)[WEIGHTS]) {
        table[T][REST] = sum_segment<T, REST>;
        if constexpr (REST > 0)
            Segments<T, REST - 1>::fill(table);
        else if constexpr (T > 1)
            Segments<T - 1, WEIGHTS - 1>::fill(table);
    }
};

struct SegmentTable {
    SumSegment of[TILED + 1][WEIGHTS] = {};
    SegmentTable() { Segments<TILED, WEIGHTS - 1>::fill(of); }
};
static const SegmentTable segment_table;

// The sums of one chunk of rows for `vectors` vectors of pixels.
static inline void sum_chunk(const TiledEdges &edges, int chunk, TileSums tile, int64_t vectors) {
    const int32_t *const start = edges.starts + 3 * chunk, *const end = start + 3;
    const int64_t tiles = (vectors + TILED - 1) / TILED;
    for (int64_t i = 0; i < tiles; i++) {
        const int own = static_cast<int>(vectors * (i + 1) / tiles - vectors * i / tiles);
        const int32_t *rows = edges.rows + start[1], *places = edges.places + start[2];
        const float *weights = edges.weights + start[2];
        for (int segment = start[0]; segment < end[0]; segment++) {
            const int32_t *about = edges.segments + 3 * static_cast<int64_t>(segment);
            const int each = about[0], entries = about[1];
            segment_table.of[own][each % WEIGHTS](tile, about[2], entries, each / WEIGHTS, rows, places, weights);
            rows += entries;
            places += static_cast<int64_t>(each) * entries;
            weights += static_cast<int64_t>(each) * entries;
        }
        tile.in += own * LANES;
        tile.to.to += own * LANES;
        if (tile.mask) tile.mask += own * LANES;
    }
}
