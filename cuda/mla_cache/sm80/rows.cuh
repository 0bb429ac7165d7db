// Rows of arrays with up to three axes of any strides, and slots of a cache.
#pragma once

#include "../../common/math.cuh"
#include "params.cuh"

namespace cupymla::mla_cache {

// A row by its number, as a place on each axis.
struct Row {
  int64_t places[kAxes];

  __device__ __forceinline__ Row(int64_t number, const int64_t (&extents)[kAxes]) : places{0, 0, number} {
    if (extents[0] * extents[1] == 1) return;  // rows at equal distances
    const int64_t upper = quotient(number, extents[2]);
    places[2] = number - upper * extents[2];
    places[0] = quotient(upper, extents[1]);
    places[1] = upper - places[0] * extents[1];
  }

  __device__ __forceinline__ int64_t offset(const int64_t (&strides)[kAxes]) const {
    return places[0] * strides[0] + places[1] * strides[1] + places[2] * strides[2];
  }
};

// An integer of an array of int32 or of int64.
__device__ __forceinline__ int64_t integer_at(const uint8_t* array, int64_t place, bool wide) {
  return wide ? __ldg(reinterpret_cast<const long long*>(array) + place)
              : static_cast<int64_t>(__ldg(reinterpret_cast<const int32_t*>(array) + place));
}

}  // namespace cupymla::mla_cache
