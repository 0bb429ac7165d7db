// Scales of a as 16-bit factors of the codes that they belong to.
#pragma once


#include "config.cuh"
#include "decode.cuh"

namespace cupymla::nvfp4_gemv {

// Of a 16-byte piece with two E4M3 scales. A product of an E2M1 and an E4M3 number has six significant bits.
template <typename Operand>
class E4m3Factors {
 public:
  __device__ __forceinline__ explicit E4m3Factors(const uint8_t* codes) {
    const __half2 pair = halves_of_e4m3(*reinterpret_cast<const uint16_t*>(codes));
    if constexpr (is_same_v<Operand, __half>) {
      factors_[0] = __low2half2(pair);
      factors_[1] = __high2half2(pair);
    } else {
      // Codes are at 2^-126 of their value and go to 2^-14.
      const float2 values = __half22float2(pair);
      factors_[0] = __float2bfloat162_rn(values.x * kTwoTo112);
      factors_[1] = __float2bfloat162_rn(values.y * kTwoTo112);
    }
  }

  // A pair of codes of one of the four words of the piece.
  __device__ __forceinline__ uint32_t scaled(uint32_t pair, int word) const { return times(pair, factors_[word / 2]); }

 private:
  static constexpr float kTwoTo112 = 5192296858534827628530496329220096.0f;

  conditional_t<is_same_v<Operand, __half>, __half2, __nv_bfloat162> factors_[2];
};

// bfloat16 codes times an E8M0 scale are brought to 2^-4 of their value: there every product is a bfloat16, from
// 2^-132 for half of 2^-127 to 6 * 2^123.
constexpr float kPowerUnit = 16.0f;

// The scale of a 16-byte piece, up to 2^5: codes are at 2^-126 of their value, and no factor is larger than 2^127.
class OnePower {
 public:
  static constexpr uint32_t kMost = 132;  // code of the largest scale

  __device__ __forceinline__ explicit OnePower(uint32_t code) : factor_(bfloat_pair((code + 122u) * 0x00800080u)) {}
  __device__ __forceinline__ explicit OnePower(const uint8_t* code) : OnePower(static_cast<uint32_t>(*code)) {}
  __device__ __forceinline__ uint32_t scaled(uint32_t pair, int) const { return times(pair, factor_); }

 private:
  __nv_bfloat162 factor_;
};

// Any scale, in two factors.
class TwoPowers {
 public:
  __device__ __forceinline__ explicit TwoPowers(uint32_t code)
      : first_(bfloat_pair(min(code + 122u, 254u) * 0x00800080u)),
        second_(bfloat_pair(code == 255u ? 0x7FFF7FFFu : (max(code + 122u, 254u) - 127u) * 0x00800080u)) {}
  __device__ __forceinline__ explicit TwoPowers(const uint8_t* code) : TwoPowers(static_cast<uint32_t>(*code)) {}
  __device__ __forceinline__ uint32_t scaled(uint32_t pair, int) const { return times(times(pair, first_), second_); }

 private:
  __nv_bfloat162 first_, second_;
};

}  // namespace cupymla::nvfp4_gemv
