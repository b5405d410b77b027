// The instruction sets that the vector code is compiled for, and the choice among them at run time.
#pragma once

namespace fastenc {

// One processor family has some of them: x86-64 the first three, AArch64 the last two.
enum class Isa { baseline, avx2, avx512, neon, neon_bf16 };

// The best set that this processor has; the environment variable FASTENC_ISA forces a lower one.
Isa isa();
// Chooses `name` from now on; returns false if it is unknown or this processor lacks it.
bool set_isa(const char* name);
const char* isa_name(Isa isa);
// "baseline", "baseline avx2", ...: what this binary holds and this processor can run.
const char* usable_isas();
// Whether Intel made this processor.
bool is_intel();
// Whether it has instructions for products of bfloat16.
bool has_bf16_units();
// Whether the chosen set has products of pairs of bfloat16: AVX512-BF16, or Arm's bfmmla.
bool has_bf16_dot_products();
// Whether weights of bfloat16 are packed in pairs, which AVX512-BF16 multiplies.
bool has_bf16_panels();
// Whether the chosen set has AMX for bfloat16 too. The operating system must grant its use.
bool has_bf16_tiles();
// Whether the chosen set has products of 8 bits: AVX2, or AVX-512 with VNNI.
bool has_int8_products();
// Whether they are AVX-VNNI's.
bool has_avx_vnni();
// Whether it can use AMX for them.
bool has_int8_tiles();
// "AMX", "AVX512-VNNI", "AVX-VNNI", "AVX2" or null.
const char* int8_instructions();

}  // namespace fastenc

#if defined(__x86_64__)
#define FASTENC_X86 1
#elif defined(__aarch64__)
#define FASTENC_ARM 1
#endif

// Declares the given functions once for each instruction set's namespace.
#if FASTENC_X86
#define FASTENC_FOR_EACH_ISA(...) \
  namespace baseline {            \
  __VA_ARGS__                     \
  }                               \
  namespace avx2 {                \
  __VA_ARGS__                     \
  }                               \
  namespace avx512 {              \
  __VA_ARGS__                     \
  }
// Calls fastenc::<isa>::function(arguments).
#define FASTENC_CALL(function, ...)                       \
  do {                                                    \
    switch (::fastenc::isa()) {                           \
      case ::fastenc::Isa::avx512:                        \
        ::fastenc::avx512::function(__VA_ARGS__);         \
        break;                                            \
      case ::fastenc::Isa::avx2:                          \
        ::fastenc::avx2::function(__VA_ARGS__);           \
        break;                                            \
      default:                                            \
        ::fastenc::baseline::function(__VA_ARGS__);       \
    }                                                     \
  } while (0)
#elif FASTENC_ARM
#define FASTENC_FOR_EACH_ISA(...) \
  namespace neon {                \
  __VA_ARGS__                     \
  }                               \
  namespace neon_bf16 {           \
  __VA_ARGS__                     \
  }
#define FASTENC_CALL(function, ...)                     \
  do {                                                  \
    if (::fastenc::isa() == ::fastenc::Isa::neon_bf16)  \
      ::fastenc::neon_bf16::function(__VA_ARGS__);      \
    else                                                \
      ::fastenc::neon::function(__VA_ARGS__);           \
  } while (0)
#else
#define FASTENC_FOR_EACH_ISA(...) \
  namespace baseline {            \
  __VA_ARGS__                     \
  }
#define FASTENC_CALL(function, ...) ::fastenc::baseline::function(__VA_ARGS__)
#endif
