// Tokens are read once; the sums or maxima of the columns stay in the first-level cache.

// Long sums are formed from partial sums, whose rounding errors do not grow with the length.
constexpr int64_t kPartialRows = 32;

template <class T>
static void mean_of_rows(const T* x, int64_t rows, int64_t width, T* y, float* sums) {
  const int64_t padded = (width + kLanes - 1) / kLanes * kLanes;
  float* partial = sums + padded;
  for (int64_t start = 0; start < rows; start += kPartialRows) {
    const int64_t end = start + kPartialRows < rows ? start + kPartialRows : rows;
    for (int64_t row = start; row < end; ++row) {
      auto add_row = [&](int64_t c, int n) __attribute__((always_inline)) {
        const Vec value = load_n(x + row * width + c, n);
        store(partial + c, row == start ? value : load(partial + c) + value);
      };
      FASTENC_FOR_COLUMNS(width, add_row);
    }
    for (int64_t c = 0; c < padded; c += kLanes)
      store(sums + c, start == 0 ? load(partial + c) : load(sums + c) + load(partial + c));
  }
  auto divide = [&](int64_t c, int n) __attribute__((always_inline)) {
    store_n(y + c, load(sums + c) / splat((float)rows), n);
  };
  FASTENC_FOR_COLUMNS(width, divide);
}

// `first` is the number of x's first row in the batch; argmax holds such numbers.
template <class T>
static void max_of_rows(
    const T* x, int64_t first, int64_t rows, int64_t width, T* y, int32_t* argmax, float* largest) {
  float* argmax_row = largest + (width + kLanes - 1) / kLanes * kLanes;  // holds integers
  for (int64_t row = 0; row < rows; ++row) {
    const VecI here = VecI{} + (int32_t)(first + row);
    auto compare = [&](int64_t c, int n) __attribute__((always_inline)) {
      const Vec value = load_n(x + row * width + c, n);
      const Vec before = row ? load(largest + c) : value;
      const VecI better = row ? (value > before) | ((value != value) & (before == before)) : ~VecI{};
      store(largest + c, better ? value : before);
      store(argmax_row + c, (Vec)(better ? here : (VecI)load(argmax_row + c)));
    };
    FASTENC_FOR_COLUMNS(width, compare);
  }
  auto write = [&](int64_t c, int n) __attribute__((always_inline)) { store_n(y + c, load(largest + c), n); };
  FASTENC_FOR_COLUMNS(width, write);
  __builtin_memcpy(argmax, argmax_row, width * sizeof(int32_t));
}

template <class T>
static void segment_pool_forward_rows(const SegmentPool& a, int64_t begin, int64_t end, float* scratch) {
  for (int64_t sequence = begin; sequence < end; ++sequence) {
    const int64_t first = a.cu_seqlens[sequence], rows = a.cu_seqlens[sequence + 1] - first;
    const T* x = (const T*)a.in + first * a.width;
    T* y = (T*)a.out + sequence * a.width;
    if (rows == 0) {
      __builtin_memset(y, 0, a.width * sizeof(T));
      if (a.mode == Pooling::max) __builtin_memset(a.argmax + sequence * a.width, 0, a.width * sizeof(int32_t));
    } else if (a.mode == Pooling::cls) {
      __builtin_memcpy(y, x, a.width * sizeof(T));
    } else if (a.mode == Pooling::mean) {
      mean_of_rows(x, rows, a.width, y, scratch);
    } else {
      max_of_rows(x, first, rows, a.width, y, a.argmax + sequence * a.width, scratch);
    }
  }
}

template <class T>
static void segment_pool_backward_rows(const SegmentPool& a, int64_t begin, int64_t end) {
  for (int64_t sequence = begin; sequence < end; ++sequence) {
    const int64_t first = a.cu_seqlens[sequence], rows = a.cu_seqlens[sequence + 1] - first;
    if (rows == 0) continue;
    const T* dy = (const T*)a.in + sequence * a.width;
    T* all = (T*)a.out;
    T* dx = all + first * a.width;
    if (a.mode == Pooling::mean) {
      auto divide = [&](int64_t c, int n) __attribute__((always_inline)) {
        store_n(dx + c, load_n(dy + c, n) / splat((float)rows), n);
      };
      FASTENC_FOR_COLUMNS(a.width, divide);
      for (int64_t row = 1; row < rows; ++row) __builtin_memcpy(dx + row * a.width, dx, a.width * sizeof(T));
      continue;
    }
    __builtin_memset(dx, 0, rows * a.width * sizeof(T));
    if (a.mode == Pooling::cls) {
      __builtin_memcpy(dx, dy, a.width * sizeof(T));
    } else {
      const int32_t* argmax = a.argmax + sequence * a.width;
      for (int64_t c = 0; c < a.width; ++c) all[argmax[c] * a.width + c] = dy[c];
    }
  }
}

void segment_pool_forward(const SegmentPool& a, bool bf16, int64_t begin, int64_t end, float* scratch) {
  bf16 ? segment_pool_forward_rows<bfloat16>(a, begin, end, scratch)
       : segment_pool_forward_rows<float>(a, begin, end, scratch);
}

void segment_pool_backward(const SegmentPool& a, bool bf16, int64_t begin, int64_t end) {
  bf16 ? segment_pool_backward_rows<bfloat16>(a, begin, end) : segment_pool_backward_rows<float>(a, begin, end);
}
