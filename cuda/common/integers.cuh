// Fixed-width integers under NVRTC, which has no <cstdint> of its own.
#pragma once

#include <cuda/std/cstddef>
#include <cuda/std/cstdint>

namespace cupymla {

using cuda::std::int32_t;
using cuda::std::int64_t;
using cuda::std::uint16_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;
using cuda::std::uint8_t;

}  // namespace cupymla
