#if defined(__x86_64__)
#define FASTENC_ISA avx512
#define FASTENC_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,amx-tile,amx-int8,avx2,fma"
#define FASTENC_VECTOR_BYTES 64
#include "int8_kernels.inc"
#endif
