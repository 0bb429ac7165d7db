// What the model keeps: one Launch per loaded module, which the host fills before each launch, and one Cta per CTA of
// the grid, all zero at its start. Everything lies in global memory, so that the kernel keeps all its shared memory.
//
// Python mirrors some of these structs in cupymla_lab/emulate/run.py and maps.py; their sizes are launch facts.
#pragma once

#ifdef CUPYMLA_HOST_MACHINE
#include "model_host.hpp"
#endif

#include "common/types.cuh"
#ifndef CUPYMLA_HOST_MACHINE
#include "common/hardware.cuh"
#endif

namespace cupymla::emulate {

constexpr uint32_t kLanes = 128;
constexpr uint32_t kColumns = 512;
constexpr uint32_t kThreads = 1024;
constexpr uint32_t kNamedBarriers = 16;
constexpr uint32_t kSmemBytes = 228 * 1024;
constexpr uint32_t kQueue = 1024;
constexpr uint32_t kPendingStores = 32;
constexpr uint32_t kJobs = 4;
constexpr uint32_t kAllocationUnit = 32;  // columns

enum Mode : uint32_t { kEager = 0, kLazy = 1, kRandom = 2 };

// What is checked beyond what the values show.
enum Check : uint32_t { kCheckTcgen05 = 1, kCheckProxy = 2, kCheckInit = 4 };

// A failure as the host reads it, in memory that both see.
struct Failure {
  uint32_t raised;
  uint32_t code;
  uint32_t site;
  uint32_t cta;
  uint32_t thread;
  uint32_t reserved;
  uint64_t values[4];
};

struct Cta;

// What the host says of a tensor map: its 128 bytes, by which it is recognised, and the request it was encoded from.
struct TileInfo {
  uint64_t key[16];
  uint64_t pointer, shape[5], strides[4];
  uint32_t rank, element_bits, swizzle, nan, box[5], reserved;
};

struct Launch {
  Failure* failure;
  Cta* ctas;
  uint32_t cta_count;
  uint32_t mode;
  uint32_t seed;
  uint32_t checks;
  uint32_t removed;  // site of the instruction that does nothing in this launch; 0 for none
  uint32_t stop;     // set once: every thread that enters the model ends
  uint64_t patience_ns;
  uint64_t clock;        // orders what threads do, for the checks; only ever added to
  uint64_t progress_ns;  // when something last moved on
  const TileInfo* maps;
  uint32_t map_count;
  uint32_t stalls;  // whether in mode random threads, and what was put off, are late
};

// One asynchronous operation that was issued and has not been executed.
enum OperationKind : uint32_t { kNothing = 0, kMma, kTmemCopy, kShift, kCommit, kLoad, kStore, kTile };
enum OperationState : uint32_t { kFree = 0, kPending = 1, kDone = 2 };

struct Operation {
  uint32_t kind;
  uint32_t state;
  uint32_t thread;
  uint32_t site;
  uint64_t not_before_ns;  // waiting threads leave it alone until then
  uint64_t words[22];
};

// Work on one operation that several threads share: item numbers are handed out by the low half of `Cta::ticket`,
// whose high half says which job they belong to.
struct Job {
  Operation operation;
  uint32_t phase;
  uint32_t total;
  uint32_t done;
  uint32_t epoch;
};

struct Thread {
  uint64_t before_clock;       // last tcgen05.fence::before_thread_sync or commit
  uint64_t before_load_clock;  // the same, as far as loads from TMEM had been waited for
  uint64_t after_clock;        // last tcgen05.fence::after_thread_sync
  uint64_t proxy_clock;        // last fence.proxy.async
  uint64_t init_clock;         // last fence.mbarrier_init or fence.proxy.async
  uint64_t load_clock;         // first tcgen05.ld that was not waited for, 0 when there is none
  uint64_t poll_start_ns;
  uint32_t poll_address;
  uint32_t stores;             // entries of Cta::stores that this thread has to apply
  uint32_t groups;             // bulk groups committed
  uint32_t copies;             // deferred copies of the group that is not committed yet
  uint32_t cluster_word;       // generation of the cluster barrier this thread arrived in
  uint32_t serial;             // decisions of the random mode so far
};

// Who last wrote and read a column of TMEM in one quarter of the lanes: clock << 16 | kind << 15 | rank << 10 | thread.
struct Touch {
  uint64_t write;
  uint64_t read;
};

// A barrier counted in memory. Generations alternate between two results.
struct CountedBarrier {
  uint64_t word;       // generation << 32 | votes for yes << 16 | arrived
  uint32_t result[2];  // votes of a generation that is over
};

struct StoreEntry {
  uint32_t address;
  uint32_t form;
};

// What a weight-stationary product has left in a collector buffer: a matrix descriptor, and what else says how B is
// read. Both are zero where nothing is.
struct Collector {
  uint64_t descriptor;
  uint64_t form;
  uint64_t sum;  // of the elements that the product which filled it has read, and by how many columns it shifted
  uint64_t shift;
};

struct Cta {
  uint32_t tmem[kLanes][kColumns];
  uint32_t pending[kLanes][kColumns];  // what tcgen05.st wrote and no tcgen05.wait::st has applied
  StoreEntry stores[kThreads][kPendingStores];
  uint32_t owner[kColumns / kAllocationUnit];  // allocation that a unit of columns belongs to, 0 when free
  uint32_t allocations;
  uint32_t permit_given;
  uint32_t cta_group;  // 0 until the first tcgen05 instruction names it
  uint32_t allocation_lock;
  uint32_t live_allocations;

  Operation queue[kQueue];
  uint32_t head, tail, lock, unused;
  Job jobs[kJobs];
  uint64_t ticket;
  uint32_t epoch;
  uint32_t busy;
  alignas(16) float a[256][64];  // operands of the current product, read four at a time; copies of A one by one
  alignas(16) float b[256][64];
  Collector collectors[4];
  uint64_t b_sum;  // over the rows of B that have been read for the current product

  CountedBarrier barriers[kNamedBarriers];
  CountedBarrier cluster;  // the first CTA's counts for all
  uint32_t cluster_exited;
  uint32_t exited;
  uint32_t halted;
  uint32_t refused;  // a thread has seen that a request to cancel a cluster failed
  Thread threads[kThreads];
  Touch touches[kColumns][4];
  uint64_t smem_writes[kSmemBytes / 16];     // clock << 16 | thread of the last generic store
  uint64_t barrier_inits[kSmemBytes / 8];    // clock << 16 | thread of mbarrier.init, 0 where there is no barrier
};

}  // namespace cupymla::emulate

// The host finds it by this name.
extern "C" __device__ cupymla::emulate::Launch cupymla_emulate_launch;

namespace cupymla::emulate {

__device__ __forceinline__ Launch& launch() { return cupymla_emulate_launch; }

__device__ __forceinline__ uint32_t thread_index() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

__device__ __forceinline__ uint32_t block_threads() { return blockDim.x * blockDim.y * blockDim.z; }

// The CTA of that rank in this thread's cluster, counted through the grid.
__device__ __forceinline__ uint32_t cta_index(uint32_t rank) {
  const uint32_t width = hardware::cluster_extent_x(), height = hardware::cluster_extent_y();
  const uint32_t x = blockIdx.x - hardware::cluster_cta_x() + rank % width;
  const uint32_t y = blockIdx.y - hardware::cluster_cta_y() + rank / width % height;
  const uint32_t z = blockIdx.z - hardware::cluster_cta_z() + rank / (width * height);
  return x + gridDim.x * (y + gridDim.y * z);
}

__device__ __forceinline__ Cta& cta_of(uint32_t rank) { return launch().ctas[cta_index(rank)]; }
__device__ __forceinline__ Cta& own_cta() { return cta_of(hardware::cluster_rank()); }
__device__ __forceinline__ Thread& own_thread() { return own_cta().threads[thread_index()]; }

// A thread's name in the cluster: its CTA's rank and its index.
__device__ __forceinline__ uint32_t cluster_thread() { return hardware::cluster_rank() << 10 | thread_index(); }
__device__ __forceinline__ Thread& thread_of(uint32_t name) { return cta_of(name >> 10).threads[name & 1023]; }

// State that other threads write is read past the L1 cache, which is not coherent.
template <typename T>
__device__ __forceinline__ T fresh(const T& place) {
  return __ldcg(&place);
}
template <typename T>
__device__ __forceinline__ T watched(const T& place) {
  return *const_cast<const volatile T*>(&place);
}

// A number that is greater than all that were given out before.
__device__ __forceinline__ uint64_t next_clock() {
  return atomicAdd(reinterpret_cast<unsigned long long*>(&launch().clock), 1ull) + 1;
}

__device__ __forceinline__ void note_progress() { launch().progress_ns = hardware::global_nanoseconds(); }

__device__ __forceinline__ bool checking(uint32_t check) { return (launch().checks & check) != 0; }

}  // namespace cupymla::emulate
