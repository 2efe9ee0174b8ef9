// Linear layers for few rows: y[m, n] = sum_k x[m, k] * w[n, k] + bias[n], bound by reading the weights once.
//
// Weights lie in panels of 32 columns, one panel after the other, so that what is multiplied together lies together
// (multiply.h). Rows are taken in blocks; a panel comes from memory for the first block and from cache for the others.

static const int64_t AHEAD = 8192;  // bytes that a panel's only block of rows fetches before it needs them
static const int64_t PART_BYTES = 1 << 17;  // of a panel, that several blocks of rows take turns on
static const int64_t ROW_BYTES = 1 << 18;   // of activations, that several panels take turns on
static const int64_t MOST_TOGETHER = 8;     // panels
static const int64_t ROWS_TOGETHER = 512;   // whose sums in so many panels stay in cache, too
static const int64_t LEAST_PART = 256;      // k's of a part: each begins and ends with the sums in memory
static const int64_t MADE_READY = 512;      // k's of which one thread makes activations ready

// Rows shared out so that blocks differ by one row at most; those of tiles are full, but for the last.
struct Blocks {
    int64_t total, most, count, least, larger;
    bool full;
    Blocks(int64_t rows, int64_t most, bool full)
        : total(rows), most(most), count((rows + most - 1) / most), least(rows / count), larger(rows % count), full(full) {}
    int64_t rows(int64_t block) const {
        return !full ? least + (block < larger) : total - block * most < most ? total - block * most : most;
    }
    int64_t first(int64_t block) const { return full ? block * most : block * least + (block < larger ? block : larger); }
};

// One group of one row: its scale, whole numbers, and their sum. What is not finite makes the scale NaN.
static INLINE float quantize(const float *x, int64_t size, int64_t group, int8_t *codes, int32_t &sum) {
    float padded[64];
    if (size < group) {
        memset(padded, 0, sizeof(padded));
        memcpy(padded, x, 4 * size);
        x = padded;
    }
    Ints most = {}, sums = {};
    for (int64_t k = 0; k < group; k += LANES) {  // as whole numbers, positive floats have the same order
        const Ints magnitude = read<Ints>(x + k) & 0x7fffffff;
        most = select(magnitude > most, magnitude, most);
    }
    int32_t bits = 0;
    for (int64_t i = 0; i < LANES; i++) bits = most[i] > bits ? most[i] : bits;
    const float largest = as_float(bits) < 0x1p-120f ? 0.0f : as_float(bits);
    const float factor = largest == 0.0f ? 0.0f : 127.0f / largest;
    for (int64_t k = 0; k < group; k += LANES) {
        const float whole = 0x1.8p23f;  // added and taken away it rounds, halves to even
        const Floats rounded = read<Floats>(x + k) * factor + whole - whole;
        const Ints values = converted<Ints>(rounded);
        sums += values;
        write_bytes(codes + k, values);
    }
    sum = 0;
    for (int64_t i = 0; i < LANES; i++) sum += sums[i];
    return bits < 0x7f800000 ? largest / 127.0f : NAN;
}

// Writes words of row r, from the number `first` on: those of a tile lie together, others `rows` apart.
static INLINE void place_words(const void *from, int64_t first, int64_t count, int64_t r, int64_t rows, int64_t words,
                               uint32_t *ready) {
    if (words > 1)
        memcpy(ready + (first / words * rows + r) * words, from, 4 * count);
    else
        for (int64_t i = 0; i < count; i++) ready[(first + i) * rows + r] = read<uint32_t>((const char *)from + 4 * i);
}

#ifdef DOTS
// Numbers k to k + 31 as pairs of bf16. Subnormal ones become zero, as they are in products of pairs.
static INLINE __m512i pairs_of(const float *x, int64_t inputs, int64_t k, int type) {
    float padded[32];
    const float *from = x + k;
    if (k + 32 > inputs) {
        memset(padded, 0, sizeof(padded));
        if (k < inputs) memcpy(padded, from, 4 * (inputs - k));
        from = padded;
    }
    const __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
    if (type != FP8) return pairs;
    // In fp8 the first of four is beside the third, and the second beside the fourth.
    return _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(pairs, 0xd8), 0xd8);
}
#endif

// words: of a row that lie together.
static void make_ready(const float *x, int64_t inputs, int64_t rows, int64_t from, int64_t to, int type, bool dots,
                       bool affine, int64_t words, uint32_t *ready, float *scales, int32_t *zeros) {
    if (is_rounded(type)) {
        const int64_t group = shape_of(type).group;
        const int32_t zero = (int32_t)shape_of(type).zero;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t g = from / group; g * group < to; g++) {
                int8_t codes[64];
                int32_t sum;
                const int64_t size = inputs - g * group < group ? inputs - g * group : group;
                scales[g * rows + r] = quantize(x + r * inputs + g * group, size, group, codes, sum);
                zeros[g * rows + r] = affine ? read<int32_t>(&(const float &)(float)sum) : -sum * zero;
                if (dots)
                    place_words(codes, g * group / 4, group / 4, r, rows, words, ready);
                else
                    for (int64_t k = 0; k < group; k++)
                        ready[(g * group + k) * rows + r] = read<uint32_t>(&(const float &)(float)codes[k]);
            }
        return;
    }
#ifdef DOTS
    if (dots) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = from; k < to; k += 32) {
                const __m512i pairs = pairs_of(x + r * inputs, inputs, k, type);
                place_words(&pairs, k / 2, 16, r, rows, words, ready);
            }
        return;
    }
#endif
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = from; k < to; k++)
            ready[k * rows + r] = k < inputs ? read<uint32_t>(x + r * inputs + k) : 0;
}

static INLINE bool is_gated(int ending) { return ending == GATED || ending == GATED_GELU; }

static void finish(const float *sums, const float *bias, float *y, int64_t rows, int64_t first, int64_t outputs,
                   int64_t stride, int ending) {
    for (int64_t r = 0; r < rows; r++, sums += WIDTH) {
        Floats low = read<Floats>(sums), high = read<Floats>(sums + LANES);
        if (bias) {
            low += read<Floats>(bias + first);
            high += read<Floats>(bias + first + LANES);
        }
        if (is_gated(ending)) {  // a panel is 16 gates, then the 16 values they open
            const Floats value = (ending == GATED ? silu(low) : gelu(low)) * high;
            const int64_t size = outputs / 2, column = first / 2;
            memcpy(y + r * size + column, &value, 4 * (size - column < LANES ? size - column : LANES));
            continue;
        }
        float *place = y + r * stride + first;
        if (outputs - first >= WIDTH) {
            write(place, ending == ADD ? read<Floats>(place) + low : low);
            write(place + LANES, ending == ADD ? read<Floats>(place + LANES) + high : high);
            continue;
        }
        float both[WIDTH];
        write(both, low);
        write(both + LANES, high);
        for (int64_t c = 0; c < outputs - first; c++) place[c] = ending == ADD ? place[c] + both[c] : both[c];
    }
}

// A thread's sums [rows][WIDTH] of the panel it is at, all zero.
static float *zero_sums(int64_t rows) {
    static thread_local Grown<float> room;
    float *sums = room.hold(rows * WIDTH);
    memset(sums, 0, rows * WIDTH * sizeof(float));
    return sums;
}

#include "low_rank.h"

// x: [rows][inputs]; y: [rows][stride], or half as many of a gated layer. room: 4 * rows * (depth + 2 * groups) bytes.
// runs: rows with adapters, or null.
LOCAL void linear(const Linear *layer, const float *x, float *y, void *room, int64_t rows, int32_t ending,
                   const Runs *runs, int threads) {
    const int type = layer->type;
    const bool dots = layer->dots;
    const Shape shape = shape_of(type);
    const int64_t inputs = layer->inputs, outputs = layer->outputs, depth = shape.depth(inputs);
    const int64_t groups = depth / shape.group, panels = (outputs + WIDTH - 1) / WIDTH;
    const int64_t in_step = !dots ? 1 : is_rounded(type) ? 4 : 2;              // numbers in a word of activations
    const int64_t filled = in_step == 2 ? (depth + 31) / 32 * 32 : depth, steps = filled / in_step;  // as tiles read them
    const bool tiles = by_tiles(type, dots, rows);
    const int64_t words = words_together(type, dots, tiles);
    const Blocks blocks(rows, rows_of_block(type, dots, tiles), tiles);
    // A single block of rows streams through a panel; several take turns on a part of it that stays in cache, and
    // several panels on such a part of many rows. Adapters add to the sums of all rows.
    const int64_t at_once = runs ? blocks.count : ROWS_TOGETHER / blocks.most;
    const int64_t row_bytes = 4 * std::min(rows, at_once * blocks.most) * steps;
    const int64_t row_parts = blocks.count == 1 ? 1 : std::min((row_bytes - 1) / ROW_BYTES, (depth - 1) / LEAST_PART) + 1;
    const int64_t panel_parts = blocks.count == 1 ? 1 : (shape.panel_bytes(inputs) - 1) / PART_BYTES + 1;
    const int64_t parts = std::max(row_parts, panel_parts);
    const int64_t most_together = std::min(panels / (4 * std::max(threads, 1)), MOST_TOGETHER);  // some for each thread
    const int64_t together = row_parts == 1 ? 1 : std::max(most_together, (int64_t)1);
    const int64_t multiple = layer->scaling >= NESTED ? NEST : 64;  // whole groups, and whole ones of groups
    const int64_t part = (depth / parts + multiple - 1) / multiple * multiple;
    const bool affine = is_affine(layer->scaling);
    uint32_t *ready = (uint32_t *)room;
    float *scales = (float *)(ready + rows * steps);
    int32_t *zeros = (int32_t *)(scales + rows * groups);
    const auto ready_from = [&](int64_t unit) {
        const int64_t from = unit * MADE_READY, to = from + MADE_READY < filled ? from + MADE_READY : filled;
        for (int64_t b = 0; b < blocks.count; b++) {
            const int64_t m = blocks.first(b);
            make_ready(x + m * inputs, inputs, blocks.rows(b), from, to, type, dots, affine, words,
                       ready + m * steps, scales + m * groups, zeros + m * groups);
        }
    };
    const auto place_of = [&](int64_t p, int64_t k) {
        return (const uint8_t *)layer->packed + p * shape.panel_bytes(inputs) + k * WIDTH * shape.bits / 8;
    };
    const auto bytes_of_scales = [&](int64_t size) { return scale_bytes(layer->scaling, shape.group, size); };
    const auto multiply = [&](int64_t first, int64_t last, int64_t b0, int64_t b1, int64_t height, float *sums) {
        for (int64_t k = 0; k < depth; k += part)
            for (int64_t p = first; p < last; p++) {
                const int64_t size = depth - k < part ? depth - k : part, bytes = size * WIDTH * shape.bits / 8;
                const uint8_t *place = place_of(p, k), *weight_scales = layer->scales;  // null where weights are no codes
                const uint8_t *next = p + 1 < last       ? place_of(p + 1, k)
                                      : k + part < depth ? place_of(first, k + part)
                                                         : place_of(last, 0);
                if (weight_scales) weight_scales += p * bytes_of_scales(depth) + bytes_of_scales(k);
                for (int64_t b = b0; b < b1; b++) {
                    const int64_t m = blocks.first(b), count = blocks.rows(b), g = k / shape.group;
                    // Several blocks share the fetching of what comes next: memory is busy in all of them.
                    const uint8_t *ahead = blocks.count == 1 ? place + AHEAD : next + (b - b0) * bytes / (b1 - b0);
                    const Ready block = {ahead, 128 / (b1 - b0), ready + m * steps + k / in_step * count,
                                         scales + m * groups + g * count, zeros + m * groups + g * count,
                                         layer->scaling, layer->levels, count};
                    float *own = sums + (height * (p - first) + m - blocks.first(b0)) * WIDTH;
                    kernel_of(type, dots, count, tiles)(block, place, weight_scales, size, own);
                }
            }
    };
    const auto some_panels = [&](int64_t item) {
        const int64_t first = item * together, last = std::min(first + together, panels), column = layer->first / WIDTH;
        for (int64_t p = first; runs && p < last; p++) fetch_up(layer, column + p, runs);
        for (int64_t b0 = 0; b0 < blocks.count; b0 += at_once) {
            const int64_t b1 = std::min(b0 + at_once, blocks.count), m = blocks.first(b0);
            const int64_t height = (b1 < blocks.count ? blocks.first(b1) : rows) - m;
            float *sums = zero_sums(height * (last - first));
            multiply(first, last, b0, b1, height, sums);
            float *to = y + layer->first + m * (is_gated(ending) ? outputs / 2 : layer->stride);
            for (int64_t p = first; p < last; p++, sums += height * WIDTH) {
                if (runs) panel_up(layer, column + p, runs, sums);
                finish(sums, layer->bias, to, height, p * WIDTH, outputs, layer->stride, ending);
            }
        }
    };
    // Few activations are ready before another thread has come.
    in_parallel((filled + MADE_READY - 1) / MADE_READY, (FEW + rows - 1) / rows, threads, ready_from);
    if (runs && !layer->first) all_down(layer, x, runs, threads);  // the others have the same inputs
    const int64_t items = (panels + together - 1) / together;
    in_parallel<EndTiles>(items, shares(items, threads), threads, some_panels, rows * depth * 8 + type);
    if (layer->next) linear(layer->next, x, y, room, rows, ending, runs, threads);
}
