// The activation of a layer in 8 bits; see ../int8_layer.h.

template <Activation kind>
static void int8_activate_rows(
    float* inner, const float* gate, int64_t stride, int64_t first, int64_t last, const Int8Rows& to) {
  for (int64_t row = first; row < last; row += kLanes) {
    float* block = inner + row * stride;
    const float* factors = gate ? gate + row * stride : nullptr;
    auto activated = [&](int64_t r, int64_t c) __attribute__((always_inline)) {
      float* u = block + r * stride + c;
      Vec value = activate<kind>(load(u));
      if (factors) value *= load(factors + r * stride + c);
      store(u, value);
      return value;
    };
    quantise_block(block, stride, last - row < kLanes ? last - row : kLanes, to, row, activated);
  }
}

void int8_activate(
    Activation kind, float* inner, const float* gate, int64_t stride, int64_t first, int64_t last, const Int8Rows& to) {
  switch (kind) {
    case Activation::gelu:
      return int8_activate_rows<Activation::gelu>(inner, gate, stride, first, last, to);
    case Activation::gelu_tanh:
      return int8_activate_rows<Activation::gelu_tanh>(inner, gate, stride, first, last, to);
    case Activation::silu:
      return int8_activate_rows<Activation::silu>(inner, gate, stride, first, last, to);
    case Activation::relu:
      return int8_activate_rows<Activation::relu>(inner, gate, stride, first, last, to);
  }
}
