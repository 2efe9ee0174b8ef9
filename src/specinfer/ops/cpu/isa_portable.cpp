// Whatever the compiler makes of it: SSE2 on x86-64, NEON on ARM.
#define ISA_NAME "portable code"
#define ISA portable
#define ROWS_OF_BLOCK 3
#define REGISTER_BYTES 16
#include "isa.h"
