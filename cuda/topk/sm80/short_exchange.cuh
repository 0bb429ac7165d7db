// What the warps that keep a short row together tell each other: those of one CTA, or of a cluster. Each of them hands
// a word or two to all, and goes on when it has those of all.
//
// CUPYMLA_CLUSTER: 0: a CTA keeps its row; 1: the CTAs of a cluster do. Then everything goes to the shared memory of
// all of them, so that none has to tell another what it has found.
//
// barrier  | arrivals                               | who waits           | what it says
// ---------+----------------------------------------+---------------------+-------------------------------------------
// told[b]  | thread 0 when it has the words before; | all                 | `words[b]` of all warps are there
//          | 8 bytes of each warp of the cluster    |                     |
// counted  | a lane when it has the counts before;  | the warp whose bins | `counts` of the bins of one warp are
//          | 256 bytes of each CTA                  | have the rank       | there, of all CTAs
// few_told | thread 0 when it knows how many;       | all                 | `few` is there
//          | 4 bytes of each entry                  |                     |
//
// A CTA that keeps its row has none of these: there it is __syncthreads. What is stored in the background is all that
// these barriers tell of: unlike __syncthreads they do not order what a thread has written otherwise.
//
// What was told is overwritten behind the cluster's barrier alone, in `renew`. Bytes may come before the arrival that
// says how many they will be: a phase does not end without it.
#pragma once

#include "block.cuh"

#if CUPYMLA_CLUSTER
#include "../../common/cluster.cuh"
#endif

namespace cupymla::topk {

constexpr bool kClustered = CUPYMLA_CLUSTER != 0;
constexpr int kMostParts = kClustered ? 8 : 1;  // CTAs that keep a row

// What warps tell: each has words of its own.
enum Told : uint32_t { kExtrema, kBinSums, kSelected, kTold };

struct alignas(16) ShortStorage {
  uint2 words[kTold][kMostParts * kMaxWarps];  // of all warps, those of a CTA side by side
  uint32_t few[kFew];                          // keys
  // These are read together: no other word that changes may be among them.
  alignas(16) uint4 found;  // the bin of the wanted rank, the rank in it, how many entries it has, and CTAs before this
  uint32_t gathered;        // entries of this CTA's in `few`
#if CUPYMLA_CLUSTER
  uint2 counts[kMostParts][32];  // of the four bins of each lane, 16 bits each
  Mbarrier told[kTold], counted, few_told;
#endif
};

class Exchange {
 public:
  ShortStorage& storage;
  const Thread& thread;

#if CUPYMLA_CLUSTER
  const uint32_t rank = cluster_rank(), parts = cluster_size();
#else
  static constexpr uint32_t rank = 0, parts = 1;
#endif

  // All threads, behind what they have written that others are to see; `begin` comes before anything else is called.
  __device__ __forceinline__ Exchange(ShortStorage& storage, const Thread& thread) : storage(storage), thread(thread) {
#if CUPYMLA_CLUSTER
    if (thread.index == 0) {
#pragma unroll
      for (Mbarrier& barrier : storage.told) barrier.init(1);
      storage.counted.init(1);
      storage.few_told.init(1);
      fence_mbarrier_init();
#pragma unroll
      for (uint32_t what = 0; what < kTold; ++what) expect_words(what);
      expect_counts();
    }
    __syncwarp();
    cluster_arrive();
#endif
  }

  // The number of the row, among all of the launch.
  __device__ __forceinline__ uint32_t row() const { return blockIdx.x / parts; }

  // The others' memory may be written from here on.
  __device__ __forceinline__ void begin() {
#if CUPYMLA_CLUSTER
    cluster_wait();
#endif
  }

  // Before the same is told again.
  __device__ __forceinline__ void renew() const {
#if CUPYMLA_CLUSTER
    cluster_arrive();
    cluster_wait();
#endif
  }

  // Words of all warps, in the order of CTAs and their warps. A warp's lanes have the same `word`.
  __device__ __forceinline__ const uint2* tell(Told what, uint2 word) {
    uint2* words = storage.words[what];
    const uint32_t place = rank * thread.warps + thread.warp;
#if CUPYMLA_CLUSTER
    if (static_cast<uint32_t>(thread.lane) < parts) {
      cluster_store_async_uint2(there(words + place, thread.lane), word.x, word.y,
                                there(&storage.told[what], thread.lane));
    }
    storage.told[what].wait(phases >> what & 1u);
    phases ^= 1u << what;
    if (thread.index == 0) expect_words(what);
#else
    if (thread.lane == 0) words[place] = word;
    __syncthreads();
#endif
    return words;
  }

  // Whether a part of the row comes before this CTA's.
  __device__ __forceinline__ bool is_before(uint32_t part) const {
#if CUPYMLA_CLUSTER
    return part < rank;
#else
    return false;
#endif
  }

  // Calls `visit(there, part, word)` for one warp of each CTA: that with the number of this lane, if it is there. All
  // words are loaded before any is looked at.
  template <typename Visit>
  __device__ __forceinline__ void visit_words(const uint2* words, const Visit& visit) const {
    const uint32_t lane = static_cast<uint32_t>(thread.lane);
    const uint2* own = words + min(lane, thread.warps - 1);
    uint2 word[kMostParts];
#pragma unroll
    for (uint32_t part = 0; part < kMostParts; ++part) word[part] = own[min(part, parts - 1) * thread.warps];
#pragma unroll
    for (uint32_t part = 0; part < kMostParts; ++part) {
      visit(part < parts && lane < thread.warps, part, word[part]);
    }
  }

#if CUPYMLA_CLUSTER
  // Sums over all CTAs of the counts of one warp's bins, which that warp calls in each of them.
  __device__ __forceinline__ uint4 add_counts(const uint4& own) {
#pragma unroll
    for (uint32_t part = 0; part < kMostParts; ++part) {
      if (part >= parts) continue;
      cluster_store_async_uint2(there(&storage.counts[rank][thread.lane], part), own.x | own.y << 16,
                                own.z | own.w << 16, there(&storage.counted, part));
    }
    storage.counted.wait(phases >> kTold & 1u);
    if (thread.lane == 0) expect_counts();
    uint2 counts[kMostParts];
#pragma unroll
    for (uint32_t part = 0; part < kMostParts; ++part) counts[part] = storage.counts[min(part, parts - 1)][thread.lane];
    uint4 sum = make_uint4(0u, 0u, 0u, 0u);
#pragma unroll
    for (uint32_t part = 0; part < kMostParts; ++part) {
      const uint2 of = part < parts ? counts[part] : make_uint2(0u, 0u);
      sum = make_uint4(sum.x + (of.x & 0xffffu), sum.y + (of.x >> 16), sum.z + (of.y & 0xffffu), sum.w + (of.y >> 16));
    }
    return sum;
  }

  // Behind `add_counts`: entries of CTAs before this one in one of the lane's four bins.
  __device__ __forceinline__ uint32_t before_in_bin(uint32_t bin) const {
    uint32_t before = 0;
#pragma unroll
    for (uint32_t part = 0; part < kMostParts - 1; ++part) {
      if (part < rank) before += reinterpret_cast<const uint16_t*>(&storage.counts[part][thread.lane])[bin];
    }
    return before;
  }
#endif

  // All threads, behind `add_counts` of one warp.
  __device__ __forceinline__ void count_search() { phases ^= 1u << kTold; }

  // An entry of this CTA's becomes one of the few.
  __device__ __forceinline__ void add_to_few(uint32_t before, uint32_t key) const {
    uint32_t* place = storage.few + before + atomicAdd(&storage.gathered, 1u);
#if CUPYMLA_CLUSTER
#pragma unroll
    for (uint32_t part = 0; part < kMostParts; ++part) {
      if (part < parts) cluster_store_async_uint32(there(place, part), key, there(&storage.few_told, part));
    }
#else
    *place = key;
#endif
  }

  // Waits until all few are there. To be called once.
  __device__ __forceinline__ void gather_few(uint32_t entries) const {
#if CUPYMLA_CLUSTER
    if (thread.index == 0) storage.few_told.arrive_and_expect(entries * static_cast<uint32_t>(sizeof(uint32_t)));
    storage.few_told.wait(0);
#else
    __syncthreads();
#endif
  }

 private:
  uint32_t phases = 0;  // a bit for each barrier: its parity; that of `counted` behind those of words

#if CUPYMLA_CLUSTER
  static __device__ __forceinline__ uint32_t there(const void* own, uint32_t part) {
    return cluster_address(smem_address(own), part);
  }
  __device__ __forceinline__ void expect_words(uint32_t what) const {
    storage.told[what].arrive_and_expect(parts * thread.warps * static_cast<uint32_t>(sizeof(uint2)));
  }
  __device__ __forceinline__ void expect_counts() const {
    storage.counted.arrive_and_expect(parts * static_cast<uint32_t>(sizeof(storage.counts[0])));
  }
#endif
};

}  // namespace cupymla::topk
