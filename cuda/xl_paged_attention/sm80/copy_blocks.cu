// Copies whole blocks inside one cache: block mapping[i, 0] to block mapping[i, 1], for pairs that both lie in it.
#include "../../common/math.cuh"
#include "../../common/entry.cuh"
#include "../../common/types.cuh"

// CUPYMLA_UNIT: bytes moved at a time, 1, 2, 4, 8 or 16: the largest that addresses and strides allow.
#if CUPYMLA_UNIT == 1
using Unit = cupymla::uint8_t;
#elif CUPYMLA_UNIT == 2
using Unit = cupymla::uint16_t;
#elif CUPYMLA_UNIT == 4
using Unit = cupymla::uint32_t;
#elif CUPYMLA_UNIT == 8
using Unit = uint2;
#else
using Unit = uint4;
#endif

namespace cupymla::xl_paged_attention {

struct CopyParameters {
  uint8_t* cache;
  const uint8_t* mapping;  // [num_pairs, 2] int32 or int64
  int64_t block_bytes;
  int64_t extent[4];       // of a block; the last counts units
  int64_t stride_bytes[4];
  int64_t pair_stride, side_stride;  // of mapping, in elements
  int64_t num_pairs;
  int64_t num_blocks;
  int32_t mapping_wide;    // 1: mapping is int64
};

constexpr int kCopyThreads = 256;

}  // namespace cupymla::xl_paged_attention

extern "C" __global__ void __launch_bounds__(cupymla::xl_paged_attention::kCopyThreads)
    copy_blocks(const __grid_constant__ cupymla::xl_paged_attention::CopyParameters params) {
  using namespace cupymla;
  const int64_t units = params.extent[0] * params.extent[1] * params.extent[2] * params.extent[3];
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; index < units * params.num_pairs;
       index += step) {
    const int64_t number = quotient(index, units);
    const int64_t pair = number * params.pair_stride;
    int64_t block[2];
    for (int side = 0; side < 2; ++side) {
      const int64_t place = pair + side * params.side_stride;
      block[side] = params.mapping_wide != 0 ? reinterpret_cast<const int64_t*>(params.mapping)[place]
                                             : reinterpret_cast<const int32_t*>(params.mapping)[place];
    }
    if (block[0] < 0 || block[0] >= params.num_blocks || block[1] < 0 || block[1] >= params.num_blocks) continue;
    int64_t rest = index - number * units;
    int64_t offset = 0;
    for (int axis = 3; axis > 0 && rest != 0; --axis) {
      // The last axes of a dense block are one, and the others have an extent of 1.
      const int64_t above = rest < params.extent[axis] ? 0 : quotient(rest, params.extent[axis]);
      offset += (rest - above * params.extent[axis]) * params.stride_bytes[axis];
      rest = above;
    }
    offset += rest * params.stride_bytes[0];
    *reinterpret_cast<Unit*>(params.cache + block[1] * params.block_bytes + offset) =
        *reinterpret_cast<const Unit*>(params.cache + block[0] * params.block_bytes + offset);
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::xl_paged_attention::kCopyThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::xl_paged_attention::CopyParameters));
