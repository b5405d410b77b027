#if defined(__x86_64__)
#define FASTENC_ISA avx_vnni
#define FASTENC_TARGET "avx2,fma,avxvnni"
#define FASTENC_VECTOR_BYTES 32
#include "int8_kernels.inc"
#endif
