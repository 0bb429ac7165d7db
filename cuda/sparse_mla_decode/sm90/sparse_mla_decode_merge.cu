// The end of rows that several clusters share: a CTA puts the shares of one head together, in their order, and writes
// the result. It may start while the clusters end. There is no shared memory and no barrier.
//
// CUPYMLA_FP16: 1 for fp16 results, 0 for bf16.
#include "../../common/element.cuh"
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "shares.cuh"

namespace cupymla::sparse_mla_decode {

constexpr int kThreads = 128;
constexpr int kColumns = 4;  // of a thread
constexpr int kBatch = 8;    // shares that are on their way at once
static_assert(kThreads * kColumns == 512);

}  // namespace cupymla::sparse_mla_decode

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_decode::kThreads)
    sparse_mla_decode_merge(const __grid_constant__ cupymla::sparse_mla_decode::Parameters params, uint32_t shares) {
  using namespace cupymla;
  using namespace cupymla::sparse_mla_decode;
  const uint32_t token = blockIdx.x / static_cast<uint32_t>(params.h_q);
  const int32_t head = static_cast<int32_t>(blockIdx.x - token * static_cast<uint32_t>(params.h_q));
  const int column = static_cast<int>(threadIdx.x) * kColumns;
  const sparse_mla_fwd::Query query(params, token);

  griddepcontrol_wait();
  const uint32_t lane_share = min(threadIdx.x % 32, shares - 1);
  const float4 left = params.share_statistics[share_place(params, lane_share, token, head)];
  const sparse_mla_fwd::RowStatistics own{left.x, left.y, left.z, left.w != 0.f};
  sparse_mla_fwd::RowStatistics merged;
  const float4 sum = sparse_mla_fwd::add_parts<kBatch>(own, shares, merged, [&](uint32_t share) {
    return *reinterpret_cast<const float4*>(params.share_outputs + share_place(params, share, token, head) * 512 +
                                            column);
  });
  sparse_mla_fwd::store_merged<Element>(params, query, head, column, merged, sum);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_decode::kThreads, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::sparse_mla_decode::Parameters));
