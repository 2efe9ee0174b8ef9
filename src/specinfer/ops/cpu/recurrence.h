// Short convolutions and recurrences over token trees: delta rules, and linear recurrences with a decay.
//
// A head's state is a matrix [key_dim][value_dim]. Its columns do not depend on each other: a work item is some columns
// of one head, which stay in the nearest cache while all tokens of the pass go through them, each from its parent's
// state. A state that a token other than the next one continues from has a place of its own; all others of a request
// take turns in one place. Sums run over keys in order: a token's result is the same in any pass, to the bit.

static const int64_t COLUMNS = 2 * LANES;  // of a state, in an item
static const int64_t FEW_CHANNELS = 1 << 14;  // inputs of a convolution that one thread is done with before another has come

static INLINE Floats rounded(Floats x, int type) {
    if (type == BF16) {
        const Words bits = (Words)x;
        const Floats nearest = (Floats)((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
        return select(x == x, nearest, x);
    }
    if (type == FP16)
        for (int64_t i = 0; i < LANES; i++) x[i] = from_fp16(to_fp16(x[i]));
    return x;
}

static INLINE float rounded_one(float x, int type) {
    return type == BF16 ? from_bf16(to_bf16(x)) : type == FP16 ? from_fp16(to_fp16(x)) : x;
}

static INLINE float number_at(const void *pool, int type, int64_t place) {
    if (type == FP32) return ((const float *)pool)[place];
    const uint16_t bits = ((const uint16_t *)pool)[place];
    return type == BF16 ? from_bf16(bits) : from_fp16(bits);
}

// At most LANES numbers; the rest is 0.
static INLINE Floats numbers_at(const void *pool, int type, int64_t place, int64_t count) {
    if (count >= LANES && type == FP32) return read<Floats>((const float *)pool + place);
    if (count >= LANES && type == BF16) return vectors_from_bf16((const uint16_t *)pool + place);
    if (count >= LANES) return vectors_from_fp16((const uint16_t *)pool + place);
    Floats result = {};
    for (int64_t i = 0; i < count; i++) result[i] = number_at(pool, type, place + i);
    return result;
}

// paths: [tokens][taps] slots of the last tokens on each token's path, itself last; -1 before the first.
static void convolve(const Convolution *layer, const int64_t *paths, float *result, int64_t tokens, int threads) {
    const int64_t channels = layer->channels, taps = layer->taps;
    in_parallel(tokens, 1 + FEW_CHANNELS / channels, threads, [&](int64_t t) {
        const int64_t *path = paths + t * taps;
        for (int64_t c = 0; c < channels; c += LANES) {
            const int64_t count = channels - c < LANES ? channels - c : LANES;
            Floats sum = layer->bias ? numbers_at(layer->bias, FP32, c, count) : Floats{};
            for (int64_t i = 0; i < taps; i++)
                if (path[i] >= 0)
                    sum += numbers_at(layer->inputs, layer->type, path[i] * channels + c, count) *
                           numbers_at(layer->weight, FP32, i * channels + c, count);
            sum = rounded(sum, layer->type);
            if (layer->activates) sum = rounded(silu(sum), layer->type);
            if (count == LANES)
                write(result + t * channels + c, sum);
            else
                for (int64_t i = 0; i < count; i++) result[t * channels + c + i] = sum[i];
        }
    });
}

// log(1 + e^x); log(1 + z) is twice the inverse hyperbolic tangent of z / (2 + z), which is a third at most.
static INLINE Floats softplus(Floats x) {
    const Floats z = exponential(select(x > 0.0f, -x, x)), w = z / (2.0f + z), square = w * w;
    Floats p = square * (2.0f / 13) + 2.0f / 11;
    p = p * square + 2.0f / 9;
    p = p * square + 2.0f / 7;
    p = p * square + 2.0f / 5;
    p = p * square + 2.0f / 3;
    p = p * square + 2.0f;
    return select(x > 0.0f, x, Floats{}) + w * p;
}

// x / sqrt(sum of squares) * scale.
static INLINE void make_unit(float *x, int64_t size, float scale) {
    Floats sums = {};
    float rest = 0;
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) sums += read<Floats>(x + k) * read<Floats>(x + k);
    for (; k < size; k++) rest += x[k] * x[k];
    const float factor = scale / sqrtf(sum_of(sums) + rest + 1e-6f);
    for (k = 0; k < size; k++) x[k] *= factor;
}

// How many numbers a head's rates are: its share of the change, then what is kept of the state, or of each key of it.
static INLINE int64_t rates_of(const Recurrence *layer) { return 1 + (layer->decays == OF_KEY ? layer->key_dim : 1); }

// What the recurrence reads of a token: unit keys and queries, and the rates of each head.
static INLINE void prepare(const Recurrence *layer, int64_t slot, float *mixed, float *rates) {
    const int64_t heads = layer->heads, size = rates_of(layer), each = size - 1;
    const int type = layer->type;
    if (layer->is_delta) {
        const float scale = 1.0f / sqrtf((float)layer->key_dim);
        for (int64_t h = 0; h < layer->key_heads; h++) {
            make_unit(mixed + layer->query + h * layer->key_dim, layer->key_dim, scale);
            make_unit(mixed + layer->key + h * layer->key_dim, layer->key_dim, 1.0f);
        }
    }
    for (int64_t h = 0; h < heads; h++, rates += size) {
        const float decay = layer->decay[h];
        if (!layer->is_delta) {
            float step = rounded_one(number_at(layer->stored, type, slot * heads + h) + rounded_one(layer->bias[h], type), type);
            step = rounded_one(softplus(Floats{} + step)[0], type);
            rates[0] = step < layer->least ? layer->least : step > layer->most ? layer->most : step;
            rates[1] = expf(decay * rates[0]);
            continue;
        }
        const float beta = number_at(layer->stored, type, slot * heads * size + h);
        rates[0] = rounded_one(1.0f / (1.0f + expf(-beta)), type) * layer->most;
        for (int64_t k = 0; k < each; k += LANES) {
            const int64_t count = each - k < LANES ? each - k : LANES;
            const Floats step = numbers_at(layer->stored, type, slot * heads * size + heads + h * each + k, count) +
                                numbers_at(layer->bias, FP32, h * each + k, count);
            const Floats kept = exponential(
                layer->least < 0 ? layer->least / (1.0f + exponential(step * decay)) : softplus(step) * decay);
            memcpy(rates + 1 + k, &kept, count * sizeof(float));
        }
    }
}

// result [2] = query . state after a token, whose value is in `change` [2]. `to` may be `from`; both are [keys][2].
// kept(k, c): what is kept of them.
template <bool DELTA, int DECAYS, class Kept>
static INLINE void step(const Floats *from, Floats *to, int64_t keys, const float *key, const float *query, Kept kept,
                        float share, Floats *change, Floats *result) {
    if constexpr (DELTA) {
        Floats found[4] = {};
        const auto look = [&](int64_t k, int half) ALWAYS {
            const float seen = DECAYS == OF_KEY ? key[k] * kept(k, 0) : key[k];
            found[half] += read<Floats>(from + 2 * k) * seen;
            found[half + 1] += read<Floats>(from + 2 * k + 1) * seen;
        };
        int64_t k = 0;
        for (; k + 2 <= keys; k += 2) {
            look(k, 0);
            look(k + 1, 2);
        }
        if (k < keys) look(k, 0);
        const float rest = DECAYS == OF_KEY ? 1.0f : kept(0, 0);
        each<2>([&](auto c) ALWAYS { change[c] -= (found[c] + found[c + 2]) * rest; });
    }
    each<2>([&](auto c) ALWAYS { change[c] *= share; });
    Floats sums[4] = {};
    const auto move = [&](int64_t k, int half) ALWAYS {
        each<2>([&](auto c) ALWAYS {
            const Floats state = read<Floats>(from + 2 * k + c) * kept(k, c) + change[c] * key[k];
            write(to + 2 * k + c, state);
            sums[half + c] += state * query[k];
        });
    };
    int64_t k = 0;
    for (; k + 2 <= keys; k += 2) {
        move(k, 0);
        move(k + 1, 2);
    }
    if (k < keys) move(k, 0);
    each<2>([&](auto c) ALWAYS { result[c] = sums[c] + sums[c + 2]; });
}

// The first `columns` of [keys][stride] to or from [keys][COLUMNS].
static INLINE void load_state(const float *pool, Floats *state, int64_t keys, int64_t stride, int64_t columns) {
    if (!pool || columns < COLUMNS) memset(state, 0, keys * COLUMNS * sizeof(float));
    for (int64_t k = 0; pool && k < keys; k++) memcpy(state + 2 * k, pool + k * stride, columns * sizeof(float));
}

template <bool DELTA, int DECAYS>
static void recur_columns(const Recurrence *layer, const Scan *scan, const float *mixed, const float *rates,
                          float *result, int64_t head, int64_t first) {
    const int64_t keys = layer->key_dim, values = layer->value_dim, heads = layer->heads;
    const int64_t columns = values - first < COLUMNS ? values - first : COLUMNS;
    const int64_t key_head = head / (heads / layer->key_heads), whole = heads * keys * values;
    float *pool = layer->pool ? layer->pool + head * keys * values + first : nullptr;
    static thread_local Grown<Floats> room;  // an item's columns of each state that is needed at a time
    Floats *states = room.hold(scan->places * keys * 2);
    // All are read before any is written: a row of the pool may be read for one request and written for another.
    for (int64_t i = 0; i < scan->count; i++) {
        const int64_t row = scan->first_rows[i];
        load_state(row < 0 ? nullptr : pool + row * whole, states + scan->first_places[i] * keys * 2, keys, values, columns);
    }
    for (int64_t t = 0; t < scan->tokens; t++) {
        const float *token = mixed + t * layer->channels, *value = token + layer->value + head * values + first;
        const float *rate = rates + (DECAYS == OF_COLUMN ? t * values + first : (t * heads + head) * rates_of(layer));
        Floats *to = states + scan->to[t] * keys * 2;
        Floats change[2], steps[2], found[2];
        each<2>([&](auto c) ALWAYS {
            change[c] = numbers_at(value, FP32, c * LANES, columns - c * LANES);
            if (DECAYS == OF_COLUMN) steps[c] = numbers_at(rate, FP32, c * LANES, columns - c * LANES);
        });
        const Floats inputs[2] = {change[0], change[1]};
        const auto kept = [&](int64_t k, int c) ALWAYS {
            if constexpr (DECAYS == OF_COLUMN)
                return exponential(steps[c] * numbers_at(layer->decay, FP32, k * values + first + c * LANES, columns - c * LANES));
            else
                return rate[DECAYS == OF_KEY ? 1 + k : 1];
        };
        step<DELTA, DECAYS>(states + scan->from[t] * keys * 2, to, keys, token + layer->key + key_head * keys,
                            token + layer->query + key_head * keys, kept, DECAYS == OF_COLUMN ? 1.0f : rate[0], change, found);
        if (scan->rows[t] >= 0)
            for (int64_t k = 0; k < keys; k++)
                memcpy(pool + scan->rows[t] * whole + k * values, to + 2 * k, columns * sizeof(float));
        if (scan->results[t] < 0) continue;
        if (layer->skip) each<2>([&](auto c) ALWAYS { found[c] += inputs[c] * layer->skip[head]; });
        memcpy(result + (scan->results[t] * heads + head) * values + first, found, columns * sizeof(float));
    }
}

// mixed: [tokens][channels] results of the convolution, changed in place; rates: scratch [tokens][heads][rates_of], but
// OF_COLUMN the steps [tokens][value_dim]; result: [results][heads][value_dim].
static void recur(const Recurrence *layer, const Scan *scan, float *mixed, float *rates, float *result, int threads) {
    const int64_t blocks = (layer->value_dim + COLUMNS - 1) / COLUMNS, items = layer->heads * blocks;
    if (layer->decays != OF_COLUMN)
        in_parallel(scan->tokens, 1 + FEW_CHANNELS / layer->channels, threads, [&](int64_t t) {
            prepare(layer, scan->slots[t], mixed + t * layer->channels, rates + t * layer->heads * rates_of(layer));
        });
    const auto one = layer->decays == OF_COLUMN ? recur_columns<false, OF_COLUMN>
                     : layer->decays == OF_KEY  ? recur_columns<true, OF_KEY>
                     : layer->is_delta          ? recur_columns<true, OF_HEAD>
                                                : recur_columns<false, OF_HEAD>;
    in_parallel(items, shares(items, threads), threads, [&](int64_t i) {
        one(layer, scan, mixed, rates, result, i / blocks, i % blocks * COLUMNS);
    });
}
