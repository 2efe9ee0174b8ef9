// Products of up to ROWS_OF_BLOCK rows with a panel of weights (panels.h), their sums held in registers.
//
// Sums run over k in order whatever the number of rows: a row's result does not depend on its neighbours.

static INLINE Floats as_floats(Floats numbers) { return numbers; }
static INLINE Floats as_floats(Ints numbers) { return converted<Floats>(numbers); }

struct GroupScales {  // of a panel's columns, in their order
    Floats low, high, low_added, high_added;
};

static INLINE GroupScales scales_of(const uint8_t *scales, int scaling, int64_t g, int64_t group) {
    const int64_t in_nest = NEST / group, size = scale_bytes(scaling, group, NEST);
    const auto halves = [&](const uint8_t *place) ALWAYS { return vectors_from_fp16((const uint16_t *)place); };
    const uint8_t *nest = scales + g / in_nest * size, *place = nest + 2 * WIDTH + g % in_nest * WIDTH;
    switch (scaling) {
        case FP32_SCALES:
            scales += g * 128;
            return {read<Floats>(scales), read<Floats>(scales + 64), Floats{}, Floats{}};
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
    const uint32_t *x;     // [steps][rows] floats, pairs of bf16 or four int8; of tiles [tiles][rows][words]
    const float *scales;   // [groups][rows]
    // [groups][rows] what the weights' zero point adds to a group's sum, negated; of affine scales the sum of x, a float.
    const int32_t *zeros;
    int32_t scaling;
    const uint8_t *levels;  // of codes that are numbers of levels
    int64_t rows;
};

// result [WIDTH] += the sums of a group times the scales of weights and activations, which are those at `place`.
template <bool AFFINE, class Sum>
static INLINE void add_scaled_row(const Ready &ready, const GroupScales &scales, int64_t place, Sum low, Sum high,
                                  float *result) {
    const Floats scale = Floats{} + ready.scales[place], x = Floats{} + (AFFINE ? read<float>(ready.zeros + place) : 0.0f);
    const auto add = [&](float *to, Floats sum, Floats own, Floats added) ALWAYS {
        const Floats result = read<Floats>(to);
        write(to, AFFINE ? multiplied_and_added(multiplied_and_added(sum, own, added * x), scale, result)
                         : multiplied_and_added(sum, own * scale, result));
    };
    add(result, as_floats(low), scales.low, scales.low_added);
    add(result + LANES, as_floats(high), scales.high, scales.high_added);
}

// The same of the rows of group g.
template <int ROWS, class Sum>
static INLINE void add_scaled(const Ready &ready, const GroupScales &scales, int64_t g, const Sum *low, const Sum *high,
                              float *result) {
    const auto add = [&](auto affine) ALWAYS {
        each<ROWS>([&](auto r) ALWAYS {
            add_scaled_row<affine>(ready, scales, g * ROWS + r, low[r], high[r], result + r * WIDTH);
        });
    };
    is_affine(ready.scaling) ? add(std::true_type{}) : add(std::false_type{});
}

static INLINE void fetch_ahead(Ready &ready) {
    __builtin_prefetch(ready.ahead, 0, 2);
    __builtin_prefetch(ready.ahead + ready.pace / 2, 0, 2);
    ready.ahead += ready.pace;
}

// The same for several steps of 128, which share lines if their pace is slow.
static INLINE void fetch_ahead(Ready &ready, int64_t steps) {
    const uint8_t *end = ready.ahead + steps * ready.pace;
    for (; ready.ahead < end; ready.ahead += 64) __builtin_prefetch(ready.ahead, 0, 2);
    ready.ahead = end;
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
    INLINE void store(float *sums) const {
        each<ROWS>([&](auto r) ALWAYS {
            write(sums + r * WIDTH, low[r]);
            write(sums + r * WIDTH + LANES, high[r]);
        });
    }
    INLINE void add(const uint32_t *x, Floats a, Floats b) {
        each<ROWS>([&](auto r) ALWAYS {
            const float value = as_float(x[r]);
            low[r] += a * value;
            high[r] += b * value;
        });
    }
};

// Adds to `sums` [rows][WIDTH].
typedef void (*Multiply)(Ready ready, const uint8_t *panel, const uint8_t *scales, int64_t depth, float *sums);

// Weights of a register's columns, for some k's that lie together.
struct OfFp32 {
    static const int TOGETHER = 1, BYTES = 128;  // k's, and the bytes of all columns
    template <int I>
    static INLINE Register at(const uint8_t *panel, int number) {
        return read<Register>(panel + number * REGISTER_BYTES);
    }
};

struct OfFp16 {
    static const int TOGETHER = 1, BYTES = 64;
    template <int I>
    static INLINE Register at(const uint8_t *panel, int number) {
        return register_from_fp16((const uint16_t *)panel + number * REGISTER);
    }
};

struct OfBf16 {
    static const int TOGETHER = 2, BYTES = 128;
    template <int I>
    static INLINE Register at(const uint8_t *panel, int number) {
        const RegisterWords words = read<RegisterWords>(panel + number * REGISTER_BYTES);
        return (Register)(I ? words & 0xffff0000u : words << 16);
    }
};

struct OfFp8 {  // e4m3, see `from_fp8`
    static const int TOGETHER = 4, BYTES = 128;
    template <int I>
    static INLINE Register at(const uint8_t *panel, int number) {
        const RegisterWords words = read<RegisterWords>(panel + number * REGISTER_BYTES);
        return (Register)((RegisterWords)((RegisterInts)(words << (24 - 8 * I)) >> 4) & 0x87f00000u) * 0x1p120f;
    }
};

// How many registers of each row's sums are kept at a time; the panel is gone through again for the others.
static constexpr int registers_of(int rows) {
    const int all = WIDTH / REGISTER;
    return rows * all < REGISTERS * 3 / 4 ? all : rows * all <= REGISTERS * 3 / 2 ? all / 2 : all / 4;
}

static const int64_t AGAIN = 64;  // k's that are gone through again at a time: the nearest cache still has them

template <class Weights>
struct MultiplyFloats {
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint8_t *, int64_t depth, float *result) {
        constexpr int ALL = WIDTH / REGISTER, COUNT = registers_of(ROWS);
        constexpr bool IS_ONCE = COUNT == ALL;
        const int64_t at_once = IS_ONCE ? depth : AGAIN;
        for (int64_t from = 0; from < depth; from += at_once) {
            const int64_t size = depth - from < at_once ? depth - from : at_once;
            each<ALL / COUNT>([&](auto turn) ALWAYS {
                Register sums[ROWS * COUNT];
                const auto place = [&](int64_t r, int64_t j) ALWAYS { return result + r * WIDTH + (turn * COUNT + j) * REGISTER; };
                each<ROWS>([&](auto r) ALWAYS {
                    each<COUNT>([&](auto j) ALWAYS { sums[r * COUNT + j] = read<Register>(place(r, j)); });
                });
                const uint32_t *x = ready.x + from * ROWS;
                const uint8_t *weights = panel + from / Weights::TOGETHER * Weights::BYTES;
                for (int64_t k = 0; k < size; k += Weights::TOGETHER, weights += Weights::BYTES, x += Weights::TOGETHER * ROWS) {
                    if (turn == 0 && k * Weights::BYTES / Weights::TOGETHER % 128 == 0) fetch_ahead(ready);
                    each<Weights::TOGETHER>([&](auto i) ALWAYS {
                        each<COUNT>([&](auto j) ALWAYS {
                            const Register numbers = Weights::template at<i>(weights, turn * COUNT + j);
                            each<ROWS>([&](auto r) ALWAYS { sums[r * COUNT + j] += numbers * as_float(x[i * ROWS + r]); });
                        });
                    });
                }
                each<ROWS>([&](auto r) ALWAYS {
                    each<COUNT>([&](auto j) ALWAYS { write(place(r, j), sums[r * COUNT + j]); });
                });
            });
        }
    }
};

// result [ROWS][WIDTH] += sums times the scales [WIDTH] fp32.
template <int ROWS>
static INLINE void add_whole(const uint8_t *scales, const Floats *low, const Floats *high, float *result) {
    const Floats first = read<Floats>(scales), second = read<Floats>(scales + 4 * LANES);
    each<ROWS>([&](auto r) ALWAYS {
        float *place = result + r * WIDTH;
        write(place, multiplied_and_added(low[r], first, read<Floats>(place)));
        write(place + LANES, multiplied_and_added(high[r], second, read<Floats>(place + LANES)));
    });
}

struct MultiplyFp8 {
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint8_t *scales, int64_t depth, float *result) {
        const int64_t group = 128;
        for (int64_t k = 0; k < depth; k += group, scales += 4 * WIDTH, panel += group * WIDTH, ready.x += group * ROWS) {
            Sums<ROWS> sums;
            float own[ROWS * WIDTH] = {};
            MultiplyFloats<OfFp8>::run<ROWS>(ready, panel, nullptr, group, own);
            ready.ahead += ready.pace * group / 4;
            sums.load(own);
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
    INLINE void load(const uint8_t *&panel) {
        if (!ANY) return;
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
            if (upper.ANY) fetch_ahead(ready);
            upper.load(panel);
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

#include "multiply_dots.h"
#include "multiply_tiles.h"

template <class Kernel, int ROWS = 1>
static Multiply of_rows(int64_t rows) {
    if constexpr (ROWS < ROWS_OF_BLOCK)
        return rows == ROWS ? Kernel::template run<ROWS> : of_rows<Kernel, ROWS + 1>(rows);
    else
        return Kernel::template run<ROWS>;
}

static bool by_tiles(int type, bool dots, int64_t rows) {
#ifdef TILES
    return has_tiles && dots && (!is_rounded(type) || rows >= FEW_FOR_TILES);
#else
    (void)type, (void)dots, (void)rows;
    return false;
#endif
}

// Words of a row's activations that lie together: those of a group of codes, or of a tile.
static int64_t words_together(int type, bool dots, bool tiles) {
    return dots && is_rounded(type) ? shape_of(type).group / 4 : tiles ? 16 : 1;
}

// Most rows of a block. Those of codes are multiplied a few at a time, see `DotInt`.
static int64_t rows_of_block(int type, bool dots, bool tiles) {
#ifdef DOT_ROWS
    if (!tiles && dots && is_rounded(type)) return 4 * DOT_ROWS;
#endif
    (void)type, (void)dots;
    return tiles ? 32 : ROWS_OF_BLOCK;
}

static Multiply kernel_of(int type, bool dots, int64_t rows, bool tiles) {
    (void)dots, (void)tiles;
#ifdef TILES
    if (tiles) return rows > TILE_ROWS ? of_tiles<true>(type) : of_tiles<false>(type);
#endif
#if defined(INT_DOTS) || defined(SHORT_DOTS)
    if (dots) switch (type) {
            case INT8: return DotInt<8, 64>::run;
            case INT4: return DotInt<4, 32>::run;
            case INT8_OF_32: return DotInt<8, 32>::run;
            case INT6: return DotInt<6, 16>::run;
            case INT5: return DotInt<5, 32>::run;
            case LEVELS4: return DotInt<4, 32, true>::run;
            case LEVELS4_OF_16: return DotInt<4, 16, true>::run;
        }
#endif
#ifdef DOTS
    if (dots && type == BF16) return of_rows<DotBf16>(rows);
    if (dots && type == FP8) return of_rows<DotFp8>(rows);
#endif
    switch (type) {
        case FP32: return of_rows<MultiplyFloats<OfFp32>>(rows);
        case FP16: return of_rows<MultiplyFloats<OfFp16>>(rows);
        case BF16: return of_rows<MultiplyFloats<OfBf16>>(rows);
        case FP8: return of_rows<MultiplyFp8>(rows);
        case INT8: return of_rows<MultiplyInt<8, 64>>(rows);
        case INT8_OF_32: return of_rows<MultiplyInt<8, 32>>(rows);
        case INT6: return of_rows<MultiplyInt<6, 16>>(rows);
        case INT5: return of_rows<MultiplyInt<5, 32>>(rows);
        default: return of_rows<MultiplyInt<4, 32>>(rows);
    }
}
