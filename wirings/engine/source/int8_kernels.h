// Sums over edges in int8: weights are signed bytes with a scale for each row, inputs are unsigned bytes, and the sums
// are exact 32-bit integers, so every processor computes the same.
//
// A map of bytes is flat, as maps of floats are. An input x is scale · (byte - zero). The scale and the zero are either
// those of a pixel, found on the way, or those of a channel, known beforehand; the latter are part of the weights.
#pragma once

#include <algorithm>

#include "fused_node_convolution.h"

constexpr int PIXELS = 64;      // of a tile: one byte each is a cache line
constexpr int INT8_ROWS = 4;    // rows of a dense group
constexpr int QUAD = 5;         // words of four edges: their offsets in bytes, then their weights

// ---- exact sums ----

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

// The bytes of four maps, pixel by pixel. Unpacking works within 128 bits, so pixels come in another order.
static inline void interleave(const uint8_t *a, const uint8_t *b, const uint8_t *c, const uint8_t *d, __m512i (&to)[4]) {
    const __m512i va = _mm512_loadu_si512(a), vb = _mm512_loadu_si512(b);
    const __m512i vc = _mm512_loadu_si512(c), vd = _mm512_loadu_si512(d);
    const __m512i ab = _mm512_unpacklo_epi8(va, vb), more_ab = _mm512_unpackhi_epi8(va, vb);
    const __m512i cd = _mm512_unpacklo_epi8(vc, vd), more_cd = _mm512_unpackhi_epi8(vc, vd);
    to[0] = _mm512_unpacklo_epi16(ab, cd);
    to[1] = _mm512_unpackhi_epi16(ab, cd);
    to[2] = _mm512_unpacklo_epi16(more_ab, more_cd);
    to[3] = _mm512_unpackhi_epi16(more_ab, more_cd);
}

// Parts of 128 bits of two vectors. With a mask, since without one GCC 12 warns about its own header.
#define PICK_PARTS(a, b, which) _mm512_maskz_shuffle_i32x4(0xffff, a, b, which)

// Store sums in the order of the pixels.
static inline void put_in_order(const __m512i (&sum)[4], int32_t *to) {
    const __m512i a = PICK_PARTS(sum[0], sum[1], 0x44), b = PICK_PARTS(sum[2], sum[3], 0x44);
    const __m512i c = PICK_PARTS(sum[0], sum[1], 0xee), d = PICK_PARTS(sum[2], sum[3], 0xee);
    _mm512_storeu_si512(to, PICK_PARTS(a, b, 0x88));
    _mm512_storeu_si512(to + 16, PICK_PARTS(a, b, 0xdd));
    _mm512_storeu_si512(to + 32, PICK_PARTS(c, d, 0x88));
    _mm512_storeu_si512(to + 48, PICK_PARTS(c, d, 0xdd));
}

// A few pixels after the last tile: 16 at once, in their order.
#if defined(__AVX512VBMI__)
constexpr int FEW = 16;

struct FewPixels {
    __m512i order = _mm512_setzero_si512(), sum = _mm512_setzero_si512();

    FewPixels() {
        uint8_t places[64];
        for (int i = 0; i < 64; i++) places[i] = static_cast<uint8_t>(i / 4 + i % 4 * 16);
        memcpy(&order, places, sizeof order);
    }
    void add(const uint8_t *a, const uint8_t *b, const uint8_t *c, const uint8_t *d, __m512i weights) {
        __m512i four = _mm512_zextsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i *>(a)));
        four = _mm512_maskz_inserti32x4(0xffff, four, _mm_loadu_si128(reinterpret_cast<const __m128i *>(b)), 1);
        four = _mm512_maskz_inserti32x4(0xffff, four, _mm_loadu_si128(reinterpret_cast<const __m128i *>(c)), 2);
        four = _mm512_maskz_inserti32x4(0xffff, four, _mm_loadu_si128(reinterpret_cast<const __m128i *>(d)), 3);
        sum = _mm512_dpbusd_epi32(sum, _mm512_maskz_permutexvar_epi8(~uint64_t{0}, order, four), weights);
    }
    void put(int32_t *to) const { _mm512_storeu_si512(to, sum); }
};
#else
constexpr int FEW = 0;

struct FewPixels {
    void add(const uint8_t *, const uint8_t *, const uint8_t *, const uint8_t *, __m512i) {}
    void put(int32_t *) const {}
};
#endif

// T tiles, and if REST, a few pixels after them.
template <int T, bool REST>
static inline void sum_quads(const int32_t *quad, const int32_t *end, const uint8_t *in, int32_t *to) {
    __m512i sum[T + 1][4];  // at least one, since an array has an element
    FewPixels rest;
    UNROLLED for (int t = 0; t < T; t++)
        UNROLLED for (int i = 0; i < 4; i++) sum[t][i] = _mm512_setzero_si512();
    for (; quad < end; quad += QUAD) {
        const __m512i w = _mm512_set1_epi32(quad[4]);
        const uint8_t *a = in + quad[0], *b = in + quad[1], *c = in + quad[2], *d = in + quad[3];
        UNROLLED for (int t = 0; t < T; t++) {
            __m512i together[4];
            interleave(a + t * PIXELS, b + t * PIXELS, c + t * PIXELS, d + t * PIXELS, together);
            UNROLLED for (int i = 0; i < 4; i++) sum[t][i] = _mm512_dpbusd_epi32(sum[t][i], together[i], w);
        }
        if (REST) rest.add(a + T * PIXELS, b + T * PIXELS, c + T * PIXELS, d + T * PIXELS, w);
    }
    UNROLLED for (int t = 0; t < T; t++) put_in_order(sum[t], to + t * PIXELS);
    if (REST) rest.put(to + T * PIXELS);
}

// The sums of a row over n pixels.
static inline void sum_sparse(const int32_t *quad, const int32_t *end, const uint8_t *in, int64_t n, int32_t *to) {
    constexpr int EACH = 3;
    const bool rest = n % PIXELS && n % PIXELS <= FEW;
    int64_t tiles = rest ? n / PIXELS : ceil_div(n, PIXELS);
    for (; tiles > EACH; tiles -= EACH, in += EACH * PIXELS, to += EACH * PIXELS) sum_quads<EACH, false>(quad, end, in, to);
    switch (2 * tiles + rest) {
        case 1: return sum_quads<0, true>(quad, end, in, to);
        case 2: return sum_quads<1, false>(quad, end, in, to);
        case 3: return sum_quads<1, true>(quad, end, in, to);
        case 4: return sum_quads<2, false>(quad, end, in, to);
        case 5: return sum_quads<2, true>(quad, end, in, to);
        case 6: return sum_quads<3, false>(quad, end, in, to);
        default: return sum_quads<3, true>(quad, end, in, to);
    }
}

// Dense groups read maps that have been interleaved once for all rows.
static inline void prepare_dense(const int32_t *places, int64_t quads, const uint8_t *in, int64_t tiles, uint8_t *to) {
    for (int64_t t = 0; t < tiles; t++)
        for (int64_t q = 0; q < quads; q++, to += 4 * PIXELS) {
            const uint8_t *x = in + t * PIXELS;
            const int32_t *own = places + 4 * q;
            __m512i together[4];
            interleave(x + own[0], x + own[1], x + own[2], x + own[3], together);
            UNROLLED for (int i = 0; i < 4; i++) _mm512_storeu_si512(to + i * PIXELS, together[i]);
        }
}

// The sums of INT8_ROWS rows, `each` numbers apart.
static inline void sum_dense(const int32_t *, const int32_t *weights, int64_t quads, const uint8_t *, const uint8_t *x,
                             int64_t tiles, int32_t *to, int64_t each) {
    for (int64_t t = 0; t < tiles; t++) {
        __m512i sum[INT8_ROWS][4];
        UNROLLED for (int r = 0; r < INT8_ROWS; r++)
            UNROLLED for (int i = 0; i < 4; i++) sum[r][i] = _mm512_setzero_si512();
        const int32_t *w = weights;
        for (int64_t q = 0; q < quads; q++, x += 4 * PIXELS, w += INT8_ROWS) {
            __m512i together[4];
            UNROLLED for (int i = 0; i < 4; i++) together[i] = _mm512_loadu_si512(x + i * PIXELS);
            UNROLLED for (int r = 0; r < INT8_ROWS; r++) {
                const __m512i own = _mm512_set1_epi32(w[r]);
                UNROLLED for (int i = 0; i < 4; i++) sum[r][i] = _mm512_dpbusd_epi32(sum[r][i], together[i], own);
            }
        }
        UNROLLED for (int r = 0; r < INT8_ROWS; r++) put_in_order(sum[r], to + r * each + t * PIXELS);
    }
}

constexpr int64_t DENSE_BYTES = 4 * PIXELS;  // of scratch memory for four places and a tile

#else

static inline int8_t byte_of(int32_t word, int i) { return static_cast<int8_t>(static_cast<uint32_t>(word) >> (8 * i)); }

#if defined(__AVX2__)

// Four edges, added to the sums of 16 pixels in the order that unpacking gives.
static inline void add_four(const uint8_t *in, const int32_t *places, int32_t weights, __m256i &low, __m256i &high) {
    UNROLLED for (int i = 0; i < 4; i += 2) {
        const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i *>(in + places[i]));
        const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i *>(in + places[i + 1]));
        const uint32_t both = static_cast<uint16_t>(byte_of(weights, i)) |
            static_cast<uint32_t>(static_cast<uint16_t>(byte_of(weights, i + 1))) << 16;
        const __m256i w = _mm256_set1_epi32(static_cast<int32_t>(both));
        const __m256i wide_a = _mm256_cvtepu8_epi16(a), wide_b = _mm256_cvtepu8_epi16(b);
        low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_unpacklo_epi16(wide_a, wide_b), w));
        high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_unpackhi_epi16(wide_a, wide_b), w));
    }
}

// One row, 32 pixels at a time; `next` gives the places and weights of four edges after four.
template <class Next>
static inline void sum_row(Next &&next, int64_t count, const uint8_t *in, int64_t tiles, int32_t *to) {
    for (int64_t p = 0; p < tiles * PIXELS; p += 32) {
        __m256i sum[2][2] = {{_mm256_setzero_si256(), _mm256_setzero_si256()},
                             {_mm256_setzero_si256(), _mm256_setzero_si256()}};
        for (int64_t q = 0; q < count; q++) {
            const auto own = next(q);
            add_four(in + p, own.places, own.weights, sum[0][0], sum[0][1]);
            add_four(in + p + 16, own.places, own.weights, sum[1][0], sum[1][1]);
        }
        for (int i = 0; i < 2; i++) {
            __m256i *out = reinterpret_cast<__m256i *>(to + p + 16 * i);
            _mm256_storeu_si256(out, _mm256_permute2x128_si256(sum[i][0], sum[i][1], 0x20));
            _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(sum[i][0], sum[i][1], 0x31));
        }
    }
}

#else

template <class Next>
static inline void sum_row(Next &&next, int64_t count, const uint8_t *in, int64_t tiles, int32_t *to) {
    for (int64_t t = 0; t < tiles; t++) {
        int32_t sum[PIXELS] = {};
        for (int64_t q = 0; q < count; q++) {
            const auto own = next(q);
            for (int i = 0; i < 4; i++) {
                const int32_t w = byte_of(own.weights, i);
                const uint8_t *x = in + own.places[i] + t * PIXELS;
                for (int p = 0; p < PIXELS; p++) sum[p] += w * x[p];
            }
        }
        memcpy(to + t * PIXELS, sum, sizeof sum);
    }
}

#endif

struct FourEdges {
    const int32_t *places;
    int32_t weights;
};

static inline void sum_sparse(const int32_t *quad, const int32_t *end, const uint8_t *in, int64_t n, int32_t *to) {
    const int64_t tiles = ceil_div(n, PIXELS);
    sum_row([quad](int64_t q) { return FourEdges{quad + q * QUAD, quad[q * QUAD + 4]}; }, (end - quad) / QUAD, in, tiles, to);
}

static inline void prepare_dense(const int32_t *, int64_t, const uint8_t *, int64_t, uint8_t *) {}

static inline void sum_dense(const int32_t *places, const int32_t *weights, int64_t quads, const uint8_t *in, const uint8_t *,
                             int64_t tiles, int32_t *to, int64_t each) {
    for (int r = 0; r < INT8_ROWS; r++)
        sum_row([=](int64_t q) { return FourEdges{places + 4 * q, weights[q * INT8_ROWS + r]}; }, quads, in, tiles,
                to + r * each);
}

constexpr int64_t DENSE_BYTES = 0;

#endif

// ---- floats to bytes ----

// The scale of numbers between `low` and `high`, and the byte of 0; both are such that 0 is represented exactly.
struct ByteRange {
    V scale, inverse, zero;
};

static inline ByteRange byte_range(V low, V high, I invalid) {
    const V span = high - low, each = span * all(1.0f / 255.0f);
    const V inverse = span > V{} ? all(255.0f) / span : V{};
    const I bad = invalid | ~(span < all(__builtin_inff()));
    const V nan = all(__builtin_nanf(""));
    return {bad ? nan : each, bad ? V{} : inverse, bad ? V{} : (all(SHIFT) - low * inverse) - all(SHIFT)};
}

// Quantise maps pixel by pixel: each pixel has a scale of its own, by its smallest and largest channel.
struct QuantizePixelsStep {
    const int32_t *in, *out;        // floats, and bytes in units of floats, of each channel's map
    int32_t channels, height, width, pitch;
    int32_t scales, zeros;          // where those of the pixels are; zeros are integers
    int32_t tiles;                  // tasks
};

// A run of up to N vectors of pixels within a row, from the pixel `from` of maps to the byte `place`.
template <int N>
static void quantize_run(const QuantizePixelsStep &step, float *memory, int64_t from, int64_t place, int n) {
    V low[N] = {}, high[N] = {};
    I invalid[N] = {};
    for (int c = 0; c < step.channels; c++)
        UNROLLED for (int v = 0; v < N; v++) {
            const V x = load(memory + step.in[c] + from + v * LANES);
            low[v] = x < low[v] ? x : low[v];
            high[v] = x > high[v] ? x : high[v];
            invalid[v] |= x != x;
        }
    ByteRange own[N];
    int left[N];
    UNROLLED for (int v = 0; v < N; v++) {
        left[v] = n - v * LANES < LANES ? n - v * LANES : LANES;
        own[v] = byte_range(low[v], high[v], invalid[v]);
        store_part(memory + step.scales + place + v * LANES, own[v].scale, left[v]);
        const I zero = __builtin_convertvector(own[v].zero, I);
        memcpy(memory + step.zeros + place + v * LANES, &zero, 4 * static_cast<size_t>(left[v]));
    }
    for (int c = 0; c < step.channels; c++) {
        uint8_t *to = reinterpret_cast<uint8_t *>(memory + step.out[c]) + place;
        UNROLLED for (int v = 0; v < N; v++) {
            const V x = load(memory + step.in[c] + from + v * LANES);
            put_bytes(to + v * LANES, x, own[v].inverse, own[v].zero, left[v]);
        }
    }
}

// Pixels in runs of up to 4 · LANES within a row.
static void run_quantize_pixels(const QuantizePixelsStep &step, float *memory, float *, int task, const CallerTensors &) {
    const int64_t each = 4 * LANES, runs = ceil_div(step.width, each), all_runs = runs * step.height;
    for (int64_t i = cut(all_runs, task, step.tiles); i < cut(all_runs, task + 1, step.tiles); i++) {
        const int64_t y = i / runs, x = i % runs * each, left = step.width - x;
        const int64_t from = y * step.pitch + x, place = y * step.width + x;
        const int n = static_cast<int>(left < each ? left : each);
        switch (ceil_div(n, LANES)) {
            case 1: quantize_run<1>(step, memory, from, place, n); break;
            case 2: quantize_run<2>(step, memory, from, place, n); break;
            case 3: quantize_run<3>(step, memory, from, place, n); break;
            default: quantize_run<4>(step, memory, from, place, n);
        }
    }
}

// Quantise maps channel by channel, with scales that are known. Maps of bytes may have borders, which are zeros, and the
// pixels with equal remainders by a stride may form maps of their own.
struct QuantizeChannelsStep {
    const int32_t *in, *out;        // `stride_y · stride_x` maps of bytes for each channel
    const float *inverse, *zero;    // of each channel
    int32_t channels, height, width, pitch;
    int32_t stride_y, stride_x;
    int32_t rows, row_bytes;        // of a map of bytes, borders included
    int32_t above, before;          // the size of the border
    int32_t tiles;                  // tasks
};

// Every second byte, or every `stride`-th.
static inline void take_bytes(const uint8_t *from, uint8_t *to, int64_t n, int stride) {
    if (stride == 2)
        for (int64_t i = 0; i < n; i++) to[i] = from[2 * i];
    else
        for (int64_t i = 0; i < n; i++) to[i] = from[i * stride];
}

static int64_t quantize_scratch(const QuantizeChannelsStep &step) { return step.width / 4 + LINE; }

static void run_quantize_channels(const QuantizeChannelsStep &step, float *memory, float *scratch, int task, const CallerTensors &) {
    const int phases = step.stride_y * step.stride_x;
    uint8_t *row = reinterpret_cast<uint8_t *>(scratch);
    for (int64_t c = cut(step.channels, task, step.tiles); c < cut(step.channels, task + 1, step.tiles); c++) {
        const V inverse = all(step.inverse[c]), zero = all(step.zero[c]);
        const int32_t *out = step.out + c * phases;
        if (phases == 1 && step.row_bytes == step.width && step.rows == step.height && step.pitch == step.width) {
            quantize_row(memory + step.in[c], reinterpret_cast<uint8_t *>(memory + out[0]), int64_t{step.height} * step.width,
                         inverse, zero);
            continue;
        }
        if (phases > 1 || step.row_bytes > step.width || step.rows > step.height)
            for (int i = 0; i < phases; i++)
                memset(static_cast<void *>(memory + out[i]), static_cast<int>(step.zero[c]),
                       static_cast<size_t>(step.rows) * static_cast<size_t>(step.row_bytes));
        for (int64_t y = 0; y < step.height; y++) {
            const float *from = memory + step.in[c] + y * step.pitch;
            const int64_t start = (y / step.stride_y + step.above) * step.row_bytes + step.before;
            if (phases == 1) {
                quantize_row(from, reinterpret_cast<uint8_t *>(memory + out[0]) + start, step.width, inverse, zero);
                continue;
            }
            quantize_row(from, row, step.width, inverse, zero);
            for (int i = 0; i < step.stride_x; i++) {
                uint8_t *to = reinterpret_cast<uint8_t *>(memory + out[y % step.stride_y * step.stride_x + i]) + start;
                take_bytes(row + i, to, ceil_div(step.width - i, step.stride_x), step.stride_x);
            }
        }
    }
}

// ---- sums of maps ----

struct Int8SumsStep {
    const int32_t *starts;          // where the edges of each row begin in `edges`; for dense groups, null
    const int32_t *edges;           // four at a time; for dense groups, the places that rows read, four at a time
    const int32_t *weights;         // of dense groups: four bytes for each of their rows, for every four places
    const float *scale, *bias;      // of each row
    const int32_t *offset;          // what a row's sum has to be reduced by, or is per unit of a pixel's zero
    const int32_t *added_starts;    // edges in floats, of each row: an offset and a weight
    const int32_t *added;
    const int32_t *out;             // the offset of each row's map
    const int32_t *chunks;          // rows of one task, in groups
    const float *kernels, *kernel_bias;  // of nodes: nine for each row, and one
    ByteResults bytes;              // of the results of nodes
    ClampRange activation, activation2;  // of sums, and of the results of nodes
    int32_t scales, zeros;          // those of the pixels; -1 if those of channels are used
    int32_t rows, quads, chunk_count, strips;
    int32_t height, width, pitch;   // of the sums; the pitch is that of the bytes
    int32_t added_pitch, out_height, out_width, out_pitch;
    int32_t stride;                 // of the convolution of nodes; 0 if they are none
    int32_t mean;                   // whether the mean of each map is wanted, not the map
    float share;                    // of one pixel in it
};

// The part of the flat sums that a strip needs.
struct Int8Strip {
    int64_t from, to;
    int first, last;                // rows of the output; for a single row, its pixels
};

static inline Int8Strip int8_strip(const Int8SumsStep &step, int64_t number) {
    if (step.stride) {
        const int first = static_cast<int>(cut(step.out_height, number, step.strips));
        const int last = static_cast<int>(cut(step.out_height, number + 1, step.strips));
        const int64_t top = first ? int64_t{first} * step.stride - 1 : 0;
        const int64_t bottom = std::min<int64_t>(int64_t{last - 1} * step.stride + 2, step.height);
        return {top * step.pitch, (bottom - 1) * step.pitch + step.width, first, last};
    }
    if (step.height == 1) {
        const int64_t tiles = ceil_div(step.width, PIXELS);
        const int64_t from = cut(tiles, number, step.strips) * PIXELS;
        const int64_t to = std::min<int64_t>(cut(tiles, number + 1, step.strips) * PIXELS, step.width);
        return {from, to, static_cast<int>(from), static_cast<int>(to)};
    }
    const int64_t first = cut(step.height, number, step.strips), last = cut(step.height, number + 1, step.strips);
    return {first * step.pitch, (last - 1) * step.pitch + step.width, static_cast<int>(first), static_cast<int>(last)};
}

// Numbers of scratch memory for n sums of one row; a convolution reads beyond them.
static inline int64_t int8_row_size(int64_t n) { return ceil_div(n, PIXELS) * PIXELS + 4 * MARGIN; }

// The same for the longest strip.
static inline int64_t int8_strip_size(const Int8SumsStep &step) {
    int64_t most = 0;
    for (int i = 0; i < step.strips; i++) {
        const Int8Strip strip = int8_strip(step, i);
        most = std::max(most, strip.to - strip.from);
    }
    return int8_row_size(most);
}

// Numbers of scratch memory for the results of one row, if only their bytes are kept.
static inline int64_t results_size(const Int8SumsStep &step) {
    return step.bytes.only ? int64_t{step.out_height} * step.out_width + LINE : 0;
}

static int64_t int8_scratch(const Int8SumsStep &step) {
    const int64_t each = int8_strip_size(step), quads = int64_t{step.quads} * (each / PIXELS + 1) * DENSE_BYTES / 4;
    return INT8_ROWS * (each + results_size(step)) + quads + LINE;
}

// What turns exact sums of a row into numbers, in registers.
template <bool BY_PIXELS>
struct RowNumbers {
    const V scale, bias, low, high;
    const uint32_t offset;
    const float *scales, *zeros;    // of the pixels

    RowNumbers(const Int8SumsStep &step, int64_t row, const float *memory)
        : scale(all(step.scale[row])), bias(all(step.bias[row])), low(all(step.activation.low)), high(all(step.activation.high)),
          offset(static_cast<uint32_t>(step.offset[row])), scales(BY_PIXELS ? memory + step.scales : nullptr),
          zeros(BY_PIXELS ? memory + step.zeros : nullptr) {}

    // LANES numbers; `exact` are the sums, of the pixels from `from` on.
    V of(const float *exact, int64_t from) const {
        U sum = reinterpret_cast<U>(load(exact));  // unsigned: pixels beyond the last may overflow
        V own = scale;
        if (BY_PIXELS) {
            sum -= offset * reinterpret_cast<U>(load(zeros + from));
            own *= load(scales + from);
        } else {
            sum -= offset;
        }
        return __builtin_convertvector(reinterpret_cast<I>(sum), V) * own + bias;
    }
    V limit(V v) const { return limited<2>(v, low, high); }
};

// Take n numbers of a row of the output, up to LANES at a time, with what is added to them in floats.
template <bool BY_PIXELS, class Take>
static inline void take_run(const Int8SumsStep &step, const RowNumbers<BY_PIXELS> &numbers, int64_t row, const float *memory,
                            const float *exact, int64_t from, int64_t y, int64_t x, int64_t n, Take &&take) {
    const int32_t *added = step.added + 2 * step.added_starts[row], *end = step.added + 2 * step.added_starts[row + 1];
    const float *start = memory + y * step.added_pitch + x;
    const auto number = [&](int64_t p) {
        V v = numbers.of(exact + p, from + p);
        for (const int32_t *own = added; own < end; own += 2) v += all(as_float(own[1])) * load(start + own[0] + p);
        return numbers.limit(v);
    };
    int64_t p = 0;
    for (; p + LANES <= n; p += LANES) take(p, number(p), LANES);
    if (p < n) take(p, number(p), static_cast<int>(n - p));
}

// The convolution of nodes, in floats, as a step of its own would have it.
static NodesStep convolution_of(const Int8SumsStep &step) {
    NodesStep nodes = {};
    nodes.activation = step.activation2;
    nodes.height = step.height;
    nodes.width = step.width;
    nodes.pitch = step.pitch;
    nodes.out_width = step.out_width;
    nodes.out_pitch = step.bytes.only ? step.out_width : step.out_pitch;
    nodes.stride = step.stride;
    return nodes;
}

// Numbers of the sums of rows that are computed together, one stage after the other: what one has written is in the
// level-1 cache by then, where a stage that came at once would wait for it.
constexpr int64_t TOGETHER = 4096;

template <bool BY_PIXELS>
static void finish_rows(const Int8SumsStep &step, int64_t first, int count, float *memory, float *sums, int64_t each,
                        float *results, const Int8Strip &strip) {
    const int64_t n = strip.to - strip.from;
    if (step.stride) {
        const NodesStep nodes = convolution_of(step);
        const Convolve convolved = convolution(nodes);
        float *outs[INT8_ROWS];
        for (int b = 0; b < count; b++) {
            const RowNumbers<BY_PIXELS> numbers(step, first + b, memory);
            float *own = sums + b * each;
            for (int64_t p = 0; p < n; p += LANES) store(own + p, numbers.limit(numbers.of(own + p, strip.from + p)));
        }
        for (int b = 0; b < count; b++) {
            const int64_t row = first + b;
            outs[b] = step.bytes.only ? results + b * results_size(step) : memory + step.out[row];
            const float *map = sums + b * each - strip.from;
            convolved(nodes, map, step.kernels + 9 * row, step.kernel_bias[row], outs[b], strip.first, strip.last);
        }
        for (int b = 0; b < count; b++)
            put_lines(step.bytes, first + b, memory, outs[b], nodes.out_pitch, step.out_width, strip.first, strip.last);
        return;
    }
    for (int b = 0; b < count; b++) {
        const RowNumbers<BY_PIXELS> numbers(step, first + b, memory);
        const float *own = sums + b * each;
        float *out = memory + step.out[first + b];
        const auto each_run = [&](auto &&take) {
            for (int64_t x = 0; step.height == 1 && x < n; x += RUN)
                take(strip.from + x, int64_t{0}, strip.first + x, std::min<int64_t>(RUN, n - x));
            for (int64_t y = strip.first; step.height > 1 && y < strip.last; y++)
                take(y * step.pitch, y, int64_t{0}, int64_t{step.width});
        };
        float sum = 0;  // of the map, and of a part of it, since small numbers are lost in long sums
        V part = {};
        int64_t added = 0;
        each_run([&](int64_t start, int64_t y, int64_t x, int64_t many) {
            float *to = out + y * step.out_pitch + x;
            const float *exact = own + (start - strip.from);
            take_run(step, numbers, first + b, memory, exact, start, y, x, many, [&](int64_t p, V v, int lanes) {
                if (step.mean)
                    part += masked(v, count_up() < lanes);
                else
                    store_part(to + p, v, lanes);
            });
            added += many;
            if (added < RUN) return;
            sum += total(part);
            part = V{};
            added = 0;
        });
        if (step.mean) *out = (sum + total(part)) * step.share;
    }
}

static void run_int8_sums(const Int8SumsStep &step, float *memory, float *scratch, int task, const CallerTensors &) {
    const Int8Strip strip = int8_strip(step, task / step.chunk_count);
    const int chunk = task % step.chunk_count;
    const int64_t n = strip.to - strip.from, tiles = ceil_div(n, PIXELS), each = int8_row_size(n);
    const uint8_t *in = reinterpret_cast<const uint8_t *>(memory) + strip.from;
    uint8_t *together = reinterpret_cast<uint8_t *>(scratch + INT8_ROWS * each);
    if (step.quads) prepare_dense(step.edges, step.quads, in, tiles, together);
    float *sums = scratch + MARGIN, *results = scratch + INT8_ROWS * each + step.quads * tiles * DENSE_BYTES / 4;
    const int64_t rows_of_chunk = step.quads ? INT8_ROWS : 1;
    const int64_t last = std::min<int64_t>(step.chunks[chunk + 1] * rows_of_chunk, step.rows);
    const int block = step.quads || INT8_ROWS * each <= TOGETHER ? INT8_ROWS : 1;
    for (int64_t row = step.chunks[chunk] * rows_of_chunk; row < last; row += block) {
        const int count = static_cast<int>(std::min<int64_t>(block, last - row));
        if (step.quads) {
            const int32_t *weights = step.weights + row * step.quads;
            sum_dense(step.edges, weights, step.quads, in, together, tiles, reinterpret_cast<int32_t *>(sums), each);
        } else {
            for (int b = 0; b < count; b++) {
                const int32_t *own = step.edges + step.starts[row + b], *end = step.edges + step.starts[row + b + 1];
                sum_sparse(own, end, in, n, reinterpret_cast<int32_t *>(sums + b * each));
            }
        }
        if (step.scales < 0)
            finish_rows<false>(step, row, count, memory, sums, each, results, strip);
        else
            finish_rows<true>(step, row, count, memory, sums, each, results, strip);
    }
}

// ---- linear layers on single numbers ----

struct Int8LinearStep {
    const int32_t *in, *out;        // offsets of numbers
    const uint64_t *masks;          // `words` for each row: which inputs it has an edge from; for dense layers, null
    const int8_t *weights;          // those of the edges; for dense layers, of all inputs, padded to `words` · 64
    const int32_t *starts;          // where the weights of each row begin; for dense layers, null
    const float *scale, *bias;
    const int32_t *offset;          // the sum of each row's weights
    const int32_t *chunks;          // rows of one task
    ClampRange activation;
    int32_t inputs, words;
};

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
static inline int32_t sum_of_lanes(__m512i v) {
    int32_t sums[16];
    memcpy(sums, &v, sizeof sums);
    UNROLLED for (int half = 8; half; half /= 2)
        UNROLLED for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}
#endif

static inline int32_t dot_dense(const int8_t *w, const uint8_t *x, int64_t words) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < words; i++)
        sum = _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(x + 64 * i), _mm512_loadu_si512(w + 64 * i));
    return sum_of_lanes(sum);
#else
    int32_t sum = 0;
    for (int64_t i = 0; i < 64 * words; i++) sum += int32_t{w[i]} * x[i];
    return sum;
#endif
}

static inline int32_t dot_sparse(const uint64_t *masks, const int8_t *w, const uint8_t *x, int64_t words) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VBMI2__)
    __m512i sum = _mm512_setzero_si512(), other = sum;
    for (int64_t i = 0; i < words; i++) {  // up to 64 bytes after the weights are read
        const __m512i own = _mm512_maskz_expand_epi8(masks[i], _mm512_loadu_si512(w));
        const __m512i next = _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(x + 64 * i), own);
        sum = other;
        other = next;
        w += __builtin_popcountll(masks[i]);
    }
    return sum_of_lanes(_mm512_add_epi32(sum, other));
#else
    int32_t sum = 0;
    for (int64_t i = 0; i < words; i++)
        for (uint64_t left = masks[i]; left; left &= left - 1) sum += int32_t{*w++} * x[64 * i + __builtin_ctzll(left)];
    return sum;
#endif
}

static int64_t int8_linear_scratch(const Int8LinearStep &step) { return int64_t{step.words} * 80; }

// Every task quantises the inputs itself: that costs less than a step of its own.
static void run_int8_linear(const Int8LinearStep &step, float *memory, float *scratch, int task, const CallerTensors &) {
    const int64_t padded = int64_t{step.words} * 64;
    uint8_t *x = reinterpret_cast<uint8_t *>(scratch + padded);
    V low = V{}, high = V{};
    I invalid = {};
    for (int64_t i = 0; i < step.inputs; i++) scratch[i] = memory[step.in[i]];
    for (int64_t i = step.inputs; i < padded; i++) scratch[i] = 0;
    for (int64_t i = 0; i < padded; i += LANES) {
        const V v = load(scratch + i);
        low = v < low ? v : low;
        high = v > high ? v : high;
        invalid |= v != v;
    }
    float least = 0, most = 0;
    int32_t bad = 0;
    for (int i = 0; i < LANES; i++) {
        least = std::min(least, low[i]);
        most = std::max(most, high[i]);
        bad |= invalid[i];
    }
    const ByteRange range = byte_range(all(least), all(most), bad - I{});
    for (int64_t i = 0; i < padded; i += LANES) put_bytes(x + i, load(scratch + i), range.inverse, range.zero, LANES);
    const int32_t zero = static_cast<int32_t>(range.zero[0]);
    for (int64_t row = step.chunks[task]; row < step.chunks[task + 1]; row++) {
        const int32_t sum = step.masks ? dot_sparse(step.masks + row * step.words, step.weights + step.starts[row], x, step.words)
                                       : dot_dense(step.weights + row * padded, x, step.words);
        const float v = static_cast<float>(sum - zero * step.offset[row]) * (step.scale[row] * range.scale[0]) + step.bias[row];
        const float above = v < step.activation.low ? step.activation.low : v;
        memory[step.out[row]] = above > step.activation.high ? step.activation.high : above;
    }
}
