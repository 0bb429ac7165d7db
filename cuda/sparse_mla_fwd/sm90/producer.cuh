// The producer warpgroup: brings in Q, gathers the selected KV rows into shared memory and says which entries are
// valid.
#pragma once

#include "../../common/sm90/row_gather.cuh"
#include "../../common/tma.cuh"
#include "small_head_storage.cuh"
#include "query.cuh"
#include "storage.cuh"

namespace cupymla::sparse_mla_fwd {

// The tokens of a warp's sixteen entries of one KV block after another, one per lane, lane l's entry being l % 16; -1
// past the last valid entry. Where all entries are valid they are read straight; else each warp goes through the
// indices on its own and keeps those that are its.
template <typename Config>
struct Cursor {
  static constexpr int kWarpKeys = Config::kTileKeys / 4;
  static constexpr int32_t kDense = -1;

  int32_t* tokens;  // room for one block's, in shared memory
  const int lane;
  int32_t first;     // the warp's first entry of the next block, counted in valid entries
  int32_t entry;     // the indices gone through, or kDense where all entries are valid,
  int32_t seen = 0;  // and how many of them were valid

  __device__ __forceinline__ Cursor(int32_t* tokens, const Selection<Config>& selection, int warp, int lane)
      : tokens(tokens),
        lane(lane),
        first(selection.first_block * Config::kTileKeys + warp * kWarpKeys),
        entry(selection.valid == selection.entries ? kDense : 0) {}

  // The gather looks once more whether it is valid: another kernel may have changed the indices since they were
  // counted. Not here: who compares waits for the load.
  __device__ __forceinline__ int32_t next(const Selection<Config>& selection) {
    const int32_t token = entry == kDense ? selection.token(first + lane % kWarpKeys) : search(selection);
    first += Config::kTileKeys;
    return token;
  }

  // A chunk of 32 indices never reaches from the warp's entries of one block to those of the next.
  __device__ __forceinline__ int32_t search(const Selection<Config>& selection) {
    static_assert(Config::kTileKeys - kWarpKeys >= 32);
    __syncwarp();
    while (seen < first + kWarpKeys && entry < selection.entries) {
      const int32_t token = selection.token(entry + lane);
      const bool valid = selection.is_valid(token);
      const uint32_t valid_lanes = __ballot_sync(0xffffffffu, valid);
      const int32_t place = seen + __popc(valid_lanes & ((1u << lane) - 1u)) - first;
      if (valid && place >= 0 && place < kWarpKeys) tokens[place] = token;
      seen += __popc(valid_lanes);
      entry += 32;
    }
    __syncwarp();
    return first + lane % kWarpKeys < seen ? tokens[lane % kWarpKeys] : -1;
  }
};

template <typename Config>
struct Producer {
  sm90::RowGather<Config, Storage<Config>> gather;
  const Parameters& params;
  const TensorMap& q_map;
  PipelineState<Config> state;  // of the small-head variant
  static constexpr int kQuery = Config::kBuffers;  // Q's place among the phases, after the key buffers

  __device__ __forceinline__ Producer(Storage<Config>& storage, const Parameters& params, const TensorMap& q_map)
      : gather(storage), params(params), q_map(q_map) {}

  __device__ __forceinline__ void run(const WorkAssignment<Config>& work) {
    for (uint32_t position = work.token; position < work.end; ++position) {
      Selection<Config> selection(params, position);
      selection.take(count_valid(selection), work);
      if constexpr (Config::kSmallHead) {
        load_query_as_block(selection, work.first_head);
      } else {
        load_query(selection, work.first_head);
      }
      gather.phases.advance(kQuery);
      Cursor<Config> cursor(gather.storage.tokens[gather.warp], selection, gather.warp, gather.lane);
      // Waits for the first token here; all that is negative is invalid alike. ptxas gives its load the scoreboard of
      // the loop's, and without this would have each block wait for the next one's token, which was just asked for.
      int32_t token = max(cursor.next(selection), -1);
      const uint8_t* kv = params.kv + selection.batch * params.kv_batch_bytes;
      for (int block = 0; block < selection.blocks; ++block) {
        const int32_t next_token = cursor.next(selection);
        if constexpr (Config::kSmallHead) {
          gather.fill_places(token, selection.token_limit, kv, params.kv_token_bytes, state);
          state.advance();
        } else {
          gather.fill(token, selection.token_limit, kv, params.kv_token_bytes, block % 2);
        }
        token = next_token;
      }
    }
  }

  __device__ __forceinline__ int32_t count_valid(const Selection<Config>& selection) {
    constexpr int kAhead = 16;  // indices that a thread loads at once: of 2048 entries all
    constexpr int kProducers = Config::kWarpgroup;
    int32_t count = 0;
    for (int32_t first = gather.warp * 32 + gather.lane; first < selection.entries; first += kAhead * kProducers) {
      int32_t tokens[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) tokens[i] = selection.token(first + i * kProducers);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) count += selection.is_valid(tokens[i]);
    }
    count = __reduce_add_sync(0xffffffffu, count);
    auto& counts = gather.storage.counts[gather.phases.full(kQuery)];
    if (gather.lane == 0) counts[gather.warp] = count;
    named_barrier_sync(kCounted, kProducers);
    return counts[0] + counts[1] + counts[2] + counts[3];
  }

  __device__ __forceinline__ void load_query(const Selection<Config>& selection, int32_t first_head) {
    auto& storage = gather.storage;
    if (gather.warp == 0 && gather.lane == 0) {
      storage.q_free.wait(gather.phases.free(kQuery));
      storage.blocks = selection.blocks;
      storage.q_full.arrive_and_expect(sizeof(storage.q));
      for (int tile = 0; tile < Config::kKeyTiles; ++tile) {
        tma_load_4d(storage.q[tile], q_map, storage.q_full, tile * Config::kTileColumns, first_head, selection.query,
                    selection.batch);
      }
    }
    __syncwarp();
  }

  // Small-head variant: Q into the buffer whose turn it is, with the arrivals that a block would bring.
  __device__ __forceinline__ void load_query_as_block(const Selection<Config>& selection, int32_t first_head) {
    auto& storage = gather.storage;
    const int stage = state.stage(0);
    const bool is_first = gather.warp == 0 && gather.lane == 0;
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      constexpr int kLast = Config::kParts - 1;
      Mbarrier& full = storage.full[stage][part];
      storage.free[stage][part].wait(state.free_parity(part));
      if (is_first) {
        if (part == kLast) storage.blocks[stage] = selection.blocks;
        const int begin = Config::part_begin(part), end = Config::part_begin(part + 1);
        full.arrive_and_expect((end - begin) * Config::kHeadTileBytes);
        for (int tile = begin; tile < end; ++tile) {
          tma_load_4d(storage.k[stage][tile], q_map, full, tile * Config::kTileColumns, first_head, selection.query,
                      selection.batch);
        }
      } else {
        full.arrive();
      }
      if (part == kLast && gather.lane == 0) full.arrive();  // in the place of the validity words
    }
    __syncwarp();
    state.advance();
  }
};

}  // namespace cupymla::sparse_mla_fwd
