// Division of a matrix's rows among threads.
#pragma once
#include "tensors.h"

namespace fastenc {

// The number of blocks of at most 96 rows. Each thread gets equally many, so that none waits for another's last block.
inline int64_t number_of_row_blocks(int64_t rows) {
  constexpr int64_t kRows = 96;
  const int64_t threads = torch::stable::get_num_threads();
  return (rows + kRows * threads - 1) / (kRows * threads) * threads;
}

// run(first, last) for each block that is not empty, by all threads. Blocks begin at multiples of `unit` rows.
template <class Run>
void for_row_blocks(int64_t rows, int64_t unit, Run run) {
  const int64_t blocks = number_of_row_blocks(rows), units = (rows + unit - 1) / unit;
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = units * block / blocks * unit, last = std::min(units * (block + 1) / blocks * unit, rows);
      if (first < last) run(first, last);
    }
  });
}

}  // namespace fastenc
