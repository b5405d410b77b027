// x W^T + b in tiles, for ops that keep less than the product. The threads divide the product's columns.
#pragma once
#include "convert_tensors.h"
#include "gemm.h"
#include "scratch.h"
#include "weights.h"

namespace fastenc {

// Rows of a tile of the product. kProductRows, for floats, is large enough that packing a panel of W costs little.
// kProductPairRows, for pairs, is small enough that the rows stay in the second-level cache; it is a multiple of 16.
constexpr int64_t kProductRows = 512, kProductPairRows = 128;

// The products of a block of rows of x with a block of W's columns, one after the other.
class ColumnProducts {
 public:
  ColumnProducts(const Tensor& x, const Tensor& weight, const float* bias)
      : pairs_(is_bfloat16(x) && has_bf16_dot_products()),
        tile_rows_(pairs_ ? kProductPairRows : kProductRows),
        weight_({weight}),
        few_{x.const_data_ptr(), true, x.size(1), weight_.rows(), bias, nullptr, x.size(0)} {
    all_.b = weight.const_data_ptr();
    all_.b_bf16 = is_bfloat16(weight);
    all_.b_depth = 1;
    all_.b_column = all_.depth = all_.a_row = x.size(1);
    all_.a_depth = 1;
    all_.bias = bias;
#if FASTENC_X86
    if (pairs_) {
      float* rows = thread_scratch(pair_rows_floats(few_.rows, few_.weight.depth), Scratch::operands);
      avx512::pack_pair_rows(few_, rows);
      packed_rows_ = rows;
    }
#endif
    if (pairs_) return;
    all_.a = static_cast<const float*>(x.const_data_ptr());
    if (!is_bfloat16(x)) return;
    float* wide = thread_scratch(x.numel(), Scratch::operands);
    widen_all(x, wide);
    all_.a = wide;
  }

  int64_t tile_rows() const { return tile_rows_; }

  // c (last - first, right - left), contiguous.
  void compute(int64_t first, int64_t last, int64_t left, int64_t right, float* c) const {
    if (pairs_) {
      GemmFewRows m = few_;
      m.a = static_cast<const bfloat16*>(few_.a) + first * m.a_row;
      m.weight.rows += left;
      m.weight.count = right - left;
      m.bias = m.bias ? m.bias + left : nullptr;
      m.c = c;
      m.rows = last - first;
#if FASTENC_X86
      const float* rows = packed_rows_ + pair_rows_floats(first, m.weight.depth);
      avx512::gemm_pairs(m, rows, 0, right - left);
#elif FASTENC_ARM
      neon_bf16::gemm_pairs(m, 0, right - left);
#endif
      return;
    }
    Gemm m = all_;
    m.a += first * m.a_row;
    m.b = static_cast<const char*>(m.b) + left * m.b_column * (m.b_bf16 ? sizeof(bfloat16) : sizeof(float));
    m.bias = m.bias ? m.bias + left : nullptr;
    m.c = c;
    m.rows = last - first;
    m.columns = right - left;
    FASTENC_CALL(gemm_block, m, 0, m.rows, 0, m.columns);
  }

 private:
  bool pairs_;
  int64_t tile_rows_;
  Weight weight_;
  GemmFewRows few_;
  const float* packed_rows_ = nullptr;  // of few_, on x86
  Gemm all_{};
};

// Calls run(left, right) for the panels of the columns, which the threads divide.
template <class Run>
void for_panels(int64_t columns, Run run) {
  const int64_t panels = (columns + kGemmColumns - 1) / kGemmColumns;
  torch::stable::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel)
      run(panel * kGemmColumns, std::min((panel + 1) * kGemmColumns, columns));
  });
}

}  // namespace fastenc
