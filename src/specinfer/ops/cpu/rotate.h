// What precedes attention: norms and rotation of queries and keys, and keys and values on their way to the cache.

// `inverse`: of the scale, for types of 8 bits.
static INLINE void store(void *pool, int type, int64_t place, float value, float inverse = 1) {
    if (type == FP32)
        ((float *)pool)[place] = value;
    else if (type == FP8)
        ((uint8_t *)pool)[place] = to_float8<FP8>(value * inverse);
    else if (type == E5M2)
        ((uint8_t *)pool)[place] = to_float8<E5M2>(value * inverse);
    else
        ((uint16_t *)pool)[place] = type == BF16 ? to_bf16(value) : to_fp16(value);
}

// Before keys are normed and rotated, which may be values, too.
static void store_values(const Attention *layer, int64_t slot, const float *values) {
    static thread_local Grown<float> room;
    const int64_t dim = layer->dim;
    float *normed = room.hold(dim);
    int64_t place = slot * layer->kv_heads * dim;
    for (int64_t head = 0; head < layer->kv_heads; head++, values += dim, place += dim) {
        const float *x = values;
        if (layer->value_norm) {
            norm_row(x, layer->value_norm, normed, dim, layer->eps);
            x = normed;
        }
        for (int64_t d = 0; d < dim; d++) store(layer->values, layer->type, place + d, x[d], layer->value_inverse);
    }
}

static void rotate_token(const Attention *layer, int64_t slot, const float *cosines, const float *sines, float *qkv) {
    const int64_t dim = layer->dim, half = layer->rotated / 2;
    const int64_t next = layer->rotates_pairs ? 1 : half, step = layer->rotates_pairs ? 2 : 1;
    const int64_t size = layer->num_stored ? layer->kv_heads * dim : 0, heads = layer->heads + size / dim;
    float *key = qkv + layer->heads * dim;
    if (layer->num_stored) store_values(layer, slot, layer->num_stored == 1 ? key : key + size);
    if (layer->joins_heads) {
        norm_row(qkv, layer->query_norm, qkv, layer->heads * dim, layer->eps);
        if (size) norm_row(key, layer->key_norm, key, size, layer->eps);
    }
    for (int64_t head = 0; head < heads; head++) {
        float *x = qkv + head * dim;
        const float *weight = head < layer->heads ? layer->query_norm : layer->key_norm;
        if (weight && !layer->joins_heads) norm_row(x, weight, x, dim, layer->eps);
        for (int64_t d = 0; d < half; d++) {
            float *const first = x + d * step, *const second = first + next;
            const float a = *first, b = *second;
            *first = a * cosines[d] - b * sines[d];
            *second = b * cosines[d + half] + a * sines[d + half];
        }
    }
    for (int64_t i = 0; i < size; i++) store(layer->keys, layer->type, slot * size + i, key[i], layer->key_inverse);
}

// Norms and rotates queries and keys in place; keys and values go to the cache.
// qkv: [tokens][stride] heads, then kv_heads of keys and of values, each [dim], or less, see `num_stored`;
// cosines, sines: [positions][rotated].
static void rotate(const Attention *layer, const Pieces *pieces, const float *cosines, const float *sines, float *qkv,
                   int64_t stride, int threads) {
    const auto one = [&](int64_t t) {
        const int64_t place = pieces->positions[t] * layer->rotated;
        rotate_token(layer, pieces->new_slots[t], cosines + place, sines + place, qkv + t * stride);
    };
    in_parallel(pieces->tokens, FEW, threads, one);
}
