// The activations that kernels apply, numbered as in the ops' schemas.
#pragma once

namespace fastenc {

enum class Activation : int { gelu = 0, gelu_tanh = 1, silu = 2, relu = 3 };

}  // namespace fastenc
