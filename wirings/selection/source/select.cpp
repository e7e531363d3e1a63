// Choose the k edges of largest magnitude of one weight, in a few passes over its memory.
//
// The bits of a float without its sign, read as an integer, order like its magnitude, with NaN above infinity. Edges
// are ranked by a key: these bits plus one, or zero for edges that are not allowed. A choice is defined by its cut, the
// key of the strongest edge that is not chosen: all edges above the cut are chosen, and of those at the cut, the first
// ones in row-major order. So all passes but the last only count, and the last one writes.
//
// The cut is found by counting the keys of a range in buckets of equal width, and then again within one bucket. The
// first range is a guess from a sample: it holds few keys, so that nearly all edges are only compared with its ends,
// which compilers vectorize, and the few within are collected for the next count. If the guess is wrong, all keys are
// counted. The result does not depend on the guess.
//
// Another thread may change the weight meanwhile, and passes may disagree; then the choice is undefined, but nothing is
// written outside of the results.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "blocks.h"

enum { BUCKETS = 2048, CHUNKS_PER_THREAD = 4, LEAST_CHUNK = 1 << 14, SAMPLED_RUNS = 256, RUN = 16 };

// OpenMP's entry point that runs a function on several threads. These are PyTorch's own threads: those of a second pool
// would compete with them for the same cores, since they spin for a while after each operation.
using Parallel = void (*)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

// A call from Python, which knows this layout.
struct SelectCall {
    const void *weight;  // a dense memory of n floats
    const uint8_t *allowed;  // in the same order; null if all edges are
    int64_t n, k, bytes;  // 0 < k < n; bytes of a float
    int64_t dimensions;  // in the order of memory, the innermost last; 0 if memory is in row-major order
    const int64_t *sizes, *strides;  // the strides are those of row-major order
    Parallel parallel;  // null if PyTorch does not use OpenMP
    int64_t threads;
    uint8_t *mask;  // results in the order of memory, each may be null: the mask,
    void *kept;  // the chosen weights with zeros elsewhere,
    int64_t *places;  // the places of the chosen weights, ascending,
    void *values;  // and the weights there
    uint64_t next_magnitude;  // another result: the bits of the strongest edge that is not chosen; 0 if there is none
};

template <class Key>
struct KeyRange {  // the first and the last key, and buckets of 2^shift keys
    Key first, last;
    int shift = 0;

    KeyRange(Key first, Key last) : first(first), last(last) {
        while (static_cast<Key>(last - first) >> shift >= BUCKETS) shift++;
    }
    static KeyRange all() { return {0, static_cast<Key>(Key{1} << (8 * sizeof(Key) - 1))}; }
};

template <class Key>
class Selection {
    struct Chunk {  // a part of the memory that one thread counts
        int64_t begin, end;
        int64_t above = 0;  // edges above the range, and at last above the cut
        int64_t equal = 0;  // edges at the cut, and at last the chosen ones
        uint32_t buckets[BUCKETS];
        int64_t room, size = -1;  // the number of keys in `within`, -1 if there is no room for them
        std::unique_ptr<Key[]> within;  // the keys in the range

        Chunk(int64_t begin, int64_t end) : begin(begin), end(end), room((end - begin) / 16), within(new Key[room]) {}
    };

    struct Block {
        int64_t begin;
        int size;  // less than BLOCK at the end; beyond it there are zeros
        const Key *bits;
        Key keys[BLOCK];
    };

    const SelectCall &call;
    const Key *const weight = static_cast<const Key *>(call.weight);
    const bool in_parallel = call.parallel && call.threads > 1;
    std::vector<Chunk> chunks;
    Key cut = 0;
    int64_t ties = 0;  // chosen edges at the cut
    int64_t last_tie = -1;  // the last one's position in row-major order

    template <class Do>
    struct Job {
        const Do &run;
        std::vector<Chunk> &chunks;
        std::atomic<size_t> next{0};

        static void work(void *self) {
            Job &job = *static_cast<Job *>(self);
            for (size_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.chunks.size();)
                job.run(job.chunks[i]);
        }
    };

    template <class Do>
    void for_chunks(const Do &run) {
        Job<Do> job{run, chunks};
        if (in_parallel && chunks.size() > 1)
            call.parallel(Job<Do>::work, &job, static_cast<unsigned>(std::min<size_t>(call.threads, chunks.size())), 0);
        else
            Job<Do>::work(&job);
    }

    template <class Do>
    void for_blocks(const Chunk &chunk, Do &&run) const {
        Block block;
        Key bits[BLOCK] = {};
        uint8_t padded[BLOCK] = {};
        for (block.begin = chunk.begin; block.begin < chunk.end; block.begin += BLOCK) {
            block.bits = weight + block.begin;
            block.size = static_cast<int>(std::min<int64_t>(BLOCK, chunk.end - block.begin));
            const uint8_t *allowed = call.allowed ? call.allowed + block.begin : nullptr;
            if (block.size < BLOCK) {
                std::copy_n(block.bits, block.size, bits);
                if (allowed)
                    std::copy_n(allowed, block.size, padded);
                else
                    std::fill_n(padded, block.size, uint8_t{1});
                block.bits = bits;
                allowed = padded;
            }
            load_keys(block.bits, block.keys);
            if (allowed) forbid(allowed, block.keys);
            run(block);
        }
    }

    int64_t row_major(int64_t place) const {
        if (call.dimensions == 0) return place;
        int64_t found = 0;
        for (int64_t d = call.dimensions - 1; d >= 0; d--) {
            found += place % call.sizes[d] * call.strides[d];
            place /= call.sizes[d];
        }
        return found;
    }

    // A range that probably holds the key of rank k, where the largest key has rank 0.
    KeyRange<Key> guess() const {
        if (call.n < 8 * SAMPLED_RUNS * RUN) return KeyRange<Key>::all();
        std::vector<Key> sample;
        sample.reserve(SAMPLED_RUNS * RUN);
        for (int64_t run = 0; run < SAMPLED_RUNS; run++)
            for (int64_t i = call.n / SAMPLED_RUNS * run, end = i + RUN; i < end; i++)
                sample.push_back(call.allowed && !call.allowed[i] ? Key{0} : key_of(weight[i]));
        const double size = SAMPLED_RUNS * RUN;
        const double part = (static_cast<double>(call.k) + 0.5) / static_cast<double>(call.n);
        const double margin = 3 * std::sqrt(size * part * (1 - part)) + 2;  // three standard deviations
        const auto high = static_cast<int64_t>(size * part - margin), low = static_cast<int64_t>(size * part + margin);
        KeyRange<Key> range = KeyRange<Key>::all();
        auto begin = sample.begin();
        if (high > 0) {
            std::nth_element(begin, begin + high, sample.end(), std::greater<Key>());
            range.last = begin[high];
            begin += high;
        }
        if (low < static_cast<int64_t>(sample.size())) {
            std::nth_element(begin, sample.begin() + low, sample.end(), std::greater<Key>());
            range.first = sample[low];
        }
        return {range.first, range.last};
    }

    void count(const KeyRange<Key> range) {
        for_chunks([this, range](Chunk &chunk) {
            std::memset(chunk.buckets, 0, sizeof chunk.buckets);
            if (chunk.size >= 0)
                recount(range, chunk);
            else
                count_all(range, chunk);
        });
    }

    void count_all(const KeyRange<Key> range, Chunk &chunk) const {
        int64_t above = 0, size = 0;
        for_blocks(chunk, [&above, &size, &chunk, range](const Block &block) {
            uint8_t flags[BLOCK];
            int places[BLOCK + 1];
            above += count_above(block.keys, range.last);
            flag_within(block.keys, range.first, range.last, flags);
            std::fill(flags + block.size, flags + BLOCK, uint8_t{0});
            const int found = set_flags(flags, places);
            const bool fits = size + found <= chunk.room;
            for (int i = 0; i < found; i++) {
                const Key key = block.keys[places[i]];
                chunk.buckets[static_cast<Key>(key - range.first) >> range.shift]++;
                if (fits) chunk.within[size + i] = key;
            }
            size += found;
        });
        chunk.above = above;
        chunk.size = size <= chunk.room ? size : -1;
    }

    // The same for a part of the range before, from the keys that are in that.
    static void recount(const KeyRange<Key> range, Chunk &chunk) {
        int64_t size = 0;
        for (int64_t i = 0; i < chunk.size; i++) {
            const Key key = chunk.within[i];
            chunk.above += key > range.last;
            if (key < range.first || key > range.last) continue;
            chunk.buckets[static_cast<Key>(key - range.first) >> range.shift]++;
            chunk.within[size++] = key;
        }
        chunk.size = size;
    }

    void find_cut() {
        KeyRange<Key> range = guess();
        std::vector<int64_t> sums(BUCKETS);
        while (true) {
            count(range);
            int64_t above = 0, within = 0;
            std::fill(sums.begin(), sums.end(), 0);
            for (const Chunk &chunk : chunks) {
                above += chunk.above;
                for (int b = 0; b < BUCKETS; b++) sums[b] += chunk.buckets[b];
            }
            for (const int64_t sum : sums) within += sum;
            if (call.k < above || call.k >= above + within) {  // a wrong guess
                range = KeyRange<Key>::all();
                for (Chunk &chunk : chunks) chunk.size = -1;
                continue;
            }
            int bucket = BUCKETS - 1;
            for (; call.k >= above + sums[bucket]; bucket--) above += sums[bucket];
            const Key first = static_cast<Key>(range.first + (static_cast<Key>(bucket) << range.shift));
            if (range.shift == 0) {
                cut = first;
                ties = call.k - above;
                for (Chunk &chunk : chunks) {
                    for (int b = bucket + 1; b < BUCKETS; b++) chunk.above += chunk.buckets[b];
                    chunk.equal = chunk.buckets[bucket];
                }
                return;
            }
            const Key last = static_cast<Key>(first + ((Key{1} << range.shift) - 1));
            range = {first, std::min(last, range.last)};
        }
    }

    void find_last_tie_in_rows() {
        int64_t before = 0;
        for (Chunk &chunk : chunks) {
            const int64_t taken = std::min(ties - before, chunk.equal);
            if (taken > 0 && before + taken == ties)  // the last one is in this chunk
                for_blocks(chunk, [this, seen = before](const Block &block) mutable {
                    if (seen == ties || !any_equal(block.keys, cut)) return;
                    for (int i = 0; i < block.size && seen < ties; i++)
                        if (block.keys[i] == cut && ++seen == ties) last_tie = block.begin + i;
                });
            before += taken;
            chunk.equal = taken;
        }
    }

    void find_last_tie() {
        std::vector<int64_t> rows;
        std::vector<size_t> ends;
        for (const Chunk &chunk : chunks) {
            for_blocks(chunk, [this, &rows](const Block &block) {
                if (!any_equal(block.keys, cut)) return;
                for (int i = 0; i < block.size; i++)
                    if (block.keys[i] == cut) rows.push_back(row_major(block.begin + i));
            });
            ends.push_back(rows.size());
        }
        if (static_cast<int64_t>(rows.size()) < ties) return;
        std::vector<int64_t> ordered = rows;
        std::nth_element(ordered.begin(), ordered.begin() + (ties - 1), ordered.end());
        last_tie = ordered[ties - 1];
        for (size_t c = 0, next = 0; c < chunks.size(); c++)
            for (chunks[c].equal = 0; next < ends[c]; next++) chunks[c].equal += rows[next] <= last_tie;
    }

    bool has_tie(const Block &block) const { return last_tie >= 0 && any_equal(block.keys, cut); }

    bool is_chosen_tie(const Block &block, int i) const {
        return block.keys[i] == cut && row_major(block.begin + i) <= last_tie;
    }

    void flag_chosen(const Block &block, uint8_t *flags) const {
        flag_above(block.keys, cut, flags);
        if (has_tie(block))
            for (int i = 0; i < block.size; i++) flags[i] |= is_chosen_tie(block, i);
    }

    void write_mask() {
        for_chunks([this](const Chunk &chunk) {
            for_blocks(chunk, [this](const Block &block) {
                uint8_t flags[BLOCK];
                flag_chosen(block, flags);
                std::copy_n(flags, block.size, call.mask + block.begin);
            });
        });
    }

    void write_kept() {
        for_chunks([this](const Chunk &chunk) {
            for_blocks(chunk, [this](const Block &block) {
                Key kept[BLOCK];
                keep_above(block.keys, cut, block.bits, kept);
                if (has_tie(block))
                    for (int i = 0; i < block.size; i++)
                        if (is_chosen_tie(block, i)) kept[i] = block.bits[i];
                std::copy_n(kept, block.size, static_cast<Key *>(call.kept) + block.begin);
            });
        });
    }

    void write_compact() {
        int64_t begin = 0;
        for (Chunk &chunk : chunks) {  // from here on, where its part of the result begins and ends
            const int64_t end = std::min(call.k, begin + chunk.above + chunk.equal);
            chunk.above = begin;
            chunk.equal = begin = end;
        }
        chunks.back().equal = call.k;
        for_chunks([this](const Chunk &chunk) {
            int64_t next = chunk.above;
            Key *values = static_cast<Key *>(call.values);
            for_blocks(chunk, [this, &chunk, &next, values](const Block &block) {
                uint8_t flags[BLOCK];
                int places[BLOCK + 1];
                flag_chosen(block, flags);
                const int found = set_flags(flags, places);
                for (int i = 0; i < found && next < chunk.equal; i++) {
                    call.places[next] = block.begin + places[i];
                    values[next++] = block.bits[places[i]];
                }
            });
            for (; next < chunk.equal; next++) {  // only if the weight has changed meanwhile
                call.places[next] = chunk.begin;
                values[next] = weight[chunk.begin];
            }
        });
    }

public:
    explicit Selection(const SelectCall &call) : call(call) {
        const int64_t most = in_parallel ? call.threads * CHUNKS_PER_THREAD : 1;
        const int64_t number = std::max<int64_t>(1, std::min<int64_t>(most, call.n / LEAST_CHUNK));
        const int64_t size = (call.n / number / BLOCK + 1) * BLOCK;
        for (int64_t begin = 0; begin < call.n; begin += size)
            chunks.emplace_back(begin, std::min(call.n, begin + size));
    }

    int64_t run(uint64_t &next_magnitude) {
        find_cut();
        int64_t chosen = call.k;
        if (cut == 0) {  // all allowed edges are chosen
            chosen -= ties;
            if (ties > 0) return chosen;
        }
        if (ties == 0)
            for (Chunk &chunk : chunks) chunk.equal = 0;
        else if (call.dimensions == 0)
            find_last_tie_in_rows();
        else
            find_last_tie();
        next_magnitude = cut == 0 ? 0 : cut - 1;
        if (call.mask) write_mask();
        if (call.kept) write_kept();
        if (call.places) write_compact();
        return chosen;
    }
};

// Returns the number of chosen edges: k, or fewer if fewer are allowed (then there are no results); -1 without memory.
extern "C" int64_t wirings_select(SelectCall *call) {
    try {
        if (call->bytes == 2) return Selection<uint16_t>(*call).run(call->next_magnitude);
        if (call->bytes == 4) return Selection<uint32_t>(*call).run(call->next_magnitude);
        return Selection<uint64_t>(*call).run(call->next_magnitude);
    } catch (const std::bad_alloc &) {
        return -1;
    }
}

extern "C" int64_t wirings_select_call_bytes() { return sizeof(SelectCall); }
