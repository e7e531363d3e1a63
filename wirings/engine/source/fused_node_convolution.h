// A node's convolution, fused: sums over edges, an activation, and a depthwise 3 × 3 convolution. The map between them
// never leaves the level-1 cache. A task is a strip of rows and a chunk of channels.
#pragma once

#include "bytes.h"
#include "edge_sums.h"

// Maps may be cut into bands of rows, one for each thread, in separate memory, so that what a thread works on stays in
// its cache. A band also holds the few rows of its neighbours that the next step reads. A strip is within one band.
struct Strip {
    int32_t from, to;        // rows of the output
    int32_t band, first;     // the band of the inputs, and the row of the map at which it begins
    int32_t out_band, out_first;
};

struct NodesStep {
    EdgeGroups edges;
    const float *kernels;    // nine per row
    const float *kernel_bias;  // one per row
    const int32_t *out;      // the offset of the map of each row; -1 for rows that only pad a group
    const int32_t *chunks;   // the groups of one task are chunks[i] to chunks[i + 1]
    const Strip *strip;      // the strips; a task is a strip of a chunk
    const int32_t *kept;     // the first row of each band of the output, and the row after its last; or null
    CallerPhases caller;     // the input that is read in place, if the sums are over one
    ClampRange activation;   // of the results of the convolution
    ByteResults bytes;       // of these results
    int32_t chunk_count, strips;
    int32_t stride;          // of the convolution: 1 or 2
    int32_t height, width, pitch;  // of the sums
    int32_t out_width, out_pitch;
    int32_t bands;
    int64_t band_floats;     // from the memory of one band to that of the next
};

enum { MARGIN = 2 * LINE };  // floats before and after a map in scratch memory that may be read, but are not used

// The masks of a block of columns: false where the left or right column of a kernel is outside the map.
static inline I inside(int first, int step, int width) {
    const I columns = first + step * count_up();
    return (columns >= 0) & (columns < width);
}

struct PixelRow {
    V left, centre, right;
};

template <int STRIDE>
static inline PixelRow read_row(const float *row, I left, I right) {
    if (STRIDE == 1) return {masked(load(row - 1), left), load(row), masked(load(row + 1), right)};
    const V a = load(row), b = load(row + LANES), c = load(row - 2), d = load(row + LANES - 2);
    return {masked(odds(c, d), left), evens(a, b), masked(odds(a, b), right)};
}

static inline V weighted(const PixelRow &row, const V *kernel, V start) {
    return row.left * kernel[0] + (row.centre * kernel[1] + (row.right * kernel[2] + start));
}

// Compute rows `from` to `to` of the output; `map` is where row 0 of the input would begin. LIMITS: see `limited`.
template <int STRIDE, int LIMITS>
static void convolve(const NodesStep &step, const float *map, const float *kernel, float bias, float *out, int from, int to) {
    V k[9];
    for (int i = 0; i < 9; i++) k[i] = all(kernel[i]);
    const V start = all(bias), low = all(step.activation.low), high = all(step.activation.high);
    const int height = step.height, width = step.width, pitch = step.pitch, out_pitch = step.out_pitch;
    const PixelRow none = {V{}, V{}, V{}};
    for (int x = 0; x < step.out_width; x += LANES) {
        const int n = step.out_width - x < LANES ? step.out_width - x : LANES;
        const I left = inside(x * STRIDE - 1, STRIDE, width), right = inside(x * STRIDE + 1, STRIDE, width);
        const float *next = map + at(x * STRIDE, int64_t{from} * STRIDE - 1, pitch);  // the row above the first
        const float *const end = map + at(x * STRIDE, height, pitch);
        float *row = out + at(x, from, out_pitch);
        const auto read = [&]() {
            const PixelRow found = read_row<STRIDE>(next, left, right);
            next += pitch;
            return found;
        };
        const auto write = [&](const PixelRow &above, const PixelRow &centre, const PixelRow &below) {
            const V v = weighted(above, k, start) + weighted(centre, k + 3, V{}) + weighted(below, k + 6, V{});
            store_part(row, limited<LIMITS>(v, low, high), n);
            row += out_pitch;
        };
        PixelRow a = none;
        if (from > 0) a = read(); else next += pitch;
        int left_over = to - from;
        if (STRIDE == 1) {
            PixelRow b = read();
            const bool last = to == height;
            left_over -= last;
            for (; left_over >= 3; left_over -= 3) {  // three at a time, so that no row is moved between registers
                PixelRow c = read();
                write(a, b, c);
                a = read();
                write(b, c, a);
                b = read();
                write(c, a, b);
            }
            for (; left_over > 0; left_over--) {
                const PixelRow c = read();
                write(a, b, c);
                a = b;
                b = c;
            }
            if (last) write(a, b, none);
        } else {
            for (; left_over > 0; left_over--) {
                const PixelRow b = read();
                PixelRow c = none;
                if (next < end) c = read();
                write(a, b, c);
                a = c;
            }
        }
    }
}

typedef void (*Convolve)(const NodesStep &, const float *, const float *, float, float *, int, int);

static Convolve convolution(const NodesStep &step) {
    static const Convolve all_of_them[2][3] = {{convolve<1, 0>, convolve<1, 1>, convolve<1, 2>},
                                               {convolve<2, 0>, convolve<2, 1>, convolve<2, 2>}};
    return all_of_them[step.stride - 1][step.activation.limits()];
}

// The first row of the sums that a strip of the output reads, and the row after the last.
static inline int top_of(const NodesStep &step, const Strip &strip) {
    const int top = strip.from * step.stride - 1;
    return top < 0 ? 0 : top;
}
static inline int bottom_of(const NodesStep &step, const Strip &strip) {
    const int64_t bottom = at(2, strip.to - 1, step.stride);
    return bottom > step.height ? step.height : static_cast<int>(bottom);
}

// Floats of scratch memory for one map.
static int64_t map_of(const NodesStep &step) {
    int rows = 0;
    for (int i = 0; i < step.strips; i++) {
        const int own = bottom_of(step, step.strip[i]) - top_of(step, step.strip[i]);
        rows = own > rows ? own : rows;
    }
    const int64_t map = static_cast<int64_t>(rows) * step.pitch + 2 * LINE + 2 * MARGIN + 2 * LANES;
    return (map + LINE - 1) / LINE * LINE;
}

// Floats of scratch memory for the results of one row, if only their bytes are kept.
static int64_t results_of(const NodesStep &step) {
    int64_t rows = 0;
    for (int i = 0; step.bytes.only && i < step.strips; i++) {
        const int64_t own = step.strip[i].to - step.strip[i].from;
        rows = own > rows ? own : rows;
    }
    return rows * step.out_pitch;
}

static int64_t nodes_scratch(const NodesStep &step) {
    const int64_t maps = rows_at_once(step.edges, step.chunks, step.chunk_count) * map_of(step);
    return maps + step.caller.size() + results_of(step) + LINE;
}

// Copy rows to the other bands that hold them.
static inline void pass_on(const NodesStep &step, const Strip &strip, const float *own, float *memory, int32_t out) {
    for (int band = 0; band < step.bands; band++) {
        const int first = step.kept[2 * band], last = step.kept[2 * band + 1];
        if (band == strip.out_band) continue;
        for (int y = strip.from > first ? strip.from : first; y < strip.to && y < last; y++)
            memcpy(memory + band * step.band_floats + at(out, y - first, step.out_pitch), own + at(0, y, step.out_pitch),
                   sizeof(float) * step.out_width);
    }
}

static void run_nodes(const NodesStep &step, float *memory, float *scratch, int task, const CallerTensors &callers) {
    const Strip &strip = step.strip[task / step.chunk_count];
    const int chunk = task % step.chunk_count, top = top_of(step, strip), bottom = bottom_of(step, strip);
    const int origin = step.caller.source < 0 ? strip.first : top;
    const int64_t start = at(0, top - origin, step.pitch) / LINE * LINE;  // aligned to cache lines, which load faster
    const int64_t vectors = ceil_div(at(step.width, bottom - 1 - origin, step.pitch) - start, LANES);
    const float *in = memory + strip.band * step.band_floats + start;
    if (step.caller.source >= 0) {
        float *phases = scratch + step.caller.zeros;
        make_phases(step.caller, step.pitch, callers.inputs[step.caller.source], phases, top, bottom);
        in = phases;
        scratch += step.caller.size();
    }
    float *out = memory + strip.out_band * step.band_floats;
    const int64_t each = map_of(step);
    const Convolve convolved = convolution(step);
    float *results = scratch - at(0, strip.from, step.out_pitch);  // of one row, if only their bytes are kept
    if (step.bytes.only) scratch += results_of(step);
    const auto finish = [&](int64_t row, const float *sums) {
        if (step.out[row] < 0) return;
        const float *map = sums - start - at(0, origin, step.pitch);
        float *to = step.bytes.only ? results : out + step.out[row] - at(0, strip.out_first, step.out_pitch);
        convolved(step, map, step.kernels + 9 * row, step.kernel_bias[row], to, strip.from, strip.to);
        if (step.kept) pass_on(step, strip, to, memory, step.out[row]);
        put_lines(step.bytes, row, memory, to, step.out_pitch, step.out_width, strip.from, strip.to);
    };
    const int64_t begin = step.chunks[chunk], end = step.chunks[chunk + 1], block = step.edges.block;
    if (step.edges.tiled.starts) {
        const SumPlaces rows = {scratch + MARGIN, nullptr, begin, each};
        sum_chunk(step.edges.tiled, chunk, {in, rows, step.edges.bias, step.edges.activation, nullptr}, vectors);
        for (int64_t row = begin; row < end; row++) finish(row, rows[static_cast<int32_t>(row)]);
        return;
    }
    float *rows[BLOCK];
    for (int b = 0; b < block; b++) rows[b] = scratch + b * each + MARGIN;
    for (int64_t group = begin; group < end; group++) {
        sum_group(step.edges, group, in, rows, nullptr, vectors);
        for (int b = 0; b < block; b++) finish(group * block + b, rows[b]);
    }
}
