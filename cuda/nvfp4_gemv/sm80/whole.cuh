// The course of whole calls, which most are: k is a multiple of kChunk and below 2^31, rows of a and b begin at
// multiples of 16 bytes, scales of a may be copied by rows, or by words, and a CTA has one pass (`is_whole` in plan.py
// and `point` in cuda.py of cupymla/ops/nvfp4_gemv). There is no code for anything else, so there is little to read
// before the first copies, and what a CTA does in each phase is worked out once.
#pragma once

#include "whole_output.cuh"
#include "whole_stream.cuh"
#include "whole_vectors.cuh"

namespace cupymla::nvfp4_gemv {

// The pass of a CTA, each of which has an item.
template <class C>
__device__ __forceinline__ Pass<C> only_pass(const Parameters& params) {
  const uint32_t batch = blockIdx.x < params.parts ? 0 : blockIdx.x / params.parts;
  const uint32_t part = blockIdx.x - batch * params.parts;
  return Pass<C>(batch, part * params.part_rows + min(part, params.long_parts),
                 static_cast<int32_t>(params.part_rows) + (part < params.long_parts ? 1 : 0));
}

// Every chunk of k, phase by phase, to sums in shared memory.
template <class C, class Stream>
__device__ __forceinline__ void multiply_phases(Storage<C>& storage, const Parameters& params, const Pass<C>& pass,
                                                WholeVectors<C>& vectors, Stream& stream, int32_t warp, int32_t lane) {
  const int32_t chunks = chunks_of(params, C::kChunk), phase_chunks = static_cast<int32_t>(params.phase_chunks);
  Product<C> product(storage, params, warp, lane);
  product.clear();
  const bool idle = pass.tile_of(warp) * pass.tile_rows >= pass.rows;
  int32_t chunk = idle ? chunks : pass.split_of(warp), buffer = 1;
#pragma unroll 1
  for (int32_t first = 0; first < chunks; first += phase_chunks) {
    const int32_t end = min(first + phase_chunks, chunks);
    buffer ^= 1;
    vectors.store(buffer);
    product.use(pass, buffer);
    if (end < chunks) vectors.fetch();
    named_barrier_sync(kGroupBarriers + pass.group_of(warp), pass.group_threads());
#pragma unroll 1
    for (; chunk < end; chunk += pass.splits) {
      stream_copy_wait<C::kStages - 1>();
      __syncwarp();
      product.add(stream.stage(), (chunk - first) >> pass.groups_log2);
      __syncwarp();
      stream.copy();
    }
  }
  product.finish();
  keep_sums(storage, product, warp, lane);
  __syncthreads();
}

template <class C>
constexpr int kFirstWarps = C::kWarps / 4;

// kByRows: scales of a are copied by rows, not by words.
template <class C, bool kByRows>
__device__ __forceinline__ void multiply_whole(Storage<C>& storage, const Parameters& params, int32_t warp,
                                               int32_t lane) {
  const Pass<C> pass = only_pass<C>(params);
  // The first warps have asked for a stage before the others do anything: with issue slots to themselves they are
  // through sooner with what comes before. All meet at one instruction, as synccheck wants it.
  WholeVectors<C> vectors(storage, params);
  WholeStream<C, kByRows> stream(params, pass, warp);
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    if (turn == 1) named_barrier_sync(kOrderBarrier, C::kThreads);
    int32_t its_lane = lane;
    make_opaque(its_lane);  // or what does not change from turn to turn would be worked out ahead of both
    if ((turn == 1) != (warp < kFirstWarps<C>)) {
      vectors.begin(params, pass, warp, its_lane);
      vectors.fetch();
      write_zeros(storage);
      stream.begin(storage, params, pass, warp, its_lane);
      stream.issue();
    }
  }
  stream.step();
#pragma unroll 1
  for (int stage = 1; stage < C::kStages; ++stage) stream.copy();
  if (chunks_of(params, C::kChunk) > static_cast<int32_t>(params.phase_chunks)) prefetch_vectors<C>(params);

  if constexpr (C::kMostColumns == 1) {
    WholeOutput<C> output(params, pass);
    multiply_phases(storage, params, pass, vectors, stream, warp, lane);
    output.write(storage);
  } else {
    multiply_phases(storage, params, pass, vectors, stream, warp, lane);
    write_pass(storage, params, pass);
  }
}

}  // namespace cupymla::nvfp4_gemv
