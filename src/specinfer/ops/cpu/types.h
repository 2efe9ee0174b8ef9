// Shared by all native code: number types, and what one instruction set offers.
//
// isa_*.cpp compile the same headers, each for one instruction set and in a namespace of its own; library.cpp
// chooses among them at run time. Vectors are 16 floats wide everywhere (vectors.h).

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

#define INLINE inline __attribute__((always_inline))

static const int64_t LANES = 16;
static const int64_t WIDTH = 32;  // columns (outputs) of a panel of weights; as in scales.py

// To be raised, here and in library.py, when what follows or a function of library.cpp changes.
static const int LAYOUT = 34;

enum Type { FP32, BF16, FP16, INT8, INT4, INT8_OF_32, INT6, INT5, LEVELS4, FP8, E5M2, LEVELS4_OF_16 };  // as in panels.py, attention.py
// How the scales of groups are stored; as in scales.py. Nested ones are whole numbers times scales of 256 inputs.
enum Scaling { BF16_SCALES, FP16_SCALES, FP16_AFFINE, NESTED, NESTED_AFFINE, FP16_ZEROS, FP32_SCALES };
enum Ending { STORE, ADD, GATED, GATED_GELU };  // what becomes of a linear layer's sums

struct Linear {  // as in linear_call.py
    const void *packed;
    const uint8_t *scales;  // of quantized weights: [panels][bytes], see panels.h
    const float *bias;       // [panels * WIDTH], or null
    int64_t inputs, outputs;
    int32_t type, dots;  // dots: multiply in the weights' own type, where the CPU has instructions for it
    int64_t number;      // of the layer, in the tables of adapters
    int64_t first, stride;   // of the results' rows: the column that these outputs begin at, and the number of all
    const Linear *next;      // computes the columns after these, from the same inputs; or null
    const uint8_t *levels;   // [16] what the codes of levels stand for, and 128 more
    int32_t scaling;
};

struct LowRank {  // what an adapter adds to a linear layer; as in low_rank.py
    const void *down;       // [rank][inputs]
    const void *up;         // of each block of 16 outputs [ranks][16]
    const int32_t *blocks;  // [blocks][3] of each block: its first rank, the number of its ranks, and those before it
    int64_t rank;           // a multiple of 4; 0: it adds nothing
    int64_t type;           // FP32 or BF16
};

struct Runs {  // neighbouring rows with the same adapter; as in low_rank.py
    int64_t count;
    const int64_t *first, *rows;     // [count]
    const LowRank *const *adapters;  // [count] tables by the number of a linear layer
    float *scratch;                  // [of all rows: the largest rank]
};

struct Attention {  // as in attention.py
    void *keys, *values;                // [slots][kv_heads][dim]
    const float *query_norm, *key_norm;  // [dim], of all heads if they are joined, or null
    const float *value_norm;             // [dim], or null
    int64_t heads, kv_heads, dim;
    int64_t rotated;  // of dim, the first so many are
    int64_t window;   // a key so many positions back is no longer seen; 0: all are
    float scale, eps;                 // scale: that of stored keys included
    float key_inverse, value_inverse;  // what is stored are keys and values times these, in 8 bits
    float value_scale;
    int32_t type;
    int32_t is_gated;  // each head's queries come with as many gates after them, which open its results
    int32_t joins_heads, rotates_pairs;  // one norm over all heads; neighbours are rotated together, not halves
    int32_t num_stored;  // 2: keys and values come after queries; 1: keys, which before their norm are values, too;
                         // 0: neither, they are another layer's
};

struct Scan;

struct Pieces {  // what ForwardBatch.pieces holds, flat; as in attention.py
    int64_t count;
    const int64_t *first_row, *num_new, *num_prefix, *num_rest;  // [count]; the rest: earlier nodes, then the new ones
    const int64_t *first_slot, *first_visible;                   // [count] places in the arrays below
    const int64_t *slots, *key_positions;                        // of all pieces: prefix, then the rest
    const uint8_t *visible;                                      // of all pieces [new][rest]
    int64_t tokens;
    const int64_t *positions, *new_slots;  // [tokens]
    const Scan *scan;      // of recurrences, or null
    const int64_t *paths;  // of the scan, as `convolve` reads them
    const float *layer_inputs;  // [tokens][layer_stride] what the parts of all layers read beside hidden states, or null
    int64_t layer_stride;
};

enum Between { ATTENDS, RECURS, OPENS, SELECTS };  // what lies between a part's linear layers; as in decoder.py
// What becomes of an MLP's values: opened where the first linear layer ends, or in rows of all gates, then all values;
// or there are no gates, and those above 0 are squared; or there are only gates, and values are inputs of the layer.
enum Opening { IN_PANELS, SILU_HALVES, GELU_HALVES, SQUARES, SILU_OF_INPUTS, GELU_OF_INPUTS };
// What results are added to: hidden states, or a sum, which is normed and added where the last part has added to it.
enum Sum { ALONE, FIRST_OF_SUM, LAST_OF_SUM };

struct Part {  // of a decoder layer; as in decoder.py
    const Linear *first, *second;  // first: of experts the router; second: of experts null
    const Linear *gate;            // of one number, whose sigmoid the results are multiplied by, or null
    const float *norm;             // [hidden] of what it reads, or null: it reads what the part before it has read
    const float *post_norm;        // [hidden] of what is added, or null
    const float *scales;           // [outputs of first] what these are multiplied by, or null
    const float *sum_norm;         // [hidden] of the sum that it is the last of
    const float *router_norm;      // [hidden] of what the router reads, or null: what experts read
    int64_t hidden;
    int64_t column;  // of the layer's inputs, see Opening
    float eps, factor;  // factor: of the results, before the second linear layer
    float hidden_factor;  // of the hidden states, after all
    int32_t between, ending, opening;  // ending: of the first linear layer
    int32_t skips_norm;                // it reads the hidden states as they are
    int32_t sum;
};

enum Scores { SOFTMAX, SIGMOIDS, SOFTMAX_OF_CHOSEN };  // of experts, from the router's results; as in experts.py

struct Experts {  // as in experts.py
    const Linear *const *first, *const *second;  // [count]
    const float *bias;                           // [count] added to scores for the choice, or null
    const float *scales;                         // [count] what weights are multiplied by at last, or null
    int64_t count, chosen, groups, chosen_groups;  // chosen: of each token, from those of so many groups
    float factor;                                // of the weights
    int32_t scores, normalizes, ending, opening;  // as in Part
};

struct Walks {  // of several trees, whose nodes follow one another in the arrays; as in walk.py
    int64_t count, vocab;
    const float *const *logits;         // [count] of each tree [nodes][vocab]
    const int64_t *first;               // [count + 1] place of each root
    const int64_t *tokens, *parents;    // [nodes] parents are numbered from the tree's root, 0
    const uint64_t *seeds;              // [count]
    const int64_t *positions;           // [count] of the token after each root
    const float *temperatures;          // [count] 0: greedy
    int64_t *chosen;                    // [nodes] the token after each node, or UNKNOWN; written where walks come
    int64_t *path;                      // [nodes] from each root's place on: the accepted nodes
    int64_t *lengths, *next;            // [count] of the paths; the tokens after them, UNKNOWN where rounding decides
};

struct StochasticWalks {  // walks by random numbers, of several trees as in Walks; as in stochastic_walk.py
    int64_t count, vocab;
    const float *const *logits;       // [count] of each tree [nodes][vocab]
    const int64_t *first;             // [count + 1] place of each root
    const int64_t *tokens, *parents;  // [nodes]
    const int64_t *first_draw;        // [count + 1] place of each tree's first draw
    const int64_t *draws;             // [draws] node of each draw, from the tree's root
    const int64_t *sources;           // [draws][5] what each was drawn from: addresses of the tokens and probabilities, their
                                      // number, address of the places drawn before, and their number; zeros if chosen
    const float *temperatures;        // [count]
    const uint8_t *traverses;         // [count] by traversal, not multi-step
    uint64_t *states;                 // [count] of the random numbers
    int64_t *path, *lengths, *next;   // as in Walks; next may be the reason why there is none
};

struct Merge {  // of the trees of several drafters, for each request; as in merge.py
    int64_t requests;
    const int64_t *first_tree;              // [requests + 1] number of each request's first tree
    const int64_t *first_node, *first_draw;  // [trees + 1]
    const int64_t *tokens, *parents;        // [nodes] parents are numbered from the tree's root, 0
    const int64_t *draw_nodes, *sources;    // [draws] node, from the tree's root, and number of its calibration
    const double *confidence;               // [draws]
    // How nodes are ranked.
    const double *const *heights, *const *slopes;  // [sources_count] of lines by rank and confidence
    int64_t sources_count;
    const double *middles;                  // [middles_count] where the lines meet
    int64_t middles_count, ranks;
    const int64_t *capacities;              // [requests] most nodes with the root; 0: all are kept
    const double *min_path_prob;            // [requests]
    const double *const *rival_heights, *const *rival_slopes;  // [requests]
    // The results, request by request.
    int64_t *result_first, *result_first_draw;                 // [requests + 1]
    int64_t *result_tokens, *result_parents, *result_depths;   // [nodes]
    int64_t *result_ranks;                                     // [nodes] place among the siblings, where they are ranked
    double *result_alone;                                      // [nodes] that one of its drafters is right
    int64_t *result_draw_nodes, *result_draws;                 // [draws] node and number of each draw that is kept
};

struct TriedTree {  // a verified tree, and its drafted tokens; as in tried.py
    const int64_t *parents;                 // [size]
    const int64_t *nodes, *makers, *ranks;  // [count] or null
    const double *confidence;               // [count]
    int64_t size, count;
    int64_t path, path_size, names;  // places of its accepted nodes, and of its drafters, among those of all trees
};

struct Tried {  // counts of drafted tokens; as in tried.py
    int64_t trees;
    const TriedTree *of;
    const int64_t *paths, *sources;
    const double *edges;
    double *counts;  // [num_sources][2][ranks][num_edges + 1] tried, and accepted
    int64_t num_sources, num_edges, ranks;
};

struct Growing {  // a tree while it grows; as in growth.py
    int64_t start, open_start;                 // places of its root among all nodes, and of its first open guess
    const int64_t *fixed;                      // [max_depth] children of each node by level, or null: best first
    const double *heights, *slopes, *by_rank;  // of the calibration, best first: lines by rank and confidence; [ranks]
    double min_path_prob, min_gain;
    int64_t max_depth, num_left;       // levels, and nodes that may still be added
    int64_t size, levels;              // nodes and levels so far
    int64_t first, end, width;         // its frontier, and the most children of a node there
    int64_t num_open;
};

struct Guess {  // that may still become a node; room for it is as in growth.py
    double path_prob;
    int64_t token;
    float confidence;
    int32_t node, level, row, rank, bin;  // node: below which it is; row and rank among the level's candidates
};

struct Growth {  // of several trees, level by level; as in growth.py
    int64_t count;
    Growing *trees;
    // Their nodes, tree by tree.
    int64_t *tokens, *parents, *depths;   // [nodes]
    double *path_prob, *confidence;       // [nodes]
    int64_t *sources;                     // [nodes][3] level, row and rank of the candidate that became the node, or null
    uint8_t *ancestry;                    // [nodes][ancestry_columns]
    int64_t ancestry_columns;
    Guess *open;                          // tree by tree
    // How guesses are ranked.
    const double *edges;    // [bins - 1] falling: greatest path probability of each bin but the first
    const double *middles;  // [middles_count] where the lines meet
    int64_t bins, middles_count, ranks, breadth;  // breadth: most children of a node, best first
    // The level.
    const int64_t *candidates;         // [nodes of the frontiers][columns]
    const float *sure;                 // the confidence in each
    int64_t columns, level;
    // Of candidates that were drawn with replacement, else null: one that is drawn again is no further node.
    int64_t *draws;           // [guesses][4] node, level, row and rank of each draw, from each tree's place of guesses on
    double *draw_confidence;  // [guesses]
    int64_t *num_draws;       // [trees]
};

enum Choice { BEST, NOISY, DRAWN };  // how children are chosen: by score, with the target's noise too, or drawn; as in draft.py

struct DraftTree {  // as in draft.py
    const int64_t *tokens, *prefix, *slots;  // [num_new] known tokens, the root last; [num_prefix]; [num_new + max_nodes]
    int64_t num_prefix, num_new, max_nodes, max_depth;
    const int64_t *widths;                           // [max_depth] children of each node, or null: best first
    const double *heights, *slopes, *by_rank;        // of the calibration, best first
    const float *features;                           // [num_new][hidden] of the tokens before the known ones; of heads
    double min_path_prob, min_gain, top_p;
    uint64_t seed;
    int64_t top_k, first_draw;     // 0: no limit; number of the root's draw, or of tokens that are skipped
    float temperature, log_min_p;  // 0: greedy
    int32_t choice;
    int64_t size, num_computed;   // results: nodes with the root, and how many were passed through the model
};

struct LayerInputs {  // of tokens, by a table and by a projection of their embeddings; as in layer_inputs.py
    const Linear *embedding;   // panels with the table's rows, or null
    const void *rows;          // [vocab][layers * size] its rows otherwise
    const Linear *projection;  // to [layers * size]
    const float *norm;         // [size] of what it makes, layer by layer
    int64_t layers, size;
    float scale, eps;  // scale: of the rows
    int32_t type;      // of `rows`
};

struct Features {  // of the token before each, which a head reads in addition; as in draft.py
    void *stored;  // [slots][hidden] what it computes for a token, read for the tokens after it
    const float *embedding_norm, *feature_norm;  // [hidden] or null
    const Linear *join;  // makes hidden states of both, or null: layers add to the feature, and the first reads both
    int32_t type, stores_normed;  // of `stored`, which has the last norm or not
    // Whether layers add to a normed feature; the feature is the first of both; the embedding at position 0 is zero;
    // the first layer norms what was joined.
    int32_t adds_to_normed, feature_is_first, blanks_first, norms_joined;
};

struct Draft {  // by a small model or a head; as in draft.py
    const void *const *places;  // [layers][4] as specinfer_decode_all has them
    int64_t layers, hidden, floats;     // floats: of scratch memory for each token
    const Linear *embedding;            // panels with its rows, or null
    const void *rows;                   // [vocab][hidden] its rows otherwise
    const float *norm;                  // [hidden], or null
    const Linear *head;
    const int64_t *token_map;           // [columns] tokens of the logits, or null
    int64_t columns, support, breadth;  // logits that count, candidates that probabilities cover, children best first
    const double *edges, *middles;      // as in Growth
    int64_t bins, middles_count, ranks;
    const LayerInputs *layer_inputs;    // or null
    const Features *features;           // of a head, or null
    float embedding_scale, eps, cap;    // cap: of logits, which become cap * tanh(logits / cap); 0: none
    int32_t type;  // of `rows`
    // Of a call.
    int64_t count;
    DraftTree *trees;
    int64_t *tokens, *parents;  // [nodes of all trees, each with its root and room for max_nodes]
    double *confidence;
    int64_t *candidates, *drawn;  // [nodes][support] what the children of a node are drawn from, and the places of these
    double *probs;                // of the candidates
};

struct Convolution {  // with one filter for each channel; as in recurrence.py
    const void *inputs;          // [slots][channels]
    const float *weight, *bias;  // [taps][channels]; [channels] or null
    int64_t channels, taps;
    int32_t type, activates;  // of the inputs, to which results are rounded; whether SiLU follows
};

enum Decay { OF_HEAD, OF_KEY, OF_COLUMN };  // what has a decay of its own; as in recurrence.py

struct Recurrence {  // as in recurrence.py
    const void *stored;                  // [slots][heads] steps before activation; of a delta rule after [heads] betas
    float *pool;                         // [rows][heads][key_dim][value_dim] kept states, or null
    const float *bias, *decay, *skip;    // [heads] added to steps, times them the logarithm of what is kept; or null
    int64_t heads, key_heads, key_dim, value_dim;
    int64_t channels, query, key, value;  // of a token's inputs: their number, and where each kind begins
    float least, most;  // of a step; of a delta rule the least logarithm of what is kept, if negative, and the most of beta
    int32_t type, is_delta, decays;  // OF_KEY: stored steps and bias are of each key; OF_COLUMN: decay is [key_dim][value_dim]
};

struct Recurrent {  // what mixes tokens where there is no attention, on one cache; as in recurrent_layer.py
    Convolution convolution;
    Recurrence recurrence;           // no heads: the convolution's results are those of the layer
    const float *norm;               // [heads * value_dim], or null
    int64_t inputs, factors;         // columns of a token's row where inputs begin, and what they are multiplied by, or -1
    int64_t steps, num_steps, gates;  // and what is stored beside them, how many numbers, and gates of the results
    int64_t group;                   // of numbers that are normed together
    const int64_t *order;            // [columns] which of the first linear layer's outputs each column is, or null
    float eps;
    int32_t activates, opens_first;  // whether SiLU of the gates opens; whether they come before the norm
};

struct Scan {  // the tokens of a pass in the order of a recurrence; as in recurrence.py
    int64_t tokens, places, count;  // places: how many states are needed at a time; count: of first states
    const int64_t *slots, *from, *to;  // [tokens] slot; places of the parent's state and of its own
    const int64_t *rows, *results;     // [tokens] row of the pool for its state, and of the results; or -1
    const int64_t *first_places, *first_rows;  // [count] rows of the pool; -1: zeros
};

extern bool has_tiles;  // whether those of AMX are used

struct Native {
    const char *name;
    void (*linear)(const Linear *, const float *x, float *y, void *room, int64_t rows, int32_t ending, const Runs *,
                   int threads);
    void (*add_low_rank)(int64_t number, int64_t inputs, int64_t outputs, const float *x, float *y, const Runs *,
                         int64_t rows, int threads);
    void (*norm)(const float *x, const float *weight, float *y, int64_t rows, int64_t size, float eps, int threads);
    void (*rotate)(const Attention *, const Pieces *, const float *cosines, const float *sines, float *qkv,
                   int64_t stride, int threads);
    void (*attend)(const Attention *, const Pieces *, const float *queries, int64_t stride, float *result,
                   int threads);
    void (*mix)(const Part *, const void *mixer, const Pieces *, const float *cosines, const float *sines, float *rows,
                float *result, float *room, int threads);
    void (*decode)(const Part *, const void *mixer, const Pieces *, const float *cosines, const float *sines,
                   const float *inputs, float *hidden, float *room, const Runs *, int threads);
    int64_t (*choose)(const float *scores, int64_t size, float least, uint64_t key, int32_t sampled, int64_t *ids,
                      double *sums, int64_t room);
    void (*noise_of)(const uint64_t *keys, const int64_t *tokens, float *result, int64_t rows, int64_t count);
    int64_t (*most_probable)(const float *scores, int64_t size, int64_t count, float *values, int64_t *tokens,
                             float *room);
    void (*walk)(const Walks *, int threads);
    void (*walk_stochastic)(const StochasticWalks *, int threads);
    void (*convolve)(const Convolution *, const int64_t *paths, float *result, int64_t tokens, int threads);
    void (*recur)(const Recurrence *, const Scan *, float *mixed, float *rates, float *result, int threads);
    int64_t (*multiply_from_registers)(int64_t steps, float *result);
};

// 64-byte aligned memory, on every platform.
static inline void *new_aligned(size_t bytes) { return ::operator new(bytes, std::align_val_t(64)); }
static inline void delete_aligned(void *place) { ::operator delete(place, std::align_val_t(64)); }

template <class T>
static INLINE T read(const void *place) {
    T value;
    memcpy(&value, place, sizeof(T));
    return value;
}

template <class T>
static INLINE void write(void *place, T value) {
    memcpy(place, &value, sizeof(T));
}

static INLINE float as_float(uint32_t word) { return read<float>(&word); }

static INLINE float from_bf16(uint16_t bits) { return as_float((uint32_t)bits << 16); }

static INLINE uint16_t to_bf16(float value) {  // to nearest even, as PyTorch rounds
    const uint32_t word = read<uint32_t>(&value);
    if ((word & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (uint16_t)((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

// The exponent is put right by a product.
static INLINE float from_fp16(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, rest = bits & 0x7fffu;
    const uint32_t all = rest >= 0x7c00u ? 0x7f800000u | rest << 13 : 0;
    const float value = as_float(rest << 13) * 0x1p112f;
    return as_float(sign | (all ? all : read<uint32_t>(&value)));
}

// e4m3, whose bits a float has in its middle; NaN is as 480.
static INLINE float from_fp8(uint8_t bits) {
    return as_float((uint32_t)(bits & 0x80u) << 24 | (uint32_t)(bits & 0x7fu) << 20) * 0x1p120f;
}

static INLINE float from_e4m3(uint8_t bits) { return (bits & 0x7fu) == 0x7fu ? NAN : from_fp8(bits); }

static INLINE float from_e5m2(uint8_t bits) { return from_fp16((uint16_t)(bits << 8)); }

// To nearest even; what is too large becomes the largest number, as in kv_types.py.
template <int TYPE>
static INLINE uint8_t to_float8(float value) {
    constexpr bool is_e4m3 = TYPE == FP8;
    constexpr int shift = is_e4m3 ? 20 : 21;
    constexpr uint32_t bias = is_e4m3 ? 0x3c000000u : 0x38000000u, largest = is_e4m3 ? 0x43e00000u : 0x47600000u;
    constexpr float places = is_e4m3 ? 0x1p14f : 0x1p7f;  // whose last place is that of subnormal numbers
    const uint32_t word = read<uint32_t>(&value), sign = word >> 24 & 0x80u, rest = word & 0x7fffffffu;
    if (rest > 0x7f800000u) return (uint8_t)(sign | 0x7fu);
    if (rest > largest) return (uint8_t)(sign | (largest - bias) >> shift);
    if (rest < bias + 0x800000u)
        return (uint8_t)(sign | (read<uint32_t>(&(const float &)(as_float(rest) + places)) - read<uint32_t>(&places)));
    return (uint8_t)(sign | (rest + (1u << (shift - 1)) - 1u + (rest >> shift & 1u) - bias) >> shift);
}

static INLINE uint16_t to_fp16(float value) {
    const uint32_t word = read<uint32_t>(&value), sign = word >> 16 & 0x8000u, rest = word & 0x7fffffffu;
    if (rest > 0x7f800000u) return sign | 0x7e00u;
    if (rest >= 0x477ff000u) return sign | 0x7c00u;  // would round to 65536 or more
    if (rest < 0x38800000u)                          // subnormal: adding 0.5 leaves them in the last bits, rounded
        return sign | (uint16_t)(read<uint32_t>(&(const float &)(as_float(rest) + 0.5f)) - 0x3f000000u);
    return sign | (uint16_t)((rest + 0xfffu + (rest >> 13 & 1u) - 0x38000000u) >> 13);
}

static INLINE uint64_t mixed(uint64_t bits) {  // as in noise.py
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
    return bits ^ bits >> 31;
}

static INLINE uint64_t noise_key(uint64_t seed, int64_t position) {
    return mixed(mixed(seed + 0x9e3779b97f4a7c15u) ^ (uint64_t)position * 0x9e3779b97f4a7c15u);
}
