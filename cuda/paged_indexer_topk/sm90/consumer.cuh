// A consumer warpgroup: every second or third key tile, with all queries of the query tile.
#pragma once

#include "../../common/indexer_score.cuh"
#include "../../common/matrix.cuh"
#include "../../common/ring.cuh"
#include "../../common/store_if.cuh"
#include "producer.cuh"
#include "work.cuh"

namespace cupymla::paged_indexer {

struct Consumer {
  using Config = ThisConfig;

  Storage& storage;
  const ScoringParameters& params;
  const uint32_t number;  // of the warpgroup
  const int warp = static_cast<int>(threadIdx.x / 32 % 4);
  const int lane = static_cast<int>(threadIdx.x % 32);

  // Sums are handed out to the four lanes of a row: this lane's key in a tile is always the same, and its query in a
  // group of several the first or the second of each two.
  const int own_key = warp * 16 + lane / 4 + (lane & 1) * 8;
  const int own_query = Config::kGroupQueries > 1 ? lane / 2 % 2 : 0;

  const Places places;
  StageRing ring;

  uint32_t keys[Config::kSteps][4];
  float scores[Config::kScores];

  __device__ __forceinline__ Consumer(Storage& storage, const ScoringParameters& params, uint32_t number)
      : storage(storage),
        params(params),
        number(number),
        places(storage, params.paged.queries),
        ring(places, number) {}

  __device__ __forceinline__ void run(const WorkAssignment& work) {
    uint32_t tile = 0;  // of the CTA's
    Ring<Config::kQueryBuffers> buffers;
    RunIterator iterator(params, work);
    for (Run run; iterator.next(run); buffers.advance()) {
      const uint32_t buffer = buffers.stage;
      storage.q_full[buffer].wait(buffers.full);
      const int32_t groups = query_groups(params, run);
      // The same in all lanes: computed once per warp.
      const uint64_t heads = descriptor(__shfl_sync(0xffffffffu, smem_address(places.heads(buffer, 0)), 0));
      float* logits = params.logits + run.request * params.logits_request + run.first_query() * params.logits_query;
      const uint32_t skipped = (number + Config::kConsumers - tile % Config::kConsumers) % Config::kConsumers;
      for (int32_t own = run.first + static_cast<int32_t>(skipped); own < run.end; own += Config::kConsumers) {
        score_tile(logits, heads, buffer, groups, own);
        ring.advance();
      }
      tile += static_cast<uint32_t>(run.end - run.first);
      __syncwarp();
      if (lane == 0) storage.q_free[buffer].arrive();
    }
  }

  // -inf from each query's last key to `fill_end`; all CTAs share each row. A warp looks at the lengths of 32 rows at a
  // time: one after another they are a chain of as many waits as there are rows, where mostly nothing is to be filled.
  __device__ __forceinline__ void fill() const {
    if (params.fill_end == 0) return;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * Config::kConsumerThreads;
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * Config::kConsumerThreads + threadIdx.x;
    const int64_t rows = int64_t{params.paged.requests} * params.paged.queries;
#pragma unroll 1
    for (int64_t base = 0; base < rows; base += 32) {
      const int64_t own = base + lane;
      const int64_t own_request = quotient(own, params.paged.queries);
      const int32_t own_query = static_cast<int32_t>(own - own_request * params.paged.queries);
      const int32_t own_first = own < rows ? seen_keys(params.paged, own_request, own_query) : params.fill_end;
      uint32_t open = __ballot_sync(0xffffffffu, own_first < params.fill_end);
#pragma unroll 1
      for (; open != 0; open &= open - 1) {
        const int from = __ffs(static_cast<int>(open)) - 1;
        const int64_t request = __shfl_sync(0xffffffffu, own_request, from);
        const int32_t query = __shfl_sync(0xffffffffu, own_query, from);
        float* row = params.logits + request * params.logits_request + query * params.logits_query;
        const int64_t first = __shfl_sync(0xffffffffu, own_first, from);
#pragma unroll 1
        for (int64_t key = first + thread; key < params.fill_end; key += threads) row[key] = negative_infinity();
      }
    }
  }

 private:
  static __device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    if constexpr (Config::kSpan == 64) return sm90::swizzle_64_k_major_descriptor(address);
    return sm90::k_major_descriptor(address);
  }

  __device__ __forceinline__ void score_tile(float* logits, uint64_t heads, uint32_t buffer, int32_t groups,
                                             int32_t key_tile) {
    const uint32_t stage = ring.stage;
    storage.k_full[stage].wait(ring.full);
    load_keys(stage);
    const float k_scale = Config::kHasScales ? storage.k_scale[stage][own_key] : 1.0f;
    const bool there = (storage.there[stage][own_key / 32] >> own_key % 32 & 1u) != 0;
    const int32_t key = key_tile * Config::kTileKeys + own_key;
#pragma unroll 1
    for (int32_t group = 0; group < groups; ++group) {
      multiply(heads, group);
      if (group == 0) {
        // The product has read what was loaded, and so it is in registers, of the whole warp.
        __syncwarp();
        if (lane == 0) storage.k_free[stage].arrive();
      }
      sum_heads(logits, buffer, group, key, k_scale, there);
    }
  }

  // Takes in a warp's fragments of a key tile.
  __device__ __forceinline__ void load_keys(uint32_t stage) {
    const uint32_t base = smem_address(places.keys(stage, 0));
    const uint32_t row = warp * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step) {
      constexpr int kSpanSteps = Config::kSpan / 32;
      const uint32_t chunk = step % kSpanSteps * 2 + lane / 16;
      const uint32_t column = base + step / kSpanSteps * static_cast<uint32_t>(Config::kTileKeys * Config::kSpan);
      load_matrix_x4(keys[step], column + (Config::kSpan == 64 ? swizzle_64(row, chunk) : swizzle_128(row, chunk)));
    }
  }

  // The products of the keys with the heads of a group of queries.
  __device__ __forceinline__ void multiply(uint64_t heads, int32_t group) {
    sm90::warpgroup_fence_operand(scores);
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step) {
      constexpr int kSpanSteps = Config::kSpan / 32;
      constexpr uint32_t kColumnBytes = Config::kQueryBufferBytes / Config::kColumnTiles;
      const uint32_t offset = step / kSpanSteps * kColumnBytes + group * Config::kColumns * Config::kSpan +
                              step % kSpanSteps * 32;
      sm90::mma<typename Config::Atom>(scores, keys[step], sm90::descriptor_advance(heads, offset), step == 0);
    }
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
    sm90::warpgroup_fence_operand(scores);
  }

  // Sums a group's products over the heads, two queries at a time, or the only one, and writes the scores.
  __device__ __forceinline__ void sum_heads(float* logits, uint32_t buffer, int32_t group, int32_t key, float k_scale,
                                            bool there) const {
    constexpr int kAtATime = Config::kGroupQueries > 1 ? 2 : 1;
#pragma unroll
    for (int first = 0; first < Config::kGroupQueries; first += kAtATime) {
      float sums[4];
#pragma unroll
      for (int i = 0; i < kAtATime; ++i) {
        add_heads(buffer, group * Config::kGroupQueries + first + i, first + i, sums[2 * i], sums[2 * i + 1]);
      }
      float sum;
      if constexpr (kAtATime == 2) {
        sum = indexer::add_sums_of_four(sums, lane % 4);
      } else {
        const float two[2] = {sums[0], sums[1]};
        sum = indexer::add_sums_of_two(two, lane % 4);
      }
      const int query = group * Config::kGroupQueries + first + own_query;
      // Of one query, two lanes of four have the sums.
      const bool written = (kAtATime == 2 || lane % 4 < 2) && key < storage.ends[buffer][query];
      store_if(written, logits + query * params.logits_query + key,
               there ? __fmul_rn(sum, k_scale) : negative_infinity());
    }
  }

  // This lane's sums over its heads of a query, for its two keys. `in_group`: the query's number in the group.
  __device__ __forceinline__ void add_heads(uint32_t buffer, int query, int in_group, float& low, float& high) const {
    constexpr int kWeights = Config::kHeads / 4;
    const float* weights = storage.weights[buffer] + query * Config::kHeads;
    low = high = 0.0f;
#pragma unroll
    for (int first = 0; first < kWeights; first += kWeights < 4 ? 2 : 4) {
      float of[4];
      if constexpr (kWeights == 2) {
        const float2 two = *reinterpret_cast<const float2*>(weights + lane % 4 * 2);
        of[0] = two.x, of[1] = two.y;
      } else {
        const float4 four = *reinterpret_cast<const float4*>(weights + first * 4 + lane % 4 * 4);
        of[0] = four.x, of[1] = four.y, of[2] = four.z, of[3] = four.w;
      }
#pragma unroll
      for (int i = 0; i < (kWeights < 4 ? 2 : 4); ++i) {
        const int weight = first + i;
        const int at = (in_group * Config::kHeads / 8 + weight / 2) * 4 + weight % 2;
        // A head that is not there is zero, but its product with an infinite key is not.
        const bool filled = Config::kFilled && weight / 2 * 8 + lane % 4 * 2 + weight % 2 >= params.heads;
        low = indexer::add_head(low, of[i], filled ? 0.0f : scores[at], params.floor);
        high = indexer::add_head(high, of[i], filled ? 0.0f : scores[at + 2], params.floor);
      }
    }
  }
};

}  // namespace cupymla::paged_indexer
