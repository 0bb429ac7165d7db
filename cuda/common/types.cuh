// Fixed-width integers and the few type functions that kernels use. NVRTC has no <cstdint> and no <type_traits>;
// libcu++'s <cuda/std/type_traits> takes a second of every compilation.
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

template <bool kCondition, typename Then, typename Else>
struct Conditional {
  using Type = Then;
};
template <typename Then, typename Else>
struct Conditional<false, Then, Else> {
  using Type = Else;
};
template <bool kCondition, typename Then, typename Else>
using conditional_t = typename Conditional<kCondition, Then, Else>::Type;

template <typename A, typename B>
inline constexpr bool is_same_v = false;
template <typename A>
inline constexpr bool is_same_v<A, A> = true;

// The numbers from 0 to kCount - 1 as a parameter pack.
template <int... kIndices>
struct Indices {};
template <int kCount, int... kIndices>
struct MakeIndices : MakeIndices<kCount - 1, kCount - 1, kIndices...> {};
template <int... kIndices>
struct MakeIndices<0, kIndices...> {
  using Type = Indices<kIndices...>;
};
template <int kCount>
using make_indices = typename MakeIndices<kCount>::Type;

}  // namespace cupymla
