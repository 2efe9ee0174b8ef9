// Linear layers for few rows: y[m, n] = sum_k x[m, k] * w[n, k] + bias[n], bound by reading the weights once.
//
// Weights lie in panels of 32 columns, one panel after the other, so that what is multiplied together lies together.
// Rows are taken in blocks whose sums stay in registers; a panel comes from memory for the first block and from cache
// for the others.
//
//   type  a panel                         what is multiplied
//   fp32  [K][32]                         floats
//   fp16  [K][32]                         floats, the weights widened in registers
//   bf16  [K / 2][32][2]                  the same; or pairs by one instruction that adds to fp32
//   int8  [K / 4][32][4], 128 is zero     activations rounded to int8 for each group of 64, sums exact in a group
//   int4  [K / 8][32][4], two k's 4 apart in a byte, 8 is zero: the same for each group of 32
//
// K is filled up with zeros to a whole number of groups. Sums run over k in order whatever the number of rows: a
// row's result does not depend on its neighbours.

#ifndef ROWS_OF_BLOCK
#error "included by isa_*.cpp"
#endif

static const int64_t AHEAD = 8192;  // bytes that a panel's only block of rows fetches before it needs them
static const int64_t PART = 512;    // k's of a thread's part when activations are made ready

struct Shape {
    int64_t group, bits;
    int64_t depth(int64_t inputs) const { return (inputs + group - 1) / group * group; }
    int64_t panel_bytes(int64_t inputs) const { return depth(inputs) * WIDTH * bits / 8; }
};

static Shape shape_of(int type) {
    switch (type) {
        case FP32: return {1, 32};
        case FP16:
        case BF16: return {2, 16};
        case INT8: return {64, 8};
        default: return {32, 4};
    }
}

// Activations of a block of rows as its kernel reads them, row beside row.
struct Ready {
    const uint8_t *ahead;  // what to fetch while this block is multiplied: `pace` bytes of it in each step of 128
    int64_t pace;
    const uint32_t *x;     // [steps][rows] floats, pairs of bf16 or four int8
    const float *scales;   // [groups][rows]
    const int32_t *zeros;  // [groups][rows] what the weights' zero point adds to a group's sum, negated
};

static INLINE void fetch_ahead(Ready &ready) {
    __builtin_prefetch(ready.ahead, 0, 2);
    __builtin_prefetch(ready.ahead + ready.pace / 2, 0, 2);
    ready.ahead += ready.pace;
}

template <int ROWS>
struct Sums {
    Floats low[ROWS], high[ROWS];
    INLINE void clear() {
        each<ROWS>([&](auto r) ALWAYS { low[r] = high[r] = Floats{}; });
    }
    INLINE void add(const uint32_t *x, Floats a, Floats b) {
        each<ROWS>([&](auto r) ALWAYS {
            const float value = as_float(x[r]);
            low[r] += a * value;
            high[r] += b * value;
        });
    }
    INLINE void store(float *sums) const {
        each<ROWS>([&](auto r) ALWAYS {
            write(sums + r * WIDTH, low[r]);
            write(sums + r * WIDTH + LANES, high[r]);
        });
    }
};

typedef void (*Multiply)(Ready ready, const uint8_t *panel, const uint16_t *scales, int64_t depth, float *sums);

struct MultiplyFp32 {
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint16_t *, int64_t depth, float *result) {
        Sums<ROWS> sums;
        sums.clear();
        for (int64_t k = 0; k < depth; k++, panel += 128) {
            fetch_ahead(ready);
            sums.add(ready.x + k * ROWS, read<Floats>(panel), read<Floats>(panel + 64));
        }
        sums.store(result);
    }
};

struct MultiplyFp16 {
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint16_t *, int64_t depth, float *result) {
        Sums<ROWS> sums;
        sums.clear();
        for (int64_t k = 0; k < depth; k += 2, panel += 128) {
            fetch_ahead(ready);
            for (int i = 0; i < 2; i++) {
                const uint16_t *place = (const uint16_t *)panel + i * WIDTH;
                sums.add(ready.x + (k + i) * ROWS, vectors_from_fp16(place), vectors_from_fp16(place + LANES));
            }
        }
        sums.store(result);
    }
};

struct MultiplyBf16 {
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint16_t *, int64_t depth, float *result) {
        Sums<ROWS> sums;
        sums.clear();
        for (int64_t k = 0; k < depth; k += 2, panel += 128) {
            fetch_ahead(ready);
            const Words a = read<Words>(panel), b = read<Words>(panel + 64);
            sums.add(ready.x + k * ROWS, (Floats)(a << 16), (Floats)(b << 16));
            sums.add(ready.x + (k + 1) * ROWS, (Floats)(a & 0xffff0000u), (Floats)(b & 0xffff0000u));
        }
        sums.store(result);
    }
};

// Whole numbers as floats: exact, as sums within a group are far below 2^24.
template <int BITS>
struct MultiplyInt {
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint16_t *scales, int64_t depth, float *result) {
        const int64_t group = BITS == 8 ? 64 : 32, zero = 1 << (BITS - 1);
        memset(result, 0, 4 * ROWS * WIDTH);
        for (int64_t g = 0; g < depth / group; g++, scales += WIDTH) {
            Sums<ROWS> sums;
            sums.clear();
            for (int64_t k = 0; k < group; k += 32 / BITS, panel += 128) {
                fetch_ahead(ready);
                const Words a = read<Words>(panel), b = read<Words>(panel + 64);
                for (int part = 0; part < 32 / BITS; part++) {
                    // The bytes first; in int4 the upper halves of them come after all four lower ones.
                    const int shift = part % 4 * 8 + part / 4 * 4, mask = (1 << BITS) - 1;
                    const Ints low = (Ints)(a >> shift & mask) - (int32_t)zero;
                    const Ints high = (Ints)(b >> shift & mask) - (int32_t)zero;
                    sums.add(ready.x + (g * group + k + part) * ROWS, __builtin_convertvector(low, Floats),
                             __builtin_convertvector(high, Floats));
                }
            }
            const Floats low = vectors_from_bf16(scales), high = vectors_from_bf16(scales + LANES);
            each<ROWS>([&](auto r) ALWAYS {
                const float scale = ready.scales[g * ROWS + r];
                float *place = result + r * WIDTH;
                write(place, read<Floats>(place) + sums.low[r] * (low * scale));
                write(place + LANES, read<Floats>(place + LANES) + sums.high[r] * (high * scale));
            });
        }
    }
};

#ifdef DOTS
struct DotBf16 {
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint16_t *, int64_t depth, float *result) {
        __m512 low[ROWS], high[ROWS];
        each<ROWS>([&](auto r) ALWAYS { low[r] = high[r] = _mm512_setzero_ps(); });
        for (int64_t k = 0; k < depth / 2; k++, panel += 128) {
            fetch_ahead(ready);
            const __m512bh a = (__m512bh)_mm512_loadu_si512(panel), b = (__m512bh)_mm512_loadu_si512(panel + 64);
            each<ROWS>([&](auto r) ALWAYS {
                const __m512bh x = (__m512bh)_mm512_set1_epi32(ready.x[k * ROWS + r]);
                low[r] = _mm512_dpbf16_ps(low[r], x, a);
                high[r] = _mm512_dpbf16_ps(high[r], x, b);
            });
        }
        each<ROWS>([&](auto r) ALWAYS {
            _mm512_storeu_ps(result + r * WIDTH, low[r]);
            _mm512_storeu_ps(result + r * WIDTH + LANES, high[r]);
        });
    }
};
#endif

#ifdef INT_DOTS
template <int BITS>
struct DotInt {
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint16_t *scales, int64_t depth, float *result) {
        const int64_t steps = BITS == 8 ? 16 : 8;  // of four k's, in a group
        const uint32_t *x = ready.x;
        memset(result, 0, 4 * ROWS * WIDTH);
        for (int64_t g = 0; g < depth / (steps * 4); g++, scales += WIDTH) {
            __m512i low[ROWS], high[ROWS];
            each<ROWS>([&](auto r) ALWAYS { low[r] = high[r] = _mm512_set1_epi32(ready.zeros[g * ROWS + r]); });
            for (int64_t step = 0; step < steps; step += 8 / BITS, panel += 128) {
                fetch_ahead(ready);
                const __m512i a = _mm512_loadu_si512(panel), b = _mm512_loadu_si512(panel + 64);
                const __m512i mask = _mm512_set1_epi8((1 << BITS) - 1);
#pragma GCC unroll 2
                for (int part = 0; part < 8 / BITS; part++, x += ROWS) {
                    const __m512i c = BITS == 8 ? a : _mm512_and_si512(_mm512_maskz_srli_epi32(-1, a, part * 4), mask);
                    const __m512i d = BITS == 8 ? b : _mm512_and_si512(_mm512_maskz_srli_epi32(-1, b, part * 4), mask);
                    each<ROWS>([&](auto r) ALWAYS {
                        const __m512i value = _mm512_set1_epi32(x[r]);
                        // Spelled out: compilers copy the sums around what they think the instruction is.
                        asm("vpdpbusd %1, %2, %0" : "+v"(low[r]) : "v"(value), "v"(c));
                        asm("vpdpbusd %1, %2, %0" : "+v"(high[r]) : "v"(value), "v"(d));
                    });
                }
            }
            __builtin_prefetch(scales + 16 * WIDTH);
            asm volatile("" ::: "memory");  // the sums so far stay in memory: registers are for this group's
            const Floats a = vectors_from_bf16(scales), b = vectors_from_bf16(scales + LANES);
            each<ROWS>([&](auto r) ALWAYS {
                const float scale = ready.scales[g * ROWS + r];
                float *place = result + r * WIDTH;
                write(place, read<Floats>(place) + (Floats)_mm512_maskz_cvtepi32_ps(-1, low[r]) * (a * scale));
                write(place + LANES, read<Floats>(place + LANES) + (Floats)_mm512_maskz_cvtepi32_ps(-1, high[r]) * (b * scale));
            });
        }
    }
};
#endif

template <class Kernel>
static Multiply of_rows(int64_t rows) {
    switch (rows) {
        case 1: return Kernel::template run<1>;
        case 2: return Kernel::template run<2>;
        case 3: return Kernel::template run<3>;
#if ROWS_OF_BLOCK > 3
        case 4: return Kernel::template run<4>;
        case 5: return Kernel::template run<5>;
        case 6: return Kernel::template run<6>;
        case 7: return Kernel::template run<7>;
        case 8: return Kernel::template run<8>;
        case 9: return Kernel::template run<9>;
        case 10: return Kernel::template run<10>;
        case 11: return Kernel::template run<11>;
        case 12: return Kernel::template run<12>;
        case 13: return Kernel::template run<13>;
        default: return Kernel::template run<14>;
#else
        default: return nullptr;
#endif
    }
}

static Multiply kernel_of(int type, bool dots, int64_t rows) {
    (void)dots;
    switch (type) {
        case FP32: return of_rows<MultiplyFp32>(rows);
        case FP16: return of_rows<MultiplyFp16>(rows);
        case BF16:
#ifdef DOTS
            if (dots) return of_rows<DotBf16>(rows);
#endif
            return of_rows<MultiplyBf16>(rows);
        case INT8:
#ifdef INT_DOTS
            if (dots) return of_rows<DotInt<8>>(rows);
#endif
            return of_rows<MultiplyInt<8>>(rows);
        default:
#ifdef INT_DOTS
            if (dots) return of_rows<DotInt<4>>(rows);
#endif
            return of_rows<MultiplyInt<4>>(rows);
    }
}

// Rows shared out so that blocks differ by one row at most.
struct Blocks {
    int64_t count, least, larger;
    explicit Blocks(int64_t rows)
        : count((rows + ROWS_OF_BLOCK - 1) / ROWS_OF_BLOCK), least(rows / count), larger(rows % count) {}
    int64_t rows(int64_t block) const { return least + (block < larger); }
    int64_t first(int64_t block) const { return block * least + (block < larger ? block : larger); }
};

// One group of one row: its scale, whole numbers, and their sum. What is not finite makes the scale NaN.
static INLINE float quantize(const float *x, int64_t size, int64_t group, int8_t *codes, int32_t &sum) {
    typedef int8_t Bytes __attribute__((vector_size(16)));
    float padded[64];
    if (size < group) {
        memset(padded, 0, sizeof(padded));
        memcpy(padded, x, 4 * size);
        x = padded;
    }
    Ints most = {}, sums = {};
    for (int64_t k = 0; k < group; k += LANES) {  // as whole numbers, positive floats have the same order
        const Ints magnitude = read<Ints>(x + k) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    int32_t bits = 0;
    for (int64_t i = 0; i < LANES; i++) bits = most[i] > bits ? most[i] : bits;
    const float largest = as_float(bits) < 0x1p-120f ? 0.0f : as_float(bits);
    const float factor = largest == 0.0f ? 0.0f : 127.0f / largest;
    for (int64_t k = 0; k < group; k += LANES) {
        const float whole = 0x1.8p23f;  // added and taken away it rounds, halves to even
        const Floats rounded = read<Floats>(x + k) * factor + whole - whole;
        const Ints values = __builtin_convertvector(rounded, Ints);
        sums += values;
        write(codes + k, __builtin_convertvector(values, Bytes));
    }
    sum = 0;
    for (int64_t i = 0; i < LANES; i++) sum += sums[i];
    return bits < 0x7f800000 ? largest / 127.0f : NAN;
}

static void make_ready(const float *x, int64_t inputs, int64_t rows, int64_t from, int64_t to, int type, bool dots,
                       uint32_t *ready, float *scales, int32_t *zeros) {
    if (type == INT8 || type == INT4) {
        const int64_t group = shape_of(type).group;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t g = from / group; g * group < to; g++) {
                int8_t codes[64];
                int32_t sum;
                const int64_t size = inputs - g * group < group ? inputs - g * group : group;
                scales[g * rows + r] = quantize(x + r * inputs + g * group, size, group, codes, sum);
                zeros[g * rows + r] = -sum * (type == INT8 ? 128 : 8);
                if (dots)
                    for (int64_t k = 0; k < group; k += 4)
                        ready[(g * group + k) / 4 * rows + r] = read<uint32_t>(codes + k);
                else
                    for (int64_t k = 0; k < group; k++)
                        ready[(g * group + k) * rows + r] = read<uint32_t>(&(const float &)(float)codes[k]);
            }
    } else if (dots) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = from; k < to; k += 2) {
                const float *place = x + r * inputs + k;
                const uint32_t second = k + 1 < inputs ? to_bf16(place[1]) : 0;
                ready[k / 2 * rows + r] = to_bf16(place[0]) | second << 16;
            }
    } else {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = from; k < to; k++)
                ready[k * rows + r] = k < inputs ? read<uint32_t>(x + r * inputs + k) : 0;
    }
}

static INLINE Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

static void finish(const float *sums, const float *bias, float *y, int64_t rows, int64_t first, int64_t outputs,
                   int ending) {
    for (int64_t r = 0; r < rows; r++, sums += WIDTH) {
        Floats low = read<Floats>(sums), high = read<Floats>(sums + LANES);
        if (bias) {
            low += read<Floats>(bias + first);
            high += read<Floats>(bias + first + LANES);
        }
        if (ending == GATED) {  // a panel is 16 gates, then the 16 values they open
            const Floats value = silu(low) * high;
            const int64_t size = outputs / 2, column = first / 2;
            memcpy(y + r * size + column, &value, 4 * (size - column < LANES ? size - column : LANES));
            continue;
        }
        float *place = y + r * outputs + first;
        if (outputs - first >= WIDTH) {
            write(place, ending == ADD ? read<Floats>(place) + low : low);
            write(place + LANES, ending == ADD ? read<Floats>(place + LANES) + high : high);
            continue;
        }
        float both[WIDTH];
        write(both, low);
        write(both + LANES, high);
        for (int64_t c = 0; c < outputs - first; c++) place[c] = ending == ADD ? place[c] + both[c] : both[c];
    }
}

// x: [rows][inputs]; y: [rows][outputs], or half as many outputs of a gated layer. room: 4 * rows * (depth + 2 *
// groups) bytes.
static void linear(const Linear *layer, const float *x, float *y, void *room, int64_t rows, int32_t ending,
                   int threads) {
    const int type = layer->type;
    const bool dots = layer->dots;
    const Shape shape = shape_of(type);
    const int64_t inputs = layer->inputs, outputs = layer->outputs, depth = shape.depth(inputs);
    const int64_t groups = depth / shape.group, panels = (outputs + WIDTH - 1) / WIDTH;
    const int64_t steps = !dots ? depth : type == BF16 ? depth / 2 : depth / 4;
    const int64_t share = panels / (threads * 8) + 1;
    const Blocks blocks(rows);
    uint32_t *ready = (uint32_t *)room;
    float *scales = (float *)(ready + rows * steps);
    int32_t *zeros = (int32_t *)(scales + rows * groups);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t part = 0; part < (depth + PART - 1) / PART; part++)
            for (int64_t b = 0; b < blocks.count; b++) {
                const int64_t m = blocks.first(b), to = (part + 1) * PART < depth ? (part + 1) * PART : depth;
                make_ready(x + m * inputs, inputs, blocks.rows(b), part * PART, to, type, dots, ready + m * steps,
                           scales + m * groups, zeros + m * groups);
            }
#pragma omp for schedule(dynamic, share)
        for (int64_t p = 0; p < panels; p++) {
            const uint8_t *panel = (const uint8_t *)layer->packed + p * shape.panel_bytes(inputs);
            for (int64_t b = 0; b < blocks.count; b++) {
                const int64_t m = blocks.first(b), count = blocks.rows(b), bytes = shape.panel_bytes(inputs);
                float sums[ROWS_OF_BLOCK * WIDTH];
                // Several blocks share the fetching of the next panel: memory is busy in all of them.
                const uint8_t *ahead = panel + (blocks.count == 1 ? AHEAD : bytes) + b * bytes / blocks.count;
                const Ready block = {ahead, 128 / blocks.count, ready + m * steps, scales + m * groups,
                                     zeros + m * groups};
                const uint16_t *weight_scales = layer->scales ? layer->scales + p * groups * WIDTH : nullptr;
                kernel_of(type, dots, count)(block, panel, weight_scales, depth, sums);
                finish(sums, layer->bias, y + m * (ending == GATED ? outputs / 2 : outputs), count, p * WIDTH, outputs,
                       ending);
            }
        }
    }
}
