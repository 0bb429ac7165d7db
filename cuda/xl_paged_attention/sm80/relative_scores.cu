// scores[s, h, d] = (q[s, h] + v[h]) . pos_emb[d, h] for all distances d below `width`: the relative bias of a fused
// call, and the first half of the function matrix_bd. One matrix product for each head, [num_seqs] x [width].
//
// 16-bit operands go from global memory to registers: a lane reads 16 bytes, eight channels, of a row of the table,
// which are its part of two steps of the product, and Q's channels are taken in the same order.
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "../../common/math.cuh"
#include "../../common/warp_mma.cuh"
#include "query_type.cuh"

// CUPYMLA_HEAD_SIZE: 32 to 256.
namespace cupymla::xl_paged_attention {

struct RelativeParameters {
  const uint8_t* query;       // [num_seqs, num_heads, head_size]
  const uint8_t* pos_bias_v;  // [num_heads, head_size] or null
  const uint8_t* pos_emb;     // [extent, num_heads, head_size]
  float* scores;              // [num_seqs, num_heads, width]
  int64_t query_seq_bytes, query_head_bytes;
  int64_t v_head_bytes;
  int64_t emb_distance_bytes, emb_head_bytes;
  int32_t num_seqs, num_heads, width;
  int32_t v_wide;  // 1: pos_bias_v is fp32, 0: it has the query's dtype
};

using Query = ThisQuery;

constexpr int kHeadSize = CUPYMLA_HEAD_SIZE;
constexpr int kRelativeThreads = 128;
constexpr int kRelativeWarps = kRelativeThreads / 32;
constexpr bool kPlain = sizeof(Query) == 4;
// On an SM at once, at least; 0 leaves it to ptxas, which for fp32 spills around the division of 64-bit numbers.
constexpr int kRelativeCtas = kPlain ? 1 : 0;
constexpr int kSeqs = kPlain ? 1 : 16;       // of a warp's product
constexpr int kDistances = kPlain ? 8 : 32;  // of the same

__device__ __forceinline__ const uint8_t* table_row(const RelativeParameters& params, int32_t distance, int32_t head) {
  return params.pos_emb + distance * params.emb_distance_bytes + head * params.emb_head_bytes;
}

#if CUPYMLA_QUERY == 32
__device__ __forceinline__ float shifted_query(const RelativeParameters& params, int32_t seq, int32_t head,
                                               int channel) {
  const uint8_t* line = params.query + seq * params.query_seq_bytes + head * params.query_head_bytes;
  const float value = reinterpret_cast<const float*>(line)[channel];
  if (params.pos_bias_v == nullptr) return value;
  return value + reinterpret_cast<const float*>(params.pos_bias_v + head * params.v_head_bytes)[channel];
}

// Lanes share the channels of a row.
__device__ __forceinline__ void score_block(const RelativeParameters& params, int32_t first_seq, int32_t head,
                                            int32_t first_distance) {
  const int lane = threadIdx.x % 32;
  constexpr int kOwn = (kHeadSize + 31) / 32;
  float own[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int channel = 32 * i + lane;
    own[i] = channel < kHeadSize ? shifted_query(params, first_seq, head, channel) : 0.0f;
  }
  float* const to = params.scores + (static_cast<int64_t>(first_seq) * params.num_heads + head) * params.width;
  for (int32_t distance = first_distance; distance < min(first_distance + kDistances, params.width); ++distance) {
    const float* row = reinterpret_cast<const float*>(table_row(params, distance, head));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int channel = 32 * i + lane;
      if (kHeadSize % 32 == 0 || channel < kHeadSize) sum = fmaf(own[i], row[channel], sum);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) to[distance] = sum;
  }
}
#else
// Eight channels of q + v, by vectors of 16 bytes.
__device__ __forceinline__ void load_shifted(const RelativeParameters& params, int32_t seq, int32_t head, int channel,
                                             float (&values)[8]) {
  const uint8_t* line = params.query + seq * params.query_seq_bytes + head * params.query_head_bytes;
  const uint4 packed = __ldg(reinterpret_cast<const uint4*>(line + 2 * channel));
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = static_cast<float>(reinterpret_cast<const Query*>(&packed)[i]);
  if (params.pos_bias_v == nullptr) return;
  const uint8_t* offsets = params.pos_bias_v + head * params.v_head_bytes;
  if (params.v_wide != 0) {
    const float4* wide = reinterpret_cast<const float4*>(offsets + 4 * channel);
    const float4 both[2] = {__ldg(wide), __ldg(wide + 1)};
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] += reinterpret_cast<const float*>(both)[i];
  } else {
    const uint4 narrow = __ldg(reinterpret_cast<const uint4*>(offsets + 2 * channel));
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] += static_cast<float>(reinterpret_cast<const Query*>(&narrow)[i]);
  }
}

__device__ __forceinline__ void score_block(const RelativeParameters& params, int32_t first_seq, int32_t head,
                                            int32_t first_distance) {
  using namespace cupymla;
  constexpr int kChunks = (kHeadSize + 31) / 32;  // of 32 channels, eight for each lane of four
  const int lane = threadIdx.x % 32;
  uint32_t query[kChunks][2][4];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int channel = 32 * chunk + 8 * (lane % 4);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int32_t seq = first_seq + lane / 4 + 8 * row;
      const bool used = seq < params.num_seqs && channel < kHeadSize;
      float values[8] = {};
      if (used) load_shifted(params, seq, head, channel, values);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        query[chunk][pair / 2][pair % 2 * 2 + row] = pack_pair<Query>(values[2 * pair], values[2 * pair + 1]);
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < kDistances / 8; ++tile) {
    const int32_t distance = first_distance + 8 * tile + lane / 4;
    const uint8_t* row = table_row(params, min(distance, params.width - 1), head);
    float sums[4] = {};
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int channel = 32 * chunk + 8 * (lane % 4);
      uint4 part = {0, 0, 0, 0};
      if (kHeadSize % 32 == 0 || channel < kHeadSize) part = __ldg(reinterpret_cast<const uint4*>(row + 2 * channel));
      mma_16x8x16<Query>(sums, query[chunk][0], part.x, part.y);
      mma_16x8x16<Query>(sums, query[chunk][1], part.z, part.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t seq = first_seq + lane / 4 + i / 2 * 8;
      const int32_t column = first_distance + 8 * tile + 2 * (lane % 4) + i % 2;
      if (seq < params.num_seqs && column < params.width) {
        params.scores[(static_cast<int64_t>(seq) * params.num_heads + head) * params.width + column] = sums[i];
      }
    }
  }
}
#endif

}  // namespace cupymla::xl_paged_attention

extern "C" __global__ void __launch_bounds__(cupymla::xl_paged_attention::kRelativeThreads,
                                             cupymla::xl_paged_attention::kRelativeCtas)
    relative_scores(const __grid_constant__ cupymla::xl_paged_attention::RelativeParameters params) {
  using namespace cupymla::xl_paged_attention;
  cupymla::griddepcontrol_launch_dependents();
  const cupymla::int64_t distance_blocks = (params.width + kDistances - 1) / kDistances;
  const cupymla::int64_t seq_blocks = (params.num_seqs + kSeqs - 1) / kSeqs;
  const cupymla::int64_t step = static_cast<cupymla::int64_t>(gridDim.x) * kRelativeWarps;
  // Neighbouring warps take neighbouring distances of one head.
  for (cupymla::int64_t task = static_cast<cupymla::int64_t>(blockIdx.x) * kRelativeWarps + threadIdx.x / 32;
       task < distance_blocks * params.num_heads * seq_blocks; task += step) {
    const cupymla::int64_t rest = task / distance_blocks;
    score_block(params, static_cast<cupymla::int32_t>(rest / params.num_heads) * kSeqs,
                static_cast<cupymla::int32_t>(rest % params.num_heads),
                static_cast<cupymla::int32_t>(task % distance_blocks) * kDistances);
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::xl_paged_attention::kRelativeThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::xl_paged_attention::RelativeParameters),
                     seqs = cupymla::xl_paged_attention::kSeqs,
                     cta_distances =
                         cupymla::xl_paged_attention::kDistances * cupymla::xl_paged_attention::kRelativeWarps);
