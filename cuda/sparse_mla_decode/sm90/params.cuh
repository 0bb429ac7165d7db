// Parameter record of the kernel: the forward's, and the caches. Mirrored by `Parameters` in
// cupymla/ops/sparse_mla_decode/cuda.py; sizes are compared when a call is bound, the fields by the tests.
#pragma once

#include "../../sparse_mla_fwd/sm90/params.cuh"

namespace cupymla::sparse_mla_decode {

// A cache, and the slots that each row selects from it.
struct Source {
  const uint8_t* cache;    // blocks of rows, as `cache.cuh` has them
  const int32_t* indices;  // [batch, s_q, topk] slots
  const int32_t* lengths;  // [batch, s_q] or null: entries of a row that count
  int64_t block_bytes;     // between two blocks of the cache
  int64_t indices_batch, indices_query;  // strides, in elements
  int64_t lengths_batch, lengths_query;
  int32_t topk;
  uint32_t slots;  // of the cache; slot s can be valid when (uint32_t)s < slots
  uint32_t page;   // slots of a block
  uint32_t page_reciprocal;  // (2^32 - 1) / page
};

// Of the forward's fields kv, indices, topk_length, causal and what goes with them are not read. Its max_logits has the
// address and the strides of lse: the thread that writes the one writes the other over it.
struct Parameters : sparse_mla_fwd::Parameters {
  Source sources[2];  // the second one has topk 0 where there is none
  // What clusters leave that share a row's entries, for the kernel that puts it together; see shares.cuh.
  float* share_outputs;      // [shares][rows][h_q][512]
  float4* share_statistics;  // [shares][rows][h_q]
  int64_t share_heads;       // rows * h_q
};

}  // namespace cupymla::sparse_mla_decode
