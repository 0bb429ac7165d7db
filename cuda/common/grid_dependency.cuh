// Kernels of one call that overlap: programmatic dependent launch (PTX ISA, "griddepcontrol"; sm_90). A dependent
// kernel may start before its primary, the one before it in the stream, has ended. What makes that safe is told in
// docs/streams_and_graphs.md. Code for targets without it does nothing here, and is launched ordinarily.
#pragma once

namespace cupymla {

// Waits until the primary grid has ended and its writes can be seen. Returns at once in an ordinary launch.
__device__ __forceinline__ void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// CTAs of the dependent grid may start once every CTA of this one has come here, or has ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// What every thread does before its first access to global memory, in a kernel that may be launched as dependent. A
// grid ends after all its threads have waited for their primary, so to have waited for one grid is to have waited for
// all before it. `has_dependent`: whether another kernel of the call comes next. It is let in after the wait, so that
// CTAs of two of them at most are on the machine.
__device__ __forceinline__ void wait_for_primary_grid(bool has_dependent) {
  griddepcontrol_wait();
  if (has_dependent) griddepcontrol_launch_dependents();
}

}  // namespace cupymla
