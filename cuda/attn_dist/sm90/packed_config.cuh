// Numbers of the kernel for packed queries, and the budgets it must keep.
#pragma once

#include "config.cuh"

namespace cupymla::attn_dist {

// Eight queries of sixteen heads each are to the products what one of 128 heads is.
template <int kDQkArg>
struct PackedConfig : Config<kDQkArg, 128, sm90::Warpgroups<2, 72, 216>> {
  using Base = Config<kDQkArg, 128, sm90::Warpgroups<2, 72, 216>>;
  using Base::kConsumerHeads, Base::kConsumers, Base::kKeyTiles, Base::kWarps;

  static constexpr int kQueries = 8;
  static constexpr int kQueryHeads = 16;  // a warp's rows of Q
  static constexpr int kConsumerQueries = kConsumerHeads / kQueryHeads;
  static constexpr int kBuffers = 2;  // blocks in shared memory; a third one's room is what lists of rows need

  // With two buffers the left half of a block is freed, and filled again, before the right one. A warp can have few
  // products waiting, so the left half's are done long before the last is issued: by then.
  static constexpr int kParts = 2;
  static __host__ __device__ constexpr int part_begin(int part) { return part == kParts ? kKeyTiles : 4 * part; }
  static constexpr int kLeftParts = 1;  // parts of the half that is freed first
  static constexpr int kLeftTile = 5;  // behind it the left half is waited for
  static __host__ __device__ constexpr bool ends_group(int tile) {
    return tile + 1 == part_begin(kLeftParts) || tile == kLeftTile || Base::ends_group(tile);
  }

  static constexpr int kMaxTokens = 16384;  // of one batch entry
  static constexpr int kMaxEntries = 2048;  // of a query
  static constexpr int kWords = kMaxTokens / 64;
  static constexpr int kProducerQueries = 2;  // whose rows one producer warp finds

  static_assert(kQueries == kConsumers * kConsumerQueries && kQueries == kWarps, "a consumer warp has one query");
  static_assert(kBuffers == kConsumers, "Q of a query group is in all buffers at once");
  static_assert(4 * kProducerQueries == kQueries);
  static_assert(part_begin(kLeftParts) <= kLeftTile && kLeftTile <= Base::kOrderTile);
  static_assert(kMaxTokens <= 65536 && kMaxEntries <= 65536, "tokens and places are kept in 16 bits");
};

}  // namespace cupymla::attn_dist
