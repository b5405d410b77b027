// A block of rows stays in the second cache from product to product.

FASTENC_INLINE const float* panel_at(const PackedLinear& w, int64_t row, int64_t column) {
  return panel_at(w.panels, w.depth, row, column);
}

// C += A times the weight's rows [top, top + depth) and columns [left, left + columns); `next` is read after it.
static void add_product(
    const float* a, int64_t lda, const PackedLinear& w, int64_t top, int64_t depth, int64_t left, int64_t columns,
    float* c, int64_t ldc, int64_t rows, const float* next) {
  for (int64_t j = 0; j < columns; j += kPanel)
    for (int64_t k = 0; k < depth; k += kDepth) {
      const int64_t pass = depth - k < kDepth ? depth - k : kDepth;
      const float* ahead = k + pass < depth       ? panel_at(w, top + k + pass, left + j)
                           : j + kPanel < columns ? panel_at(w, top, left + j + kPanel)
                                                  : next;
      multiply_panel(
          a + k, lda, panel_at(w, top + k, left + j), kMatmulColumns, c + j, ldc, rows, panel_width(columns - j), pass,
          true, ahead);
    }
}

template <Activation kind>
static void activate_block(float* inner, int64_t columns, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t c = 0; c < columns; c += kLanes) {
      float* u = inner + row * kInnerColumns + c;
      store(u, activate<kind>(load(u)));
    }
}

void layer_attention(
    const LayerAttention& l, const float* x, float* mixed, int64_t first_sequence, int64_t last_sequence,
    float* scratch) {
  const int64_t first = l.offsets[first_sequence], rows = l.offsets[last_sequence] - first;
  const int64_t columns = l.qkv.columns, width = columns / 3, head_dim = width / l.num_heads;
  float* qkv = scratch;
  float* lse = qkv + rows * columns;
  float* attention_scratch = lse + (rows * l.num_heads + kLanes - 1) / kLanes * kLanes;
  fill_with_bias(l.qkv.bias, columns, qkv, columns, rows);
  add_product(
      x + first * l.qkv.depth, l.qkv.depth, l.qkv, 0, l.qkv.depth, 0, columns, qkv, columns, rows, l.qkv.panels);
  Attention a{};
  a.q = {qkv, columns, head_dim};
  a.k = {qkv + width, columns, head_dim};
  a.v = {qkv + 2 * width, columns, head_dim};
  a.num_heads = l.num_heads;
  a.head_dim = head_dim;
  a.total_q = rows;
  a.scale = 1.f / __builtin_sqrtf((float)head_dim);
  a.out = mixed + first * width;
  a.lse = lse;
  for (int64_t s = first_sequence; s < last_sequence; ++s) {
    const int64_t start = l.offsets[s] - first, length = l.offsets[s + 1] - l.offsets[s];
    for (int64_t head = 0; head < l.num_heads; ++head)
      attention_forward_task<float>(a, {start, length, start, length, head}, attention_scratch);
  }
}

void layer_after_attention(
    const LayerAfterAttention& l, const float* mixed, const float* x, float* y, int64_t first, int64_t last,
    float* scratch) {
  const int64_t rows = last - first, hidden = l.down.columns, mixed_width = l.attention_out.depth;
  mixed += first * mixed_width;
  x += first * hidden;
  y += first * hidden;
  float* h = scratch;
  float* inner = h + rows * hidden;
  float* norm_scratch = inner + rows * kInnerColumns;
  auto normalise = [&](float* block, const float* residual, const float* weight, const float* bias) {
    LayerNormForward norm{};
    norm.x = norm.y = block;
    norm.residual = residual;
    norm.weight = weight;
    norm.bias = bias;
    norm.width = hidden;
    norm.eps = l.eps;
    layer_norm_forward_rows<float>(norm, 0, rows, norm_scratch);
  };
  fill_with_bias(l.attention_out.bias, hidden, h, hidden, rows);
  add_product(mixed, mixed_width, l.attention_out, 0, mixed_width, 0, hidden, h, hidden, rows, l.up.panels);
  normalise(h, x, l.attention_norm_weight, l.attention_norm_bias);
  fill_with_bias(l.down.bias, hidden, y, hidden, rows);
  for (int64_t left = 0; left < l.up.columns; left += kInnerColumns) {
    const int64_t left_over = l.up.columns - left, columns = left_over < kInnerColumns ? left_over : kInnerColumns;
    fill_with_bias(l.up.bias + left, columns, inner, kInnerColumns, rows);
    add_product(h, hidden, l.up, 0, hidden, left, columns, inner, kInnerColumns, rows, panel_at(l.down, left, 0));
    if (l.activation == Activation::gelu)
      activate_block<Activation::gelu>(inner, columns, rows);
    else
      activate_block<Activation::gelu_tanh>(inner, columns, rows);
    add_product(
        inner, kInnerColumns, l.down, left, columns, 0, hidden, y, hidden, rows, panel_at(l.up, 0, left + columns));
  }
  normalise(y, h, l.out_norm_weight, l.out_norm_bias);
}
