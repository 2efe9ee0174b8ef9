#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,amx-tile,amx-int8,amx-bf16"))), apply_to = function)
#elif __GNUC__ > 10
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,amx-tile,amx-int8,amx-bf16,prefer-vector-width=512")
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,prefer-vector-width=512")
#endif
#define ISA_NAME "AVX-512 VNNI BF16"
#define ISA avx512_bf16
#define ROWS_OF_BLOCK 14
#define REGISTER_BYTES 64
#define INT_DOTS
#define DOT_ROWS 6  // whose sums of a group, and of all groups, take 24 of 32 registers
#define DOTS
#if defined(__linux__) && (defined(__clang__) || __GNUC__ > 10)
#define TILES  // used where `has_tiles` is set
#endif
#include "isa.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
