// The producer warpgroup: walks through the head blocks, brings in Q, gathers the selected KV rows into shared memory
// and says which entries are valid.
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/warp.cuh"
#include "../../common/registers.cuh"
#include "../../common/sm90/row_gather.cuh"
#include "../../common/tma.cuh"
#include "storage.cuh"

namespace cupymla::attn_dist {

// A buffer that is freed in one piece.
template <typename Config>
struct WholeBuffer : sm90::OneBuffer<Config> {
  static __device__ __forceinline__ constexpr int free_side(int part) { return part == 0 ? 0 : -1; }
};

template <typename Config>
struct Producer {
  sm90::RowGather<Config, Storage<Config>, Config::kValidityPart> rows;
  const Parameters& params;
  const TensorMap& q_map;
  // The next buffer to fill, counted on over the ring's second turn: one number, to spare registers.
  int place = 0;

  __device__ __forceinline__ Producer(Storage<Config>& storage, const Parameters& params, const TensorMap& q_map)
      : rows(storage), params(params), q_map(q_map) {}

  __device__ __forceinline__ TileIterator<Config>& iterator() const { return rows.storage.iterator; }

  __device__ __forceinline__ void run() {
    if (leads()) iterator() = TileIterator<Config>(params);
    named_barrier_sync(kIteratorMoved, Config::kWarpgroup);
    while (!iterator().done()) {
      if (iterator().first_head == 0) drop_invalid_end();
      if (iterator().empty()) {
        clear();
      } else {
        begin_head_block();
        gather_blocks();
      }
      named_barrier_sync(kIteratorRead, Config::kWarpgroup);
      if (leads()) iterator().advance(params);
      named_barrier_sync(kIteratorMoved, Config::kWarpgroup);
    }
    end();
  }

  // Takes blocks without a valid entry from the end of a query's, two at a time: selections are often padded there.
  __device__ __forceinline__ void drop_invalid_end() {
    if (iterator().empty()) return;
    int32_t end = iterator().end_block;
    for (; end > iterator().slice_begin; end = max(iterator().slice_begin, end - 2)) {
      const int32_t entry = (end - 2) * Config::kTileKeys + static_cast<int32_t>(threadIdx.x % Config::kWarpgroup);
      const bool inside = entry >= iterator().slice_begin * Config::kTileKeys && entry < iterator().query.entries;
      const bool valid =
          inside && static_cast<uint32_t>(__ldg(iterator().indices + entry)) < iterator().query.token_limit;
      if (named_barrier_any(kIteratorRead, Config::kWarpgroup, valid)) break;
    }
    if (leads()) iterator().end_block = end;
    named_barrier_sync(kIteratorMoved, Config::kWarpgroup);
  }

  __device__ __forceinline__ bool leads() const { return rows.warp == 0 && elect_one(); }

  __device__ __forceinline__ void gather_blocks() {
    int32_t token = load_token(iterator().slice_begin);
    for (int block = iterator().slice_begin; block < iterator().end_block; ++block) {
      const int32_t next_token = load_token(block + 1);
      // Here, or all that `fill_places` computes from it would be kept, and spilled, from block to block.
      rows.lane = rows.warp = static_cast<int>(threadIdx.x);
      make_opaque(rows.lane);
      make_opaque(rows.warp);
      rows.lane = rows.lane & 31;
      rows.warp = rows.warp >> 5 & 3;
      rows.fill_places(token, iterator().query.token_limit, iterator().kv, params.kv_token_bytes,
                       WholeBuffer<Config>{{buffer(), free_parity()}});
      advance();
      token = next_token;
    }
  }

  __device__ __forceinline__ int32_t load_token(int block) const {
    return rows.load_token(iterator().indices, iterator().query.entries, block);
  }

  __device__ __forceinline__ int buffer() const { return place < Config::kBuffers ? place : place - Config::kBuffers; }
  // Of its free barriers' awaited phase: a fresh mbarrier counts as having completed the phase before its first.
  __device__ __forceinline__ uint32_t free_parity() const { return place < Config::kBuffers ? 1u : 0u; }
  __device__ __forceinline__ void advance() { place = place + 1 == 2 * Config::kBuffers ? 0 : place + 1; }

  // Zeros for a query without blocks.
  __device__ __forceinline__ void clear() const {
    float* row = iterator().dist(params);
    const int32_t end = min(iterator().slice_end * Config::kTileKeys, params.topk);
    for (int32_t entry = iterator().slice_begin * Config::kTileKeys + threadIdx.x % Config::kWarpgroup; entry < end;
         entry += Config::kWarpgroup) {
      __stcg(row + entry, 0.f);
    }
  }

  // The head block's description, and its Q; heads past the last one read as zero.
  __device__ __forceinline__ void begin_head_block() {
    auto& storage = rows.storage;
    for (int part = 0; part < Config::kQueryBlocks; ++part) {
      wait_free();
      if (leads()) {
        if (part == 0) {
          storage.head_block[iterator().head_blocks % Storage<Config>::kHeadBlocks] = {
              iterator().dist(params), iterator().lse(params),  iterator().first_head,
              iterator().slice_begin,  iterator().end_block,    iterator().slice_end};
        }
        const int32_t head = iterator().first_head + part * Config::kConsumerHeads;
        for (int arrival = 0; arrival < Config::kParts; ++arrival) {
          const int begin = Config::part_begin(arrival), end = Config::part_begin(arrival + 1);
          auto& full = storage.full[buffer()][arrival];
          full.arrive_and_expect((end - begin) * Config::kTileBytes);
          for (int tile = begin; tile < end; ++tile) {
            tma_load_4d(storage.k[buffer()][tile], q_map, full, tile * Config::kTileColumns, head,
                        iterator().query.query, iterator().query.batch);
          }
        }
      } else {
        for (int arrival = 0; arrival < Config::kParts; ++arrival) storage.full[buffer()][arrival].arrive();
      }
      finish_buffer();
    }
  }

  // Tells consumers that there are no more head blocks.
  __device__ __forceinline__ void end() {
    auto& storage = rows.storage;
    wait_free();
    if (leads()) storage.head_block[iterator().head_blocks % Storage<Config>::kHeadBlocks].first_head = -1;
    storage.full[buffer()][Config::kValidityPart].arrive();
    finish_buffer();
  }

  __device__ __forceinline__ void wait_free() { rows.storage.free[buffer()][0].wait(free_parity()); }

  // The arrivals that come with validity words elsewhere.
  __device__ __forceinline__ void finish_buffer() {
    if (rows.lane == 0) rows.storage.full[buffer()][Config::kValidityPart].arrive();
    __syncwarp();
    advance();
  }
};

}  // namespace cupymla::attn_dist
