#if defined(__x86_64__)
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,prefer-vector-width=512")
#define ISA_NAME "AVX-512 VNNI"
#define ISA avx512_vnni
#define ROWS_OF_BLOCK 14
#define INT_DOTS
#include "isa.h"
#endif
