#if defined(__x86_64__)
#pragma GCC target("avx2,fma,avxvnni")
#define FASTENC_ISA avx2
#define FASTENC_VECTOR_BYTES 32
#include "int8_kernels.inc"
#endif
