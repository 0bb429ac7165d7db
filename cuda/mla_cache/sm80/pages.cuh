// Where the keys of a cache lie; mirrors `cupymla/ops/mla_cache/formats.py`.
//
// "indexer_fp8": a block of `page` tokens is page rows of 128 codes, then page fp32 scales.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::mla_cache {

constexpr int kIndexerChannels = 128;

// A slot of a cache of indexer keys, by its block and its place in that.
struct IndexerSlot {
  int64_t codes, scale;  // bytes from the cache's beginning

  __device__ __forceinline__ IndexerSlot(int64_t block, int64_t place, int64_t page, int64_t block_bytes) {
    const int64_t begin = block * block_bytes;
    codes = begin + place * kIndexerChannels;
    scale = begin + page * kIndexerChannels + place * static_cast<int64_t>(sizeof(float));
  }
};

}  // namespace cupymla::mla_cache
