// Floats as unsigned bytes: a number x is byte / inverse, after the byte of zero has been subtracted.
#pragma once

#include "vectors.h"

constexpr float SHIFT = 12582912.0f;  // to the numbers whose last bit stands for 1: adding it rounds, half to even

// The bytes of n numbers: x · inverse, rounded, plus the byte of zero, within 0 and 255. NaN becomes 0.
static inline void put_bytes(uint8_t *to, V x, V inverse, V zero, int n) {
    const V least = all(SHIFT) - zero, rounded = x * inverse + all(SHIFT);
    const V inside = rounded > least ? rounded : least;
    const I bytes = reinterpret_cast<I>(inside) - reinterpret_cast<I>(least);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const __m128i narrow = _mm512_maskz_cvtusepi32_epi8(0xffff, reinterpret_cast<__m512i>(bytes));
    if (n == LANES)
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to), narrow);
    else
        _mm_mask_storeu_epi8(to, static_cast<__mmask16>((1u << n) - 1), narrow);
#else
    for (int i = 0; i < n; i++) to[i] = static_cast<uint8_t>(bytes[i] < 255 ? bytes[i] : 255);
#endif
}

static inline void quantize_row(const float *in, uint8_t *to, int64_t n, V inverse, V zero) {
    int64_t x = 0;
    for (; x + LANES <= n; x += LANES) put_bytes(to + x, load(in + x), inverse, zero, LANES);
    const int left = static_cast<int>(n - x);
    if (left) put_bytes(to + x, load_part(in + x, left), inverse, zero, left);
}

// Maps of bytes, without borders, that a step makes of its results.
struct ByteResults {
    const int32_t *places;          // where the bytes of each row go, in floats; -1 for nowhere; or null
    const float *inverse, *zero;    // of each row
    int32_t only;                   // whether nothing reads the results in floats
};

// Turn some lines of a map into bytes; `from` is where its line 0 would begin.
static inline void put_lines(const ByteResults &results, int64_t row, float *memory, const float *from, int64_t pitch,
                             int64_t width, int64_t first, int64_t last) {
    if (!results.places || results.places[row] < 0) return;
    uint8_t *bytes = reinterpret_cast<uint8_t *>(memory + results.places[row]);
    const V inverse = all(results.inverse[row]), zero = all(results.zero[row]);
    if (pitch == width) {
        quantize_row(from + first * pitch, bytes + first * width, (last - first) * width, inverse, zero);
        return;
    }
    for (int64_t y = first; y < last; y++) quantize_row(from + y * pitch, bytes + y * width, width, inverse, zero);
}
