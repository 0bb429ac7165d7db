// matrix_bd from scores by distance: bias[s, h, j] = scores[s, h, n - 1 - j] for j < n, the keys of sequence s, then 0.
#include "../../common/math.cuh"
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "../../common/types.cuh"
#include "query_type.cuh"

namespace cupymla::xl_paged_attention {

struct SpreadParameters {
  const float* scores;          // [num_seqs, num_heads, width]
  const int32_t* context_lens;  // [num_seqs]
  uint8_t* out;                 // [num_seqs, num_heads, max_context]
  int64_t lens_seq;             // in elements, as the strides of out
  int64_t out_seq, out_head;
  int32_t num_seqs, num_heads, width, max_context;
  int32_t extent;  // distances of the table; `width` of them, at most, were computed
  int32_t clamp;   // 1: past the extent its last distance counts, 0: nothing does
};

constexpr int kSpreadThreads = 256;

}  // namespace cupymla::xl_paged_attention

extern "C" __global__ void __launch_bounds__(cupymla::xl_paged_attention::kSpreadThreads)
    spread_bias(const __grid_constant__ cupymla::xl_paged_attention::SpreadParameters params) {
  using namespace cupymla;
  using Result = xl_paged_attention::ThisQuery;
  griddepcontrol_wait();
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t total = static_cast<int64_t>(params.num_seqs) * params.num_heads * params.max_context;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; index < total; index += step) {
    const int64_t row = quotient(index, params.max_context);
    const int32_t position = static_cast<int32_t>(index - row * params.max_context);
    const int64_t seq = quotient(row, params.num_heads);
    const int64_t head = row - seq * params.num_heads;
    const int32_t count = max(0, min(params.context_lens[seq * params.lens_seq], params.max_context));
    const int32_t distance = count - 1 - position;
    float value = 0.0f;
    if (distance >= 0 && (distance < params.extent || params.clamp != 0)) {
      value = params.scores[row * params.width + min(distance, params.extent - 1)];
    }
    reinterpret_cast<Result*>(params.out)[seq * params.out_seq + head * params.out_head + position] =
        static_cast<Result>(value);
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::xl_paged_attention::kSpreadThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::xl_paged_attention::SpreadParameters));
