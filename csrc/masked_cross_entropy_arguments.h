// From the op's tensors to the kernel's pointers, the same for CPU and CUDA. Python checks the arguments for users;
// these checks guard direct calls of the op.
#pragma once
#include "masked_cross_entropy.h"
#include "tensors.h"

namespace fastenc {

inline void check_labels(const Tensor& labels, int64_t rows) {
  STD_TORCH_CHECK(
      labels.scalar_type() == ScalarType::Long && labels.numel() == rows,
      "masked_cross_entropy: labels must be int64, one a row");
}

inline MaskedCrossEntropy make_arguments(
    const Tensor& logits, const Tensor& labels, int64_t ignore_index, double label_smoothing, double z_loss,
    const std::optional<Tensor>& divisor, Tensor& losses, void* dlogits) {
  check_labels(labels, logits.size(0));
  STD_TORCH_CHECK(
      !divisor || (divisor->scalar_type() == ScalarType::Long && divisor->numel() == 1),
      "masked_cross_entropy: the divisor must be one int64");
  MaskedCrossEntropy a{};
  a.logits = logits.const_data_ptr();
  a.row_stride = logits.stride(0);
  a.labels = static_cast<const int64_t*>(labels.const_data_ptr());
  a.ignore_index = ignore_index;
  a.vocabulary = logits.size(1);
  a.label_smoothing = static_cast<float>(label_smoothing);
  a.z_loss = static_cast<float>(z_loss);
  a.divisor = divisor ? static_cast<const int64_t*>(divisor->const_data_ptr()) : nullptr;
  a.losses = static_cast<float*>(losses.mutable_data_ptr());
  a.dlogits = dlogits;
  return a;
}

// There may be gaps between the rows.
inline bool has_contiguous_rows(const Tensor& logits) {
  return (logits.size(1) <= 1 || logits.stride(1) == 1) &&
         (logits.size(0) <= 1 || logits.stride(0) >= logits.size(1));
}

inline void check_in_place(const Tensor& logits) {
  STD_TORCH_CHECK(has_contiguous_rows(logits), "masked_cross_entropy_: each row of the logits must be contiguous");
}

}  // namespace fastenc
