// x W^T + bias of operands in 8 bits, measured as they are packed.
// A weight is symmetric, with a scale for each column: w = scale_w * q_w, q_w in -127..127. A row of x is affine, with a
// range for each group of its columns: x = low + scale_x * q_x, q_x in 0..255 from the least to the largest value. So, of
// each group,
//   sum x w = scale_x * scale_w * sum(q_x q_w) + low * (scale_w * sum q_w).
// |sum(q_x q_w)| is below 2^24 and exact as a float, so VNNI, AMX and AVX2's products of 16 bits give the same bits.
#pragma once
#include <cstddef>
#include <cstdint>

#include "isa.h"
#include "packed_weights.h"

namespace fastenc {

constexpr int64_t kInt8Unit = 64;         // a group is a multiple of it: the terms of a row of an AMX tile
constexpr int64_t kInt8LargestGroup = 384;  // 255 * 127 * 384 < 2^24
static_assert(255 * 127 * kInt8LargestGroup < 1 << 24);

// Groups of columns that share a range: the fewest equal ones of a depth that are multiples of kInt8Unit. Where the depth
// is no multiple of it, the last group lacks columns.
struct Int8Groups {
  int64_t depth, count, size;

  explicit Int8Groups(int64_t depth_) : depth(depth_), count(1) {
    const int64_t units = (depth + kInt8Unit - 1) / kInt8Unit;
    while (units % count || units / count * kInt8Unit > kInt8LargestGroup) ++count;
    size = units / count * kInt8Unit;
  }
  // The groups of `columns` columns that begin where a group begins.
  Int8Groups part(int64_t columns) const {
    Int8Groups groups = *this;
    groups.depth = columns;
    groups.count = (columns + size - 1) / size;
    return groups;
  }
  int64_t columns(int64_t group) const { return group + 1 < count ? size : depth - group * size; }
  int64_t padded() const { return count * size; }
};

// A block of rows. Row r has its q at q + r * stride, and {scale, low} of its group g at
// ranges[2 * (r * groups.count + g)]. AMX reads rows up to a multiple of 16.
struct Int8Rows {
  uint8_t* q;
  int64_t stride;
  float* ranges;
  Int8Groups groups;

  // Bytes of scratch for this number of rows.
  static int64_t bytes(int64_t rows, const Int8Groups& groups) {
    return (rows + 15) / 16 * 16 * (stride_of(groups) + 8 * groups.count);
  }
  static Int8Rows in(char* scratch, int64_t rows, const Int8Groups& groups) {
    const int64_t q_bytes = (rows + 15) / 16 * 16 * stride_of(groups);
    return {reinterpret_cast<uint8_t*>(scratch), stride_of(groups), reinterpret_cast<float*>(scratch + q_bytes), groups};
  }

 private:
  // A stride that is a multiple of 4096 would map all rows to the same lines of the cache.
  static int64_t stride_of(const Int8Groups& groups) { return groups.padded() + 64; }
};

// A packed weight: panels of panel_columns() columns, the last filled up with 0. A panel has its columns' scales; then for
// each group scale * sum(q), and q, 4 terms of the depth of each column side by side, in tiles of kInt8Unit terms.
struct Int8Weight {
  const char* packed;
  const float* bias;  // or null
  int64_t depth, columns;
};

inline int64_t int8_panel_bytes(int64_t depth, int64_t panel_columns) {
  const Int8Groups groups(depth);
  return panel_columns * (4 * (1 + groups.count) + groups.padded());
}

// C (rows x columns) = bias + or += of the groups [first_group, first_group + a.groups.count) of the weight's depth and its
// columns [left, left + columns). left is a multiple of panel_columns(), columns of 16.
struct Int8Product {
  Int8Rows a;
  Int8Weight w;
  int64_t first_group, rows, left, columns;
  float* c;
  int64_t c_stride;
  bool add;
  const char* next;  // what is read after this product
};

#if FASTENC_X86
#define FASTENC_DECLARE_INT8(...) \
  namespace avx2 {                \
  __VA_ARGS__                     \
  }                               \
  namespace avx_vnni {            \
  __VA_ARGS__                     \
  }                               \
  namespace avx512 {              \
  __VA_ARGS__                     \
  }
// Calls fastenc::<isa>::function(arguments), where has_int8_products().
#define FASTENC_CALL_INT8(function, ...)            \
  do {                                              \
    if (::fastenc::isa() == ::fastenc::Isa::avx512) \
      ::fastenc::avx512::function(__VA_ARGS__);     \
    else if (::fastenc::has_avx_vnni())             \
      ::fastenc::avx_vnni::function(__VA_ARGS__);   \
    else                                            \
      ::fastenc::avx2::function(__VA_ARGS__);       \
  } while (0)
#else
#define FASTENC_DECLARE_INT8(...)
// The entries refuse the call before; their arguments are named so that no compiler calls them unused.
#define FASTENC_CALL_INT8(function, ...) ::fastenc::never_called(__VA_ARGS__)
template <typename... Arguments>
void never_called(const Arguments&...) {}
#endif

FASTENC_DECLARE_INT8(
    void int8_pack(const WeightRows&, int64_t panel, char* packed);
    // Rows [first, last) of x, which are `stride` apart, become those of `to`.
    void int8_quantise(const float* x, int64_t stride, int64_t first, int64_t last, const Int8Rows& to);
    void int8_multiply(const Int8Product&);)

}  // namespace fastenc
