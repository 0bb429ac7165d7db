// The gather of one warp of a producer: sixteen rows of kv, some column tiles at a time.
#pragma once

#include "../../common/async_copy.cuh"
#include "../../common/opaque.cuh"
#include "../../common/swizzle.cuh"

namespace cupymla::sparse_mla_bwd {

// Lane l knows the token of slot l % 16. In each of four passes eight lanes copy 128 bytes of one row.
struct RowCopies {
  static constexpr int kWarpSlots = 16;
  static constexpr int kPasses = 4;

  const uint8_t* source[kPasses];
  uint32_t place[2];  // within a tile; rows eight apart are swizzled alike
  uint32_t valid;     // one bit for each lane
  bool take[kPasses];

  // `columns`: the first of kv's columns that are copied at all.
  __device__ __forceinline__ RowCopies(int32_t token, uint32_t token_limit, const uint8_t* columns,
                                       int64_t token_bytes, int warp, uint32_t lane) {
    valid = __ballot_sync(0xffffffffu, static_cast<uint32_t>(token) < token_limit);
    const uint8_t* rows = columns + lane % 8 * 16;
    make_opaque(rows);  // so that each row's offset is added to it in one instruction
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint32_t slot = pass * 4 + lane / 8;
      const uint32_t row = __shfl_sync(0xffffffffu, token, slot);
      take[pass] = (valid >> slot) & 1u;
      source[pass] = rows + static_cast<int64_t>(take[pass] ? row : 0u) * token_bytes;
      if (pass < 2) place[pass] = swizzle_128(warp * kWarpSlots + slot, lane % 8);
    }
  }

  // `count` tiles from number `first` on, counted from `columns`, to shared memory from `tiles` on; zeros for slots that
  // are not valid.
  template <int kTileBytes>
  __device__ __forceinline__ void copy(uint32_t tiles, int first, int count, uint64_t l2_policy) const {
    uint32_t destination[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Through a reduction, for what is told of `StagedBuffer::address` in producer.cuh.
      destination[i] = place[i] + __reduce_max_sync(0xffffffffu, tiles);
      make_opaque(destination[i]);
    }
#pragma unroll
    for (int tile = 0; tile < count; ++tile) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        copy_async_16_or_zero(destination[pass % 2] + tile * kTileBytes + pass / 2 * kSwizzleAtomBytes,
                              source[pass] + (first + tile) * static_cast<int>(kSwizzleRowBytes), take[pass],
                              l2_policy);
      }
    }
  }
};

}  // namespace cupymla::sparse_mla_bwd
