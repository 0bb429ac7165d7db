// Access to rows that are read once, and go through registers: loads past L1, loads and stores of shared memory (PTX
// ISA, "ld", "st"), and arithmetic on pairs of bf16 (PTX ISA, "mul", "fma", sm_90).
#pragma once

#include "types.cuh"

namespace cupymla {

// The address is a multiple of 8. Not `.nc`: ptxas puts such loads where their values are used, across barriers too.
__device__ __forceinline__ void load_row_8(uint32_t& a, uint32_t& b, const uint8_t* from) {
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "l"(from) : "memory");
}

__device__ __forceinline__ void load_row_16(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, const uint8_t* from) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "l"(from)
               : "memory");
}

// The same as one number: of two, ptxas may want one elsewhere, and waits for the load to move it.
__device__ __forceinline__ void load_row_8(uint64_t& both, const uint8_t* from) {
  asm volatile("ld.global.L1::no_allocate.u64 %0, [%1];" : "=l"(both) : "l"(from) : "memory");
}

__device__ __forceinline__ void load_row_16(uint64_t& a, uint64_t& b, const uint8_t* from) {
  asm volatile("ld.global.L1::no_allocate.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
}

// Addresses as `smem_address` gives them.
__device__ __forceinline__ void store_shared_16(uint32_t address, const uint4& words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

// The same, if `stores`. A branch would be another way through the code: threads that store and threads that do not run
// the same instructions here.
__device__ __forceinline__ void store_shared_16_if(bool stores, uint32_t address, const uint4& words) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %0, 0;\n @p st.shared.v4.b32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
          static_cast<uint32_t>(stores)),
      "r"(address), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
      : "memory");
}

// If `loads`, else zeros, likewise.
__device__ __forceinline__ void load_shared_8_if(bool loads, uint32_t& a, uint32_t& b, uint32_t address) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n mov.u32 %0, 0;\n mov.u32 %1, 0;\n"
      " @p ld.shared.v2.u32 {%0, %1}, [%3];\n}"
      : "=&r"(a), "=&r"(b)
      : "r"(static_cast<uint32_t>(loads)), "r"(address)
      : "memory");
}

__device__ __forceinline__ void load_shared_16(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// Bytes of a word as the four places of kSelector say; with 8 added, the byte's sign in all of its bits (PTX ISA,
// "prmt").
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t permute_bytes(uint32_t word) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(bytes) : "r"(word), "n"(kSelector));
  return bytes;
}

__device__ __forceinline__ uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

__device__ __forceinline__ uint32_t multiply_add_bf16(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

}  // namespace cupymla
