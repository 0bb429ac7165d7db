// What the host machine is told so that it finds accesses to shared and Tensor Memory that nothing
// orders (cupymla_lab/emulate/host/races.hpp). On a GPU all of this is nothing.
#pragma once

#include "state.cuh"

namespace cupymla::emulate::races {

#ifdef CUPYMLA_HOST_MACHINE
inline machine::Thread& me() { return *machine::current; }
inline machine::Causality* causality() { return machine::current->races ? machine::current->cta->causality : nullptr; }

// A thread arrives at a barrier counted in memory, as one of that generation; it has passed it.
inline void meet(const void* barrier, uint32_t generation, bool relaxed) {
  if (causality()) causality()->meet(me(), causality()->meeting(barrier), generation, relaxed);
}
inline void part(const void* barrier, uint32_t generation) {
  if (causality()) causality()->part(me(), causality()->meeting(barrier), generation);
}
inline bool is_relaxed(uint32_t site) { return causality() && machine::is_relaxed(site); }
inline void leave() {
  if (causality()) causality()->leave(me());
}

// A commit is issued: its number. It is carried out: tells a barrier, and after all of them is forgotten.
inline uint64_t commit(uint32_t barrier, uint32_t mask) {
  return causality() ? causality()->commit(me(), barrier, mask) : 0;
}
inline void hand(uint32_t barrier, uint64_t commit) {
  if (causality()) causality()->hand(barrier, commit);
}
inline void drop(uint64_t commit) {
  if (causality()) causality()->drop(commit);
}

// An ordinary access; a copy is issued that will write here and tell a barrier.
inline void write(uint32_t address, uint32_t bytes) {
  if (causality()) causality()->access(me(), address >> 24, address & 0xffffffu, bytes, machine::kWrite);
}
inline void read(uint32_t address, uint32_t bytes) {
  if (causality()) causality()->access(me(), address >> 24, address & 0xffffffu, bytes, machine::kReadTogether);
}
inline void hold(uint32_t barrier) {
  if (causality()) causality()->hold(me(), barrier);
}
inline void write_later(uint32_t address, uint32_t bytes, uint32_t barrier) {
  if (!causality()) return;
  causality()->require_initialised(me(), barrier);
  causality()->write_later(me(), address, bytes, barrier, false);
}

// A tensor operation, or a copy to global memory, is issued that will read here.
inline void read_by_tensor(uint32_t rank, uint32_t offset, uint32_t bytes) {
  causality()->read_by_tensor(me(), rank, offset, bytes);
}
inline void read_by_store(uint32_t address, uint32_t bytes) { causality()->read_by_store(me(), address, bytes); }
// A column of Tensor Memory is used, by this thread or by what it gives the Tensor Core; columns are allocated.
inline void tensor_memory(uint32_t rank, uint32_t quarter, uint32_t column, bool writes, bool by_tensor) {
  if (causality()) causality()->tensor_memory(me(), rank, quarter, column, writes, by_tensor);
}
inline void allocated(uint32_t rank, uint32_t first, uint32_t count) {
  if (causality()) causality()->allocated(rank, first, count);
}
inline void close_group() {
  if (causality()) causality()->close_group(me());
}
inline void wait_group(uint32_t newest, uint32_t site) {
  if (!causality()) return;
  causality()->wait_group(me(), newest);
  if (!machine::is_relaxed(site)) causality()->wait_stores(me(), newest);
}
#else
__device__ __forceinline__ void meet(const void*, uint32_t, bool) {}
__device__ __forceinline__ void part(const void*, uint32_t) {}
__device__ __forceinline__ bool is_relaxed(uint32_t) { return false; }
__device__ __forceinline__ void leave() {}
__device__ __forceinline__ uint64_t commit(uint32_t, uint32_t) { return 0; }
__device__ __forceinline__ void hand(uint32_t, uint64_t) {}
__device__ __forceinline__ void drop(uint64_t) {}
__device__ __forceinline__ void write(uint32_t, uint32_t) {}
__device__ __forceinline__ void read(uint32_t, uint32_t) {}
__device__ __forceinline__ void tensor_memory(uint32_t, uint32_t, uint32_t, bool, bool) {}
__device__ __forceinline__ void allocated(uint32_t, uint32_t, uint32_t) {}
__device__ __forceinline__ void close_group() {}
__device__ __forceinline__ void wait_group(uint32_t, uint32_t) {}
#endif

}  // namespace cupymla::emulate::races
