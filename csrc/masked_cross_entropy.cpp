#include "lazy_zeros.h"
#include "masked_cross_entropy_arguments.h"

namespace fastenc {
namespace {

// The rows that carry a label. Python checks the labels for users; this check guards direct calls of the op.
std::vector<int64_t> labelled_rows(const Tensor& labels, const Tensor& logits, int64_t ignore_index) {
  check_labels(labels, logits.size(0));
  const int64_t vocabulary = logits.size(1);
  const auto* values = static_cast<const int64_t*>(labels.const_data_ptr());
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < labels.numel(); ++row) {
    if (values[row] == ignore_index) continue;
    STD_TORCH_CHECK(
        values[row] >= 0 && values[row] < vocabulary, "masked_cross_entropy: a label is outside the vocabulary");
    rows.push_back(row);
  }
  return rows;
}

// Maps the pages of a row in one call before they are written: a page fault for each would cost more than the
// arithmetic. On a system without this call the page faults remain.
void map_pages([[maybe_unused]] void* row, [[maybe_unused]] size_t bytes) {
#if defined(MADV_POPULATE_WRITE)
  constexpr uintptr_t page = 4096;
  const auto begin = reinterpret_cast<uintptr_t>(row) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(row) + bytes + page - 1) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE);
#endif
}

void run(
    const Tensor& logits, const Tensor& labels, int64_t ignore_index, double label_smoothing, double z_loss,
    const std::optional<Tensor>& divisor, Tensor& losses, void* dlogits, bool fresh_pages,
    const std::vector<int64_t>& rows) {
  const auto a = make_arguments(logits, labels, ignore_index, label_smoothing, z_loss, divisor, losses, dlogits);
  const bool bf16 = is_bfloat16(logits);
  torch::stable::parallel_for(0, rows.size(), grain(a.vocabulary), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const size_t bytes = a.vocabulary * (bf16 ? 2 : 4);
      if (fresh_pages) map_pages(static_cast<char*>(dlogits) + rows[i] * bytes, bytes);
      FASTENC_CALL(masked_cross_entropy, a, bf16, rows[i]);
    }
  });
}

Tensor zero_losses(int64_t rows) {
  Tensor losses = empty({rows}, ScalarType::Float);
  torch::stable::zero_(losses);
  return losses;
}

// (losses, dlogits): float32 losses, 0 in ignored rows; dlogits is empty unless wanted.
std::tuple<Tensor, Tensor> forward(
    Tensor logits, Tensor labels, int64_t ignore_index, double label_smoothing, double z_loss,
    std::optional<Tensor> divisor, bool wants_gradient) {
  if (wants_gradient || !has_contiguous_rows(logits)) logits = as_contiguous(logits);
  labels = as_contiguous(labels);
  const auto rows = labelled_rows(labels, logits, ignore_index);
  Tensor losses = zero_losses(logits.size(0));
  // Ignored rows of the gradient cost nothing.
  Tensor dlogits = wants_gradient ? lazy_zeros_like(logits, Pages::small) : empty({0}, logits.scalar_type());
  run(logits, labels, ignore_index, label_smoothing, z_loss, divisor, losses,
      wants_gradient ? dlogits.mutable_data_ptr() : nullptr, wants_gradient, rows);
  return {losses, dlogits};
}

// Overwrites the logits with their gradient; returns the losses.
Tensor forward_in_place(
    Tensor logits, Tensor labels, int64_t ignore_index, double label_smoothing, double z_loss,
    std::optional<Tensor> divisor) {
  check_in_place(logits);
  labels = as_contiguous(labels);
  const auto rows = labelled_rows(labels, logits, ignore_index);
  const auto* values = static_cast<const int64_t*>(labels.const_data_ptr());
  const int64_t bytes = is_bfloat16(logits) ? 2 : 4;
  for (int64_t row = 0; row < logits.size(0); ++row)
    if (values[row] == ignore_index)
      std::memset(
          static_cast<char*>(logits.mutable_data_ptr()) + row * logits.stride(0) * bytes, 0, logits.size(1) * bytes);
  Tensor losses = zero_losses(logits.size(0));
  run(logits, labels, ignore_index, label_smoothing, z_loss, divisor, losses, logits.mutable_data_ptr(), false, rows);
  return losses;
}

// Multiplies the labelled rows of x by factors[row], or by factors[0] if it is the only one. A factor of 1 costs
// nothing.
void scale_labelled_rows(Tensor x, Tensor labels, int64_t ignore_index, Tensor factors) {
  labels = as_contiguous(labels);
  const auto rows = labelled_rows(labels, x, ignore_index);
  const FloatVector values(factors);
  const bool one = factors.numel() == 1, bf16 = is_bfloat16(x);
  const int64_t width = x.size(1);
  auto* data = static_cast<char*>(x.mutable_data_ptr());
  torch::stable::parallel_for(0, rows.size(), grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float factor = values.data()[one ? 0 : rows[i]];
      if (factor != 1.f)
        FASTENC_CALL(scale_row, data + rows[i] * width * (bf16 ? 2 : 4), bf16, width, factor);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("masked_cross_entropy_fwd", TORCH_BOX(&forward));
  m.impl("masked_cross_entropy_", TORCH_BOX(&forward_in_place));
  m.impl("scale_labelled_rows_", TORCH_BOX(&scale_labelled_rows));
}

}  // namespace fastenc
