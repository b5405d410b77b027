// A layer in inference on a CPU, as encoder_layer.h says, with its four products in 8 bits. Between them lie floats; rows
// are quantised where the operation before a product ends, while they are in the cache.
#pragma once
#include "activation.h"
#include "int8_linear.h"

namespace fastenc {

FASTENC_DECLARE_INT8(
    // In place, act(inner) or act(inner) * gate on rows [first, last), which are `stride` apart; quantised into `to`. gate
    // may be null.
    void int8_activate(
        Activation, float* inner, const float* gate, int64_t stride, int64_t first, int64_t last, const Int8Rows& to);)

}  // namespace fastenc
