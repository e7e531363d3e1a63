// Exponentials, error functions and activations of vectors, accurate to about 1e-7.
//
// The polynomials minimize the largest error; they were fitted in double precision.
#pragma once

#include "vectors.h"

static inline V blend(I mask, V yes, V no) { return mask ? yes : no; }

static inline V magnitude(V x) { return reinterpret_cast<V>(reinterpret_cast<I>(x) & 0x7fffffff); }

// The magnitude of `x` with the sign of `s`.
static inline V with_sign(V x, V s) {
    return reinterpret_cast<V>((reinterpret_cast<I>(x) & 0x7fffffff) | (reinterpret_cast<I>(s) & static_cast<int32_t>(0x80000000)));
}

// exp(x) = 2^n · exp(r) with |r| ≤ ln 2 / 2. Below -87, where results would be subnormal, it is 0.
static inline V exp_of(V x) {
    const V high = all(88.72283f), low = all(-87.33654f);
    const V inside = blend(x < low, low, blend(x > high, high, x));  // a NaN stays one
    const V shift = all(12582912.0f);                       // adding it rounds to an integer
    const V n = (inside * all(1.44269504f) + shift) - shift;
    const V r = (inside - n * all(0.693359375f)) - n * all(-2.12194440e-4f);
    V p = all(0.0013836737489327788f);
    p = p * r + all(0.008374898694455624f);
    p = p * r + all(0.041668232530355453f);
    p = p * r + all(0.16666419804096222f);
    p = p * r + all(0.49999991059303284f);
    p = p * r + all(1.0f);
    p = p * r + all(1.0f);
    const I power = __builtin_convertvector(blend(n == n, n, V{}), I);
    // 2^n in two factors, since n may be 128
    const I half = power >> 1;
    const V first = reinterpret_cast<V>((half + 127) << 23), second = reinterpret_cast<V>((power - half + 127) << 23);
    return blend(x < low, V{}, blend(x > high, all(__builtin_inff()), p * first * second));
}

static inline V tanh_of(V x) {
    const V size = magnitude(x), square = x * x;
    V p = all(-0.005615599453449249f);
    p = p * square + all(0.02055281586945057f);
    p = p * square + all(-0.053709834814071655f);
    p = p * square + all(0.1333099752664566f);
    p = p * square + all(-0.3333325684070587f);
    p = p * square + all(1.0f);
    const V e = exp_of(size * all(-2.0f));
    return blend(size < all(0.6f), x * p, with_sign((all(1.0f) - e) / (all(1.0f) + e), x));
}

// erf(z) = z · P(z²) up to 3.6, from where it is 1 in single precision. The polynomial is in u = 2 z² / 3.6² - 1.
static inline V erf_of(V z) {
    const V size = magnitude(z), inside = blend(size > all(3.6f), all(3.6f), size);
    const V u = inside * inside * all(0.15432098507881165f) - all(1.0f);
    V p = all(-0.0009657589835114777f);
    p = p * u + all(0.002631474519148469f);
    p = p * u + all(-0.002843582769855857f);
    p = p * u + all(0.004572015255689621f);
    p = p * u + all(-0.011626745574176311f);
    p = p * u + all(0.021246785297989845f);
    p = p * u + all(-0.03255026787519455f);
    p = p * u + all(0.04829283058643341f);
    p = p * u + all(-0.06802956759929657f);
    p = p * u + all(0.08981189876794815f);
    p = p * u + all(-0.11379396915435791f);
    p = p * u + all(0.1438109278678894f);
    p = p * u + all(-0.1954905092716217f);
    p = p * u + all(0.3927121162414551f);
    return blend(size == size, with_sign(blend(size > all(3.6f), all(1.0f), inside * p), z), z);
}

static inline V sigmoid_of(V x) { return all(1.0f) / (all(1.0f) + exp_of(-x)); }
