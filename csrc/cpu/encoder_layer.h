// A block of rows stays in the second-level cache from product to product.

FASTENC_INLINE const float* panel_at(const LayerLinear& w, int64_t row, int64_t column) {
  return panel_at(w.weight, w.depth, row, column);
}

// C += A times the weight's rows [top, top + depth) and columns [left, left + columns); `next` is read after it.
static void add_product(
    const float* a, int64_t lda, const LayerLinear& w, int64_t top, int64_t depth, int64_t left, int64_t columns,
    float* c, int64_t ldc, int64_t rows, const float* next) {
  for (int64_t j = 0, width; j < columns; j += width) {
    width = kPanel - (left + j) % kPanel;  // a gated weight's second half may begin inside a panel
    if (width > columns - j) width = columns - j;
    for (int64_t k = 0; k < depth; k += kDepth) {
      const int64_t pass = depth - k < kDepth ? depth - k : kDepth;
      const float* ahead = k + pass < depth      ? panel_at(w, top + k + pass, left + j)
                           : j + width < columns ? panel_at(w, top, left + j + width)
                                                 : next;
      multiply_panel(
          a + k, lda, panel_at(w, top + k, left + j), kPanel, c + j, ldc, rows, width, pass, true, ahead);
    }
  }
}

// inner = act(inner), or act(inner) * gate, whose rows are `stride` apart.
template <Activation kind>
static void activate_rows(float* inner, const float* gate, int64_t stride, int64_t columns, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t c = 0; c < columns; c += kLanes) {
      const int64_t i = row * stride + c;
      const Vec value = activate<kind>(load(inner + i));
      store(inner + i, gate ? value * load(gate + i) : value);
    }
}

static void activate_rows(
    Activation kind, float* inner, const float* gate, int64_t stride, int64_t columns, int64_t rows) {
  switch (kind) {
    case Activation::gelu:
      return activate_rows<Activation::gelu>(inner, gate, stride, columns, rows);
    case Activation::gelu_tanh:
      return activate_rows<Activation::gelu_tanh>(inner, gate, stride, columns, rows);
    case Activation::silu:
      return activate_rows<Activation::silu>(inner, gate, stride, columns, rows);
    case Activation::relu:
      return activate_rows<Activation::relu>(inner, gate, stride, columns, rows);
  }
}

// Rows as floats: x itself, or a bfloat16 x widened into `buffer`.
FASTENC_INLINE const float* widened_rows(const void* x, bool bf16, int64_t first, int64_t count, float* buffer) {
  if (!bf16) return (const float*)x + first;
  for (int64_t i = 0; i < count; i += kLanes) store(buffer + i, load((const bfloat16*)x + first + i));
  return buffer;
}

FASTENC_INLINE void write_rows(const float* rows, void* x, bool bf16, int64_t first, int64_t count) {
  if (bf16)
    for (int64_t i = 0; i < count; i += kLanes) store((bfloat16*)x + first + i, load(rows + i));
}

void layer_attention(
    const LayerAttention& l, const void* x, float* attended, int64_t first_sequence, int64_t last_sequence,
    float* scratch) {
  const int64_t first = l.offsets[first_sequence], rows = l.offsets[last_sequence] - first;
  const int64_t columns = l.qkv.columns, width = l.terms.num_heads * l.terms.head_dim, depth = l.qkv.depth;
  float* qkv = scratch;
  float* widened = qkv + rows * columns;
  float* lse = widened + (l.bf16 ? rows * depth : 0);
  float* attention_scratch = lse + (rows * l.terms.num_heads + kLanes - 1) / kLanes * kLanes;
  const float* x_rows = widened_rows(x, l.bf16, first * depth, rows * depth, widened);
  fill_with_bias(l.qkv.bias, columns, qkv, columns, rows);
  add_product(x_rows, depth, l.qkv, 0, depth, 0, columns, qkv, columns, rows, l.qkv.weight);
  Attention a = l.terms;
  set_packed(a, qkv);
  a.total_q = rows;
  a.out = attended + first * width;
  a.lse = lse;
  for (int64_t s = first_sequence; s < last_sequence; ++s) {
    const int64_t start = l.offsets[s] - first, length = l.offsets[s + 1] - l.offsets[s];
    for (int64_t head = 0; head < a.num_heads; ++head)
      attention_forward_task<float>(a, {start, length, start, length, head}, attention_scratch);
  }
}

void layer_after_attention(
    const LayerAfterAttention& l, const float* attended, const void* residual, void* y, void* next_residual,
    int64_t first, int64_t last, float* scratch) {
  const int64_t rows = last - first, hidden = l.down.columns, width = l.attention_out.depth;
  const int64_t inner_width = l.down.depth, start = first * hidden, count = rows * hidden;
  attended += first * width;
  float* h = scratch;
  float* inner = h + count;
  float* gate = inner + rows * kInnerColumns;
  float* sums = gate + (l.gated ? rows * kInnerColumns : 0);
  float* widened = sums + (l.pre_norm ? count : 0);
  float* out = widened + (l.bf16 ? count : 0);
  float* norm_scratch = out + (l.bf16 ? count : 0);
  if (!l.bf16) out = (float*)y + start;
  auto normalise = [&](float* block, const float* added, float* sum, const LayerNormTerms& terms) {
    layer_norm_forward_rows<float>(norm_in_place(terms, hidden, l.rms, block, added, sum), 0, rows, norm_scratch);
  };
  fill_with_bias(l.attention_out.bias, hidden, h, hidden, rows);
  add_product(attended, width, l.attention_out, 0, width, 0, hidden, h, hidden, rows, l.up.weight);
  if (l.attention_own_norm.weight) normalise(h, nullptr, nullptr, l.attention_own_norm);
  const float* residual_rows = widened_rows(residual, l.bf16, start, count, widened);
  normalise(h, residual_rows, l.pre_norm ? sums : nullptr, l.attention_norm);
  fill_with_bias(l.down.bias, hidden, out, hidden, rows);
  for (int64_t left = 0; left < inner_width; left += kInnerColumns) {
    const int64_t left_over = inner_width - left, columns = left_over < kInnerColumns ? left_over : kInnerColumns;
    const float* down = panel_at(l.down, left, 0);
    auto project = [&](int64_t column, float* target, const float* next) {
      fill_with_bias(l.up.bias ? l.up.bias + column : nullptr, columns, target, kInnerColumns, rows);
      add_product(h, hidden, l.up, 0, hidden, column, columns, target, kInnerColumns, rows, next);
    };
    project(left, inner, l.gated ? panel_at(l.up, 0, inner_width + left) : down);
    if (l.gated) project(inner_width + left, gate, down);
    activate_rows(l.activation, inner, l.gated ? gate : nullptr, kInnerColumns, columns, rows);
    add_product(
        inner, kInnerColumns, l.down, left, columns, 0, hidden, out, hidden, rows,
        panel_at(l.up, 0, left + columns < inner_width ? left + columns : 0));
  }
  if (l.down_own_norm.weight) normalise(out, nullptr, nullptr, l.down_own_norm);
  if (!l.pre_norm) {
    normalise(out, h, nullptr, l.out_norm);
  } else {
    float* next = l.bf16 ? widened : (float*)next_residual + start;
    normalise(out, sums, next, l.out_norm);
    write_rows(next, next_residual, l.bf16, start, count);
  }
  write_rows(out, y, l.bf16, start, count);
}

void layer_activation(const LayerAfterAttention& l, float* up, int64_t first, int64_t last) {
  const int64_t inner = l.down.depth;
  float* rows = up + first * l.up.columns;
  activate_rows(l.activation, rows, l.gated ? rows + inner : nullptr, l.up.columns, inner, last - first);
}
