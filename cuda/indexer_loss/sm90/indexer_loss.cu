// The indexer's KL loss over selected keys and its gradient, for Hopper: 64 gathered keys are the rows of a product,
// the heads of the query its columns, so that a sum over heads stays in four lanes. A row's scores wait in
// `grad_logits` until its log-sum-exp is known; so any topk works, in the memory of the result. storage.cuh has who
// waits for whom, common/indexer_score.cuh the order of operations of a score.
#include "../../common/entry.cuh"
#include "../../common/sm90/swizzle_64_tiles.cuh"
#include "gather.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

namespace cupymla::indexer_loss {

template <typename Element, int kColumns>
struct Products;
#define CUPYMLA_PRODUCTS(element, name, columns)                                                     \
  template <>                                                                                        \
  struct Products<element, columns> {                                                                \
    using Scores = cute::SM90::GMMA::MMA_64x##columns##x16_##name##_SS<sm90::Major::K, sm90::Major::K>; \
  };
CUPYMLA_PRODUCTS(__nv_bfloat16, F32BF16BF16, 16)
CUPYMLA_PRODUCTS(__nv_bfloat16, F32BF16BF16, 32)
CUPYMLA_PRODUCTS(__nv_bfloat16, F32BF16BF16, 64)
CUPYMLA_PRODUCTS(__nv_bfloat16, F32BF16BF16, 128)
CUPYMLA_PRODUCTS(__half, F32F16F16, 16)
CUPYMLA_PRODUCTS(__half, F32F16F16, 32)
CUPYMLA_PRODUCTS(__half, F32F16F16, 64)
CUPYMLA_PRODUCTS(__half, F32F16F16, 128)
#undef CUPYMLA_PRODUCTS

// Products of a tile's keys with all heads, complete on return. A thread has rows r and r + 8 of its warp's sixteen,
// r = lane / 4, and of each eight heads two.
__device__ __forceinline__ void multiply_keys(float (&products)[kHeads / 2], const Storage& storage, int stage) {
  const uint64_t keys = sm90::k_major_descriptor(__shfl_sync(0xffffffffu, smem_address(storage.keys[stage][0]), 0));
  const uint64_t heads = sm90::k_major_descriptor(__shfl_sync(0xffffffffu, smem_address(storage.q[0]), 0));
  sm90::warpgroup_discard_operand(products);
  sm90::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
    const uint32_t column = step / 4, inside = step % 4 * 32;
    sm90::mma<Products<Element, kHeads>::Scores>(
        products, sm90::descriptor_advance(keys, column * kKeyColumnBytes + inside),
        sm90::descriptor_advance(heads, column * kHeadColumnBytes + inside), step == 0);
  }
  sm90::wgmma_commit();
  sm90::wgmma_wait<0>();
  sm90::warpgroup_fence_operand(products);
}

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

struct Larger {
  __device__ __forceinline__ double operator()(double a, double b) const { return fmax(a, b); }
};
struct Plus {
  __device__ __forceinline__ double operator()(double a, double b) const { return a + b; }
};

// Combines all threads' values, always in the same order. Synchronised before and after. In double: an error of a sum
// here would move a whole row.
template <typename Combine>
__device__ __forceinline__ double over_block(Storage& storage, double own, Combine combine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) own = combine(own, __shfl_xor_sync(0xffffffffu, own, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) storage.per_warp[threadIdx.x / 32] = own;
  __syncthreads();
  double all = storage.per_warp[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; ++warp) all = combine(all, storage.per_warp[warp]);
  return all;
}

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
      multiply_keys(products, storage, tile % kStages);
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
