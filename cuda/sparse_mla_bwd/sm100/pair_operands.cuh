// What the MMA thread multiplies, the same way where heads are many and few: operands as they lie in shared memory.
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/cluster.cuh"
#include "../../common/sm100/descriptors.cuh"
#include "../../common/swizzle.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Storage>
struct PairOperands {
  using Config = typename Storage::Config;
  // Steps of 16 along K: 32 bytes on in a row, or 16 rows on.
  static constexpr uint32_t kStep = 32 / 16, kStepRows = 16 * kSwizzleRowBytes / 16;
  static constexpr uint32_t kHeadTile = Config::kHeadTileBytes / 16, kKeyTile = Config::kKeyTileBytes / 16;

  Storage& storage;
  const bool has_rope = Config::kHasRope && cluster_rank() == 0;
  const uint32_t tmem = storage.tmem;
  // Operands whose rows are read along, and the same memory read across its rows.
  const uint64_t q = sm100::descriptor_128b(smem_address(storage.q));
  const uint64_t dout = sm100::descriptor_128b(smem_address(storage.dout));
  const uint64_t k = sm100::descriptor_128b(smem_address(storage.k));
  const uint64_t p = sm100::descriptor_128b(smem_address(storage.p));
  const uint64_t ds = sm100::descriptor_128b(smem_address(storage.ds));
  const uint64_t q_across = sm100::descriptor_128b_transposed(smem_address(storage.q), Config::kHeadTileBytes);
  const uint64_t dout_across = sm100::descriptor_128b_transposed(smem_address(storage.dout), Config::kHeadTileBytes);
  const uint64_t k_across = sm100::descriptor_128b_transposed(smem_address(storage.k), Config::kKeyTileBytes);
  const uint64_t p_across = sm100::descriptor_128b_transposed(smem_address(storage.p), sizeof(storage.p));
  const uint64_t ds_across = sm100::descriptor_128b_transposed(smem_address(storage.ds), sizeof(storage.ds));
};

}  // namespace cupymla::sparse_mla_bwd
