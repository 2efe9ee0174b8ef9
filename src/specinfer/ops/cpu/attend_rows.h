// Attention of many rows to a part of their keys: 16 rows side by side in a vector.
//
// The numbers of a key are spread over all rows, so that nothing is ever added up within a vector. All scores come
// first, then their largest is known, then values are added up in the order of keys.

// Registers of rows and numbers of keys or values whose sums are kept in registers, which take most of them.
static const int ROW_REGISTERS = WIDE_REGISTERS ? 1 : 2;
static const int AT_ONCE = WIDE_REGISTERS ? 16 : 6;

// body(count, from) for up to `AT_ONCE` of `ALL` at a time.
template <int ALL, class Body>
static INLINE void by_few(const Body &body) {
    for (int64_t from = 0; from < ALL / AT_ONCE * AT_ONCE; from += AT_ONCE)
        body(std::integral_constant<int, AT_ONCE>{}, from);
    if constexpr (ALL % AT_ONCE != 0) body(std::integral_constant<int, ALL % AT_ONCE>{}, ALL / AT_ONCE * AT_ONCE);
}

// body(rows) for the first of so many rows of a vector.
template <class Body>
static INLINE void by_row_registers(const Body &body) {
    for (int64_t rows = 0; rows < LANES; rows += ROW_REGISTERS * REGISTER) body(rows);
}

// scores [BLOCK] = scale * queries [words] . keys [BLOCK][words], with `Product`; queries and scores are vectors of rows.
template <int WIDE, class Product>
static INLINE void score(const Floats *queries, const uint32_t *keys, float scale, Floats *scores) {
    constexpr int WORDS = WIDE / Product::IN_WORD;
    by_few<BLOCK>([&](auto count, int64_t from) ALWAYS {
        by_row_registers([&](int64_t rows) ALWAYS {
            const float *place = (const float *)queries + rows;
            const uint32_t *mine = keys + from * WORDS;
            Register sums[count * ROW_REGISTERS];
            each<count * ROW_REGISTERS>([&](auto i) ALWAYS { sums[i] = Register{}; });
            for (int64_t d = 0; d < WORDS; d++) {
                Register q[ROW_REGISTERS];
                each<ROW_REGISTERS>([&](auto r) ALWAYS { q[r] = read<Register>(place + d * LANES + r * REGISTER); });
                each<count>([&](auto i) ALWAYS {
                    const uint32_t number = mine[i * WORDS + d];
                    each<ROW_REGISTERS>([&](auto r) ALWAYS {
                        Register &sum = sums[i * ROW_REGISTERS + r];
                        sum = Product::add(sum, number, q[r]);
                    });
                });
            }
            each<count * ROW_REGISTERS>([&](auto i) ALWAYS {
                write((float *)(scores + from + i / ROW_REGISTERS) + rows + i % ROW_REGISTERS * REGISTER, sums[i] * scale);
            });
        });
    });
}

// sums [WIDE] += values [words][WIDE] . weights [words], with `Product`; sums and weights are vectors of rows.
template <int WIDE, class Product>
static INLINE void blend(Floats *sums, const Floats *weights, const uint32_t *values) {
    by_few<WIDE>([&](auto count, int64_t from) ALWAYS {
        by_row_registers([&](int64_t rows) ALWAYS {
            const auto place = [&](int64_t i) ALWAYS {
                return (float *)(sums + from + i / ROW_REGISTERS) + rows + i % ROW_REGISTERS * REGISTER;
            };
            Register part[count * ROW_REGISTERS];
            each<count * ROW_REGISTERS>([&](auto i) ALWAYS { part[i] = read<Register>(place(i)); });
            for (int64_t key = 0; key < BLOCK / Product::IN_WORD; key++) {
                Register weight[ROW_REGISTERS];
                each<ROW_REGISTERS>([&](auto r) ALWAYS {
                    weight[r] = read<Register>((const float *)(weights + key) + rows + r * REGISTER);
                });
                each<count>([&](auto i) ALWAYS {
                    const uint32_t number = values[key * WIDE + from + i];
                    each<ROW_REGISTERS>([&](auto r) ALWAYS {
                        Register &sum = part[i * ROW_REGISTERS + r];
                        sum = Product::add(sum, number, weight[r]);
                    });
                });
            }
            each<count * ROW_REGISTERS>([&](auto i) ALWAYS { write(place(i), part[i]); });
        });
    });
}

// A vector of rows on its way over the keys.
template <int WIDE>
struct Rows {
    Floats queries[WIDE];  // or pairs of bf16 in the first half
    Floats sums[WIDE], most, total;
};

template <int WIDE>
struct RowsRoom {
    alignas(64) Rows<WIDE> rows[MOST_VECTORS];
    alignas(64) float block[BLOCK * WIDE];
    Grown<Floats> scores;  // [blocks][vectors][BLOCK]
    Grown<uint32_t> seen;  // [blocks] by any row
};

template <int WIDE>
static INLINE void place_queries(const Attention *layer, const Pieces *pieces, const Item &item, const float *queries,
                                 int64_t stride, Rows<WIDE> *all) {
    const int64_t rows = item.rows(), dim = layer->dim;
    const int64_t row0 = pieces->first_row[item.piece] + item.from;
    const bool pairs = takes_pairs(layer);
    for (int64_t v = 0; v < (rows + LANES - 1) / LANES; v++) {
        Rows<WIDE> &mine = all[v];
        memset(&mine, 0, sizeof(mine));
        mine.most = Floats{} - INFINITY;
        for (int64_t i = 0; i < LANES && v * LANES + i < rows; i++) {
            const int64_t r = v * LANES + i;
            const float *place = queries + (row0 + r / item.heads) * stride + (item.first_head + r % item.heads) * dim;
            for (int64_t d = 0; d < dim; d++)
                if (pairs)
                    ((uint16_t *)mine.queries)[(d / 2 * LANES + i) * 2 + d % 2] = to_bf16(place[d]);
                else
                    ((float *)mine.queries)[d * LANES + i] = place[d];
        }
    }
}

// partials: [rows][partial_size].
template <int WIDE>
static void attend_rows(const Attention *layer, const Pieces *pieces, const Item &item, const Keys &keys,
                        const float *queries, int64_t stride, float *partials) {
    RowsRoom<WIDE> &room = own_room<RowsRoom<WIDE>>();
    const int64_t rows = item.rows(), vectors = (rows + LANES - 1) / LANES;
    const int64_t blocks = keys.blocks(), dim = layer->dim;
    Floats *scores = room.scores.hold(blocks * vectors * BLOCK);
    uint32_t *any_sees = room.seen.hold(blocks);
    int64_t places[BLOCK];
    place_queries<WIDE>(layer, pieces, item, queries, stride, room.rows);
    memset(room.block, 0, sizeof(room.block));
    for (int64_t b = 0; b < blocks; b++) {
        uint32_t masks[MOST_VECTORS * LANES], all = ~0u;
        const uint32_t any = any_sees[b] = seen_by(layer, pieces, item, keys, b, masks);
        if (!any) continue;
        Ints bits[MOST_VECTORS] = {};
        for (int64_t r = 0; r < rows; r++) {
            const uint32_t mask = masks[r / item.heads];
            bits[r / LANES][r % LANES] = (int32_t)mask;
            all &= mask;
        }
        places_of(layer, keys, item.kv_head, b * BLOCK, any, places);
        fetch_ahead<WIDE>(layer, keys, item.kv_head, (b + 1) * BLOCK, layer->keys);
        fetch_words<WIDE>(layer, layer->keys, places, any, room.block);
        for (int64_t v = 0; v < vectors; v++) {
            Rows<WIDE> &mine = room.rows[v];
            Floats *here = scores + (b * vectors + v) * BLOCK;
            with_product(layer, [&](auto product) ALWAYS {
                score<WIDE, decltype(product)>(mine.queries, (const uint32_t *)room.block, layer->scale, here);
            });
            for (int64_t i = 0; i < BLOCK; i++) {
                if (all != ~0u) here[i] = select((bits[v] >> (int32_t)i & 1) != 0, here[i], Floats{} - INFINITY);
                mine.most = select(here[i] > mine.most, here[i], mine.most);
            }
        }
    }
    memset(room.block, 0, sizeof(room.block));
    for (int64_t b = 0; b < blocks; b++) {
        if (!any_sees[b]) continue;
        places_of(layer, keys, item.kv_head, b * BLOCK, any_sees[b], places);
        fetch_ahead<WIDE>(layer, keys, item.kv_head, (b + 1) * BLOCK, layer->values);
        fetch_values<WIDE>(layer, places, any_sees[b], room.block);
        for (int64_t v = 0; v < vectors; v++) {
            Rows<WIDE> &mine = room.rows[v];
            Floats *weights = scores + (b * vectors + v) * BLOCK;
            const Floats least = select(mine.most == -INFINITY, Floats{}, mine.most);  // of a row that sees no key
            for (int64_t i = 0; i < BLOCK; i++) {
                for (int64_t r = 0; r < LANES; r += REGISTER) {
                    float *place = (float *)(weights + i) + r;
                    write(place, exponential(read<Register>(place) - read<Register>((const float *)&least + r)));
                }
                mine.total += weights[i];
            }
            with_product(layer, [&](auto product) ALWAYS {
                product.take_rows(weights);
                blend<WIDE, decltype(product)>(mine.sums, weights, (const uint32_t *)room.block);
            });
        }
    }
    for (int64_t r = 0; r < rows; r++, partials += dim + 2) {
        const Rows<WIDE> &mine = room.rows[r / LANES];
        for (int64_t d = 0; d < dim; d++) partials[d] = mine.sums[d][r % LANES];
        partials[dim] = mine.most[r % LANES];
        partials[dim + 1] = mine.total[r % LANES];
    }
}
