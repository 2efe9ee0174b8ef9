// Tree attention without copying the cache: each token sees its request's prefix and what `visible` says of the rest.
//
// A work item is some tokens of a piece and one KV head: its rows are the tokens' query heads that share it, 16 of
// them side by side in a vector. Blocks of keys and values are brought together from their slots; their numbers are
// spread over all rows, so that nothing is ever added up within a vector. All scores come first, then their largest is
// known, then values are added up in the order of keys: a row's result depends on the keys it sees and on nothing
// else in the pass, to the last bit (but a value that is not finite spoils the rows beside those that see it).

static const int64_t BLOCK = 32;         // keys
static const int64_t MOST_VECTORS = 4;   // of rows, in an item

template <class From>
static INLINE void widen(const uint16_t *place, int64_t dim, float *to, From from, Floats (*vector)(const uint16_t *)) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) write(to + d, vector(place + d));
    for (; d < dim; d++) to[d] = from(place[d]);
}

// One key or value as floats.
static INLINE void fetch(const void *pool, int type, int64_t index, int64_t dim, float *to) {
    if (type == FP32)
        memcpy(to, (const float *)pool + index * dim, 4 * dim);
    else if (type == BF16)
        widen((const uint16_t *)pool + index * dim, dim, to, from_bf16, vectors_from_bf16);
    else
        widen((const uint16_t *)pool + index * dim, dim, to, from_fp16, vectors_from_fp16);
}

// scores [BLOCK] = scale * queries [WIDE] . keys, a vector of rows each.
template <int WIDE>
static INLINE void score(const Floats *queries, const float *keys, float scale, Floats *scores) {
    for (int half = 0; half < 2; half++, keys += BLOCK / 2 * WIDE, scores += BLOCK / 2) {
        Floats sums[BLOCK / 2];
        each<BLOCK / 2>([&](auto i) ALWAYS { sums[i] = Floats{}; });
        for (int64_t d = 0; d < WIDE; d++) {
            const Floats q = queries[d];
            each<BLOCK / 2>([&](auto i) ALWAYS { sums[i] += q * keys[i * WIDE + d]; });
        }
        each<BLOCK / 2>([&](auto i) ALWAYS { scores[i] = sums[i] * scale; });
    }
}

#ifdef DOTS
// The same with pairs of bf16: queries [WIDE / 2], keys [BLOCK][WIDE / 2].
template <int WIDE>
static INLINE void score_pairs(const uint32_t *queries, const uint32_t *keys, float scale, Floats *scores) {
    for (int half = 0; half < 2; half++, keys += BLOCK / 4 * WIDE, scores += BLOCK / 2) {
        __m512 sums[BLOCK / 2];
        each<BLOCK / 2>([&](auto i) ALWAYS { sums[i] = _mm512_setzero_ps(); });
        for (int64_t d = 0; d < WIDE / 2; d++) {
            const __m512bh q = (__m512bh)_mm512_loadu_si512(queries + d * LANES);
            each<BLOCK / 2>([&](auto i) ALWAYS {
                sums[i] = _mm512_dpbf16_ps(sums[i], q, (__m512bh)_mm512_set1_epi32(keys[i * (WIDE / 2) + d]));
            });
        }
        each<BLOCK / 2>([&](auto i) ALWAYS { scores[i] = (Floats)sums[i] * scale; });
    }
}
#endif

// sums [WIDE] += values . weights [BLOCK], a vector of rows each.
template <int WIDE>
static INLINE void blend(Floats *sums, const Floats *weights, const float *values) {
    for (int64_t d = 0; d < WIDE; d += LANES, sums += LANES, values += LANES) {
        Floats part[LANES];
        each<LANES>([&](auto i) ALWAYS { part[i] = sums[i]; });
        for (int64_t key = 0; key < BLOCK; key++) {
            const Floats weight = weights[key];
            each<LANES>([&](auto i) ALWAYS { part[i] += weight * values[key * WIDE + i]; });
        }
        each<LANES>([&](auto i) ALWAYS { sums[i] = part[i]; });
    }
}

struct Item {  // tokens [from, to) of a piece, and so many query heads, which share a KV head
    int64_t piece, from, to, kv_head, first_head, heads;
};

// What may be seen of 32 keys from `start` on by a new token: a bit for each.
static INLINE uint32_t seen(const Attention *layer, const Pieces *pieces, int64_t piece, int64_t token, int64_t start) {
    const int64_t prefix = pieces->num_prefix[piece], rest = pieces->num_rest[piece];
    const int64_t end = prefix + rest - start < BLOCK ? prefix + rest - start : BLOCK;
    const uint8_t *visible = pieces->visible + pieces->first_visible[piece] + token * rest;
    const int64_t *positions = pieces->key_positions + pieces->first_slot[piece];
    const int64_t position = pieces->positions[pieces->first_row[piece] + token];
    uint32_t bits = 0;
    if (start + BLOCK <= prefix && (!layer->window || position - positions[start] < layer->window))
        return ~0u;  // the prefix lies in order of its positions
    for (int64_t i = 0; i < end; i++) {
        const int64_t key = start + i;
        const bool near = !layer->window || position - positions[key] < layer->window;
        bits |= (uint32_t)(near && (key < prefix || visible[key - prefix])) << i;
    }
    return bits;
}

// A vector of rows on its way over the keys.
template <int WIDE>
struct Rows {
    Floats queries[WIDE];  // or pairs of bf16 in the first half
    Floats sums[WIDE], most, total;
};

// A thread's own memory. No containers of the standard library: which instruction set's would be linked?
template <int WIDE>
struct Room {
    alignas(64) Rows<WIDE> rows[MOST_VECTORS];
    alignas(64) float block[BLOCK * WIDE];
    Floats *scores = nullptr;  // [blocks][vectors][BLOCK]
    uint32_t *seen = nullptr;  // [blocks] by any row
    int64_t blocks = 0;
    void hold(int64_t wanted) {
        if (wanted <= blocks) return;
        delete_aligned(scores);
        free(seen);
        blocks = wanted + wanted / 2;
        scores = (Floats *)new_aligned(blocks * MOST_VECTORS * BLOCK * sizeof(Floats));
        seen = (uint32_t *)malloc(blocks * sizeof(uint32_t));
    }
    ~Room() {
        delete_aligned(scores);
        free(seen);
    }
};

template <int WIDE>
static void attend_item(const Attention *layer, const Pieces *pieces, Item item, const float *queries, int64_t stride,
                        float *result) {
    const int64_t repeats = item.heads, rows = (item.to - item.from) * repeats;
    const int64_t dim = layer->dim, row0 = pieces->first_row[item.piece] + item.from;
    const int64_t context = pieces->num_prefix[item.piece] + pieces->num_rest[item.piece];
    const int64_t *slots = pieces->slots + pieces->first_slot[item.piece], vectors = (rows + LANES - 1) / LANES;
    const int64_t blocks = (context + BLOCK - 1) / BLOCK;
#ifdef DOTS
    const bool pairs = layer->type == BF16 && dim % 2 == 0;
#else
    const bool pairs = false;
#endif
    static thread_local Room<WIDE> room;
    room.hold(blocks);
    for (int64_t v = 0; v < vectors; v++) {
        Rows<WIDE> &mine = room.rows[v];
        memset(&mine, 0, sizeof(mine));
        mine.most = Floats{} - INFINITY;
        for (int64_t i = 0; i < LANES && v * LANES + i < rows; i++) {
            const int64_t r = v * LANES + i;
            const float *place = queries + (row0 + r / repeats) * stride + (item.first_head + r % repeats) * dim;
            for (int64_t d = 0; d < dim; d++)
                if (pairs)
                    ((uint16_t *)mine.queries)[(d / 2 * LANES + i) * 2 + d % 2] = to_bf16(place[d]);
                else
                    ((float *)mine.queries)[d * LANES + i] = place[d];
        }
    }
    memset(room.block, 0, sizeof(room.block));
    for (int64_t b = 0; b < blocks; b++) {
        uint32_t any = 0, all = ~0u;
        Ints bits[MOST_VECTORS] = {};
        for (int64_t t = item.from; t < item.to; t++) {
            const uint32_t mask = seen(layer, pieces, item.piece, t, b * BLOCK);
            any |= mask;
            all &= mask;
            for (int64_t r = (t - item.from) * repeats; r < (t - item.from + 1) * repeats; r++)
                bits[r / LANES][r % LANES] = (int32_t)mask;
        }
        room.seen[b] = any;
        if (!any) continue;
        for (int64_t i = 0; i < BLOCK; i++) {
            if (!(any >> i & 1)) continue;
            const int64_t index = slots[b * BLOCK + i] * layer->kv_heads + item.kv_head;
            if (pairs)
                memcpy(room.block + i * (WIDE / 2), (const uint16_t *)layer->keys + index * dim, 2 * dim);
            else
                fetch(layer->keys, layer->type, index, dim, room.block + i * WIDE);
        }
        for (int64_t v = 0; v < vectors; v++) {
            Rows<WIDE> &mine = room.rows[v];
            Floats *scores = room.scores + (b * vectors + v) * BLOCK;
#ifdef DOTS
            if (pairs)
                score_pairs<WIDE>((const uint32_t *)mine.queries, (const uint32_t *)room.block, layer->scale, scores);
            else
#endif
                score<WIDE>(mine.queries, room.block, layer->scale, scores);
            for (int64_t i = 0; i < BLOCK; i++) {
                if (all != ~0u) scores[i] = (bits[v] >> (int32_t)i & 1) != 0 ? scores[i] : Floats{} - INFINITY;
                mine.most = scores[i] > mine.most ? scores[i] : mine.most;
            }
        }
    }
    memset(room.block, 0, sizeof(room.block));
    for (int64_t b = 0; b < blocks; b++) {
        if (!room.seen[b]) continue;
        for (int64_t i = 0; i < BLOCK; i++) {
            // What nobody sees may be anything; zero times what is not finite would not be zero.
            if (room.seen[b] >> i & 1)
                fetch(layer->values, layer->type, slots[b * BLOCK + i] * layer->kv_heads + item.kv_head, dim,
                      room.block + i * WIDE);
            else
                memset(room.block + i * WIDE, 0, 4 * WIDE);
        }
        for (int64_t v = 0; v < vectors; v++) {
            Rows<WIDE> &mine = room.rows[v];
            Floats *weights = room.scores + (b * vectors + v) * BLOCK;
            for (int64_t i = 0; i < BLOCK; i++) {
                weights[i] = exponential(weights[i] - mine.most);
                mine.total += weights[i];
            }
            blend<WIDE>(mine.sums, weights, room.block);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        const Rows<WIDE> &mine = room.rows[r / LANES];
        float *place = result + ((row0 + r / repeats) * layer->heads + item.first_head + r % repeats) * dim;
        for (int64_t d = 0; d < dim; d++) place[d] = mine.sums[d][r % LANES] / mine.total[r % LANES];
    }
}

// queries: [tokens], `stride` floats apart, each [heads][dim]; result: [tokens][heads][dim].
static void attend(const Attention *layer, const Pieces *pieces, const float *queries, int64_t stride, float *result,
                   int threads) {
    // Very many heads of one KV head are shared out, too.
    const int64_t repeats = layer->heads / layer->kv_heads, most_rows = MOST_VECTORS * LANES;
    const int64_t parts = (repeats + most_rows - 1) / most_rows, heads = (repeats + parts - 1) / parts;
    const int64_t tokens = most_rows / heads, groups = layer->kv_heads * parts;
    const auto one = layer->dim <= 32    ? attend_item<32>
                     : layer->dim <= 64  ? attend_item<64>
                     : layer->dim <= 128 ? attend_item<128>
                                         : attend_item<256>;
    int64_t items = 0;
    for (int64_t i = 0; i < pieces->count; i++) items += (pieces->num_new[i] + tokens - 1) / tokens * groups;
    in_parallel(items, 1, threads, [&](int64_t number) {
        int64_t piece = 0, left = number, here;
        while (left >= (here = (pieces->num_new[piece] + tokens - 1) / tokens * groups)) {
            left -= here;
            piece++;
        }
        const int64_t from = left / groups * tokens, to = from + tokens, end = pieces->num_new[piece];
        const int64_t kv_head = left % groups / parts, first = left % parts * heads;
        const int64_t rest = repeats - first;
        one(layer, pieces,
            {piece, from, to < end ? to : end, kv_head, kv_head * repeats + first, rest < heads ? rest : heads},
            queries, stride, result);
    });
}

static INLINE void store(void *pool, int type, int64_t place, float value) {
    if (type == FP32)
        ((float *)pool)[place] = value;
    else
        ((uint16_t *)pool)[place] = type == BF16 ? to_bf16(value) : to_fp16(value);
}

static void rotate_token(const Attention *layer, int64_t slot, const float *cosines, const float *sines, float *qkv) {
    const int64_t dim = layer->dim, half = layer->rotated / 2;
    for (int64_t head = 0; head < layer->heads + layer->kv_heads; head++) {
        float *x = qkv + head * dim;
        const float *weight = head < layer->heads ? layer->query_norm : layer->key_norm;
        if (weight) norm_row(x, weight, x, dim, layer->eps);
        for (int64_t d = 0; d < half; d++) {
            const float a = x[d], b = x[d + half];
            x[d] = a * cosines[d] - b * sines[d];
            x[d + half] = b * cosines[d + half] + a * sines[d + half];
        }
    }
    const float *key = qkv + layer->heads * dim, *value = key + layer->kv_heads * dim;
    const int64_t size = layer->kv_heads * dim;
    for (int64_t i = 0; i < size; i++) {
        store(layer->keys, layer->type, slot * size + i, key[i]);
        store(layer->values, layer->type, slot * size + i, value[i]);
    }
}

// Norms and rotates queries and keys in place; keys and values go to the cache.
// qkv: [tokens][heads, then kv_heads of keys and of values][dim]; cosines, sines: [positions][rotated].
static void rotate(const Attention *layer, const Pieces *pieces, const float *cosines, const float *sines, float *qkv,
                   int threads) {
    const int64_t all = (layer->heads + 2 * layer->kv_heads) * layer->dim, tokens = pieces->tokens;
    const auto one = [&](int64_t t) {
        const int64_t place = pieces->positions[t] * layer->rotated;
        rotate_token(layer, pieces->new_slots[t], cosines + place, sines + place, qkv + t * all);
    };
    in_parallel(tokens, FEW, threads, one);
}
