// What the CTAs of a cluster find in a row goes to the shared memory of the first one (PTX ISA, "mapa", "st", "atom").
#pragma once

#include "storage.cuh"

#if __CUDA_ARCH__ >= 900
#include "../../common/barrier.cuh"
#include "../../common/cluster.cuh"
#include "../../common/cluster_gather.cuh"
#endif

namespace cupymla::topk {

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ uint32_t part_of_row() { return cluster_rank(); }
__device__ __forceinline__ uint32_t parts_of_row() { return cluster_size(); }

struct Gather {
  const Arrays& arrays;
  const uint32_t capacity;
  const bool remote = cluster_rank() != 0;

  __device__ __forceinline__ Gather(const Arrays& arrays, const Parameters& params)
      : arrays(arrays), capacity(static_cast<uint32_t>(params.capacity)) {}

  // Adds to a count and returns what it was.
  __device__ __forceinline__ uint32_t take(uint32_t& count, uint32_t entries) const {
    if (!remote) return atomicAdd(&count, entries);
    return cluster_add_relaxed(first_cta(&count), entries);
  }

  __device__ __forceinline__ void put(uint32_t entry, uint64_t place) const {
    if (!remote) {
      arrays.places[entry] = place;
    } else {
      cluster_store_uint64(first_cta(arrays.places + entry), place);
    }
  }

  // The equals of a group of eight columns.
  __device__ __forceinline__ void mark(uint32_t group, uint32_t bits) const {
    uint8_t* byte = reinterpret_cast<uint8_t*>(arrays.bitmap) + group;
    if (!remote) {
      *byte = static_cast<uint8_t>(bits);
    } else {
      cluster_store_byte(first_cta(byte), bits);
    }
  }

 private:
  static __device__ __forceinline__ uint32_t first_cta(const void* own) {
    return cluster_address(smem_address(own), 0);
  }
};

#else  // no clusters

__device__ __forceinline__ uint32_t part_of_row() { return 0; }
__device__ __forceinline__ uint32_t parts_of_row() { return 1; }

struct Gather {
  const Arrays& arrays;
  const uint32_t capacity;

  __device__ __forceinline__ Gather(const Arrays& arrays, const Parameters& params)
      : arrays(arrays), capacity(static_cast<uint32_t>(params.capacity)) {}

  __device__ __forceinline__ uint32_t take(uint32_t& count, uint32_t entries) const {
    return atomicAdd(&count, entries);
  }
  __device__ __forceinline__ void put(uint32_t entry, uint64_t place) const { arrays.places[entry] = place; }
  __device__ __forceinline__ void mark(uint32_t group, uint32_t bits) const {
    reinterpret_cast<uint8_t*>(arrays.bitmap)[group] = static_cast<uint8_t>(bits);
  }
};

#endif

// What one CTA has written in the first one's shared memory is seen there, in a cluster of several.
__device__ __forceinline__ void meet(uint32_t parts) {
#if __CUDA_ARCH__ >= 900
  if (parts > 1) {
    cluster_arrive();
    cluster_wait();
    return;
  }
#endif
  __syncthreads();
}

}  // namespace cupymla::topk
