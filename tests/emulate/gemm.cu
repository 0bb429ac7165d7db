// D = A B transposed for Blackwell: A is (m, k) and B (n, k) in bf16, D (m, n) in float, all row-major, with m a
// multiple of 128, n of 64 and k of 64. Small, but with everything that a real kernel has: a ring of TMA loads, two
// accumulators that take turns, an epilogue through shared memory and TMA stores.
//
// barrier      | arrivals            | who waits | what it says
// -------------+---------------------+-----------+-----------------------------------------------
// full[s]      | 1 + bytes (TMA)     | MMA       | the tiles of A and B in stage s are in
// empty[s]     | 1 (commit)          | producer  | the products that read stage s are done
// done[b]      | 1 (commit)          | epilogue  | accumulator b holds a tile of D
// taken[b]     | 128 epilogue        | MMA       | accumulator b has been read
// named 1      | 128 epilogue        | epilogue  | the staging tile is free, or written
//
//   time | producer (warp 0)  | MMA (warp 1)              | epilogue (warps 2-5)
//   -----+--------------------+---------------------------+----------------------------------
//    |   | loads of tile 0    | products of tile 0 into 0 |
//    |   | loads of tile 1    | products of tile 1 into 1 | accumulator 0 -> staging -> D
//    v   |    ...             |    ... into 0             | accumulator 1 -> staging -> D
//  drain |                    | (last commits)            | last stores waited for
#include "common/entry.cuh"
#include "common/ring.cuh"
#include "common/sm100/tcgen05.cuh"
#include "common/tma.cuh"

namespace cupymla::gemm {

constexpr uint32_t kM = 128, kN = 64, kK = 64, kStages = 3, kAccumulators = 2;
constexpr uint32_t kProducer = 0, kMma = 1, kEpilogueWarps = 4, kThreads = 32 * (2 + kEpilogueWarps);
constexpr uint32_t kEpilogueBarrier = 1;
constexpr uint32_t kTileBytes = (kM + kN) * kK * 2;
constexpr uint32_t kColumns = kAccumulators * kN;

struct Parameters {
  uint32_t tiles_m, tiles_n, tiles_k;
};

struct alignas(1024) Storage {
  uint8_t a[kStages][kM * kK * 2];
  uint8_t b[kStages][kN * kK * 2];
  float d[kN / 32][kM][32];
  Mbarrier full[kStages], empty[kStages], done[kAccumulators], taken[kAccumulators];
  uint32_t tmem;
};

static_assert(sizeof(Storage) <= 227 * 1024);

struct Tile {
  uint32_t m, n;
  __device__ __forceinline__ Tile(uint32_t index, const Parameters& parameters)
      : m(index / parameters.tiles_n), n(index % parameters.tiles_n) {}
};

__device__ __forceinline__ void produce(Storage& storage, const TensorMap& a, const TensorMap& b,
                                        const Parameters& parameters) {
  Phases phases;
  uint32_t stage = 0;
  for (uint32_t index = blockIdx.x; index < parameters.tiles_m * parameters.tiles_n; index += gridDim.x) {
    const Tile tile(index, parameters);
    for (uint32_t k = 0; k < parameters.tiles_k; ++k) {
      storage.empty[stage].wait(phases.free(stage));
      storage.full[stage].arrive_and_expect(kTileBytes);
      tma_load_2d(storage.a[stage], a, storage.full[stage], k * kK, tile.m * kM);
      tma_load_2d(storage.b[stage], b, storage.full[stage], k * kK, tile.n * kN);
      phases.advance(stage);
      stage = (stage + 1) % kStages;
    }
  }
}

__device__ __forceinline__ void multiply(Storage& storage, const Parameters& parameters) {
  constexpr uint32_t kInstruction = sm100::instruction_bf16(kM, kN);
  Phases loaded, accumulators;
  uint32_t stage = 0, turn = 0;
  for (uint32_t index = blockIdx.x; index < parameters.tiles_m * parameters.tiles_n; index += gridDim.x) {
    storage.taken[turn].wait(accumulators.free(turn));
    sm100::fence_after_sync();
    const uint32_t d = storage.tmem + turn * kN;
    for (uint32_t k = 0; k < parameters.tiles_k; ++k) {
      storage.full[stage].wait(loaded.full(stage));
      const uint64_t a = sm100::descriptor_128b(smem_address(storage.a[stage]));
      const uint64_t b = sm100::descriptor_128b(smem_address(storage.b[stage]));
      for (uint32_t part = 0; part < kK / 16; ++part) {
        sm100::mma_f16(d, a + 2 * part, b + 2 * part, kInstruction, k + part != 0);
      }
      sm100::commit(storage.empty[stage]);
      loaded.advance(stage);
      stage = (stage + 1) % kStages;
    }
    sm100::commit(storage.done[turn]);
    accumulators.advance(turn);
    turn ^= 1;
  }
}

__device__ __forceinline__ void write_back(Storage& storage, const TensorMap& d, const Parameters& parameters) {
  const uint32_t warp = threadIdx.x / 32 % 4, row = warp * 32 + threadIdx.x % 32;
  const bool leader = threadIdx.x == 64;
  Phases phases;
  uint32_t turn = 0;
  for (uint32_t index = blockIdx.x; index < parameters.tiles_m * parameters.tiles_n; index += gridDim.x) {
    const Tile tile(index, parameters);
    storage.done[turn].wait(phases.full(turn));
    sm100::fence_after_sync();
    uint32_t values[kN / 32][32];
    for (uint32_t part = 0; part < kN / 32; ++part) {
      sm100::tmem_load_32(values[part], storage.tmem + (warp * 32 << 16) + turn * kN + 32 * part);
    }
    sm100::wait_loads();
    sm100::fence_before_sync();
    storage.taken[turn].arrive();
    if (leader) tma_store_wait_read<0>();
    named_barrier_sync(kEpilogueBarrier, 32 * kEpilogueWarps);
    for (uint32_t part = 0; part < kN / 32; ++part) {
      for (uint32_t i = 0; i < 32; ++i) storage.d[part][row][i] = __uint_as_float(values[part][i]);
    }
    fence_async_shared();
    named_barrier_sync(kEpilogueBarrier, 32 * kEpilogueWarps);
    if (leader) {
      for (uint32_t part = 0; part < kN / 32; ++part) {
        tma_store_2d(d, storage.d[part], tile.n * kN + 32 * part, tile.m * kM);
      }
      tma_store_commit();
    }
    phases.advance(turn);
    turn ^= 1;
  }
  if (leader) tma_store_wait<0>();
}

}  // namespace cupymla::gemm

extern "C" __global__ void __launch_bounds__(cupymla::gemm::kThreads)
    gemm(const __grid_constant__ cupymla::TensorMap a, const __grid_constant__ cupymla::TensorMap b,
         const __grid_constant__ cupymla::TensorMap d, const cupymla::gemm::Parameters parameters) {
  using namespace cupymla;
  using namespace cupymla::gemm;
  extern __shared__ __align__(1024) unsigned char memory[];
  Storage& storage = *reinterpret_cast<Storage*>(memory);
  const uint32_t warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kStages; ++i) storage.full[i].init(1), storage.empty[i].init(1);
    for (uint32_t i = 0; i < kAccumulators; ++i) storage.done[i].init(1), storage.taken[i].init(32 * kEpilogueWarps);
    fence_mbarrier_init();
  }
  if (warp == kMma) {
    sm100::tmem_allocate(&storage.tmem, kColumns);
    sm100::tmem_relinquish();
  }
  sm100::fence_before_sync();
  __syncthreads();
  sm100::fence_after_sync();
  if (warp == kProducer) {
    if (threadIdx.x == 0) produce(storage, a, b, parameters);
  } else if (warp == kMma) {
    if (threadIdx.x % 32 == 0) multiply(storage, parameters);
  } else {
    write_back(storage, d, parameters);
  }
  sm100::fence_before_sync();
  __syncthreads();
  sm100::fence_after_sync();
  if (warp == kMma) sm100::tmem_free(storage.tmem, kColumns);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::gemm::kThreads, cluster = 1, smem_bytes = sizeof(cupymla::gemm::Storage),
                     parameter_bytes = sizeof(cupymla::gemm::Parameters));
