// Shared memory of the kernel: what every row needs, then `Arrays`, whose sizes the host chooses.
//
// The only barrier is __syncthreads. Every function that all threads call together says what it leaves synchronised.
#pragma once

#include "params.cuh"

namespace cupymla::topk {

constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr int kBinBits = 11;
constexpr int kBins = 1 << kBinBits;  // of a histogram
constexpr int kFew = 32;              // entries that a warp puts in order by itself

struct alignas(16) Storage {
  uint32_t bins[kBins];  // all zero between two selections
  uint64_t few[kFew];
  uint32_t warp_least[kMaxWarps], warp_most[kMaxWarps];
  uint32_t warp_sums[kMaxWarps];
  uint32_t gathered;            // entries in `few`
  uint32_t candidates;          // of a row's stream, above the threshold
  // These are read together, 16 bytes at a time, while others go on: no other word that changes may be among them.
  alignas(16) uint32_t bin;     // that holds the wanted rank
  uint32_t above, inside;       // entries above it and in it
  uint32_t equals;              // of a row's stream, with the threshold's score
};

// What lies behind `Storage`.
struct Arrays {
  uint64_t* places;   // [capacity]
  uint32_t* bitmap;   // [bitmap_words + 1]: a bit per column, from the 8-column group that holds the first one
  uint64_t* sorted;   // [sorted]

  __device__ __forceinline__ Arrays(uint8_t* memory, const Parameters& params) {
    places = reinterpret_cast<uint64_t*>(memory);
    sorted = places + params.capacity;
    bitmap = reinterpret_cast<uint32_t*>(sorted + params.sorted);
  }
};

}  // namespace cupymla::topk
