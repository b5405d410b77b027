#if defined(__x86_64__)
// avx512bf16 and amx are for their intrinsics alone, which run where the processor has them; the compiler has no other
// use for them.
#define FASTENC_ISA avx512
#define FASTENC_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16,avx2,fma"
#define FASTENC_VECTOR_BYTES 64
#include "kernels.inc"
#endif
