// Recurrent layers: LSTM, GRU and plain ones. What they take from the tokens is computed before, for all tokens at once, as
// sums over edges; this is the recurrence, token by token.
#pragma once

#include "kernel_step.h"
#include "linear.h"
#include "thread_pool.h"
#include "vector_functions.h"

enum RecurrentKind { LSTM, GRU, RNN_TANH, RNN_RELU };

// The units are divided into parts, each with all gates of its units, so that threads share the work of one token. Rows
// are the gates of a part's units, one gate after the other, in vectors of which the last of each gate may be padded.
struct RecurrentPart {
    int32_t unit, units;     // its first unit, and how many it has
    int32_t rows;            // the number of its first row
};

struct RecurrentStep {
    const int32_t *in;       // for each row, the offset of the map with what comes from the tokens; -1 for padding
    const int32_t *out;      // the offset of each unit's map
    const float *bias;       // of the recurrence, for each row
    const float *weights;    // dense: for each part, (panels, units, PANEL · LANES), where rows are padded to panels; or null
    const int32_t *starts;   // sparse: where the records of each LANES rows begin, in words; or null
    const int32_t *records;  // LANES units, then LANES weights
    const int32_t *places;   // sparse: for each record's row, its number within the part; -1 for padding
    const int32_t *slices;   // sparse: the LANES rows of a part are slices[i] to slices[i + 1]
    const int32_t *panels;   // dense: the panels of a part are panels[i] to panels[i + 1]
    const RecurrentPart *parts;
    int32_t layer;           // a RecurrentKind
    int32_t gates, units, tokens, count;  // `count` parts, which are tasks
    int32_t reverse;         // whether it starts at the last token
    int32_t gives_cell;      // whether the last cells follow the states, as if they were those of one more token
    int32_t first, first_cell;  // the offset of the states, and cells, before the first token; -1 if they are zero
    int32_t states, other_states;  // the offsets of the units' states after every other token
    int32_t cells;           // the offset of the units' cells
    int32_t counters;        // the offset of count + 2 numbers, LINE floats apart, that are zero between runs
    int32_t longest;         // rows of a part, padded to panels
};

static inline int64_t recurrent_state(const RecurrentStep &step, int64_t token) {
    return token % 2 ? step.other_states : step.states;
}

// rows += weights · state for the rows of a part.
static void recur_dense(const RecurrentStep &step, int part, const float *state, float *rows) {
    for (int64_t panel = step.panels[part]; panel < step.panels[part + 1]; panel++, rows += PANEL * LANES) {
        const float *w = step.weights + panel * step.units * PANEL * LANES;
        V even[PANEL], odd[PANEL];
        for (int v = 0; v < PANEL; v++) {
            even[v] = load(rows + v * LANES);
            odd[v] = V{};
        }
        int i = 0;
        for (; i + 2 <= step.units; i += 2, w += 2 * PANEL * LANES) {
            const V a = all(state[i]), b = all(state[i + 1]);
            UNROLLED for (int v = 0; v < PANEL; v++) {
                even[v] += a * load(w + v * LANES);
                odd[v] += b * load(w + (PANEL + v) * LANES);
            }
        }
        if (i < step.units)
            for (int v = 0; v < PANEL; v++) even[v] += all(state[i]) * load(w + v * LANES);
        for (int v = 0; v < PANEL; v++) store(rows + v * LANES, even[v] + odd[v]);
    }
}

static void recur_sparse(const RecurrentStep &step, int part, const float *state, float *rows) {
    for (int64_t slice = step.slices[part]; slice < step.slices[part + 1]; slice++) {
        V sums[2] = {};
        const int32_t *record = step.records + step.starts[slice], *end = step.records + step.starts[slice + 1];
        for (int odd = 0; record < end; record += 2 * LANES, odd ^= 1) {
            V x;
            for (int i = 0; i < LANES; i++) x[i] = state[record[i]];
            sums[odd] += x * load(reinterpret_cast<const float *>(record + LANES));
        }
        const V sum = sums[0] + sums[1];
        const int32_t *place = step.places + slice * LANES;
        for (int i = 0; i < LANES; i++)
            if (place[i] >= 0) rows[place[i]] += sum[i];
    }
}

// One token for the units of one part, whose sums and what comes from the token are given row by row.
template <int KIND>
static inline void recur_units(const RecurrentStep &step, const RecurrentPart &own, int64_t number, const float *before,
                               const float *given, const float *sums, float *memory) {
    constexpr int GATES = KIND == LSTM ? 4 : KIND == GRU ? 3 : 1;
    const int64_t token = step.reverse ? step.tokens - 1 - number : number, width = ceil_div(own.units, LANES) * LANES;
    const float *old_cells = memory + (number == 0 ? step.first_cell : step.cells);
    const bool starts = number == 0 && (KIND == LSTM ? step.first_cell : step.first) < 0;  // with zeros
    float *after = memory + recurrent_state(step, number), *cells = memory + step.cells;
    for (int i = 0; i < own.units; i += LANES) {
        const int left = own.units - i < LANES ? own.units - i : LANES, unit = own.unit + i;
        V x[GATES], s[GATES], h, old = V{};
        UNROLLED for (int g = 0; g < GATES; g++) {
            x[g] = load(given + g * width + i);
            s[g] = load(sums + g * width + i);
        }
        if (KIND == LSTM) {
            if (!starts) memcpy(&old, old_cells + unit, sizeof(float) * left);
            const V cell = sigmoid_of(x[1 % GATES] + s[1 % GATES]) * old +
                           sigmoid_of(x[0] + s[0]) * tanh_of(x[2 % GATES] + s[2 % GATES]);
            store_part(cells + unit, cell, left);
            h = sigmoid_of(x[3 % GATES] + s[3 % GATES]) * tanh_of(cell);
        } else if (KIND == GRU) {
            if (!starts) memcpy(&old, before + unit, sizeof(float) * left);
            const V fresh = tanh_of(x[2 % GATES] + sigmoid_of(x[0] + s[0]) * s[2 % GATES]);
            h = fresh + sigmoid_of(x[1 % GATES] + s[1 % GATES]) * (old - fresh);
        } else {
            const V sum = x[0] + s[0];
            h = KIND == RNN_TANH ? tanh_of(sum) : blend(sum < V{}, V{}, sum);
        }
        store_part(after + unit, h, left);
        for (int l = 0; l < left; l++) memory[step.out[unit + l] + token] = h[l];
    }
    if (step.gives_cell && number + 1 == step.tokens)
        for (int u = own.unit; u < own.unit + own.units; u++) memory[step.out[u] + step.tokens] = cells[u];
}

static void recur(const RecurrentStep &step, int part, int64_t number, float *memory, float *scratch) {
    const RecurrentPart &own = step.parts[part];
    const int64_t token = step.reverse ? step.tokens - 1 - number : number;
    const int rows = step.gates * static_cast<int>(ceil_div(own.units, LANES) * LANES);
    const float *before = memory + (number == 0 ? step.first : recurrent_state(step, number - 1));
    float *sums = scratch, *given = scratch + step.longest;
    memcpy(sums, step.bias + own.rows, sizeof(float) * rows);
    for (int r = rows; r < step.longest; r++) sums[r] = 0;
    const int32_t *in = step.in + own.rows;
    for (int r = 0; r < rows; r++) given[r] = in[r] < 0 ? 0 : memory[in[r] + token];
    if (number > 0 || step.first >= 0) {
        if (step.weights)
            recur_dense(step, part, before, sums);
        else
            recur_sparse(step, part, before, sums);
    }
    switch (step.layer) {
        case LSTM: return recur_units<LSTM>(step, own, number, before, given, sums, memory);
        case GRU: return recur_units<GRU>(step, own, number, before, given, sums, memory);
        case RNN_TANH: return recur_units<RNN_TANH>(step, own, number, before, given, sums, memory);
        default: return recur_units<RNN_RELU>(step, own, number, before, given, sums, memory);
    }
}

static int64_t recurrent_scratch(const RecurrentStep &step) { return 2 * int64_t{step.longest}; }

// Every task goes through all tokens, and through all parts of each token, its own first: it computes those that nobody
// has taken. So a task only waits for what others have taken, and if the others are late, it does everything.
static void run_recurrent(const RecurrentStep &step, float *memory, float *scratch, int task, const CallerTensors &) {
    int32_t *counters = reinterpret_cast<int32_t *>(memory + step.counters);
    int32_t *done = counters + int64_t{step.count} * LINE, *finished = done + LINE;
    for (int32_t number = 0; number < step.tokens; number++) {
        for (int i = 0; i < step.count; i++) {
            const int part = (task + i) % step.count;
            int32_t *taken = counters + int64_t{part} * LINE, expected = number;
            if (!__atomic_compare_exchange_n(taken, &expected, number + 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
                continue;
            recur(step, part, number, memory, scratch);
            __atomic_fetch_add(done, 1, __ATOMIC_RELEASE);
        }
        for (int spins = 0; __atomic_load_n(done, __ATOMIC_ACQUIRE) < (number + 1) * step.count;) {
            pause_a_moment();
            if (++spins >= SPINS_TO_YIELD) sched_yield();
        }
    }
    if (__atomic_add_fetch(finished, 1, __ATOMIC_ACQ_REL) < step.count) return;
    for (int i = 0; i < step.count + 2; i++) counters[int64_t{i} * LINE] = 0;  // by the last task, for the next run
}
