// Vectors of floats, with the compiler's vector extensions: AVX-512, AVX2, NEON or SSE, as the machine has them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 32")
#endif

constexpr int LINE = 16;  // floats in a cache line, to which every channel is aligned

typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef float Anywhere __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t AnywhereI __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline V load(const float *p) { return *reinterpret_cast<const Anywhere *>(p); }
static inline I load_mask(const int32_t *p) { return *reinterpret_cast<const AnywhereI *>(p); }
static inline void store(float *p, V v) { *reinterpret_cast<Anywhere *>(p) = v; }

static inline V all(float x) { return x - V{}; }  // subtracting zero changes no number, not even -0

static inline V masked(V v, I mask) { return reinterpret_cast<V>(reinterpret_cast<I>(v) & mask); }

// Store the first n lanes, from 0 to LANES.
static inline void store_part(float *p, V v, int n) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), reinterpret_cast<__m512>(v));
#else
    if (n == LANES) {
        store(p, v);
        return;
    }
    for (int i = 0; i < n; i++) p[i] = v[i];
#endif
}

// Load the first n lanes, from 0 to LANES; the others are zero, and their memory is not touched.
static inline V load_part(const float *p, int n) {
#if defined(__AVX512F__)
    return reinterpret_cast<V>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p));
#else
    if (n == LANES) return load(p);
    V v = {};
    for (int i = 0; i < n; i++) v[i] = p[i];
    return v;
#endif
}

static inline float total(V v) {
    float sums[LANES];
    memcpy(sums, &v, sizeof sums);
    UNROLLED for (int half = LANES / 2; half; half /= 2)
        UNROLLED for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

static inline I count_up() {
    I v;
    for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}

// The numbers at even and at odd positions of 2 · LANES numbers.
static inline V evens(V a, V b);
static inline V odds(V a, V b);

#if defined(__clang__) || __GNUC__ >= 12
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, I{__VA_ARGS__})
#endif

#if defined(__AVX512F__)
static inline V evens(V a, V b) { return PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30); }
static inline V odds(V a, V b) { return PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31); }
#elif defined(__AVX__)
static inline V evens(V a, V b) { return PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14); }
static inline V odds(V a, V b) { return PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15); }
#else
static inline V evens(V a, V b) { return PICK(a, b, 0, 2, 4, 6); }
static inline V odds(V a, V b) { return PICK(a, b, 1, 3, 5, 7); }
#endif

// The range that a sum is clamped to: 0 to infinity for a ReLU, -infinity to infinity for none. NaN is kept, as in
// PyTorch.
struct ClampRange {
    float low, high;

    int limits() const { return high < __builtin_inff() ? 2 : low > -__builtin_inff() ? 1 : 0; }
};

// Apply the limits: none, the lower one, or both.
template <int LIMITS>
static inline V limited(V v, V low, V high) {
    if (LIMITS > 0) v = v < low ? low : v;
    if (LIMITS > 1) v = v > high ? high : v;
    return v;
}

static inline V limited(V v, const ClampRange &activation) {
    return limited<2>(v, all(activation.low), all(activation.high));
}
