// Matrix products of one warp on tensor cores, for sm_80 and up (PTX ISA, "mma.m16n8k16", "mma.m16n8k32").
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "types.cuh"

namespace cupymla {

// d += a b with a [16, 16], b [16, 8], d [16, 8] fp32. Lane 4g + t holds of a: rows g (a[0], a[2]) and g + 8 (a[1],
// a[3]), columns 2t, 2t + 1 (a[0], a[1]) and 2t + 8, 2t + 9 (a[2], a[3]); of b: column g, rows 2t, 2t + 1 (b0) and
// 2t + 8, 2t + 9 (b1); of d: rows g (d[0], d[1]) and g + 8 (d[2], d[3]), columns 2t, 2t + 1.
template <typename Element>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_16x8x16<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_16x8x16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                           uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = a b + c with a [16, 32] and b [32, 8] of signed bytes, c and d [16, 8] of 32-bit integers. Lane 4g + t holds of
// a: rows g (a[0], a[2]) and g + 8 (a[1], a[3]), columns 4t to 4t + 3 (a[0], a[1]) and 4t + 16 to 4t + 19 (a[2], a[3]);
// of b: column g, rows 4t to 4t + 3 (b0) and 4t + 16 to 4t + 19 (b1); of c and d: rows g ([0], [1]) and g + 8 ([2],
// [3]), columns 2t, 2t + 1.
__device__ __forceinline__ void mma_16x8x32(uint32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                            const uint32_t (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

}  // namespace cupymla
