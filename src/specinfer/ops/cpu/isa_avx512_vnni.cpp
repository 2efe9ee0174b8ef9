#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,prefer-vector-width=512")
#endif
#define ISA_NAME "AVX-512 VNNI"
#define ISA avx512_vnni
#define ROWS_OF_BLOCK 14
#define REGISTER_BYTES 64
#define INT_DOTS
#define DOT_ROWS 6  // whose sums of a group, and of all groups, take 24 of 32 registers
#include "isa.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
