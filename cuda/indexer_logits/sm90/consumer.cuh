// A consumer warpgroup: key tiles in turn with the others, with all queries of the query tile.
#pragma once

#include "../../common/grid_dependency.cuh"
#include "../../common/indexer_score.cuh"
#include "../../common/matrix.cuh"
#include "../../common/memory.cuh"
#include "../../common/registers.cuh"
#include "../../common/ring.cuh"
#include "../../common/store_if.cuh"
#include "work.cuh"

namespace cupymla::indexer_logits {

struct Consumer {
  using Config = ThisConfig;

  // Scores of one key tile with a group of queries: products, until they are summed over heads.
  using Scores = float[Config::kRowTiles][Config::kScores];
  // A lane's sums over its heads, two of each eight, for its two keys of a row tile. Four lanes have all heads.
  using Sums = float[Config::kGroupQueries][Config::kRowTiles][2];

  // What four lanes have of the sums of this lane's key, where they come by way of shared memory.
  struct Parts {
    float4 of[Config::kThroughShared ? Config::kGroupQueries : 1];
  };

  // A lane's weights of a group of queries.
  struct Weights {
    static constexpr int kQueryWeights = Config::kHeads / 4;
    float of[Config::kGroupQueries][kQueryWeights];

    __device__ __forceinline__ void load(const Storage& storage, uint32_t buffer, int group, int lane) {
      const float* weights = storage.weights[buffer] + group * Config::kColumns;
#pragma unroll
      for (int query = 0; query < Config::kGroupQueries; ++query) {
        if constexpr (kQueryWeights == 2) {
          const float2 two = *reinterpret_cast<const float2*>(weights + query * Config::kHeads + lane % 4 * 2);
          of[query][0] = two.x, of[query][1] = two.y;
        } else {
#pragma unroll
          for (int i = 0; i < kQueryWeights; i += 4) {
            const float4 four =
                *reinterpret_cast<const float4*>(weights + query * Config::kHeads + i * 4 + lane % 4 * 4);
            of[query][i] = four.x, of[query][i + 1] = four.y, of[query][i + 2] = four.z, of[query][i + 3] = four.w;
          }
        }
      }
    }
  };

  Storage& storage;
  const Parameters& params;
  const int warpgroup_idx;
  const int warp = static_cast<int>(threadIdx.x / 32 % 4);
  const int lane = static_cast<int>(threadIdx.x % 32);
  // Sums are handed out four to four lanes: this lane's key in a tile is always the same, and its query in a group the
  // first, or where there is one row tile the first or the second.
  int own_key;
  const int own_query;

  // Where this lane stores a row of four lanes' sums, and where it finds those of its own key. Row r of eight is at
  // place r + 2j of the sums j of four: so neither eight lanes that store nor eight that load meet in a bank.
  uint32_t sums_row;
  uint32_t own_sums;
  // Where this lane's first row of a fragment of keys is in a stage.
  uint32_t own_fragment;

  uint32_t keys[Config::kRowTiles][Config::kSteps][4];

  __device__ __forceinline__ Consumer(Storage& storage, const Parameters& params, int warpgroup_idx)
      : storage(storage),
        params(params),
        warpgroup_idx(warpgroup_idx),
        own_key(warp * 16 + lane / 4 + (lane & 1) * 8 + (Config::kRowTiles == 2 ? (lane & 2) * 32 : 0)),
        own_query(Config::kRowTiles == 1 && Config::kGroupQueries > 1 ? lane / 2 % 2 : 0),
        sums_row(sums_place(lane / 8, lane % 8)),
        own_sums(sums_place(lane % 4, lane / 4)),
        own_fragment(swizzle(warp * 16 + lane % 16, lane / 16)) {
    // From where the compiler cannot work them out anew for each key tile.
    own_fragment = __shfl_sync(0xffffffffu, own_fragment, lane);
    sums_row = __shfl_sync(0xffffffffu, sums_row, lane);
    own_sums = __shfl_sync(0xffffffffu, own_sums, lane);
    own_key = __shfl_sync(0xffffffffu, own_key, lane);
  }

  static constexpr uint32_t kNone = Config::kQueryBuffers;

  // Queries that a lane writes are this far apart.
  static constexpr int kQueryStride = Config::kRowTiles == 1 && Config::kGroupQueries > 1 ? 2 : 1;

  // A bit for each query of the query tile, from this lane's first one on.
  using Queries = conditional_t<Config::kQueries <= 32, uint32_t, uint64_t>;
  static constexpr Queries kAllQueries = ~Queries{0} >> (sizeof(Queries) * 8 - Config::kQueries);

  // Where this lane's sums of a key tile go.
  struct Target {
    float* next;      // score of the next query that this lane comes to, and its key
    float k_scale;
    Queries written;  // queries that see the key, and that this lane writes
  };

  __device__ __forceinline__ void run() {
    Ring<Config::kQueryBuffers> buffers;
    uint32_t use = 0;  // of this consumer's stages
    Scores scores[2] = {};
    Sums sums = {};
    hand_out(sums, Config::kGroups - 2);
    // Of the tile whose last group is still to be summed, and its last two to be written, in the query buffer `held`.
    // Where there is none, nothing is written.
    Target before{params.logits, 1.0f, 0};
    uint32_t held = kNone;
    // Before the first score is written: a selection may still read those that were there. What is loaded was there
    // before the call.
    wait_for_primary_grid(params.has_dependent != 0);
    for (;; buffers.advance()) {
      const uint32_t buffer = buffers.stage;
      storage.q_full[buffer].wait(buffers.full);
      const Run& run = storage.runs[buffer];
      int32_t tile = run.first_of(warpgroup_idx);
      const int32_t end = run.end;
      if (tile >= end) {
        // The buffer that is held may be the one that the next run waits for.
        if (held != kNone) {
          Parts parts;
          take_in(parts, Config::kGroups - 2);
          write(sums, parts, before, Config::kGroups - 2);
          Weights weights;
          weights.load(storage, held, Config::kGroups - 1, lane);
          sum_heads(scores[1], weights, sums);
          hand_out(sums, Config::kGroups - 1);
          take_in(parts, Config::kGroups - 1);
          write(sums, parts, before, Config::kGroups - 1);
          before.written = 0;
          free_queries(held);
          held = kNone;
        }
        if (run.batch < 0) break;
      }
      const int32_t queries = min(Config::kQueries, params.queries - run.first_query());
      float* logits = params.logits + run.batch * params.logits_batch + run.first_query() * params.logits_query;
      fill(run, logits, queries);
      if (tile >= end) {
        free_queries(buffer);
        continue;
      }
      if (held == kNone) held = buffer;
      // The same in all lanes: computed once per warp.
      const uint64_t heads = descriptor(__shfl_sync(0xffffffffu, smem_address(storage.q[buffer][0]), 0));

      const int32_t batch = run.batch;
      Target target = make_target(batch, tile, logits, queries);
      const Bounds all = storage.all[buffer];
      for (; tile < end; tile += Config::kConsumers) {
        if (all.begin > tile * Config::kKeyRows || (tile + 1) * Config::kKeyRows > all.end) {
          fill_unseen(target, buffer, tile);
        }
        load_keys(use);
#pragma unroll
        for (int group = 0; group < Config::kGroups; ++group) {
          const int last = (group + Config::kGroups - 1) % Config::kGroups;
          const int older = (group + 2 * Config::kGroups - 2) % Config::kGroups;
          // Loads of weights are under way while the products are issued. A tile's first products come before them:
          // until these are issued, this consumer has none under way, and sums would be moved up between them.
          Weights weights;
          if (group > 0) weights.load(storage, buffer, last, lane);
          issue(scores[group % 2], heads, group);
          if (group == 0) {
            free_keys(use++);
            weights.load(storage, held, last, lane);
          }
          Parts parts;
          if (group > 0) hand_out(sums, older);
          take_in(parts, older);
          sm90::wgmma_wait<1>();
          fence_operands(scores[last % 2]);
          write(sums, parts, group < 2 ? before : target, older);
          sum_heads(scores[last % 2], weights, sums);
          if (group == 0 && held != buffer) {
            free_queries(held);
            held = buffer;
          }
        }
        before = target;
        // Where the next tile's scores go.
        target = make_target(batch, min(tile + Config::kConsumers, end - 1), logits, queries);
        // Here, so that these sums do not wait for the last group's product.
        hand_out(sums, Config::kGroups - 2);
        // The last group's product reads the keys: the next ones have to wait for it, its sums have not.
        sm90::wgmma_wait<0>();
        fence_operands(scores[1]);
      }
    }
  }

 private:
  static __device__ __forceinline__ uint32_t swizzle(uint32_t row, uint32_t chunk) {
    return Config::kSpan == 64 ? swizzle_64(row, chunk) : swizzle_128(row, chunk);
  }

  __device__ __forceinline__ uint32_t sums_place(int number, int row) const {
    if constexpr (!Config::kThroughShared) return 0;
    return smem_address(storage.sums[warpgroup_idx * 4 + warp].of) + number * 128 + (row + 2 * number) % 8 * 16;
  }

  static __device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    if constexpr (Config::kSpan == 64) return sm90::swizzle_64_k_major_descriptor(address);
    return sm90::k_major_descriptor(address);
  }

  static __device__ __forceinline__ void fence_operands(Scores& scores) {
#pragma unroll
    for (int i = 0; i < Config::kRowTiles; ++i) sm90::warpgroup_fence_operand(scores[i]);
  }

  // Fills key tiles that no query sees, each consumer some.
  __device__ __forceinline__ void fill(const Run& run, float* logits, int32_t queries) const {
    const int thread = static_cast<int>(threadIdx.x) % Config::kWarpgroup;
    const int32_t end = run.fill_end;
    for (int32_t number = run.fill_first; number < end; ++number) {
      if (number % Config::kConsumers != warpgroup_idx) continue;
      const int32_t tile = number + (number < run.skip_first ? 0 : run.skipped);
      const int32_t key = tile * Config::kKeyRows + thread % Config::kKeyRows;
      if (key >= params.keys) continue;
      for (int query = thread / Config::kKeyRows; query < queries; query += Config::kWarpgroup / Config::kKeyRows) {
        logits[query * params.logits_query + key] = negative_infinity();
      }
    }
  }

  // Lets go of a query buffer: this thread has read all that it reads of it.
  __device__ __forceinline__ void free_queries(uint32_t buffer) const { storage.q_free[buffer].arrive(); }

  // Waits for this consumer's next key tile and takes in a warp's fragments of it.
  __device__ __forceinline__ void load_keys(uint32_t use) {
    const uint32_t stage = key_stage(use, warpgroup_idx);
    storage.k_full[stage].wait(key_parity(use));
    const uint32_t base = smem_address(storage.k[stage][0]);
#pragma unroll
    for (int tile = 0; tile < Config::kRowTiles; ++tile) {
#pragma unroll
      for (int step = 0; step < Config::kSteps; ++step) {
        constexpr int kSpanSteps = Config::kSpan / 32;
        const uint32_t column = step / kSpanSteps * static_cast<uint32_t>(sizeof(storage.k[0][0]));
        // 64 rows are whole swizzle atoms, and a step is a bit of the chunk: bases are multiples of an atom.
        load_matrix_x4(keys[tile][step],
                       ((base + own_fragment) ^ step % kSpanSteps * 32) + column + tile * 64 * Config::kSpan);
      }
    }
  }

  // Lets go of a stage. Products of what was loaded from it have been issued: so it is in registers, of the whole warp.
  __device__ __forceinline__ void free_keys(uint32_t use) const {
    fence_async_shared();
    __syncwarp();
    if (lane == 0) storage.k_free[key_stage(use, warpgroup_idx)].arrive();
  }

  __device__ __forceinline__ Target make_target(int32_t batch, int32_t tile, float* logits, int32_t queries) const {
    const int32_t key = tile * Config::kKeyRows + own_key;
    Target target{logits + own_query * params.logits_query + key, 1.0f, 0};
    if (key < params.keys) {
      if (params.k_scale != nullptr) {
        target.k_scale = params.k_scale[batch * params.k_scale_batch + key * params.k_scale_key];
      }
      // Of a product with the heads of one query, two lanes of four have the sums.
      const bool one_query = Config::kRowTiles == 1 && Config::kGroupQueries == 1;
      if (!one_query || lane % 4 < 2) target.written = kAllQueries >> (Config::kQueries - queries) >> own_query;
    }
    return target;
  }

  // Fills what queries do not see of a tile that some see: no other score is looked at for it.
  __device__ __forceinline__ void fill_unseen(Target& target, uint32_t buffer, int32_t tile) const {
    const int32_t key = tile * Config::kKeyRows + own_key;
    Queries seen = 0;
#pragma unroll 1
    for (int query = 0; query + own_query < Config::kQueries; query += kQueryStride) {
      const Bounds bounds = storage.bounds[buffer][query + own_query];
      if (bounds.begin <= key && key < bounds.end) {
        seen |= Queries{1} << query;
      } else if (target.written >> query & 1u) {
        target.next[query * params.logits_query] = negative_infinity();
      }
    }
    target.written &= seen;
  }

  // Issues the products of the keys with the heads of a group of queries.
  __device__ __forceinline__ void issue(Scores& scores, uint64_t heads, int group) {
    fence_operands(scores);
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

  // Sums a group's products over the heads that this lane has.
  __device__ __forceinline__ void sum_heads(const Scores& scores, const Weights& weights, Sums& sums) const {
    constexpr int kColumnGroups = Config::kHeads / 8;  // columns 8j to 8j + 7 of a product are heads of one query
#pragma unroll
    for (int query = 0; query < Config::kGroupQueries; ++query) {
#pragma unroll
      for (int tile = 0; tile < Config::kRowTiles; ++tile) sums[query][tile][0] = sums[query][tile][1] = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * kColumnGroups; ++i) {
#pragma unroll
        for (int tile = 0; tile < Config::kRowTiles; ++tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float product = scores[tile][(query * kColumnGroups + i / 2) * 4 + half * 2 + i % 2];
            // A head that is not there is zero, but its product with an infinite key is not.
            if (Config::kFilled && i / 2 * 8 + lane % 4 * 2 + i % 2 >= params.heads) product = 0.0f;
            float& sum = sums[query][tile][half];
            sum = indexer::add_head(sum, weights.of[query][i], product, params.floor);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ uint32_t sums_buffer(int group) {
    return group % Config::kSumBuffers * Config::kGroupQueries * 512;
  }

  // A group's sums go to the lanes that write them by way of shared memory, where that is so: out, and in.
  __device__ __forceinline__ void hand_out(const Sums& sums, int group) const {
    if constexpr (Config::kThroughShared) {
      const uint32_t buffer = sums_buffer(group);
#pragma unroll
      for (int query = 0; query < Config::kGroupQueries; ++query) {
        store_matrix_x4(sums_row + buffer + query * 512, __float_as_uint(sums[query][0][0]),
                        __float_as_uint(sums[query][0][1]), __float_as_uint(sums[query][1][0]),
                        __float_as_uint(sums[query][1][1]));
      }
    }
  }
  __device__ __forceinline__ void take_in(Parts& parts, int group) const {
    if constexpr (Config::kThroughShared) {
      const uint32_t buffer = sums_buffer(group);
      __syncwarp();
#pragma unroll
      for (int query = 0; query < Config::kGroupQueries; ++query) {
        parts.of[query] = load_shared_float4(own_sums + buffer + query * 512);
      }
    }
  }

  // Adds what four lanes have, and writes the scores.
  __device__ __forceinline__ void write(const Sums& sums, const Parts& parts, Target& target, int group) const {
    const int quad_lane = lane % 4;
    const int first = group * Config::kGroupQueries;
    if constexpr (Config::kThroughShared) {
#pragma unroll
      for (int query = 0; query < Config::kGroupQueries; ++query) {
        const float4 four = parts.of[query];
        write_score(__fadd_rn(__fadd_rn(four.x, four.y), __fadd_rn(four.z, four.w)), target, first + query);
      }
    } else if constexpr (Config::kRowTiles == 2) {
#pragma unroll
      for (int query = 0; query < Config::kGroupQueries; ++query) {
        const float four[4] = {sums[query][0][0], sums[query][0][1], sums[query][1][0], sums[query][1][1]};
        write_score(indexer::add_sums_of_four(four, quad_lane), target, first + query);
      }
    } else if constexpr (Config::kGroupQueries >= 2) {
#pragma unroll
      for (int query = 0; query < Config::kGroupQueries; query += 2) {
        const float four[4] = {sums[query][0][0], sums[query][0][1], sums[query + 1][0][0], sums[query + 1][0][1]};
        write_score(indexer::add_sums_of_four(four, quad_lane), target, first + query);
      }
    } else {
      const float two[2] = {sums[0][0][0], sums[0][0][1]};
      write_score(indexer::add_sums_of_two(two, quad_lane), target, first);
    }
  }

  // `query`: in the query tile, from this lane's first one on. Queries come in order.
  __device__ __forceinline__ void write_score(float sum, Target& target, int query) const {
    // One bit as it stands in its word: a test of it is one instruction.
    const uint32_t word = static_cast<uint32_t>(target.written >> (query & 32));
    store_if(word & 1u << query % 32, target.next, __fmul_rn(sum, target.k_scale));
    target.next += kQueryStride * params.logits_query;
    // Unseen by the compiler, which would make each address anew from the first one.
    int64_t next = reinterpret_cast<int64_t>(target.next);
    make_opaque(next);
    target.next = reinterpret_cast<float*>(next);
  }
};

}  // namespace cupymla::indexer_logits
