// A whole draft in one call: the passes of a small model or a head, and what grows from their scores, level by level.
//
// The steps are those of small_model.py, draft_sampling.py and tree_batch.py for tokens that are chosen, or drawn without
// replacement. A level takes the nodes of all trees together: embedding, layers, norm and head, then each node's candidates, then growth.

template <class T>
static T *hold(std::vector<T> &room, int64_t size) {
    if ((int64_t)room.size() < size) room.resize((size_t)(size + size / 2));
    return room.data();
}

// 64-byte aligned, as kernels read it fastest.
static float *hold_aligned(std::vector<float> &room, int64_t size) {
    const uintptr_t place = (uintptr_t)hold(room, size + 16);
    return (float *)((place + 63) / 64 * 64);
}

struct Parent {  // a node whose children are chosen
    int64_t tree, node, position;  // of the children
};

struct DraftRoom {  // kept from call to call
    std::vector<Parent> parents;
    std::vector<int64_t> trees, nodes, candidates, pieces, keys, ids;
    std::vector<double> probs;
    std::vector<Growing> growing;
    std::vector<Guess> open;
    std::vector<uint8_t> ancestry, visible;
    std::vector<float> hidden, inputs, normed, scratch, logits, values, sure;
};

// The trees of a call while they grow.
struct Drafting {
    Draft *d;
    int threads;
    DraftRoom &room;
    Growth g = {};
    Pieces pieces = {};
    int64_t *key_starts;  // [trees] place of the first key
    int64_t *piece_numbers[6], *slots, *key_positions, most_rows = 0;

    const Growing &at(int64_t tree) const { return g.trees[tree]; }
    int64_t known(int64_t tree) const { return d->trees[tree].num_prefix + d->trees[tree].num_new; }

    Drafting(Draft *draft, DraftRoom &memory, int num_threads) : d(draft), threads(num_threads), room(memory) {
        const int64_t count = d->count;
        int64_t nodes = 0, guesses = 0, keys = 0, breadth = 1;
        for (int64_t i = 0; i < count; i++) {
            const DraftTree &tree = d->trees[i];
            nodes += tree.max_nodes + 1;
            guesses += most_guesses(tree);
            keys += tree.num_prefix + tree.num_new + tree.max_nodes;
            breadth = tree.max_nodes + 1 > breadth ? tree.max_nodes + 1 : breadth;
            most_rows = most_rows + (tree.num_new > tree.max_nodes ? tree.num_new : tree.max_nodes);
        }
        place_growth(count, nodes, guesses, breadth);
        int64_t *place = hold(room.keys, 2 * keys);
        slots = place, key_positions = place + keys;
        place = hold(room.pieces, 6 * count);
        for (int64_t i = 0; i < 6; i++) piece_numbers[i] = place + i * count;
        int64_t node = 0, guess = 0, key = 0;
        for (int64_t i = 0; i < count; i++) {
            const DraftTree &tree = d->trees[i];
            begin_tree(i, node, guess, key);
            node += tree.max_nodes + 1;
            guess += most_guesses(tree);
            key += known(i) + tree.max_nodes;
        }
    }

    // The largest number of guesses that a tree is offered. A fixed expansion takes all of them.
    int64_t most_guesses(const DraftTree &tree) const {
        return tree.widths ? tree.max_nodes : (tree.max_nodes + 1) * d->breadth;
    }

    void place_growth(int64_t count, int64_t nodes, int64_t guesses, int64_t breadth) {
        g.count = count, g.trees = hold(room.growing, count), key_starts = hold(room.trees, count);
        g.tokens = d->tokens, g.parents = d->parents, g.depths = hold(room.nodes, nodes);
        g.path_prob = hold(room.probs, nodes), g.confidence = d->confidence;
        g.ancestry_columns = breadth;
        g.ancestry = hold(room.ancestry, nodes * breadth);
        g.open = hold(room.open, guesses);
        g.edges = d->edges, g.bins = d->bins, g.breadth = d->breadth;
        g.middles = d->middles, g.middles_count = d->middles_count, g.ranks = d->ranks;
    }

    void begin_tree(int64_t i, int64_t node, int64_t guess, int64_t key) {
        const DraftTree &tree = d->trees[i];
        const int64_t root = known(i) - 1, best = tree.max_nodes < d->breadth ? tree.max_nodes : d->breadth;
        g.trees[i] = {node, guess, tree.widths, tree.heights, tree.slopes, tree.by_rank, tree.min_path_prob, tree.min_gain,
                      tree.max_depth, tree.max_nodes, 1, 0, 0, 1, tree.widths ? tree.widths[0] : best, 0};
        key_starts[i] = key;
        g.tokens[node] = tree.tokens[tree.num_new - 1], g.parents[node] = -1, g.depths[node] = 0, g.path_prob[node] = 1.0;
        memset(g.ancestry + node * g.ancestry_columns, 0, (size_t)g.ancestry_columns);
        g.ancestry[node * g.ancestry_columns] = 1;
        memcpy(slots + key, tree.prefix, (size_t)tree.num_prefix * sizeof(int64_t));
        memcpy(slots + key + tree.num_prefix, tree.slots, (size_t)(tree.num_new + tree.max_nodes) * sizeof(int64_t));
        std::iota(key_positions + key, key_positions + key + root + 1, 0);
    }

    // The known tokens to read or, later, the nodes of the frontiers; returns the number of rows.
    int64_t place_rows(bool reads) {
        int64_t count = 0, row = 0, seen = 0, most_seen = 0;
        for (int64_t i = 0; i < g.count; i++) {
            const int64_t rows = reads ? d->trees[i].num_new : at(i).end - at(i).first;
            most_seen += rows * (reads ? rows : at(i).end);
        }
        int64_t *ids = hold(room.ids, 3 * most_rows), *positions = ids + most_rows, *new_slots = positions + most_rows;
        uint8_t *visible = hold(room.visible, most_seen);
        for (int64_t i = 0; i < g.count; i++) {
            const DraftTree &tree = d->trees[i];
            if (at(i).first == at(i).end) continue;
            const int64_t rows = reads ? tree.num_new : at(i).end - at(i).first, rest = reads ? rows : at(i).end - 1;
            const int64_t prefix = reads ? tree.num_prefix : known(i);
            const int64_t numbers[] = {row, rows, prefix, rest, key_starts[i], seen};
            for (int64_t k = 0; k < 6; k++) piece_numbers[k][count] = numbers[k];
            for (int64_t r = 0; r < rows; r++, row++, seen += rest) {
                const int64_t node = at(i).start + at(i).first + r, key = key_starts[i] + prefix + (reads ? r : rest - rows + r);
                if (!reads) key_positions[key] = known(i) - 1 + g.depths[node];
                ids[row] = reads ? tree.tokens[r] : g.tokens[node];
                positions[row] = key_positions[key], new_slots[row] = slots[key];
                if (reads)
                    for (int64_t k = 0; k < rest; k++) visible[seen + k] = k <= r;
                else
                    memcpy(visible + seen, g.ancestry + node * g.ancestry_columns + 1, (size_t)rest);
            }
            count++;
        }
        pieces = {count, piece_numbers[0], piece_numbers[1], piece_numbers[2], piece_numbers[3], piece_numbers[4],
                  piece_numbers[5], slots, key_positions, visible, row, positions, new_slots};
        return row;
    }

    // Inputs of all layers, beside hidden states.
    void read_layer_inputs(const float *hidden, int64_t rows) {
        const LayerInputs *one = d->layer_inputs;
        if (!one) return;
        const int64_t size = one->layers * one->size;
        float *inputs = hold_aligned(room.inputs, most_rows * (2 * size + d->floats)), *rest = inputs + most_rows * size;
        layer_inputs(one, room.ids.data(), hidden, inputs, rest, rows, threads);
        pieces.layer_inputs = inputs, pieces.layer_stride = size;
    }

    // What a head's layers begin with: `hidden`, of embeddings, becomes what they add to. Returns what the first layer
    // reads in place of the norm of that, or null.
    const float *read_features(bool reads, float *hidden, float *scratch, int64_t rows) {
        const Features *one = d->features;
        const int64_t size = d->hidden, own = one->feature_is_first ? 0 : size;  // where features are in pairs
        float *pairs = hold_aligned(room.inputs, most_rows * 2 * size);
        const auto norm = [&](const float *x, const float *weight, float *y) {
            if (weight)
                native->norm(x, weight, y, 1, size, d->eps, 1);
            else
                memcpy(y, x, (size_t)size * sizeof(float));
        };
        int64_t row = 0;
        for (int64_t i = 0; i < g.count; i++) {
            if (at(i).first == at(i).end) continue;
            const int64_t count = reads ? d->trees[i].num_new : at(i).end - at(i).first;
            for (int64_t r = 0; r < count; r++, row++) {
                float *place = hidden + row * size, *pair = pairs + 2 * row * size;
                if (one->blanks_first && pieces.positions[row] == 0) std::fill(place, place + size, 0.0f);
                norm(place, one->embedding_norm, pair + size - own);
                if (reads)
                    memcpy(place, d->trees[i].features + r * size, (size_t)size * sizeof(float));
                else
                    load_feature(slots[key_starts[i] + known(i) - 1 + g.parents[at(i).start + at(i).first + r]], place);
                norm(place, one->feature_norm, pair + own);
                if (one->adds_to_normed) memcpy(place, pair + own, (size_t)size * sizeof(float));
            }
        }
        if (!one->join) return pairs;
        native->linear(one->join, pairs, hidden, scratch, rows, STORE, nullptr, threads);
        return one->norms_joined ? nullptr : hidden;
    }

    void load_feature(int64_t slot, float *to) const {
        const int type = d->features->type;
        const void *stored = d->features->stored;
        for (int64_t k = slot * d->hidden, end = k + d->hidden; k < end; k++)
            *to++ = type == FP32 ? ((const float *)stored)[k]
                                 : (type == BF16 ? from_bf16 : from_fp16)(((const uint16_t *)stored)[k]);
    }

    void store_feature(int64_t slot, const float *from) const {
        const int type = d->features->type;
        void *stored = d->features->stored;
        for (int64_t k = slot * d->hidden, end = k + d->hidden; k < end; k++, from++)
            if (type == FP32)
                ((float *)stored)[k] = *from;
            else
                ((uint16_t *)stored)[k] = (type == BF16 ? to_bf16 : to_fp16)(*from);
    }

    // Logits [rows] of the last known tokens or of the frontiers' nodes; returns the number of rows.
    int64_t score(bool reads) {
        const int64_t rows = place_rows(reads), size = d->hidden;
        float *hidden = hold_aligned(room.hidden, most_rows * size), *normed = hold_aligned(room.normed, most_rows * size);
        float *scratch = hold_aligned(room.scratch, most_rows * d->floats);
        embed(d->embedding, d->rows, d->type, d->embedding_scale, room.ids.data(), hidden, rows, size, threads);
        read_layer_inputs(hidden, rows);
        const float *inputs = d->features ? read_features(reads, hidden, scratch, rows) : nullptr;
        decode_all(d->places, d->layers, &pieces, inputs, hidden, scratch, nullptr, threads);
        const int64_t scored = reads ? pieces.count : rows;
        const auto row_of = [&](int64_t i) { return reads ? pieces.first_row[i] + pieces.num_new[i] - 1 : i; };
        if (reads)
            for (int64_t i = 0; i < scored; i++)
                memmove(hidden + i * size, hidden + row_of(i) * size, (size_t)size * sizeof(float));
        if (d->norm)
            native->norm(hidden, d->norm, normed, scored, size, d->eps, threads);
        else
            normed = hidden;
        if (d->features)
            for (int64_t i = 0; i < scored; i++)
                store_feature(pieces.new_slots[row_of(i)], (d->features->stores_normed ? normed : hidden) + i * size);
        float *logits = hold_aligned(room.logits, scored * d->head->stride);
        native->linear(d->head, normed, logits, scratch, scored, STORE, nullptr, threads);
        return scored;
    }

    // Drops what min-p, top-k and top-p do, as in verify/logits.py; the values fall.
    static void truncate(const DraftTree &tree, int64_t size, float *values) {
        const float best = values[0];
        float least = best + tree.log_min_p;
        if (tree.top_k > 0 && tree.top_k < size) least = values[tree.top_k - 1] > least ? values[tree.top_k - 1] : least;
        if (tree.top_p < 1.0) {
            const auto mass = [&](int64_t k) { return values[k] < least ? 0.0 : (double)expf(values[k] - best); };
            double wanted = 0.0, so_far = 0.0;
            for (int64_t k = 0; k < size; k++) wanted += mass(k);
            wanted *= tree.top_p;
            int64_t last = 0;
            while (last < size - 1 && (so_far += mass(last)) < wanted) last++;
            least = values[last] > least ? values[last] : least;
        }
        for (int64_t k = 0; k < size; k++)
            if (values[k] < least) values[k] = -INFINITY;
    }

    // The probabilities of the candidates of a node, whose values fall. False if they are none.
    bool note_probs(int64_t node, int64_t size, const float *values, const int64_t *ids) const {
        if (!(values[0] > -INFINITY && values[0] < INFINITY)) return false;
        double *probs = d->probs + node * d->support, sum = 0.0;
        for (int64_t k = 0; k < size; k++) sum += probs[k] = exp((double)values[k] - (double)values[0]);
        for (int64_t k = 0; k < size; k++) probs[k] /= sum;
        memcpy(d->candidates + node * d->support, ids, (size_t)size * sizeof(int64_t));
        return true;
    }

    // The best tokens of a row, by score or by score and noise, and how much of the probability each has. Tokens that are
    // drawn have all that of the best one, since no confidence may depend on the draw.
    void choose_children(const Parent &of, const float *logits, int64_t size, int64_t width, float *values, int64_t *ids,
                         float *blocks, int64_t *tokens, float *confidence) const {
        const DraftTree &tree = d->trees[of.tree];
        std::fill(tokens, tokens + width, -1);
        std::fill(confidence, confidence + width, 0.0f);
        if (!native->most_probable(logits, d->columns, size, values, ids, blocks) &&
            !sorted_first(logits, d->columns, size, values, ids))
            return;
        if (d->token_map)
            for (int64_t k = 0; k < size; k++) ids[k] = d->token_map[ids[k]];
        if (d->cap != 0.0f)
            for (int64_t k = 0; k < size; k++) values[k] = tanhf(values[k] / d->cap) * d->cap;
        if (tree.temperature > 0.0f && tree.temperature != 1.0f)
            for (int64_t k = 0; k < size; k++) values[k] /= tree.temperature;
        if (tree.temperature > 0.0f) truncate(tree, size, values);
        const bool is_drawn = tree.choice == DRAWN;
        if (is_drawn && !note_probs(of.node, size, values, ids)) return;
        if (tree.choice != BEST) {
            const int64_t number = is_drawn ? of.node - at(of.tree).start : of.position;
            const uint64_t key = noise_key(tree.seed, tree.first_draw + number);
            float *noise = values + size;
            native->noise_of(&key, ids, noise, 1, size);
            for (int64_t k = 0; k < size; k++) values[k] += noise[k];
        }
        // Places of the best so far, in order; of equal ones the first.
        int64_t *best = ids + size, found = 0;
        for (int64_t k = 0; k < size; k++) {
            int64_t at = found;
            while (at > 0 && values[best[at - 1]] < values[k]) at--;
            if (at == width) continue;
            found += found < width;
            for (int64_t later = found - 1; later > at; later--) best[later] = best[later - 1];
            best[at] = k;
        }
        const float highest = values[best[0]];
        if (!(highest > -INFINITY)) return;
        if (is_drawn) {
            const double *probs = d->probs + of.node * d->support;
            memcpy(d->drawn + of.node * d->support, best, (size_t)found * sizeof(int64_t));
            for (int64_t rank = 0; rank < found; rank++) {
                if (probs[best[rank]] > 0.0) tokens[rank] = ids[best[rank]];
                confidence[rank] = (float)probs[0];
            }
            return;
        }
        float weights = 0.0f;
        for (int64_t k = 0; k < size; k++) weights += expf(values[k] - highest);
        for (int64_t rank = 0; rank < found; rank++) {
            const float value = values[best[rank]];
            if (!(value > -INFINITY)) continue;
            tokens[rank] = ids[best[rank]];
            confidence[rank] = expf(value - highest) / weights;
        }
    }

    // Where native code does not find the best scores: as it, but slowly. 0 if one is NaN.
    static int64_t sorted_first(const float *scores, int64_t size, int64_t count, float *values, int64_t *tokens) {
        std::vector<int64_t> ids((size_t)size);
        std::iota(ids.begin(), ids.end(), 0);
        for (int64_t k = 0; k < size; k++)
            if (scores[k] != scores[k]) return 0;
        std::partial_sort(ids.begin(), ids.begin() + count, ids.end(), [&](int64_t a, int64_t b) {
            return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
        });
        for (int64_t k = 0; k < count; k++) tokens[k] = ids[(size_t)k], values[k] = scores[ids[(size_t)k]];
        return count;
    }

    void make_candidates(int64_t rows) {
        int64_t most = 0;
        for (int64_t i = 0; i < g.count; i++)
            if (at(i).first < at(i).end && at(i).width > most) most = at(i).width;
        const int64_t wanted = d->support > most ? d->support : most, size = wanted < d->columns ? wanted : d->columns;
        const int64_t width = most < size ? most : size, blocks = d->columns / 64 + 1;
        int64_t *tokens = hold(room.candidates, rows * (width + 2 * size)), *ids = tokens + rows * width;
        float *values = hold(room.values, rows * (2 * size + blocks)), *sure = hold(room.sure, rows * width);
        Parent *parents = hold(room.parents, rows);
        int64_t row = 0;
        for (int64_t i = 0; i < g.count; i++)
            for (int64_t node = at(i).start + at(i).first; node < at(i).start + at(i).end; node++, row++)
                parents[row] = {i, node, known(i) + g.depths[node] + (d->features ? 1 : 0)};  // heads skip the first token
        const float *logits = hold_aligned(room.logits, rows * d->head->stride);
        in_parallel(rows, 1, rows * d->columns > 1 << 15 ? threads : 1, [&](int64_t r) {
            float *mine = values + r * (2 * size + blocks);
            choose_children(parents[r], logits + r * d->head->stride, size, width, mine, ids + r * 2 * size,
                            mine + 2 * size, tokens + r * width, sure + r * width);
        });
        g.candidates = tokens, g.sure = sure, g.columns = width;
    }

    void run() {
        for (int64_t i = 0; i < g.count; i++) d->trees[i].num_computed = 0;
        for (int64_t rows = score(true);; rows = score(false)) {
            make_candidates(rows);
            grow(&g);
            bool any_grows = false;
            for (int64_t i = 0; i < g.count; i++)
                if (at(i).first < at(i).end) any_grows = true, d->trees[i].num_computed = at(i).end - 1;
            if (!any_grows) break;
        }
        for (int64_t i = 0; i < g.count; i++) d->trees[i].size = at(i).size;
    }
};

static void draft(Draft *d, int threads) {
    static thread_local DraftRoom room;
    Drafting(d, room, threads).run();
}
