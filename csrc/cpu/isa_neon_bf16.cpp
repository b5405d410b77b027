#if defined(__aarch64__)
#define FASTENC_ISA neon_bf16
#if defined(__clang__)
#define FASTENC_TARGET "bf16"
#else
#define FASTENC_TARGET "arch=armv8.2-a+bf16"
#endif
#define FASTENC_VECTOR_BYTES 16
#define FASTENC_NEON_BF16 1
#include "kernels.inc"
#endif
