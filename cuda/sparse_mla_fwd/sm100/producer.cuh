// What brings Q and the selected KV rows into shared memory, all by TMA: key warps fill the stages of the ring, a tile
// each; in a pair another brings the rest of Q and fills stages a second time with values. Several, because the
// instructions for a tile's rows are issued one after another.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/ring.cuh"
#include "../../common/sm100/gather.cuh"
#include "lengths.cuh"

namespace cupymla::sparse_mla_fwd {

// Calls `load` with the rows of this lane's four entries of each block, of one CTA's entries of it. Tokens are read a
// block ahead, so that no gather waits for them.
template <typename Config, typename Load>
__device__ __forceinline__ void for_each_block_rows(const Parameters& params, const Work<Config>& work, uint32_t rank,
                                                    uint32_t lane, Load load) {
  const sm100::QueryEntries entries(params, work);
  const int32_t own = static_cast<int32_t>(rank) * sm100::kGroupKeys + sm100::group_entry(lane);
  int4 tokens = entries.four_tokens(work.first_entry(0) + own);
  for (int32_t block = 0; block < work.blocks; ++block) {
    const int4 rows = entries.rows(tokens);
    tokens = entries.four_tokens(work.first_entry(block + 1) + own);
    load(rows);
  }
}

template <typename Storage>
struct KeyWarp {
  using Config = typename Storage::Config;

  Storage& storage;
  const Parameters& params;
  const TensorMap& q_map;
  const TensorMap& kv_map;
  const CtaPosition<Config> cta;
  const uint32_t lane = threadIdx.x % 32;
  Lengths<Storage> lengths;
  const uint32_t own = threadIdx.x / 32 - Config::kKeyWarp;  // which tile of a stage
  Ring<Config::kStages> ring;
  Ring<2> ropes;
  uint32_t kept_parity = 1;  // of q_kept's awaited phase

  __device__ __forceinline__ KeyWarp(Storage& storage, const Parameters& params, const TensorMap& q_map,
                                     const TensorMap& kv_map)
      : storage(storage), params(params), q_map(q_map), kv_map(kv_map), lengths{storage, params} {}

  __device__ __forceinline__ void run() {
    for_each_item(params, cta, [&](uint32_t item) {
      const Work<Config> work(params, item, cta, lengths.next());
      if (work.blocks == 0) return;
      stage_query(work);
      for_each_block_rows(params, work, cta.rank, lane, [&](int4 rows) { load_keys(rows); });
    });
    // Until the Tensor Core has signalled everything to this CTA.
    for (int stage = 0; stage < Config::kStages; ++stage) {
      storage.free[ring.stage].wait(ring.free());
      ring.advance();
    }
    if constexpr (Config::kHasRope) {
      for (int stage = 0; stage < Config::kRopes; ++stage) {
        storage.rope_free[ropes.stage].wait(ropes.free());
        ropes.advance();
      }
    }
    storage.q_kept.wait(kept_parity);
  }

  // Q's tiles for Tensor Memory, into stages of the ring.
  __device__ __forceinline__ void stage_query(const Work<Config>& work) {
    storage.q_kept.wait(kept_parity);
    kept_parity ^= 1u;
    for (int part = 0; part < Config::kQueryStages; ++part) {
      storage.free[ring.stage].wait(ring.free());
      __syncwarp();
      if (lane == 0) {
        if (part == 0 && own == 0) storage.q_staged.arrive_and_expect(Config::kTmemTiles * sm100::kTileBytes);
        const int tile = part * Config::kStageTiles + static_cast<int>(own);
        if (tile < Config::kTmemTiles) {
          tma_load_4d(storage.stages[ring.stage] + own * sm100::kTileBytes, q_map, storage.q_staged,
                      (Config::kFirstTmemTile + tile) * sm100::kTileColumns, work.first_head, work.query, work.batch);
        }
      }
      __syncwarp();
      ring.advance();
    }
    // This warp has seen every stage free, also one in which it has no tile. Else the epilogue could free that again
    // before, and this warp would wait for a phase that is over.
    if (lane == 0) storage.q_staged.arrive();
  }

  // Before the first gather into a place: what will come there in both CTAs, said once.
  __device__ __forceinline__ void expect(Mbarrier& full, uint32_t bytes) {
    __syncwarp();
    if (cta.rank == 0 && own == 0 && lane == 0) full.arrive_and_expect(Config::kCtas * bytes);
    __syncwarp();
  }

  // All channels of this CTA's entries of a block.
  __device__ __forceinline__ void load_keys(int4 rows) {
    for (int part = 0; part < Config::kBlockStages; ++part) {
      Mbarrier& full = storage.keys[ring.stage];
      storage.free[ring.stage].wait(ring.free());
      expect(full, Config::kStageBytes);
      sm100::gather_group<1, Config::kCtas == 2>(storage.stages[ring.stage] + own * sm100::kTileBytes, kv_map, full,
                                                 static_cast<int>(part * Config::kStageTiles + own), rows, lane);
      ring.advance();
    }
    if constexpr (Config::kHasRope) {
      Mbarrier& full = storage.rope_full[ropes.stage];
      storage.rope_free[ropes.stage].wait(ropes.free());
      expect(full, sm100::kTileBytes);
      // As many of the tile's rows each.
      constexpr uint32_t kOwnLanes = sm100::kGroupKeys / sm100::kGatherRows / Config::kKeyWarps;
      if (lane / kOwnLanes == own) {
        uint8_t* destination = storage.ropes[ropes.stage] + lane * sm100::kGatherRows * kSwizzleRowBytes;
        constexpr int kColumn = Config::kValueTiles * sm100::kTileColumns;
        if constexpr (Config::kCtas == 2) {
          sm100::gather_rows_of_pair(destination, kv_map, full, kColumn, rows);
        } else {
          sm100::gather_rows(destination, kv_map, full, kColumn, rows);
        }
      }
      ropes.advance();
    }
  }
};

// Brings Q's tiles that stay in shared memory, and fills stages whose keys have been multiplied with this CTA's half of
// the channels of the other CTA's entries.
template <typename Storage>
struct ValueWarp {
  using Config = typename Storage::Config;

  Storage& storage;
  const Parameters& params;
  const TensorMap& q_map;
  const TensorMap& kv_map;
  const CtaPosition<Config> cta;
  const uint32_t lane = threadIdx.x % 32;
  Lengths<Storage> lengths;
  Ring<Config::kStages> ring;
  Phases read;
  uint32_t q_parity = 1;  // of q_free's awaited phase

  __device__ __forceinline__ ValueWarp(Storage& storage, const Parameters& params, const TensorMap& q_map,
                                       const TensorMap& kv_map)
      : storage(storage), params(params), q_map(q_map), kv_map(kv_map), lengths{storage, params} {}

  __device__ __forceinline__ void run() {
    for_each_item(params, cta, [&](uint32_t item) {
      const Work<Config> work(params, item, cta, lengths.next());
      if (work.blocks == 0) return;
      load_query(work);
      for (int part = 0; part < Config::kQueryStages; ++part) ring.advance();
      for_each_block_rows(params, work, cta.rank ^ 1u, lane, [&](int4 rows) { load_values(rows); });
    });
    storage.q_free.wait(q_parity);
  }

  __device__ __forceinline__ void load_query(const Work<Config>& work) {
    storage.q_free.wait(q_parity);
    q_parity ^= 1u;
    __syncwarp();
    if (lane == 0) {
      if (cta.rank == 0) storage.q_full.arrive_and_expect(Config::kCtas * sizeof(storage.q));
      for (int tile = 0; tile < Config::kSharedTiles; ++tile) {
        sm100::tma_load_4d_of_pair(storage.q[tile], q_map, storage.q_full,
                                   (Config::kFirstSharedTile + tile) * sm100::kTileColumns, work.first_head, work.query,
                                   work.batch);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_values(int4 rows) {
    for (int part = 0; part < Config::kBlockStages; ++part) {
      Mbarrier& keys_read = storage.keys_read[ring.stage];
      Mbarrier& full = storage.values[ring.stage];
      const uint32_t owner = part / Config::kChunks;  // the CTA whose keys are its values
      // Both CTAs wait and arrive, whichever fills the stage: else nothing would hold the phases back for the other.
      keys_read.wait(read.full(ring.stage));
      read.advance(ring.stage);
      __syncwarp();
      if (lane == 0) {
        if (cta.rank == 0) {
          full.arrive_and_expect(Config::kStageBytes);
        } else {
          cluster_arrive_after_reads_at(cluster_address(smem_address(&full.state), cta.leader));
        }
      }
      __syncwarp();
      if (cta.rank != owner) {
        const int tile = static_cast<int>(cta.rank) * Config::kValueTiles / Config::kCtas +
                         part % Config::kChunks * Config::kStageTiles;
        sm100::gather_group<Config::kStageTiles, true>(storage.stages[ring.stage], kv_map, full, tile, rows, lane);
      }
      ring.advance();
    }
  }
};

}  // namespace cupymla::sparse_mla_fwd
