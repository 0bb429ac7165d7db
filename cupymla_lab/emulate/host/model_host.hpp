// CUDA as far as cupymla_lab/emulate/model uses it, on the host machine: the same source that a GPU's compiler reads is compiled as
// C++ with this before it. Other threads run when one waits, and now and then at an atomic.
#pragma once

#include <type_traits>

#include "races.hpp"
#include "runtime.hpp"

#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))

namespace machine {

struct Axes {
  uint32_t x, y, z;
};
inline Axes axes(const uint32_t (&values)[3]) { return {values[0], values[1], values[2]}; }

}  // namespace machine

#define threadIdx machine::axes(machine::current->id)
#define blockDim machine::axes(machine::current->block)
#define blockIdx machine::axes(machine::current->cta->position)
#define gridDim machine::axes(machine::current->grid)

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

template <typename T>
inline T __ldcg(const T* place) {
  return *place;
}
template <typename T>
inline void __stcg(T* place, T value) {
  *place = value;
}

inline void __threadfence() {}
inline void __threadfence_system() {}
inline void __nanosleep(uint32_t nanoseconds) { machine::sleep(*machine::current, nanoseconds); }
inline void __syncthreads() { machine::barrier_sync(*machine::current, 0, 0, true); }
inline void __syncwarp() { machine::together(*machine::current, machine::kSync, 0xffffffffu, 0, 0); }
inline uint32_t __activemask() { return 1u << machine::current->lane; }
inline uint32_t __shfl_sync(uint32_t mask, uint32_t value, int lane) {
  const uint64_t found = machine::together(*machine::current, machine::kShuffleIndex, mask, value, lane);
  return static_cast<uint32_t>(found);
}
inline uint32_t __match_any_sync(uint32_t mask, uint32_t value) {
  return static_cast<uint32_t>(machine::together(*machine::current, machine::kMatchAny, mask, value, 0));
}

inline float __uint_as_float(uint32_t word) { return machine::as<float>(word); }
inline uint32_t __float_as_uint(float value) { return machine::as<uint32_t>(value); }

// A parameter of the pointer's type, whatever the argument's.
template <typename T>
using Same = std::common_type_t<T>;

template <typename T>
inline T atomicAdd(T* place, Same<T> value) {
  machine::breathe(*machine::current);
  const T before = *place;
  *place = before + value;
  return before;
}
template <typename T>
inline T atomicSub(T* place, Same<T> value) {
  return atomicAdd<T>(place, static_cast<T>(0 - value));
}
template <typename T>
inline T atomicExch(T* place, Same<T> value) {
  machine::breathe(*machine::current);
  const T before = *place;
  *place = value;
  return before;
}
template <typename T>
inline T atomicCAS(T* place, Same<T> expected, Same<T> value) {
  machine::breathe(*machine::current);
  const T before = *place;
  if (before == expected) *place = value;
  return before;
}

using std::ceil;
using std::fabs;
using std::floor;
using std::fma;
using std::ilogb;
using std::isinf;
using std::ldexp;
using std::rint;
using std::signbit;

// What cuda/common/hardware.cuh is on a GPU.
namespace cupymla::hardware {

using machine::current;

inline uint32_t cluster_rank() { return current->cta->rank; }
inline uint32_t cluster_size() { return current->cta->cluster_size; }
inline uint32_t cluster_cta_x() { return current->cta->in_cluster[0]; }
inline uint32_t cluster_cta_y() { return current->cta->in_cluster[1]; }
inline uint32_t cluster_cta_z() { return current->cta->in_cluster[2]; }
inline uint32_t cluster_extent_x() { return current->cta->cluster_extent[0]; }
inline uint32_t cluster_extent_y() { return current->cta->cluster_extent[1]; }
inline uint32_t lane_index() { return current->lane; }
inline uint32_t total_smem_bytes() { return current->cta->smem_bytes - machine::kSystemBytes; }
inline uint64_t global_nanoseconds() { return machine::now(); }

inline uint32_t map_to_rank(uint32_t address, uint32_t rank) { return rank << 24 | (address & 0xffffffu); }
inline uint32_t rank_of_shared(uint32_t address) { return address >> 24; }

inline uint32_t load_cluster_u8(uint32_t address) { return *machine::shared(*current, address, 1); }
inline uint4 load_cluster_16(uint32_t address) { return machine::load<uint4>(machine::shared(*current, address, 16)); }
inline void store_cluster_u32(uint32_t address, uint32_t value) {
  machine::store(machine::shared(*current, address, 4), value);
}
inline void store_cluster_16(uint32_t address, uint4 value) {
  machine::store(machine::shared(*current, address, 16), value);
}
// Not an access of the kernel: the model says of those that are (races.cuh), and fills memory with NaN this way.
inline void store_shared_u32(uint32_t address, uint32_t value) { store_cluster_u32(address, value); }
inline void arrive_in_cluster(uint32_t barrier) { machine::barrier_arrive(*current, barrier, 1, 0); }
inline void complete_bytes_in_cluster(uint32_t barrier, uint32_t bytes) {
  if (current->races) current->cta->causality->landed(barrier, machine::kAnyone);
  machine::barrier_expect(*current, barrier, -static_cast<int32_t>(bytes));
}
inline void fence_proxy_async() {}
[[noreturn]] inline void exit_thread() { machine::end_thread(*current); }

}  // namespace cupymla::hardware
