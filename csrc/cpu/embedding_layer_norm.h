// Writes the sum of a token's rows, in float, to h; returns the sum of its vectors.
template <class T>
FASTENC_INLINE Vec embed_row(const EmbeddingRows& a, int64_t token, float* h) {
  const T* word = (const T*)a.word + a.ids[token] * a.width;
  const T* position =
      a.position ? (const T*)a.position + (a.position_ids[token] + a.position_offset) * a.width : nullptr;
  const T* token_type = (const T*)a.token_type;
  if (a.token_type_ids) token_type += a.token_type_ids[token] * a.width;
  Vec sums{};
  auto form = [&](int64_t c, int n) __attribute__((always_inline)) {
    Vec v = load_n(word + c, n);
    if (token_type) v += load_n(token_type + c, n);
    if (position) v += load_n(position + c, n);
    store_n(h + c, v, n);
    sums += v;
  };
  FASTENC_FOR_COLUMNS(a.width, form);
  return sums;
}

template <class T>
static void embedding_layer_norm_forward_rows(
    const EmbeddingLayerNormForward& a, int64_t begin, int64_t end, float* scratch) {
  const int64_t width = a.tables.width;
  float* h = scratch;
  float* keep = scratch + dropout_room(width);
  for (int64_t row = begin; row < end; ++row) {
    T* y = (T*)a.y + row * width;
    const Vec sums = embed_row<T>(a.tables, row, h);
    const RowStatistics s = row_statistics(h, sums, width, a.eps, false);
    if (a.dropout.threshold) dropout_scales(a.dropout, 0, (uint32_t)row, width, keep);
    auto write = [&](int64_t c, int n) __attribute__((always_inline)) {
      Vec v = normalised(h, s, a.weight, a.bias, c, n);
      if (a.dropout.threshold) {
        const Vec scale = load(keep + c);
        v = scale == 0.f ? Vec{} : v * scale;
      }
      store_n(y + c, v, n);
    };
    FASTENC_FOR_COLUMNS(width, write);
    if (a.mean) a.mean[row] = s.mean;
    if (a.rstd) a.rstd[row] = s.rstd;
  }
}

template <class T>
static void embedding_layer_norm_backward_rows(
    const EmbeddingLayerNormBackward& a, int64_t begin, int64_t end, float* scratch) {
  const int64_t width = a.tables.width;
  float* h = scratch;
  float* dy = scratch + dropout_room(width);
  for (int64_t row = begin; row < end; ++row) {
    embed_row<T>(a.tables, row, h);
    if (a.dropout.threshold) dropout_scales(a.dropout, 0, (uint32_t)row, width, dy);
    auto widen = [&](int64_t c, int n) __attribute__((always_inline)) {
      const Vec d = load_n((const T*)a.dy + row * width + c, n);
      store_n(dy + c, a.dropout.threshold ? d * load(dy + c) : d, n);
    };
    FASTENC_FOR_COLUMNS(width, widen);
    auto write = [&](int, int64_t c, int n, Vec d) __attribute__((always_inline)) {
      store_n((T*)a.dh + row * width + c, d, n);
    };
    layer_norm_backward_block<1>(
        (const float*)dy, (const float*)h, a.mean + row, a.rstd + row, a.weight, false, width, a.dweight, a.dbias,
        write);
  }
}

template <class To, class From>
FASTENC_INLINE void add_row(To* to, const From* from, int64_t width) {
  auto add = [&](int64_t c, int n) __attribute__((always_inline)) {
    store_n(to + c, load_n(to + c, n) + load_n(from + c, n), n);
  };
  FASTENC_FOR_COLUMNS(width, add);
}

template <class T>
static void add_rows_in_windows_of(const AddRows& a, int64_t begin, int64_t end, float* sums) {
  for (int64_t window = begin; window < end; ++window) {
    const int64_t first = window * kAddRowsWindow;
    const int64_t last = first + kAddRowsWindow < a.count ? first + kAddRowsWindow : a.count;
    for (int64_t i = first; i < last;) {
      const int64_t id = a.sorted_ids[i], row = id + a.offset, start = i;
      __builtin_memset(sums, 0, a.width * sizeof(float));
      for (; i < last && a.sorted_ids[i] == id; ++i) add_row(sums, (const T*)a.rows + a.order[i] * a.width, a.width);
      const bool begins = start == 0 || a.sorted_ids[start - 1] != id;
      const bool ends = i == a.count || a.sorted_ids[i] != id;
      if (!(begins && ends))
        __builtin_memcpy(a.partial + (2 * window + (start != first)) * a.width, sums, a.width * sizeof(float));
      else if (row != a.padding_idx)
        add_row((T*)a.table + row * a.width, (const float*)sums, a.width);
    }
  }
}

// An id that crosses windows is summed by the window in which it begins.
template <class T>
static void add_rows_across_windows_of(const AddRows& a, int64_t begin, int64_t end, float* sums) {
  for (int64_t window = begin; window < end; ++window) {
    const int64_t first = window * kAddRowsWindow, next = first + kAddRowsWindow;
    if (next >= a.count || a.sorted_ids[next] != a.sorted_ids[next - 1]) continue;
    const int64_t id = a.sorted_ids[next], row = id + a.offset;
    const bool whole = a.sorted_ids[first] == id;
    if (row == a.padding_idx || (whole && first > 0 && a.sorted_ids[first - 1] == id)) continue;
    __builtin_memcpy(sums, a.partial + (2 * window + !whole) * a.width, a.width * sizeof(float));
    for (int64_t i = next; i < a.count && a.sorted_ids[i] == id; i += kAddRowsWindow)
      add_row(sums, (const float*)a.partial + 2 * (i / kAddRowsWindow) * a.width, a.width);
    add_row((T*)a.table + row * a.width, (const float*)sums, a.width);
  }
}

void embedding_layer_norm_forward(
    const EmbeddingLayerNormForward& a, bool bf16, int64_t begin, int64_t end, float* scratch) {
  bf16 ? embedding_layer_norm_forward_rows<bfloat16>(a, begin, end, scratch)
       : embedding_layer_norm_forward_rows<float>(a, begin, end, scratch);
}

void embedding_layer_norm_backward(
    const EmbeddingLayerNormBackward& a, bool bf16, int64_t begin, int64_t end, float* scratch) {
  bf16 ? embedding_layer_norm_backward_rows<bfloat16>(a, begin, end, scratch)
       : embedding_layer_norm_backward_rows<float>(a, begin, end, scratch);
}

void add_rows_in_windows(const AddRows& a, bool bf16, int64_t begin, int64_t end, float* scratch) {
  bf16 ? add_rows_in_windows_of<bfloat16>(a, begin, end, scratch)
       : add_rows_in_windows_of<float>(a, begin, end, scratch);
}

void add_rows_across_windows(const AddRows& a, bool bf16, int64_t begin, int64_t end, float* scratch) {
  bf16 ? add_rows_across_windows_of<bfloat16>(a, begin, end, scratch)
       : add_rows_across_windows_of<float>(a, begin, end, scratch);
}
