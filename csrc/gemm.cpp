#include "gemm.h"

#include "convert_tensors.h"
#include "row_blocks.h"
#include "scratch.h"
#include "weights.h"

namespace fastenc {
namespace {

// Rows of a task. With fewer, packing a panel of B would cost much beside its products; with more, A's rows would leave
// the second-level cache.
constexpr int64_t kLeastRows = 192, kMostRows = 512;
constexpr int64_t kLeastCopiedColumns = 256, kLeastCopiedRows = 64;  // of a task that copies its rows
// Up to this number of rows a weight is read unpacked: packing would cost more than it saves.
constexpr int64_t kFewRows = 128;  // ops/gemm.py has the same number
constexpr int64_t kFewRowsColumns = 16;  // columns of a task
constexpr int64_t kRowsAtOnce = 128;     // rows of A that stay in the second-level cache while all weights are read

// The fewest blocks of rows that give each thread several tasks.
int64_t row_blocks_of(int64_t rows, int64_t panels) {
  const int64_t threads = torch::stable::get_num_threads();
  return std::clamp(4 * threads / panels, (rows + kMostRows - 1) / kMostRows, std::max<int64_t>(1, rows / kLeastRows));
}

// A grid of tasks over C's rows and its panels of kGemmColumns columns.
struct Grid {
  int64_t row_blocks, column_blocks;
};

// Few, wide tasks where rows are copied, because each task copies them; else a panel a task.
Grid grid_of(const Gemm& m, int64_t panels) {
  if (!copies_rows(isa() == Isa::avx2 ? 32 : 0, m.rows)) return {row_blocks_of(m.rows, panels), panels};
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t most = std::max<int64_t>(1, m.columns / kLeastCopiedColumns);
  auto grid = [&](int64_t row_blocks) {
    return Grid{row_blocks, threads == 1 ? 1 : std::clamp<int64_t>((4 * threads + row_blocks - 1) / row_blocks, 1, most)};
  };
  const Grid few = grid((m.rows + kCopiedRows - 1) / kCopiedRows);
  if (few.row_blocks * few.column_blocks % threads == 0) return few;
  // As many tasks for each thread, so that none waits for another's last one.
  const int64_t even = (few.row_blocks + threads - 1) / threads * threads;
  return m.rows / even < kLeastCopiedRows ? few : grid(even);
}

}  // namespace

void parallel_gemm(const Gemm& m) {
  if (!m.rows || !m.columns) return;
  const int64_t panels = (m.columns + kGemmColumns - 1) / kGemmColumns;
  const auto [row_blocks, column_blocks] = grid_of(m, panels);
  torch::stable::parallel_for(0, row_blocks * column_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / column_blocks, column = task % column_blocks;
      FASTENC_CALL(
          gemm_block, m, m.rows * row / row_blocks, m.rows * (row + 1) / row_blocks,
          panels * column / column_blocks * kGemmColumns,
          std::min(panels * (column + 1) / column_blocks * kGemmColumns, m.columns));
    }
  });
}

void parallel_gemm(const GemmFewRows& m) {
  const int64_t columns = m.weight.count, tasks = (columns + kFewRowsColumns - 1) / kFewRowsColumns;
  auto for_columns = [&](auto run) {
    torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
      run(begin * kFewRowsColumns, std::min(end * kFewRowsColumns, columns));
    });
  };
#if FASTENC_X86
  if (m.a_bf16) {
    float* rows = thread_scratch(pair_rows_floats(m.rows, m.weight.depth), Scratch::tiles);
    avx512::pack_pair_rows(m, rows);
    return for_columns([&](int64_t left, int64_t right) { avx512::gemm_pairs(m, rows, left, right); });
  }
#endif
  GemmFewRows some = m;
  for (int64_t row = 0; row < m.rows; row += kRowsAtOnce) {
    some.a = static_cast<const char*>(m.a) + row * m.a_row * (m.a_bf16 ? sizeof(bfloat16) : sizeof(float));
    some.c = m.c + row * columns;
    some.rows = std::min(kRowsAtOnce, m.rows - row);
#if FASTENC_ARM
    if (m.a_bf16) {
      for_columns([&](int64_t left, int64_t right) { neon_bf16::gemm_pairs(some, left, right); });
      continue;
    }
#endif
    float* packed = thread_scratch(few_rows_floats(some), Scratch::tiles);
    FASTENC_CALL(pack_few_rows, some, packed);
    for_columns([&](int64_t left, int64_t right) { FASTENC_CALL(gemm_few_rows, some, packed, left, right); });
  }
}

void parallel_gemm(const GemmTiles& m) {
#if FASTENC_X86
  auto filled = [&](int64_t first, int64_t last) {
    float* rows = thread_scratch(tile_rows_floats(last - first, m.depth), Scratch::tiles);
    avx512::fill_tile_rows(m, first, last, rows);
    return rows;
  };
  if (m.rows <= kFewRows) {
    const int64_t panels = (m.columns + kTileColumns - 1) / kTileColumns;
    const float* rows = filled(0, m.rows);
    torch::stable::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
      avx512::gemm_tiles(m, rows, 0, m.rows, begin * kTileColumns, std::min(end * kTileColumns, m.columns));
    });
    return;
  }
  for_row_blocks(m.rows, kAmxRows, [&](int64_t first, int64_t last) {
    avx512::gemm_tiles(m, filled(first, last), first, last, 0, m.columns);
  });
#endif
}

namespace {

Tensor with_unit_stride(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2, "gemm: both must be matrices");
  return x.stride(0) == 1 || x.stride(1) == 1 ? x : as_contiguous(x);
}

void set_a(Gemm& m, const Tensor& a) {
  STD_TORCH_CHECK(
      m.depth > 0 && a.size(1) == m.depth && !is_bfloat16(a), "gemm: the sizes must be (rows, depth), (depth, columns)");
  m.rows = a.size(0);
  m.a = static_cast<const float*>(a.const_data_ptr());
  m.a_row = a.stride(0);
  m.a_depth = a.stride(1);
}

Gemm with_b(const Tensor& b, const float* bias) {
  Gemm m{};
  m.b = b.const_data_ptr();
  m.b_bf16 = is_bfloat16(b);
  m.b_depth = b.stride(0);
  m.b_column = b.stride(1);
  m.depth = b.size(0);
  m.columns = b.size(1);
  m.bias = bias;
  return m;
}

// A B + bias in A's dtype, float32 or bfloat16. B may be bfloat16 in either case; sums are float32.
Tensor gemm(Tensor a, Tensor b_, std::optional<Tensor> bias) {
  const Tensor b = with_unit_stride(b_);
  const int64_t rows = a.size(0), columns = b.size(1), depth = b.size(0);
  STD_TORCH_CHECK(a.dim() == 2 && a.size(1) == depth, "gemm: the sizes must be (rows, depth) and (depth, columns)");
  const FloatVector bias_values(bias);
  STD_TORCH_CHECK(!bias || bias->numel() == columns, "gemm: bias must have a number for each column");
  const bool bf16 = is_bfloat16(a), pairs = bf16 && is_bfloat16(b) && has_bf16_dot_products();
  // Pairs are multiplied by the same instructions whatever the number of rows, so that an element's sum does not depend
  // on it.
  const bool few = (rows <= kFewRows || pairs) && b.stride(0) == 1 && b.stride(1) >= depth;
  Tensor c = empty({rows, columns}, a.scalar_type());
  if (!rows || !columns) return c;
  a = few || bf16 ? as_contiguous(a) : with_unit_stride(a);
  const bool widened = bf16 && !(few && pairs);
  float* sums = bf16 ? thread_scratch(rows * (columns + (widened ? depth : 0)), Scratch::operands)
                     : static_cast<float*>(c.mutable_data_ptr());
  const void* a_values = a.const_data_ptr();
  if (widened) {
    widen_all(a, sums + rows * columns);
    a_values = sums + rows * columns;
  }
  if (few) {
    const Weight weight({torch::stable::transpose(b, 0, 1)});
    if (pairs && rows > kFewRows && has_bf16_panels()) {
      float* packed = thread_scratch(tile_weight_floats(columns, depth), Scratch::weights);
      weight.pack_tiles(packed);
      parallel_gemm(GemmTiles{a_values, true, depth, packed, bias_values.data(), sums, rows, columns, depth});
    } else {
      parallel_gemm(GemmFewRows{a_values, bf16 && !widened, depth, weight.rows(), bias_values.data(), sums, rows});
    }
  } else {
    Gemm m = with_b(b, bias_values.data());
    if (bf16) {
      m.rows = rows;
      m.a = static_cast<const float*>(a_values);
      m.a_row = depth;
      m.a_depth = 1;
    } else {
      set_a(m, a);
    }
    m.c = sums;
    parallel_gemm(m);
  }
  if (bf16) narrow_all(sums, c);
  return c;
}

Tensor gemm_packed(Tensor a, Tensor packed, std::optional<Tensor> bias, int64_t columns) {
  const FloatVector bias_values(bias);
  STD_TORCH_CHECK(!bias || bias->numel() == columns, "gemm: bias must have a number for each column");
  if (is_bfloat16(packed)) {
    const int64_t rows = a.size(0), depth = a.size(1);
    const float* weight = checked_tiles(packed, depth, columns);
    a = as_contiguous(a);
    Tensor c = empty({rows, columns}, ScalarType::Float);
    auto* sums = static_cast<float*>(c.mutable_data_ptr());
    parallel_gemm(
        GemmTiles{a.const_data_ptr(), is_bfloat16(a), depth, weight, bias_values.data(), sums, rows, columns, depth});
    return c;
  }
  Gemm m{};
  m.depth = a.size(1);
  m.packed_b = checked_packed(packed, m.depth, columns);
  m.columns = columns;
  m.bias = bias_values.data();
  a = with_unit_stride(a);
  set_a(m, a);
  Tensor c = empty({a.size(0), columns}, ScalarType::Float);
  m.c = static_cast<float*>(c.mutable_data_ptr());
  parallel_gemm(m);
  return c;
}

void gemm_add(Tensor c, Tensor a, Tensor b_) {
  const Tensor b = with_unit_stride(b_);
  STD_TORCH_CHECK(
      c.dim() == 2 && c.size(0) == a.size(0) && c.size(1) == b.size(1) && c.is_contiguous() && !is_bfloat16(c),
      "gemm: c must be contiguous float32 (rows, columns)");
  Gemm m = with_b(b, nullptr);
  m.add = true;
  a = with_unit_stride(a);
  set_a(m, a);
  m.c = static_cast<float*>(c.mutable_data_ptr());
  parallel_gemm(m);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastenc, CPU, m) {
  m.impl("gemm", TORCH_BOX(&gemm));
  m.impl("gemm_add_", TORCH_BOX(&gemm_add));
  m.impl("gemm_packed", TORCH_BOX(&gemm_packed));
}

}  // namespace fastenc
