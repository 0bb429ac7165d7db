// Sizes that a variant fixes, shared memory, and who waits for whom. A CTA of the gradients is one warpgroup and takes
// one query, for a block of heads at a time.
//
// All threads reach __syncthreads equally often: the numbers of tiles and of head blocks are the same in all. There is
// no other barrier.
//
// who waits            | how                            | what it says
// ---------------------+--------------------------------+--------------------------------------------------------
// a thread             | cp.async.wait_group, own fence | its copies into tile i's stage are there, for wgmma too
// all, at tile i       | __syncthreads                  | everybody's copies and ids of tile i are there; everybody
//                      |                                | is done with tile i - 1: its stage, `active` and
//                      |                                | `units.rows` are free
// all, behind products | own fence, __syncthreads       | `active` of tile i is there, for wgmma too, and
//                      |                                | `units.rows`
// a warp, at dk        | __syncwarp, before and after   | its rows of `dk` have left, then are there anew
// all, past tiles      | __syncthreads, three           | `dweights` are there, and nobody reads rows of `dk`; dq is
//                      |                                | there in their place; it has left, and weights were read
//
//   tile i                                              | meanwhile
//   ----------------------------------------------------+-------------------------------------
//   64 keys x heads: wgmma; dweights and operands of it | copies of the next tiles; how rows become units
//   dk and dq: wgmma, both issued                       | entries of the tile behind these are read
//   dk leaves for L2                                    | dq
#pragma once

#include "../../common/sm90/wgmma.cuh"
#include "../../common/swizzle.cuh"
#include "channels.cuh"
#include "query.cuh"

namespace cupymla::indexer_bwd {

constexpr int kHeads = CUPYMLA_HEADS;  // of a block, with those that only fill up
constexpr bool kDeterministic = CUPYMLA_DETERMINISTIC != 0;
constexpr int kStages = kDeterministic ? 3 : 4;
constexpr int kStagedRows = kDeterministic ? 16 : 8;  // of a warp
constexpr int kColumnTiles = kD / 64;  // of 128 swizzled bytes
constexpr int kHeadGroups = kHeads / 8;
constexpr int kScores = kHeads / 2;    // of a thread, see `multiply_keys`
constexpr uint32_t kKeyColumnBytes = kTileKeys * kSwizzleRowBytes;
constexpr uint32_t kHeadColumnBytes = kHeads * kSwizzleRowBytes;

// How a row of sums becomes units. Where all rows of a warp are small, with units below 2^(22 + coarse), `way` is
// `coarse`, and units are rounded to multiples of 2^coarse; that takes keys with some 500 entries or more.
struct RowUnits {
  float factor;  // sums times it and a channel's factor are units
  int32_t way;
};
constexpr int32_t kConverted = -1;
constexpr int32_t kChecked = -2;  // channels are looked at one by one: infinities, NaN, factors that are not normal
// Sums of 32 bits leave no more for it: with 4, those of 256 entries of 16 heads had four times the error.
constexpr int kMostCoarse = 1;

// Used where sums are integers.
struct Units {
  RowUnits rows[kTileKeys];
  int64_t totals[kStages][kTileKeys];  // of entries' keys
  float channel_factors[kD];           // how many times more units a 1 is than where a part is 1
  int32_t total_unit;                  // log2 of the unit of totals
  float query_bound;                   // negative where entries may add what is not finite
};

static_assert(kHeads == 16 || kHeads == 32 || kHeads == 64);

// Addresses of `keys`, `q` and `active` are multiples of 1024: wgmma reads them.
struct alignas(1024) Storage {
  uint8_t keys[kStages][kColumnTiles][kKeyColumnBytes];
  uint8_t q[kColumnTiles][kHeadColumnBytes];
  uint8_t active[kHeadColumnBytes];  // [heads][64 keys]: gradient [z > 0]
  // Rows of a warp's keys, eight floats longer than needed: eight rows of a fragment meet all banks. At the end dq,
  // [heads][channels + 8].
  alignas(16) float dk[kThreads / 32][kStagedRows][kD + 8];
  alignas(16) int32_t ids[kStages][kTileKeys];  // -1 for entries that are not valid
  float gradients[kStages][kTileKeys];  // of the entries, 0 for those that are not valid
  float weights[kHeads];                // 0 for heads that only fill up
  uint32_t weight_pairs[kHeads / 2];    // the same as operands
  float dweights[kThreads / 32][kHeads];
  float per_warp[kThreads / 32];
  Units units;
  float gradient_scale, weights_unit;  // of gradients as operands; and what 1 is of weights as operands
};

static_assert(sizeof(Storage) <= 113 * 1024, "two CTAs share a multiprocessor");
static_assert(kHeads * (kD + 8) * sizeof(Element) <= sizeof(Storage::dk), "dq fits into rows of dk");

}  // namespace cupymla::indexer_bwd
