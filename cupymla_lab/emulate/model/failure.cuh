// Failures: the first one is written where the host reads it, then every thread of the grid ends as soon as it next
// enters the model. Nothing traps, so the context stays usable and the message arrives.
#pragma once

#include "races.cuh"
#include "state.cuh"

namespace cupymla::emulate {

// One line each; cupymla_lab/emulate/failures.py has the sentence for every code, with the values it names.
enum FailureCode : uint32_t {
  kNoFailure = 0,
  kTooManyCtas = 1,
  kHang = 2,
  kHangNamedBarrier = 3,
  kHangClusterBarrier = 4,
  kAllocationSize = 5,
  kAllocationAfterRelinquish = 6,
  kAllocationFull = 7,
  kMixedCtaGroups = 8,
  kDeallocationUnknown = 9,
  kDeallocationSize = 10,
  kLeak = 11,
  kColumnsNotAllocated = 12,
  kLaneWindow = 13,
  kAddressesDiffer = 14,
  kDescriptorReserved = 15,
  kDescriptorSwizzle = 16,
  kDescriptorAbsolute = 17,
  kInstructionReserved = 18,
  kInstructionFormat = 19,
  kInstructionShape = 20,
  kInstructionTranspose = 21,
  kScaleFactorId = 22,
  kInstructionSparse = 23,
  kScaleInput = 24,
  kBarrierNotInitialised = 25,
  kBarrierNotFenced = 26,
  kBeforeFenceMissing = 27,
  kAfterFenceMissing = 28,
  kLoadNotWaited = 29,
  kProxyFenceMissing = 30,
  kCopyNeverWaited = 31,
  kStoreNeverWaited = 32,
  kMmaNeverCompleted = 33,
  kPeerGone = 34,
  kLaneAlignment = 35,
  kPeerAllocation = 36,
  kQueueFull = 37,
  kPairMissing = 38,
  kInternal = 39,
  kTensorMapUnknown = 40,
  kGridAhead = 41,
  kCollectorEmpty = 42,
  kCollectorOther = 43,
  kColumnMaskReserved = 44,
  kColumnShift = 45,
  kFourRowBox = 46,
  kAskedAgain = 47,
  kNoAnswer = 48,
  kShiftedRows = 49,
  kSparseShape = 50,
  kSparseSelector = 51,
  kSparseAddress = 52,
  kSparseMetadata = 53,
  kCollectorStale = 54,
};

// Ends this thread. It waits a while for the rest of its cluster, whose shared memory others may still be using.
__device__ __noinline__ void halt() {
  const uint64_t start = hardware::global_nanoseconds();
  const uint32_t ranks = hardware::cluster_size();
  Cta& first = cta_of(0);
  atomicAdd(&first.halted, 1u);
  while (watched(first.halted) + watched(first.cluster_exited) < ranks * block_threads()) {
    if (hardware::global_nanoseconds() - start > 2000000) break;
    __nanosleep(1000);
  }
  hardware::exit_thread();
}

__device__ __forceinline__ void stop_if_asked() {
#ifdef CUPYMLA_HOST_MACHINE
  machine::breathe(*machine::current);  // so that threads meet each instruction in many orders
#endif
  if (watched(launch().stop)) halt();
}

__device__ __noinline__ void fail(FailureCode code, uint32_t site, uint64_t first = 0, uint64_t second = 0,
                                  uint64_t third = 0, uint64_t fourth = 0) {
  if (atomicExch(&launch().stop, 1u) == 0) {
    volatile Failure& report = *launch().failure;
    report.code = code;
    report.site = site;
    report.cta = cta_index(hardware::cluster_rank());
    report.thread = thread_index();
    report.values[0] = first;
    report.values[1] = second;
    report.values[2] = third;
    report.values[3] = fourth;
    __threadfence_system();
    report.raised = 1;
    __threadfence_system();
  }
  halt();
}

// Whether the grid has stood still for too long since `start_ns`.
__device__ __forceinline__ bool out_of_patience(uint64_t start_ns) {
  uint64_t moved = watched(launch().progress_ns);
#ifdef CUPYMLA_HOST_MACHINE
  if (moved < machine::last_work()) moved = machine::last_work();
#endif
  const uint64_t since = moved > start_ns ? moved : start_ns;
  return hardware::global_nanoseconds() > since + launch().patience_ns;
}

}  // namespace cupymla::emulate
