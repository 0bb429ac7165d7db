// What a consumer warpgroup of a CTA of a cluster holds, and the first half of its work on a block: P and dS of a head
// tile of its CTA's heads, with the columns of both CTAs.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/math.cuh"
#include "../../common/matrix.cuh"
#include "../../common/registers.cuh"
#include "../../common/memory.cuh"
#include "cluster_atoms.cuh"
#include "cluster_rows.cuh"
#include "cluster_work.cuh"
#include "uniform_places.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config, typename Element, int kWarpgroupIdx>
struct ClusterConsumer {
  static constexpr int kScores = Config::kTileKeys * 2 * Config::kHeadTile / Config::kWarpgroup;  // of a head tile
  static constexpr int kOwn = kScores / 2;                                               // the first half of them
  static constexpr int kOwnColumns = kOwn / 2;  // heads, of two entries
  static constexpr int kWide = 2 * Config::kHeadTile * Config::kColumns / Config::kWarpgroup;
  static constexpr int kNarrow =
      Config::kHasRope ? 2 * Config::kHeadTile * Config::kRopeColumns / Config::kWarpgroup : 1;

  ClusterStorage<Config>& storage;
  const Parameters& params;
  const uint32_t thread;  // its number in the warpgroup

  float dq_wide[kWide];      // of 64 heads, this CTA's value columns
  float dq_narrow[kNarrow];  // its RoPE columns
  float p_ds[kOwn];          // P of its own heads, until there is dS
  int32_t rows[2];  // where sums of this thread's two entries of the block go, see ClusterRowTargets
  // In one register: a bit for each of this thread's own heads, set where there is such a head; whether a block of this
  // head block had a valid entry; the block's parity, which also says which set its tokens are in; whether either of
  // this thread's entries is valid; and the number of the block, for which the host sees to it that there is room.
  uint32_t bits = 0;
  static constexpr uint32_t kOccupied = 0x100u, kParity = 0x200u, kValid = 0x400u, kBlock = 0x1000u;

  __device__ __forceinline__ ClusterConsumer(ClusterStorage<Config>& storage, const Parameters& params)
      : storage(storage),
        params(params),
        thread(numbered_thread(Config::kWarpgroup)) {}

  __device__ __forceinline__ uint32_t parity() const { return bits / kParity & 1u; }
  __device__ __forceinline__ bool occupied() const { return (bits & kOccupied) != 0; }
  __device__ __forceinline__ int32_t head_block() const { return stored_head_block(storage); }
  __device__ __forceinline__ int32_t first_entry() const {
    return static_cast<int32_t>(bits / kBlock) * Config::kTileKeys;
  }

  // Sets out on a head block, whose row statistics are in shared memory.
  __device__ __forceinline__ void begin_head_block(int32_t head_block) {
    bits &= kParity;
#pragma unroll
    for (int c = 0; c < kOwnColumns; ++c) {
      const int own = kWarpgroupIdx * Config::kHeadTile + c / 2 * 8 + 2 * (fresh_thread() % 4) + c % 2;
      if (head_of_place<Config>(head_block, place_of_own<Config>(own)) < params.h_q) bits |= 1u << c;
    }
#pragma unroll
    for (int i = 0; i < kWide; ++i) dq_wide[i] = 0.f;
#pragma unroll
    for (int i = 0; i < kNarrow; ++i) dq_narrow[i] = 0.f;
  }

  // The same, for addresses that are worked out where they are used: ptxas would keep, and spill, what does not change
  // from block to block.
  __device__ __forceinline__ uint32_t fresh_thread() const {
    uint32_t same = thread;
    make_opaque(same);
    return same;
  }
  // The first of its accumulator rows; the other one is eight further down.
  __device__ __forceinline__ uint32_t row() const {
    const uint32_t same = fresh_thread();
    return same / 32 * 16 + same % 32 / 4;
  }

  // Scores of a block, entries x heads, of this CTA's columns; its own heads first.

  // `between` is called with the number of each product when it has been issued: a warp issues no faster than products
  // are made, so what it is to do meanwhile has to stand between them.
  template <int kOf, typename Between>
  __device__ __forceinline__ void issue(float (&scores)[kScores], uint32_t base, Between between) {
    const uint32_t heads = place_from(base, storage, kOf == kOfScores ? storage.q[0] : storage.dout[0]);
    const uint64_t a = sm90::k_major_descriptor(place_from(base, storage, storage.k[0]));
    const uint64_t b = sm90::k_major_descriptor(heads + kWarpgroupIdx * 2 * Config::kHeadTile * kSwizzleRowBytes);
#pragma unroll
    for (int tile = 0; tile < Config::kValueTiles; ++tile) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        sm90::mma<typename ClusterAtoms<Element>::Scores>(
            scores, sm90::descriptor_advance(a, tile * Config::kTileBytes + step * 32),
            sm90::descriptor_advance(b, tile * Config::kHeadTileBytes + step * 32), tile == 0 && step == 0);
        between(tile * 4 + step);
      }
    }
    if constexpr (kOf == kOfScores && Config::kHasRope) issue_rope_scores(scores, base);
  }

  __device__ __forceinline__ void issue_rope_scores(float (&scores)[kScores], uint32_t base) {
    const uint64_t a = sm90::swizzle_64_k_major_descriptor(place_from(base, storage, storage.k_rope));
    const uint64_t b = sm90::swizzle_64_k_major_descriptor(place_from(base, storage, storage.q_rope) +
                                                         kWarpgroupIdx * 2 * Config::kHeadTile * Config::kRopeRowBytes);
#pragma unroll
    for (int step = 0; step < Config::kRopeColumns / 16; ++step) {
      sm90::mma<typename ClusterAtoms<Element>::Scores>(scores, sm90::descriptor_advance(a, step * 32),
                                                        sm90::descriptor_advance(b, step * 32));
    }
  }

  __device__ __forceinline__ void wait_for_keys() {
    storage.full.wait(parity());
    fence_async_shared();
  }

  // S of the block whose keys are in; left in flight.
  template <typename Between>
  __device__ __forceinline__ void issue_scores(float (&scores)[kScores], Between between) {
    const uint32_t base = uniform_base(storage);
    sm90::warpgroup_discard_operand(scores);
    sm90::wgmma_fence();
    issue<kOfScores>(scores, base, between);
    sm90::wgmma_commit();
  }

  __device__ __forceinline__ void finish_scores(float (&scores)[kScores]) {
    sm90::wgmma_wait<0>();
    sm90::warpgroup_fence_operand(scores);
  }

  // What follows when S is there: P and dS of the own heads, to this CTA's tiles and the other's.
  __device__ __forceinline__ void make_p_ds(float (&scores)[kScores]) {
    float gradients[kScores];
    read_validity();
    storage.room.wait(parity() ^ 1u);
    hand_over<kOfScores>(scores);
    // P is made amid dP's products where there are registers for both.
    if constexpr (Config::kHasRope) make_probabilities(scores);
    const uint32_t base = uniform_base(storage);
    sm90::warpgroup_discard_operand(gradients);
    sm90::wgmma_fence();
    issue<kOfScoreGradients>(gradients, base, [](int) {});
    sm90::wgmma_commit();
    if constexpr (!Config::kHasRope) make_probabilities(scores);
    finish_scores(gradients);
    hand_over<kOfScoreGradients>(gradients);
    make_score_gradients(gradients);
    say_ready();
  }

  // Where the warp's own half of a row lies in its tile: for each lane a chunk of sixteen bytes in the first eight
  // rows, and one in the last. Lanes of neighbouring rows take rows four apart, whose halves are in different banks.
  __device__ __forceinline__ uint32_t own_chunk() const {
    const uint32_t same = fresh_thread();
    const uint32_t place = same / 4 % 8;
    const uint32_t chunk_row = (place & 1) * 4 + (place >> 1);
    return same / 32 * 2 * kSwizzleAtomBytes + swizzle_128(chunk_row, same % 4);
  }
  template <int kOf>
  __device__ __forceinline__ uint32_t tile_address() const {
    return smem_address(storage.p_ds[kOf][0]) + kWarpgroupIdx * Config::kTileBytes + own_chunk();
  }
  template <int kOf>
  __device__ __forceinline__ uint32_t spare_address() const {
    const uint32_t same = fresh_thread();
    return smem_address(storage.spare[kOf]) + (kWarpgroupIdx * 256 + same / 32 * 64 + same % 32) * 16;
  }

  // Where that lies in the other CTA.
  static __device__ __forceinline__ uint32_t at_other(uint32_t address) {
    return cluster_address(address, 1 - asked_rank());
  }

  // The other CTA's heads' scores, of this one's columns, to the same warp there.
  template <int kOf>
  __device__ __forceinline__ void hand_over(const float (&scores)[kScores]) {
    const uint32_t barrier = at_other(smem_address(&storage.partial[kOf][kWarpgroupIdx * 4 + fresh_thread() / 32]));
    const uint32_t tile = at_other(tile_address<kOf>()), spare = at_other(spare_address<kOf>());
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* s = scores + kOwn + i * 4;
      const uint32_t address = i < 2 ? tile + i * kSwizzleAtomBytes : spare + (i - 2) * 512;
      cluster_store_async_float4(address, s[0], s[1], s[2], s[3], barrier);
    }
  }

  // Waits for what the other CTA's columns make of the own heads' scores.
  template <int kOf>
  __device__ __forceinline__ void await_other() {
    const uint32_t same = fresh_thread();
    Mbarrier& barrier = storage.partial[kOf][kWarpgroupIdx * 4 + same / 32];
    if (same % 32 == 0) barrier.arrive_and_expect(kOwn * sizeof(float) * 32);
    barrier.wait(parity());
  }

  // Four of those numbers, which belong to scores 4 * i and the next three.
  static __device__ __forceinline__ float4 from_other(uint32_t tile, uint32_t spare, int i) {
    return load_shared_float4(i < 2 ? tile + i * kSwizzleAtomBytes : spare + (i - 2) * 512);
  }

  // Leaves in `p_ds` what `make` makes of each own head's score, of the columns of both CTAs, and a number of that
  // head.
  template <int kOf, typename Make>
  __device__ __forceinline__ void make_own(const float (&scores)[kScores], const float (&of_heads)[Config::kOwnHeads],
                                           Make make) {
    await_other<kOf>();
    const uint32_t tile = tile_address<kOf>(), spare = spare_address<kOf>();
#pragma unroll
    for (int c = 0; c < kOwnColumns; c += 2) {
      const float4 other = from_other(tile, spare, c / 2);
      const float2 number = pair_of(of_heads, c);
      p_ds[2 * c] = make(2 * c, scores[2 * c] + other.x, number.x);
      p_ds[2 * c + 1] = make(2 * c + 1, scores[2 * c + 1] + other.y, number.y);
      p_ds[2 * c + 2] = make(2 * c + 2, scores[2 * c + 2] + other.z, number.x);
      p_ds[2 * c + 3] = make(2 * c + 3, scores[2 * c + 3] + other.w, number.y);
    }
    __syncwarp();  // the warp writes next where it has read
  }

  // P of the own heads from S, in `p_ds`, and as products read it.
  __device__ __forceinline__ void make_probabilities(const float (&scores)[kScores]) {
    make_own<kOfScores>(scores, storage.lse,
                        [&](int i, float score, float lse) { return probability(i, score, lse); });
    if (params.attn_dist != nullptr) sum_over_heads();
#pragma unroll
    for (int c = 0; c < kOwnColumns; c += 2) {
      const float2 share = pair_of(storage.share, c);
#pragma unroll
      for (int i = 2 * c; i < 2 * c + 4; ++i) p_ds[i] *= i % 2 == 0 ? share.x : share.y;
    }
    put_out<kOfScores>(p_ds);
  }

  __device__ __forceinline__ float probability(int i, float score, float lse) const {
    const float p = exp2_approx(fmaf(score, params.scale_log2, -lse));
    return counts(i) ? p : 0.f;
  }

  // Whether there is such an entry and such a head.
  __device__ __forceinline__ bool counts(int i) const {
    const uint32_t both = kValid << (i / 2 % 2) | 1u << (i / 4 * 2 + i % 2);
    return (bits & both) == both;
  }

  // Which of this thread's two entries are valid, and where sums of these go.
  __device__ __forceinline__ void read_validity() {
    const uint64_t words = *reinterpret_cast<const uint64_t*>(storage.valid);
    if (words != 0) bits |= kOccupied;
    bits &= ~(3 * kValid);
    const QueryPosition query = stored_position(storage);
    const int32_t first_row = static_cast<int32_t>(row());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t entry = first_row + 8 * r;
      const bool is_valid = ((words >> entry) & 1u) != 0;
      if (is_valid) bits |= kValid << r;
      if (Config::kPartials) {
        const int32_t place = query.batch * params.s_q + query.query - static_cast<int32_t>(params.query_begin);
        rows[r] = is_valid ? place * params.topk + first_entry() + entry : -1;
      } else {
        const int32_t spare = static_cast<int32_t>(params.kv_rows) + entry;
        rows[r] = is_valid ? query.batch * params.s_kv + storage.tokens[parity()][entry] : spare;
      }
    }
  }

  static __device__ __forceinline__ int32_t first_column() {
    return static_cast<int32_t>(asked_rank()) * Config::kColumns;
  }

  // Numbers of two neighbouring own heads.
  __device__ __forceinline__ float2 pair_of(const float (&of_heads)[Config::kOwnHeads], int column) const {
    return *reinterpret_cast<const float2*>(of_heads + kWarpgroupIdx * Config::kHeadTile + column / 2 * 8 +
                                            2 * (fresh_thread() % 4));
  }

  // Leaves the sums of the block's P (without the sink) over the own heads in shared memory, `p_ds` being P but for
  // the factors of its heads; those of the second CTA with the first.
  __device__ __forceinline__ void sum_over_heads() {
    float sums[2] = {0.f, 0.f};
#pragma unroll
    for (int c = 0; c < kOwnColumns; c += 2) {
      const float2 factor = pair_of(storage.factor, c);
#pragma unroll
      for (int i = 2 * c; i < 2 * c + 4; ++i) {
        sums[i / 2 % 2] = fmaf(p_ds[i], i % 2 == 0 ? factor.x : factor.y, sums[i / 2 % 2]);
      }
    }
    const bool is_first = asked_rank() == 0;
    const uint32_t first_row = row(), lane = fresh_thread() % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(sums[r]);
      if (lane % 4 != 0) continue;
      if (is_first) {
        storage.distribution[kWarpgroupIdx][first_row + 8 * r] = sum;
      } else {
        cluster_store_async_float(at_other(smem_address(
                                      &storage.other_distribution[kWarpgroupIdx][first_row + 8 * r])),
                                  sum, at_other(smem_address(&storage.distribution_in)));
      }
    }
  }

  // dS of the own heads from dP and P, as products read it.
  __device__ __forceinline__ void make_score_gradients(const float (&gradients)[kScores]) {
    make_own<kOfScoreGradients>(gradients, storage.delta,
                                [&](int i, float dp, float delta) { return gradient(i, dp, delta); });
    put_out<kOfScoreGradients>(p_ds);
  }

  // Where there is no such entry or head P is zero, but zero times a number that is not finite is none.
  __device__ __forceinline__ float gradient(int i, float dp, float delta) const {
    return counts(i) ? p_ds[i] * (dp - delta) * params.sm_scale : 0.f;
  }

  // Rounded, to the tile of this CTA, and from there to the other's, where they are the other half of a row.
  template <int kOf>
  __device__ __forceinline__ void put_out(const float (&values)[kOwn]) {
    const uint32_t same = fresh_thread();
    const uint32_t rows = smem_address(storage.p_ds[kOf][0]) + kWarpgroupIdx * Config::kTileBytes;
#pragma unroll
    for (int step = 0; step < Config::kHeadTile / 16; ++step) {
      const float* v = values + step * 8;
      const uint32_t place = rows + swizzle_128(same / 32 * 16 + same % 16, step * 2 + same % 32 / 16);
      store_matrix_x4(place, pack_pair<Element>(v[0], v[1]), pack_pair<Element>(v[2], v[3]),
                      pack_pair<Element>(v[4], v[5]), pack_pair<Element>(v[6], v[7]));
    }
    __syncwarp();
    const uint32_t here = tile_address<kOf>();
    const uint32_t there = at_other(here ^ (kSwizzleRowBytes / 2)), ready = at_other(smem_address(&storage.ready));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 chunk = load_shared_float4(here + i * kSwizzleAtomBytes);
      cluster_store_async_float4(there + i * kSwizzleAtomBytes, chunk.x, chunk.y, chunk.z, chunk.w, ready);
    }
  }

  // This thread's numbers are out; one of all says how much the other CTA sends.
  __device__ __forceinline__ void say_ready() {
    if (threadIdx.x == 0) {
      storage.ready.arrive_and_expect(2 * Config::kTileKeys * Config::kOwnHeads * 2);
    } else {
      storage.ready.arrive();
    }
  }
};

}  // namespace cupymla::sparse_mla_bwd
