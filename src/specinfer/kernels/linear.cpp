// Linear layers for few rows: y[m, n] = sum_k x[m, k] * w[n, k] + bias[n], bound by reading the weights once.
//
// Weights are packed in panels of 32 columns (outputs), one after the other: for each k the panel's 32 weights lie
// side by side. Rows are taken in blocks whose sums all stay in registers; a panel comes from memory for the first
// block and from cache for the others. bf16 weights are widened in registers, and multiplied and added in fp32.
//
// Each sum runs over k in order, whatever the number of rows: a row's result does not depend on its neighbours.
//
// Plain C interface, so that no header of Python or PyTorch is needed. OpenMP is the one PyTorch has loaded.

#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

static const int64_t WIDTH = 32;     // columns of a panel
static const int MAX_BLOCK = 14;     // rows whose sums fit into 32 registers of 64 bytes
static const int64_t PART = 256;     // k's that are transposed at a time
static const int64_t AHEAD = 32;     // k's fetched before they are needed

static INLINE float widen(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

static INLINE uint16_t narrow(float value) {  // to nearest even, as PyTorch rounds
    uint32_t word;
    memcpy(&word, &value, 4);
    if ((word & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (uint16_t)((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

// How a number type is packed and read.
struct Bf16 {
    typedef uint16_t Number;
    static INLINE float load(Number number) { return widen(number); }
    static INLINE Number store(float value) { return narrow(value); }
    // A word of the panel: column c in the lower half, column c + 16 in the upper.
    static INLINE int64_t place(int64_t c) { return c % 16 * 2 + c / 16; }
    static INLINE void weights(const Number *panel, Floats &low, Floats &high) {
        Words words;
        memcpy(&words, panel, 64);
        Words a = words << 16, b = words & 0xffff0000u;
        memcpy(&low, &a, 64);
        memcpy(&high, &b, 64);
    }
};

struct Fp32 {
    typedef float Number;
    static INLINE float load(Number number) { return number; }
    static INLINE Number store(float value) { return value; }
    static INLINE int64_t place(int64_t c) { return c; }
    static INLINE void weights(const Number *panel, Floats &low, Floats &high) {
        memcpy(&low, panel, 64);
        memcpy(&high, panel + 16, 64);
    }
};

// x: [K][ROWS]; sums: [ROWS][WIDTH].
template <class Type, int ROWS>
static INLINE void multiply(const float *__restrict x, const typename Type::Number *__restrict panel, int64_t K,
                            float *__restrict sums) {
    Floats low[ROWS], high[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) low[r] = high[r] = Floats{};
    for (int64_t k = 0; k < K; k++) {
        Floats a, b;
        Type::weights(panel + k * WIDTH, a, b);
        __builtin_prefetch(panel + (k + AHEAD) * WIDTH);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            float value = x[k * ROWS + r];
            low[r] += a * value;
            high[r] += b * value;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        memcpy(sums + r * WIDTH, &low[r], 64);
        memcpy(sums + r * WIDTH + 16, &high[r], 64);
    }
}

template <class Type>
using Multiply = void (*)(const float *, const typename Type::Number *, int64_t, float *);

template <class Type>
struct Kernels {
    int max_rows;
    Multiply<Type> of[MAX_BLOCK + 1];
};

#define KERNEL(NAME, ...)                                                                                        \
    template <class Type, int ROWS>                                                                              \
    __VA_ARGS__ static void NAME(const float *x, const typename Type::Number *panel, int64_t K, float *sums) {   \
        multiply<Type, ROWS>(x, panel, K, sums);                                                                 \
    }
#define THREE(NAME) {3, {nullptr, NAME<Type, 1>, NAME<Type, 2>, NAME<Type, 3>}}

KERNEL(plain)
#if defined(__x86_64__)
KERNEL(avx2, __attribute__((target("avx2,fma"))))
KERNEL(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512"))))
#endif

static int isa() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

template <class Type>
static Kernels<Type> kernels() {
#if defined(__x86_64__)
    if (isa() == 2)
        return {MAX_BLOCK,
                {nullptr, avx512<Type, 1>, avx512<Type, 2>, avx512<Type, 3>, avx512<Type, 4>, avx512<Type, 5>,
                 avx512<Type, 6>, avx512<Type, 7>, avx512<Type, 8>, avx512<Type, 9>, avx512<Type, 10>,
                 avx512<Type, 11>, avx512<Type, 12>, avx512<Type, 13>, avx512<Type, 14>}};
    if (isa() == 1) return THREE(avx2);
#endif
    return THREE(plain);
}

// weights: [N][K]; packed: [panels][K][WIDTH], 0 where there is no column.
template <class Type>
static void pack(const typename Type::Number *weights, typename Type::Number *packed, int64_t N, int64_t K,
                 int threads) {
    int64_t panels = (N + WIDTH - 1) / WIDTH;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t start = 0; start < K; start += 64)
            for (int64_t c = 0; c < WIDTH; c++)
                for (int64_t k = start; k < K && k < start + 64; k++)
                    packed[(p * K + k) * WIDTH + Type::place(c)] =
                        p * WIDTH + c < N ? weights[(p * WIDTH + c) * K + k] : typename Type::Number(0);
}

template <class Type>
static void unpack(const typename Type::Number *packed, typename Type::Number *weights, int64_t N, int64_t K,
                   int threads) {
    int64_t panels = (N + WIDTH - 1) / WIDTH;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t start = 0; start < K; start += 64)
            for (int64_t c = 0; c < WIDTH && p * WIDTH + c < N; c++)
                for (int64_t k = start; k < K && k < start + 64; k++)
                    weights[(p * WIDTH + c) * K + k] = packed[(p * K + k) * WIDTH + Type::place(c)];
}

// x: [M][K]; y: [M][N]; room: M * K floats.
template <class Type>
static void linear(const typename Type::Number *x, const typename Type::Number *packed,
                   const typename Type::Number *bias, typename Type::Number *y, float *room, int64_t M, int64_t K,
                   int64_t N, int threads) {
    static const Kernels<Type> known = kernels<Type>();
    const int64_t panels = (N + WIDTH - 1) / WIDTH, blocks = (M + known.max_rows - 1) / known.max_rows;
    const int64_t least = M / blocks, larger = M % blocks;  // rows of a block; so many have one more
    const int64_t share = panels / (threads * 8) + 1;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t part = 0; part < (K + PART - 1) / PART; part++) {
            const int64_t end = (part + 1) * PART < K ? (part + 1) * PART : K;
            for (int64_t block = 0, m = 0; block < blocks; block++) {
                const int64_t rows = least + (block < larger);
                for (int64_t r = 0; r < rows; r++)
                    for (int64_t k = part * PART; k < end; k++)
                        room[m * K + k * rows + r] = Type::load(x[(m + r) * K + k]);
                m += rows;
            }
        }
#pragma omp for schedule(dynamic, share)
        for (int64_t p = 0; p < panels; p++) {
            const int64_t first = p * WIDTH, columns = N - first < WIDTH ? N - first : WIDTH;
            float sums[MAX_BLOCK * WIDTH];
            for (int64_t block = 0, m = 0; block < blocks; block++) {
                const int64_t rows = least + (block < larger);
                known.of[rows](room + m * K, packed + p * K * WIDTH, K, sums);
                for (int64_t r = 0; r < rows; r++)
                    for (int64_t c = 0; c < columns; c++)
                        y[(m + r) * N + first + c] =
                            Type::store(sums[r * WIDTH + c] + (bias ? Type::load(bias[first + c]) : 0.0f));
                m += rows;
            }
        }
    }
}

extern "C" {
int specinfer_isa(void) { return isa(); }
void specinfer_pack_bf16(const uint16_t *weights, uint16_t *packed, int64_t N, int64_t K, int threads) {
    pack<Bf16>(weights, packed, N, K, threads);
}
void specinfer_pack_fp32(const float *weights, float *packed, int64_t N, int64_t K, int threads) {
    pack<Fp32>(weights, packed, N, K, threads);
}
void specinfer_unpack_bf16(const uint16_t *packed, uint16_t *weights, int64_t N, int64_t K, int threads) {
    unpack<Bf16>(packed, weights, N, K, threads);
}
void specinfer_unpack_fp32(const float *packed, float *weights, int64_t N, int64_t K, int threads) {
    unpack<Fp32>(packed, weights, N, K, threads);
}
void specinfer_linear_bf16(const uint16_t *x, const uint16_t *packed, const uint16_t *bias, uint16_t *y, float *room,
                           int64_t M, int64_t K, int64_t N, int threads) {
    linear<Bf16>(x, packed, bias, y, room, M, K, N, threads);
}
void specinfer_linear_fp32(const float *x, const float *packed, const float *bias, float *y, float *room, int64_t M,
                           int64_t K, int64_t N, int threads) {
    linear<Fp32>(x, packed, bias, y, room, M, K, N, threads);
}
}
