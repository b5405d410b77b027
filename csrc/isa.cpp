#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <string>

#if FASTENC_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif FASTENC_ARM && defined(__APPLE__)
#include <sys/sysctl.h>
#elif FASTENC_ARM
#include <sys/auxv.h>
#endif

namespace fastenc {
namespace {

#if FASTENC_ARM
bool has_arm_bf16() {
#if defined(__APPLE__)
  int present = 0;
  size_t size = sizeof present;
  return !sysctlbyname("hw.optional.arm.FEAT_BF16", &present, &size, nullptr, 0) && present;
#else
  return getauxval(AT_HWCAP2) >> 14 & 1;  // HWCAP2_BF16, which glibc 2.28 does not define
#endif
}
#endif

bool runs_here(Isa isa) {
#if FASTENC_ARM
  return isa == Isa::neon || (isa == Isa::neon_bf16 && has_arm_bf16());
#elif FASTENC_X86
  if (isa == Isa::avx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("fma");
  if (isa == Isa::avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return isa == Isa::baseline;
}

constexpr Isa kBestFirst[] = {Isa::neon_bf16, Isa::neon, Isa::avx512, Isa::avx2, Isa::baseline};

// Leaf 7 of CPUID.
struct Extensions {
  bool avx512_vnni = false, avx_vnni = false, avx512_bf16 = false, amx_bf16 = false, amx_int8 = false;
};

Extensions extensions() {
  Extensions found;
#if FASTENC_X86
  unsigned a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    const bool tile = d >> 24 & 1;
    found.avx512_vnni = c >> 11 & 1;
    found.amx_bf16 = tile && (d >> 22 & 1);
    found.amx_int8 = tile && (d >> 25 & 1);
  }
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    found.avx_vnni = a >> 4 & 1;
    found.avx512_bf16 = a >> 5 & 1;
  }
#endif
  return found;
}

// Linux lets a process use AMX tiles only after it asked: they enlarge the state that is saved for each thread.
bool may_use_tiles() {
#if FASTENC_X86 && defined(SYS_arch_prctl)
  constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

Isa best() {
  for (Isa isa : kBestFirst)
    if (runs_here(isa)) return isa;
  return Isa::baseline;
}

Isa& chosen() {
  static Isa value = [] {
    const char* forced = std::getenv("FASTENC_ISA");
    for (Isa isa : kBestFirst)
      if (forced && !std::strcmp(forced, isa_name(isa)) && runs_here(isa)) return isa;
    return best();
  }();
  return value;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    case Isa::neon:
      return "neon";
    case Isa::neon_bf16:
      return "neon_bf16";
    default:
      return "baseline";
  }
}

Isa isa() { return chosen(); }

bool set_isa(const char* name) {
  for (Isa isa : kBestFirst)
    if (!std::strcmp(name, isa_name(isa)) && runs_here(isa)) {
      chosen() = isa;
      return true;
    }
  return false;
}

const char* usable_isas() {
  static const std::string names = [] {
    std::string all;
    for (Isa isa : kBestFirst)
      if (runs_here(isa)) all = isa_name(isa) + (all.empty() ? "" : " " + all);
    return all;
  }();
  return names.c_str();
}

bool is_intel() {
#if FASTENC_X86
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

bool has_bf16_units() {
  if (std::getenv("FASTENC_ISA")) return false;  // a forced set stands for a processor without bfloat16 units
  return runs_here(Isa::neon_bf16) || (runs_here(Isa::avx512) && (extensions().amx_bf16 || extensions().avx512_bf16));
}

bool has_bf16_dot_products() {
  if (isa() == Isa::neon_bf16) return true;
  static const bool usable = has_bf16_units() && extensions().avx512_bf16;
  return usable && isa() == Isa::avx512;
}

bool has_bf16_panels() { return isa() == Isa::avx512 && has_bf16_dot_products(); }

bool has_bf16_tiles() {
  static const bool usable = has_bf16_units() && extensions().amx_bf16 && may_use_tiles();
  return usable && has_bf16_panels();
}

bool has_int8_products() {
  static const bool has_avx512_vnni = extensions().avx512_vnni;
  return isa() == Isa::avx2 || (isa() == Isa::avx512 && has_avx512_vnni);
}

bool has_avx_vnni() {
  static const bool usable = extensions().avx_vnni;
  return usable && isa() == Isa::avx2;
}

bool has_int8_tiles() {
  static const bool usable = extensions().avx512_vnni && extensions().amx_int8 && may_use_tiles();
  return usable && isa() == Isa::avx512;
}

const char* int8_instructions() {
  if (!has_int8_products()) return nullptr;
  if (isa() == Isa::avx512) return has_int8_tiles() ? "AMX" : "AVX512-VNNI";
  return has_avx_vnni() ? "AVX-VNNI" : "AVX2";
}

}  // namespace fastenc
