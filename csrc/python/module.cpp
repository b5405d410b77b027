// The module of one Python version: binds what is not an op. The ops are in the shared library, which this module is
// linked with; their schemas are defined in Python (fastenc.ops.library).
// This file includes no torch header: the copy of pybind11 in torch 2.11 does not compile under the stable ABI alone.
#undef TORCH_TARGET_VERSION
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "build.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.doc() = "What fastenc's compiled ops were built with and which instructions they use";
  m.attr("BUILD_ID") = FASTENC_BUILD_ID;
  m.def("library_build_id", fastenc::build_id, "The build of the library of ops; this module's is BUILD_ID.");
  m.def(
      "build_info",
      [] {
        const fastenc::BuildInfo built = fastenc::build_info();
        py::dict info;
        info["compiler"] = built.compiler;
        info["torch_stable_abi"] = built.torch_stable_abi;
        info["cuda"] = built.cuda;
        info["intel_processor"] = built.intel_processor;
        info["bfloat16_units"] = built.bfloat16_units;
        info["bfloat16_dot_products"] = built.bfloat16_dot_products;
        info["bfloat16_panels"] = built.bfloat16_panels;
        info["bfloat16_tiles"] = built.bfloat16_tiles;
        info["int8_products"] = built.int8_products;
        info["usable_instruction_sets"] = built.usable_instruction_sets;
        info["instruction_set"] = built.instruction_set;
        info["panel_columns"] = built.panel_columns;
        return info;
      },
      "What the ops were compiled with and what they use on this processor.");
  m.def(
      "set_instruction_set",
      [](const std::string& name) {
        if (!fastenc::set_instruction_set(name.c_str()))
          throw std::invalid_argument(
              "instruction set must be one of '" + std::string(fastenc::build_info().usable_instruction_sets) +
              "', got '" + name + "'");
      },
      py::arg("name"), "Use another of the instruction sets that this processor has (for tests and benchmarks).");
}
