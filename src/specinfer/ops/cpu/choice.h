// The token that follows a row of scores, greedily or with the noise of noise.py, which makes a sample of the argmax.
//
// Noise takes two logarithms a token, and hardly any token can win. That of a token whose hash begins with n ones is at
// most (n + 1) ln 2, so hashes alone rule out nearly all. What is left is often one token; where rounding could decide
// between several, all of them are returned, and noise.py decides.

static INLINE uint64_t hash(uint64_t key, int64_t token) {  // as in noise.py
    return mixed((uint64_t)(token + 1) * 0x9e3779b97f4a7c15u + key);
}

static double noise(uint64_t key, int64_t token) {
    return -log(-log(((double)(hash(key, token) >> 12) + 0.5) * 0x1p-52));
}

// Of tokens [rows][count], the keys of each row: float32 as noise.py has it, but for the last bit, hardly ever.
static void noise_of(const uint64_t *keys, const int64_t *tokens, float *result, int64_t rows, int64_t count) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < count; k++) result[i * count + k] = (float)noise(keys[i], tokens[i * count + k]);
}

// The greatest score and its first place; NaN if there is one.
static float greatest(const float *scores, int64_t size, int64_t *token) {
    enum { PART = 2048 };
    float best = -INFINITY;
    int64_t from = 0;  // the part that has it
    for (int64_t first = 0; first < size; first += PART) {
        const int64_t end = size - first < PART ? size : first + PART;
        Floats most = Floats{} - INFINITY;
        Ints wrong = {};
        int64_t k = first;
        for (; k + LANES <= end; k += LANES) {
            const Floats part = read<Floats>(scores + k);
            most = select(part > most, part, most);
            wrong |= part != part;
        }
        float here = -INFINITY;
        bool is_wrong = false;
        for (int64_t lane = 0; lane < LANES; lane++) {
            here = most[lane] > here ? most[lane] : here;
            is_wrong |= wrong[lane] != 0;
        }
        for (; k < end; k++) {
            here = scores[k] > here ? scores[k] : here;
            is_wrong |= scores[k] != scores[k];
        }
        if (is_wrong) return NAN;
        if (here > best) {
            best = here;
            from = first;
        }
    }
    *token = from;
    while (scores[*token] != best && *token < size - 1) ++*token;
    return best;
}

static int64_t count_above(const float *values, int64_t size, float least) {
    int32_t count = 0;
    for (int64_t k = 0; k < size; k++) count += values[k] >= least;
    return count;
}

// The greatest score of each block of 64. Returns the greatest of all, or NaN if there is one.
static float block_maxima(const float *scores, int64_t size, float *maxima) {
    enum { BLOCK = 64 };
    const int64_t blocks = (size + BLOCK - 1) / BLOCK;
    Ints wrong = {};
    float best = -INFINITY;
    for (int64_t b = 0; b < blocks; b++) {
        const float *block = scores + b * BLOCK;
        float last[BLOCK];  // filled up
        if (b == blocks - 1) {
            for (int64_t k = 0; k < BLOCK; k++) last[k] = b * BLOCK + k < size ? block[k] : -INFINITY;
            block = last;
        }
        Floats most = read<Floats>(block);
        wrong |= most != most;
        for (int64_t k = LANES; k < BLOCK; k += LANES) {
            const Floats part = read<Floats>(block + k);
            wrong |= part != part;
            most = select(part > most, part, most);
        }
        maxima[b] = most[0];
        for (int64_t lane = 1; lane < LANES; lane++) maxima[b] = most[lane] > maxima[b] ? most[lane] : maxima[b];
        best = maxima[b] > best ? maxima[b] : best;
    }
    for (int64_t lane = 0; lane < LANES; lane++)
        if (wrong[lane]) return NAN;
    return best;
}

// The `count` greatest scores, descending, and their tokens; of equal ones the first. 0 if they are not found so: there
// are NaN, hardly any that are finite, or too many equal ones. `room`: one for each block of 64.
static int64_t most_probable(const float *scores, int64_t size, int64_t count, float *values, int64_t *tokens,
                             float *room) {
    enum { MOST = 1024 };
    // With fewer blocks than that, scores are counted themselves.
    const int64_t width = 64 * count <= size ? 64 : 1, blocks = (size + width - 1) / width;
    const float best = width == 1 ? greatest(scores, size, tokens) : block_maxima(scores, size, room);
    if (!(best < INFINITY && best > -INFINITY)) return 0;
    const float *maxima = width == 1 ? scores : room;
    // As many blocks have a maximum above the limit: so many scores are above it at least, and hardly more.
    float limit = best, step = 1.0f;
    while (count_above(maxima, blocks, limit) < count && step < 1e30f) limit = best - (step *= 2.0f);
    float above = best;
    for (int64_t i = 0; i < 10; i++) {
        const float middle = 0.5f * (limit + above);
        (count_above(maxima, blocks, middle) < count ? above : limit) = middle;
    }
    float some[MOST];
    int64_t ids[MOST], found = 0;
    for (int64_t b = 0; b < blocks; b++) {
        if (maxima[b] < limit) continue;
        for (int64_t k = b * width; k < size && k < (b + 1) * width; k++) {
            if (scores[k] < limit) continue;
            if (found == MOST) return 0;
            some[found] = scores[k];
            ids[found++] = k;
        }
    }
    if (found < count) return 0;
    for (int64_t i = 0; i < found; i++) {
        int32_t rank = 0;
        for (int64_t j = 0; j < i; j++) rank += some[j] >= some[i];
        for (int64_t j = i + 1; j < found; j++) rank += some[j] > some[i];
        if (rank < count) {
            values[rank] = some[i];
            tokens[rank] = ids[i];
        }
    }
    return count;
}

// Ids, ascending, of all tokens that may be the one; as many as there are, or as -reason says that there is none.
// Those with a score below `least` are left out. More than `room` are counted, but not listed.
static int64_t choose(const float *scores, int64_t size, float least, uint64_t key, int32_t sampled, int64_t *ids,
                      double *sums, int64_t room) {
    enum { PART = 256, NO_NUMBER = -1, NO_TOKEN = -2 };  // as NAN and NO_VALID_TOKEN in trees.py
    const float best = greatest(scores, size, ids);
    if (best != best) return NO_NUMBER;
    if (best == -INFINITY) return NO_TOKEN;
    if (!sampled || best == INFINITY) return 1;
    const float slack = 1e-3f + 2e-6f * fabsf(best);  // more than sums of float32 are off
    double top = best + noise(key, ids[0]);
    int64_t count = 0;
    for (int64_t first = 0; first < size; first += PART) {
        const int64_t width = size - first < PART ? size - first : PART;
        const float bound = (float)top - slack;
        int32_t ones[PART];  // that a hash must begin with
        uint64_t is_short[PART];
        int32_t fewest = 64;
        for (int64_t k = 0; k < width; k++) {
            const float needed = (bound - scores[first + k]) * 1.442695f - 1.0f;
            const float within = needed > 0.0f ? needed : 0.0f;  // of NaN nothing
            ones[k] = within < 60.0f ? (int32_t)within : 60;
            fewest = ones[k] < fewest ? ones[k] : fewest;
        }
        if (fewest > 53) continue;  // a number in (0, 1) has 52 bits
        for (int64_t k = 0; k < width; k++) is_short[k] = ~hash(key, first + k) >> 1 >> (63 - ones[k]);
        for (int64_t k = 0; k < width; k++) {
            const float score = scores[first + k];
            if (is_short[k] || score < least || score == -INFINITY) continue;
            const double sum = score + noise(key, first + k);
            if (sum < top - slack) continue;
            top = sum > top ? sum : top;
            if (count < room) {
                ids[count] = first + k;
                sums[count] = sum;
            }
            count++;
        }
    }
    if (count > room) return count;
    int64_t kept = 0;  // of those found while the best of all was still to come
    for (int64_t k = 0; k < count; k++)
        if (sums[k] >= top - slack) ids[kept++] = ids[k];
    return kept;
}
