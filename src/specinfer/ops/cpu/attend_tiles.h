// Attention of up to 32 rows to a part of their keys in bf16, by AMX tiles.
//
// A tile instruction adds up products of the even and of the odd ones of 32 places apart, then both to a sum. So that a
// row's result does not depend on what others see, a value's place is that of its position: blocks whose keys lie in
// order of their positions are multiplied by tiles, and the keys behind them, where a tree branches, are added up row by
// row as a tile would add those that the row sees. Scores are sums over a key's own numbers, whatever its place.

#ifdef TILES
static const int64_t MOST_TILE_ROWS = 2 * TILE_ROWS;
static const int64_t VALUE_BLOCKS = 4;  // whose products are added up before sums leave the tiles

template <int WIDE>
struct TilesRoom {
    alignas(64) uint32_t queries[MOST_TILE_ROWS * WIDE / 2];  // [WIDE / 32][rows][16]
    alignas(64) float sums[MOST_TILE_ROWS * WIDE];
    alignas(64) float block[BLOCK * WIDE];
    alignas(64) float values[VALUE_BLOCKS * BLOCK * WIDE / 2];
    alignas(64) uint32_t turned[WIDE / 2 * BLOCK];
    Floats most[MOST_TILE_ROWS], totals[MOST_TILE_ROWS];
    Grown<float> scores;   // [blocks][rows][BLOCK]
    Grown<uint32_t> seen;  // [blocks] by any row
    Grown<float> late;     // values [keys][WIDE] of the blocks that are not in order
};

// Subnormal numbers are zero, as in tiles.
struct WithoutSubnormals {
    const unsigned before = _mm_getcsr();
    WithoutSubnormals() { _mm_setcsr(before | 0x8040); }
    ~WithoutSubnormals() { _mm_setcsr(before); }
};

// The place of a key of a part, by its position.
static INLINE int64_t place_in_part(const Keys &keys, int64_t i) {
    return i < keys.in_prefix ? i : keys.positions[keys.number(i)] % PART;
}

// Blocks, from the first, whose keys lie in order of their positions, one at each. No key behind them has its place in
// one of them: a block's values are added up before they are added to a sum.
static INLINE int64_t blocks_in_order(const Keys &keys) {
    int64_t in_order = keys.blocks();
    for (int64_t i = keys.in_prefix; i < keys.count; i++) {
        const int64_t place = place_in_part(keys, i);
        if (place != i) in_order = std::min(in_order, std::min(place, i) / BLOCK);
    }
    return in_order;
}

// Pairs of two keys [BLOCK / 2][WIDE]: of each 32 numbers the even ones, then the odd ones, which takes no shuffles.
template <int WIDE>
static INLINE void pair_values(const uint32_t *const *words, float *block) {
    for (int64_t i = 0; i < BLOCK; i += 2, block += WIDE)
        each<WIDE / 32>([&](auto part) ALWAYS {
            const __m512i earlier = _mm512_loadu_si512(words[i] + 16 * part);
            const __m512i later = _mm512_loadu_si512(words[i + 1] + 16 * part);
            const __m512i even = _mm512_mask_blend_epi16(0xaaaaaaaa, later, _mm512_slli_epi32(earlier, 16));
            const __m512i odd = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(later, 16), earlier);
            _mm512_store_si512(block + 32 * part, even);
            _mm512_store_si512(block + 32 * part + LANES, odd);
        });
}

// Puts the sums of such values into their order.
template <int WIDE>
static INLINE void order_sums(float *sums) {
    for (int64_t d = 0; d < WIDE; d += 2 * LANES) {
        const Floats even = read<Floats>(sums + d), odd = read<Floats>(sums + d + LANES);
        write(sums + d, SHUFFLE(Ints, even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
        write(sums + d + LANES, SHUFFLE(Ints, even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
    }
}

#define LOAD_PART(tile, row, column) _tile_loadd(tile, sums + (row) * WIDE + (column), 4 * WIDE);
#define STORE_PART(tile, row, column) _tile_stored(tile, sums + (row) * WIDE + (column), 4 * WIDE);
#define STORE_SCORES(tile, row, column) _tile_stored(tile, scores + (row) * BLOCK + (column), 4 * BLOCK);

// scores [rows][BLOCK] of queries [WIDE / 32][rows][16] and turned [WIDE / 2][BLOCK].
template <int WIDE, bool TWO>
static INLINE void score_tiles(const uint32_t *queries, int64_t rows, const uint32_t *turned, float *scores) {
    EACH_SUM(TWO, CLEAR_SUM)
    for (int64_t d = 0; d < WIDE / 2; d += 16, queries += rows * 16)
        ADD_PRODUCTS(TWO, _tile_dpbf16ps, queries, 64, turned + d * BLOCK, 4 * BLOCK);
    EACH_SUM(TWO, STORE_SCORES)
}

// sums [rows][WIDE] += weights [rows][BLOCK / 2] of each [rows][BLOCK] of blocks . values [blocks][BLOCK / 2][WIDE].
template <int WIDE, bool TWO>
static INLINE void blend_tiles(float *sums, const float *weights, int64_t rows, const float *values, int64_t blocks) {
    for (int64_t d = 0; d < WIDE; d += 32, sums += 32, values += 32) {
        EACH_SUM(TWO, LOAD_PART)
        for (int64_t b = 0; b < blocks; b++)
            ADD_PRODUCTS(TWO, _tile_dpbf16ps, weights + b * rows * BLOCK, 2 * BLOCK, values + b * (BLOCK / 2) * WIDE, 4 * WIDE);
        EACH_SUM(TWO, STORE_PART)
    }
}

// Adds the keys of a block, by their places, that a row sees: weights of [even, odd] places and where their values are.
template <int WIDE>
struct LateBlock {
    int64_t number = -1, counts[2] = {};
    float weights[2][BLOCK];
    const float *values[2][BLOCK];

    INLINE void add_to(float *sums) {
        constexpr int AT_ONCE = WIDE / LANES < 4 ? WIDE / LANES : 4;
        for (int64_t d = 0; d < WIDE; d += AT_ONCE * LANES) {
            Floats parts[2 * AT_ONCE];
            each<2 * AT_ONCE>([&](auto i) ALWAYS { parts[i] = Floats{}; });
            each<2>([&](auto odd) ALWAYS {
                for (int64_t i = 0; i < counts[odd]; i++)
                    each<AT_ONCE>([&](auto v) ALWAYS {
                        Floats &part = parts[odd * AT_ONCE + v];
                        part = multiplied_and_added(Floats{} + weights[odd][i], read<Floats>(values[odd][i] + d + v * LANES), part);
                    });
            });
            each<AT_ONCE>([&](auto v) ALWAYS {
                float *place = sums + d + v * LANES;
                write(place, read<Floats>(place) + (parts[v] + parts[AT_ONCE + v]));
            });
        }
        counts[0] = counts[1] = 0;
    }
};

// Adds what a row sees of blocks from `first` on. weights: [blocks][rows][BLOCK], from its own; values: [later keys][WIDE].
template <int WIDE>
static INLINE void add_late(const Keys &keys, int64_t first, const float *weights, int64_t rows, const float *values,
                            float *sums, float *totals) {
    LateBlock<WIDE> block;
    for (int64_t i = first * BLOCK; i < keys.count; i++) {
        const float weight = weights[i / BLOCK * rows * BLOCK + i % BLOCK];
        if (weight == 0) continue;
        const int64_t place = place_in_part(keys, i), odd = place % 2;
        if (place / BLOCK != block.number || block.counts[odd] == BLOCK) {
            block.add_to(sums);
            block.number = place / BLOCK;
        }
        block.weights[odd][block.counts[odd]] = from_bf16(to_bf16(weight));
        block.values[odd][block.counts[odd]++] = values + (i - first * BLOCK) * WIDE;
        totals[place % LANES] += weight;
    }
    block.add_to(sums);
}

template <int WIDE>
static void place_queries(TilesRoom<WIDE> &room, const Attention *layer, const Pieces *pieces, const Item &item,
                          const float *queries, int64_t stride) {
    const int64_t rows = item.rows(), dim = layer->dim, row0 = pieces->first_row[item.piece] + item.from;
    if (dim != WIDE) {  // what is beyond a head's numbers adds nothing to scores
        memset(room.queries, 0, rows * WIDE * 2);
        memset(room.block, 0, sizeof(room.block));
    }
    for (int64_t r = 0; r < rows; r++) {
        const float *place = queries + (row0 + r / item.heads) * stride + (item.first_head + r % item.heads) * dim;
        const auto to = [&](int64_t d) ALWAYS { return (uint16_t *)room.queries + (d / 32 * rows + r) * 32 + d % 32; };
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) write(to(d), _mm512_cvtneps_pbh(_mm512_loadu_ps(place + d)));
        for (; d < dim; d++) *to(d) = to_bf16(place[d]);
    }
}

// The scores of a part, without their scale, and the largest of each row.
template <int WIDE, bool TWO>
static void score_part(TilesRoom<WIDE> &room, const Attention *layer, const Pieces *pieces, const Item &item,
                       const Keys &keys, float *scores, uint32_t *any_sees) {
    const int64_t rows = item.rows();
    int64_t places[BLOCK];
    for (int64_t r = 0; r < rows; r++) room.most[r] = Floats{} - INFINITY;
    for (int64_t b = 0; b < keys.blocks(); b++) {
        uint32_t masks[MOST_TILE_ROWS];
        const uint32_t any = any_sees[b] = seen_by(layer, pieces, item, keys, b, masks);
        if (!any) continue;
        places_of(layer, keys, item.kv_head, b * BLOCK, any, places);
        fetch_ahead<WIDE>(layer, keys, item.kv_head, (b + 1) * BLOCK, layer->keys);
        turn_block<WIDE>(layer, places, any, WIDE / 2, room.block, room.turned);
        asm volatile("" ::: "memory");
        float *here = scores + b * rows * BLOCK;
        score_tiles<WIDE, TWO>(room.queries, rows, room.turned, here);
        asm volatile("" ::: "memory");
        for (int64_t r = 0; r < rows; r++) hide_unseen(here + r * BLOCK, masks[r / item.heads], room.most[r]);
    }
}

// Sums of values and of weights of a part, whose weights are weight(row, 16 scores).
template <int WIDE, bool TWO, class Weight>
static void blend_part(TilesRoom<WIDE> &room, const Attention *layer, const Item &item, const Keys &keys, float *scores,
                       const uint32_t *any_sees, const Weight &weight) {
    const int64_t rows = item.rows(), in_order = blocks_in_order(keys), late_blocks = keys.blocks() - in_order;
    int64_t places[BLOCK];
    const uint32_t *values[BLOCK];
    memset(room.sums, 0, rows * WIDE * 4);
    for (int64_t r = 0; r < rows; r++) room.totals[r] = Floats{};
    for (int64_t from = 0, to; from < in_order; from = to) {
        int64_t ready = 0;
        for (to = from; to < in_order && to < from + VALUE_BLOCKS && any_sees[to]; to++, ready++) {
            places_of(layer, keys, item.kv_head, to * BLOCK, any_sees[to], places);
            fetch_ahead<WIDE>(layer, keys, item.kv_head, (to + 1) * BLOCK, layer->values);
            words_of_block<WIDE>(layer, layer->values, places, any_sees[to], room.block, values);
            pair_values<WIDE>(values, room.values + ready * (BLOCK / 2) * WIDE);
            float *here = scores + to * rows * BLOCK;
            for (int64_t r = 0; r < rows; r++) {
                const Floats first = weight(r, here + r * BLOCK), second = weight(r, here + r * BLOCK + LANES);
                room.totals[r] = room.totals[r] + first + second;
                write(here + r * (BLOCK / 2), Pairs::of_keys(first, second));
            }
        }
        asm volatile("" ::: "memory");
        if (ready) blend_tiles<WIDE, TWO>(room.sums, scores + from * rows * BLOCK, rows, room.values, ready);
        asm volatile("" ::: "memory");
        if (!ready) to++;
    }
    for (int64_t r = 0; r < rows; r++) order_sums<WIDE>(room.sums + r * WIDE);
    float *late = late_blocks ? room.late.hold(late_blocks * BLOCK * WIDE) : nullptr;
    for (int64_t b = in_order; b < keys.blocks(); b++) {
        places_of(layer, keys, item.kv_head, b * BLOCK, any_sees[b], places);
        fetch_values<WIDE>(Singles{}, layer, places, any_sees[b], late + (b - in_order) * BLOCK * WIDE);
        float *here = scores + b * rows * BLOCK;
        for (int64_t i = 0; i < rows * BLOCK; i += LANES)
            write(here + i, any_sees[b] ? weight(i / BLOCK, here + i) : Floats{});
    }
    for (int64_t r = 0; late && r < rows; r++)
        add_late<WIDE>(keys, in_order, scores + r * BLOCK, rows, late, room.sums + r * WIDE, (float *)&room.totals[r]);
}

// partials: [rows][partial_size].
template <int WIDE, bool TWO>
static void attend_tiles(const Attention *layer, const Pieces *pieces, const Item &item, const Keys &keys,
                         const float *queries, int64_t stride, float *partials) {
    TilesRoom<WIDE> &room = own_room<TilesRoom<WIDE>>();
    const WithoutSubnormals without_subnormals;
    const int64_t rows = item.rows(), dim = layer->dim;
    float *scores = room.scores.hold(rows * keys.blocks() * BLOCK), most[MOST_TILE_ROWS], least[MOST_TILE_ROWS];
    uint32_t *any_sees = room.seen.hold(keys.blocks());
    place_queries(room, layer, pieces, item, queries, stride);
    shape_tiles(rows, 16);
    score_part<WIDE, TWO>(room, layer, pieces, item, keys, scores, any_sees);
    for (int64_t r = 0; r < rows; r++) {
        most[r] = largest_of(room.most[r]) * layer->scale;
        least[r] = most[r] == -INFINITY ? 0 : most[r];  // of a row that sees no key
    }
    blend_part<WIDE, TWO>(room, layer, item, keys, scores, any_sees, [&](int64_t r, const float *score) ALWAYS {
        return exponential(read<Floats>(score) * layer->scale - least[r]);
    });
    for (int64_t r = 0; r < rows; r++, partials += dim + 2) {
        memcpy(partials, room.sums + r * WIDE, 4 * dim);
        partials[dim] = most[r];
        partials[dim + 1] = sum_of(room.totals[r]);
    }
}
#endif
