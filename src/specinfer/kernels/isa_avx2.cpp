#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define ISA_NAME "AVX2"
#define ISA avx2
#define ROWS_OF_BLOCK 3
#include "isa.h"
#endif
