#include "build.h"

namespace fastenc::cuda {

// "CUDA 13.0: 8.0 9.0 10.0", the compute capabilities of the machine code.
std::string build() {
  std::string text = "CUDA " + std::to_string(__CUDACC_VER_MAJOR__) + "." + std::to_string(__CUDACC_VER_MINOR__) + ":";
  for (const int architecture : {__CUDA_ARCH_LIST__})
    text += " " + std::to_string(architecture / 100) + "." + std::to_string(architecture / 10 % 10);
  return text;
}

}  // namespace fastenc::cuda
