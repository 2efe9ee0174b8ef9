// What lies between the linear layers: exponentials and the norm.

// e^x to 2 units in the last place; 0 below the smallest normal number; NaN stays NaN.
template <class Vector>
static INLINE Vector exponential(Vector x) {
    const Vector limited = select(x > 88.0f, Vector{} + 88.0f, select(x < -87.0f, Vector{} - 87.0f, x));
    const float whole = 0x1.8p23f;
    const Vector n = limited * 0x1.715476p0f + whole - whole;  // of ln 2
    const Vector r = limited - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;
    Vector p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const auto exponent = (converted<decltype(n < n)>(n) + 127) << 23;
    const Vector result = p * (Vector)exponent;
    return select(x < -87.0f, Vector{}, select(x > 88.0f, Vector{} + INFINITY, result));
}

static INLINE float sum_of(Floats x) {
    for (int64_t half = LANES / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

static INLINE Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

// By its tanh approximation: x / 2 * (1 + tanh(u)) is x times the logistic function of 2u.
static INLINE Floats gelu(Floats x) {
    return x / (1.0f + exponential(x * (x * x * -0.0713548163f - 1.5957691216f)));
}

static const int64_t FEW = 16;  // rows that one thread is done with before another has come

// ADDS: to what is there.
template <bool ADDS = false>
static INLINE void norm_row(const float *x, const float *weight, float *y, int64_t size, float eps) {
    Floats sums = {};
    float rest = 0;
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) sums += read<Floats>(x + k) * read<Floats>(x + k);
    for (; k < size; k++) rest += x[k] * x[k];
    const float factor = 1.0f / sqrtf((sum_of(sums) + rest) / (float)size + eps);
    for (k = 0; k + LANES <= size; k += LANES) {
        const Floats normed = read<Floats>(x + k) * factor * read<Floats>(weight + k);
        write(y + k, ADDS ? read<Floats>(y + k) + normed : normed);
    }
    for (; k < size; k++) {
        const float normed = x[k] * factor * weight[k];
        y[k] = ADDS ? y[k] + normed : normed;
    }
}

// y = x / sqrt(mean(x^2) + eps) * weight, or that added to y; each [rows][size].
template <bool ADDS = false>
static void norm(const float *x, const float *weight, float *y, int64_t rows, int64_t size, float eps, int threads) {
    in_parallel(rows, FEW, threads, [&](int64_t r) { norm_row<ADDS>(x + r * size, weight, y + r * size, size, eps); });
}

// Adds a part's results, normed; see Sum. All [rows][hidden].
static void add_normed(const Part *part, const float *results, float *hidden, float *sum, int64_t rows, int threads) {
    const int64_t size = part->hidden;
    if (part->sum == FIRST_OF_SUM)
        norm(results, part->post_norm, sum, rows, size, part->eps, threads);
    else
        norm<true>(results, part->post_norm, part->sum ? sum : hidden, rows, size, part->eps, threads);
    if (part->sum == LAST_OF_SUM) norm<true>(sum, part->sum_norm, hidden, rows, size, part->eps, threads);
}

// A thread's own memory, which grows. No containers of the standard library: which instruction set's would be linked?
template <class T>
struct Grown {
    T *data = nullptr;
    int64_t size = 0;
    T *hold(int64_t wanted) {
        if (wanted > size) {
            delete_aligned(data);
            size = wanted + wanted / 2;
            data = (T *)new_aligned(size * sizeof(T));
        }
        return data;
    }
    ~Grown() { delete_aligned(data); }
};

// A thread's own room of a kind, made where a thread first needs it: zeros.
template <class Room>
static Room &own_room() {
    struct Owner {
        Room *room = nullptr;
        ~Owner() {
            if (!room) return;
            room->~Room();
            delete_aligned(room);
        }
    };
    static thread_local Owner owner;
    if (!owner.room) owner.room = new (new_aligned(sizeof(Room))) Room();
    return *owner.room;
}
