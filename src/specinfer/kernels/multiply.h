// Products of up to ROWS_OF_BLOCK rows with a panel of weights (panels.h), their sums held in registers.
//
// Sums run over k in order whatever the number of rows: a row's result does not depend on its neighbours.

static INLINE Floats as_floats(Floats numbers) { return numbers; }
static INLINE Floats as_floats(Ints numbers) { return __builtin_convertvector(numbers, Floats); }

struct GroupScales {  // of a panel's columns
    Floats low, high, low_added, high_added;
};

template <class Byte>
static INLINE Floats vectors_from_bytes(const uint8_t *place) {
    typedef Byte Bytes __attribute__((vector_size(16)));
    return __builtin_convertvector(__builtin_convertvector(read<Bytes>(place), Ints), Floats);
}

static INLINE GroupScales scales_of(const uint8_t *scales, int scaling, int64_t g, int64_t group) {
    const int64_t in_nest = NEST / group, size = scale_bytes(scaling, group, NEST);
    const auto halves = [&](const uint8_t *place) ALWAYS { return vectors_from_fp16((const uint16_t *)place); };
    const uint8_t *nest = scales + g / in_nest * size, *place = nest + 2 * WIDTH + g % in_nest * WIDTH;
    switch (scaling) {
        case FP16_SCALES: return {halves(scales + g * 64), halves(scales + g * 64 + 32), Floats{}, Floats{}};
        case FP16_AFFINE:
            scales += g * 128;
            return {halves(scales), halves(scales + 32), halves(scales + 64), halves(scales + 96)};
        case FP16_ZEROS: {
            scales += g * 96;
            const Floats low = halves(scales), high = halves(scales + 32);
            return {low, high, -low * vectors_from_bytes<uint8_t>(scales + 64), -high * vectors_from_bytes<uint8_t>(scales + 80)};
        }
        case NESTED:
            return {halves(nest) * vectors_from_bytes<int8_t>(place),
                    halves(nest + 32) * vectors_from_bytes<int8_t>(place + 16), Floats{}, Floats{}};
        case NESTED_AFFINE:
            place += 2 * WIDTH + g % in_nest * WIDTH;
            return {halves(nest) * vectors_from_bytes<uint8_t>(place),
                    halves(nest + 32) * vectors_from_bytes<uint8_t>(place + 16),
                    halves(nest + 64) * vectors_from_bytes<uint8_t>(place + 32),
                    halves(nest + 96) * vectors_from_bytes<uint8_t>(place + 48)};
        default: {
            const uint16_t *place = (const uint16_t *)scales + g * WIDTH;
            return {vectors_from_bf16(place), vectors_from_bf16(place + LANES), Floats{}, Floats{}};
        }
    }
}

// Activations of a block of rows as its kernel reads them, row beside row.
struct Ready {
    const uint8_t *ahead;  // what to fetch while this block is multiplied: `pace` bytes of it in each step of 128
    int64_t pace;
    const uint32_t *x;     // [steps][rows] floats, pairs of bf16 or four int8
    const float *scales;   // [groups][rows]
    const int32_t *zeros;  // [groups][rows] what the weights' zero point adds to a group's sum, negated; or the sum of x
    int32_t scaling;
    const uint8_t *levels;  // of LEVELS4
};

// result [ROWS][WIDTH] += the sums of group g, times the scales of weights and activations.
template <int ROWS, class Sum>
static INLINE void add_scaled(const Ready &ready, const GroupScales &scales, int64_t g, const Sum *low, const Sum *high,
                              float *result) {
    const auto add = [&](float *place, Floats sum, float scale) ALWAYS { write(place, read<Floats>(place) + sum * scale); };
    if (is_affine(ready.scaling))
        each<ROWS>([&](auto r) ALWAYS {
            const float scale = ready.scales[g * ROWS + r], x = (float)ready.zeros[g * ROWS + r];
            add(result + r * WIDTH, as_floats(low[r]) * scales.low + scales.low_added * x, scale);
            add(result + r * WIDTH + LANES, as_floats(high[r]) * scales.high + scales.high_added * x, scale);
        });
    else
        each<ROWS>([&](auto r) ALWAYS {
            const float scale = ready.scales[g * ROWS + r];
            float *place = result + r * WIDTH;
            write(place, read<Floats>(place) + as_floats(low[r]) * (scales.low * scale));
            write(place + LANES, read<Floats>(place + LANES) + as_floats(high[r]) * (scales.high * scale));
        });
}

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
typedef void (*Multiply)(Ready ready, const uint8_t *panel, const uint8_t *scales, int64_t depth, float *sums);

struct MultiplyFp32 {
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint8_t *, int64_t depth, float *result) {
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
    static void run(Ready ready, const uint8_t *panel, const uint8_t *, int64_t depth, float *result) {
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
    static void run(Ready ready, const uint8_t *panel, const uint8_t *, int64_t depth, float *result) {
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

// result [ROWS][WIDTH] += sums times the scales [WIDTH] fp32.
template <int ROWS>
static INLINE void add_whole(const uint8_t *scales, const Floats *low, const Floats *high, float *result) {
    const Floats first = read<Floats>(scales), second = read<Floats>(scales + 4 * LANES);
    each<ROWS>([&](auto r) ALWAYS {
        float *place = result + r * WIDTH;
        write(place, read<Floats>(place) + low[r] * first);
        write(place + LANES, read<Floats>(place + LANES) + high[r] * second);
    });
}

// e4m3 in byte `i` of each word, see `from_fp8`.
static INLINE Floats widened(Words words, int i) {
    return (Floats)((Words)((Ints)(words << (24 - 8 * i)) >> 4) & 0x87f00000u) * 0x1p120f;
}

struct MultiplyFp8 {
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint8_t *scales, int64_t depth, float *result) {
        const int64_t group = 128;
        for (int64_t g = 0; g < depth / group; g++, scales += 4 * WIDTH) {
            Sums<ROWS> sums;
            sums.clear();
            for (int64_t k = g * group; k < (g + 1) * group; k += 4, panel += 128) {
                fetch_ahead(ready);
                const Words a = read<Words>(panel), b = read<Words>(panel + 64);
                for (int i = 0; i < 4; i++) sums.add(ready.x + (k + i) * ROWS, widened(a, i), widened(b, i));
            }
            add_whole<ROWS>(scales, sums.low, sums.high, result);
        }
    }
};

// The upper bits of a group's codes: those that are not in the lower half bytes.
template <int BITS>
struct UpperBits {
    Words low = {}, high = {};
    static const bool ANY = BITS == 5 || BITS == 6;
    static const uint32_t MASK = BITS == 6 ? 0x03030303u : 0x01010101u;
    INLINE void load(Ready &ready, const uint8_t *&panel) {
        if (!ANY) return;
        fetch_ahead(ready);
        low = read<Words>(panel);
        high = read<Words>(panel + 64);
        panel += 128;
    }
    // Adds those of the next four k's.
    INLINE void put(Words &a, Words &b) {
        if (!ANY) return;
        a |= (low & MASK) << 4;
        b |= (high & MASK) << 4;
        low >>= BITS - 4;
        high >>= BITS - 4;
    }
};

// Whole numbers as floats: exact, as sums within a group are far below 2^24.
template <int BITS, int GROUP>
struct MultiplyInt {
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint8_t *scales, int64_t depth, float *result) {
        const int32_t zero = is_affine(ready.scaling) ? 0 : 1 << (BITS - 1);
        for (int64_t g = 0; g < depth / GROUP; g++) {
            Sums<ROWS> sums;
            sums.clear();
            UpperBits<BITS> upper;
            upper.load(ready, panel);
            for (int64_t k = 0; k < GROUP; k += BITS == 8 ? 4 : 8, panel += 128) {
                fetch_ahead(ready);
                const Words a = read<Words>(panel), b = read<Words>(panel + 64);
                for (int half = 0; half < (BITS == 8 ? 1 : 2); half++) {
                    // The bytes first; with fewer bits the upper halves of them come after all four lower ones.
                    const uint32_t mask = BITS == 8 ? 0xffffffffu : 0x0f0f0f0fu;
                    Words c = a >> half * 4 & mask, d = b >> half * 4 & mask;
                    upper.put(c, d);
                    for (int i = 0; i < 4; i++) {
                        const Ints low = (Ints)(c >> i * 8 & 0xffu) - zero, high = (Ints)(d >> i * 8 & 0xffu) - zero;
                        sums.add(ready.x + (g * GROUP + k + half * 4 + i) * ROWS, as_floats(low), as_floats(high));
                    }
                }
            }
            add_scaled<ROWS>(ready, scales_of(scales, ready.scaling, g, GROUP), g, sums.low, sums.high, result);
        }
    }
};

#ifdef DOTS
struct DotBf16 {
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint8_t *, int64_t depth, float *result) {
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

#ifdef DOTS
// bf16 of e4m3 in the upper byte of each half word: the exponent is put right by a sum. Subnormals are looked up.
static INLINE __m512bh widened_pairs(__m512i words) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    const __mmask32 is_subnormal = _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x7800));
    __m512i found = _mm512_and_si512(_mm512_srli_epi16(words, 4), _mm512_set1_epi16(0x07f0));
    found = _mm512_add_epi16(found, _mm512_set1_epi16(0x3c00));
    found = _mm512_mask_permutexvar_epi16(found, is_subnormal, _mm512_srli_epi16(words, 8), table);
    return (__m512bh)_mm512_ternarylogic_epi32(found, words, _mm512_set1_epi16((short)0x8000), 0xf8);  // a | (b & c)
}

struct DotFp8 {
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint8_t *scales, int64_t depth, float *result) {
        const uint32_t *x = ready.x;
        for (int64_t left = depth / 128; left; left--, scales += 4 * WIDTH) {
            __m512 low[ROWS], high[ROWS];
            each<ROWS>([&](auto r) ALWAYS { low[r] = high[r] = _mm512_setzero_ps(); });
            for (int64_t k = 0; k < 128; k += 4, panel += 128) {
                fetch_ahead(ready);
                const __m512i a = _mm512_loadu_si512(panel), b = _mm512_loadu_si512(panel + 64);
#pragma GCC unroll 2
                for (int odd = 0; odd < 2; odd++, x += ROWS) {
                    const __m512bh first = widened_pairs(odd ? a : _mm512_slli_epi16(a, 8));
                    const __m512bh second = widened_pairs(odd ? b : _mm512_slli_epi16(b, 8));
                    each<ROWS>([&](auto r) ALWAYS {
                        const __m512bh value = (__m512bh)_mm512_set1_epi32(x[r]);
                        low[r] = _mm512_dpbf16_ps(low[r], value, first);
                        high[r] = _mm512_dpbf16_ps(high[r], value, second);
                    });
                }
            }
            add_whole<ROWS>(scales, (const Floats *)low, (const Floats *)high, result);
        }
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

// The levels of 64 codes below 16.
static INLINE Words levels_of(const uint8_t *levels, Words codes) {
#if defined(__x86_64__)
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)levels));
    return (Words)_mm512_shuffle_epi8(table, (__m512i)codes);
#else
    const uint8x16_t table = read<uint8x16_t>(levels);
    for (int i = 0; i < 4; i++) {
        char *place = (char *)&codes + 16 * i;
        write(place, vqtbl1q_u8(table, read<uint8x16_t>(place)));
    }
    return codes;
#endif
}

template <int BITS, int GROUP, bool HAS_LEVELS = false>
struct DotInt {
#ifdef SIGNED_CODES
    static const bool IS_SHIFTED = BITS == 8 || HAS_LEVELS;  // with their upper bit turned they are signed: zero is 0
#else
    static const bool IS_SHIFTED = false;
#endif
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint8_t *scales, int64_t depth, float *result) {
        const uint32_t mask = BITS == 8 ? 0xffffffffu : 0x0f0f0f0fu, turned = IS_SHIFTED ? 0x80808080u : 0;
        const bool starts_at_zero = IS_SHIFTED || is_affine(ready.scaling);
        const uint32_t *x = ready.x;
        for (int64_t g = 0; g < depth / GROUP; g++) {
            Ints low[ROWS], high[ROWS];
            each<ROWS>([&](auto r) ALWAYS {
                low[r] = high[r] = Ints{} + (starts_at_zero ? 0 : ready.zeros[g * ROWS + r]);
            });
            UpperBits<BITS> upper;
            upper.load(ready, panel);
            for (int64_t k = 0; k < GROUP; k += BITS == 8 ? 4 : 8, panel += 128) {
                fetch_ahead(ready);
                const Words a = read<Words>(panel), b = read<Words>(panel + 64);
#pragma GCC unroll 2
                for (int half = 0; half < (BITS == 8 ? 1 : 2); half++, x += ROWS) {
                    Words c = a >> half * 4 & mask, d = b >> half * 4 & mask;
                    upper.put(c, d);
                    if (HAS_LEVELS) {
                        c = levels_of(ready.levels, c);
                        d = levels_of(ready.levels, d);
                    }
                    c ^= turned;
                    d ^= turned;
                    each<ROWS>([&](auto r) ALWAYS {
                        const Ints value = Ints{} + (int32_t)x[r];
                        add_dots(low[r], value, c);
                        add_dots(high[r], value, d);
                    });
                }
            }
            __builtin_prefetch(scales + scale_bytes(ready.scaling, GROUP, NEST) * g / (NEST / GROUP) + 1024);
            asm volatile("" ::: "memory");  // the sums so far stay in memory: registers are for this group's
            add_scaled<ROWS>(ready, scales_of(scales, ready.scaling, g, GROUP), g, low, high, result);
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
#ifdef INT_DOTS
    if (dots) switch (type) {
            case INT8: return of_rows<DotInt<8, 64>>(rows);
            case INT4: return of_rows<DotInt<4, 32>>(rows);
            case INT8_OF_32: return of_rows<DotInt<8, 32>>(rows);
            case INT6: return of_rows<DotInt<6, 16>>(rows);
            case INT5: return of_rows<DotInt<5, 32>>(rows);
            case LEVELS4: return of_rows<DotInt<4, 32, true>>(rows);
        }
#endif
#ifdef DOTS
    if (dots && type == BF16) return of_rows<DotBf16>(rows);
    if (dots && type == FP8) return of_rows<DotFp8>(rows);
#endif
    switch (type) {
        case FP32: return of_rows<MultiplyFp32>(rows);
        case FP16: return of_rows<MultiplyFp16>(rows);
        case BF16: return of_rows<MultiplyBf16>(rows);
        case FP8: return of_rows<MultiplyFp8>(rows);
        case INT8: return of_rows<MultiplyInt<8, 64>>(rows);
        case INT8_OF_32: return of_rows<MultiplyInt<8, 32>>(rows);
        case INT6: return of_rows<MultiplyInt<6, 16>>(rows);
        case INT5: return of_rows<MultiplyInt<5, 32>>(rows);
        default: return of_rows<MultiplyInt<4, 32>>(rows);
    }
}
