// Who works on what: a cluster on 128 rows of a batch, each CTA of it on a range of chunks of k.
#pragma once

#include "../../common/cluster.cuh"
#include "config.cuh"
#include "params.cuh"

namespace cupymla::nvfp4_gemv {

template <class C>
struct Slice {
  uint32_t rank, splits;  // this CTA's place in its cluster, and the CTAs that share a tile
  uint32_t tile, batch;
  uint32_t first, end;    // chunks; never empty, which the host sees to

  __device__ __forceinline__ explicit Slice(const Parameters& params) : rank(cluster_rank()), splits(cluster_size()) {
    const uint32_t index = blockIdx.x / splits;
    batch = index / params.tiles;
    tile = index - batch * params.tiles;
    const uint64_t chunks = static_cast<uint64_t>((params.k + C::kChunk - 1) / C::kChunk);
    first = static_cast<uint32_t>(chunks * rank / splits);
    end = static_cast<uint32_t>(chunks * (rank + 1) / splits);
  }
};

}  // namespace cupymla::nvfp4_gemv
