// What the CUDA side was compiled by and for.
#pragma once
#include <string>

namespace fastenc::cuda {

std::string build();

}  // namespace fastenc::cuda
