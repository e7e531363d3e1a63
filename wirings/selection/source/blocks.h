// Loops over a block of edges. Their length is fixed, so that compilers vectorize them.
//
// The key of an edge is the bits of its magnitude plus one, or zero if the edge is not allowed.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

enum { BLOCK = 512 };


template <class Key>
static Key key_of(Key bits) {
    constexpr Key magnitude = std::numeric_limits<Key>::max() >> 1;  // all bits but the sign
    return static_cast<Key>((bits & magnitude) + 1);
}

template <class Key>
static void load_keys(const Key *__restrict bits, Key *__restrict keys) {
    for (int i = 0; i < BLOCK; i++) keys[i] = key_of(bits[i]);
}

template <class Key>
static void forbid(const uint8_t *__restrict allowed, Key *__restrict keys) {
    for (int i = 0; i < BLOCK; i++) keys[i] = static_cast<Key>(keys[i] & -static_cast<Key>(allowed[i] != 0));
}

template <class Key>
static int count_above(const Key *keys, Key least) {
    int count = 0;
    for (int i = 0; i < BLOCK; i++) count += keys[i] > least;
    return count;
}

template <class Key>
static bool any_equal(const Key *keys, Key wanted) {
    int count = 0;
    for (int i = 0; i < BLOCK; i++) count += keys[i] == wanted;
    return count > 0;
}

template <class Key>
static void flag_above(const Key *__restrict keys, Key least, uint8_t *__restrict flags) {
    for (int i = 0; i < BLOCK; i++) flags[i] = keys[i] > least;
}

template <class Key>
static void flag_within(const Key *__restrict keys, Key first, Key last, uint8_t *__restrict flags) {
    const Key width = static_cast<Key>(last - first);
    for (int i = 0; i < BLOCK; i++) flags[i] = static_cast<Key>(keys[i] - first) <= width;
}

template <class Key>
static void keep_above(const Key *__restrict keys, Key least, const Key *__restrict bits, Key *__restrict kept) {
    for (int i = 0; i < BLOCK; i++) kept[i] = static_cast<Key>(bits[i] & -static_cast<Key>(keys[i] > least));
}

// Finds the places of the flags that are set, which are few. Writes one place more than it returns.
static int set_flags(const uint8_t *flags, int *places) {
    int count = 0;
    for (int begin = 0; begin < BLOCK; begin += 8) {
        uint64_t eight;
        std::memcpy(&eight, flags + begin, 8);
        if (eight == 0) continue;
        for (int i = begin; i < begin + 8; i++) {
            places[count] = i;
            count += flags[i];
        }
    }
    return count;
}
