// Which phase each of a few buffers guarded by mbarriers is in.
#pragma once

#include "types.cuh"

namespace cupymla {

// One bit per buffer: the parity of its next phase. Buffers may be used in any order.
struct Phases {
  uint32_t bits = 0;

  // Parity of a "full" barrier: its first phase completes when the buffer is first filled.
  __device__ __forceinline__ uint32_t full(uint32_t buffer) const { return (bits >> buffer) & 1u; }

  // Parity of a "free" barrier: a fresh mbarrier counts as having completed the phase before its first, so the
  // first wait for every buffer passes at once.
  __device__ __forceinline__ uint32_t free(uint32_t buffer) const { return full(buffer) ^ 1u; }

  // The buffer's phase is through; the next use meets the next one.
  __device__ __forceinline__ void advance(uint32_t buffer) { bits ^= 1u << buffer; }
};

// Buffers used in turn: the next one, and the parity of its next phase, as above.
template <uint32_t kStages>
struct Ring {
  uint32_t stage = 0;
  uint32_t full = 0;

  __device__ __forceinline__ uint32_t free() const { return full ^ 1u; }

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      full ^= 1u;
    }
  }
};

}  // namespace cupymla
