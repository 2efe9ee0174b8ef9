// Vectors of 16 numbers, in as many registers as they take.
//
// GCC keeps generic vectors that are wider than a register in memory, whatever is done with them. So those of narrow
// registers are structs of several, with the same operators.

typedef float Register __attribute__((vector_size(REGISTER_BYTES)));
typedef int32_t RegisterInts __attribute__((vector_size(REGISTER_BYTES)));
typedef uint32_t RegisterWords __attribute__((vector_size(REGISTER_BYTES)));
static const int64_t REGISTER = REGISTER_BYTES / 4;  // floats
static const bool WIDE_REGISTERS = REGISTER_BYTES == 64;
#if defined(__aarch64__)
static const int REGISTERS = 32;
#else
static const int REGISTERS = WIDE_REGISTERS ? 32 : 16;
#endif

#define ALWAYS __attribute__((always_inline))

// body(0), ..., body(N - 1), spelled out: what it indexes can then lie in registers.
template <int N, class Body>
static INLINE void each(Body body) {
    if constexpr (N > 0) {
        each<N - 1>(body);
        body(std::integral_constant<int, N - 1>{});
    }
}

template <class To, class From>
static INLINE To converted(From x) {
    return __builtin_convertvector(x, To);
}

template <class Mask, class Vector>
static INLINE Vector select(Mask mask, Vector yes, Vector no) {
    return mask ? yes : no;
}

#if REGISTER_BYTES == 64
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
#else
template <class T>
struct Wide {
    typedef T Part __attribute__((vector_size(REGISTER_BYTES)));
    static const int PARTS = 64 / REGISTER_BYTES;
    Part part[PARTS];

    template <class Body>
    static INLINE Wide of(Body body) {
        Wide made;
        each<PARTS>([&](auto i) ALWAYS { made.part[i] = body(i); });
        return made;
    }
    static INLINE Wide filled(T x) {
        return of([&](auto) ALWAYS { return Part{} + x; });
    }
    template <class U>
    explicit INLINE operator Wide<U>() const {  // the same bits
        return Wide<U>::of([&](auto i) ALWAYS { return (typename Wide<U>::Part)part[i]; });
    }
    INLINE T &operator[](int64_t i) { return ((T *)part)[i]; }
    INLINE T operator[](int64_t i) const { return ((const T *)part)[i]; }
    friend INLINE Wide operator-(Wide a) { return of([&](auto i) ALWAYS { return -a.part[i]; }); }
#define OPERATOR(op)                                                                                           \
    friend INLINE Wide operator op(Wide a, Wide b) { return of([&](auto i) ALWAYS { return a.part[i] op b.part[i]; }); } \
    friend INLINE Wide operator op(Wide a, T b) { return a op filled(b); }                                     \
    friend INLINE Wide operator op(T a, Wide b) { return filled(a) op b; }                                     \
    template <class B>                                                                                         \
    INLINE Wide &operator op##=(B b) { return *this = *this op b; }
    OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/) OPERATOR(&) OPERATOR(|) OPERATOR(^) OPERATOR(<<) OPERATOR(>>)
#undef OPERATOR
#define COMPARISON(op)                                                                                         \
    friend INLINE Wide<int32_t> operator op(Wide a, Wide b) {                                                  \
        return Wide<int32_t>::of([&](auto i) ALWAYS { return a.part[i] op b.part[i]; });                       \
    }                                                                                                          \
    friend INLINE Wide<int32_t> operator op(Wide a, T b) { return a op filled(b); }
    COMPARISON(==) COMPARISON(!=) COMPARISON(<) COMPARISON(>) COMPARISON(>=)
#undef COMPARISON
};

// Register by register: copies of whole structs go through memory.
template <class Vector>
static INLINE Vector read(const void *place) {
    if constexpr (std::is_class<Vector>::value)
        return Vector::of([&](auto i) ALWAYS { return ::read<typename Vector::Part>((const char *)place + i * REGISTER_BYTES); });
    else
        return ::read<Vector>(place);
}

template <class T>
static INLINE void write(void *place, T value) {
    ::write(place, value);
}

template <class T>
static INLINE void write(void *place, Wide<T> value) {
    each<Wide<T>::PARTS>([&](auto i) ALWAYS { ::write((char *)place + i * REGISTER_BYTES, value.part[i]); });
}

typedef Wide<float> Floats;
typedef Wide<int32_t> Ints;
typedef Wide<uint32_t> Words;

template <class To, class T>
static INLINE To converted(Wide<T> x) {
    return To::of([&](auto i) ALWAYS { return __builtin_convertvector(x.part[i], typename To::Part); });
}

template <class T>
static INLINE Wide<T> select(Ints mask, Wide<T> yes, Wide<T> no) {
    return Wide<T>::of([&](auto i) ALWAYS { return mask.part[i] ? yes.part[i] : no.part[i]; });
}
#endif

// a * b + c, rounded once where the processor has such an instruction. Spelled out where results must be the same to the bit
// in several kernels: compilers choose by themselves which products they round.
static INLINE Register multiplied_and_added(Register a, Register b, Register c) {
#if REGISTER_BYTES == 64
    return (Register)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif REGISTER_BYTES == 32
    return (Register)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Register)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

#if REGISTER_BYTES != 64
static INLINE Floats multiplied_and_added(Floats a, Floats b, Floats c) {
    return Floats::of([&](auto i) ALWAYS { return multiplied_and_added(a.part[i], b.part[i], c.part[i]); });
}
#endif

// Numbers of 1 or 2 bytes as those of a register.
template <class Part, class Small>
static INLINE Part register_widened(const Small *from) {
#if REGISTER_BYTES == 64  // GCC takes four instructions for the generic one
    if constexpr (sizeof(Small) == 2) return (Part)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    const __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    return (Part)(std::is_signed<Small>::value ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif REGISTER_BYTES == 32
    if constexpr (sizeof(Small) == 2) return (Part)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)from);
    return (Part)(std::is_signed<Small>::value ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    typedef Small Smalls __attribute__((vector_size(REGISTER * sizeof(Small))));
    return __builtin_convertvector(read<Smalls>(from), Part);
#endif
}

static INLINE Register register_from_fp16(RegisterWords bits) {
    const RegisterWords rest = bits & 0x7fffu;
    const RegisterWords finite = (RegisterWords)((Register)(rest << 13) * 0x1p112f), other = rest << 13 | 0x7f800000u;
    return (Register)(select(rest >= 0x7c00u, other, finite) | (bits & 0x8000u) << 16);
}

static INLINE Register register_from_fp16(const uint16_t *place) {
#if REGISTER_BYTES == 64
    return (Register)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)place));
#elif REGISTER_BYTES == 32
    return (Register)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)place));
#else
    return register_from_fp16(register_widened<RegisterWords>(place));
#endif
}

// The same of 16 numbers. body(first of a register's).
template <class Vector, class Body>
static INLINE Vector by_registers(Body body) {
#if REGISTER_BYTES == 64
    return (Vector)body(std::integral_constant<int, 0>{});
#else
    return Vector::of([&](auto i) ALWAYS { return (typename Vector::Part)body(std::integral_constant<int, i * REGISTER>{}); });
#endif
}

template <class Byte>
static INLINE Floats vectors_from_bytes(const uint8_t *place) {
    return by_registers<Floats>([&](auto i) ALWAYS {
        return converted<Register>(register_widened<RegisterInts>((const Byte *)place + i));
    });
}

static INLINE Floats vectors_from_bf16(const uint16_t *place) {
    return by_registers<Floats>([&](auto i) ALWAYS { return (Register)(register_widened<RegisterWords>(place + i) << 16); });
}

static INLINE Floats vectors_from_fp16(const uint16_t *place) {
    return by_registers<Floats>([&](auto i) ALWAYS { return register_from_fp16(place + i); });
}

static INLINE Floats vectors_from_e4m3(const uint8_t *place) {
    return by_registers<Floats>([&](auto i) ALWAYS {
        const RegisterWords bits = register_widened<RegisterWords>(place + i), rest = bits & 0x7fu;
        const RegisterWords finite = (RegisterWords)((Register)(rest << 20) * 0x1p120f), nan = RegisterWords{} + 0x7fc00000u;
        return (Register)(select(rest == 0x7fu, nan, finite) | (bits & 0x80u) << 24);
    });
}

static INLINE Floats vectors_from_e5m2(const uint8_t *place) {
    return by_registers<Floats>(
        [&](auto i) ALWAYS { return register_from_fp16(register_widened<RegisterWords>(place + i) << 8); });
}

// Numbers from -128 to 127 as bytes.
static INLINE void write_bytes(int8_t *place, Ints numbers) {
#if REGISTER_BYTES == 64
    _mm_storeu_si128((__m128i *)place, _mm512_cvtepi32_epi8((__m512i)numbers));
#else
    for (int64_t i = 0; i < LANES; i++) place[i] = (int8_t)numbers[i];
#endif
}
