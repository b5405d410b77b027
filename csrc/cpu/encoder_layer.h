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

// put(row, column, act(inner)), or act(inner) * gate, of every vector; rows are `stride` apart.
template <Activation kind, class Put>
static void activate_rows(
    const float* inner, const float* gate, int64_t stride, int64_t columns, int64_t rows, Put put) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t c = 0; c < columns; c += kLanes) {
      const int64_t i = row * stride + c;
      const Vec value = activate<kind>(load(inner + i));
      put(row, c, gate ? value * load(gate + i) : value);
    }
}

template <class Put>
static void activate_rows(
    Activation kind, const float* inner, const float* gate, int64_t stride, int64_t columns, int64_t rows, Put put) {
  switch (kind) {
    case Activation::gelu:
      return activate_rows<Activation::gelu>(inner, gate, stride, columns, rows, put);
    case Activation::gelu_tanh:
      return activate_rows<Activation::gelu_tanh>(inner, gate, stride, columns, rows, put);
    case Activation::silu:
      return activate_rows<Activation::silu>(inner, gate, stride, columns, rows, put);
    case Activation::relu:
      return activate_rows<Activation::relu>(inner, gate, stride, columns, rows, put);
  }
}

static void activate_in_place(
    Activation kind, float* inner, const float* gate, int64_t stride, int64_t columns, int64_t rows) {
  auto put = [&](int64_t row, int64_t c, Vec value) __attribute__((always_inline)) {
    store(inner + row * stride + c, value);
  };
  activate_rows(kind, inner, gate, stride, columns, rows, put);
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

// The products of a layer in float32. A class of the same members computes them otherwise.
struct FloatProducts {
  // Rows of A, in the form in which they are multiplied.
  struct Rows {
    const float* x;
    int64_t stride;
  };
  using Attended = float;  // attention's results
  static constexpr int64_t kInner = kInnerColumns;

  // Floats of a buffer for rows; those of bfloat16 are widened into it.
  static int64_t floats(int64_t rows, int64_t width, bool bf16) { return bf16 ? rows * width : 0; }
  static Rows rows(const void* x, bool bf16, int64_t rows, int64_t width, float* buffer) {
    return {widened_rows(x, bf16, 0, rows * width, buffer), width};
  }
  // act(inner), or act(inner) * gate; their rows are kInner apart.
  static Rows activated(
      Activation kind, float* inner, const float* gate, int64_t columns, int64_t rows, float* /*buffer*/) {
    activate_in_place(kind, inner, gate, kInner, columns, rows);
    return {inner, kInner};
  }
  // Where the weight's row and column lie.
  static const float* at(const LayerLinear& w, int64_t row, int64_t column) { return panel_at(w, row, column); }
  // C = bias + or += A times the weight's rows [top, top + depth) and columns [left, left + columns); `next` is read
  // after it.
  static void multiply(
      Rows a, const LayerLinear& w, int64_t top, int64_t depth, int64_t left, int64_t columns, float* c, int64_t ldc,
      int64_t rows, bool add, const float* next) {
    if (!add) fill_with_bias(w.bias ? w.bias + left : nullptr, columns, c, ldc, rows);
    add_product(a.x, a.stride, w, top, depth, left, columns, c, ldc, rows, next);
  }
  static void attend(const Attention& a, const AttentionTask& task, float* scratch) {
    attention_forward_task<float>(a, task, scratch);
  }
};

// Elements of x, floats or bfloat16, from `first` on.
FASTENC_INLINE const void* elements(const void* x, bool bf16, int64_t first) {
  return (const char*)x + first * (bf16 ? sizeof(bfloat16) : sizeof(float));
}

template <class Products>
static void attend_in_block(
    const LayerAttention& l, const void* x, void* attended, int64_t first_sequence, int64_t last_sequence,
    float* scratch) {
  const int64_t first = l.offsets[first_sequence], rows = l.offsets[last_sequence] - first;
  const int64_t columns = l.qkv.columns, width = l.terms.num_heads * l.terms.head_dim, depth = l.qkv.depth;
  float* qkv = scratch;
  float* operands = qkv + rows * columns;
  float* lse = operands + Products::floats(rows, depth, l.bf16);
  float* attention_scratch = lse + (rows * l.terms.num_heads + kLanes - 1) / kLanes * kLanes;
  const auto x_rows = Products::rows(elements(x, l.bf16, first * depth), l.bf16, rows, depth, operands);
  Products::multiply(
      x_rows, l.qkv, 0, depth, 0, columns, qkv, columns, rows, false, Products::at(l.qkv, 0, 0));
  Attention a = l.terms;
  set_packed(a, qkv);
  a.total_q = rows;
  a.out = (typename Products::Attended*)attended + first * width;
  a.lse = lse;
  for (int64_t s = first_sequence; s < last_sequence; ++s) {
    const int64_t start = l.offsets[s] - first, length = l.offsets[s + 1] - l.offsets[s];
    for (int64_t head = 0; head < a.num_heads; ++head)
      Products::attend(a, {start, length, start, length, head}, attention_scratch);
  }
}

template <class Products>
static void end_block(
    const LayerAfterAttention& l, const void* attended, const void* residual, void* y, void* next_residual,
    int64_t first, int64_t last, float* scratch) {
  const int64_t rows = last - first, hidden = l.down.columns, width = l.attention_out.depth;
  const int64_t inner_width = l.down.depth, start = first * hidden, count = rows * hidden;
  constexpr int64_t kInner = Products::kInner;
  float* h = scratch;
  float* inner = h + count;
  float* gate = inner + rows * kInner;
  float* sums = gate + (l.gated ? rows * kInner : 0);
  float* widened = sums + (l.pre_norm ? count : 0);
  float* out = widened + (l.bf16 ? count : 0);
  float* operands = out + (l.bf16 ? count : 0);
  float* activations = operands + Products::floats(rows, width > hidden ? width : hidden, false);
  float* norm_scratch = activations + Products::floats(rows, kInner, false);
  if (!l.bf16) out = (float*)y + start;
  auto normalise = [&](float* block, const float* added, float* sum, const LayerNormTerms& terms) {
    layer_norm_forward_rows<float>(norm_in_place(terms, hidden, l.rms, block, added, sum), 0, rows, norm_scratch);
  };
  constexpr bool kNarrow = sizeof(typename Products::Attended) == sizeof(bfloat16);
  const auto attended_rows =
      Products::rows(elements(attended, kNarrow, first * width), kNarrow, rows, width, operands);
  Products::multiply(
      attended_rows, l.attention_out, 0, width, 0, hidden, h, hidden, rows, false, Products::at(l.up, 0, 0));
  if (l.attention_own_norm.weight) normalise(h, nullptr, nullptr, l.attention_own_norm);
  const float* residual_rows = widened_rows(residual, l.bf16, start, count, widened);
  normalise(h, residual_rows, l.pre_norm ? sums : nullptr, l.attention_norm);
  const auto h_rows = Products::rows(h, false, rows, hidden, operands);
  for (int64_t left = 0; left < inner_width; left += kInner) {
    const int64_t left_over = inner_width - left, columns = left_over < kInner ? left_over : kInner;
    const float* down = Products::at(l.down, left, 0);
    auto project = [&](int64_t column, float* target, const float* next) {
      Products::multiply(h_rows, l.up, 0, hidden, column, columns, target, kInner, rows, false, next);
    };
    project(left, inner, l.gated ? Products::at(l.up, 0, inner_width + left) : down);
    if (l.gated) project(inner_width + left, gate, down);
    const auto activated =
        Products::activated(l.activation, inner, l.gated ? gate : nullptr, columns, rows, activations);
    Products::multiply(
        activated, l.down, left, columns, 0, hidden, out, hidden, rows, left > 0,
        Products::at(l.up, 0, left + columns < inner_width ? left + columns : 0));
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

#if FASTENC_VECTOR_BYTES == 64
#include "encoder_layer_bf16.h"
#endif

void layer_attention(
    const LayerAttention& l, const void* x, void* attended, int64_t first_sequence, int64_t last_sequence,
    float* scratch) {
#if FASTENC_VECTOR_BYTES == 64
  if (l.pairs) {
    if (!has_bf16_tiles())
      return attend_in_block<PairProducts<false>>(l, x, attended, first_sequence, last_sequence, scratch);
    const AmxTiles tiles;
    return attend_in_block<PairProducts<true>>(l, x, attended, first_sequence, last_sequence, scratch);
  }
#endif
  attend_in_block<FloatProducts>(l, x, attended, first_sequence, last_sequence, scratch);
}

void layer_after_attention(
    const LayerAfterAttention& l, const void* attended, const void* residual, void* y, void* next_residual,
    int64_t first, int64_t last, float* scratch) {
#if FASTENC_VECTOR_BYTES == 64
  if (l.pairs) {
    if (!has_bf16_tiles())
      return end_block<PairProducts<false>>(l, attended, residual, y, next_residual, first, last, scratch);
    const AmxTiles tiles;
    return end_block<PairProducts<true>>(l, attended, residual, y, next_residual, first, last, scratch);
  }
#endif
  end_block<FloatProducts>(l, attended, residual, y, next_residual, first, last, scratch);
}

void layer_activation(const LayerAfterAttention& l, float* up, int64_t first, int64_t last) {
  const int64_t inner = l.down.depth;
  float* rows = up + first * l.up.columns;
  activate_in_place(l.activation, rows, l.gated ? rows + inner : nullptr, l.up.columns, inner, last - first);
}
