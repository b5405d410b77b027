// Copies packed rows to their rows of a padded tensor. Only bytes move: nothing to compile per instruction set.
#include "tensors.h"

namespace fastenc {
namespace {

// (padded_rows, width): row indices[t] is values[t], every other row holds padding_value. indices ascends.
Tensor unpack(Tensor values, Tensor indices, int64_t padded_rows, double padding_value) {
  values = as_contiguous(values);
  indices = as_contiguous(indices);
  STD_TORCH_CHECK(indices.scalar_type() == ScalarType::Long && indices.numel() == values.size(0),
                  "unpack: indices must be int64, one for each row of values");
  const int64_t width = values.size(1), bytes = width * (is_bfloat16(values) ? 2 : 4);
  Tensor out = empty({padded_rows, width}, values.scalar_type());
  Tensor padding = empty({width}, values.scalar_type());
  torch::stable::fill_(padding, padding_value);
  const auto* source = static_cast<const char*>(values.const_data_ptr());
  const auto* first = static_cast<const int64_t*>(indices.const_data_ptr());
  auto* target = static_cast<char*>(out.mutable_data_ptr());
  torch::stable::parallel_for(0, padded_rows, grain(width), [&](int64_t begin, int64_t end) {
    const int64_t* last = first + indices.numel();
    const int64_t* next = std::lower_bound(first, last, begin);
    for (int64_t row = begin; row < end; ++row) {
      if (next != last && *next == row) {
        std::memcpy(target + row * bytes, source + (next - first) * bytes, bytes);
        ++next;
      } else {
        std::memcpy(target + row * bytes, padding.const_data_ptr(), bytes);
      }
    }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) { m.impl("unpack", TORCH_BOX(&unpack)); }

}  // namespace fastenc
