#if defined(__aarch64__)
#define FASTENC_ISA neon
#define FASTENC_VECTOR_BYTES 16
#include "kernels.inc"
#endif
