// Parameter records of the kernels on caches of latents. Their mirrored structs are in
// cupymla/ops/mla_cache/records.py; what a format is made of comes from cupymla/ops/mla_cache/latents.py.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::mla_cache {

struct ConcatParameters {
  const uint8_t* kv_c;   // [tokens, channels] floats
  const uint8_t* k_pe;   // [tokens, rope] floats, or null
  uint8_t* cache;
  const uint8_t* slots;  // [tokens] int32 or int64
  int64_t kv_c_row, k_pe_row, slots_row;  // strides, in elements
  int64_t block_bytes;                    // between two blocks of the cache
  int64_t num_slots;                      // of the cache
  int64_t tokens;
  int32_t page;              // slots of a block
  uint32_t page_reciprocal;  // (2^32 - 1) / page
  int32_t slots_wide;        // 1: slots are int64
  int32_t type;              // FloatType of kv_c and k_pe
  int32_t rope;              // channels of k_pe
  int32_t codes;             // channels of kv_c that become e4m3: all or none
  int32_t row_bytes;         // between two rows of a block
  int32_t rope_begin;        // bytes of a row before its rotary part
  int32_t lanes_log2;        // lanes that share a scale
  int32_t exponents;         // 1: scales are E8M0 behind all rows of a block; 0: fp32 behind a row's codes
  int32_t pow2;              // 1: scales are powers of two
};

struct GatherLatentParameters {
  const uint8_t* cache;
  const uint8_t* slots;         // [rows] int32 or int64, or null
  const int32_t* block_tables;  // [requests, width], where slots is null
  const int32_t* cu_lens;       // [requests + 1]
  uint8_t* kv;                  // [rows, channels] bf16
  int64_t slots_row;  // strides, in elements
  int64_t tables_request, tables_block;
  int64_t lens_request;
  int64_t kv_row;
  int64_t block_bytes;  // between two blocks of the cache
  int64_t num_slots;    // of the cache
  int64_t rows;
  int32_t page;        // slots of a block
  int32_t blocks;      // of the cache
  int32_t slots_wide;  // 1: slots are int64
  int32_t requests, width;
  int32_t channels;
  int32_t codes;       // channels that are e4m3, the first ones
  int32_t row_bytes;   // between two rows of a block
  int32_t wide_begin;  // bytes of a row before its bf16 channels
  int32_t group_log2;  // channels that share a scale
  int32_t exponents;   // as in ConcatParameters
};

}  // namespace cupymla::mla_cache
