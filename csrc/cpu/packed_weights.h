// Groups of kPanel columns; see ../packed_weights.h.

template <class T>
static void pack_panel_group_of(const WeightRows& weight, int64_t group, float* packed) {
  const int64_t depth = weight.depth;
  float* panel = packed + group * kPanel * depth;
  for (int64_t c = 0; c < kPanel; c += kLanes) {
    const T* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int64_t column = group * kPanel + c + i;
      rows[i] = column < weight.count ? (const T*)weight.rows[column] : nullptr;
    }
    for (int64_t k = 0; k < depth; k += kLanes) {
      const int count = depth - k < kLanes ? depth - k : kLanes;
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i] = rows[i] ? load_n(rows[i] + k, count) : Vec{};
      transpose(block);
      for (int i = 0; i < count; ++i) store(panel + (k + i) * kPanel + c, block[i]);
    }
  }
}

void pack_panel_group(const WeightRows& weight, int64_t group, float* packed) {
  weight.bf16 ? pack_panel_group_of<bfloat16>(weight, group, packed)
              : pack_panel_group_of<float>(weight, group, packed);
}
