// Dropout masks. A mask depends on (seed, offset, stream, row, column) alone, so it is the same for any layout, vector
// width and number of threads. Included by kernels.inc only.
//
// Philox4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") of the counter (0, row, stream,
// offset) and the key seed gives a row's key; two multiplications mix it with the column. The formula is in
// reference/dropout.py.

struct RowKey {
  uint32_t first, second;
};

FASTENC_INLINE RowKey row_key(const Dropout& dropout, uint32_t stream, uint32_t row) {
  uint32_t c0 = 0, c1 = row, c2 = stream, c3 = dropout.offset;
  uint32_t key0 = (uint32_t)dropout.seed, key1 = (uint32_t)(dropout.seed >> 32);
  for (int round = 0; round < 7; ++round) {
    const uint64_t product0 = (uint64_t)c0 * 0xD2511F53u, product1 = (uint64_t)c2 * 0xCD9E8D57u;
    c0 = (uint32_t)(product1 >> 32) ^ c1 ^ key0;
    c1 = (uint32_t)product1;
    c2 = (uint32_t)(product0 >> 32) ^ c3 ^ key1;
    c3 = (uint32_t)product0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {c0, c1};
}

// Floats that dropout_scales writes for n columns: whole vectors, of the widest instruction set too.
FASTENC_INLINE int64_t dropout_room(int64_t n) { return (n + 15) / 16 * 16; }

// Writes `dropout.scale` or 0 for columns [first, first + n) of a row; `out` has room for dropout_room(n).
FASTENC_INLINE void dropout_scales(
    const Dropout& dropout, uint32_t stream, uint32_t row, int64_t n, float* out, int64_t first = 0) {
  const RowKey key = row_key(dropout, stream, row);
  VecU column = ((VecU)kLaneIndex + (uint32_t)first) * 0x9E3779B1u;
  for (int64_t c = 0; c < n; c += kLanes) {
    VecU h = (key.first ^ column) * 0x85EBCA6Bu;
    h = (h ^ (h >> 15) ^ key.second) * 0xC2B2AE35u;
    const VecI keep = (VecI)((h >> 16) >= (VecU{} + dropout.threshold));
    store(out + c, (Vec)(keep & (VecI)splat(dropout.scale)));
    column += kLanes * 0x9E3779B1u;
  }
}
