// A consumer warpgroup: every second key tile, with all queries of the query tile.
#pragma once

#include "../../common/barrier_arrive.cuh"
#include "../../common/indexer_score.cuh"
#include "../../common/matrix.cuh"
#include "../../common/ring.cuh"
#include "work.cuh"

namespace cupymla::indexer_logits {

struct Consumer {
  using Config = ThisConfig;

  // Scores of one key tile with a group of queries: products, until they are summed over heads.
  using Scores = float[Config::kRowTiles][Config::kScores];
  // Of a thread: its products belong to two keys of a row tile.
  static constexpr int kPairs = Config::kRowTiles * 2 * Config::kGroupQueries;

  Storage& storage;
  const Parameters& params;
  const int who;
  const int warp = static_cast<int>(threadIdx.x / 32 % 4);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const float floor;
  // Sums are handed out four to four lanes: this lane's key in a tile is always the same, and its query in a group the
  // first, or where there is one row tile the first or the second.
  const int own_key;
  const int own_query;

  uint32_t keys[Config::kRowTiles][Config::kSteps][4];

  __device__ __forceinline__ Consumer(Storage& storage, const Parameters& params, int who)
      : storage(storage),
        params(params),
        who(who),
        floor(indexer::relu_floor(params.relu != 0)),
        own_key(warp * 16 + lane / 4 + (lane & 1) * 8 + (Config::kRowTiles == 2 ? (lane & 2) * 32 : 0)),
        own_query(Config::kRowTiles == 2 ? 0 : lane / 2 % 2) {}

  // Where this lane's sums of the present tile go.
  struct Target {
    float* logits;  // of `own_query` of the query tile
    float k_scale;
    int32_t key;
  };

  __device__ __forceinline__ void run() {
    Ring<Config::kQueryBuffers> buffers;
    KeyRing stages;
    Scores scores[2] = {};
    Walk walk(params);
    if (who == 1) end_turn();  // the first consumer begins
    for (Run run; walk.next(run); buffers.advance()) {
      storage.q_full[buffers.stage].wait(buffers.full);
      const Visible visible(run, storage.any[buffers.stage]);
      const int32_t queries = min(Config::kQueries, params.queries - run.first_query());
      float* logits = params.logits + run.batch * params.logits_batch + run.first_query() * params.logits_query;
      fill(logits, queries, run.first, visible.first);
      fill(logits, queries, visible.end, run.end);
      // The same in all lanes: computed once per warp.
      const uint64_t heads = descriptor(__shfl_sync(0xffffffffu, smem_address(storage.q[buffers.stage][0]), 0));

      // Of the tile whose last group is still to be summed. Before the first one there is none: nothing is written.
      Target before{logits, 1.0f, params.keys};
      for (int32_t tile = visible.first + who; tile < visible.end; tile += 2) {
        Target target;
        target.key = tile * Config::kKeyRows + own_key;
        target.logits = logits + own_query * params.logits_query + target.key;
        target.k_scale = 1.0f;
        if (params.k_scale != nullptr && target.key < params.keys) {
          target.k_scale = params.k_scale[run.batch * params.k_scale_batch + target.key * params.k_scale_key];
        }
        load_keys(stages);
        issue_in_turn(scores[0], heads, 0);
        sm90::wgmma_wait<1>();
        pin(scores[1]);
        finish(scores[1], before, buffers.stage, Config::kGroups - 1, queries);
#pragma unroll
        for (int group = 1; group < Config::kGroups; ++group) {
          issue_in_turn(scores[group % 2], heads, group);
          sm90::wgmma_wait<1>();
          pin(scores[(group - 1) % 2]);
          finish(scores[(group - 1) % 2], target, buffers.stage, group - 1, queries);
        }
        // The last group's product reads the keys: the next ones have to wait for it, its sums have not.
        sm90::wgmma_wait<0>();
        pin(scores[1]);
        before = target;
      }
      finish(scores[1], before, buffers.stage, Config::kGroups - 1, queries);
      // Each has as many turns in a run: of an odd number of key tiles the first consumer has one more.
      if (who == 1 && (visible.end - visible.first) % 2 != 0) {
        for (int group = 0; group < Config::kGroups; ++group) {
          await_turn();
          end_turn();
        }
      }
      __syncwarp();
      if (lane == 0) storage.q_free[buffers.stage].arrive();
    }
    if (who == 0) await_turn();  // as the second one's last arrival is still there
  }

 private:
  static __device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    if constexpr (Config::kSpan == 64) return sm90::narrow_k_major_descriptor(address);
    return sm90::k_major_descriptor(address);
  }

  static __device__ __forceinline__ void pin(Scores& scores) {
#pragma unroll
    for (int i = 0; i < Config::kRowTiles; ++i) sm90::pin_registers(scores[i]);
  }

  // Key tiles that no query sees, every second one.
  __device__ __forceinline__ void fill(float* logits, int32_t queries, int32_t first, int32_t end) const {
    const int thread = static_cast<int>(threadIdx.x) % Config::kWarpgroup;
    for (int32_t tile = first; tile < end; ++tile) {
      if (tile % Config::kConsumers != who) continue;
      const int32_t key = tile * Config::kKeyRows + thread % Config::kKeyRows;
      if (key >= params.keys) continue;
      for (int query = thread / Config::kKeyRows; query < queries; query += Config::kWarpgroup / Config::kKeyRows) {
        logits[query * params.logits_query + key] = negative_infinity();
      }
    }
  }

  // Waits for this consumer's next key tile and takes in a warp's fragments of it; its stage is free then.
  __device__ __forceinline__ void load_keys(KeyRing& stages) {
    const uint32_t stage = key_stage(stages, who);
    storage.k_full[stage].wait(stages.full);
    stages.advance();
    const uint32_t base = smem_address(storage.k[stage][0]);
#pragma unroll
    for (int tile = 0; tile < Config::kRowTiles; ++tile) {
      const uint32_t row = tile * 64 + warp * 16 + lane % 16;
#pragma unroll
      for (int step = 0; step < Config::kSteps; ++step) {
        constexpr int kSpanSteps = Config::kSpan / 32;
        const uint32_t chunk = step % kSpanSteps * 2 + lane / 16;
        const uint32_t column = base + step / kSpanSteps * static_cast<uint32_t>(sizeof(storage.k[0][0]));
        load_matrix_x4(keys[tile][step],
                       column + (Config::kSpan == 64 ? swizzle_64(row, chunk) : swizzle_128(row, chunk)));
      }
    }
    __syncwarp();
    if (lane == 0) storage.k_free[stage].arrive();
  }

  // Consumers issue their products in turn. A warp stands still while it issues products from registers; without turns
  // both consumers would issue at the same time, and then both sum at the same time.
  __device__ __forceinline__ void issue_in_turn(Scores& scores, uint64_t heads, int group) {
    await_turn();
    issue(scores, heads, group);
    end_turn();
  }
  __device__ __forceinline__ void await_turn() const {
    named_barrier_sync(kTurn + who, Config::kConsumerThreads);
  }
  __device__ __forceinline__ void end_turn() const {
    named_barrier_arrive(kTurn + (who ^ 1), Config::kConsumerThreads);
  }

  // Issues the products of the keys with the heads of a group of queries.
  __device__ __forceinline__ void issue(Scores& scores, uint64_t heads, int group) {
    pin(scores);
    sm90::wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < Config::kRowTiles; ++tile) {
#pragma unroll
      for (int step = 0; step < Config::kSteps; ++step) {
        constexpr int kSpanSteps = Config::kSpan / 32;
        const uint32_t offset = step / kSpanSteps * static_cast<uint32_t>(sizeof(storage.q[0][0])) +
                                group * Config::kColumns * Config::kSpan + step % kSpanSteps * 32;
        sm90::mma<typename Config::Atom>(scores[tile], keys[tile][step], sm90::descriptor_advance(heads, offset),
                                         step == 0);
      }
    }
    sm90::wgmma_commit();
  }

  // Sums a group's products over heads and writes the scores.
  __device__ __forceinline__ void finish(const Scores& scores, const Target& target, uint32_t buffer, int group,
                                         int32_t queries) const {
    constexpr int kColumnGroups = Config::kHeads / 8;  // columns 8j to 8j + 7 of a product are heads of one query
    const int quad_lane = lane % 4;
    float pairs[Config::kGroupQueries][Config::kRowTiles][2];
#pragma unroll
    for (int query = 0; query < Config::kGroupQueries; ++query) {
      float chains[Config::kRowTiles][2][2] = {};
      const float* weights =
          storage.weights[buffer] + (group * Config::kGroupQueries + query) * Config::kHeads;
#pragma unroll
      for (int j = 0; j < kColumnGroups; j += 2) {
        float w[4];
        if constexpr (kColumnGroups == 1) {
          const float2 two = *reinterpret_cast<const float2*>(weights + quad_lane * 2);
          w[0] = two.x, w[1] = two.y;
        } else {
          const float4 four = *reinterpret_cast<const float4*>(weights + j * 8 + quad_lane * 4);
          w[0] = four.x, w[1] = four.y, w[2] = four.z, w[3] = four.w;
        }
#pragma unroll
        for (int of_two = 0; of_two < (kColumnGroups == 1 ? 1 : 2); ++of_two) {
          const int first = (query * kColumnGroups + j + of_two) * 4;
#pragma unroll
          for (int tile = 0; tile < Config::kRowTiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
              for (int odd = 0; odd < 2; ++odd) {
                chains[tile][half][odd] = indexer::add_head(chains[tile][half][odd], w[of_two * 2 + odd],
                                                            scores[tile][first + half * 2 + odd], floor);
              }
            }
          }
        }
      }
#pragma unroll
      for (int tile = 0; tile < Config::kRowTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          pairs[query][tile][half] = __fadd_rn(chains[tile][half][0], chains[tile][half][1]);
        }
      }
    }
    const int first = group * Config::kGroupQueries;
    if constexpr (Config::kRowTiles == 2) {
#pragma unroll
      for (int query = 0; query < Config::kGroupQueries; ++query) {
        const float four[4] = {pairs[query][0][0], pairs[query][0][1], pairs[query][1][0], pairs[query][1][1]};
        write(indexer::add_pairs_of_four(four, quad_lane), target, buffer, first + query, queries, true);
      }
    } else if constexpr (Config::kGroupQueries >= 2) {
#pragma unroll
      for (int query = 0; query < Config::kGroupQueries; query += 2) {
        const float four[4] = {pairs[query][0][0], pairs[query][0][1], pairs[query + 1][0][0], pairs[query + 1][0][1]};
        write(indexer::add_pairs_of_four(four, quad_lane), target, buffer, first + query, queries, true);
      }
    } else {
      const float low = indexer::add_pairs(pairs[0][0][0]), high = indexer::add_pairs(pairs[0][0][1]);
      write(lane & 1 ? high : low, target, buffer, first - own_query, queries, lane % 4 < 2);
    }
  }

  // `query`: in the query tile, the one that the lane would write if its own query were 0.
  __device__ __forceinline__ void write(float sum, const Target& target, uint32_t buffer, int query, int32_t queries,
                                        bool mine) const {
    const Bounds bounds = storage.bounds[buffer][query + own_query];
    const bool seen = bounds.begin <= target.key && target.key < bounds.end;
    const float score = seen ? __fmul_rn(sum, target.k_scale) : negative_infinity();
    if (mine && query + own_query < queries && target.key < params.keys) {
      target.logits[query * params.logits_query] = score;
    }
  }
};

}  // namespace cupymla::indexer_logits
