// Numbers of the sm_90a indexer logits kernel, and the budgets they must keep.
#pragma once

#include "../../common/sm90/swizzle_64_tiles.cuh"
#include "../../common/sm90/warpgroups.cuh"
#include "../../common/sm90/wgmma.cuh"
#include "../../common/swizzle.cuh"

// CUPYMLA_TYPE: of q and k, 0 fp8 e4m3fn, 1 bf16, 2 fp16. CUPYMLA_D: channels, 64 or 128. CUPYMLA_HEADS: heads of a
// query with those that only fill up, 8, 16, 32, 64 or 128. CUPYMLA_FILLED: 1 where there are such.

namespace cupymla::indexer_logits {

// One product: 64 keys (rows, from registers) with `kColumns` heads (from shared memory), 32 bytes of channels.
template <int kType, int kColumns>
struct ProductAtom;
template <>
struct ProductAtom<0, 64> {
  using type = cute::SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_RS_TN<>;
};
template <>
struct ProductAtom<0, 128> {
  using type = cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_RS_TN<>;
};
template <>
struct ProductAtom<1, 64> {
  using type = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_RS<sm90::Major::K, sm90::Major::K>;
};
template <>
struct ProductAtom<1, 128> {
  using type = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_RS<sm90::Major::K, sm90::Major::K>;
};
template <>
struct ProductAtom<2, 64> {
  using type = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_RS<sm90::Major::K, sm90::Major::K>;
};
template <>
struct ProductAtom<2, 128> {
  using type = cute::SM90::GMMA::MMA_64x128x16_F32F16F16_RS<sm90::Major::K, sm90::Major::K>;
};

// Warpgroups and what a product has. With fp8, a consumer's product takes 128 keys, which share what is loaded of
// weights; with 16 bits they would not leave room for the scores. There a third consumer hides more of the sums.
// Where consumers can do with less, the warp that loads weights has registers for several loads at a time.
template <int kType, int kD, int kHeads>
struct Shape {
  static constexpr bool kManyHeads = kHeads > 64;
  static constexpr int kRowTiles = kType == 0 && !kManyHeads ? 2 : 1;  // of 64 keys
  static constexpr int kColumns = kManyHeads ? 128 : 64;               // heads, of one query or several
  static constexpr int kConsumers = kType == 0 || kManyHeads ? 2 : 3;
  static constexpr bool kManyLoads = kConsumers == 3 || (kD == 128 && !kManyHeads);
  using Warpgroups = sm90::Warpgroups<kConsumers, kConsumers == 3 ? 80 : kManyLoads ? 72 : 56,
                                      kConsumers == 3 ? 144 : kManyLoads ? 216 : 224>;
};

template <int kTypeArg, int kDArg, int kHeadsArg, bool kFilledArg>
struct Config : Shape<kTypeArg, kDArg, kHeadsArg>::Warpgroups {
  using ThisShape = Shape<kTypeArg, kDArg, kHeadsArg>;
  static constexpr int kConsumers = ThisShape::kConsumers;
  static constexpr int kType = kTypeArg;
  static constexpr int kHeads = kHeadsArg;
  static constexpr bool kFilled = kFilledArg;
  static constexpr int kElementBytes = kType == 0 ? 1 : 2;
  static constexpr int kRowBytes = kDArg * kElementBytes;          // of a head, and of a key
  static constexpr int kSpan = kRowBytes < 128 ? kRowBytes : 128;  // bytes of a row in one swizzled tile
  static constexpr int kColumnTiles = kRowBytes / kSpan;
  static constexpr int kSteps = kRowBytes / 32;  // products of one sum

  // A consumer holds `kKeyRows` keys in registers and goes through the query tile in groups of `kGroupQueries`. Two
  // groups' scores are in registers: one is multiplied while the other is summed over heads.
  static constexpr int kRowTiles = ThisShape::kRowTiles;
  static constexpr int kKeyRows = 64 * kRowTiles;
  static constexpr int kColumns = ThisShape::kColumns;
  static constexpr int kGroupQueries = kColumns / kHeads;
  static constexpr int kScores = kColumns / 2;  // of a thread, in a row tile

  static constexpr int kQueryTileBytes = 65536;
  static constexpr int kMostQueries = 64;
  static constexpr int kQueries = kQueryTileBytes / (kHeads * kRowBytes) < kMostQueries
                                      ? kQueryTileBytes / (kHeads * kRowBytes)
                                      : kMostQueries;  // of a query tile
  static constexpr int kGroups = kQueries / kGroupQueries;
  static constexpr int kQueryBuffers = 2;
  static constexpr int kWeightLoads = ThisShape::kManyLoads ? 8 : 2;  // of a lane, at a time

  // Sums of four lanes are handed out by way of shared memory: a store and a load instead of three shuffles and six
  // selects. Two groups have places, so that one is stored while other lanes still load of the one before.
  static constexpr bool kThroughShared = kRowTiles == 2 && kGroupQueries <= 2;
  static constexpr int kSumBuffers = 2;

  static constexpr int kKeyTileBytes = kKeyRows * kRowBytes;
  static constexpr int kOwnStages = 65536 / kKeyTileBytes / kConsumers >= 2 ? 2 : 1;  // of a consumer
  static constexpr int kKeyStages = kOwnStages * kConsumers;

  using Atom = typename ProductAtom<kType, kColumns>::type;

  static_assert(kDArg == 64 || kDArg == 128);
  static_assert(kHeads == 8 || kHeads == 16 || kHeads == 32 || kHeads == 64 || kHeads == 128);
  static_assert(kGroups % 2 == 0, "two sets of scores, used in turn");
  static_assert(kQueryBuffers * kQueries * kHeads * kRowBytes + kKeyStages * kKeyTileBytes <= 212 * 1024);
};

// Heads that only fill up need care where keys can be infinite.
using ThisConfig = Config<CUPYMLA_TYPE, CUPYMLA_D, CUPYMLA_HEADS, CUPYMLA_FILLED != 0 && CUPYMLA_TYPE != 0>;

}  // namespace cupymla::indexer_logits
