// Position in a ring of buffers guarded by mbarriers: which stage comes next, and which parity its phase has.
#pragma once

#include "integers.cuh"

namespace cupymla {

template <uint32_t kStages>
struct Ring {
  uint32_t stage = 0;
  uint32_t round = 0;  // times the ring has been gone through, modulo 2

  // Parity of a "full" barrier: its first phase completes when the buffer is first filled.
  __device__ __forceinline__ uint32_t full_parity() const { return round; }

  // Parity of a "free" barrier: a fresh mbarrier counts as having completed the phase before its first, so the
  // first wait of every stage passes at once.
  __device__ __forceinline__ uint32_t free_parity() const { return round ^ 1u; }

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      round ^= 1u;
    }
  }
};

}  // namespace cupymla
