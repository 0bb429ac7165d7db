// What the Tensor Core cannot take, made into what it can, in shared memory before a stage is multiplied:
//   - it has no sign for E4M3 scales: a negative scale becomes positive, and the codes of its block change theirs;
//   - scales behind the last block of k are padding, which may hold anything: they become zeros, like the codes there.
// Nearly all stages have neither and are only read.
#pragma once

#include "../../common/ring.cuh"
#include "storage.cuh"
#include "work.cuh"

namespace cupymla::nvfp4_gemv {

constexpr uint32_t kScaleSigns = 0x80808080u;

// Changes the sign of the 16 codes of a block. Rows of 128 bytes are swizzled: 16-byte piece p of row r is at
// p ^ r % 8.
__device__ __forceinline__ void flip_block(uint8_t* rows, uint32_t row, uint32_t block) {
  uint8_t* piece = rows + row * 128 + ((block / 2 ^ row % 8) << 4) + block % 2 * 8;
  auto& codes = *reinterpret_cast<uint2*>(piece);
  codes = make_uint2(codes.x ^ 0x88888888u, codes.y ^ 0x88888888u);
}

// Four neighbouring scales of a row, the first of them of block `first` of the stage.
template <class C>
__device__ __forceinline__ uint32_t cleaned(uint32_t scales, uint32_t mask, uint8_t* rows, uint32_t row,
                                            uint32_t first) {
  scales &= mask;
  if constexpr (!C::kMxfp4) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if (scales >> (8 * i + 7) & 1u) flip_block(rows, row, first + i);
    }
    scales &= ~kScaleSigns;
  }
  return scales;
}

// Which bytes of the four scales from column `column` on belong to k.
template <class C>
__device__ __forceinline__ uint32_t scale_mask(int64_t k, int64_t column) {
  const int64_t left = (k + C::kBlock - 1) / C::kBlock - column;
  return left >= 4 ? 0xffffffffu : left <= 0 ? 0u : (1u << (8 * left)) - 1u;
}

template <class C>
class Checker {
 public:
  // `thread` counts from 0 to 32 kCheckWarps - 1.
  __device__ __forceinline__ Checker(Storage<C>& storage, const Parameters& params, uint32_t thread)
      : storage_(storage), params_(params), thread_(thread), last_(static_cast<uint32_t>((params.k - 1) / C::kChunk)) {}

  __device__ __forceinline__ void run(const Slice<C>& slice) {
    Ring<C::kStages> ring;
    for (uint32_t chunk = slice.first; chunk < slice.end; ++chunk) {
      storage_.full[ring.stage].wait(ring.full);
      if (!C::kMxfp4 || chunk == last_) {
        const bool changed_a = check_a(ring.stage, chunk), changed_b = check_b(ring.stage, chunk);
        if (changed_a || changed_b) fence_async_shared();
      }
      __syncwarp();
      if (thread_ % 32 == 0) storage_.ready[ring.stage].arrive();
      ring.advance();
    }
  }

 private:
  static __device__ __forceinline__ bool needs_work(uint32_t scales) {
    return !C::kMxfp4 && (scales & kScaleSigns) != 0;
  }

  __device__ __forceinline__ uint32_t mask(uint32_t chunk, uint32_t block) const {
    if (chunk != last_) return 0xffffffffu;
    return scale_mask<C>(params_.k, static_cast<int64_t>(chunk) * (C::kChunk / C::kBlock) + block * 4);
  }

  // A thread has 16 bytes of a block: four scales each of rows `row`, row + 32, row + 64, row + 96.
  __device__ __forceinline__ bool check_a(uint32_t stage, uint32_t chunk) {
    const uint32_t block = thread_ / 32, row = thread_ % 32;
    if (block >= C::kScaleBlocks) return false;
    auto& place = *reinterpret_cast<uint4*>(&storage_.a_scales[stage][block][row * 16]);
    uint4 scales = place;
    const uint32_t kept = mask(chunk, block);
    if (kept == 0xffffffffu && !needs_work(scales.x | scales.y | scales.z | scales.w)) return false;
    uint8_t* rows = storage_.a[stage];
    scales.x = cleaned<C>(scales.x, kept, rows, row, block * 4);
    scales.y = cleaned<C>(scales.y, kept, rows, row + 32, block * 4);
    scales.z = cleaned<C>(scales.z, kept, rows, row + 64, block * 4);
    scales.w = cleaned<C>(scales.w, kept, rows, row + 96, block * 4);
    place = scales;
    return true;
  }

  // Rows of b are fewer than 32: the first four bytes of 16.
  __device__ __forceinline__ bool check_b(uint32_t stage, uint32_t chunk) {
    const uint32_t block = thread_ / C::kColumns, row = thread_ % C::kColumns;
    if (block >= C::kScaleBlocks) return false;
    auto& place = *reinterpret_cast<uint32_t*>(&storage_.b_scales[stage].blocks[block][row * 16]);
    const uint32_t scales = place, kept = mask(chunk, block);
    if (kept == 0xffffffffu && !needs_work(scales)) return false;
    place = cleaned<C>(scales, kept, storage_.b[stage], row, block * 4);
    return true;
  }

  static_assert(C::kScaleBlocks * 32 <= 32 * C::kCheckWarps && C::kScaleBlocks * C::kColumns <= 32 * C::kCheckWarps);

  Storage<C>& storage_;
  const Parameters& params_;
  const uint32_t thread_;
  const uint32_t last_;  // the chunk that k ends in
};

}  // namespace cupymla::nvfp4_gemv
