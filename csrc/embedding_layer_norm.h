// y = dropout(LayerNorm(h) * weight + bias),  h = word[id] + position[position_id + offset] + token_type[type],
// and a table's gradient: the sum of dh over the tokens that read each row.
#pragma once
#include <cstdint>

#include "dropout.h"
#include "isa.h"

namespace fastenc {

// Pointers that may be null say so; the tables, y, dy and dh hold elements of one storage type.
struct EmbeddingRows {
  const void* word;
  const void* position;    // or null
  const void* token_type;  // or null
  const int64_t* ids;
  const int64_t* position_ids;    // or null, with position
  const int64_t* token_type_ids;  // or null: row 0
  int64_t position_offset;
  int64_t width;
};

struct EmbeddingLayerNormForward {
  EmbeddingRows tables;
  const float* weight;  // or null: ones
  const float* bias;    // or null: zeros
  void* y;
  float* mean;  // or null
  float* rstd;  // or null
  float eps;
  Dropout dropout;
};

struct EmbeddingLayerNormBackward {
  EmbeddingRows tables;
  const void* dy;
  const float* mean;
  const float* rstd;
  const float* weight;  // or null
  void* dh;
  float* dweight;  // sums over the rows given to one call: accumulated into; or null
  float* dbias;    // likewise
  Dropout dropout;
};

// table[id + offset] += the sum of the rows with this id. The rows, sorted by id, are divided into windows of
// kAddRowsWindow. A window adds the ids whose rows all lie in it. An id that crosses windows leaves partial sums, which
// a second pass adds in order.
constexpr int64_t kAddRowsWindow = 64;

struct AddRows {
  void* table;
  const void* rows;
  const int64_t* sorted_ids;
  const int64_t* order;  // sorted_ids[i] is the id of rows[order[i]]
  int64_t count;
  int64_t width;
  int64_t offset;
  int64_t padding_idx;  // this row of the table gets nothing; -1: none
  float* partial;       // (windows, 2, width): of the id that began before the window, of the id that goes on after it
};

// Rows or windows [begin, end). The norm needs 2 * (width rounded up to 128) floats of scratch, the others `width`.
FASTENC_FOR_EACH_ISA(
    void embedding_layer_norm_forward(
        const EmbeddingLayerNormForward&, bool bf16, int64_t begin, int64_t end, float* scratch);
    void embedding_layer_norm_backward(
        const EmbeddingLayerNormBackward&, bool bf16, int64_t begin, int64_t end, float* scratch);
    void add_rows_in_windows(const AddRows&, bool bf16, int64_t begin, int64_t end, float* scratch);
    void add_rows_across_windows(const AddRows&, bool bf16, int64_t begin, int64_t end, float* scratch);)

}  // namespace fastenc
