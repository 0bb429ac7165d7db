// The warps that load: one query tiles with weights and lengths, the others key tiles.
#pragma once

#include "../../common/async_copy.cuh"
#include "../../common/indexer_score.cuh"
#include "../../common/ring.cuh"
#include "../../common/tma.cuh"
#include "work.cuh"

namespace cupymla::paged_indexer {

// Puts the weights of a query tile's queries in their places, several loads at a time. Those of heads and queries that
// are not there are 0. `meanwhile()` is called once, while the first are on their way.
template <typename Meanwhile>
__device__ __forceinline__ void load_weights(float* to, const ScoringParameters& params, const Run& run, int places,
                                             int lane, const Meanwhile& meanwhile) {
  constexpr int kHeads = ThisConfig::kHeads;
  constexpr int kAtATime = 2;
#pragma unroll 1
  for (int first = lane; first < places; first += 32 * kAtATime) {
    float weight[kAtATime], scale[kAtATime];
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      const int query = run.first_query() + (first + i * 32) / kHeads, head = (first + i * 32) % kHeads;
      weight[i] = scale[i] = 0.0f;
      if (first + i * 32 >= places || query >= params.paged.queries || head >= params.heads) continue;
      const int64_t at =
          run.request * params.weights_request + query * params.weights_query + head * params.weights_head;
      if (params.bf16_weights != 0) {
        const uint32_t bits = reinterpret_cast<const uint16_t*>(params.weights)[at];
        weight[i] = __uint_as_float(bits << 16);
      } else {
        weight[i] = reinterpret_cast<const float*>(params.weights)[at];
      }
      if (params.q_scale != nullptr) {
        scale[i] = params.q_scale[run.request * params.q_scale_request + query * params.q_scale_query +
                                  head * params.q_scale_head];
      }
    }
    if (first == lane) meanwhile();
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      const int place = first + i * 32;
      if (place >= places) continue;
      to[indexer_logits::weight_place(place / kHeads, place % kHeads)] =
          params.q_scale == nullptr ? weight[i] : indexer::head_weight(weight[i], scale[i]);
    }
  }
}

// Groups of queries that a run's query tile has.
__device__ __forceinline__ int32_t query_groups(const ScoringParameters& params, const Run& run) {
  const int32_t queries = min(ThisConfig::kQueries, params.paged.queries - run.first_query());
  return (queries + ThisConfig::kGroupQueries - 1) / ThisConfig::kGroupQueries;
}

__device__ __forceinline__ void load_queries(Storage& storage, const ScoringParameters& params,
                                             const WorkAssignment& work, const TensorMap& q_map) {
  constexpr int kGroupBytes = ThisConfig::kColumns * ThisConfig::kSpan;  // of a column tile
  const int lane = static_cast<int>(threadIdx.x % 32);
  const Places places(storage, params.paged.queries);
  Ring<ThisConfig::kQueryBuffers> buffers;
  RunIterator iterator(params, work);
  for (Run run; iterator.next(run); buffers.advance()) {
    const uint32_t buffer = buffers.stage;
    storage.q_free[buffer].wait(buffers.free());
    const int32_t groups = query_groups(params, run);
    const auto load_heads = [&]() {
      if (lane == 0) {
        storage.q_full[buffer].arrive_and_expect(groups * ThisConfig::kColumnTiles * kGroupBytes);
#pragma unroll 1
        for (int32_t group = 0; group < groups; ++group) {
          for (int tile = 0; tile < ThisConfig::kColumnTiles; ++tile) {
            tma_load_4d(places.heads(buffer, tile) + group * kGroupBytes, q_map, storage.q_full[buffer],
                        tile * ThisConfig::kSpan / ThisConfig::kElementBytes, 0,
                        run.first_query() + group * ThisConfig::kGroupQueries, run.request);
          }
        }
      }
#pragma unroll 1
      for (int query = lane; query < groups * ThisConfig::kGroupQueries; query += 32) {
        const int32_t number = run.first_query() + query;
        int32_t end = 0;
        if (number < params.paged.queries) {
          end = params.paged.queries == 1 ? run.seen : seen_keys(params.paged, run.request, number);
        }
        storage.ends[buffer][query] = end;
      }
    };
    load_weights(storage.weights[buffer], params, run, groups * ThisConfig::kColumns, lane, load_heads);
    storage.q_full[buffer].arrive();
  }
}

// Whether each key tile is in one block, and comes by a tensor copy.
__device__ __forceinline__ bool tiles_are_whole(const ScoringParameters& params) {
  return params.box_keys == ThisConfig::kTileKeys;
}

// Key tiles of one of several warps. Where tiles are not whole, lane l knows two keys of one, l and l + 32.
struct KeyLoader {
  static constexpr int kChunks = ThisConfig::kRowBytes / 16;
  static constexpr int kPassKeys = 32 / kChunks;
  static constexpr int kHalfPasses = 32 / kPassKeys;

  Storage& storage;
  const ScoringParameters& params;
  const TensorMap& k_map;
  const uint32_t number;  // of the warp
  const int lane = static_cast<int>(threadIdx.x % 32);
  // Keys are read once. What selects from the scores finds them in L2 where keys have not driven them out.
  const uint64_t l2_policy = l2_policy_evict_first();
  const Places places;
  StageRing ring;

  __device__ __forceinline__ KeyLoader(Storage& storage, const ScoringParameters& params, const TensorMap& k_map,
                                       uint32_t number)
      : storage(storage),
        params(params),
        k_map(k_map),
        number(number),
        places(storage, params.paged.queries),
        ring(places, number) {}

  // A lane's keys of a tile.
  struct Keys {
    int32_t block[2];   // -1 where there is no key
    uint32_t place[2];  // in the block
  };

  __device__ __forceinline__ void run(const WorkAssignment& work) {
    if (tiles_are_whole(params)) {
      load_tiles<true>(work);
    } else {
      load_tiles<false>(work);
    }
  }

 private:
  template <bool kWhole>
  __device__ __forceinline__ void load_tiles(const WorkAssignment& work) {
    uint32_t tile = 0;  // of the CTA's
    RunIterator iterator(params, work);
    // This warp's tiles of a run are every second or third.
#pragma unroll 1
    for (Run run; iterator.next(run);) {
      const uint32_t skipped = (number + ThisConfig::kKeyWarps - tile % ThisConfig::kKeyWarps) % ThisConfig::kKeyWarps;
      const int32_t own = run.first + static_cast<int32_t>(skipped);
      if constexpr (kWhole) {
        load_whole(run, own);
      } else {
        load_parts(run, own);
      }
      tile += static_cast<uint32_t>(run.end - run.first);
    }
  }

  // Of tiles that are in one block each, lane l looks up the block of the l-th to come: so an entry of the table, which
  // memory may take long for behind so many keys, is there some 32 tiles before it is wanted.
  __device__ __forceinline__ void load_whole(const Run& run, int32_t own) {
    const int page_log2 = __ffs(params.paged.page) - 1;
    int32_t next = block_of(run, own, page_log2);
#pragma unroll 1
    while (own < run.end) {
      const int32_t blocks = next;
      next = block_of(run, own + 32 * ThisConfig::kKeyWarps, page_log2);
#pragma unroll 1
      for (int i = 0; i < 32 && own < run.end; ++i, own += ThisConfig::kKeyWarps) {
        const int32_t block = __shfl_sync(0xffffffffu, blocks, i);
        if (lane == 0) copy_whole(block, own);
        ring.advance();
      }
    }
  }

  // The block of this lane's tile of 32; -1 behind the run.
  __device__ __forceinline__ int32_t block_of(const Run& run, int32_t own, int page_log2) const {
    const int32_t tile = own + lane * ThisConfig::kKeyWarps;
    if (tile >= run.end) return -1;
    const uint32_t entry = static_cast<uint32_t>(tile) * ThisConfig::kTileKeys >> page_log2;
    return params.paged.block_tables[run.request * params.paged.tables_request + entry * params.paged.tables_block];
  }

  // One lane's copies of a tile and its scales. For a block that is not in the cache, keys are those behind the last,
  // which read as zeros, and scales another block's, which nobody uses.
  __device__ __forceinline__ void copy_whole(int32_t block, int32_t own) const {
    constexpr uint32_t kScaleBytes = ThisConfig::kHasScales ? ThisConfig::kTileKeys * 4 : 0;
    const uint32_t stage = ring.stage;
    const bool there = static_cast<uint32_t>(block) < static_cast<uint32_t>(params.paged.blocks);
    const uint32_t place = static_cast<uint32_t>(own) * ThisConfig::kTileKeys & params.paged.page - 1;  // in the block
    const uint8_t* scales = params.cache + params.scales_offset + place * 4 + (there ? block * params.block_bytes : 0);
    storage.k_free[stage].wait(ring.full ^ 1u);
    storage.there[stage][0] = storage.there[stage][1] = there ? ~0u : 0u;
    Mbarrier& full = storage.k_full[stage];
    full.arrive_and_expect(ThisConfig::kKeyTileBytes + kScaleBytes);
#pragma unroll
    for (int column = 0; column < ThisConfig::kColumnTiles; ++column) {
      tma_load_4d(places.keys(stage, column), k_map, full, column * ThisConfig::kSpan / ThisConfig::kElementBytes,
                  static_cast<int32_t>(place), there ? block : params.paged.blocks, 0, l2_policy);
    }
    if constexpr (ThisConfig::kHasScales) bulk_load(storage.k_scale[stage], scales, kScaleBytes, full, l2_policy);
  }

  // Blocks of the next tile are looked up ahead.
  __device__ __forceinline__ void load_parts(const Run& run, int32_t own) {
    if (own >= run.end) return;
    Keys keys = look_up(run, own);
    for (; own < run.end; own += ThisConfig::kKeyWarps) {
      const Keys current = keys;
      if (own + ThisConfig::kKeyWarps < run.end) keys = look_up(run, own + ThisConfig::kKeyWarps);
      load(current);
      ring.advance();
    }
  }

  __device__ __forceinline__ Keys look_up(const Run& run, int32_t tile) const {
    Keys keys;
    const uint32_t page = static_cast<uint32_t>(params.paged.page);
    const int32_t* table = params.paged.block_tables + run.request * params.paged.tables_request;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t key = static_cast<uint32_t>(tile) * ThisConfig::kTileKeys + half * 32 + lane;
      // Pages are powers of two nearly always.
      uint32_t entry = key >> __ffs(params.paged.page) - 1;
      keys.place[half] = key & page - 1;
      if ((page & page - 1) != 0) entry = key / page, keys.place[half] = key % page;
      keys.block[half] = -1;
      if (key < static_cast<uint32_t>(run.seen)) keys.block[half] = table[entry * params.paged.tables_block];
    }
    return keys;
  }

  __device__ __forceinline__ void load(const Keys& keys) const {
    const uint32_t stage = ring.stage;
    bool there[2];
    int64_t block[2];  // bytes from the cache's first
    uint32_t words[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      there[half] = static_cast<uint32_t>(keys.block[half]) < static_cast<uint32_t>(params.paged.blocks);
      block[half] = there[half] ? keys.block[half] * params.block_bytes : 0;
      words[half] = __ballot_sync(0xffffffffu, there[half]);
    }
    storage.k_free[stage].wait(ring.full ^ 1u);
    if (lane == 0) {
      storage.there[stage][0] = words[0];
      storage.there[stage][1] = words[1];
    }
    if (params.box_keys != 0) {
      copy_boxes(keys, words, stage);
    } else {
      if (lane == 0) storage.k_full[stage].arrive();
      if (params.wide_copies != 0) {
        copy_rows<16>(keys, block, words, stage);
      } else {
        copy_rows<4>(keys, block, words, stage);
      }
    }
    if constexpr (ThisConfig::kHasScales) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t offset = there[half] ? block[half] + params.scales_offset + int64_t{keys.place[half]} * 4 : 0;
        stream_copy_or_zeros<4>(smem_address(&storage.k_scale[stage][half * 32 + lane]), params.cache + offset,
                                there[half] ? 4u : 0u);
      }
    }
    storage.k_full[stage].arrive_after_copies();
  }

  // One lane's tensor copies of the keys of blocks. For a block whose first key nobody sees, or that is not in the
  // cache, it names one behind the last, which reads as zeros.
  __device__ __forceinline__ void copy_boxes(const Keys& keys, const uint32_t (&words)[2], uint32_t stage) const {
    if (lane == 0) storage.k_full[stage].arrive_and_expect(ThisConfig::kKeyTileBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll 1
      for (int first = 0; first < 32 && half * 32 % params.box_keys == 0; first += params.box_keys) {
        const int32_t block = __shfl_sync(0xffffffffu, keys.block[half], first);
        const int32_t place = static_cast<int32_t>(__shfl_sync(0xffffffffu, keys.place[half], first));
        const bool there = (words[half] >> first & 1u) != 0;
        if (lane != 0) continue;
#pragma unroll
        for (int column = 0; column < ThisConfig::kColumnTiles; ++column) {
          tma_load_4d(places.keys(stage, column) + (half * 32 + first) * ThisConfig::kSpan, k_map,
                      storage.k_full[stage], column * ThisConfig::kSpan / ThisConfig::kElementBytes, place,
                      there ? block : params.paged.blocks, 0, l2_policy);
        }
      }
    }
    __syncwarp();
  }

  // A pass copies 512 bytes of several keys; zeros for those that are not there.
  template <int kBytes>
  __device__ __forceinline__ void copy_rows(const Keys& keys, const int64_t (&block)[2], const uint32_t (&words)[2],
                                            uint32_t stage) const {
    const uint32_t chunk = static_cast<uint32_t>(lane) % kChunks;
    const uint32_t column = chunk * 16 / ThisConfig::kSpan;
    const uint32_t span_chunk = chunk % (ThisConfig::kSpan / 16);
    const uint32_t to = smem_address(places.keys(stage, static_cast<int>(column)));
    int64_t source[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool there = (words[half] >> lane & 1u) != 0;
      source[half] = there ? block[half] + keys.place[half] * params.row_bytes : 0;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll(kBytes == 16 ? 4 : 1)
      for (int pass = 0; pass < kHalfPasses; ++pass) {
        const uint32_t key = static_cast<uint32_t>(pass * kPassKeys + lane / kChunks);
        const uint32_t row = half * 32 + key;
        const int64_t offset = __shfl_sync(0xffffffffu, source[half], static_cast<int>(key));
        const bool there = (words[half] >> key & 1u) != 0;
        const uint8_t* from = params.cache + offset + (there ? chunk * 16 : 0u);
        const uint32_t place =
            to + (ThisConfig::kSpan == 64 ? swizzle_64(row, span_chunk) : swizzle_128(row, span_chunk));
        if constexpr (kBytes == 16) {
          stream_copy_or_zeros<16>(place, from, there ? 16u : 0u, l2_policy);
        } else {
#pragma unroll
          for (int byte = 0; byte < 16; byte += kBytes) {
            stream_copy_or_zeros<kBytes>(place + byte, from + (there ? byte : 0), there ? kBytes : 0u);
          }
        }
      }
    }
  }
};

}  // namespace cupymla::paged_indexer
