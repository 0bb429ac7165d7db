// Stage `gradients`: a CTA takes one query and goes through its keys, tile by tile, for a block of heads at a time:
//
//   z  = K q^T                        64 keys x heads
//   dweights += gradient relu(z)      in registers: a thread has two keys, two heads of each eight
//   dk = gradient (w [z > 0]) q       w [z > 0] from registers; rows leave through shared memory, whole, to L2
//   dq^T += K^T (gradient [z > 0])    gradient [z > 0] from shared memory, a row per head
//
// w and the gradient are 16-bit operands, one rounding each; what multiplies a whole row (a key's gradient, a head's w)
// is applied to fp32 sums. fp16 operands are scaled by a power of two, so that the largest of a query is near 2^14;
// what is below 2^-38 of it vanishes. storage.cuh has who waits for whom.
#pragma once

#include "../../common/integer_reduction.cuh"
#include "../../common/matrix.cuh"
#include "../../common/memory.cuh"
#include "../../common/reduction.cuh"
#include "../../common/registers.cuh"
#include "../../common/sm90/index_products.cuh"
#include "fixed_point.cuh"
#include "gather.cuh"

namespace cupymla::indexer_bwd {

constexpr bool kScaled = CUPYMLA_FP16 != 0;  // operands: bf16 has the exponents of fp32

// The power of two that brings a finite number, not negative, near 2^14; 1 for zero.
__device__ __forceinline__ float operand_scale(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  return largest > 0.0f ? power_of_two(max(-120, min(120, 14 - exponent))) : 1.0f;
}

struct Gradients {
  Storage& storage;
  const Parameters& params;
  const Query& query;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  bool occupied = false;  // whether a key of this thread's was valid

  float dq[kColumnTiles][kScores];
  float dweights[kHeadGroups][2];

  __device__ __forceinline__ void run() {
    float largest = 0.0f;
    if constexpr (kScaled) {
      for (int32_t entry = threadIdx.x; entry < query.entries; entry += kThreads) {
        const float gradient = query.key_of(entry) >= 0 ? fabsf(query.gradients[entry]) : 0.0f;
        if (is_finite(gradient)) largest = fmaxf(largest, gradient);
      }
      largest = over_block(storage, largest, Larger{});
    }
    if (threadIdx.x == 0) storage.gradient_scale = operand_scale(largest);  // which the weights' barrier shows to all
    if constexpr (kDeterministic) prepare_units();
#pragma unroll 1
    for (int32_t first_head = 0; first_head < params.heads; first_head += kHeads) take_heads(first_head);
  }

 private:
  __device__ __forceinline__ void take_heads(int32_t first_head) {
    const uint64_t l2_policy = l2_policy_evict_last();
    KeyGather gather(storage, params, query, l2_policy);
    load_heads(storage, params, query, first_head, l2_policy);
    gather.begin();
    __syncthreads();  // weights are there
    pack_weights();   // which the first tile's barrier shows to all
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) dq[tile][i] = 0.0f;
    }
#pragma unroll
    for (int group = 0; group < kHeadGroups; ++group) dweights[group][0] = dweights[group][1] = 0.0f;

#pragma unroll 1
    for (int32_t tile = 0; tile < query.tiles; ++tile) {
      gather.next(tile);
      take_tile(tile % kStages);
    }
    gather.end();
    store_dweights(first_head);
    store_dq(first_head);
    __syncthreads();  // what was in shared memory has been read
  }

  __device__ __forceinline__ void pack_weights() {
    float largest = 0.0f;
    if constexpr (kScaled) {
      for (int head = 0; head < kHeads; ++head) {
        const float weight = fabsf(storage.weights[head]);
        if (is_finite(weight)) largest = fmaxf(largest, weight);
      }
    }
    const float scale = operand_scale(largest);
    if (threadIdx.x == 0) storage.weights_unit = 1.0f / scale;
    for (int pair = threadIdx.x; pair < kHeads / 2; pair += kThreads) {
      const float2 two = *reinterpret_cast<const float2*>(storage.weights + pair * 2);
      storage.weight_pairs[pair] = pack_pair<Element>(two.x * scale, two.y * scale);
    }
  }

  __device__ __forceinline__ void take_tile(int stage) {
    uint32_t active_weights[kHeads / 16][4];
    {
      float products[kScores];
      indexer::multiply_keys<Element>(products, storage.keys[stage], storage.q, [&] {
        if constexpr (kDeterministic) prepare_rows(stage);
      });
      activate(products, active_weights, stage);
    }
    fence_async_shared();
    __syncthreads();

    float dk[kD / 2];
    issue_dk(dk, active_weights);
    issue_dq(stage);
    if constexpr (kDeterministic) {
      const Conversion conversion = read_conversion();
      sm90::wgmma_wait<1>();
      sm90::warpgroup_fence_operand(dk);
      send_units(dk, conversion, stage);
    } else {
      sm90::wgmma_wait<1>();
      sm90::warpgroup_fence_operand(dk);
      send_dk(dk, stage);
    }
    sm90::wgmma_wait<0>();
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) sm90::warpgroup_fence_operand(dq[tile]);
  }

  // From the products of this thread's keys with its heads: dweights, and both operands.
  __device__ __forceinline__ void activate(const float (&products)[kScores],
                                           uint32_t (&active_weights)[kHeads / 16][4], int stage) {
    const float floor = params.relu != 0 ? 0.0f : negative_infinity();
    const bool always = params.relu == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = warp * 16 + half * 8 + lane / 4;
      const float gradient = storage.gradients[stage][key];
      const bool valid = storage.ids[stage][key] >= 0;
      occupied |= valid;
      const float scaled = kScaled ? gradient * storage.gradient_scale : gradient;
      const uint32_t operand = pack_pair<Element>(scaled, scaled);
      // Of head lane / 4; eight heads on, the pattern is the same.
      uint8_t* place = storage.active + swizzle_128(lane / 4, warp * 2 + half) + lane % 4 * 4;
#pragma unroll
      for (int group = 0; group < kHeadGroups; ++group) {
        const float first = products[group * 4 + half * 2], second = products[group * 4 + half * 2 + 1];
        const uint32_t mask =
            (always || first > 0.0f ? 0x0000ffffu : 0u) | (always || second > 0.0f ? 0xffff0000u : 0u);
        if (valid) {
          dweights[group][0] = fmaf(gradient, max_nan(first, floor), dweights[group][0]);
          dweights[group][1] = fmaf(gradient, max_nan(second, floor), dweights[group][1]);
        }
        active_weights[group / 2][group % 2 * 2 + half] = storage.weight_pairs[group * 4 + lane % 4] & mask;
        // Rows are heads behind this, columns keys.
        *reinterpret_cast<uint32_t*>(place + group * kSwizzleAtomBytes) = transpose_matrix(operand & mask);
      }
    }
  }

  __device__ __forceinline__ void issue_dk(float (&dk)[kD / 2], uint32_t (&active_weights)[kHeads / 16][4]) const {
    const uint64_t heads = sm90::mn_major_descriptor(indexer::uniform_address(storage.q[0]), kHeadColumnBytes);
    sm90::warpgroup_discard_operand(dk);
    // Operands are in their registers in front of the first product.
#pragma unroll
    for (int step = 0; step < kHeads / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) make_opaque(active_weights[step][i]);
    }
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeads / 16; ++step) {
      sm90::mma<indexer::Products<Element, kD>::FromRegisters>(
          dk, active_weights[step], sm90::descriptor_advance(heads, step * 2 * kSwizzleAtomBytes), step == 0);
    }
    sm90::wgmma_commit();
  }

  __device__ __forceinline__ void issue_dq(int stage) {
    const uint64_t active = sm90::k_major_descriptor(indexer::uniform_address(storage.active));
    const uint64_t keys = sm90::mn_major_descriptor(indexer::uniform_address(storage.keys[stage][0]), kKeyColumnBytes);
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
      sm90::warpgroup_fence_operand(dq[tile]);
#pragma unroll
      for (int step = 0; step < kTileKeys / 16; ++step) {
        sm90::mma<indexer::Products<Element, kHeads>::Transposed>(
            dq[tile], sm90::descriptor_advance(keys, tile * kKeyColumnBytes + step * 2 * kSwizzleAtomBytes),
            sm90::descriptor_advance(active, step * 32));
      }
    }
    sm90::wgmma_commit();
  }

  // Of this batch entry, among rows of sums.
  __device__ __forceinline__ int64_t first_row() const { return static_cast<int64_t>(query.batch) * params.keys; }

  // Puts the channels of this thread's row into a row of `dk`, pairs of them as `made` makes them.
  template <typename Pair, typename Made>
  __device__ __forceinline__ void put_row(const float (&dk)[kD / 2], int half, const Made& made) {
#pragma unroll
    for (int group = 0; group < kD / 8; ++group) {
      *reinterpret_cast<Pair*>(&storage.dk[warp][(half * 8 + lane / 4) % kStagedRows][group * 8 + lane % 4 * 2]) =
          made(dk[group * 4 + half * 2], dk[group * 4 + half * 2 + 1], group);
    }
  }
  static __device__ __forceinline__ float2 as_floats(float first, float second, int) {
    return make_float2(first, second);
  }

  // Adds a warp's rows to those of its keys.
  __device__ __forceinline__ void send_dk(const float (&dk)[kD / 2], int stage) {
    const bool valid = storage.ids[stage][warp * 16 + lane % 16] >= 0;
    const bool all = __all_sync(0xffffffffu, static_cast<int>(valid)) != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      __syncwarp();  // the rows before have been read
      put_row<float2>(dk, half, as_floats);
      __syncwarp();
      if (all) {
        add_floats_to<true>(stage, half);
      } else {
        add_floats_to<false>(stage, half);
      }
    }
  }

  // kValid: all keys are; so there are no branches, each of which takes as long as what it leads to.
  template <bool kValid>
  __device__ __forceinline__ void add_floats_to(int stage, int half) const {
    const int32_t* ids = storage.ids[stage] + warp * 16 + half * 8;
    const float* gradients = storage.gradients[stage] + warp * 16 + half * 8;
    constexpr int kLanes = kD / 4;  // of a row
    constexpr int kRows = 32 / kLanes;
    const int channel = lane % kLanes * 4;
    int64_t sums = reinterpret_cast<int64_t>(params.sums) + (first_row() * kD + channel) * 4;
    make_opaque(sums);  // a row's address is then one multiplication that adds
    // All reads come ahead of what leaves: behind it, each would wait for the one before.
    constexpr int kTurns = 8 / kRows;
    int32_t keys[kTurns];
    float values[kTurns][4];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int row = i * kRows + lane / kLanes;
      keys[i] = ids[row];
      const float gradient = gradients[row];
      const float4 four = *reinterpret_cast<const float4*>(&storage.dk[warp][row][channel]);
      values[i][0] = of_entry(four.x, gradient), values[i][1] = of_entry(four.y, gradient);
      values[i][2] = of_entry(four.z, gradient), values[i][3] = of_entry(four.w, gradient);
    }
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      float* row = reinterpret_cast<float*>(sums + static_cast<int64_t>(keys[i]) * (kD * 4));
      if (kValid || keys[i] >= 0) reduce_add_float4(row, values[i]);
    }
  }

  // A channel of what an entry adds to its key's row.
  __device__ __forceinline__ float of_entry(float sum, float gradient) const {
    return (kScaled ? sum * storage.weights_unit : sum) * gradient;
  }

  __device__ __forceinline__ void prepare_units() {
    const int channel = static_cast<int>(threadIdx.x);
    if (channel < kD) {
      const float part = params.channel_parts[static_cast<int64_t>(query.batch) * kD + channel];
      storage.units.channel_factors[channel] = power_of_two(channel_log2(part));
    }
    if (channel == 0) {
      storage.units.total_unit = total_unit_log2(params.largest[query.batch], params.adds_log2);
      storage.units.query_bound = params.query_bounds[static_cast<int64_t>(query.batch) * params.queries + query.query];
    }  // which the weights' barrier shows to all
  }

  // log2 of how many units a 1 is in a key's row, where a part is 1.
  __device__ __forceinline__ int row_units_log2(int stage, int key) const {
    return units_log2(storage.units.totals[stage][key], storage.units.total_unit, params.adds_log2);
  }

  // Works out how a warp's rows become units, which depends on no product: lanes l and l + 16 look at row l.
  __device__ __forceinline__ void prepare_rows(int stage) {
    const int key = warp * 16 + lane % 16;
    const float gradient = storage.gradients[stage][key], query_bound = storage.units.query_bound;
    const double units = wide_power_of_two(row_units_log2(stage, key));
    const double factor = gradient * units * (kScaled ? storage.weights_unit : 1.0f);
    const bool finite = query_bound >= 0.0f && fabsf(gradient) * query_bound < kSafe;
    const bool plain = finite && (gradient == 0.0f || (fabs(factor) > 0x1p-100 && fabs(factor) < 0x1p100));
    // Of a bound, 2^-6 is for the rounding of operands.
    const int coarse = max(0, wide_exponent_of(entry_bound(gradient, query_bound) * units * (1 + 0x1p-6)) + 1 - 22);
    const bool there = storage.ids[stage][key] >= 0;
    const bool small = __all_sync(0xffffffffu, static_cast<int>(!there || (plain && coarse <= kMostCoarse))) != 0;
    const int way = small ? min(coarse, kMostCoarse) : there && !plain ? kChecked : kConverted;
    if (lane < 16) storage.units.rows[key] = {static_cast<float>(factor), way};
  }

  // A small row's units without a conversion, of which a multiprocessor makes 16 a cycle: the last bits of a sum with
  // 1.5 2^(23 + coarse).
  struct SmallRow {
    float factor, zero;
    uint32_t step, taken;

    __device__ __forceinline__ explicit SmallRow(const RowUnits& row)
        : factor(row.factor),
          zero(__uint_as_float(0x4b400000u + (static_cast<uint32_t>(row.way) << 23))),
          step(1u << row.way) {
      taken = 0u - __float_as_uint(zero) * step;
      make_opaque(step);  // a multiplication adds as well, a shift would not
    }
    __device__ __forceinline__ int32_t units(float sum, float channel_factor) const {
      const float shifted = fmaf(sum * factor, channel_factor, zero);
      return static_cast<int32_t>(__float_as_uint(shifted) * step + taken);
    }
  };

  // The same as __float2int_rn, of a number below 2^31: its nearest multiple of 512, then the rest of it, as last bits
  // of sums. All differences are exact.
  static __device__ __forceinline__ int32_t rounded_by_additions(float value) {
    const float high = __fadd_rn(value, 0x1.8p32f);
    const float low = __fadd_rn(__fsub_rn(value, __fsub_rn(high, 0x1.8p32f)), 0x1.8p23f);
    constexpr uint32_t kHighZero = 0x4fc00000u, kLowZero = 0x4b400000u;
    return static_cast<int32_t>(__float_as_uint(high) * 512u + __float_as_uint(low) - (kHighZero * 512u + kLowZero));
  }

  // What makes units of a thread's sums: of its two rows, and of its channels.
  struct Conversion {
    RowUnits rows[2];
    float2 factors[kD / 8];
  };

  // Ahead of writes, as ptxas does not exchange reads and writes of shared memory.
  __device__ __forceinline__ Conversion read_conversion() const {
    const RowUnits* rows = storage.units.rows + warp * 16 + lane / 4;
    Conversion conversion{{rows[0], rows[8]}, {}};
#pragma unroll
    for (int group = 0; group < kD / 8; ++group) {
      conversion.factors[group] =
          *reinterpret_cast<const float2*>(storage.units.channel_factors + group * 8 + lane % 4 * 2);
    }
    return conversion;
  }

  // Adds a warp's rows to those of its keys, in integers.
  __device__ __forceinline__ void send_units(const float (&dk)[kD / 2], const Conversion& conversion, int stage) {
    const RowUnits(&units)[2] = conversion.rows;
    const float2(&factors)[kD / 8] = conversion.factors;
    __syncwarp();  // the last tile's rows have been read
    if (units[0].way >= 0) {  // of all rows of the warp then
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const SmallRow row(units[half]);
        put_row<int2>(dk, half, [&](float first, float second, int group) {
          return make_int2(row.units(first, factors[group].x), row.units(second, factors[group].y));
        });
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = units[half].factor;
        if (units[half].way == kChecked) {
          put_row<float2>(dk, half, as_floats);
        } else {
          put_row<int2>(dk, half, [&](float first, float second, int group) {
            const float one = first * factor * factors[group].x, other = second * factor * factors[group].y;
            // Conversions and additions run side by side, five of the one to three of the other.
            return make_int2(__float2int_rn(one), group % 4 == 0 ? __float2int_rn(other) : rounded_by_additions(other));
          });
        }
      }
      const bool checked = units[0].way == kChecked || units[1].way == kChecked;
      if (__any_sync(0xffffffffu, static_cast<int>(checked))) check_rows(stage);
    }
    __syncwarp();
    add_rows(stage);
  }

  // Adds rows of units to those of their keys.
  __device__ __forceinline__ void add_rows(int stage) const {
    int4 keys[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) keys[i] = reinterpret_cast<const int4*>(storage.ids[stage] + warp * 16)[i];
    int32_t all = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) all |= keys[i].x | keys[i].y | keys[i].z | keys[i].w;
    if (all >= 0) {
      add_rows_to<true>(keys);
    } else {
      add_rows_to<false>(keys);
    }
  }

  // kValid: all keys are; so there are no branches, each of which takes as long as what it leads to.
  template <bool kValid>
  __device__ __forceinline__ void add_rows_to(const int4 (&keys)[4]) const {
    int64_t sums = reinterpret_cast<int64_t>(params.sums) + (first_row() * kD + lane * 2) * 4;
    make_opaque(sums);  // a row's address is then one multiplication that adds
    constexpr int kPairs = kD / 64;  // of a lane
    // Reads of some rows come ahead of what leaves: behind it, each would wait for the one before.
#pragma unroll
    for (int first = 0; first < 16; first += kRowsAtOnce) {
      int64_t pairs[kRowsAtOnce][kPairs];
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          pairs[row][i] =
              joined(*reinterpret_cast<const int2*>(&storage.dk[warp][first + row][i * 64 + lane * 2]));
        }
      }
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) {
        const int4& four = keys[(first + row) / 4];
        const int32_t key = row % 4 == 0 ? four.x : row % 4 == 1 ? four.y : row % 4 == 2 ? four.z : four.w;
        int64_t* place = reinterpret_cast<int64_t*>(sums + static_cast<int64_t>(key) * (kD * 4));
        if (kValid || key >= 0) {
#pragma unroll
          for (int i = 0; i < kPairs; ++i) reduce_add_int64(place + i * 32, pairs[row][i]);
        }
      }
    }
  }
  static constexpr int kRowsAtOnce = 8;

  // Makes units of rows that hold sums; what is not finite becomes 0, and bits of its own.
  __device__ __forceinline__ void check_rows(int stage) {
    __syncwarp();
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
      if (storage.units.rows[warp * 16 + row].way != kChecked) continue;
      const double of_row = wide_power_of_two(row_units_log2(stage, warp * 16 + row));
      const float gradient = storage.gradients[stage][warp * 16 + row];
      const int64_t element = (first_row() + storage.ids[stage][warp * 16 + row]) * kD;
#pragma unroll 1
      for (int channel = lane; channel < kD; channel += 32) {
        float& place = storage.dk[warp][row][channel];
        const float value = of_entry(place, gradient);
        int32_t units = 0;
        if (is_finite(value)) {
          units = __double2int_rn(static_cast<double>(value) * of_row * storage.units.channel_factors[channel]);
        } else {
          uint32_t* words = params.non_finite + (element + channel) / 32 * 2;
          if (!(value < 0.0f)) reduce_or(words, 1u << lane);
          if (!(value > 0.0f)) reduce_or(words + 1, 1u << lane);
        }
        reinterpret_cast<int32_t&>(place) = units;
      }
    }
  }

  __device__ __forceinline__ void store_dweights(int32_t first_head) {
#pragma unroll
    for (int group = 0; group < kHeadGroups; ++group) {
#pragma unroll
      for (int head = 0; head < 2; ++head) {
        float sum = dweights[group][head];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane < 4) storage.dweights[warp][group * 8 + lane * 2 + head] = sum;
      }
    }
    // Of a row without a valid entry dq is 0, whatever the weights are.
    occupied = __syncthreads_or(static_cast<int>(occupied)) != 0;
    const int head = static_cast<int>(threadIdx.x);
    if (head >= kHeads || first_head + head >= params.heads) return;
    const float sum = (storage.dweights[0][head] + storage.dweights[1][head]) +
                      (storage.dweights[2][head] + storage.dweights[3][head]);
    const int64_t place = query.batch * params.dweights_batch + query.query * params.dweights_query +
                          (first_head + head) * params.dweights_head;
    if (params.bf16_weights != 0) {
      reinterpret_cast<__nv_bfloat16*>(params.dweights)[place] = __float2bfloat16_rn(sum);
    } else {
      reinterpret_cast<float*>(params.dweights)[place] = sum;
    }
  }

  // Through shared memory, from rows that are channels to rows that are heads, in the place of rows of dk, which have
  // been read: a barrier of all threads is in front of this.
  __device__ __forceinline__ void store_dq(int32_t first_head) {
    constexpr int kRow = kD + 8;
    Element* rows = reinterpret_cast<Element*>(storage.dk);
    const float unit = 1.0f / storage.gradient_scale;
#pragma unroll
    for (int group = 0; group < kHeadGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int head = group * 8 + lane % 4 * 2 + i % 2;
        const float factor = occupied ? storage.weights[head] : 0.0f;
#pragma unroll
        for (int tile = 0; tile < kColumnTiles; ++tile) {
          const int channel = tile * 64 + warp * 16 + i / 2 * 8 + lane / 4;
          rows[head * kRow + channel] = static_cast<Element>(dq[tile][group * 4 + i] * unit * factor);
        }
      }
    }
    __syncthreads();
    Element* to = params.dq + query.batch * params.dq_batch + query.query * params.dq_query;
#pragma unroll 4
    for (int chunk = threadIdx.x; chunk < kHeads * kRowChunks; chunk += kThreads) {
      const int head = chunk / kRowChunks, part = chunk % kRowChunks;
      if (first_head + head >= params.heads) continue;
      const uint4 words = *reinterpret_cast<const uint4*>(rows + head * kRow + part * 8);
      store_uint4(reinterpret_cast<uint8_t*>(to + (first_head + head) * params.dq_head + part * 8), words);
    }
  }
};

}  // namespace cupymla::indexer_bwd
