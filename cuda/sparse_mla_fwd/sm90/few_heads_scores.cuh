// The scores warpgroup where heads are few: scores and softmax of every block, a slot per accumulator row, a head per
// column.
#pragma once

#include "../../common/columns.cuh"
#include "../../common/matrix.cuh"
#include "../../common/sm90/wgmma.cuh"
#include "few_heads_storage.cuh"
#include "merge.cuh"
#include "../softmax.cuh"

namespace cupymla::sparse_mla_fwd {

template <typename Config, typename Element, bool kAnyScale>
struct Scores {
  using Mma = typename sm90::TransposedAtoms<Element, Config::kHeads>::Scores;
  static constexpr int kScores = Config::kHeads * Config::kSlots / Config::kWarpgroup;
  static constexpr int kColumns = kScores / 2;  // heads of which this thread has scores, of two slots each

  Storage<Config>& storage;
  const Parameters& params;
  const int32_t first_head;
  const int warp = (threadIdx.x / 32) % 4;
  const int lane = threadIdx.x % 32;

  float scores[kScores];
  // Per column. `base` is what exponentials are relative to (softmax.cuh), in units of log2, `maximum` the true
  // maximum, in units of scores; all threads agree on both. `sum` is of this thread's exponentials.
  float base[kColumns];
  float maximum[kColumns];
  float sum[kColumns];

  bool coarse;    // whether the base of any column is
  bool occupied;  // whether a block of this query had a valid slot
  Places<Config> places;  // of the next block
  Ring<2> query_ring;     // sets of results; q_full has one phase per query
  uint32_t q_parity = 0;
  uint32_t set = 0;       // of storage.columns

  __device__ __forceinline__ Scores(Storage<Config>& storage, const Parameters& params, int32_t first_head)
      : storage(storage), params(params), first_head(first_head) {}

  __device__ __forceinline__ void clear() {
    coarse = occupied = false;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      base[j] = maximum[j] = negative_infinity();
      sum[j] = 0.f;
    }
  }

  // scores = K Q^T, part by part as the keys' columns arrive. After the last ones of a query its Q may be replaced.
  __device__ __forceinline__ void multiply(bool last) {
    const uint64_t q = sm90::k_major_descriptor(smem_address(storage.q[0]));
    sm90::pin_registers(scores);
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      const int begin = Config::part_begin(part);
      const uint64_t k = sm90::k_major_descriptor(smem_address(places.tile(storage, part, begin)));
      storage.full[places.stage(part)][part].wait(places.full_parity(part));
      fence_async_shared();
      sm90::wgmma_fence();
#pragma unroll
      for (int tile = begin; tile < Config::part_begin(part + 1); ++tile) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const uint32_t key = (tile - begin) * Config::kTileBytes + step * 32;
          const uint32_t query = tile * Config::kHeadTileBytes + step * 32;
          sm90::mma<Mma>(scores, sm90::descriptor_advance(k, key), sm90::descriptor_advance(q, query),
                         tile == 0 && step == 0);
        }
      }
    }
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
    sm90::pin_registers(scores);
    if (last) storage.q_free.arrive();
  }

  // What turns a score into units of log2.
  __device__ __forceinline__ float score_unit() const { return kAnyScale ? 1.f : params.scale_log2; }

  __device__ __forceinline__ void mask() {
    if constexpr (kAnyScale) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] *= params.scale_log2;
    }
    const uint64_t valid = *reinterpret_cast<const uint64_t*>(storage.valid[places.shallow.stage]);
    occupied |= valid != 0;
    if (valid != ~0ull) {
      const uint32_t slots = static_cast<uint32_t>(valid >> (warp * 16 + lane / 4));  // this thread's: bits 0 and 8
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (((slots >> (i / 2 % 2 * 8)) & 1u) == 0) scores[i] = negative_infinity();
      }
    }
  }

  // Combines a value per column over the warp's slots; gives, of each head, what the four warps have.
  template <typename Combine>
  __device__ __forceinline__ const float (&exchange(float (&values)[kColumns], Combine combine))[Config::kHeads][4] {
    auto& columns = storage.columns[set];
    set ^= 1u;
    const float own = reduce_columns(values, lane, combine);
    if (is_owner()) columns[owned_head()][warp] = own;
    named_barrier_sync(kColumnsOut, Config::kWarpgroup);
    return columns;
  }

  // Every column of a warp belongs to one lane: the one it is left with by `reduce_columns`.
  __device__ __forceinline__ bool is_owner() const { return kColumns == 8 || lane / 4 % 2 == 0; }
  __device__ __forceinline__ int owned_head() const { return column_of(owned_column<kColumns>(lane), lane); }

  __device__ __forceinline__ void maxima(float (&block_max)[kColumns]) {
    const auto larger = [](float a, float b) { return max_nan(a, b); };
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int i = j / 2 * 4 + j % 2;
      block_max[j] = max_nan(scores[i], scores[i + 2]);
    }
    const auto& columns = exchange(block_max, larger);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const float4 warps = *reinterpret_cast<const float4*>(columns[column_of(j, lane)]);
      const float largest = max_nan(max_nan(warps.x, warps.y), max_nan(warps.z, warps.w));
      block_max[j] = largest * score_unit();
      maximum[j] = max_nan(maximum[j], largest);
    }
  }

  // Brings sums to the base for this block, and says by how much the output has to follow.
  __device__ __forceinline__ void move_base(const float (&block_max)[kColumns]) {
    float new_base[kColumns];
    bool moved = false;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      new_base[j] = next_base(base[j], block_max[j]);
      moved |= new_base[j] != base[j];
    }
    const uint32_t stage = places.shallow.stage;
    // A warp has all columns, so that all warps find the same.
    moved = __any_sync(0xffffffffu, moved);
    if (warp == 0 && lane == 0) storage.base_moved[stage] = moved;
    if (!moved) return;

    bool past = false;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const float factor = sparse_mla_fwd::base_factor(base[j], new_base[j]);
      sum[j] *= factor;
      base[j] = new_base[j];
      past |= is_coarse(new_base[j]);
      if (warp == 0 && lane < 4) storage.base_factor[stage][column_of(j, lane)] = factor;
    }
    if constexpr (!kAnyScale) coarse = __any_sync(0xffffffffu, past);
  }

  // P^T = exp2(score - base), turned and handed to the values warpgroup.
  __device__ __forceinline__ void publish() {
    float unit = score_unit();
    if (!kAnyScale && coarse) {
      // Rounded as the base was, so that the largest score gives exactly 2^0 or less.
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] = __fmul_rn(scores[i], unit);
      unit = 1.f;
    }
    uint32_t probabilities[kScores / 2];
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int j = i / 4 * 2;
      const float p0 = exp2_approx(fmaf(scores[i], unit, -finite_or_zero(base[j])));
      const float p1 = exp2_approx(fmaf(scores[i + 1], unit, -finite_or_zero(base[j + 1])));
      sum[j] += p0;
      sum[j + 1] += p1;
      probabilities[i / 2] = pack_pair<Element>(p0, p1);
    }
    // Tiles of eight slots by eight heads; the slots of a warp are chunks 2 * warp and 2 * warp + 1 of a head's row.
    const uint32_t address = smem_address(storage.p[places.shallow.stage]);
    const uint32_t chunk = warp * 2 + lane / 8 % 2;
#pragma unroll
    for (int i = 0; i < kScores / 2; i += 4) {
      const uint32_t head = i / 4 * 16 + lane / 16 * 8 + lane % 8;
      store_matrix_x4_transposed(address + swizzle_128(head, chunk), probabilities[i], probabilities[i + 1],
                                 probabilities[i + 2], probabilities[i + 3]);
    }
    fence_async_shared();
    storage.p_ready[places.shallow.stage].arrive();
  }

  // Goes through all blocks of a query.
  __device__ __forceinline__ void accumulate() {
    clear();
    storage.q_full.wait(q_parity);
    q_parity ^= 1u;
    const int32_t blocks = storage.blocks;
    if (blocks == 0) storage.q_free.arrive();
    for (int block = 0; block < blocks; ++block) {
      float block_max[kColumns];
      multiply(block == blocks - 1);
      mask();
      maxima(block_max);
      move_base(block_max);
      publish();
      places.advance();
    }
  }

  // Statistics of the head that this lane owns.
  __device__ __forceinline__ RowStatistics join_statistics() {
    const auto& columns = exchange(sum, [](float a, float b) { return a + b; });
    const float4 warps = *reinterpret_cast<const float4*>(columns[owned_head()]);
    const int column = owned_column<kColumns>(lane);
    return {pick(base, column), pick(maximum, column), warps.x + warps.y + warps.z + warps.w, occupied};
  }

  // Writes the statistics of a query, and hands the values warpgroup what makes its output the result.
  __device__ __forceinline__ void store_result(const Query& query) {
    const RowStatistics joined = join_statistics();
    if (warp == 0 && is_owner()) {
      const int head = first_head + owned_head();
      storage.output_factor[query_ring.stage][owned_head()] = output_factor(params, head, joined, 0.f);
      if (head < params.h_q) store_statistics(params, query, head, joined);
    }
    storage.statistics_ready[query_ring.stage].arrive();
    query_ring.advance();
  }

  // Leaves the statistics for the CTAs of the cluster.
  __device__ __forceinline__ void leave() {
    const RowStatistics joined = join_statistics();
    named_barrier_sync(kTilesRead, Config::kConsumers * Config::kWarpgroup);
    if (warp == 0 && is_owner()) {
      leavings(storage).statistics[owned_head()] = packed(joined);
    }
  }
};

}  // namespace cupymla::sparse_mla_fwd
