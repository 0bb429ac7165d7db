// Tensor Memory in the layout of warp-level accumulators (PTX ISA, "tcgen05.ld", shape .16x256b; sm_100f).
#pragma once

#include "tmem.cuh"

namespace cupymla::sm100 {

// 16 lanes of 64 columns, by a whole warp; `address` names the first or the 17th lane of its place in the warpgroup.
// A quad of threads has lanes l = thread / 4 and l + 8; of every eight columns c, thread t has 2 (t % 4) and the next:
// out[4 (c / 8)] and [+ 1] of lane l, [+ 2] and [+ 3] of lane l + 8.
__device__ __forceinline__ void tmem_load_fragments(uint32_t (&out)[32], uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.16x256b.x8.b32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
      : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]), "=r"(out[4]), "=r"(out[5]), "=r"(out[6]),
        "=r"(out[7]), "=r"(out[8]), "=r"(out[9]), "=r"(out[10]), "=r"(out[11]), "=r"(out[12]), "=r"(out[13]),
        "=r"(out[14]), "=r"(out[15]), "=r"(out[16]), "=r"(out[17]), "=r"(out[18]), "=r"(out[19]), "=r"(out[20]),
        "=r"(out[21]), "=r"(out[22]), "=r"(out[23]), "=r"(out[24]), "=r"(out[25]), "=r"(out[26]), "=r"(out[27]),
        "=r"(out[28]), "=r"(out[29]), "=r"(out[30]), "=r"(out[31])
      : "r"(address)
      : "memory");
}

}  // namespace cupymla::sm100
