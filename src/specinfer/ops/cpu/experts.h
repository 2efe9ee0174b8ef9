// Routed experts: a router's results choose some for each token, and the weighted sum of what they make is added.
//
// Only experts that a token has chosen are read, one after the other. What a token gets depends on no other token.

// One token's experts by descending score, and their weights. scores: [count] results of the router, changed.
static void choose_experts(const Experts *layer, float *scores, int64_t *chosen, float *weights) {
    const int64_t count = layer->count, size = count / layer->groups;
    static thread_local Grown<float> room;
    float *wanted = room.hold(count + layer->groups), *groups = wanted + count, sum = 0;
    float most = -INFINITY;
    for (int64_t e = 0; e < count; e++) most = scores[e] > most ? scores[e] : most;
    if (layer->scores == SOFTMAX) {
        for (int64_t e = 0; e < count; e++) sum += scores[e] = expf(scores[e] - most);
        scale(scores, 1.0f / sum, count);
    } else if (layer->scores == SIGMOIDS)
        for (int64_t e = 0; e < count; e++) scores[e] = 1.0f / (1.0f + expf(-scores[e]));
    for (int64_t e = 0; e < count; e++) wanted[e] = scores[e] + (layer->bias ? layer->bias[e] : 0.0f);
    if (layer->chosen_groups < layer->groups) {  // the best groups, by their two best experts
        for (int64_t g = 0; g < layer->groups; g++) {
            float first = -INFINITY, second = -INFINITY;
            for (int64_t e = g * size; e < (g + 1) * size; e++) {
                const float one = wanted[e];
                second = one > first ? first : one > second ? one : second;
                first = one > first ? one : first;
            }
            groups[g] = first + second;
        }
        for (int64_t left = layer->groups; left > layer->chosen_groups; left--) {
            int64_t worst = -1;
            for (int64_t g = 0; g < layer->groups; g++)
                if (groups[g] < INFINITY && (worst < 0 || groups[g] <= groups[worst])) worst = g;
            groups[worst] = INFINITY;  // left out
            for (int64_t e = worst * size; e < (worst + 1) * size; e++) wanted[e] = -INFINITY;
        }
    }
    sum = 0;
    for (int64_t i = 0; i < layer->chosen; i++) {
        int64_t best = 0;
        for (int64_t e = 1; e < count; e++)
            if (wanted[e] > wanted[best]) best = e;
        wanted[best] = -INFINITY;
        chosen[i] = best;
        sum += weights[i] = layer->scores == SOFTMAX_OF_CHOSEN ? expf(scores[best] - most) : scores[best];
    }
    const bool normalizes = layer->normalizes || layer->scores == SOFTMAX_OF_CHOSEN;
    scale(weights, normalizes ? layer->factor / (sum + 1e-20f) : layer->factor, layer->chosen);
    for (int64_t i = 0; layer->scales && i < layer->chosen; i++) weights[i] *= layer->scales[chosen[i]];
}

// The numbers of [rows][chosen] experts in order of experts, then of rows; first: [count + 1] where those of each begin.
static void sort_by_expert(const int64_t *chosen, int64_t size, int64_t count, int64_t *sorted, int64_t *first) {
    for (int64_t e = 0; e <= count; e++) first[e] = 0;
    for (int64_t i = 0; i < size; i++) first[chosen[i] + 1]++;
    for (int64_t e = 0; e < count; e++) first[e + 1] += first[e];
    for (int64_t i = 0; i < size; i++) sorted[first[chosen[i]]++] = i;
    for (int64_t e = count; e > 0; e--) first[e] = first[e - 1];
    first[0] = 0;
}

// hidden [rows][hidden] += what the experts make of x, normed if there is a norm; sum: see Sum; room: what `layer_part.py`
// counts.
static void add_experts(const Part *part, const Experts *layer, const float *x, float *hidden, float *sum, float *room,
                        int64_t rows, int threads) {
    const int64_t size = part->hidden, count = layer->count, chosen = layer->chosen, inner = layer->second[0]->inputs;
    const bool at_once = layer->opening == IN_PANELS;
    static thread_local Grown<int64_t> numbers;
    int64_t *experts = numbers.hold(2 * rows * chosen + count + 1), *sorted = experts + rows * chosen;
    int64_t *first = sorted + rows * chosen;
    float *results = hidden;
    if (part->post_norm) {
        results = room;
        room += rows * size;
        memset(results, 0, rows * size * sizeof(float));
    }
    float *scores = room, *weights = scores + rows * count, *given = weights + rows * chosen;
    float *added = given + rows * size, *opened = added + rows * size, *mixed = opened + rows * inner;
    float *rest = mixed + (at_once ? 0 : rows * layer->first[0]->stride);
    if (part->router_norm) norm(hidden, part->router_norm, given, rows, size, part->eps, threads);
    linear(part->first, part->router_norm ? given : x, scores, rest, rows, STORE, nullptr, threads);
    in_parallel(rows, FEW, threads, [&](int64_t t) {
        choose_experts(layer, scores + t * count, experts + t * chosen, weights + t * chosen);
    });
    sort_by_expert(experts, rows * chosen, count, sorted, first);
    for (int64_t e = 0; e < count; e++) {
        const int64_t *own = sorted + first[e], tokens = first[e + 1] - first[e];
        if (!tokens) continue;
        for (int64_t i = 0; i < tokens && rows > 1; i++)
            memcpy(given + i * size, x + own[i] / chosen * size, size * sizeof(float));
        const int64_t stride = layer->first[e]->stride;
        linear(layer->first[e], rows > 1 ? given : x, at_once ? opened : mixed, rest, tokens, layer->ending, nullptr, threads);
        if (!at_once)
            in_parallel(tokens, FEW, threads, [&](int64_t i) {
                open_row(layer->opening, mixed + i * stride, opened + i * inner, inner);
            });
        linear(layer->second[e], opened, added, rest, tokens, STORE, nullptr, threads);
        in_parallel(tokens, FEW, threads, [&](int64_t i) {
            float *to = results + own[i] / chosen * size;
            for (int64_t k = 0; k < size; k++) to[k] += weights[own[i]] * added[i * size + k];
        });
    }
    if (part->post_norm) add_normed(part, results, hidden, sum, rows, threads);
}
