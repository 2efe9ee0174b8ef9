// Products of up to ROWS_OF_BLOCK rows with a panel of weights, their sums held in registers.
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
    INLINE void load(const float *sums) {
        each<ROWS>([&](auto r) ALWAYS {
            low[r] = read<Floats>(sums + r * WIDTH);
            high[r] = read<Floats>(sums + r * WIDTH + LANES);
        });
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

// Adds to `sums` [rows][WIDTH].
typedef void (*Multiply)(Ready ready, const uint8_t *panel, const uint16_t *scales, int64_t depth, float *sums);

struct MultiplyFp32 {
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint16_t *, int64_t depth, float *result) {
        Sums<ROWS> sums;
        sums.load(result);
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
        sums.load(result);
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
        sums.load(result);
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
        each<ROWS>([&](auto r) ALWAYS {
            low[r] = _mm512_loadu_ps(result + r * WIDTH);
            high[r] = _mm512_loadu_ps(result + r * WIDTH + LANES);
        });
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
// Adds to each sum the products of four signed bytes of `values` with four unsigned bytes of `codes`.
static INLINE void add_dots(Ints &sums, Ints values, Words codes) {
#if defined(__x86_64__)
    // Spelled out: compilers copy the sums around what they think the instruction is.
    asm("vpdpbusd %1, %2, %0" : "+v"(sums) : "v"(values), "v"(codes));
#else
    for (int i = 0; i < 4; i++) {
        const int32x4_t quarter = read<int32x4_t>((const char *)&sums + 16 * i);
        const int8x16_t x = read<int8x16_t>((const char *)&values + 16 * i);
#ifdef SIGNED_CODES
        write((char *)&sums + 16 * i, vdotq_s32(quarter, x, read<int8x16_t>((const char *)&codes + 16 * i)));
#else
        write((char *)&sums + 16 * i, vusdotq_s32(quarter, read<uint8x16_t>((const char *)&codes + 16 * i), x));
#endif
    }
#endif
}

template <int BITS>
struct DotInt {
#ifdef SIGNED_CODES
    static const bool IS_SHIFTED = BITS == 8;  // bytes with their upper bit turned are signed: zero is 0
#else
    static const bool IS_SHIFTED = false;
#endif
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint16_t *scales, int64_t depth, float *result) {
        const int64_t steps = BITS == 8 ? 16 : 8;  // of four k's, in a group
        const uint32_t *x = ready.x;
        for (int64_t g = 0; g < depth / (steps * 4); g++, scales += WIDTH) {
            Ints low[ROWS], high[ROWS];
            each<ROWS>([&](auto r) ALWAYS {
                low[r] = high[r] = Ints{} + (IS_SHIFTED ? 0 : ready.zeros[g * ROWS + r]);
            });
            for (int64_t step = 0; step < steps; step += 8 / BITS, panel += 128) {
                fetch_ahead(ready);
                const Words a = read<Words>(panel), b = read<Words>(panel + 64);
#pragma GCC unroll 2
                for (int part = 0; part < 8 / BITS; part++, x += ROWS) {
                    const uint32_t mask = 0x0f0f0f0fu, upper = IS_SHIFTED ? 0x80808080u : 0;
                    const Words c = BITS == 8 ? a ^ upper : a >> part * 4 & mask;
                    const Words d = BITS == 8 ? b ^ upper : b >> part * 4 & mask;
                    each<ROWS>([&](auto r) ALWAYS {
                        const Ints value = Ints{} + (int32_t)x[r];
                        add_dots(low[r], value, c);
                        add_dots(high[r], value, d);
                    });
                }
            }
            __builtin_prefetch(scales + 16 * WIDTH);
            asm volatile("" ::: "memory");  // the sums so far stay in memory: registers are for this group's
            const Floats a = vectors_from_bf16(scales), b = vectors_from_bf16(scales + LANES);
            each<ROWS>([&](auto r) ALWAYS {
                const float scale = ready.scales[g * ROWS + r];
                float *place = result + r * WIDTH;
                write(place, read<Floats>(place) + __builtin_convertvector(low[r], Floats) * (a * scale));
                write(place + LANES, read<Floats>(place + LANES) + __builtin_convertvector(high[r], Floats) * (b * scale));
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
