#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define FASTENC_ISA avx2
#define FASTENC_VECTOR_BYTES 32
#include "kernels.inc"
#endif
