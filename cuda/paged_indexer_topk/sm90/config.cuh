// Numbers of the scoring kernel, and the budgets they must keep. The products are those of indexer_logits, so that a
// score has the same bits.
#pragma once

#include "../../indexer_logits/sm90/storage.cuh"

namespace cupymla::paged_indexer {

// With up to 64 heads a third consumer hides more of the others' waits; two sets of 64 products would not do as well
// for the one query that a request usually has.
template <bool kManyHeads>
using Warpgroups = conditional_t<kManyHeads, sm90::Warpgroups<2, 136, 184>, sm90::Warpgroups<3, 104, 136>>;

template <int kTypeArg, int kDArg, int kHeadsArg, bool kFilledArg>
struct Config : Warpgroups<(kHeadsArg > 64)> {
  using Groups = Warpgroups<(kHeadsArg > 64)>;
  static constexpr int kConsumers = Groups::kConsumers;
  static constexpr int kType = kTypeArg;
  static constexpr int kHeads = kHeadsArg;  // with those that only fill up
  static constexpr bool kFilled = kFilledArg;
  static constexpr bool kHasScales = kType == 0;
  static constexpr int kElementBytes = kType == 0 ? 1 : 2;
  static constexpr int kRowBytes = kDArg * kElementBytes;          // of a head, and of a key
  static constexpr int kSpan = kRowBytes < 128 ? kRowBytes : 128;  // bytes of a row in one swizzled tile
  static constexpr int kColumnTiles = kRowBytes / kSpan;
  static constexpr int kSteps = kRowBytes / 32;  // products of one sum

  static constexpr int kTileKeys = 64;  // rows of a product
  static constexpr int kColumns = kHeads > 64 ? 128 : 64;
  static constexpr int kGroupQueries = kColumns / kHeads;
  static constexpr int kScores = kColumns / 2;  // of a thread

  // A query tile: what goes over a request's keys at once. A request of more queries is several.
  static constexpr int kQueryTileBytes = 65536;
  static constexpr int kMostQueries = 64;
  static constexpr int kQueries = kQueryTileBytes / (kHeads * kRowBytes) < kMostQueries
                                      ? kQueryTileBytes / (kHeads * kRowBytes)
                                      : kMostQueries;
  static constexpr int kQueryBuffers = 2;
  static constexpr int kGroupBytes = kColumns * kRowBytes;
  static constexpr int kQueryBufferBytes = kQueries * kHeads * kRowBytes;

  static constexpr int kKeyTileBytes = kTileKeys * kRowBytes;
  // A stage is always filled by the same warp and read by the same consumer. So each of them knows of every phase of
  // its barriers: a wait by parity would otherwise be let through by the phase before the last.
  static constexpr int kKeyWarps = kConsumers;  // that load key tiles, in turn
  static constexpr int kRoundsOf80K = 81920 / kKeyTileBytes / kConsumers;
  static constexpr int kRounds = kRoundsOf80K < 2 ? 2 : kRoundsOf80K > 4 ? 4 : kRoundsOf80K;  // stages of a consumer
  // A launch of few queries has more stages, where it leaves room behind their heads.
  static constexpr int kMostRounds = kColumnTiles == 1 ? 5 : kRounds;
  static constexpr int kMostStages = kConsumers * kMostRounds;
  static constexpr int kFurtherBytes = kConsumers * (kMostRounds - kRounds) * kKeyTileBytes;
  static constexpr int kFewQueryBytes = kQueryBufferBytes - kFurtherBytes / kQueryBuffers;  // of a buffer
  static constexpr int kFewQueries = kFewQueryBytes / kGroupBytes * kGroupQueries;

  using Atom = typename indexer_logits::ProductAtom<kType, kColumns>::type;

  static_assert(kQueries % kGroupQueries == 0);
  static_assert(kKeyWarps <= 3, "one warp of four loads queries");
  static_assert(kKeyWarps == kConsumers);
  static_assert(kFewQueryBytes % 1024 == 0 && kFurtherBytes % kQueryBuffers == 0 && kFewQueries > 0);
};

// Heads that only fill up need care where keys can be infinite.
using ThisConfig = Config<CUPYMLA_TYPE, CUPYMLA_D, CUPYMLA_HEADS, CUPYMLA_FILLED != 0 && CUPYMLA_TYPE != 0>;

}  // namespace cupymla::paged_indexer
