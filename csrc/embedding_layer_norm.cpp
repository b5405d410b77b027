#include "embedding_layer_norm.h"

#include "lazy_zeros.h"

namespace fastenc {
namespace {

constexpr const char* kOp = "embedding_layer_norm";

int64_t scratch_size(int64_t width) { return 2 * ((width + 127) / 128 * 128); }

// Ids index the tables, so they are checked here, in direct calls of the op too.
const int64_t* checked_ids(const char* op, const Tensor& ids, int64_t count, int64_t offset, const Tensor& table) {
  STD_TORCH_CHECK(ids.scalar_type() == ScalarType::Long && ids.is_contiguous() && ids.numel() == count,
                  op, ": ids must be int64, contiguous, one for each token");
  const auto* data = static_cast<const int64_t*>(ids.const_data_ptr());
  for (int64_t i = 0; i < count; ++i)
    STD_TORCH_CHECK(data[i] + offset >= 0 && data[i] + offset < table.size(0), op, ": an id is outside its table");
  return data;
}

// Contiguous tables and ids, and their addresses.
struct Tables {
  Tensor ids, word;
  std::optional<Tensor> position_ids, token_type_ids, position, token_type;
  EmbeddingRows rows{};

  Tables(Tensor ids_, std::optional<Tensor> position_ids_, std::optional<Tensor> token_type_ids_, Tensor word_,
         std::optional<Tensor> position_, std::optional<Tensor> token_type_, int64_t position_offset)
      : ids(as_contiguous(ids_)), word(as_contiguous(word_)), position_ids(contiguous(position_ids_)),
        token_type_ids(contiguous(token_type_ids_)), position(contiguous(position_)),
        token_type(contiguous(token_type_)) {
    const int64_t count = ids.numel();
    rows.width = word.size(1);
    rows.word = word.const_data_ptr();
    rows.ids = checked_ids(kOp, ids, count, 0, word);
    rows.position_offset = position_offset;
    if (position) {
      check_table(*position);
      rows.position = position->const_data_ptr();
      rows.position_ids = checked_ids(kOp, *position_ids, count, position_offset, *position);
    }
    if (token_type) {
      check_table(*token_type);
      STD_TORCH_CHECK(token_type->size(0) > 0, kOp, ": token_type must have a row");
      rows.token_type = token_type->const_data_ptr();
      if (token_type_ids) rows.token_type_ids = checked_ids(kOp, *token_type_ids, count, 0, *token_type);
    }
  }

 private:
  static std::optional<Tensor> contiguous(const std::optional<Tensor>& t) {
    return t ? std::optional<Tensor>(as_contiguous(*t)) : t;
  }
  void check_table(const Tensor& table) const {
    STD_TORCH_CHECK(table.scalar_type() == word.scalar_type() && table.size(1) == rows.width,
                    kOp, ": tables must have one dtype and width");
  }
};

Tensor like_rows(const Tensor& ids, const Tensor& word) {
  std::vector<int64_t> sizes(ids.sizes().begin(), ids.sizes().end());
  sizes.push_back(word.size(1));
  return torch::stable::empty(sizes, word.scalar_type());
}

// (y, mean, rstd); the statistics are empty unless `save`.
std::tuple<Tensor, Tensor, Tensor> forward(
    Tensor input_ids, std::optional<Tensor> position_ids, std::optional<Tensor> token_type_ids, Tensor word,
    std::optional<Tensor> position, std::optional<Tensor> token_type, std::optional<Tensor> weight,
    std::optional<Tensor> bias, std::optional<Tensor> rng_state, int64_t position_offset, double dropout_p, double eps,
    bool save) {
  const Tables tables(input_ids, position_ids, token_type_ids, word, position, token_type, position_offset);
  const bool bf16 = is_bfloat16(tables.word);
  const int64_t rows = tables.ids.numel(), width = tables.rows.width;
  FloatVector weight_values(weight), bias_values(bias);
  Tensor y = like_rows(tables.ids, tables.word);
  Tensor mean = empty({save ? rows : 0}, ScalarType::Float), rstd = empty({save ? rows : 0}, ScalarType::Float);
  EmbeddingLayerNormForward a{};
  a.tables = tables.rows;
  a.weight = weight_values.data();
  a.bias = bias_values.data();
  a.y = y.mutable_data_ptr();
  a.mean = save ? static_cast<float*>(mean.mutable_data_ptr()) : nullptr;
  a.rstd = save ? static_cast<float*>(rstd.mutable_data_ptr()) : nullptr;
  a.eps = static_cast<float>(eps);
  a.dropout = make_dropout(dropout_p, rng_state);
  torch::stable::parallel_for(0, rows, grain(width), [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(scratch_size(width));
    FASTENC_CALL(embedding_layer_norm_forward, a, bf16, begin, end, scratch.data());
  });
  return {y, mean, rstd};
}

// (dh, dweight, dbias); the sums are float32 and empty unless wanted.
std::tuple<Tensor, Tensor, Tensor> backward(
    Tensor dy, Tensor input_ids, std::optional<Tensor> position_ids, std::optional<Tensor> token_type_ids, Tensor word,
    std::optional<Tensor> position, std::optional<Tensor> token_type, std::optional<Tensor> weight,
    std::optional<Tensor> rng_state, Tensor mean, Tensor rstd, int64_t position_offset, double dropout_p,
    bool wants_affine) {
  dy = as_contiguous(dy);
  const Tables tables(input_ids, position_ids, token_type_ids, word, position, token_type, position_offset);
  const bool bf16 = is_bfloat16(tables.word);
  const int64_t rows = tables.ids.numel(), width = tables.rows.width;
  FloatVector weight_values(weight);
  Tensor dh = torch::stable::empty_like(dy);
  EmbeddingLayerNormBackward common{};
  common.tables = tables.rows;
  common.dy = dy.const_data_ptr();
  common.mean = static_cast<const float*>(mean.const_data_ptr());
  common.rstd = static_cast<const float*>(rstd.const_data_ptr());
  common.weight = weight_values.data();
  common.dh = dh.mutable_data_ptr();
  common.dropout = make_dropout(dropout_p, rng_state);
  const RowBlocks blocks(rows);
  ColumnSums dweight(blocks, wants_affine ? width : 0), dbias(blocks, wants_affine ? width : 0);
  torch::stable::parallel_for(0, blocks.count, 1, [&](int64_t first, int64_t last) {
    std::vector<float> scratch(scratch_size(width));
    for (int64_t block = first; block < last; ++block) {
      EmbeddingLayerNormBackward a = common;
      a.dweight = dweight.of(block);
      a.dbias = dbias.of(block);
      FASTENC_CALL(
          embedding_layer_norm_backward, a, bf16, blocks.begin(block), blocks.begin(block + 1), scratch.data());
    }
  });
  return {dh, dweight.total(), dbias.total()};
}

// rows is (count, width) of table's dtype; both are contiguous.
void add_rows(
    Tensor table, Tensor rows, Tensor sorted_ids, Tensor order, int64_t offset, int64_t padding_idx) {
  const bool bf16 = is_bfloat16(table);
  const int64_t count = sorted_ids.numel(), width = table.size(1);
  STD_TORCH_CHECK(table.is_contiguous() && rows.is_contiguous(), "add_rows_: table and rows must be contiguous");
  const int64_t windows = (count + kAddRowsWindow - 1) / kAddRowsWindow;
  std::vector<float> partial(2 * windows * width);
  const auto* ids = checked_ids("add_rows_", sorted_ids, count, offset, table);
  const auto* order_values = checked_ids("add_rows_", order, count, 0, rows);
  const AddRows a{table.mutable_data_ptr(), rows.const_data_ptr(), ids, order_values, count, width, offset, padding_idx,
                  partial.data()};
  const int64_t at_least = std::max<int64_t>(1, grain(width) / kAddRowsWindow);
  torch::stable::parallel_for(0, windows, at_least, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(width);
    FASTENC_CALL(add_rows_in_windows, a, bf16, begin, end, scratch.data());
  });
  torch::stable::parallel_for(0, windows, at_least, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(width);
    FASTENC_CALL(add_rows_across_windows, a, bf16, begin, end, scratch.data());
  });
}

// A table's gradient before rows are added to it. An optimiser reads all of it.
Tensor zero_table(Tensor table) { return lazy_zeros_like(table, Pages::huge); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("embedding_layer_norm_fwd", TORCH_BOX(&forward));
  m.impl("embedding_layer_norm_bwd", TORCH_BOX(&backward));
  m.impl("add_rows_", TORCH_BOX(&add_rows));
  m.impl("zero_table", TORCH_BOX(&zero_table));
}

}  // namespace fastenc
