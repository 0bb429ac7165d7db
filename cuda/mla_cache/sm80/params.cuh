// Parameter records of the kernels. Their mirrored structs are in cupymla/ops/mla_cache/records.py; the sizes are
// compared when a call is bound, the fields by the tests.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::mla_cache {

constexpr int kAxes = 3;  // of rows: an array is [extent 0, extent 1, extent 2, channels]

struct QuantizeParameters {
  const uint8_t* x;      // [rows, channels] floats
  uint8_t* codes;        // [rows, channels] e4m3, or a cache's pages
  uint8_t* scales;       // [rows, groups] fp32; null with a cache
  const uint8_t* slots;  // [rows] int32 or int64: the place of each row in the cache; null without one
  int64_t extents[kAxes];
  int64_t x_strides[kAxes];       // in elements, as all strides here
  int64_t codes_strides[kAxes];
  int64_t scales_strides[kAxes];
  int64_t scales_group;
  int64_t slots_row;
  int64_t block_bytes;  // between two blocks of the cache
  int64_t num_slots;    // of the cache
  int32_t page;              // slots of a block
  uint32_t page_reciprocal;  // (2^32 - 1) / page
  int32_t slots_wide;        // 1: slots are int64
  int32_t groups;            // of a row
  int32_t lanes_log2;        // lanes that share a group
  int32_t type;              // FloatType of x
  int32_t pow2;              // 1: scales are powers of two
};

struct DequantizeParameters {
  const uint8_t* codes;   // [rows, channels] e4m3
  const uint8_t* scales;  // [rows, groups] fp32
  uint8_t* out;           // [rows, channels] bf16
  int64_t extents[kAxes];
  int64_t codes_strides[kAxes];
  int64_t scales_strides[kAxes];
  int64_t out_strides[kAxes];
  int64_t scales_group;
  int32_t channels;
  int32_t group_log2;  // channels that share a scale
};

struct GatherParameters {
  const uint8_t* cache;         // pages of indexer keys
  const uint8_t* slots;         // [rows] int32 or int64, or null
  const int32_t* block_tables;  // [requests, width], where slots is null
  const int32_t* cu_lens;       // [requests + 1]
  uint8_t* k;                   // [rows, 128] e4m3
  float* k_scale;               // [rows]
  int64_t slots_row;  // strides, in elements
  int64_t tables_request, tables_block;
  int64_t lens_request;
  int64_t k_row, k_scale_row;
  int64_t block_bytes;  // between two blocks of the cache
  int64_t num_slots;    // of the cache
  int64_t rows;
  int32_t page;        // slots of a block
  int32_t blocks;      // of the cache
  int32_t slots_wide;  // 1: slots are int64
  int32_t requests, width;
};

struct HadamardParameters {
  const uint8_t* x;  // [rows, channels] floats
  uint8_t* out;      // the same
  int64_t extents[kAxes];
  int64_t x_strides[kAxes];
  int64_t out_strides[kAxes];
  int32_t lanes_log2;  // threads that share a row
  int32_t type;        // FloatType
  float factor;        // channels^-1/2
};

}  // namespace cupymla::mla_cache
