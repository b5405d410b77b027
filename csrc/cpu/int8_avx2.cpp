#if defined(__x86_64__)
#define FASTENC_ISA avx2
#define FASTENC_TARGET "avx2,fma"
#define FASTENC_VECTOR_BYTES 32
#define FASTENC_INT8_PAIRS 1
#include "int8_kernels.inc"
#endif
