// Sizes that a variant fixes, shared memory, and who waits for whom. A CTA is one warpgroup and takes one query.
//
// There is no barrier but __syncthreads, which all threads reach equally often: the number of tiles is the same in all.
//
// who waits       | how                            | what it says
// ----------------+--------------------------------+---------------------------------------------------------
// a thread        | cp.async.wait_group, own fence | its copies into tile i's stage are there, for wgmma too
// all, at tile i  | __syncthreads                  | everybody's copies and ids of tile i are there; everybody
//                 |                                | is done with tile i - 1, whose stage is filled next
// all, past tiles | __syncthreads, twice for a sum | scores in `grad_logits` and parts of the sums are there
//
//   tile i                                    | meanwhile
//   ------------------------------------------+-------------------------------------
//   64 keys x heads: wgmma, then sum of heads | copies of tiles i + 1 and i + 2
//   scores to grad_logits, maximum and sum    | entries of tile i + 3 are read
#pragma once

#include "../../common/sm90/wgmma.cuh"
#include "../../common/swizzle.cuh"
#include "params.cuh"

namespace cupymla::indexer_loss {

constexpr int kD = CUPYMLA_D;
constexpr int kHeads = CUPYMLA_HEADS;  // with those that only fill up
constexpr bool kFilled = CUPYMLA_FILLED != 0;
constexpr int kThreads = 128;
constexpr int kTileKeys = 64;
constexpr int kStages = 3;
constexpr int kColumnTiles = kD / 64;  // of 128 swizzled bytes
constexpr int kRowChunks = kD / 8;     // of 16 bytes
constexpr uint32_t kKeyColumnBytes = kTileKeys * kSwizzleRowBytes;
constexpr uint32_t kHeadColumnBytes = kHeads * kSwizzleRowBytes;

static_assert(kD == 64 || kD == 128);
static_assert(kHeads == 16 || kHeads == 32 || kHeads == 64 || kHeads == 128);

// Addresses of `keys` and `q` are multiples of 1024: wgmma reads them.
struct alignas(1024) Storage {
  uint8_t keys[kStages][kColumnTiles][kKeyColumnBytes];
  uint8_t q[kColumnTiles][kHeadColumnBytes];
  int32_t ids[kStages][kTileKeys];  // -1 for entries that are not valid
  float weights[kHeads];            // 0 for heads that only fill up
  double per_warp[kThreads / 32];   // in double: an error of a sum here would move a whole row
};

static_assert(sizeof(Storage) <= 113 * 1024, "two CTAs share a multiprocessor");

}  // namespace cupymla::indexer_loss
