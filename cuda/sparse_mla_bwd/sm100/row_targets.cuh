// Where what a block adds to dKV goes.
#pragma once

#include "../../common/reduction.cuh"
#include "../../common/sparse_query.cuh"
#include "../params.cuh"

namespace cupymla::sparse_mla_bwd {

// Where sums of a block's dKV rows go: added to the token's row, or stored in the entry's own.
template <typename Config>
struct RowTargets {
  float* start;           // of the batch entry's sums, or of the block's first entry
  const uint64_t stride;  // from one token, or entry, to the next
  const bool add;         // in partials: whether an earlier head block has written them

  __device__ __forceinline__ RowTargets(const Parameters& params, const QueryPosition& query, int32_t first_entry,
                                        int32_t head_block)
      : stride(Config::kPartials ? Config::kDQk : params.sums_token), add(head_block > 0) {
    const int64_t place = static_cast<int64_t>(query.batch) * params.s_q + query.query - params.query_begin;
    start = Config::kPartials ? params.partials + (place * params.topk + first_entry) * Config::kDQk
                              : params.sums + query.batch * params.sums_batch;
  }

  // A channel of the block's entries from `first` on, which name these tokens. Neighbouring lanes have neighbouring
  // channels.
  template <int kTileKeys>
  __device__ __forceinline__ void write(int first, const int32_t* tokens, int32_t channel,
                                        const uint32_t* values) const {
    float* const column = start + channel;
#pragma unroll
    for (int i = 0; i < kTileKeys; i += 4) {
      const int4 four = *reinterpret_cast<const int4*>(tokens + i);
      write(column, first + i, four.x, values[i]);
      write(column, first + i + 1, four.y, values[i + 1]);
      write(column, first + i + 2, four.z, values[i + 2]);
      write(column, first + i + 3, four.w, values[i + 3]);
    }
  }

 private:
  __device__ __forceinline__ void write(float* column, int entry, int32_t token, uint32_t bits) const {
    if (token < 0) return;
    const float value = __uint_as_float(bits);
    float* address = column + static_cast<uint32_t>(Config::kPartials ? entry : token) * stride;
    if (Config::kPartials && !add) {
      *address = value;
    } else {
      // In partials the same thread has written the row before, so nothing is left to chance.
      reduce_add_float(address, value);
    }
  }
};

}  // namespace cupymla::sparse_mla_bwd
