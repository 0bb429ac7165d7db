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

  // Scores of a lane of one tile with a group of queries come two queries at a time, or the only one.
  static constexpr int kAtATime = Config::kGroupQueries > 1 ? 2 : 1;
  static constexpr int kStores = Config::kGroupQueries / kAtATime;
  // Whether registers keep what is needed of a group; fragments of 16-bit keys, and many heads, leave no room.
  static constexpr bool kKeepsGroup = Config::kSteps <= 4 && Config::kHeads <= 64;

  // What a lane needs of a group of queries: weights of its heads, and the keys that those queries see whose scores it
  // writes.
  struct Group {
    static constexpr int kQueryWeights = Config::kHeads / 4;
    static constexpr int kLoaded = kQueryWeights < 4 ? 2 : 4;  // at a time
    // Those of many heads are loaded where they are multiplied, for registers have no room beside a product's.
    static constexpr bool kLate = Config::kHeads > 64;

    const float* from;
    float weights[kLate ? 1 : Config::kGroupQueries][kQueryWeights];
    int32_t ends[kStores];

    __device__ __forceinline__ void load(const Storage& storage, uint32_t buffer, int group, int lane, int own_query) {
      from = storage.weights[buffer] + group * Config::kColumns + lane % 4 * kLoaded;
      if constexpr (!kLate) {
#pragma unroll
        for (int query = 0; query < Config::kGroupQueries; ++query) {
#pragma unroll
          for (int first = 0; first < kQueryWeights; first += kLoaded) {
            load_some(&weights[query][first], query * Config::kHeads + first * 4);
          }
        }
      }
      const int32_t* first = storage.ends[buffer] + group * Config::kGroupQueries + own_query;
#pragma unroll
      for (int i = 0; i < kStores; ++i) ends[i] = first[i * kAtATime];
      // Of one query, two lanes of four have the sums.
      if (kAtATime == 1 && lane % 4 >= 2) ends[0] = 0;
    }

    // `kLoaded` of this lane's weights of a query, from `first` on.
    __device__ __forceinline__ void take(float (&some)[kLoaded], int query, int first) const {
      if constexpr (kLate) {
        load_some(some, query * Config::kHeads + first * 4);
      } else {
#pragma unroll
        for (int i = 0; i < kLoaded; ++i) some[i] = weights[query][first + i];
      }
    }

   private:
    __device__ __forceinline__ void load_some(float* to, int place) const {
      if constexpr (kLoaded == 2) {
        const float2 two = *reinterpret_cast<const float2*>(from + place);
        to[0] = two.x, to[1] = two.y;
      } else {
        const float4 four = *reinterpret_cast<const float4*>(from + place);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
      }
    }
  };

  Storage& storage;
  const ScoringParameters& params;
  const uint32_t number;  // of the warpgroup
  const int warp = static_cast<int>(threadIdx.x / 32 % 4);
  const int lane = static_cast<int>(threadIdx.x % 32);

  // Sums are handed out to the four lanes of a row: this lane's key in a tile is always the same, and its query in a
  // group of several the first or the second of each two.
  int own_key;
  const int own_query;
  // Where this lane's first row of a fragment of keys is in a stage.
  uint32_t own_fragment;

  const Places places;
  StageRing ring;

  uint32_t keys[Config::kSteps][4];
  float scores[Config::kScores];

  __device__ __forceinline__ Consumer(Storage& storage, const ScoringParameters& params, uint32_t number)
      : storage(storage),
        params(params),
        number(number),
        own_key(warp * 16 + lane / 4 + (lane & 1) * 8),
        own_query(kAtATime > 1 ? lane / 2 % 2 : 0),
        own_fragment(swizzle(warp * 16 + lane % 16, lane / 16)),
        places(storage, params.paged.queries),
        ring(places, number) {
    // The compiler cannot work them out anew for each key tile.
    own_key = __shfl_sync(0xffffffffu, own_key, lane);
    own_fragment = __shfl_sync(0xffffffffu, own_fragment, lane);
  }

  __device__ __forceinline__ void run(const WorkAssignment& work) {
    uint32_t tile = 0;  // of the CTA's
    Ring<Config::kQueryBuffers> buffers;
    RunIterator iterator(params, work);
#pragma unroll 1
    for (Run run; iterator.next(run); buffers.advance()) {
      const uint32_t buffer = buffers.stage;
      storage.q_full[buffer].wait(buffers.full);
      const int32_t groups = query_groups(params, run);
      // The same in all lanes: computed once per warp.
      const uint64_t heads = descriptor(__shfl_sync(0xffffffffu, smem_address(places.heads(buffer, 0)), 0));
      const uint32_t skipped = (number + Config::kConsumers - tile % Config::kConsumers) % Config::kConsumers;
      int32_t key = (run.first + static_cast<int32_t>(skipped)) * Config::kTileKeys + own_key;
      float* logits = params.logits + run.request * params.logits_request +
                      (run.first_query() + own_query) * params.logits_query;
      const int32_t tiles = run.end - run.first - static_cast<int32_t>(skipped);
      if (kKeepsGroup && groups == 1) {
        score<kKeepsGroup>(logits + key, key, heads, buffer, groups, tiles);
      } else {
        score<false>(logits + key, key, heads, buffer, groups, tiles);
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
  static __device__ __forceinline__ uint32_t swizzle(uint32_t row, uint32_t chunk) {
    return Config::kSpan == 64 ? swizzle_64(row, chunk) : swizzle_128(row, chunk);
  }

  static __device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    if constexpr (Config::kSpan == 64) return sm90::swizzle_64_k_major_descriptor(address);
    return sm90::k_major_descriptor(address);
  }

  // This consumer's tiles of `tiles` neighbouring ones. `to`: this lane's score of its key in the first one, `key`, and
  // its first query. What is needed of the only group stays in registers.
  template <bool kOneGroup>
  __device__ __forceinline__ void score(float* to, int32_t key, uint64_t heads, uint32_t buffer, int32_t groups,
                                        int32_t tiles) {
    Group own;
    if constexpr (kOneGroup) own.load(storage, buffer, 0, lane, own_query);
#pragma unroll 1
    for (; tiles > 0; tiles -= Config::kConsumers) {
      const uint32_t stage = ring.stage;
      storage.k_full[stage].wait(ring.full);
      load_keys(stage);
      const float k_scale = Config::kHasScales ? storage.k_scale[stage][own_key] : 1.0f;
      const bool there = (storage.there[stage][own_key / 32] >> own_key % 32 & 1u) != 0;
      if constexpr (kOneGroup) {
        issue(heads, 0);
        finish();
        free_keys(stage);
        write(own, to, key, k_scale, there);
      } else {
        float* next = to;
#pragma unroll 1
        for (int32_t group = 0; group < groups; ++group) {
          issue(heads, group);
          own.load(storage, buffer, group, lane, own_query);
          finish();
          if (group == 0) free_keys(stage);
          write(own, next, key, k_scale, there);
          next += Config::kGroupQueries * params.logits_query;
        }
      }
      ring.advance();
      to += Config::kConsumers * Config::kTileKeys;
      key += Config::kConsumers * Config::kTileKeys;
    }
  }

  // The product has read what was loaded, and so it is in registers, of the whole warp.
  __device__ __forceinline__ void free_keys(uint32_t stage) const {
    __syncwarp();
    if (lane == 0) storage.k_free[stage].arrive();
  }

  // Takes in a warp's fragments of a key tile.
  __device__ __forceinline__ void load_keys(uint32_t stage) {
    const uint32_t base = smem_address(places.keys(stage, 0)) + own_fragment;
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step) {
      constexpr int kSpanSteps = Config::kSpan / 32;
      // 64 rows are whole swizzle atoms, and a step is a bit of the chunk: stages are multiples of an atom.
      const uint32_t column = step / kSpanSteps * Config::kTileKeys * Config::kSpan;
      load_matrix_x4(keys[step], (base ^ step % kSpanSteps * 32) + column);
    }
  }

  // Issues the products of the keys with the heads of a group of queries.
  __device__ __forceinline__ void issue(uint64_t heads, int32_t group) {
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
  }

  __device__ __forceinline__ void finish() {
    sm90::wgmma_wait<0>();
    sm90::warpgroup_fence_operand(scores);
  }

  // Sums a group's products over the heads and writes the scores. `to`: of the first query that this lane writes.
  __device__ __forceinline__ void write(const Group& group, float* to, int32_t key, float k_scale, bool there) const {
#pragma unroll
    for (int store = 0; store < kStores; ++store) {
      float sums[4];
#pragma unroll
      for (int i = 0; i < kAtATime; ++i) {
        add_heads(group, store * kAtATime + i, sums[2 * i], sums[2 * i + 1]);
      }
      float sum;
      if constexpr (kAtATime == 2) {
        sum = indexer::add_sums_of_four(sums, lane % 4);
      } else {
        const float two[2] = {sums[0], sums[1]};
        sum = indexer::add_sums_of_two(two, lane % 4);
      }
      store_if(key < group.ends[store], to, there ? __fmul_rn(sum, k_scale) : negative_infinity());
      if (store + 1 < kStores) to += kAtATime * params.logits_query;
    }
  }

  // This lane's sums over its heads of a query, for its two keys. `query`: its number in the group.
  __device__ __forceinline__ void add_heads(const Group& group, int query, float& low, float& high) const {
    low = high = 0.0f;
#pragma unroll
    for (int first = 0; first < Group::kQueryWeights; first += Group::kLoaded) {
      float of[Group::kLoaded];
      group.take(of, query, first);
#pragma unroll
      for (int i = 0; i < Group::kLoaded; ++i) {
        const int weight = first + i;
        const int at = (query * Config::kHeads / 8 + weight / 2) * 4 + weight % 2;
        // A head that is not there is zero, but its product with an infinite key is not.
        const bool filled = Config::kFilled && weight / 2 * 8 + lane % 4 * 2 + weight % 2 >= params.heads;
        low = indexer::add_head(low, of[i], filled ? 0.0f : scores[at], params.floor);
        high = indexer::add_head(high, of[i], filled ? 0.0f : scores[at + 2], params.floor);
      }
    }
  }
};

}  // namespace cupymla::paged_indexer
