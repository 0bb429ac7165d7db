// tcgen05.mma and its weight-stationary form: reading both operands, multiplying them, and where the result lies in
// Tensor Memory (PTX ISA 9.0, "tcgen05.mma", "tcgen05.mma.ws", "Data Path Layout Organization", "Block Scaling",
// "Packing formats").
//
// Products are added in double precision and rounded once per instruction. Hardware keeps fewer bits, so results agree
// with it to float accuracy, not in the last bit.
#pragma once

#include "elements.cuh"
#include "tmem.cuh"

namespace cupymla::emulate {

// What a weight-stationary product does with the collector buffer that it names.
enum CollectorUse : uint32_t { kCollectorDiscard = 0, kCollectorFill = 1, kCollectorUse = 2, kCollectorLastUse = 3 };

// An issued tcgen05.mma as the queue keeps it.
struct Mma {
  uint64_t a, b;
  uint32_t d, instruction;
  uint32_t kind, cta_group, vector;
  bool a_in_tmem, a_shifted, accumulate, ws, sparse;
  uint32_t scale_log2, collector, collector_use;
  uint32_t a_scale, b_scale;
  uint64_t column_mask;  // of a weight-stationary product
  uint32_t metadata;     // of a sparse A, in Tensor Memory
  uint32_t rank;         // of the CTA that issued it
  const uint64_t* disabled;

  __device__ __forceinline__ Mma(const uint64_t* words, uint32_t issuer)
      : a(words[0]), b(words[1]), d(static_cast<uint32_t>(words[2])),
        instruction(static_cast<uint32_t>(words[2] >> 32)),
        kind(words[3] & 7), cta_group(words[3] >> 3 & 3), vector(words[3] >> 5 & 7),
        a_in_tmem(words[3] >> 8 & 1), a_shifted(words[3] >> 9 & 1), accumulate(words[4] & 1),
        ws(words[3] >> 10 & 1), sparse(words[3] >> 15 & 1), scale_log2(words[4] >> 8 & 15),
        collector(words[3] >> 11 & 3),
        collector_use(words[3] >> 13 & 3), a_scale(static_cast<uint32_t>(words[5])),
        b_scale(static_cast<uint32_t>(words[5] >> 32)), column_mask(ws ? words[5] : 0),
        metadata(static_cast<uint32_t>(ws ? words[6] : words[5])), rank(issuer >> 10),
        disabled(words + 6) {}

  __device__ __forceinline__ Shape shape() const {
    Shape shape;
    decode_instruction(kind, cta_group, vector, instruction, shape, ws, sparse);
    return shape;
  }
  __device__ __forceinline__ bool lane_disabled(uint32_t half, uint32_t lane) const {
    return !ws && (disabled[half * 2 + lane / 64] >> (lane % 64) & 1);
  }
};

__device__ __forceinline__ Place place_of(const Mma& mma, const Shape& shape, uint32_t m, uint32_t n) {
  return place_of(mma.cta_group, mma.ws, shape.m, shape.n, m, n);
}

__device__ __forceinline__ uint32_t splits(const Mma& mma, const Shape& shape) {
  return splits(mma.cta_group, mma.ws, shape.m);
}

__device__ __forceinline__ uint32_t rank_of_half(const Mma& mma, uint32_t half) {
  return mma.cta_group == 1 ? mma.rank : (mma.rank & ~1u) | half;
}

// Which operand rows are read by whom ---------------------------------------------------------------------------

// A generic store has to be fenced off by its thread or by the one that issued the operation that reads it. The thread
// whose store is not, or -1.
__device__ __forceinline__ int32_t unfenced(uint32_t rank, uint32_t offset, uint32_t issuer) {
  if (!checking(kCheckProxy) || offset >= kSmemBytes) return -1;
  const uint64_t word = watched(cta_of(rank).smem_writes[offset / 16]);
  if (word == 0) return -1;
  const uint64_t clock = word >> 16;
  const uint32_t writer = static_cast<uint32_t>(word) & 0x3fffu;
  if (watched(thread_of(writer).proxy_clock) > clock || watched(thread_of(issuer).proxy_clock) > clock) return -1;
  return static_cast<int32_t>(writer);
}

__device__ __forceinline__ void require_proxy_fence(uint32_t rank, uint32_t offset, uint32_t issuer, uint32_t site) {
  const int32_t writer = unfenced(rank, offset, issuer);
  if (writer >= 0) fail(kProxyFenceMissing, site, offset, writer);
}

// One row of a K-major operand or one of a transposed operand, as floats.
__device__ __forceinline__ void read_smem_row(float* out, const Matrix& matrix, Element element, uint32_t k_count,
                                              uint32_t row, uint32_t rank, uint32_t issuer, uint32_t site) {
  if (!matrix.transposed) {
    const uint32_t per_chunk = chunk_elements(element);
    for (uint32_t k = 0; k < k_count; k += per_chunk) {
      const uint32_t address = k_major_address(matrix, row, k / per_chunk * 16) & 0x3ffffu;
      require_proxy_fence(rank, address, issuer, site);
      const uint4 chunk = hardware::load_cluster_16(hardware::map_to_rank(address & ~15u, rank));
      for (uint32_t i = 0; i < per_chunk && k + i < k_count; ++i) out[k + i] = chunk_number(element, chunk, i);
    }
    return;
  }
  const uint32_t bytes = sixteen_bytes(element) / 16;
  for (uint32_t k = 0; k < k_count; ++k) {
    const uint32_t address = mn_major_address(matrix, row * bytes, k) & 0x3ffffu;
    require_proxy_fence(rank, address, issuer, site);
    uint32_t word = 0;
    for (uint32_t i = 0; i < bytes; ++i) {
      word |= hardware::load_cluster_u8(hardware::map_to_rank(address + i, rank)) << (8 * i);
    }
    out[k] = number(element, word);
  }
}

__device__ __forceinline__ void read_tmem_row(float* out, const Cta& cta, uint32_t address, uint32_t lane,
                                              Element element, uint32_t k_count) {
  const uint32_t per_column = k_count / 8;
  for (uint32_t k = 0; k < k_count; ++k) {
    const uint32_t word = read_tmem(cta, lane, column_of(address) + k / per_column);
    out[k] = tmem_number(element, word, k);
  }
}

// Where D's columns are split over groups of lanes, each group multiplies the rows of A in Tensor Memory that lie in
// lanes of its own: A has a copy in every group, unless a kernel means to multiply by different matrices. So it is with
// the metadata of a sparse A.
__device__ __forceinline__ uint32_t a_copies(const Mma& mma, const Shape& shape) {
  return mma.a_in_tmem || shape.sparse ? splits(mma, shape) : 1;
}

// A row of a sparse A in its full length, from the elements that are stored. `r` counts in the CTA, `lane` is the first
// of the row's group of lanes.
__device__ __forceinline__ void expand_row(float* row, const Mma& mma, const Shape& shape, const Cta& cta, uint32_t r,
                                           uint32_t lane, uint32_t site) {
  float full[64];
  const uint32_t chunk = mma.kind == kTf32 ? 2 : 4;
  for (uint32_t k = 0; k < shape.k; ++k) full[k] = 0;
  for (uint32_t k = 0; k < shape.k; k += chunk) {
    const MetadataPlace place = metadata_place(mma.kind, shape.selector, r, k);
    const uint32_t word = read_tmem(cta, lane + place.lane, column_of(mma.metadata) + place.column);
    const uint32_t code = word >> place.bit & 15u;
    // The codes that mean something: bit i for code i.
    if (!((mma.kind == kTf32 ? 0x4010u : 0x7350u) >> code & 1)) fail(kSparseMetadata, site, code, r, k);
    if (mma.kind == kTf32) {
      full[k + code / 8] = row[k / 2];
    } else {
      full[k + code % 4] = row[k / 2];
      full[k + code / 4] = row[k / 2 + 1];
    }
  }
  for (uint32_t k = 0; k < shape.k; ++k) row[k] = full[k];
}

__device__ __forceinline__ void read_a(const Mma& mma, const Shape& shape, uint32_t copy, uint32_t m,
                                       const Operation& operation, Cta& scratch) {
  float row[64];
  const uint32_t rows = shape.m / mma.cta_group;
  const uint32_t half = m / rows, rank = rank_of_half(mma, half), stored = shape.k >> shape.sparse;
  if (mma.a_in_tmem) {
    const uint32_t address = static_cast<uint32_t>(mma.a);
    // .ashift: the rows of each CTA move by one, the last one stays.
    uint32_t source = m;
    if (mma.a_shifted && m % rows + 1 < rows) source = m + 1;
    const Place place = place_of(mma.cta_group, mma.ws, shape.m, splits(mma, shape), source, copy);
    read_tmem_row(row, cta_of(rank), address, lane_of(address) + place.lane, shape.a, stored);
  } else {
    Matrix matrix;
    decode_matrix(mma.a, shape.a_transposed, matrix);
    read_smem_row(row, matrix, shape.a, stored, m % rows, rank, operation.thread, operation.site);
  }
  if (shape.sparse) expand_row(row, mma, shape, cta_of(rank), m % rows, copy * shape.m, operation.site);
  for (uint32_t k = 0; k < shape.k; ++k) __stcg(&scratch.a[copy * shape.m + m][k], shape.a_negated ? -row[k] : row[k]);
}

// What a row of B adds to the sum by which a collector buffer's content is known again.
__device__ __forceinline__ uint64_t row_sum(const float* row, uint32_t step, uint32_t k_count, uint32_t n) {
  uint64_t sum = n;
  for (uint32_t k = 0; k < k_count; ++k) sum = (sum ^ __float_as_uint(row[k * step])) * 0x9e3779b97f4a7c15ull;
  return sum ^ sum >> 29;
}

// Hardware may take B from the buffer or from shared memory: both have to hold the same.
__device__ __forceinline__ void check_collector(const Mma& mma, uint64_t sum, const Operation& operation, Cta& home) {
  if (!mma.ws || mma.collector_use == kCollectorDiscard) return;
  ColumnMask mask;
  decode_column_mask(mma.column_mask, mask);
  Collector& buffer = home.collectors[mma.collector];
  if (mma.collector_use == kCollectorFill) {
    *const_cast<volatile uint64_t*>(&buffer.sum) = sum;
    *const_cast<volatile uint64_t*>(&buffer.shift) = mask.shift;
  } else if (watched(buffer.shift) == mask.shift && watched(buffer.sum) != sum) {
    fail(kCollectorStale, operation.site, mma.collector);
  }
}

__device__ __forceinline__ void read_b(const Mma& mma, const Shape& shape, uint32_t n, const Operation& operation,
                                       Cta& scratch) {
  float row[64];
  const uint32_t rows = shape.n / mma.cta_group;
  Matrix matrix;
  decode_matrix(mma.b, shape.b_transposed, matrix);
  const uint32_t rank = rank_of_half(mma, n / rows);
  ColumnMask mask;
  decode_column_mask(mma.column_mask, mask);
  read_smem_row(row, matrix, shape.b, shape.k, n % rows + mask.shift, rank, operation.thread, operation.site);
  if (mma.ws && mma.collector_use != kCollectorDiscard) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&scratch.b_sum), row_sum(row, 1, shape.k, n));
  }
  const bool zero = is_zero_column(mask, shape.m, shape.n, n);
  for (uint32_t k = 0; k < shape.k; ++k) __stcg(&scratch.b[n][k], zero ? 0.0f : shape.b_negated ? -row[k] : row[k]);
}

// Scale factors of one row, one per block. They are read from the quarter of the lanes that the result lies in, so
// that factors which are not in all four of them are found out.
__device__ __forceinline__ double read_scale(const Cta& cta, uint32_t address, uint32_t quarter, uint32_t row,
                                             uint32_t id, uint32_t block, bool is_ue8m0) {
  const uint32_t lane = quarter * 32 + row % 32, column = (column_of(address) & 0x1ffu) + row / 32;
  return scale_factor(read_tmem(cta, lane, column) >> (8 * (id + block)) & 0xffu, is_ue8m0);
}

// Multiplying -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t result_word(Result type, double value) {
  if (type == kResultF32) return __float_as_uint(static_cast<float>(value));
  if (type == kResultF16) return __half_as_ushort(__double2half(value));
  return 0;
}

__device__ __forceinline__ double result_number(Result type, uint32_t word) {
  if (type == kResultF32) return static_cast<double>(__uint_as_float(word));
  if (type == kResultF16) return static_cast<double>(__half2float(__ushort_as_half(word & 0xffffu)));
  return static_cast<double>(static_cast<int>(word));
}

__device__ __forceinline__ uint32_t integer_word(double value, bool saturate) {
  const long long whole = static_cast<long long>(value);
  if (!saturate) return static_cast<uint32_t>(whole);
  return static_cast<uint32_t>(whole > 2147483647ll ? 2147483647ll : whole < -2147483648ll ? -2147483648ll : whole);
}

constexpr uint32_t kColumnsPerItem = 32;

__device__ __forceinline__ double dot(const Mma& mma, const Shape& shape, const float* a, const float* b,
                                      const double* a_scales, const Cta& home, uint32_t quarter, uint32_t n_here) {
  const uint32_t block = shape.block ? shape.block : shape.k;
  double sum = 0;
  for (uint32_t k = 0; k < shape.k; k += block) {
    double part = 0;
    for (uint32_t i = k; i < k + block; i += 4) {
      const float4 x = __ldcg(reinterpret_cast<const float4*>(b + i));
      part = fma(static_cast<double>(a[i]), static_cast<double>(x.x), part);
      part = fma(static_cast<double>(a[i + 1]), static_cast<double>(x.y), part);
      part = fma(static_cast<double>(a[i + 2]), static_cast<double>(x.z), part);
      part = fma(static_cast<double>(a[i + 3]), static_cast<double>(x.w), part);
    }
    if (shape.block) {
      part *= a_scales[k / block];
      part *= read_scale(home, mma.b_scale, quarter, n_here, shape.b_scale_id, k / block, shape.scale_is_ue8m0);
    }
    sum += part;
  }
  return sum;
}

__device__ __forceinline__ void multiply(const Mma& mma, const Shape& shape, uint32_t m, uint32_t first,
                                         const Cta& scratch) {
  float a[64];
  double a_scales[4];
  const uint32_t end = first + kColumnsPerItem < shape.n ? first + kColumnsPerItem : shape.n;
  const uint32_t copies = a_copies(mma, shape);
  uint32_t copy_read = copies, quarter_read = 4;
  for (uint32_t n = first; n < end; ++n) {
    const Place place = place_of(mma, shape, m, n);
    const uint32_t lane = lane_of(mma.d) + place.lane, column = column_of(mma.d) + place.column;
    if (mma.lane_disabled(place.half, lane)) continue;
    Cta& home = cta_of(rank_of_half(mma, place.half));
    const uint32_t copy = place.lane * copies / kLanes, quarter = lane / 32;
    if (copy != copy_read) {
      for (uint32_t k = 0; k < shape.k; ++k) a[k] = fresh(scratch.a[copy * shape.m + m][k]);
      copy_read = copy;
    }
    if (shape.block && quarter != quarter_read) {
      const uint32_t row = m % (shape.m / mma.cta_group);
      for (uint32_t i = 0; i < shape.k / shape.block; ++i) {
        a_scales[i] = read_scale(home, mma.a_scale, quarter, row, shape.a_scale_id, i, shape.scale_is_ue8m0);
      }
      quarter_read = quarter;
    }
    double sum = dot(mma, shape, a, scratch.b[n], a_scales, home, quarter, place.column);
    if (mma.accumulate) {
      const double before = result_number(shape.d, read_tmem(home, lane, column));
      sum += ldexp(before, -static_cast<int>(mma.scale_log2));
    }
    const uint32_t word = shape.d == kResultS32 ? integer_word(sum, shape.saturate) : result_word(shape.d, sum);
    write_tmem(home, lane, column, word);
  }
}

}  // namespace cupymla::emulate
