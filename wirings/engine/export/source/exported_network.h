// An exported network: decodes its data when it is created, and runs its plans.
//
// The data is an image of memory that holds the steps of all plans, the arrays that they point to, and constants. In the
// source file, it is text: five characters for each 32-bit word.
#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

static_assert(sizeof(void *) == 8 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "this network can only be compiled for a 64-bit little-endian processor");

// Words of the text that are copied into the image: `rows` rows of `columns` words, which are `pitch` words apart there.
struct ImagePart {
    int64_t from, to, rows, columns, pitch;
};

// A pointer at one byte of the image to another byte of it.
struct ImagePointer {
    int64_t at, to;
};

// Numbers that are written into the memory for maps once.
struct ConstantRow {
    int64_t to, count;
};

// The places of steps and constants are bytes of the image.
struct PlanData {
    int64_t steps, floats, constant_rows, constants;
    int count, constant_row_count;
};

// A part of the network, which reads and writes tensors by number.
struct SegmentData {
    PlanData one;   // one example at a time, on all threads
    PlanData many;  // each example on one thread; without steps if there is no such plan
    const int *inputs, *outputs;
    int input_count, output_count;
};

struct TensorData {
    int64_t floats;  // of one example; an integer counts twice
};

// Integers of an input that have to be from 0 to limit - 1.
struct IndexData {
    int64_t tensor, limit, start, count;
};

struct NetworkData {
    const char *const *text;
    int text_count;
    int64_t words, image_words;
    const ImagePart *parts;
    int part_count;
    const ImagePointer *pointers;
    int pointer_count;
    const SegmentData *segments;
    int segment_count;
    const TensorData *tensors;  // inputs, then outputs, then those between segments
    int input_count, output_count, tensor_count;
    const IndexData *indices;
    int index_count;
    int64_t batch;  // the only batch size; 0 for any
};

enum { RUN_OK, RUN_INVALID_ARGUMENT, RUN_INVALID_TOKEN, RUN_OUT_OF_MEMORY };
enum { MAX_THREADS = 1024 };

static inline uint32_t word_of(const char *text) {
    uint32_t word = 0;
    for (int i = 0; i < 5; i++) {
        // A question mark and a backslash have a special meaning in source code.
        const char c = text[i] == 'x' ? '?' : text[i] == 'y' ? '\\' : text[i];
        word = word * 85 + static_cast<uint32_t>(c - '#');
    }
    return word;
}

// A z means that the previous word is repeated as often as the next one says.
static inline std::vector<uint32_t> words_of(const NetworkData &data) {
    std::vector<uint32_t> words;
    words.reserve(static_cast<size_t>(data.words));
    for (int i = 0; i < data.text_count; i++)
        for (const char *text = data.text[i]; *text; text += 5) {
            if (*text == 'z')
                words.insert(words.end(), word_of(++text), uint32_t{words.back()});
            else
                words.push_back(word_of(text));
        }
    return words;
}

class ExportedNetwork {
    struct Free {
        void operator()(float *memory) const { wirings_free(memory); }
    };
    typedef std::unique_ptr<float, Free> Memory;

    const NetworkData &data;
    const int threads;
    std::mutex busy;
    const Memory image;
    std::vector<Memory> scratches;
    std::vector<std::vector<Memory>> one, many;  // the memory for maps, by segment; `many` is allocated when it is needed
    ThreadPool pool;

    static Memory allocated(int64_t floats) {
        Memory memory(wirings_memory(floats));
        if (!memory) throw std::bad_alloc();
        return memory;
    }

    template <class T>
    const T *at_byte(int64_t place) const {
        return reinterpret_cast<const T *>(reinterpret_cast<const char *>(image.get()) + place);
    }

    static Memory decoded(const NetworkData &data) {
        Memory made = allocated(data.image_words);
        char *bytes = reinterpret_cast<char *>(made.get());
        const std::vector<uint32_t> words = words_of(data);
        for (int i = 0; i < data.part_count; i++) {
            const ImagePart &part = data.parts[i];
            for (int64_t row = 0; row < part.rows; row++)
                memcpy(bytes + (part.to + row * part.pitch) * 4, words.data() + part.from + row * part.columns,
                       static_cast<size_t>(part.columns) * 4);
        }
        for (int i = 0; i < data.pointer_count; i++) {
            const void *to = bytes + data.pointers[i].to;
            memcpy(bytes + data.pointers[i].at, &to, sizeof to);
        }
        return made;
    }

    int64_t scratch_for(const PlanData &plan) const {
        int64_t most = 0;
        for (int i = 0; i < plan.count; i++) most = std::max(most, wirings_scratch(at_byte<KernelStep>(plan.steps) + i));
        return most;
    }

    void prepare(const PlanData &plan, std::vector<Memory> &memories, int count) const {
        while (static_cast<int>(memories.size()) < count) {
            Memory memory = allocated(plan.floats);
            const ConstantRow *rows = at_byte<ConstantRow>(plan.constant_rows);
            const float *from = at_byte<float>(plan.constants);
            for (int i = 0; i < plan.constant_row_count; from += rows[i++].count)
                std::copy(from, from + rows[i].count, memory.get() + rows[i].to);
            memories.push_back(std::move(memory));
        }
    }

    // Run `count` examples of `tensors` from the first on.
    void run_plan(const SegmentData &segment, const PlanData &plan, std::vector<Memory> &memories, bool apart,
                  const std::vector<float *> &tensors, int64_t first, int64_t count) {
        prepare(plan, memories, apart ? threads : 1);
        std::vector<float *> own, scratch, outputs;
        std::vector<const float *> inputs;
        std::vector<int64_t> input_sizes, output_sizes;
        for (const Memory &memory : memories) own.push_back(memory.get());
        for (const Memory &memory : scratches) scratch.push_back(memory.get());
        for (int i = 0; i < segment.input_count; i++) {
            input_sizes.push_back(data.tensors[segment.inputs[i]].floats);
            inputs.push_back(tensors[segment.inputs[i]] + first * input_sizes.back());
        }
        for (int i = 0; i < segment.output_count; i++) {
            output_sizes.push_back(data.tensors[segment.outputs[i]].floats);
            outputs.push_back(tensors[segment.outputs[i]] + first * output_sizes.back());
        }
        const KernelArguments arguments = {
            at_byte<KernelStep>(plan.steps), own.data(), scratch.data(), inputs.data(), input_sizes.data(), outputs.data(),
            output_sizes.data(), plan.count, segment.input_count, segment.output_count, apart};
        if (wirings_run(&pool, &arguments, count, nullptr)) throw std::bad_alloc();
    }

    bool has_invalid_token(int64_t batch, const void *const *inputs) const {
        for (int i = 0; i < data.index_count; i++) {
            const IndexData &own = data.indices[i];
            const int64_t size = data.tensors[own.tensor].floats / 2;  // of one example
            const int64_t *integers = static_cast<const int64_t *>(inputs[own.tensor]);
            for (int64_t image = 0; image < batch; image++)
                for (int64_t t = own.start; t < own.start + own.count; t++)
                    if (integers[image * size + t] < 0 || integers[image * size + t] >= own.limit) return true;
        }
        return false;
    }

public:
    ExportedNetwork(const NetworkData &about, int count)
        : data(about), threads(count), image(decoded(about)), one(about.segment_count), many(about.segment_count),
          pool(count) {
        int64_t need = 1;
        for (int i = 0; i < data.segment_count; i++)
            need = std::max({need, scratch_for(data.segments[i].one), scratch_for(data.segments[i].many)});
        for (int i = 0; i < threads; i++) scratches.push_back(allocated(need));
        for (int i = 0; i < data.segment_count; i++) prepare(data.segments[i].one, one[i], 1);
    }

    int run(int64_t batch, const void *const *inputs, void *const *outputs) {
        if (batch < 0 || (data.batch && batch != data.batch)) return RUN_INVALID_ARGUMENT;
        if (batch == 0) return RUN_OK;
        for (int i = 0; i < data.tensor_count; i++)
            if (batch > INT64_MAX / 8 / std::max(data.tensors[i].floats, int64_t{1})) return RUN_INVALID_ARGUMENT;
        for (int i = 0; i < data.input_count; i++)
            if (!inputs[i]) return RUN_INVALID_ARGUMENT;
        for (int i = 0; i < data.output_count; i++)
            if (!outputs[i]) return RUN_INVALID_ARGUMENT;
        if (has_invalid_token(batch, inputs)) return RUN_INVALID_TOKEN;
        try {
            std::lock_guard<std::mutex> lock(busy);
            std::vector<float *> tensors;
            std::vector<std::vector<float>> between;
            for (int i = 0; i < data.tensor_count; i++) {
                const int output = i - data.input_count;
                if (output < 0) {
                    tensors.push_back(const_cast<float *>(static_cast<const float *>(inputs[i])));  // it is only read
                } else if (output < data.output_count) {
                    tensors.push_back(static_cast<float *>(outputs[output]));
                } else {
                    between.emplace_back(static_cast<size_t>(batch * data.tensors[i].floats));
                    tensors.push_back(between.back().data());
                }
            }
            for (int i = 0; i < data.segment_count; i++) {
                const SegmentData &segment = data.segments[i];
                const int64_t apart = batch > 1 && segment.many.count ? batch - batch % threads : 0;
                if (apart) run_plan(segment, segment.many, many[i], true, tensors, 0, apart);
                if (apart < batch) run_plan(segment, segment.one, one[i], false, tensors, apart, batch - apart);
            }
        } catch (const std::exception &) {
            return RUN_OUT_OF_MEMORY;
        }
        return RUN_OK;
    }

    // Null if there is not enough memory, or for an invalid number of threads.
    static ExportedNetwork *create(const NetworkData &data, int threads) {
        if (threads < 1 || threads > MAX_THREADS) return nullptr;
        try {
            return new ExportedNetwork(data, threads);
        } catch (const std::exception &) {
            return nullptr;
        }
    }
};
