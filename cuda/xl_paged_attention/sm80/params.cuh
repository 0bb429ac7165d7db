// Parameter record of the kernel. Python mirrors it as `Parameters` in cupymla/ops/xl_paged_attention/cuda.py; the
// sizes are compared when a call is bound, the fields by the tests.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::xl_paged_attention {

constexpr int32_t kNoBias = 0;     // values of `bias_form`
constexpr int32_t kDenseBias = 1;  // by position
constexpr int32_t kRelativeBias = 2;  // by distance from the newest key
constexpr int32_t kAlibi = 3;

struct Parameters {
  const uint8_t* query;         // [num_seqs, num_heads, head_size]
  const uint8_t* k_cache;       // see cupymla/ops/xl_paged_attention/paging.py
  const uint8_t* v_cache;
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  const int32_t* context_lens;  // [num_seqs]
  const uint8_t* pos_bias_u;    // [num_heads, head_size] or null
  const uint8_t* bias;          // [num_seqs, num_heads, extent] or null
  const float* slopes;          // [num_heads] or null
  const float* k_scales;        // [num_kv_heads] or null
  const float* v_scales;        // [num_kv_heads] or null
  uint8_t* out;                 // [num_seqs, num_heads, head_size]
  float* lse;                   // [num_seqs, num_heads] or null
  float* partials;              // two buffers for each CTA: see merge.cuh
  uint32_t* arrivals;           // counters: see arrivals.cuh

  // Strides: in bytes where the name says so, in elements elsewhere.
  int64_t query_seq_bytes, query_head_bytes;
  int64_t k_block_bytes, k_head_bytes, k_token_bytes, k_chunk_bytes;
  int64_t v_block_bytes, v_head_bytes, v_token_bytes, v_channel_bytes;
  int64_t tables_seq, lens_seq;
  int64_t u_head_bytes;
  int64_t bias_seq, bias_head, slopes_head;
  int64_t k_scales_head, v_scales_head;
  int64_t out_seq_bytes, out_head_bytes;
  int64_t lse_seq, lse_head;

  int64_t long_tiles;  // so many are long work, of which some CTAs take small parts

  int32_t num_seqs, num_kv_heads, num_blocks, block_size;
  int32_t block_shift;  // log2 of block_size, or -1 where it is no power of two
  int32_t group;       // query heads of a KV head
  int32_t row_blocks;  // units that share a KV head: blocks of at most kRows of its query heads
  int32_t capacity;    // the most keys that a sequence can have
  int32_t chunk;       // k_cache elements that lie together
  int32_t bias_form;
  int32_t bias_wide;   // 1: bias is fp32, 0: it has the query's dtype
  int32_t u_wide;      // the same of pos_bias_u
  int32_t extent;      // distances of a relative bias
  int32_t clamp;       // 1: distances past the extent take the last entry, 0: they have no bias
  int32_t large_parts;  // CTAs, the first ones, with a large part; those past them take small ones: see schedule.cuh
  int32_t even_parts;   // CTAs that take part where all sequences have as many tiles

  float score_log2;    // scale * log2(e)
  float bias_log2;     // the factor of the bias: score_log2, or log2(e)
  float k_scale, v_scale;  // for all KV heads, beside k_scales and v_scales
  float lse_unit;      // 1 for base 2, ln 2 for base e
  float max_unit;      // the same for scores, as exactly as score_log2 is rounded: scale / score_log2 for base e
};

}  // namespace cupymla::xl_paged_attention
