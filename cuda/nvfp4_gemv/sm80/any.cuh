// The course of any call: all passes of a CTA, k with and without a tail, arrays at any address.
#pragma once

#include "epilogue.cuh"
#include "stream.cuh"

namespace cupymla::nvfp4_gemv {

template <class C>
__device__ __forceinline__ void multiply_any(Storage<C>& storage, const Parameters& params, int32_t warp,
                                             int32_t lane) {
  Passes<C> passes(params);
  if (passes.done()) return;
  write_zeros(storage);
  const int32_t chunks = chunks_of(params, C::kChunk);
  const int32_t phase_chunks = static_cast<int32_t>(params.phase_chunks);
  const bool one_phase = chunks <= phase_chunks;
  // b comes first: whatever is asked for behind the stream's stages waits for them.
  const Pass<C> opening = passes.get();
  VectorLoader<C> loader(storage, params, warp);
  loader.fetch(opening, 0);
  if (!one_phase || params.items > gridDim.x) prefetch_vectors<C>(params);
  // Half of the warps are through with theirs before the others begin, so that the last bytes are not everybody's.
  const bool second_half = warp >= C::kWarps / 2;
  Stream<C> stream(storage, params, passes, opening, warp, lane);
#pragma unroll 1
  for (int stage = 0; stage < C::kStages; ++stage) {
    if (stage == (second_half ? 0 : 1)) named_barrier_sync(kOrderBarrier, C::kThreads);
    stream.copy_next();
  }

  Product<C> product(storage, params, warp, lane);
  int32_t buffer = 1;
  while (!passes.done()) {
    const Pass<C> pass = passes.get();
    passes.next();
    const int32_t tile = pass.tile_of(warp);
    const bool idle = tile * pass.tile_rows >= pass.rows;
    int32_t chunk = idle ? chunks : pass.split_of(warp);
    product.clear();
    for (int32_t first = 0; first < chunks; first += phase_chunks) {
      const int32_t end = min(first + phase_chunks, chunks);
      if (loader.holds()) {
        buffer ^= 1;
        loader.store(pass, buffer);
        product.use(pass, buffer);
      }
      Pass<C> coming = pass;
      bool wanted = end < chunks;
      if (!wanted && !passes.done()) {
        coming = passes.get();
        wanted = !one_phase || coming.batch != pass.batch || coming.groups_log2 != pass.groups_log2;
      }
      if (wanted) loader.fetch(coming, end < chunks ? end : 0);
      named_barrier_sync(kGroupBarriers + pass.group_of(warp), pass.group_threads());
      const auto multiply = [&] {
        stream_copy_wait<C::kStages - 1>();
        __syncwarp();
        product.add(stream.stage(), (chunk - first) >> pass.groups_log2);
        __syncwarp();
        chunk += pass.splits;
      };
      while (chunk < end) {
#pragma unroll 1
        for (; chunk < end && stream.plain(); stream.copy_plain()) multiply();
        if (chunk < end) {
          multiply();
          stream.copy_next();
        }
      }
    }
    product.finish();
    keep_sums(storage, product, warp, lane);
    __syncthreads();
    write_pass(storage, params, pass);
    if (!passes.done()) __syncthreads();
  }
}

}  // namespace cupymla::nvfp4_gemv
