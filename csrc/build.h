// What the shared library of the ops offers beside them; python/module.cpp binds it. The types are plain, because the
// two may be compiled by different compilers.
#pragma once

#define FASTENC_EXPORT __attribute__((visibility("default")))

namespace fastenc {

// What was compiled, and what of it this processor uses. Text is null where there is nothing.
struct BuildInfo {
  const char* compiler;
  const char* torch_stable_abi;
  const char* cuda;
  const char* int8_products;
  const char* usable_instruction_sets;
  const char* instruction_set;
  int panel_columns;  // of a packed weight
  bool intel_processor, bfloat16_units, bfloat16_dot_products, bfloat16_panels, bfloat16_tiles;
};

// The build that the library is of. A module of another build may take other types, so it asks this first.
FASTENC_EXPORT const char* build_id();
FASTENC_EXPORT BuildInfo build_info();
// As set_isa (isa.h).
FASTENC_EXPORT bool set_instruction_set(const char* name);

}  // namespace fastenc
