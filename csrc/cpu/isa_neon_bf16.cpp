#if defined(__aarch64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("bf16"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+bf16")
#endif
#define FASTENC_ISA neon_bf16
#define FASTENC_VECTOR_BYTES 16
#define FASTENC_NEON_BF16 1
#include "kernels.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
