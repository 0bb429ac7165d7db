// The softmax warps: scores from Tensor Memory, P to shared memory, row statistics. Two threads share a head, one for
// each half of the lanes that its scores lie in.
#pragma once

#include "../../common/sm100/vector_math.cuh"
#include "../softmax.cuh"
#include "epilogue.cuh"

namespace cupymla::sparse_mla_fwd {

template <typename Storage, typename Element, bool kAnyScale>
struct Softmax {
  using Config = typename Storage::Config;
  static constexpr int kScores = Config::kScoresColumns;  // of a thread, in a block
  static constexpr uint64_t kAllValid = ~0ull >> (64 - kScores);
  static_assert(kScores == 32 || kScores == 64);

  Storage& storage;
  const Parameters& params;
  const CtaPosition<Config> cta;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t side = warp / 2;             // which half of a block's entries; in a pair, those of which CTA's keys
  const uint32_t row = warp % 2 * 32 + lane;  // head of this CTA
  const uint32_t tmem;                        // first lane of this warp
  Lengths<Storage> lengths;

  // Exponentials are taken relative to `base` (../softmax.cuh), in units of log2, which is the same for all entries of
  // a head. `row_max` is the true maximum, in units of scores, `row_sum` the sum of this thread's exponentials.
  float base, row_max, row_sum;
  bool occupied;  // whether this thread's entries of the query had a valid one
  uint32_t s_parity = 0, stats_parity = 1;
  uint32_t values_parity = Config::kCtas == 1 ? 0 : 1;  // of what says that products with values are done
  uint32_t turn = 0;  // which set of the exchange

  __device__ __forceinline__ Softmax(Storage& storage, const Parameters& params)
      : storage(storage), params(params), tmem(sm100::tmem_lane(storage.tmem, warp * 32)), lengths{storage, params} {}

  __device__ __forceinline__ void run() {
    for_each_item(params, cta, [&](uint32_t item) {
      const Work<Config> work(params, item, cta, lengths.next());
      const sm100::QueryEntries entries(params, work);
      base = row_max = negative_infinity();
      row_sum = 0.f;
      occupied = false;
      int2 tokens = own_tokens(entries, work, 0);
      for (int32_t block = 0; block < work.blocks; ++block) {
        const uint64_t valid = sm100::valid_entries(entries, tokens.x, tokens.y);
        tokens = own_tokens(entries, work, block + 1);
        accumulate(block, valid);
      }
      const RowStatistics row_statistics = statistics();
      if constexpr (Config::kSplit) {
        // P and the stages, where statistics go, are done with once the last product is.
        if constexpr (Config::kCtas == 2) {
          storage.pv_done.wait(values_parity);
        } else if (work.blocks != 0) {
          storage.o_full.wait(values_parity);
          values_parity ^= 1u;
        }
        if (leads()) leavings(storage).statistics[row] = packed(row_statistics);
      } else if (leads()) {
        finish(work, row_statistics);
      }
    });
    if constexpr (Config::kCtas == 2) storage.pv_done.wait(values_parity);
  }

  // Whether this thread answers for its head.
  __device__ __forceinline__ bool leads() const { return side == 0; }

  // Tokens of one or two of the entries whose scores this warp has in a block: columns `lane` and `lane` + 32.
  __device__ __forceinline__ int2 own_tokens(const sm100::QueryEntries& entries, const Work<Config>& work,
                                             int32_t block) const {
    const int32_t first = work.first_entry(block) + static_cast<int32_t>(side * kScores + lane);
    return make_int2(entries.token(first), kScores == 64 ? entries.token(first + 32) : -1);
  }

  // What turns a score into units of log2.
  __device__ __forceinline__ float score_unit() const { return kAnyScale ? 1.f : params.scale_log2; }

  // What both threads of a head give.
  template <typename Combine>
  __device__ __forceinline__ float combine(float own, Combine combine) {
    auto& exchange = storage.exchange[turn];
    exchange[side][row] = own;
    named_barrier_sync(kExchange, Config::kSoftmaxThreads);
    turn ^= 1u;
    return combine(exchange[0][row], exchange[1][row]);
  }

  __device__ __forceinline__ void accumulate(int32_t block, uint64_t valid) {
    float scores[kScores];
    storage.s_ready.wait(s_parity);
    s_parity ^= 1u;
    sm100::fence_after_sync();
    sm100::tmem_load(scores, tmem + Config::kScoresColumn);
    sm100::wait_loads();
    sm100::fence_before_sync();
    arrive_at_leader(storage.s_free, cta, lane);

    const float own_max = mask_and_maximum(scores, valid);
    const float largest = combine(own_max, [](float a, float b) { return max_nan(a, b); });
    const float block_max = largest * score_unit();
    row_max = max_nan(row_max, largest);
    const float new_base = next_base(base, block_max);
    uint32_t probabilities[kScores / 2];
    const float sum = exponentials(scores, probabilities, new_base);

    if constexpr (Config::kCtas == 2) {
      storage.pv_done.wait(values_parity);
      values_parity ^= 1u;
    }  // else s_ready has said so: the last of these scores come behind the values of the block before
    move_base(new_base, block > 0);
    row_sum += sum;
    publish(probabilities);
    fence_async_shared();
    arrive_at_leader(storage.p_ready, cta, lane);
  }

  // Masks the scores of invalid entries and gives the largest.
  __device__ __forceinline__ float mask_and_maximum(float (&scores)[kScores], uint64_t valid) {
    if constexpr (kAnyScale) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] *= params.scale_log2;
    }
    occupied |= valid != 0;
    if (valid != kAllValid) {
      const uint32_t low = static_cast<uint32_t>(valid), high = static_cast<uint32_t>(valid >> 32);
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if ((((i < 32 ? low : high) >> (i % 32)) & 1u) == 0) scores[i] = negative_infinity();
      }
    }
    float maxima[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) maxima[j] = scores[j];
#pragma unroll
    for (int i = 4; i < kScores; ++i) maxima[i % 4] = max_nan(maxima[i % 4], scores[i]);
    return max_nan(max_nan(maxima[0], maxima[1]), max_nan(maxima[2], maxima[3]));
  }

  // P = exp2(score - base), as pairs of elements; gives their sum.
  __device__ __forceinline__ float exponentials(float (&scores)[kScores], uint32_t (&probabilities)[kScores / 2],
                                                float new_base) {
    float unit = score_unit();
    if (!kAnyScale && is_coarse(new_base)) {
      // Rounded as the base was, so that the largest score gives exactly 2^0 or less.
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] = __fmul_rn(scores[i], unit);
      unit = 1.f;
    }
    const float shift = -finite_or_zero(new_base);
    const float2 units = make_float2(unit, unit), shifts = make_float2(shift, shift);
    float2 sums[2] = {};
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      const float2 x = sm100::multiply_add(make_float2(scores[2 * i], scores[2 * i + 1]), units, shifts);
      const float2 p = make_float2(exp2_approx(x.x), exp2_approx(x.y));
      sums[i % 2] = sm100::add(sums[i % 2], p);
      probabilities[i] = pack_pair<Element>(p.x, p.y);
    }
    const float2 both = sm100::add(sums[0], sums[1]);
    return both.x + both.y;
  }

  // Brings output and row sum to a new base, if it is one for any row of the warp. No product with values
  // may be in flight.
  __device__ __forceinline__ void move_base(float new_base, bool has_output) {
    if (!__any_sync(0xffffffffu, new_base != base)) return;
    const float factor = base_factor(base, new_base);
    row_sum *= factor;
    base = new_base;
    if (!has_output) return;
    constexpr uint32_t kColumns = 32;
    if constexpr (Config::kCtas == 2) sm100::fence_after_sync();  // else that behind s_ready does
    const uint32_t first = tmem + Config::kOutputColumn;
#pragma unroll 1
    for (uint32_t column = 0; column < Config::kOutputColumns; column += kColumns) {
      float values[kColumns];
      sm100::tmem_load(values, first + column);
      sm100::wait_loads();
#pragma unroll
      for (uint32_t i = 0; i < kColumns; ++i) values[i] *= factor;
      sm100::tmem_store(first + column, values);
    }
    sm100::wait_stores();
    sm100::fence_before_sync();
  }

  // This thread's row of P, of its half of the entries.
  __device__ __forceinline__ void publish(const uint32_t (&p)[kScores / 2]) {
    constexpr int kTileSides = sm100::kTileColumns / kScores;  // that share a tile
    uint8_t* tile = storage.p[side / kTileSides];
    const int first_chunk = static_cast<int>(side % kTileSides) * (kScores / 8);
#pragma unroll
    for (int chunk = 0; chunk < kScores / 8; ++chunk) {
      *reinterpret_cast<uint4*>(tile + swizzle_128(row, first_chunk + chunk)) =
          make_uint4(p[4 * chunk], p[4 * chunk + 1], p[4 * chunk + 2], p[4 * chunk + 3]);
    }
  }

  // Of this thread's head, after the last block.
  __device__ __forceinline__ RowStatistics statistics() {
    // Of the two warps that masked the head's scores: if indices change under way, other warps may have seen others.
    auto& occupied_warps = storage.occupied[turn];
    if (lane == 0) occupied_warps[warp] = occupied;
    const float sum = combine(row_sum, [](float a, float b) { return a + b; });
    const bool any = occupied_warps[warp % 2] || occupied_warps[warp % 2 + 2];
    return {base, row_max, sum, any};
  }

  // Writes lse and max_logits, and tells the epilogue what makes O the result. Only the threads that lead come here:
  // nothing holds back the phases of stats_free for the others.
  __device__ __forceinline__ void finish(const Work<Config>& work, const RowStatistics& statistics) {
    const int32_t head = work.first_head + static_cast<int32_t>(row);
    if (head < params.h_q) store_statistics(params, work, head, statistics);
    const float factor = output_factor(params, head, statistics, -1.f);
    storage.stats_free.wait(stats_parity);
    stats_parity ^= 1u;
    storage.output_factor[row] = factor;
    storage.stats_ready.arrive();
  }
};

}  // namespace cupymla::sparse_mla_fwd
