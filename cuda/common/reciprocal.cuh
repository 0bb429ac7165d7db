// One instruction's reciprocal (PTX ISA, "rcp.approx.ftz.f32").
#pragma once

namespace cupymla {

// Of a normal number, to a relative error of 2^-23.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace cupymla
