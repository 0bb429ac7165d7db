// D = A B transposed by tcgen05.mma.ws, twice: with A in shared memory and with A in Tensor Memory. A is (ROWS, 64) and
// B (128, 64) in bf16, D two matrices of (ROWS, 128) in float. One CTA of 128 threads; thread t owns lane t.
#include "common/entry.cuh"
#include "common/sm100/tcgen05.cuh"

#ifndef ROWS
#define ROWS 64
#endif

namespace cupymla::weight_stationary {

constexpr uint32_t kM = ROWS, kN = 128, kK = 64, kThreads = 128;
constexpr uint32_t kDColumns = kN * kM / 128, kAColumns = kK / 2, kAllocated = 512;

struct Parameters {
  const uint4 *a, *b;
  float* d;
};

struct alignas(1024) Storage {
  uint8_t a[kM * kK * 2];
  uint8_t b[kN * kK * 2];
  Mbarrier done;
  uint32_t tmem;
};

// Rows of 128 bytes, whose chunks of 16 bytes change places as descriptor_128b wants them.
__device__ __forceinline__ void stage(uint8_t* to, const uint4* from, uint32_t rows) {
  for (uint32_t i = threadIdx.x; i < rows * 8; i += kThreads) {
    const uint32_t row = i / 8, chunk = i % 8 ^ row % 8;
    *reinterpret_cast<uint4*>(to + row * 128 + chunk * 16) = from[i];
  }
}

__device__ __forceinline__ void write_back(float* d, uint32_t address) {
  float values[kDColumns];
  sm100::tmem_load(values, address + (threadIdx.x / 32 * 32 << 16));
  sm100::wait_loads();
  const uint32_t row = threadIdx.x % kM, first = threadIdx.x / kM * kDColumns;
  for (uint32_t i = 0; i < kDColumns; ++i) d[row * kN + first + i] = values[i];
}

}  // namespace cupymla::weight_stationary

extern "C" __global__ void __launch_bounds__(cupymla::weight_stationary::kThreads)
    weight_stationary(const cupymla::weight_stationary::Parameters parameters) {
  using namespace cupymla;
  using namespace cupymla::weight_stationary;
  extern __shared__ __align__(1024) unsigned char memory[];
  Storage& storage = *reinterpret_cast<Storage*>(memory);
  constexpr uint32_t kInstruction = sm100::instruction_bf16(kM, kN);
  if (threadIdx.x == 0) {
    storage.done.init(1);
    fence_mbarrier_init();
  }
  if (threadIdx.x / 32 == 0) {
    sm100::tmem_allocate(&storage.tmem, kAllocated);
    sm100::tmem_relinquish();
  }
  stage(storage.a, parameters.a, kM);
  stage(storage.b, parameters.b, kN);
  fence_async_shared();
  sm100::fence_before_sync();
  __syncthreads();
  sm100::fence_after_sync();
  const uint32_t d = storage.tmem, second = d + kDColumns, a_columns = second + kDColumns;
  uint32_t row[kAColumns];
  const auto* mine = reinterpret_cast<const uint32_t*>(parameters.a) + threadIdx.x % kM * kAColumns;
  for (uint32_t i = 0; i < kAColumns; ++i) row[i] = mine[i];
  sm100::tmem_store(a_columns + (threadIdx.x / 32 * 32 << 16), row);
  sm100::wait_stores();
  sm100::fence_before_sync();
  __syncthreads();
  sm100::fence_after_sync();
  if (threadIdx.x == 0) {
    const uint64_t a = sm100::descriptor_128b(smem_address(storage.a));
    const uint64_t b = sm100::descriptor_128b(smem_address(storage.b));
    for (uint32_t k = 0; k < kK / 16; ++k) {
      sm100::mma_ws_f16(d, a + 2 * k, b + 2 * k, kInstruction, k != 0);
      sm100::mma_ws_f16_from_tmem(second, a_columns + 8 * k, b + 2 * k, kInstruction, k != 0);
    }
    sm100::commit(storage.done);
  }
  storage.done.wait(0);
  sm100::fence_after_sync();
  write_back(parameters.d, d);
  write_back(parameters.d + kM * kN, second);
  sm100::fence_before_sync();
  __syncthreads();
  sm100::fence_after_sync();
  if (threadIdx.x / 32 == 0) sm100::tmem_free(storage.tmem, kAllocated);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::weight_stationary::kThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::weight_stationary::Storage),
                     parameter_bytes = sizeof(cupymla::weight_stationary::Parameters));
