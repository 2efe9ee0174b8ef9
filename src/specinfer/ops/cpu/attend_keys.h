// Attention of few rows to a part of their keys: 16 keys side by side in a vector, then 16 numbers of a value.
//
// The products of each row and key, and what becomes of them, are added up in the order of attend_rows.h: results are
// the same to the bit.

static const int64_t FEW_ROWS = 12;
static const int64_t ROWS_AT_ONCE = 4;
static const int64_t MOST_AT_ONCE = WIDE_REGISTERS ? 4 : 2;  // registers for each row

typedef uint32_t Quad __attribute__((vector_size(16)));
#if defined(__clang__)
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, type{__VA_ARGS__})
#endif

// turned [depth][BLOCK] = words of [BLOCK] keys, whose depth is rounded up to 16.
static INLINE void turn(const uint32_t *const *keys, int64_t depth, uint32_t *turned) {
#if REGISTER_BYTES == 64
    for (int64_t d = 0; d < depth; d += 16)
        for (int64_t i = 0; i < BLOCK; i += LANES) {
            Words words[LANES], next[LANES];
            each<16>([&](auto j) ALWAYS { words[j] = read<Words>(keys[i + j] + d); });
            each<4>([&](auto) ALWAYS {  // each brings one bit of a row's number to its column's, and one back
                each<8>([&](auto j) ALWAYS {
                    next[2 * j] = SHUFFLE(Words, words[j], words[j + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
                    next[2 * j + 1] =
                        SHUFFLE(Words, words[j], words[j + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
                });
                each<16>([&](auto j) ALWAYS { words[j] = next[j]; });
            });
            each<16>([&](auto j) ALWAYS { write(turned + (d + j) * BLOCK + i, words[j]); });
        }
#else
    for (int64_t d = 0; d < depth; d += 4)
        for (int64_t i = 0; i < BLOCK; i += 4) {
            Quad words[4], next[4];
            each<4>([&](auto j) ALWAYS { words[j] = read<Quad>(keys[i + j] + d); });
            each<2>([&](auto) ALWAYS {
                each<2>([&](auto j) ALWAYS {
                    next[2 * j] = SHUFFLE(Quad, words[j], words[j + 2], 0, 4, 1, 5);
                    next[2 * j + 1] = SHUFFLE(Quad, words[j], words[j + 2], 2, 6, 3, 7);
                });
                each<4>([&](auto j) ALWAYS { words[j] = next[j]; });
            });
            each<4>([&](auto j) ALWAYS { write(turned + (d + j) * BLOCK + i, words[j]); });
        }
#endif
}

// Where the words of a block's keys or values are. block: room for those that are not multiplied where they lie.
template <int WIDE>
static INLINE void words_of_block(const Attention *layer, const void *pool, const int64_t *places, uint32_t any,
                                  float *block, const uint32_t **words) {
    const bool pairs = takes_pairs(layer);
    if ((pairs || layer->type == FP32) && layer->dim == WIDE && any == ~0u) {
        const int64_t bytes = pairs ? 2 : 4;
        for (int64_t i = 0; i < BLOCK; i++) words[i] = (const uint32_t *)((const char *)pool + places[i] * bytes);
    } else {
        fetch_words<WIDE>(layer, pool, places, any, block);
        for (int64_t i = 0; i < BLOCK; i++) words[i] = (const uint32_t *)block + i * (pairs ? WIDE / 2 : WIDE);
    }
}

// turned [depth][BLOCK] = words of a block of keys. block: room for them.
template <int WIDE>
static INLINE void turn_block(const Attention *layer, const int64_t *places, uint32_t any, int64_t depth, float *block,
                              uint32_t *turned) {
    const uint32_t *words[BLOCK];
    words_of_block<WIDE>(layer, layer->keys, places, any, block, words);
    turn(words, depth, turned);
}

// What a row does not see of a block's scores becomes -infinity; most: the largest so far, lane by lane.
static INLINE void hide_unseen(float *scores, uint32_t mask, Floats &most) {
    for (int64_t i = 0; mask != ~0u && i < BLOCK; i++)
        if (!(mask >> i & 1)) scores[i] = -INFINITY;
    for (int64_t i = 0; i < BLOCK; i += LANES) {
        const Floats some = read<Floats>(scores + i);
        most = select(some > most, some, most);
    }
}

static INLINE float largest_of(Floats numbers) {
    float most = numbers[0];
    for (int64_t i = 1; i < LANES; i++) most = numbers[i] > most ? numbers[i] : most;
    return most;
}

// scores [ROWS][BLOCK] = scale * queries [ROWS][columns] . turned [depth][BLOCK]; rows of scores are `stride` apart.
template <int ROWS, class Product>
static INLINE void score_keys(const uint32_t *queries, int64_t columns, const uint32_t *turned, int64_t depth,
                              float scale, float *scores, int64_t stride) {
    constexpr int VECTORS = 2;
    for (int64_t from = 0; from < BLOCK; from += VECTORS * REGISTER) {
        Register sums[ROWS * VECTORS];
        each<ROWS * VECTORS>([&](auto i) ALWAYS { sums[i] = Register{}; });
        for (int64_t d = 0; d < depth; d++) {
            Register keys[VECTORS];
            each<VECTORS>([&](auto v) ALWAYS { keys[v] = read<Register>(turned + d * BLOCK + from + v * REGISTER); });
            each<ROWS>([&](auto r) ALWAYS {
                const uint32_t query = queries[r * columns + d];
                each<VECTORS>([&](auto v) ALWAYS {
                    sums[r * VECTORS + v] = Product::add(sums[r * VECTORS + v], query, keys[v]);
                });
            });
        }
        each<ROWS>([&](auto r) ALWAYS {
            each<VECTORS>([&](auto v) ALWAYS {
                write(scores + r * stride + from + v * REGISTER, sums[r * VECTORS + v] * scale);
            });
        });
    }
}

// sums [ROWS][WIDE] += weights [ROWS][words] . values [words][WIDE], with `Product`; rows of weights are `stride` apart.
template <int ROWS, int WIDE, class Product>
static INLINE void blend_keys(float *sums, const uint32_t *weights, int64_t stride, const uint32_t *values, int64_t dim) {
    constexpr int VECTORS = WIDE < MOST_AT_ONCE * REGISTER ? WIDE / REGISTER : MOST_AT_ONCE;
    for (int64_t d = 0; d < dim; d += VECTORS * REGISTER) {
        Register part[ROWS * VECTORS];
        const auto place = [&](int64_t i) ALWAYS { return sums + i / VECTORS * WIDE + d + i % VECTORS * REGISTER; };
        each<ROWS * VECTORS>([&](auto i) ALWAYS { part[i] = read<Register>(place(i)); });
        for (int64_t key = 0; key < BLOCK / Product::IN_WORD; key++) {
            Register numbers[VECTORS];
            each<VECTORS>([&](auto v) ALWAYS { numbers[v] = read<Register>(values + key * WIDE + d + v * REGISTER); });
            each<ROWS>([&](auto r) ALWAYS {
                const uint32_t weight = weights[r * stride + key];
                each<VECTORS>([&](auto v) ALWAYS {
                    part[r * VECTORS + v] = Product::add(part[r * VECTORS + v], weight, numbers[v]);
                });
            });
        }
        each<ROWS * VECTORS>([&](auto i) ALWAYS { write(place(i), part[i]); });
    }
}

// body(number of rows, first row) for a few of the rows at a time.
template <class Body>
static INLINE void by_rows(int64_t rows, const Body &body) {
    int64_t r = 0;
    for (; r + ROWS_AT_ONCE <= rows; r += ROWS_AT_ONCE) body(std::integral_constant<int, ROWS_AT_ONCE>{}, r);
    if (rows - r == 3) body(std::integral_constant<int, 3>{}, r);
    if (rows - r == 2) body(std::integral_constant<int, 2>{}, r);
    if (rows - r == 1) body(std::integral_constant<int, 1>{}, r);
}

template <int WIDE>
struct KeysRoom {
    alignas(64) uint32_t queries[FEW_ROWS * WIDE];
    alignas(64) float sums[FEW_ROWS * WIDE];
    alignas(64) float block[BLOCK * WIDE];
    alignas(64) uint32_t turned[WIDE * BLOCK];
    Floats most[FEW_ROWS];
    Grown<float> scores;   // [rows][blocks][BLOCK]
    Grown<uint32_t> seen;  // [blocks] by any row
};

template <class Product, int WIDE>
static INLINE void score_block(const KeysRoom<WIDE> &room, int64_t rows, int64_t depth, float scale, float *scores,
                               int64_t stride) {
    by_rows(rows, [&](auto count, int64_t r) ALWAYS {
        score_keys<count, Product>(room.queries + r * WIDE, WIDE, room.turned, depth, scale, scores + r * stride, stride);
    });
}

// partials: [rows][partial_size].
template <int WIDE>
static void attend_keys(const Attention *layer, const Pieces *pieces, const Item &item, const Keys &keys,
                        const float *queries, int64_t stride, float *partials) {
    KeysRoom<WIDE> &room = own_room<KeysRoom<WIDE>>();
    const int64_t rows = item.rows(), dim = layer->dim, blocks = keys.blocks();
    const int64_t row0 = pieces->first_row[item.piece] + item.from, length = blocks * BLOCK;
    const bool pairs = takes_pairs(layer);
    const int64_t depth = pairs ? dim / 2 : dim;
    float *scores = room.scores.hold(rows * length);
    uint32_t *any_sees = room.seen.hold(blocks);
    int64_t places[BLOCK];
    for (int64_t r = 0; r < rows; r++) {
        const float *place = queries + (row0 + r / item.heads) * stride + (item.first_head + r % item.heads) * dim;
        uint32_t *query = room.queries + r * WIDE;
        if (pairs)
            for (int64_t d = 0; d < dim; d++) ((uint16_t *)query)[d] = to_bf16(place[d]);
        else
            memcpy(query, place, 4 * dim);
        room.most[r] = Floats{} - INFINITY;
    }
    memset(room.block, 0, sizeof(room.block));
    for (int64_t b = 0; b < blocks; b++) {
        uint32_t masks[FEW_ROWS];
        const uint32_t any = any_sees[b] = seen_by(layer, pieces, item, keys, b, masks);
        if (!any) continue;
        places_of(layer, keys, item.kv_head, b * BLOCK, any, places);
        fetch_ahead<WIDE>(layer, keys, item.kv_head, (b + 1) * BLOCK, layer->keys);
        turn_block<WIDE>(layer, places, any, depth, room.block, room.turned);
        float *here = scores + b * BLOCK;
        with_product(layer, [&](auto product) ALWAYS {
            score_block<decltype(product)>(room, rows, depth, layer->scale, here, length);
        });
        for (int64_t r = 0; r < rows; r++) hide_unseen(here + r * length, masks[r / item.heads], room.most[r]);
    }
    memset(room.sums, 0, sizeof(room.sums));
    memset(room.block, 0, sizeof(room.block));
    float most[FEW_ROWS], total[FEW_ROWS] = {};
    for (int64_t r = 0; r < rows; r++) {
        most[r] = largest_of(room.most[r]);
    }
    for (int64_t b = 0; b < blocks; b++) {
        if (!any_sees[b]) continue;
        places_of(layer, keys, item.kv_head, b * BLOCK, any_sees[b], places);
        fetch_ahead<WIDE>(layer, keys, item.kv_head, (b + 1) * BLOCK, layer->values);
        fetch_values<WIDE>(layer, places, any_sees[b], room.block);
        float *weights = scores + b * BLOCK;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < BLOCK; i += REGISTER) {
                const float least = most[r] == -INFINITY ? 0 : most[r];  // of a row that sees no key
                write(weights + r * length + i, exponential(read<Register>(weights + r * length + i) - least));
            }
        by_rows(rows, [&](auto count, int64_t r) ALWAYS {
            float sums[count];
            each<count>([&](auto j) ALWAYS { sums[j] = total[r + j]; });
            for (int64_t i = 0; i < BLOCK; i++)
                each<count>([&](auto j) ALWAYS { sums[j] += weights[(r + j) * length + i]; });
            each<count>([&](auto j) ALWAYS { total[r + j] = sums[j]; });
            with_product(layer, [&](auto product) ALWAYS {
                float *mine = weights + r * length;
                each<count>([&](auto j) ALWAYS { product.take_keys(mine + j * length); });
                blend_keys<count, WIDE, decltype(product)>(room.sums + r * WIDE, (const uint32_t *)mine, length,
                                                           (const uint32_t *)room.block, dim);
            });
        });
    }
    for (int64_t r = 0; r < rows; r++, partials += dim + 2) {
        memcpy(partials, room.sums + r * WIDE, 4 * dim);
        partials[dim] = most[r];
        partials[dim + 1] = total[r];
    }
}
