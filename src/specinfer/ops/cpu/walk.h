// The walk of coupled verification down several trees: at each node it comes to, the token of plain decoding decides.

static const int64_t UNKNOWN = -3;  // beside the reasons of choose(), which are -1 and -2

// The token after a row of logits. `scaled`: room for the row divided by the temperature.
static int64_t token_after(const float *scores, int64_t vocab, float temperature, uint64_t key, float *scaled) {
    enum { ROOM = 256 };
    int64_t ids[ROOM];
    double sums[ROOM];
    if (temperature > 0.0f && temperature != 1.0f) {
        for (int64_t k = 0; k < vocab; k++) scaled[k] = scores[k] / temperature;
        scores = scaled;
    }
    const int64_t count = choose(scores, vocab, -INFINITY, key, temperature > 0.0f, ids, sums, ROOM);
    return count < 0 ? count : count == 1 ? ids[0] : UNKNOWN;
}

static void walk_one(const Walks *walks, int64_t i, float *scaled) {
    const int64_t first = walks->first[i], size = walks->first[i + 1] - first;
    const int64_t *tokens = walks->tokens + first, *parents = walks->parents + first;
    int64_t *chosen = walks->chosen + first, node = 0, length = 0;
    for (;;) {
        if (chosen[node] == UNKNOWN)
            chosen[node] = token_after(walks->logits[i] + node * walks->vocab, walks->vocab, walks->temperatures[i],
                                       noise_key(walks->seeds[i], walks->positions[i] + length), scaled);
        int64_t child = node + 1;
        while (child < size && (parents[child] != node || tokens[child] != chosen[node])) child++;
        if (child >= size) break;
        walks->path[first + length++] = node = child;
    }
    walks->lengths[i] = length;
    walks->next[i] = chosen[node];
}

static void walk(const Walks *walks, int threads) {
    static const int64_t LARGE = 1 << 16;  // logits of a walk from which waking a thread saves time
    const bool is_large = walks->vocab * walks->count > LARGE;
    in_parallel(walks->count, 1, is_large ? threads : 1, [&](int64_t i) {
        const float heat = walks->temperatures[i];
        float *scaled = heat > 0.0f && heat != 1.0f ? (float *)new_aligned(walks->vocab * sizeof(float)) : nullptr;
        walk_one(walks, i, scaled);
        if (scaled) delete_aligned(scaled);
    });
}
