// What stored rows of dKV go through, by itself: eight columns of a thread to sixteen bytes, and back.
#include "../../cuda/common/entry.cuh"
#include "../../cuda/sparse_mla_bwd/packed_columns.cuh"

extern "C" __global__ void packed_columns(const float* columns, uint4* packed, float* sums) {
  using namespace cupymla::sparse_mla_bwd;
  const int vector = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  float eight[kPackedColumns], sum[kPackedColumns] = {};
#pragma unroll
  for (int i = 0; i < kPackedColumns; ++i) eight[i] = columns[vector * kPackedColumns + i];
  packed[vector] = pack_columns(eight);
  add_packed_columns(sum, packed[vector]);
#pragma unroll
  for (int i = 0; i < kPackedColumns; ++i) sums[vector * kPackedColumns + i] = sum[i];
}

CUPYMLA_LAUNCH_FACTS(threads = 128);
