// Activations act(u) = u * gate(u), with their slopes gate(u) + u * gate'(u):
// gelu:      gate = P(u), the normal distribution, of density p.
// gelu_tanh: gate = s(2k), s the logistic function, k = sqrt(2/pi) * (u + 0.044715 u^3).
// silu:      gate = s(u).
// relu:      gate = 1 for u > 0, else 0.

// e^-z, where the gate is s(z). It overflows to infinity, so that the gate of the lowest number is 0.
template <Activation kind>
FASTENC_INLINE Vec exp_minus_argument(Vec u) {
  if constexpr (kind == Activation::silu) return exp(-u);
  return exp(u * -1.5957691216057308f * (u * u * 0.044715f + 1.f));
}

template <Activation kind>
FASTENC_INLINE Vec activate(Vec u) {
  if constexpr (kind == Activation::gelu) return u * normal_cdf(u);
  if constexpr (kind == Activation::relu) return u < 0.f ? Vec{} : u;  // NaN stays NaN
  return u / (exp_minus_argument<kind>(u) + 1.f);
}

struct Slope {
  Vec value, slope;
};

template <Activation kind>
FASTENC_INLINE Slope activate_with_slope(Vec u) {
  if constexpr (kind == Activation::gelu) {
    const Vec gate = normal_cdf(u);
    return {u * gate, gate + u * 0.3989422804014327f * exp(u * u * -0.5f)};
  }
  if constexpr (kind == Activation::relu) return {u < 0.f ? Vec{} : u, u > 0.f ? splat(1.f) : Vec{}};
  const Vec e = exp_minus_argument<kind>(u);
  const Vec gate = splat(1.f) / (e + 1.f);
  // 1 - gate without cancellation; where e is infinite the product is NaN, and min gives 1.
  Vec from_gate = u * gate * min(e * gate, splat(1.f));
  if constexpr (kind == Activation::gelu_tanh)  // for large |u| from_gate is 0, which an infinite factor would make NaN
    from_gate *= 1.5957691216057308f * (min(u * u, splat(1e4f)) * (3.f * 0.044715f) + 1.f);
  return {u * gate, gate + from_gate};
}

// Calls rows<storage type, activation>(arguments).
#define FASTENC_CALL_ROWS(rows, bf16, activation, ...)                                            \
  do {                                                                                            \
    switch (activation) {                                                                         \
      case Activation::gelu:                                                                      \
        bf16 ? rows<bfloat16, Activation::gelu>(__VA_ARGS__)                                      \
             : rows<float, Activation::gelu>(__VA_ARGS__);                                        \
        break;                                                                                    \
      case Activation::gelu_tanh:                                                                 \
        bf16 ? rows<bfloat16, Activation::gelu_tanh>(__VA_ARGS__)                                 \
             : rows<float, Activation::gelu_tanh>(__VA_ARGS__);                                   \
        break;                                                                                    \
      case Activation::silu:                                                                      \
        bf16 ? rows<bfloat16, Activation::silu>(__VA_ARGS__)                                      \
             : rows<float, Activation::silu>(__VA_ARGS__);                                        \
        break;                                                                                    \
      case Activation::relu:                                                                      \
        bf16 ? rows<bfloat16, Activation::relu>(__VA_ARGS__)                                      \
             : rows<float, Activation::relu>(__VA_ARGS__);                                        \
    }                                                                                             \
  } while (0)
