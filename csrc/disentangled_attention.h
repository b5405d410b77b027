// Attention whose scores also compare content with relative positions:
//   s[i, j] = scale * (q[i] . k[j] + q[i] . keys[d] + k[j] . queries[d]),  d = j - i
// The tables have a row for each distance d, at d + longest - 1, so that the scores of a query along the keys are
// neighbours in a row of the product q keys^T. Between rows of a product and distances lies a shift by one a row.
#pragma once
#include <cstdint>

namespace fastenc {

struct PositionTables {
  int64_t longest;  // of the sequences; there are 2 * longest - 1 distances
  int64_t stride;   // of the transposed tables' rows: at least the distances and kPositionRoom columns of 0
  // Transposed, (num_heads, head_dim, stride), or null without the term; queries times `scale`.
  const float *keys_t, *queries_t;
  // Backward: the same tables row by row, (num_heads, stride, head_dim).
  const float *keys, *queries;
  // Backward: of the task's head, (2 * longest - 1, head_dim), added to.
  float *dkeys, *dqueries;
};

constexpr int64_t kPositionRoom = 64;

// Floats that a task needs beside attention's own scratch.
int64_t position_scratch(int64_t length, int64_t head_dim);

}  // namespace fastenc
