// Instruction sets of this processor. Asked for directly: what __builtin_cpu_supports() needs is not filled in by every
// compiler's run-time library.

#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Bits of CPUID by leaf, subleaf and register.
static inline bool has_bits(unsigned leaf, unsigned subleaf, int index, unsigned bits) {
    unsigned found[4];
    return __get_cpuid_count(leaf, subleaf, &found[0], &found[1], &found[2], &found[3]) && (found[index] & bits) == bits;
}

// Whether the system saves these registers, too: bits of XCR0.
static inline bool system_saves(unsigned bits) {
    if (!has_bits(1, 0, 2, 1u << 27)) return false;  // OSXSAVE
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & bits) == bits;
}

static inline bool has_avx2() {
    return system_saves(0x6) && has_bits(1, 0, 2, 1u << 12 | 1u << 29) && has_bits(7, 0, 1, 1u << 5);  // FMA, F16C, AVX2
}

static inline bool has_avx_vnni() { return has_avx2() && has_bits(7, 1, 0, 1u << 4); }

static inline bool has_avx512() {
#if defined(__APPLE__)
    const bool saves = true;  // macOS begins to save these registers at their first use
#else
    const bool saves = system_saves(0xe6);
#endif
    return saves && has_avx2() && has_bits(7, 0, 1, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31);  // F, DQ, BW, VL
}

static inline bool has_avx512_vnni() { return has_avx512() && has_bits(7, 0, 2, 1u << 11); }
static inline bool has_avx512_bf16() { return has_avx512_vnni() && has_bits(7, 1, 0, 1u << 5); }

// Linux lends the registers of tiles to a process that asks.
static inline bool has_amx() {
#if defined(__linux__)
    const long request = 0x1023, tiles = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return has_avx512_bf16() && system_saves(0x60000) && has_bits(7, 0, 3, 1u << 22 | 1u << 24 | 1u << 25) &&  // BF16, TILE, INT8
           !syscall(SYS_arch_prctl, request, tiles);
#else
    return false;
#endif
}

#elif defined(__aarch64__)
#if defined(__APPLE__)
#include <sys/sysctl.h>

static inline bool has(const char *name) {
    int value = 0;
    size_t size = sizeof(value);
    return !sysctlbyname(name, &value, &size, nullptr, 0) && value;
}

static inline bool has_dotprod() { return has("hw.optional.arm.FEAT_DotProd"); }
static inline bool has_i8mm() { return has_dotprod() && has("hw.optional.arm.FEAT_I8MM"); }
#elif defined(__linux__)
#include <sys/auxv.h>

static inline bool has_dotprod() { return getauxval(AT_HWCAP) & 1ul << 20; }                 // HWCAP_ASIMDDP
static inline bool has_i8mm() { return has_dotprod() && getauxval(AT_HWCAP2) & 1ul << 13; }  // HWCAP2_I8MM
#else
static inline bool has_dotprod() { return false; }
static inline bool has_i8mm() { return false; }
#endif
#endif
