#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#endif
#define ISA_NAME "AVX-512"
#define ISA avx512
#define ROWS_OF_BLOCK 14  // two registers of sums for each, of 32
#define REGISTER_BYTES 64
#include "isa.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
