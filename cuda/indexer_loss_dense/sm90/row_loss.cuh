// Stage `row_loss`: a CTA takes one row, from target and scores to the loss and the gradient with respect to scores.
#pragma once

#include "../../common/block_reduction.cuh"
#include "../../common/integer_reduction.cuh"
#include "../../common/memory.cuh"
#include "channels.cuh"
#include "operand_scale.cuh"
#include "row_bounds.cuh"
#include "rows.cuh"

namespace cupymla::indexer_loss_dense {

constexpr float kLeastMass = 1e-10f;  // of a divisor, so that a row without mass stays zero

// The base of a sum of exponentials: without it, minus infinity less itself would be no number.
__device__ __forceinline__ float base_of(float largest) { return largest == negative_infinity() ? 0.0f : largest; }

// Four neighbouring keys of a row; what is not visible counts for nothing.
struct FourKeys {
  float scores[4], targets[4];
  bool seen[4];

  __device__ __forceinline__ FourKeys(const float* row_scores, const float* row_targets, int32_t key,
                                      const Bounds& bounds) {
    if (bounds.begin <= key && key + 4 <= bounds.end) {
      const float4 score = *reinterpret_cast<const float4*>(row_scores + key);
      const float4 target = *reinterpret_cast<const float4*>(row_targets + key);
      scores[0] = score.x, scores[1] = score.y, scores[2] = score.z, scores[3] = score.w;
      targets[0] = target.x, targets[1] = target.y, targets[2] = target.z, targets[3] = target.w;
      seen[0] = seen[1] = seen[2] = seen[3] = true;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        seen[i] = bounds.begin <= key + i && key + i < bounds.end;
        scores[i] = seen[i] ? row_scores[key + i] : negative_infinity();
        targets[i] = seen[i] ? row_targets[key + i] : 0.0f;
      }
    }
  }
};

struct RowLoss {
  const Parameters& params;
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const Bounds bounds = visible_keys(params, row);
  float* gradients = params.gradients + row * params.row_stride;
  const float* target = params.target + row * params.row_stride;
  const int32_t first_key = (bounds.begin / 4 + static_cast<int32_t>(threadIdx.x)) * 4;

  struct Shared {
    double per_warp[kRowThreads / 32];  // in double: an error of a sum here would move a whole row
  };

  __device__ __forceinline__ void run() {
    __shared__ Shared shared;
    int32_t state = kLeftOut;
    float largest = 0.0f;
    if (!bounds.is_empty()) state = take(shared, largest);
    // Products read whole tiles: there is no gradient where nothing is visible.
    const bool sound = state == kSound;
    const int32_t begin = bounds.begin / 4 * 4;
    for (int32_t key = threadIdx.x * 4; key < params.row_stride; key += kRowThreads * 4) {
      if (sound && begin <= key && key < bounds.end) continue;
      *reinterpret_cast<float4*>(gradients + key) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    if (threadIdx.x != 0) return;
    params.states[row] = state;
    params.bounds[row * 2] = bounds.begin;
    params.bounds[row * 2 + 1] = bounds.end;
    params.largest[row] = sound ? largest : 0.0f;
    if (bounds.is_empty() && row < params.queries) params.loss[row * params.loss_query] = 0.0f;
  }

 private:
  __device__ __forceinline__ int32_t take(Shared& shared, float& largest_gradient) {
    float largest = negative_infinity(), sum = 0.0f, mass = 0.0f;
#pragma unroll 2
    for (int32_t key = first_key; key < bounds.end; key += kRowThreads * 4) {
      const FourKeys keys(gradients, target, key, bounds);
      float grown = largest;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mass += keys.targets[i];
        // fmaxf leaves NaN out; the sum has it.
        grown = fmaxf(grown, keys.scores[i]);
      }
      const float base = base_of(grown);
      sum *= expf(largest - base);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += expf(keys.scores[i] - base);
      largest = grown;
    }
    mass = static_cast<float>(over_block(shared, mass, Plus{}));
    const float divisor = max_nan(mass, kLeastMass);
    const float base = base_of(static_cast<float>(over_block(shared, largest, Larger{})));
    const float part = sum == 0.0f ? 0.0f : sum * expf(largest - base);
    // log softmax(score) = (score - base) - log_sum. Rounding log_sum moves the whole loss; what it leaves out comes
    // back.
    const double exact = log(over_block(shared, part, Plus{}));
    const float log_sum = static_cast<float>(exact);
    const float left_out = static_cast<float>(exact - log_sum);
    const float whole = mass / divisor;
    const float slope = params.grad_loss == nullptr ? 1.0f : params.grad_loss[row * params.grad_loss_query];

    float loss = 0.0f, most = 0.0f;
#pragma unroll 2
    for (int32_t key = first_key; key < bounds.end; key += kRowThreads * 4) {
      const FourKeys keys(gradients, target, key, bounds);
      float own[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float log_softmax = keys.scores[i] - base - log_sum, p = keys.targets[i] / divisor;
        if (p != 0.0f) loss += p * (logf(p) - log_softmax);
        own[i] = keys.seen[i] ? (whole * expf(log_softmax) - p) * slope : 0.0f;
        most = fmaxf(most, fabsf(own[i]));
      }
      store_float4(gradients + key, own);
    }
    const double total = over_block(shared, loss, Plus{}) + static_cast<double>(whole) * left_out;
    if (threadIdx.x == 0) params.loss[row * params.loss_query] = static_cast<float>(total);

    const bool finite = is_finite(mass) && is_finite(base) && is_finite(log_sum) && is_finite(slope);
    float weight = 0.0f;
    const bool own = heads_are_finite(weight) && keys_are_finite();
    const int32_t state = __syncthreads_or(static_cast<int>(!(finite && own))) == 0 ? kSound : kSpoilt;
    if constexpr (kScaled) {
      largest_gradient = static_cast<float>(over_block(shared, most, Larger{}));
      weight = static_cast<float>(over_block(shared, weight, Larger{}));
      if (threadIdx.x == 0 && state == kSound) {
        reduce_max_positive(params.largest_term, fminf(largest_gradient * weight, kLargestFloat));
      }
    }
    return state;
  }

  // Of this thread's part of q and weights; `largest`: its largest absolute weight.
  __device__ __forceinline__ bool heads_are_finite(float& largest) const {
    bool all = true;
    constexpr int kChunks = kD / 8;
    for (int chunk = threadIdx.x; chunk < params.heads * kChunks; chunk += kRowThreads) {
      const Element* source =
          params.q + row * params.q_query + chunk / kChunks * params.q_head + chunk % kChunks * 8;
      all = all && are_finite(__ldg(reinterpret_cast<const uint4*>(source)));
    }
    for (int head = threadIdx.x; head < params.heads; head += kRowThreads) {
      const float weight = fabsf(weight_of(params, row, head));
      all = all && is_finite(weight);
      largest = fmaxf(largest, weight);
    }
    return all;
  }

  // Of this thread's part of the visible keys.
  __device__ __forceinline__ bool keys_are_finite() const {
    uint32_t bad = 0;
    for (int32_t word = bounds.begin / 32 + threadIdx.x; word * 32 < bounds.end; word += kRowThreads) {
      uint32_t seen = ~0u;
      if (word * 32 < bounds.begin) seen &= ~0u << (bounds.begin - word * 32);
      if (word * 32 + 32 > bounds.end) seen &= ~0u >> (word * 32 + 32 - bounds.end);
      bad |= params.bad_keys[word] & seen;
    }
    return bad == 0;
  }
};

}  // namespace cupymla::indexer_loss_dense
