#include "linear_segment_max.h"

#include "convert_tensors.h"
#include "gemm.h"
#include "scratch.h"
#include "weights.h"

namespace fastenc {
namespace {

// Rows of a tile of the product: of floats so many that packing a panel of W costs little; of pairs those that stay in
// the second-level cache, a multiple of 16.
constexpr int64_t kTileRows = 512, kPairRows = 128;
// The products of a block of rows of x with a block of W's columns, one after the other.
class Products {
 public:
  Products(const Tensor& x, const Tensor& weight, const float* bias)
      : pairs_(is_bfloat16(x) && has_bf16_dot_products()),
        tile_rows_(pairs_ ? kPairRows : kTileRows),
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

// (maxima (batch, columns) in x's dtype, argmax int32 (batch, columns)); 0 and -1 for an empty sequence.
std::tuple<Tensor, Tensor> forward(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor cu_seqlens) {
  STD_TORCH_CHECK(
      x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1) && is_bfloat16(x) == is_bfloat16(weight),
      "linear_segment_max: x (tokens, width) and weight (columns, width) must have one dtype");
  x = as_contiguous(x);
  weight = as_contiguous(weight);
  cu_seqlens = as_contiguous(cu_seqlens);
  const int64_t tokens = x.size(0), columns = weight.size(0), batch = cu_seqlens.numel() - 1;
  const FloatVector bias_values(bias);
  STD_TORCH_CHECK(!bias || bias->numel() == columns, "linear_segment_max: bias must have a number for each column");
  const bool bf16 = is_bfloat16(x);
  Tensor y = empty({batch, columns}, x.scalar_type()), argmax = empty({batch, columns}, ScalarType::Int);
  if (!y.numel()) return {y, argmax};
  std::vector<float> wide(bf16 ? y.numel() : 0);
  const SegmentMax a{
      static_cast<const int32_t*>(cu_seqlens.const_data_ptr()),
      bf16 ? wide.data() : static_cast<float*>(y.mutable_data_ptr()), static_cast<int32_t*>(argmax.mutable_data_ptr()),
      batch, columns};
  for (int64_t sequence = 0; sequence < batch; ++sequence) {
    if (a.cu_seqlens[sequence] != a.cu_seqlens[sequence + 1]) continue;
    std::fill_n(a.largest + sequence * columns, columns, 0.f);
    std::fill_n(a.argmax + sequence * columns, columns, -1);
  }
  const Products products(x, weight, bias_values.data());
  for_panels(columns, [&](int64_t left, int64_t right) {
    float* tile = thread_scratch(products.tile_rows() * kGemmColumns, Scratch::tiles);
    int64_t sequence = 0;
    for (int64_t first = 0; first < tokens; first += products.tile_rows()) {
      const int64_t last = std::min(first + products.tile_rows(), tokens);
      products.compute(first, last, left, right, tile);
      FASTENC_CALL(segment_max_rows, a, tile, first, last, left, right, &sequence);
    }
  });
  if (bf16) narrow_all(wide.data(), y);
  return {y, argmax};
}

SegmentMaxGradient gradient_of(const Tensor& dy, const Tensor& argmax, const Tensor& rows) {
  return {
      dy.const_data_ptr(), static_cast<const int32_t*>(argmax.const_data_ptr()), rows.const_data_ptr(), dy.size(0),
      dy.size(1), rows.size(1)};
}

Tensor input_gradient(Tensor dy, Tensor argmax, Tensor weight, int64_t tokens) {
  dy = as_contiguous(dy);
  argmax = as_contiguous(argmax);
  weight = as_contiguous(weight);
  const bool bf16 = is_bfloat16(dy);
  Tensor dx = empty({tokens, weight.size(1)}, dy.scalar_type());
  std::vector<float> wide(bf16 ? dx.numel() : 0), sums(dx.numel());
  std::vector<int32_t> terms(tokens);
  float* out = bf16 ? wide.data() : static_cast<float*>(dx.mutable_data_ptr());
  if (!bf16) std::fill_n(out, dx.numel(), 0.f);
  const SegmentMaxGradient a = gradient_of(dy, argmax, weight);
  const SegmentMaxSums to{out, sums.data(), terms.data()};
  torch::stable::parallel_for(0, a.batch, 1, [&](int64_t begin, int64_t end) {
    FASTENC_CALL(segment_max_input_gradient, a, bf16, begin, end, to);
  });
  for (int64_t i = 0; i < dx.numel(); ++i) out[i] += sums[i];
  if (bf16) narrow_all(out, dx);
  return dx;
}

Tensor weight_gradient(Tensor dy, Tensor argmax, Tensor x) {
  dy = as_contiguous(dy);
  argmax = as_contiguous(argmax);
  x = as_contiguous(x);
  const bool bf16 = is_bfloat16(dy);
  const int64_t columns = dy.size(1), depth = x.size(1);
  Tensor dweight = empty({columns, depth}, dy.scalar_type());
  const SegmentMaxGradient a = gradient_of(dy, argmax, x);
  for_panels(columns, [&](int64_t left, int64_t right) {
    if (!bf16) {
      float* sums = static_cast<float*>(dweight.mutable_data_ptr()) + left * depth;
      FASTENC_CALL(segment_max_weight_gradient, a, bf16, left, right, sums);
      return;
    }
    float* sums = thread_scratch(kGemmColumns * depth, Scratch::tiles);
    FASTENC_CALL(segment_max_weight_gradient, a, bf16, left, right, sums);
    auto* target = static_cast<bfloat16*>(dweight.mutable_data_ptr()) + left * depth;
    FASTENC_CALL(narrow, sums, target, (right - left) * depth);
  });
  return dweight;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("linear_segment_max_fwd", TORCH_BOX(&forward));
  m.impl("linear_segment_max_dhidden", TORCH_BOX(&input_gradient));
  m.impl("linear_segment_max_dweight", TORCH_BOX(&weight_gradient));
}

}  // namespace fastenc
