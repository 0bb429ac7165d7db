// The cluster's barrier where nothing but new mbarriers is to be published, which a fence of their own does (PTX ISA,
// "barrier.cluster", .relaxed): the arrival that publishes all writes waits for everything that is under way.
#pragma once

namespace cupymla {

// Every thread of the cluster that has not exited must arrive; behind `fence_mbarrier_init` of the thread that made
// the mbarriers. `cluster_wait` waits for it.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

}  // namespace cupymla
