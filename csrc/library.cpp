// The Python extension module: says what was compiled and chooses the instruction set. Each op registers itself in its
// own file; the schemas are defined in Python (fastenc.ops.library).
// This file includes no torch header: the copy of pybind11 in torch 2.11 does not compile under the stable ABI alone.
#undef TORCH_TARGET_VERSION
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#ifdef USE_CUDA
#include "cuda/build.h"
#endif
#include "isa.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.doc() = "fastenc's compiled ops";
  m.def(
      "build_info",
      [] {
        py::dict info;
        info["compiler"] = __VERSION__;
        info["torch_stable_abi"] = "2.11";
#ifdef USE_CUDA
        info["cuda"] = fastenc::cuda::build();
#else
        info["cuda"] = py::none();
#endif
        info["intel_processor"] = fastenc::is_intel();
        info["bfloat16_units"] = fastenc::has_bf16_units();
        info["bfloat16_dot_products"] = fastenc::has_bf16_dot_products();
        info["int8_products"] = fastenc::int8_instructions();
        info["usable_instruction_sets"] = fastenc::usable_isas();
        info["instruction_set"] = fastenc::isa_name(fastenc::isa());
        return info;
      },
      "What this extension was compiled with and what it uses on this processor.");
  m.def(
      "set_instruction_set",
      [](const std::string& name) {
        if (!fastenc::set_isa(name.c_str()))
          throw std::invalid_argument("instruction set must be one of '" + std::string(fastenc::usable_isas()) +
                                      "', got '" + name + "'");
      },
      py::arg("name"), "Use another of the instruction sets that this processor has (for tests and benchmarks).");
}
