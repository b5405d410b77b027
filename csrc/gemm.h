// Matrix products with float32 sums: C = A B + bias or C += A B.
#pragma once
#include <cstdint>

#include "isa.h"
#include "packed_weights.h"

namespace fastenc {

// Element (row, k) of A is at row * a_row + k * a_depth, (k, column) of B at k * b_depth + column * b_column; one
// stride of each is 1. C's rows are contiguous.
struct Gemm {
  const float* a;
  int64_t a_row, a_depth;
  const void* b;  // float or bfloat16
  bool b_bf16;
  int64_t b_depth, b_column;
  const float* packed_b;  // instead of b: packed as packed_weights.h says
  const float* bias;      // or null
  float* c;
  int64_t rows, columns, depth;
  bool add;  // C += instead of C =
};

// The same product for few rows: C = A W^T + bias. W (columns, depth) is read once, without packing.
struct GemmFewRows {
  const void* a;  // float; or bfloat16 if W is bfloat16 too and has_bf16_dot_products()
  bool a_bf16;
  int64_t a_row;  // elements from one row of A to the next
  WeightRows weight;
  const float* bias;  // or null
  float* c;           // its rows are contiguous
  int64_t rows;
};

constexpr int64_t kGemmColumns = 64;  // columns of a task: a multiple of every instruction set's panel width
constexpr int64_t kCopiedRows = 192;  // rows that are copied at once; a pass over them stays in the second-level cache

// Whether a product copies its rows first. Only measured, and done, with AVX2's vectors of 32 bytes.
constexpr bool copies_rows(int vector_bytes, int64_t rows) { return vector_bytes == 32 && rows > 128; }

FASTENC_FOR_EACH_ISA(
    // Rows [first, last) of columns [left, right).
    void gemm_block(const Gemm&, int64_t first, int64_t last, int64_t left, int64_t right);
    // Transposes A, which is float: few_rows_floats() floats.
    void pack_few_rows(const GemmFewRows&, float* packed);
    // All rows of columns [left, right), of float A.
    void gemm_few_rows(const GemmFewRows&, const float* packed, int64_t left, int64_t right);)

inline int64_t few_rows_floats(const GemmFewRows& m) { return (m.rows + 7) / 8 * 8 * m.weight.depth; }

// The same product for any number of rows, where has_bf16_panels().
struct GemmTiles {
  const void* a;  // float, which is rounded, or bfloat16
  bool a_bf16;
  int64_t a_row;        // elements from one row of A to the next
  const float* packed;  // W, packed in pairs as packed_weights.h says
  const float* bias;    // or null
  float* c;             // its rows are contiguous
  int64_t rows, columns, depth;
};

#if FASTENC_X86
namespace avx512 {
// Rows [first, last) of A as gemm_tiles reads them: tile_rows_floats() floats; and their product with columns
// [left, right).
void fill_tile_rows(const GemmTiles&, int64_t first, int64_t last, float* rows);
void gemm_tiles(const GemmTiles&, const float* rows, int64_t first, int64_t last, int64_t left, int64_t right);
// GemmFewRows of bfloat16 A, where has_bf16_panels(). A sum has the bits of GemmTiles'.
void pack_pair_rows(const GemmFewRows&, float* packed);  // pair_rows_floats() floats
void gemm_pairs(const GemmFewRows&, const float* packed, int64_t left, int64_t right);
}  // namespace avx512

// Floats of `rows` packed rows, in whole blocks of 16.
inline int64_t pair_rows_floats(int64_t rows, int64_t depth) { return (rows + 15) / 16 * 16 * tile_pairs(depth); }
#elif FASTENC_ARM
namespace neon_bf16 {
// GemmFewRows of bfloat16 A.
void gemm_pairs(const GemmFewRows&, int64_t left, int64_t right);
}  // namespace neon_bf16
#endif

// The threads divide the columns.
void parallel_gemm(const Gemm&);
void parallel_gemm(const GemmFewRows&);
// The threads divide the rows, or the columns if there are few rows.
void parallel_gemm(const GemmTiles&);

}  // namespace fastenc
