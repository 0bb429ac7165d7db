// The indexer's KL loss over selected keys and its gradient, for Hopper: 64 gathered keys are the rows of a product,
// the heads of the query its columns, so that a sum over heads stays in four lanes. A row's scores wait in
// `grad_logits` until its log-sum-exp is known; so any topk works, in the memory of the result. storage.cuh has who
// waits for whom, common/indexer_score.cuh the order of operations of a score.
#include "../../common/block_reduction.cuh"
#include "../../common/entry.cuh"
#include "../../common/sm90/index_products.cuh"
#include "gather.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

namespace cupymla::indexer_loss {

// The score of the lane's own row: of r in lanes 0 and 2 of four, of r + 8 in the others.
__device__ __forceinline__ float sum_heads(const float (&products)[kHeads / 2], const Storage& storage,
                                           const Parameters& params, int quad_lane) {
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < kHeads / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = j * 8 + quad_lane * 2 + i;
      const float weight = storage.weights[head];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Zero times an infinite key is no number: heads that only fill up must not reach the sum.
        const float product = kFilled && head >= params.heads ? 0.0f : products[j * 4 + half * 2 + i];
        sums[half] = indexer::add_head(sums[half], weight, product, params.floor);
      }
    }
  }
  return indexer::add_sums_of_two(sums, quad_lane);
}

// The base of a sum of exponentials: without it, minus infinity less itself would be no number.
__device__ __forceinline__ float base_of(float largest) { return largest == negative_infinity() ? 0.0f : largest; }

// A sum of exp(score) = sum * exp(largest). fmaxf leaves NaN out; the sum has it.
struct Exponentials {
  float largest = negative_infinity(), sum = 0.0f;

  __device__ __forceinline__ void add(float score) {
    const float grown = fmaxf(largest, score), base = base_of(grown);
    sum = sum * expf(largest - base) + expf(score - base);
    largest = grown;
  }
};

}  // namespace cupymla::indexer_loss

extern "C" __global__ void __launch_bounds__(cupymla::indexer_loss::kThreads, 2)
    indexer_loss(const __grid_constant__ cupymla::indexer_loss::Parameters params) {
  using namespace cupymla;
  using namespace cupymla::indexer_loss;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  Storage& storage = *reinterpret_cast<Storage*>(shared_memory);

  const int thread = static_cast<int>(threadIdx.x);
  const Query query(params);
  const float* target = params.target + query.batch * params.target_batch + query.query * params.target_query;
  float* grad = params.grad_logits + query.batch * params.grad_logits_batch + query.query * params.grad_logits_query;

  Exponentials exponentials;
  float mass = 0.0f;
  if (query.tiles > 0) {
    const uint64_t l2_policy = l2_policy_evict_last();
    KeyGather gather(storage, params, query, l2_policy);
    load_heads(storage, params, query, l2_policy);
    gather.begin();

    const int lane = thread % 32, quad_lane = lane % 4;
    const int row = thread / 32 * 16 + lane / 4 + quad_lane % 2 * 8;
#pragma unroll 1
    for (int32_t tile = 0; tile < query.tiles; ++tile) {
      gather.next(tile);
      float products[kHeads / 2];
      indexer::multiply_keys<Element>(products, storage.keys[tile % kStages], storage.q);
      const float score = sum_heads(products, storage, params, quad_lane);
      // Lanes 2 and 3 of four have the scores of lanes 0 and 1 once more.
      if (quad_lane < 2 && storage.ids[tile % kStages][row] >= 0) {
        const int32_t entry = tile * kTileKeys + row;
        grad[entry] = score;
        mass += target[entry];
        if (params.lse == nullptr) exponentials.add(score);
      }
    }
    stream_copy_wait<0>();
  }

  mass = static_cast<float>(over_block(storage, mass, Plus{}));
  const float divisor = fmaxf(mass, 1e-10f);
  // log softmax(score) = (score - base) - log_sum. Rounding log_sum moves the whole loss; what it left out comes back.
  float base, log_sum = 0.0f, left_out = 0.0f;
  if (params.lse != nullptr) {
    base = params.lse[query.batch * params.lse_batch + query.query * params.lse_query];
  } else {
    base = base_of(static_cast<float>(over_block(storage, exponentials.largest, Larger{})));
    const float part = exponentials.sum == 0.0f ? 0.0f : exponentials.sum * expf(exponentials.largest - base);
    const double exact = log(over_block(storage, part, Plus{}));
    log_sum = static_cast<float>(exact);
    left_out = static_cast<float>(exact - log_sum);
  }
  // What p sums to: less than 1 where the divisor is not the mass.
  const float whole = mass / divisor;

  float loss = 0.0f;
  for (int32_t entry = thread; entry < params.topk; entry += kThreads) {
    float gradient = 0.0f;
    if (mass != 0.0f && query.key_of(entry) >= 0) {
      const float log_softmax = grad[entry] - base - log_sum;
      const float p = target[entry] / divisor;
      if (p != 0.0f) loss += p * (logf(p) - log_softmax);
      gradient = whole * expf(log_softmax) - p;
    }
    grad[entry] = gradient;
  }
  double total = over_block(storage, loss, Plus{});
  if (mass != 0.0f) total += static_cast<double>(whole) * left_out;
  if (thread == 0) {
    params.loss[query.batch * params.loss_batch + query.query * params.loss_query] = static_cast<float>(total);
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::indexer_loss::kThreads,
                     smem_bytes = sizeof(cupymla::indexer_loss::Storage),
                     parameter_bytes = sizeof(cupymla::indexer_loss::Parameters));
