// The walks of the rules that use random numbers: multi-step and traversal, as verify/algorithms.py has them.
//
// What is left of a distribution are weights and their sum, so that a rejected draw changes those few tokens only that
// it could have produced. Sums differ from Python's in the last bits: a decision would differ for one number in 1e13.

static INLINE double exp_of(double x) {  // of x up to 0
    const double shift = 0x1.8p52, held = x > -708.0 ? x : -708.0;
    const double shifted = held * 0x1.71547652b82fep0 + shift, whole = shifted - shift;
    const double r = (held - whole * 0x1.62e42fefa39efp-1) - whole * 0x1.abc9e3b39803fp-56;
    double sum = r * (1.0 / 6227020800) + 1.0 / 479001600;
    sum = ((sum * r + 1.0 / 39916800) * r + 1.0 / 3628800) * r + 1.0 / 362880;
    sum = ((sum * r + 1.0 / 40320) * r + 1.0 / 5040) * r + 1.0 / 720;
    sum = ((sum * r + 1.0 / 120) * r + 1.0 / 24) * r + 1.0 / 6;
    sum = ((sum * r + 0.5) * r + 1.0) * r + 1.0;
    const uint64_t power = (read<uint64_t>(&shifted) + 1023) << 52;
    return x > -708.0 ? sum * read<double>(&power) : 0.0;
}

static double sum_of(const double *values, int64_t size) {
    double sums[8] = {};
    int64_t k = 0;
    for (; k + 8 <= size; k += 8)
        for (int64_t lane = 0; lane < 8; lane++) sums[lane] += values[k + lane];
    for (; k < size; k++) sums[0] += values[k];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// The target's distribution after a node, or what rejected draws leave of it.
struct Left {
    enum { VALID, NO_NUMBER = -1, NO_TOKEN = -2 };  // as NAN and NO_VALID_TOKEN in trees.py
    double *weights = nullptr, sum = 0.0, exact_sum = 0.0;
    int64_t vocab = 0, state = NO_TOKEN;

    double prob(int64_t token) const { return weights[token] / sum; }

    void read_row(const float *scores, float temperature) {
        int64_t token;
        float best = greatest(scores, vocab, &token);
        state = best != best ? NO_NUMBER : best == -INFINITY ? NO_TOKEN : VALID;
        if (state != VALID) return;
        const float divisor = temperature;
        best = divisor == 1.0f ? best : best / divisor;
        if (divisor == 1.0f)
            for (int64_t k = 0; k < vocab; k++) weights[k] = exp_of((double)scores[k] - (double)best);
        else
            for (int64_t k = 0; k < vocab; k++) weights[k] = exp_of((double)(scores[k] / divisor) - (double)best);
        sum = exact_sum = sum_of(weights, vocab);
    }

    // A token with these probabilities, by a number below 1.
    int64_t sample(double uniform) const {
        enum { BLOCK = 64 };
        const auto sum_at = [&](int64_t first) { return sum_of(weights + first, vocab - first < BLOCK ? vocab - first : BLOCK); };
        double total = 0.0, mass = 0.0;
        for (int64_t first = 0; first < vocab; first += BLOCK) total += sum_at(first);
        int64_t found = 0;  // the last token with a probability, if rounding leaves none above
        for (int64_t first = 0; first < vocab; first += BLOCK) {
            const double here = sum_at(first);
            if (here > 0.0) found = first;
            if (mass + here > uniform * total) break;
            mass += here;
        }
        int64_t token = found;
        for (int64_t k = found; k < vocab && k < found + BLOCK; k++) {
            if (!(weights[k] > 0.0)) continue;
            token = k;
            if ((mass += weights[k]) > uniform * total) break;
        }
        return token;
    }
};

// One draw: the token and what it was drawn from.
struct Drawn {
    const int64_t *ids = nullptr;
    const double *probs = nullptr;
    int64_t size = 0, num_removed = 0, token;
    const int64_t *removed = nullptr;  // indices in the support
    double rest = 1.0;                 // of the probabilities, without those that are removed

    Drawn(const StochasticWalks *t, int64_t draw, int64_t drawn_token) : token(drawn_token) {
        const int64_t *from = t->sources + 5 * draw;
        if (!from[2]) return;
        ids = (const int64_t *)from[0], probs = (const double *)from[1], size = from[2];
        removed = (const int64_t *)from[3], num_removed = from[4];
        if (!num_removed) return;
        rest = 0.0;
        for (int64_t k = 0; k < size; k++) rest += at(k);
    }

    double at(int64_t k) const {  // before the division by `rest`
        for (int64_t i = 0; i < num_removed; i++)
            if (removed[i] == k) return 0.0;
        return probs[k];
    }

    double prob() const {
        if (!size) return 1.0;
        for (int64_t k = 0; k < size; k++)
            if (ids[k] == token) return at(k) / rest;
        return 0.0;
    }

    // Take the distribution, times `share` of the weights' sum, from what is left; `undo` gets what there was before.
    void take_from(Left &left, double share, double *undo) const {
        const int64_t count = size ? size : 1;
        double taken = 0.0;
        for (int64_t k = 0; k < count; k++) {
            double &weight = left.weights[size ? ids[k] : token];
            undo[k] = weight;
            const double less = size ? weight - at(k) / rest * left.sum * share : 0.0, after = less > 0.0 ? less : 0.0;
            taken += weight - after;
            weight = after;
        }
        left.sum -= taken;
        if (left.sum < 0.01 * left.exact_sum) left.sum = left.exact_sum = sum_of(left.weights, left.vocab);
    }

    void put_back(Left &left, const double *undo) const {
        for (int64_t k = 0; k < (size ? size : 1); k++) left.weights[size ? ids[k] : token] = undo[k];
        left.sum = left.exact_sum = sum_of(left.weights, left.vocab);
    }
};

struct Entered {  // a node of the current path
    int64_t node, draw;  // and its next draw, -1 after the last
    Left left;
    double weight;
    bool is_leaf;
};

// No templates of the standard library: those of another instruction set could be linked in their place.
template <class T>
struct Room {
    T *items;
    explicit Room(int64_t size) : items((T *)new_aligned((size_t)size * sizeof(T))) { memset((void *)items, 0, (size_t)size * sizeof(T)); }
    ~Room() { delete_aligned(items); }
    Room(const Room &) = delete;
    Room &operator=(const Room &) = delete;
};

struct StochasticWalk {
    const StochasticWalks *t;
    int64_t tree, first, size, vocab, length = 0;
    const int64_t *tokens, *parents;
    Room<double *> rows;  // of weights, one for each level
    Room<double> undo;

    StochasticWalk(const StochasticWalks *walks, int64_t i)
        : t(walks), tree(i), first(t->first[i]), size(t->first[i + 1] - first), vocab(t->vocab),
          tokens(t->tokens + first), parents(t->parents + first), rows(size), undo(most_taken(t, i)) {}
    ~StochasticWalk() {
        for (int64_t level = 0; level < size; level++)
            if (rows.items[level]) delete_aligned(rows.items[level]);
    }

    static int64_t most_taken(const StochasticWalks *t, int64_t i) {
        int64_t most = 1;
        for (int64_t draw = t->first_draw[i]; draw < t->first_draw[i + 1]; draw++)
            most = t->sources[5 * draw + 2] > most ? t->sources[5 * draw + 2] : most;
        return most;
    }

    double uniform() {  // as next_uniform in noise.py
        return (double)(mixed(t->states[tree] += 0x9e3779b97f4a7c15u) >> 11) * 0x1p-53;
    }

    Left after(int64_t node, int64_t level) {
        double *&row = rows.items[level];
        if (!row) row = (double *)new_aligned((size_t)vocab * sizeof(double));
        Left left;
        left.weights = row, left.vocab = vocab;
        left.read_row(t->logits[tree] + node * vocab, t->temperatures[tree]);
        return left;
    }

    // The next draw below a node from `draw` on, or -1.
    int64_t next_draw(int64_t node, int64_t draw) const {
        const int64_t end = t->first_draw[tree + 1];
        while (draw < end && parents[t->draws[draw]] != node) draw++;
        return draw < end ? draw : -1;
    }
    int64_t first_draw(int64_t node) const { return next_draw(node, t->first_draw[tree]); }

    void end(int64_t token) { t->lengths[tree] = length, t->next[tree] = token; }
    void end_with_reason(int64_t reason) { length = 0, end(reason); }
    void end_before_last() {  // no token may follow the path
        const int64_t last = t->path[first + --length];
        end(tokens[last]);
    }

    void multi_step() {
        for (int64_t node = 0;;) {
            Left left = after(node, 0);
            if (left.state == Left::NO_NUMBER || (left.state == Left::NO_TOKEN && !node)) return end_with_reason(left.state);
            if (left.state == Left::NO_TOKEN) return end_before_last();
            int64_t draw = first_draw(node);
            for (; draw >= 0; draw = next_draw(node, draw + 1)) {
                const int64_t child = t->draws[draw];
                const Drawn drawn(t, draw, tokens[child]);
                if (uniform() * drawn.prob() < left.prob(drawn.token)) break;
                drawn.take_from(left, 1.0, undo.items);
                if (!(left.sum > 0.0)) break;  // acceptance was certain up to rounding
            }
            if (draw < 0) return end(left.sample(uniform()));
            t->path[first + length++] = node = t->draws[draw];
        }
    }

    void traverse() {
        Room<Entered> path(size);
        path.items[0] = {0, first_draw(0), after(0, 0), 1.0, false};
        for (int64_t level = 0;;) {
            Entered &here = path.items[level];
            if (!here.is_leaf && (here.left.state == Left::NO_NUMBER || (!level && here.left.state == Left::NO_TOKEN)))
                return end_with_reason(here.left.state);
            if (!here.is_leaf && here.left.state == Left::VALID && here.draw >= 0) {
                const int64_t child = t->draws[here.draw], below = first_draw(child);
                const double prob = Drawn(t, here.draw, tokens[child]).prob();
                const double enter = here.weight * here.left.prob(tokens[child]) / prob;
                if (enter > 0.0) {
                    const Left left = below < 0 ? Left() : after(child, level + 1);
                    path.items[++level] = {child, below, left, enter < 1.0 ? enter : 1.0, below < 0};
                    continue;
                }
            } else if (!level || uniform() < here.weight) {
                if (here.is_leaf) here.left = after(here.node, level);
                if (here.left.state == Left::NO_NUMBER) return end_with_reason(Left::NO_NUMBER);
                for (int64_t i = 1; i <= level; i++) t->path[first + length++] = path.items[i].node;
                return here.left.state == Left::NO_TOKEN ? end_before_last() : end(here.left.sample(uniform()));
            } else {
                level--;
            }
            reject(path.items[level], !level);
        }
    }

    // A draw is rejected, at once or with its whole subtree.
    void reject(Entered &at, bool is_root) {
        const int64_t rejected = at.draw;
        at.draw = next_draw(at.node, rejected + 1);
        if (!(at.weight > 0.0)) return;
        const double share = 1.0 / at.weight, before = at.left.sum;
        const Drawn drawn(t, rejected, tokens[t->draws[rejected]]);
        drawn.take_from(at.left, share, undo.items);
        const double total = at.left.sum * at.weight / before;
        if (total > 0.0) {
            at.weight = total / (total + 1.0 - at.weight);
            return;
        }
        drawn.put_back(at.left, undo.items);  // rounding left nothing
        if (!is_root) at.weight = 0.0;  // the root must emit a token
    }
};

static void walk_stochastic(const StochasticWalks *t, int threads) {
    in_parallel(t->count, 1, t->vocab * t->count > 1 << 14 ? threads : 1, [&](int64_t i) {
        StochasticWalk walk(t, i);
        t->traverses[i] ? walk.traverse() : walk.multi_step();
    });
}
