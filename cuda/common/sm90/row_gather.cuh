// The gather of a producer warpgroup: selected KV rows into blocks of swizzled column tiles, and which entries are
// valid.
#pragma once

#include "../async_copy.cuh"
#include "../registers.cuh"
#include "../ring.cuh"
#include "../swizzle.cuh"

namespace cupymla::sm90 {

// Places of a block all of which lies in one buffer.
template <typename Config>
struct OneBuffer {
  int buffer;
  uint32_t parity;  // of the free barriers' awaited phase

  // The buffer of a part; which of its barriers says that the part, and those after it up to the next such, may be
  // filled, negative for none; and the parity to wait for.
  __device__ __forceinline__ int stage(int) const { return buffer; }
  static __device__ __forceinline__ constexpr int free_side(int part) {
    return part == 0 ? 0 : part == Config::kLeftParts ? 1 : -1;
  }
  __device__ __forceinline__ uint32_t free_parity(int) const { return parity; }

  template <typename Storage>
  __device__ __forceinline__ const uint8_t* tile(const Storage& storage, int, int tile) const {
    return storage.k[buffer][tile];
  }

  // Its address, for the copies.
  template <typename Storage>
  __device__ __forceinline__ uint32_t address(const Storage& storage, int part, int first) const {
    return smem_address(tile(storage, part, first));
  }
};

// Each warp serves sixteen consecutive entries of a block of 64: lane l knows the token of entry l % 16, and in each of
// four passes eight lanes copy 128 bytes of one row. A block arrives in kParts parts of whole tiles; the validity words
// come with part kValidityPart.
//
// Config: kTileKeys, kTileBytes, kParts, part_begin(part), and kLeftParts, the parts in the half that is freed first.
// Storage: k[buffer][tile], valid[buffer][warp], and the barriers full[buffer][part] (an arrival of every thread for
// its copies, four more for the words) and free[buffer][half].
// A caller whose blocks do not lie in one buffer each says so by places of its own: see `OneBuffer`.
template <typename Config, typename Storage, int kValidityPart = Config::kParts - 1>
struct RowGather {
  static constexpr int kWarpKeys = 16;
  static constexpr int kPasses = 4;
  static_assert(Config::kTileKeys == 4 * kWarpKeys);

  Storage& storage;
  int warp = (threadIdx.x / 32) % 4;
  int lane = threadIdx.x % 32;
  const uint64_t l2_policy = l2_policy_evict_last();
  Phases phases;  // of the key buffers

  __device__ __forceinline__ explicit RowGather(Storage& storage) : storage(storage) {}

  // The token of this lane's entry of `block`, or -1 where there is no entry.
  __device__ __forceinline__ int32_t load_token(const int32_t* indices, int32_t entries, int block) const {
    const int entry = block * Config::kTileKeys + warp * kWarpKeys + lane % kWarpKeys;
    return entry < entries ? __ldg(indices + entry) : -1;
  }

  // Fills `buffer` with the rows of a block whose tokens the lanes hold, zeros in entries that are not valid.
  __device__ __forceinline__ void fill(int32_t token, uint32_t token_limit, const uint8_t* kv, int64_t token_bytes,
                                       int buffer) {
    fill_places(token, token_limit, kv, token_bytes, OneBuffer<Config>{buffer, phases.free(buffer)});
    phases.advance(buffer);
  }

  template <typename Places>
  __device__ __forceinline__ void fill_places(int32_t token, uint32_t token_limit, const uint8_t* kv,
                                              int64_t token_bytes, const Places& places) {
    const bool valid = static_cast<uint32_t>(token) < token_limit;
    const uint32_t valid_lanes = __ballot_sync(0xffffffffu, valid);

    const uint32_t own_lane = lane;  // unsigned divides in one instruction
    const uint8_t* rows = kv + own_lane % 8 * 16;
    make_opaque(rows);  // so that each row's offset is added to it in one instruction
    const uint8_t* source[kPasses];
    // Rows eight apart are swizzled alike.
    uint32_t destination[2];
    uint32_t tiles_before = 0;
    bool take[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint32_t entry = pass * 4 + own_lane / 8;
      const uint32_t row = __shfl_sync(0xffffffffu, token, entry);
      take[pass] = (valid_lanes >> entry) & 1u;
      source[pass] = rows + static_cast<int64_t>(take[pass] ? row : 0u) * token_bytes;
      if (pass < 2) destination[pass] = swizzle_128(warp * kWarpKeys + entry, own_lane % 8);
    }

#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      const int stage = places.stage(part);
      const int side = Places::free_side(part);
      if (side >= 0) storage.free[stage][side].wait(places.free_parity(part));
      if (part == kValidityPart && lane == 0) {
        storage.valid[stage][warp] = static_cast<uint16_t>(valid_lanes);
        storage.full[stage][part].arrive();
      }
      const uint32_t tiles = places.address(storage, part, Config::part_begin(part));
      // Two addresses, and what is added to them is constant: that takes the fewest registers.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        destination[i] += tiles - tiles_before;
        make_opaque(destination[i]);
      }
      tiles_before = tiles;
#pragma unroll
      for (int tile = Config::part_begin(part); tile < Config::part_begin(part + 1); ++tile) {
        const uint32_t offset = (tile - Config::part_begin(part)) * Config::kTileBytes;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          copy_async_16_or_zero(destination[pass % 2] + offset + pass / 2 * kSwizzleAtomBytes,
                                source[pass] + tile * static_cast<int>(kSwizzleRowBytes), take[pass], l2_policy);
        }
      }
      storage.full[stage][part].arrive_after_copies();
    }
  }
};

}  // namespace cupymla::sm90
