// See ../convert.h.

template <class From, class To>
static void convert(const From* source, To* target, int64_t count) {
  auto step = [&](int64_t c, int n) __attribute__((always_inline)) { store_n(target + c, load_n(source + c, n), n); };
  FASTENC_FOR_COLUMNS(count, step);
}

void widen(const bfloat16* source, float* target, int64_t count) { convert(source, target, count); }

void narrow(const float* source, bfloat16* target, int64_t count) { convert(source, target, count); }
