// Tree attention without copying the cache: each token sees its request's prefix and what `visible` says of the rest.
//
// A piece's keys are taken in parts: those of the prefix by their place in it, which is their position, the rest by
// their position. A work item is a part, some tokens of a piece and one KV head: its rows are the tokens' query heads
// that share it. What a row makes of a part (attend_rows.h, attend_keys.h) depends on the keys it sees there and on
// nothing else in the pass, to the last bit; parts are merged in order of position. So a token's result is the same in
// a tree and in a chain, with any number of threads (but a value that is not finite spoils the rows beside those that
// see it).

static const int64_t BLOCK = 32;         // keys
static const int64_t MOST_VECTORS = 6;   // of rows, in an item without tiles
static const int64_t PART = 512;         // positions
static const int64_t MOST_SCRATCH = 1 << 20;           // floats of a piece's parts that are computed apart
static const int64_t FEW_APART = 64;     // rows of a KV head whose parts are small beside the keys and values

struct Item {  // tokens [from, to) of a piece, and so many query heads, which share a KV head
    int64_t piece, from, to, kv_head, first_head, heads;
    int64_t rows() const { return (to - from) * heads; }
};

// Of what a row makes of a part [dim sums of values times weights][the largest score][sum of weights].
static INLINE int64_t partial_size(const Attention *layer) { return layer->dim + 2; }

// The keys of a part: [prefix] places in the cache of a KV head, then those of the rest, and their numbers in the piece.
struct Keys {
    int64_t first, in_prefix, count;
    const int64_t *rest;  // numbers, after the prefix's
    const int64_t *slots, *positions;  // of the piece
    int64_t number(int64_t i) const { return i < in_prefix ? first + i : rest[i - in_prefix]; }
    int64_t blocks() const { return (count + BLOCK - 1) / BLOCK; }
};

// What may be seen of 32 keys from `start` on by a new token: a bit for each.
static INLINE uint32_t seen(const Attention *layer, const Pieces *pieces, const Item &item, const Keys &keys,
                            int64_t token, int64_t start) {
    const int64_t prefix = pieces->num_prefix[item.piece], rest = pieces->num_rest[item.piece];
    const int64_t end = keys.count - start < BLOCK ? keys.count - start : BLOCK;
    const uint8_t *visible = pieces->visible + pieces->first_visible[item.piece] + token * rest;
    const int64_t position = pieces->positions[pieces->first_row[item.piece] + token];
    if (start + BLOCK <= keys.in_prefix &&
        (!layer->window || position - keys.positions[keys.first + start] < layer->window))
        return ~0u;  // the prefix lies in order of its positions
    uint32_t bits = 0;
    const int64_t number = keys.number(start);
    if (number >= prefix && end == BLOCK && keys.number(start + BLOCK - 1) - number == BLOCK - 1 && !layer->window) {
        for (int64_t i = 0; i < BLOCK; i += 8)  // eight bytes of 0 and 1, the first's bit lowest
            bits |= (uint32_t)(read<uint64_t>(visible + number - prefix + i) * 0x0102040810204080u >> 56) << i;
        return bits;
    }
    for (int64_t i = 0; i < end; i++) {
        const int64_t key = keys.number(start + i);
        const bool near = !layer->window || position - keys.positions[key] < layer->window;
        bits |= (uint32_t)(near && (key < prefix || visible[key - prefix])) << i;
    }
    return bits;
}

// What any token of an item sees of block `b`. masks: [tokens] what each sees.
static INLINE uint32_t seen_by(const Attention *layer, const Pieces *pieces, const Item &item, const Keys &keys, int64_t b,
                               uint32_t *masks) {
    uint32_t any = 0;
    for (int64_t t = 0; t < item.to - item.from; t++) {
        masks[t] = seen(layer, pieces, item, keys, item.from + t, b * BLOCK);
        any |= masks[t];
    }
    return any;
}

// The block's places in the cache; those that nobody sees stay as they are.
static INLINE void places_of(const Attention *layer, const Keys &keys, int64_t kv_head, int64_t start, uint32_t any,
                             int64_t *places) {
    const auto place = [&](int64_t slot) { return (slot * layer->kv_heads + kv_head) * layer->dim; };
    if (start + BLOCK <= keys.in_prefix)
        for (int64_t i = 0; i < BLOCK; i++) places[i] = place(keys.slots[keys.first + start + i]);
    else
        for (int64_t i = 0; i < BLOCK; i++)
            if (any >> i & 1) places[i] = place(keys.slots[keys.number(start + i)]);
}

// Fetches what block `start` will read of a pool, if all of it is in the prefix, into the second-level cache: a core
// waits for few lines of its first at a time.
template <int WIDE>
static INLINE void fetch_ahead(const Attention *layer, const Keys &keys, int64_t kv_head, int64_t start,
                               const void *pool) {
    if (start + BLOCK > keys.in_prefix || (layer->dim != WIDE && layer->dim <= WIDE / 2)) return;
    constexpr int64_t BYTES = WIDE * 2;  // of a key; neighbouring lines come by themselves
    const int64_t bytes = layer->dim * (layer->type == FP32 ? 4 : layer->type == FP8 || layer->type == E5M2 ? 1 : 2);
    const int64_t stride = layer->kv_heads * bytes;
    for (int64_t i = 0; i < BLOCK; i++) {
        const char *place = (const char *)pool + keys.slots[keys.first + start + i] * stride + kv_head * bytes;
        each<(BYTES + 63) / 64>([&](auto line) ALWAYS { __builtin_prefetch(place + line * 64, 0, 2); });
    }
}

template <int WIDE, class Number>
static INLINE void widen(const Number *place, int64_t dim, float *to, float from(Number), Floats vector(const Number *)) {
    if (dim == WIDE) return each<WIDE / LANES>([&](auto i) ALWAYS { write(to + i * LANES, vector(place + i * LANES)); });
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) write(to + d, vector(place + d));
    for (; d < dim; d++) to[d] = from(place[d]);
}

// One key or value as floats.
template <int WIDE>
static INLINE void fetch(const void *pool, int type, int64_t place, int64_t dim, float *to) {
    if (type == FP32 && dim == WIDE)  // a length that the compiler knows
        memcpy(to, (const float *)pool + place, 4 * WIDE);
    else if (type == FP32)
        memcpy(to, (const float *)pool + place, 4 * dim);
    else if (type == BF16)
        widen<WIDE>((const uint16_t *)pool + place, dim, to, from_bf16, vectors_from_bf16);
    else if (type == FP8)
        widen<WIDE>((const uint8_t *)pool + place, dim, to, from_e4m3, vectors_from_e4m3);
    else if (type == E5M2)
        widen<WIDE>((const uint8_t *)pool + place, dim, to, from_e5m2, vectors_from_e5m2);
    else
        widen<WIDE>((const uint16_t *)pool + place, dim, to, from_fp16, vectors_from_fp16);
}

// Whether scores are sums of products of pairs of bf16.
static INLINE bool takes_pairs(const Attention *layer) {
#ifdef DOTS
    return layer->type == BF16 && layer->dim % 2 == 0;
#else
    (void)layer;
    return false;
#endif
}

// Whether they are by tiles, with any number of rows.
static INLINE bool takes_tiles(const Attention *layer) {
#ifdef TILES
    return has_tiles && takes_pairs(layer);
#else
    (void)layer;
    return false;
#endif
}

// body(i) for the keys of a block that any row sees, and rest(i) for others.
template <class Body, class Rest>
static INLINE void of_seen(uint32_t any, const Body &body, const Rest &rest) {
    if (any == ~0u)
        for (int64_t i = 0; i < BLOCK; i++) body(i);
    else
        for (int64_t i = 0; i < BLOCK; i++) any >> i & 1 ? body(i) : rest(i);
}

// A block's keys or values, from their pool, as floats [BLOCK][WIDE]. Those that nobody sees may be anything, and become
// zeros: zero times what is not finite would not be zero.
template <int WIDE>
static INLINE void fetch_floats(const Attention *layer, const void *pool, const int64_t *places, uint32_t any, float *block) {
    const auto one = [&](int64_t i) ALWAYS { fetch<WIDE>(pool, layer->type, places[i], layer->dim, block + i * WIDE); };
    of_seen(any, one, [&](int64_t i) ALWAYS { memset(block + i * WIDE, 0, 4 * WIDE); });
}

// The same as they are multiplied: floats, or pairs of bf16 in rows half as wide.
template <int WIDE>
static INLINE void fetch_words(const Attention *layer, const void *pool, const int64_t *places, uint32_t any, float *block) {
    if (!takes_pairs(layer)) return fetch_floats<WIDE>(layer, pool, places, any, block);
    const auto one = [&](int64_t i) ALWAYS {
        const uint16_t *from = (const uint16_t *)pool + places[i];
        if (layer->dim == WIDE)  // a length that the compiler knows
            memcpy(block + i * (WIDE / 2), from, 2 * WIDE);
        else
            memcpy(block + i * (WIDE / 2), from, 2 * layer->dim);
    };
    of_seen(any, one, [&](int64_t i) ALWAYS { memset(block + i * (WIDE / 2), 0, 2 * WIDE); });
}

// A word of what is multiplied holds one float, or two bf16 in turn. Weights of the keys of a block become such words in
// place: those of one row [BLOCK], or vectors of rows [BLOCK].
struct Singles {
    static const int64_t IN_WORD = 1;
    static INLINE Register add(Register sum, uint32_t number, Register numbers) { return sum + as_float(number) * numbers; }
    static INLINE void take_keys(float *) {}
    static INLINE void take_rows(Floats *) {}
};

#ifdef DOTS
// The instruction that multiplies pairs adds the upper product first, each sum rounded: with the earlier of two keys
// there, keys count in their order, and those that a row does not see change nothing.
struct Pairs {
    static const int64_t IN_WORD = 2;
    static INLINE Register add(Register sum, uint32_t number, Register numbers) {
        return (Register)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)number), (__m512bh)(__m512)numbers);
    }
    static INLINE Words of(__m256i earlier, __m256i later) {
        return (Words)_mm512_cvtepu16_epi32(earlier) << 16 | (Words)_mm512_cvtepu16_epi32(later);
    }
    static INLINE Words rounded(__m512 earlier, __m512 later) {
        return of((__m256i)_mm512_cvtneps_pbh(earlier), (__m256i)_mm512_cvtneps_pbh(later));
    }
    static INLINE Words of_keys(Floats first, Floats second) {  // weights of keys in turn
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512 earlier = _mm512_permutex2var_ps((__m512)first, even, (__m512)second);
        const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
        return rounded(earlier, _mm512_permutex2var_ps((__m512)first, odd, (__m512)second));
    }
    static INLINE void take_keys(float *weights) {
        write(weights, of_keys(read<Floats>(weights), read<Floats>(weights + LANES)));
    }
    static INLINE void take_rows(Floats *weights) {
        each<BLOCK / 2>([&](auto i) ALWAYS {
            weights[i] = (Floats)rounded((__m512)weights[2 * i], (__m512)weights[2 * i + 1]);
        });
    }
};
#endif

// body(product) with the product of a layer's keys and values.
template <class Body>
static INLINE void with_product(const Attention *layer, const Body &body) {
#ifdef DOTS
    if (takes_pairs(layer)) return body(Pairs{});
#endif
    body(Singles{});
}

template <int WIDE>
static INLINE void fetch_values(Singles, const Attention *layer, const int64_t *places, uint32_t any, float *block) {
    fetch_floats<WIDE>(layer, layer->values, places, any, block);
}

#ifdef DOTS
template <int WIDE>
static INLINE void fetch_values(Pairs, const Attention *layer, const int64_t *places, uint32_t any, float *block) {
    const uint16_t *values = (const uint16_t *)layer->values;
    const int64_t dim = layer->dim;
    for (int64_t i = 0; i < BLOCK; i += 2, block += WIDE) {
        const bool first = any >> i & 1, second = any >> (i + 1) & 1;
        for (int64_t d = 0; d < dim; d += LANES) {
            const __mmask16 inside = dim - d < LANES ? (1u << (dim - d)) - 1 : 0xffff;
            const __m256i none = _mm256_setzero_si256();
            const __m256i earlier = first ? _mm256_maskz_loadu_epi16(inside, values + places[i] + d) : none;
            const __m256i later = second ? _mm256_maskz_loadu_epi16(inside, values + places[i + 1] + d) : none;
            write(block + d, Pairs::of(earlier, later));
        }
    }
}
#endif

// The values of a block as `block` [BLOCK][WIDE], or pairs of bf16, of two keys each, [BLOCK / 2][WIDE].
template <int WIDE>
static INLINE void fetch_values(const Attention *layer, const int64_t *places, uint32_t any, float *block) {
    with_product(layer, [&](auto product) ALWAYS { fetch_values<WIDE>(product, layer, places, any, block); });
}

#include "attend_rows.h"
#include "attend_keys.h"
#include "attend_tiles.h"

static INLINE bool is_empty(const float *partial, int64_t dim) { return partial[dim] == -INFINITY && partial[dim + 1] == 0; }

// Adds a later part to what a row has so far. Never inlined, so that all who merge round alike.
__attribute__((noinline)) static void merge(float *__restrict sums, const float *__restrict part, int64_t dim) {
    if (is_empty(part, dim)) return;
    if (is_empty(sums, dim)) {
        memcpy(sums, part, 4 * (dim + 2));
        return;
    }
    if (part[dim] > sums[dim]) {
        const float scale = exponential(Floats{} + (sums[dim] - part[dim]))[0];
        for (int64_t d = 0; d < dim; d++) sums[d] = sums[d] * scale + part[d];
        sums[dim + 1] = sums[dim + 1] * scale + part[dim + 1];
        sums[dim] = part[dim];
    } else {
        const float scale = exponential(Floats{} + (part[dim] - sums[dim]))[0];
        for (int64_t d = 0; d < dim; d++) sums[d] += part[d] * scale;
        sums[dim + 1] += part[dim + 1] * scale;
    }
}

// A row's result from its sums.
static INLINE void finish(const Attention *layer, const float *row, float *result) {
    const int64_t dim = layer->dim;
    for (int64_t d = 0; d < dim; d++) result[d] = row[d] / row[dim + 1] * layer->value_scale;
}

// How a piece's work is divided.
struct Division {
    int64_t parts, first_item;
    bool apart;                   // whether its parts are items of their own
    const int64_t *rest, *ends;   // numbers of its other keys, part by part; [parts] where they end
    float *partials;              // if apart: [tokens][heads][parts]
};

static INLINE Keys keys_of(const Pieces *pieces, int64_t piece, const Division &division, int64_t part) {
    const int64_t prefix = pieces->num_prefix[piece], begin = part ? division.ends[part - 1] : 0;
    const int64_t from = part * PART < prefix ? part * PART : prefix;
    const int64_t in_prefix = prefix - from < PART ? prefix - from : PART;
    const int64_t place = pieces->first_slot[piece];
    return {from, in_prefix, in_prefix + division.ends[part] - begin, division.rest + begin, pieces->slots + place,
            pieces->key_positions + place};
}

// Sorts a piece's other keys by part.
static void divide(const Pieces *pieces, int64_t piece, Division &division, int64_t *rest, int64_t *ends) {
    const int64_t prefix = pieces->num_prefix[piece], others = pieces->num_rest[piece];
    const int64_t *positions = pieces->key_positions + pieces->first_slot[piece] + prefix;
    memset(ends, 0, division.parts * sizeof(int64_t));
    for (int64_t i = 0; i < others; i++) ends[positions[i] / PART]++;
    int64_t sum = 0;
    for (int64_t part = 0; part < division.parts; part++) {
        const int64_t here = ends[part];
        ends[part] = sum;
        sum += here;
    }
    for (int64_t i = 0; i < others; i++) rest[ends[positions[i] / PART]++] = prefix + i;
    division.rest = rest, division.ends = ends;
}

static INLINE int64_t parts_of(const Pieces *pieces, int64_t piece) {
    const int64_t prefix = pieces->num_prefix[piece], others = pieces->num_rest[piece];
    const int64_t *positions = pieces->key_positions + pieces->first_slot[piece] + prefix;
    int64_t last = prefix - 1;
    for (int64_t i = 0; i < others; i++) last = positions[i] > last ? positions[i] : last;
    return last / PART + 1;
}

// Whether a token of an item sees a key of a part. Tokens of a block that is not causal see later ones.
static INLINE bool sees_any(const Attention *layer, const Pieces *pieces, const Item &item, const Keys &keys) {
    for (int64_t start = 0; start < keys.count; start += BLOCK)
        for (int64_t t = item.from; t < item.to; t++)
            if (seen(layer, pieces, item, keys, t, start)) return true;
    return false;
}

// Some parts of an item: each partial goes to its place, if they are computed apart, or all of them to the result.
template <int WIDE>
LOCAL void attend_item(const Attention *layer, const Pieces *pieces, const Division &division, const Item &item,
                        int64_t part, const float *queries, int64_t stride, float *result) {
    static thread_local Grown<float> own;
    const int64_t rows = item.rows(), dim = layer->dim, size = partial_size(layer);
    const int64_t token0 = pieces->first_row[item.piece] + item.from;
    int64_t last = 0;  // position of the item's tokens
    for (int64_t t = 0; t < item.to - item.from; t++)
        last = pieces->positions[token0 + t] > last ? pieces->positions[token0 + t] : last;
    float *partials = own.hold(2 * rows * size), *sums = partials + rows * size;
    const int64_t begin = division.apart ? part : 0, end = division.apart ? part + 1 : division.parts;
    for (int64_t p = begin; p < end; p++) {
        const Keys keys = keys_of(pieces, item.piece, division, p);
        const bool none = !keys.count || (p * PART > last && !sees_any(layer, pieces, item, keys));
        if (none)
            for (int64_t r = 0; r < rows; r++) {
                partials[r * size + dim] = -INFINITY;
                partials[r * size + dim + 1] = 0;
            }
#ifdef TILES
        else if (takes_tiles(layer))
            (rows > TILE_ROWS ? attend_tiles<WIDE, true> : attend_tiles<WIDE, false>)(layer, pieces, item, keys, queries,
                                                                                     stride, partials);
#endif
        else if (rows <= FEW_ROWS)
            attend_keys<WIDE>(layer, pieces, item, keys, queries, stride, partials);
        else
            attend_rows<WIDE>(layer, pieces, item, keys, queries, stride, partials);
        if (p == begin)
            memcpy(sums, partials, 4 * rows * size);
        else
            for (int64_t r = 0; r < rows; r++) merge(sums + r * size, partials + r * size, dim);
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t head = item.first_head + r % item.heads, token = item.from + r / item.heads;
        if (division.apart) {
            float *place = division.partials + ((token * layer->heads + head) * division.parts + part) * size;
            memcpy(place, sums + r * size, 4 * size);
            continue;
        }
        finish(layer, sums + r * size, result + ((pieces->first_row[item.piece] + token) * layer->heads + head) * dim);
    }
}

#if ISA_PART == 2  // the wide heads are compiled beside the others
extern template void attend_item<256>(const Attention *, const Pieces *, const Division &, const Item &, int64_t,
                                      const float *, int64_t, float *);
extern template void attend_item<512>(const Attention *, const Pieces *, const Division &, const Item &, int64_t,
                                      const float *, int64_t, float *);
#elif ISA_PART == 4
template void attend_item<256>(const Attention *, const Pieces *, const Division &, const Item &, int64_t, const float *,
                               int64_t, float *);
template void attend_item<512>(const Attention *, const Pieces *, const Division &, const Item &, int64_t, const float *,
                               int64_t, float *);
#endif

#if ISA_PART != 4
// queries: [tokens], `stride` floats apart, each [heads][dim]; result: [tokens][heads][dim].
LOCAL void attend(const Attention *layer, const Pieces *pieces, const float *queries, int64_t stride, float *result,
                   int threads) {
    static thread_local Grown<Division> divisions;
    static thread_local Grown<int64_t> numbers;
    static thread_local Grown<float> scratch;
    // Very many heads of one KV head are shared out, too.
    const int64_t repeats = layer->heads / layer->kv_heads, most_rows = (takes_tiles(layer) ? 2 : MOST_VECTORS) * LANES;
    const int64_t splits = (repeats + most_rows - 1) / most_rows, heads = (repeats + splits - 1) / splits;
    const int64_t tokens = most_rows / heads, groups = layer->kv_heads * splits, size = partial_size(layer);
    const auto one = layer->dim <= 32    ? attend_item<32>
                     : layer->dim <= 64  ? attend_item<64>
                     : layer->dim <= 128 ? attend_item<128>
                     : layer->dim <= 256 ? attend_item<256>
                                         : attend_item<512>;
    Division *division = divisions.hold(pieces->count);
    int64_t items = 0, num_numbers = 0, floats = 0;
    const auto sets = [&](int64_t piece) { return (pieces->num_new[piece] + tokens - 1) / tokens * groups; };
    for (int64_t i = 0; i < pieces->count; i++) items += sets(i);
    const bool enough = items >= 16 * threads;  // for all threads to end at about the same time
    items = 0;
    for (int64_t i = 0; i < pieces->count; i++) {
        const int64_t parts = parts_of(pieces, i), wanted = pieces->num_new[i] * layer->heads * parts * size;
        const bool few = pieces->num_new[i] * repeats <= FEW_APART;
        const bool apart = parts > 1 && wanted <= MOST_SCRATCH && (few || !enough);
        division[i] = {parts, items, apart, nullptr, nullptr, nullptr};
        items += sets(i) * (apart ? parts : 1);
        num_numbers += pieces->num_rest[i] + parts;
        floats += apart ? wanted : 0;
    }
    int64_t *number = numbers.hold(num_numbers);
    float *place = scratch.hold(floats);
    for (int64_t i = 0; i < pieces->count; i++) {
        divide(pieces, i, division[i], number, number + pieces->num_rest[i]);
        number += pieces->num_rest[i] + division[i].parts;
        division[i].partials = place;
        if (division[i].apart) place += pieces->num_new[i] * layer->heads * division[i].parts * size;
    }
    // A thread that takes all heads of a part finds most of them in its cache: they lie side by side in memory.
    in_parallel<EndTiles>(items, std::min(shares(items, threads), groups), threads, [&](int64_t item) {
        int64_t piece = pieces->count - 1;
        while (division[piece].first_item > item) piece--;
        const int64_t here = sets(piece), part = (item - division[piece].first_item) / here;
        const int64_t left = (item - division[piece].first_item) % here;
        const int64_t from = left / groups * tokens, to = from + tokens, end = pieces->num_new[piece];
        const int64_t kv_head = left % groups / splits, first = left % splits * heads;
        const int64_t rest = repeats - first;
        one(layer, pieces, division[piece],
            {piece, from, to < end ? to : end, kv_head, kv_head * repeats + first, rest < heads ? rest : heads}, part,
            queries, stride, result);
    });
    for (int64_t i = 0; i < pieces->count; i++) {
        if (!division[i].apart) continue;
        const int64_t parts = division[i].parts, rows = pieces->num_new[i] * layer->heads;
        float *partials = division[i].partials, *to = result + pieces->first_row[i] * layer->heads * layer->dim;
        in_parallel(rows, shares(rows, threads), threads, [&](int64_t r) {
            float *sums = partials + r * parts * size;
            for (int64_t p = 1; p < parts; p++) merge(sums, sums + p * size, layer->dim);
            finish(layer, sums, to + r * layer->dim);
        });
    }
}
#endif
