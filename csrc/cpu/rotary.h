// A pair of elements is read before it is written, so that a row can be rotated in place.

// One head of one token, by the angles of its position.
template <class T>
FASTENC_INLINE void rotate_row(const T* x, T* y, const float* angles, int64_t half, bool inverse) {
  auto rotate = [&](int64_t d, int n) __attribute__((always_inline)) {
    const Vec first = load_n(x + d, n), second = load_n(x + half + d, n);
    const Vec cosine = load_n(angles + d, n), sine = load_n(angles + half + d, n) * (inverse ? -1.f : 1.f);
    store_n(y + d, first * cosine - second * sine, n);
    store_n(y + half + d, second * cosine + first * sine, n);
  };
  FASTENC_FOR_COLUMNS(half, rotate);
}

template <class T>
static void rotary_rows(const Rotary& r, int64_t begin, int64_t end, int64_t position) {
  const int64_t rest = r.head_dim - r.rotary_dim;
  for (int64_t token = begin; token < end; ++token, ++position)
    for (int64_t head = 0; head < r.num_heads; ++head) {
      const T* x = (const T*)r.x + token * r.token_stride + head * r.head_stride;
      T* y = (T*)r.y + (token * r.num_heads + head) * r.head_dim;
      rotate_row(x, y, r.table + position * r.rotary_dim, r.rotary_dim / 2, r.inverse);
      __builtin_memcpy(y + r.rotary_dim, x + r.rotary_dim, rest * sizeof(T));
    }
}

void rotary(const Rotary& r, bool bf16, int64_t begin, int64_t end, int64_t position) {
  bf16 ? rotary_rows<bfloat16>(r, begin, end, position) : rotary_rows<float>(r, begin, end, position);
}
