// The end of rows that several clusters share: a CTA puts the shares of one head together, in their order, and writes
// the result. It may start while the clusters end. There is no shared memory and no barrier.
//
// CUPYMLA_FP16: 1 for fp16 results, 0 for bf16. CUPYMLA_MANY_HEADS: whether CTAs of 64 heads left the shares.
#include "../../common/element.cuh"
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "../../common/registers.cuh"
#include "../../common/row_access.cuh"
#include "shares.cuh"

namespace cupymla::sparse_mla_decode {

constexpr int kThreads = 128;
constexpr int kColumns = 4;  // of a thread
// Shares that are on their way at once. With more of many heads fewer CTAs fit a multiprocessor.
constexpr int kBatch = CUPYMLA_MANY_HEADS ? 8 : 16;
static_assert(kThreads * kColumns == 512);

}  // namespace cupymla::sparse_mla_decode

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_decode::kThreads)
    sparse_mla_decode_merge(const __grid_constant__ cupymla::sparse_mla_decode::Parameters params, uint32_t shares) {
  using namespace cupymla;
  using namespace cupymla::sparse_mla_decode;
  const uint32_t token = blockIdx.x / static_cast<uint32_t>(params.h_q);
  const int32_t head = static_cast<int32_t>(blockIdx.x - token * static_cast<uint32_t>(params.h_q));
  const uint32_t place = threadIdx.x * kColumns;
  const sparse_mla_fwd::Query query(params, token);
  // All shares together are 64 MiB at most, so one is not further than 32 bits from the first. An addition is then what
  // the next load takes: instructions are waited for, as they run once.
  const int64_t at = share_place(params, 0, token, head);
  const float4* const statistics = params.share_statistics + at;
  const uint8_t* line = reinterpret_cast<const uint8_t*>(params.share_outputs + at * 512 + place);
  const uint32_t heads = static_cast<uint32_t>(params.share_heads);

  griddepcontrol_wait();
  const float4 left = statistics[min(threadIdx.x % 32, shares - 1) * heads];
  const sparse_mla_fwd::RowStatistics own{left.x, left.y, left.z, left.w != 0.f};
  sparse_mla_fwd::RowStatistics merged;
  // Each is asked for once, in order.
  const float4 sum = sparse_mla_fwd::add_parts<kBatch>(own, shares, merged, [&](uint32_t) {
    uint32_t words[4];
    load_row_16(words[0], words[1], words[2], words[3], line);
    line += heads * 2048u;
    make_opaque(line);
    return make_float4(__uint_as_float(words[0]), __uint_as_float(words[1]), __uint_as_float(words[2]),
                       __uint_as_float(words[3]));
  });
#if CUPYMLA_MANY_HEADS
  const float factor = sparse_mla_fwd::output_factor(params, head, merged, 0.f);
  if (place == 0) sparse_mla_fwd::store_statistics(params, query, head, merged);
  auto* const pairs = reinterpret_cast<uint32_t*>(
      params.out + query.batch * params.out_batch_bytes + query.query * params.out_query_bytes +
      head * params.out_head_bytes + column_of_four(place) * 2);
  pairs[0] = pack_pair<Element>(sum.x * factor, sum.y * factor);
  pairs[4] = pack_pair<Element>(sum.z * factor, sum.w * factor);
#else
  sparse_mla_fwd::store_merged<Element>(params, query, head, place, merged, sum);
#endif
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_decode::kThreads, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::sparse_mla_decode::Parameters));
