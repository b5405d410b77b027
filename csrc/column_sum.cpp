#include "column_sum.h"

#include "tensors.h"

namespace fastenc {

Tensor sum_columns(const void* x, int64_t rows, int64_t width, bool bf16) {
  const RowBlocks blocks(rows);
  ColumnSums sums(blocks, width);
  torch::stable::parallel_for(0, blocks.count, 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block)
      FASTENC_CALL(column_sum, x, width, bf16, blocks.begin(block), blocks.begin(block + 1), sums.of(block));
  });
  return sums.total();
}

namespace {

// (width,), float32.
Tensor sum(Tensor x) {
  STD_TORCH_CHECK(x.dim() == 2, "column_sum: x must be (rows, width)");
  x = as_contiguous(x);
  return sum_columns(x.const_data_ptr(), x.size(0), x.size(1), is_bfloat16(x));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) { m.impl("column_sum", TORCH_BOX(&sum)); }

}  // namespace fastenc
