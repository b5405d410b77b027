#include "build.h"

#ifdef USE_CUDA
#include <string>

#include "cuda/build.h"
#endif
#include "isa.h"
#include "packed_weights.h"

namespace fastenc {

const char* build_id() { return FASTENC_BUILD_ID; }

BuildInfo build_info() {
  BuildInfo info{};
#if defined(__clang__)
  info.compiler = __VERSION__;  // "Clang 19.1.7 ..."
#else
  info.compiler = "GCC " __VERSION__;
#endif
  info.torch_stable_abi = "2.11";
#ifdef USE_CUDA
  static const std::string cuda = cuda::build();
  info.cuda = cuda.c_str();
#endif
  info.int8_products = int8_instructions();
  info.usable_instruction_sets = usable_isas();
  info.instruction_set = isa_name(isa());
  info.panel_columns = static_cast<int>(panel_columns(isa()));
  info.intel_processor = is_intel();
  info.bfloat16_units = has_bf16_units();
  info.bfloat16_dot_products = has_bf16_dot_products();
  info.bfloat16_panels = has_bf16_panels();
  info.bfloat16_tiles = has_bf16_tiles();
  return info;
}

bool set_instruction_set(const char* name) { return set_isa(name); }

}  // namespace fastenc
