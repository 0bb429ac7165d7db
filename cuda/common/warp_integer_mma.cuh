// Matrix products of one warp on tensor cores, 8-bit integers, for sm_80 and up (PTX ISA, "mma.m16n8k32").
#pragma once

#include "integers.cuh"

namespace cupymla {

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
