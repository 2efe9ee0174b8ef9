// What Python calls: plain C, so that no header of Python or PyTorch is needed.

#include "cpu.h"
#include "panels.h"
#include "team.h"
#include "types.h"

// The only names that others see.
#if defined(_WIN32)
#define PUBLIC __declspec(dllexport)
#else
#define PUBLIC __attribute__((visibility("default")))
#endif

// A source install compiles portable code and the set of its processor, and names the latter; wheels have all sets.
#if !defined(SOME_ISAS)
#if defined(__x86_64__)
#define WITH_avx2
#define WITH_avx_vnni
#define WITH_avx512
#define WITH_avx512_vnni
#define WITH_avx512_bf16
#elif defined(__aarch64__)
#define WITH_neon_dotprod
#define WITH_neon_i8mm
#endif
#endif

namespace portable { extern const Native native; }
#if defined(WITH_avx2)
namespace avx2 { extern const Native native; }
#endif
#if defined(WITH_avx_vnni)
namespace avx_vnni { extern const Native native; }
#endif
#if defined(WITH_avx512)
namespace avx512 { extern const Native native; }
#endif
#if defined(WITH_avx512_vnni)
namespace avx512_vnni { extern const Native native; }
#endif
#if defined(WITH_avx512_bf16)
namespace avx512_bf16 {
extern const Native native;
extern const bool knows_tiles;
}

static const Native amx = [] {  // the same but for linear layers
    Native result = avx512_bf16::native;
    result.name = "AVX-512 VNNI BF16 AMX";
    return result;
}();

static bool runs_amx() { return avx512_bf16::knows_tiles && has_amx(); }
#endif
#if defined(WITH_neon_dotprod)
namespace neon_dotprod { extern const Native native; }
#endif
#if defined(WITH_neon_i8mm)
namespace neon_i8mm { extern const Native native; }
#endif

struct InstructionSet {
    const Native *native;
    bool (*runs_here)();
};

static const InstructionSet sets[] = {  // best first
#if defined(WITH_avx512_bf16)
    {&amx, runs_amx}, {&avx512_bf16::native, has_avx512_bf16},
#endif
#if defined(WITH_avx512_vnni)
    {&avx512_vnni::native, has_avx512_vnni},
#endif
#if defined(WITH_avx512)
    {&avx512::native, has_avx512},
#endif
#if defined(WITH_avx_vnni)
    {&avx_vnni::native, has_avx_vnni},
#endif
#if defined(WITH_avx2)
    {&avx2::native, has_avx2},
#endif
#if defined(WITH_neon_i8mm)
    {&neon_i8mm::native, has_i8mm},
#endif
#if defined(WITH_neon_dotprod)
    {&neon_dotprod::native, has_dotprod},
#endif
    {&portable::native, [] { return true; }},
};

static const Native *chosen() {
    for (const InstructionSet &set : sets)
        if (set.runs_here()) return set.native;
    return &portable::native;
}

static const Native *native = chosen();
bool has_tiles = strstr(native->name, "AMX");

#include "growth.h"

// Where weight [n][k] of [outputs][inputs] lies in the panels, in numbers of its type.
static int64_t place(int type, int64_t n, int64_t k, int64_t depth) {
    const int64_t panel = n / WIDTH * depth * WIDTH, c = n % WIDTH;
    return type == BF16 ? panel + (k / 2 * WIDTH + c) * 2 + k % 2 : panel + k * WIDTH + c;
}

static const uint32_t EACH_BYTE = 0x01010101;  // times a number: that number in each byte of a word

// body(first) for the first row of each panel.
template <class Body>
static void in_panels(int64_t outputs, int threads, const Body &body) {
    const int64_t panels = (outputs + WIDTH - 1) / WIDTH;
    in_parallel(panels, shares(panels, threads), threads, [&](int64_t p) { body(p * WIDTH); });
}

template <class Number>
static void move(int type, Number *packed, Number *weights, int64_t outputs, int64_t inputs, int64_t depth, bool packs,
                 int threads) {
    in_panels(outputs, threads, [&](int64_t first) {
        for (int64_t start = 0; start < inputs; start += 64)
            for (int64_t n = first; n < outputs && n < first + WIDTH; n++)
                for (int64_t k = start; k < inputs && k < start + 64; k++) {
                    Number &inside = packed[place(type, n, k, depth)], &outside = weights[n * inputs + k];
                    (packs ? inside : outside) = packs ? outside : inside;
                }
    });
}

// The same of whole words, fp32 or two neighbouring bf16: all rows of a panel lie one word apart.
static void move_words(uint32_t *packed, uint32_t *weights, int64_t outputs, int64_t inputs, int64_t depth, bool packs,
                       int threads) {
    in_panels(outputs, threads, [&](int64_t first) {
        for (int64_t start = 0; start < inputs; start += 64) {
            const int64_t end = start + 64 < inputs ? start + 64 : inputs;
            for (int64_t n = first; n < outputs && n < first + WIDTH; n++) {
                uint32_t *row = weights + n * inputs, *column = packed + first * depth + n - first;
                if (packs)
                    for (int64_t k = start; k < end; k++) column[k * WIDTH] = row[k];
                else
                    for (int64_t k = start; k < end; k++) row[k] = column[k * WIDTH];
            }
        }
    });
}

// A row's codes of one group, four in each of `count` words, into its words in a panel; upper bits come first.
static INLINE void pack_group(uint32_t *packed, const uint32_t *codes, int64_t count, int64_t bits) {
    const int64_t more = bits - 4;
    if (bits == 8) {
        for (int64_t w = 0; w < count; w++) packed[w * WIDTH] = codes[w];
        return;
    }
    if (more) {
        uint32_t upper = 0;
        for (int64_t w = 0; w < count; w++) upper |= (codes[w] >> 4 & EACH_BYTE * ((1u << more) - 1)) << more * w;
        *packed = upper;
        packed += WIDTH;
    }
    for (int64_t w = 0; w < count; w += 2)
        packed[w / 2 * WIDTH] = (codes[w] & EACH_BYTE * 15) | (codes[w + 1] & EACH_BYTE * 15) << 4;
}

static INLINE void unpack_group(const uint32_t *packed, uint32_t *codes, int64_t count, int64_t bits) {
    const int64_t more = bits - 4;
    const uint32_t *lower = bits == 8 || !more ? packed : packed + WIDTH;
    for (int64_t w = 0; w < count; w++) {
        codes[w] = bits == 8 ? lower[w * WIDTH] : lower[w / 2 * WIDTH] >> w % 2 * 4 & EACH_BYTE * 15;
        if (bits < 8 && more) codes[w] |= (*packed >> more * w & EACH_BYTE * ((1u << more) - 1)) << 4;
    }
}

template <int64_t BITS, int64_t GROUP>
static void move_groups(uint32_t *packed, uint32_t *weights, int64_t outputs, int64_t depth, bool packs, int threads) {
    const int64_t words = GROUP / 4, inside = GROUP * WIDTH * BITS / 32, at_once = 256 / GROUP;
    in_panels(outputs, threads, [&](int64_t first) {
        const int64_t groups = depth / GROUP, end = first + WIDTH < outputs ? first + WIDTH : outputs;
        for (int64_t start = 0; start < groups; start += at_once)
            for (int64_t n = first; n < end; n++)
                for (int64_t g = start; g < groups && g < start + at_once; g++) {
                    uint32_t *panel = packed + first / WIDTH * groups * inside + g * inside + n - first;
                    uint32_t *codes = weights + n * (depth / 4) + g * words;
                    packs ? pack_group(panel, codes, words, BITS) : unpack_group(panel, codes, words, BITS);
                }
    });
}

static void move_codes(int type, uint32_t *packed, uint32_t *weights, int64_t outputs, int64_t depth, bool packs,
                       int threads) {
    switch (shape_of(type).bits) {
        case 8: return move_groups<8, 16>(packed, weights, outputs, depth, packs, threads);  // of any size
        case 6: return move_groups<6, 16>(packed, weights, outputs, depth, packs, threads);
        case 5: return move_groups<5, 32>(packed, weights, outputs, depth, packs, threads);
        default: return move_groups<4, 32>(packed, weights, outputs, depth, packs, threads);
    }
}

static void unpack_rows(const Linear *layer, const int64_t *rows, float *result, int64_t count, int threads) {
    const int type = layer->type;
    const int64_t inputs = layer->inputs, depth = shape_of(type).depth(inputs);
    in_parallel(count, 16, threads, [&](int64_t i) {
        for (int64_t k = 0; k < inputs; k++) {
            float &to = result[i * inputs + k];
            if (type >= INT8) {
                to = decoded(layer, rows[i], k);
                continue;
            }
            const int64_t at = place(type, rows[i], k, depth);
            if (type == FP32)
                to = ((const float *)layer->packed)[at];
            else {
                const uint16_t bits = ((const uint16_t *)layer->packed)[at];
                to = type == BF16 ? from_bf16(bits) : from_fp16(bits);
            }
        }
    });
}

static void decode_all(const void *const *places, int64_t count, const Pieces *pieces, const float *inputs, float *hidden,
                       float *room, const Runs *runs, int threads) {
    for (int64_t i = 0; i < count; i++, places += 4)
        native->decode((const Part *)places[0], places[1], pieces, (const float *)places[2], (const float *)places[3],
                       i ? nullptr : inputs, hidden, room, runs, threads);
}

#include "layer_inputs.h"
#include "draft.h"
#include "merge.h"
#include "tried.h"

extern "C" {
PUBLIC int specinfer_layout(void) { return LAYOUT; }
PUBLIC const char *specinfer_name(void) { return native->name; }

// Another instruction set than the best there is, for tests; 0 if this machine lacks it.
PUBLIC int specinfer_use(const char *name) {
    for (const InstructionSet &set : sets)
        if (set.runs_here() && !strcmp(set.native->name, name)) {
            native = set.native;
            has_tiles = strstr(name, "AMX");
            return 1;
        }
    return 0;
}

// Between [outputs][inputs] and panels filled with zeros before. One code in each byte outside, of whole groups.
PUBLIC void specinfer_move(int type, void *packed, void *weights, int64_t outputs, int64_t inputs, int64_t depth,
                           int packs, int threads) {
    if (type == FP32)
        move_words((uint32_t *)packed, (uint32_t *)weights, outputs, inputs, depth, packs, threads);
    else if (type == BF16 && inputs % 2 == 0)
        move_words((uint32_t *)packed, (uint32_t *)weights, outputs, inputs / 2, depth / 2, packs, threads);
    else if (type < INT8)
        move(type, (uint16_t *)packed, (uint16_t *)weights, outputs, inputs, depth, packs, threads);
    else
        move_codes(type, (uint32_t *)packed, (uint32_t *)weights, outputs, depth, packs, threads);
}

// Some of the rows that were packed, as floats: result [count][inputs].
PUBLIC void specinfer_rows(const Linear *layer, const int64_t *rows, float *result, int64_t count, int threads) {
    unpack_rows(layer, rows, result, count, threads);
}

// Multiply-adds of one core in so many steps, see peak.h; result: room for 16 numbers.
PUBLIC int64_t specinfer_multiply(int64_t steps, float *result) {
    return native->multiply_from_registers(steps, result);
}

PUBLIC void specinfer_linear(const Linear *layer, const float *x, float *y, void *room, int64_t rows, int ending,
                             const Runs *runs, int threads) {
    native->linear(layer, x, y, room, rows, ending, runs, threads);
}

PUBLIC void specinfer_add_low_rank(int64_t number, int64_t inputs, int64_t outputs, const float *x, float *y,
                                   const Runs *runs, int64_t rows, int threads) {
    native->add_low_rank(number, inputs, outputs, x, y, runs, rows, threads);
}

PUBLIC void specinfer_norm(const float *x, const float *weight, float *y, int64_t rows, int64_t size, float eps,
                           int threads) {
    native->norm(x, weight, y, rows, size, eps, threads);
}

PUBLIC void specinfer_rotate(const Attention *layer, const Pieces *pieces, const float *cosines, const float *sines,
                             float *qkv, int64_t stride, int threads) {
    native->rotate(layer, pieces, cosines, sines, qkv, stride, threads);
}

PUBLIC void specinfer_attend(const Attention *layer, const Pieces *pieces, const float *queries, int64_t stride,
                             float *result, int threads) {
    native->attend(layer, pieces, queries, stride, result, threads);
}

PUBLIC void specinfer_mix(const Part *part, const void *mixer, const Pieces *pieces, const float *cosines,
                          const float *sines, float *rows, float *result, float *room, int threads) {
    native->mix(part, mixer, pieces, cosines, sines, rows, result, room, threads);
}

// Parts of layers one after the other. places: [count][4] addresses of each one's part, mixer, cosines and sines; inputs:
// what the first part reads in place of a norm, or null.
PUBLIC void specinfer_decode_all(const void *const *places, int64_t count, const Pieces *pieces, const float *inputs,
                                 float *hidden, float *room, const Runs *runs, int threads) {
    decode_all(places, count, pieces, inputs, hidden, room, runs, threads);
}

// result: [rows][layers * size] of tokens whose embeddings are `hidden`; room: [rows][layers * size], and the scratch
// memory of the projection.
PUBLIC void specinfer_layer_inputs(const LayerInputs *one, const int64_t *ids, const float *hidden, float *result,
                                   float *room, int64_t rows, int threads) {
    layer_inputs(one, ids, hidden, result, room, rows, threads);
}

PUBLIC int64_t specinfer_choose(const float *scores, int64_t size, float least, uint64_t key, int sampled,
                                int64_t *ids, double *sums, int64_t room) {
    return native->choose(scores, size, least, key, sampled, ids, sums, room);
}

PUBLIC void specinfer_noise(const uint64_t *keys, const int64_t *tokens, float *result, int64_t rows, int64_t count) {
    native->noise_of(keys, tokens, result, rows, count);
}

// Of each row; how many rows it could be done for, from the first on.
PUBLIC int64_t specinfer_most_probable(const float *scores, int64_t rows, int64_t size, int64_t count, float *values,
                                       int64_t *tokens, float *room) {
    for (int64_t i = 0; i < rows; i++)
        if (!native->most_probable(scores + i * size, size, count, values + i * count, tokens + i * count, room)) return i;
    return rows;
}

PUBLIC void specinfer_walk(const Walks *walks, int threads) { native->walk(walks, threads); }
PUBLIC void specinfer_walk_stochastic(const StochasticWalks *walks, int threads) { native->walk_stochastic(walks, threads); }

PUBLIC void specinfer_convolve(const Convolution *layer, const int64_t *paths, float *result, int64_t tokens, int threads) {
    native->convolve(layer, paths, result, tokens, threads);
}

PUBLIC void specinfer_recur(const Recurrence *layer, const Scan *scan, float *mixed, float *rates, float *result,
                            int threads) {
    native->recur(layer, scan, mixed, rates, result, threads);
}

PUBLIC void specinfer_grow(Growth *growth) { grow(growth); }
PUBLIC void specinfer_count_tried(const Tried *tokens) { count_tried(tokens); }
PUBLIC void specinfer_merge(Merge *trees) { merge(trees); }
PUBLIC void specinfer_draft(Draft *one, int threads) { draft(one, threads); }

// What the tokens of a chain and of a tree on its last one see of each other, [tokens][tokens], filled with zeros before,
// and their positions; `start`: of the first.
PUBLIC void specinfer_tree_mask(const int64_t *parents, int64_t nodes, int64_t chain, int64_t start, uint8_t *visible,
                          int64_t *positions) {
    const int64_t root = chain - 1, tokens = root + nodes;
    for (int64_t row = 0; row < chain; row++) {
        memset(visible + row * tokens, 1, (size_t)row + 1);
        positions[row] = start + row;
    }
    for (int64_t node = 1; node < nodes; node++) {
        const int64_t row = root + node, above = root + parents[node];
        memcpy(visible + row * tokens, visible + above * tokens, (size_t)above + 1);
        visible[row * tokens + row] = 1;
        positions[row] = positions[above] + 1;
    }
}
}
