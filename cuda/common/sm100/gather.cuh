// Four rows of a matrix that lie anywhere, by one TMA instruction (PTX ISA, "cp.async.bulk.tensor", ".tile::gather4";
// sm_100f). The map's box is one row of as many columns as are copied.
#pragma once

#include "../tma.cuh"

namespace cupymla::sm100 {

// The barrier at this place in the even CTA of the pair: bit 24 of a shared::cluster address is the CTA of the pair.
__device__ __forceinline__ uint32_t leader_address(const Mbarrier& barrier) {
  return smem_address(&barrier.state) & 0xfeffffffu;
}

// Columns from `column` on of four rows, into four rows of shared memory behind each other. Rows outside the matrix,
// such as -1, read as zero and count as copied bytes.
__device__ __forceinline__ void gather_rows(void* destination, const TensorMap& map, Mbarrier& full, int32_t column,
                                            int4 rows) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(smem_address(destination)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(smem_address(&full)), "r"(column), "r"(rows.x), "r"(rows.y),
      "r"(rows.z), "r"(rows.w)
      : "memory");
}

// The same in a CTA pair, each into its own shared memory; the bytes count at the even CTA's barrier.
__device__ __forceinline__ void gather_rows_of_pair(void* destination, const TensorMap& map, const Mbarrier& full,
                                                    int32_t column, int4 rows) {
  asm volatile(
      "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(smem_address(destination)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(leader_address(full)), "r"(column), "r"(rows.x), "r"(rows.y),
      "r"(rows.z), "r"(rows.w)
      : "memory");
}

// Box at (c0, c1, c2, c3), innermost first, into this CTA's shared memory; elements outside the tensor read as zero and
// count as copied bytes.
__device__ __forceinline__ void tma_load_4d_of_pair(void* destination, const TensorMap& map, const Mbarrier& full,
                                                    int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem_address(destination)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(leader_address(full)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

}  // namespace cupymla::sm100
