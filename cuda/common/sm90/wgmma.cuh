// wgmma: a warpgroup multiplies tiles from shared memory (PTX ISA, "wgmma.mma_async"). The instructions themselves
// are CUTLASS's atoms; here they get arrays for accumulators and names for the two operand layouts in use.
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../barrier.cuh"
#include "../swizzle.cuh"

namespace cupymla::sm90 {

using cute::SM90::GMMA::Major;
using cute::SM90::GMMA::ScaleOut;

// Matrix descriptor fields (PTX ISA, "Matrix descriptor format"): start, leading and stride byte offsets in 16-byte
// units at bits 0, 16 and 32, swizzle mode at bits 62-63 (1 is 128 bytes).
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  return kSwizzle128 | static_cast<uint64_t>((address & 0x3ffffu) >> 4) |
         (static_cast<uint64_t>(leading_bytes >> 4) << 16) | (static_cast<uint64_t>(stride_bytes >> 4) << 32);
}

// Tile whose 128-byte rows run along k: successive groups of eight rows lie one swizzle atom apart. The leading
// offset has no meaning here.
__device__ __forceinline__ uint64_t k_major_descriptor(uint32_t address) {
  return matrix_descriptor(address, 16, kSwizzleAtomBytes);
}

// Tile whose 128-byte rows run along m or n: `column_tile_bytes` apart lie the 64-element column tiles, one swizzle
// atom apart the groups of eight k.
__device__ __forceinline__ uint64_t mn_major_descriptor(uint32_t address, uint32_t column_tile_bytes) {
  return matrix_descriptor(address, column_tile_bytes, kSwizzleAtomBytes);
}

// The same descriptor with its start moved by a multiple of 16 bytes.
__device__ __forceinline__ uint64_t descriptor_advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

// Registers and shared memory written before are seen by the wgmmas that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `kPending` committed groups of this warpgroup are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads or writes of these accumulators across this point.
template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

template <typename Element>
struct Atoms;

template <>
struct Atoms<__nv_bfloat16> {
  using Scores = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<Major::K, Major::K>;
  using ScoresFromRegisters = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_RS<Major::K, Major::K>;
  using ValuesFromRegisters = cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_RS<Major::K, Major::MN>;
  using ValuesFromShared = cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<Major::K, Major::MN>;
};

template <>
struct Atoms<__half> {
  using Scores = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_SS<Major::K, Major::K>;
  using ScoresFromRegisters = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_RS<Major::K, Major::K>;
  using ValuesFromRegisters = cute::SM90::GMMA::MMA_64x256x16_F32F16F16_RS<Major::K, Major::MN>;
  using ValuesFromShared = cute::SM90::GMMA::MMA_64x256x16_F32F16F16_SS<Major::K, Major::MN>;
};

// With value channels as rows and kHeads heads as columns: output^T += V^T P^T.
template <typename Element, int kHeads>
struct TransposedAtoms;

template <>
struct TransposedAtoms<__nv_bfloat16, 16> {
  using Values = cute::SM90::GMMA::MMA_64x16x16_F32BF16BF16_SS<Major::MN, Major::K>;
};

template <>
struct TransposedAtoms<__nv_bfloat16, 32> {
  using Values = cute::SM90::GMMA::MMA_64x32x16_F32BF16BF16_SS<Major::MN, Major::K>;
};

template <>
struct TransposedAtoms<__half, 16> {
  using Values = cute::SM90::GMMA::MMA_64x16x16_F32F16F16_SS<Major::MN, Major::K>;
};

template <>
struct TransposedAtoms<__half, 32> {
  using Values = cute::SM90::GMMA::MMA_64x32x16_F32F16F16_SS<Major::MN, Major::K>;
};

template <typename Atom, int kCount, int... kIndex>
__device__ __forceinline__ void mma_unpacked(float (&d)[kCount], uint64_t a, uint64_t b, ScaleOut scale,
                                             Indices<kIndex...>) {
  Atom::fma(a, b, d[kIndex]..., scale);
}

template <typename Atom, int kCount, int... kIndex>
__device__ __forceinline__ void mma_unpacked(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, ScaleOut scale,
                                             Indices<kIndex...>) {
  Atom::fma(a[0], a[1], a[2], a[3], b, d[kIndex]..., scale);
}

// d = a * b (+ d unless `clear`); a is a descriptor or a register fragment of 64 x 16.
template <typename Atom, int kCount, typename A>
__device__ __forceinline__ void mma(float (&d)[kCount], const A& a, uint64_t b, bool clear = false) {
  mma_unpacked<Atom>(d, a, b, clear ? ScaleOut::Zero : ScaleOut::One, make_indices<kCount>{});
}

}  // namespace cupymla::sm90
