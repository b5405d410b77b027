// The products of a layer in bfloat16, by AMX if kTiles; see FloatProducts. What lies between them is float32, and rows are
// rounded once, where they enter a product.

template <bool kTiles>
struct PairProducts {
  using Rows = TileRows;
  using Attended = bfloat16;
  static constexpr int64_t kInner = kTileInnerColumns;

  static int64_t floats(int64_t rows, int64_t width, bool) { return tile_rows_floats(rows, width); }
  static Rows rows(const void* x, bool bf16, int64_t rows, int64_t width, float* buffer) {
    const TileRows to{(char*)buffer, tile_row_stride(width)};
    bf16 ? fill_tile_rows((const bfloat16*)x, width, rows, width, to)
         : fill_tile_rows((const float*)x, width, rows, width, to);
    return to;
  }
  static Rows activated(
      Activation kind, float* inner, const float* gate, int64_t columns, int64_t rows, float* buffer) {
    const TileRows to{(char*)buffer, tile_row_stride(kInner)};
    auto put = [&](int64_t row, int64_t c, Vec value) __attribute__((always_inline)) {
      store_pairs(to.data + row * to.stride + 2 * c, value);
    };
    activate_rows(kind, inner, gate, kInner, columns, rows, put);
    for (int64_t row = 0; row < rows; ++row) fill_up_row(to, row, columns);
    return to;
  }
  static const float* at(const LayerLinear&, int64_t, int64_t) { return nullptr; }  // a product prefetches by itself
  static void multiply(
      Rows a, const LayerLinear& w, int64_t top, int64_t depth, int64_t left, int64_t columns, float* c, int64_t ldc,
      int64_t rows, bool add, const float*) {
    const TilePanels panels = tile_panels(w.weight, w.depth, top);
    const float* bias = w.bias ? w.bias + left : nullptr;
    if constexpr (kTiles)
      multiply_tiles(a, panels, tile_pairs(depth) / kAmxRows, left, columns, bias, add, c, ldc, rows);
    else
      multiply_pairs(a, panels, depth / 2, left, columns, bias, add, c, ldc, rows);
  }
  static void attend(const Attention& a, const AttentionTask& task, float* scratch) {
    attention_of_pairs<kTiles, bfloat16>(a, task, scratch);
  }
};
