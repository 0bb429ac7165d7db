// tcgen05.mma on the host machine: what `read_a`, `read_b` and `multiply` of cupymla_lab/emulate/model/mma.cuh compute, 16 bytes and
// many columns at a time. Every sum is taken in the same order and precision, so the bits are the same; tests compare.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

namespace cupymla::emulate {

constexpr uint32_t kColumnsTogether = 32;

inline void decode_chunk(Element element, const uint4& chunk, uint32_t count, float* out) {
  if (element == kElementBf16) {
    const auto* words = reinterpret_cast<const uint16_t*>(&chunk);
    for (uint32_t i = 0; i < count; ++i) out[i] = __uint_as_float(static_cast<uint32_t>(words[i]) << 16);
  } else if (element == kElementF16) {
    const auto* words = reinterpret_cast<const uint16_t*>(&chunk);
    for (uint32_t i = 0; i < count; ++i) out[i] = __half2float(__ushort_as_half(words[i]));
  } else {
    for (uint32_t i = 0; i < count; ++i) out[i] = chunk_number(element, chunk, i);
  }
}

inline uint4 fenced_chunk(uint32_t address, uint32_t rank, const Operation& operation) {
  require_proxy_fence(rank, address, operation.thread, operation.site);
  return hardware::load_cluster_16(hardware::map_to_rank(address & ~15u, rank));
}

// One operand of one CTA, rows from `first` on: element (first + row, k) to out[row * row_step + k * k_step].
inline void read_operand(float* out, uint32_t row_step, uint32_t k_step, uint64_t descriptor, bool transposed,
                         Element element, uint32_t first, uint32_t rows, uint32_t k_count, uint32_t rank,
                         const Operation& operation) {
  Matrix matrix;
  decode_matrix(descriptor, transposed, matrix);
  const uint32_t per_chunk = chunk_elements(element);
  float values[32];
  const auto put = [&](uint32_t row, uint32_t k, uint32_t step, uint32_t from, uint32_t count) {
    float* place = out + row * row_step + k * k_step;
    for (uint32_t i = 0; i < count; ++i) place[i * step] = values[from + i];
  };
  if (!transposed) {
    for (uint32_t row = 0; row < rows; ++row) {
      for (uint32_t k = 0; k < k_count; k += per_chunk) {
        const uint32_t count = std::min(per_chunk, k_count - k);
        const uint32_t address = k_major_address(matrix, first + row, k / per_chunk * 16) & 0x3ffffu;
        decode_chunk(element, fenced_chunk(address, rank, operation), count, values);
        put(row, k, k_step, 0, count);
      }
    }
    return;
  }
  for (uint32_t k = 0; k < k_count; ++k) {
    for (uint32_t row = 0; row < rows;) {
      const uint32_t from = (first + row) % per_chunk, count = std::min(per_chunk - from, rows - row);
      const uint32_t address = mn_major_address(matrix, (first + row - from) * (16 / per_chunk), k) & 0x3ffffu;
      decode_chunk(element, fenced_chunk(address, rank, operation), from + count, values);
      put(row, k, row_step, from, count);
      row += count;
    }
  }
}

typedef double Columns __attribute__((vector_size(8 * kColumnsTogether / 4)));

// sums[j] = a[0] b[0][j] + a[1] b[1][j] + ...; products of these formats are exact in double precision.
__attribute__((target_clones("default", "avx2", "avx512f"))) static void add_products(
    const float* a, const double* b, uint32_t k_count, double* sums) {
  Columns part[4] = {};
  for (uint32_t k = 0; k < k_count; ++k) {
    const double x = static_cast<double>(a[k]);
    const double* row = b + k * 256;
    for (uint32_t i = 0; i < 4; ++i) {
      Columns y;
      std::memcpy(&y, row + i * (kColumnsTogether / 4), sizeof y);
      part[i] += x * y;
    }
  }
  std::memcpy(sums, part, sizeof part);
}

struct Product {
  float a[256][64];
  float b[64][256];
  double columns[64][256];
  double b_scales[4][256];
  double scales[4];
};

// Row m against columns first to end of D, all in one CTA and one quarter of the lanes.
inline void multiply_row(const Mma& mma, const Shape& shape, Product& work, uint32_t m, uint32_t first, uint32_t end) {
  const Place place = place_of(mma, shape, m, first);
  const uint32_t lane = lane_of(mma.d) + place.lane, column = column_of(mma.d) + place.column, quarter = lane / 32;
  if (mma.lane_disabled(place.half, lane)) return;
  Cta& home = cta_of(rank_of_half(mma, place.half));
  const float* a = work.a[place.lane * a_copies(mma, shape) / kLanes * shape.m + m];
  const uint32_t block = shape.block ? shape.block : shape.k, blocks = shape.k / block;
  for (uint32_t i = 0; shape.block && i < blocks; ++i) {
    const uint32_t row = m % (shape.m / mma.cta_group);
    work.scales[i] = read_scale(home, mma.a_scale, quarter, row, shape.a_scale_id, i, shape.scale_is_ue8m0);
  }
  uint32_t* d = &home.tmem[lane][column];
  for (uint32_t n = first; n < end; n += kColumnsTogether) {
    const uint32_t count = std::min(kColumnsTogether, end - n);
    double sums[kColumnsTogether] = {}, part[kColumnsTogether];
    for (uint32_t i = 0; i < blocks; ++i) {
      add_products(a + i * block, &work.columns[i * block][n], block, part);
      for (uint32_t j = 0; shape.block && j < count; ++j) {
        part[j] *= work.scales[i];
        part[j] *= work.b_scales[i][n + j];
      }
      for (uint32_t j = 0; j < count; ++j) sums[j] += part[j];
    }
    for (uint32_t j = 0; j < count; ++j) {
      uint32_t& word = d[n - first + j];
      if (mma.accumulate) {
        const double before = result_number(shape.d, word);
        sums[j] += mma.scale_log2 ? std::ldexp(before, -static_cast<int>(mma.scale_log2)) : before;
      }
      word = shape.d == kResultS32 ? integer_word(sums[j], shape.saturate) : result_word(shape.d, sums[j]);
    }
  }
}

// Factors of the columns from `first`, as the result's quarter of the lanes holds them.
inline void read_b_scales(const Mma& mma, const Shape& shape, Product& work, uint32_t m, uint32_t first, uint32_t end) {
  const Place place = place_of(mma, shape, m, first);
  const Cta& home = cta_of(rank_of_half(mma, place.half));
  const uint32_t quarter = (lane_of(mma.d) + place.lane) / 32;
  for (uint32_t i = 0; i < shape.k / shape.block; ++i) {
    for (uint32_t n = first; n < end; ++n) {
      const uint32_t row = place.column + n - first;
      work.b_scales[i][n] = read_scale(home, mma.b_scale, quarter, row, shape.b_scale_id, i, shape.scale_is_ue8m0);
    }
  }
}

inline void multiply_on_host(const Mma& mma, const Shape& shape, const Operation& operation, Cta& home) {
  // Other threads may run while operands are read, and multiply in other CTAs.
  static std::vector<std::unique_ptr<Product>> idle;
  if (idle.empty()) idle.push_back(std::make_unique<Product>());
  std::unique_ptr<Product> held = std::move(idle.back());
  idle.pop_back();
  Product& work = *held;
  const uint32_t a_rows = shape.m / mma.cta_group, b_rows = shape.n / mma.cta_group;
  // The model reads and expands what is not a plain matrix of shared memory.
  const bool plain_a = !mma.a_in_tmem && !shape.sparse;
  if (!plain_a) {
    for (uint32_t i = 0; i < shape.m * a_copies(mma, shape); ++i) {
      read_a(mma, shape, i / shape.m, i % shape.m, operation, home);
    }
    std::memcpy(work.a, home.a, sizeof work.a);
  }
  ColumnMask mask;
  decode_column_mask(mma.column_mask, mask);
  for (uint32_t half = 0; half < mma.cta_group; ++half) {
    const uint32_t rank = rank_of_half(mma, half);
    if (plain_a) {
      float* a = work.a[half * a_rows];
      read_operand(a, 64, 1, mma.a, shape.a_transposed, shape.a, 0, a_rows, shape.k, rank, operation);
      for (uint32_t i = 0; shape.a_negated && i < a_rows * 64; ++i) a[i] = -a[i];
    }
    float* b = &work.b[0][half * b_rows];
    read_operand(b, 1, 256, mma.b, shape.b_transposed, shape.b, mask.shift, b_rows, shape.k, rank, operation);
  }
  if (mma.ws && mma.collector_use != kCollectorDiscard) {
    uint64_t sum = 0;
    for (uint32_t n = 0; n < shape.n; ++n) sum += row_sum(&work.b[0][n], 256, shape.k, n);
    check_collector(mma, sum, operation, home);
  }
  const float sign = shape.b_negated ? -1.0f : 1.0f;
  for (uint32_t k = 0; k < shape.k; ++k) {
    for (uint32_t n = 0; n < shape.n; ++n) work.columns[k][n] = static_cast<double>(sign * work.b[k][n]);
  }
  for (uint32_t n = 0; mask.any && n < shape.n; ++n) {
    if (!is_zero_column(mask, shape.m, shape.n, n)) continue;
    for (uint32_t k = 0; k < shape.k; ++k) work.columns[k][n] = 0.0;
  }
  const uint32_t step = shape.n / splits(mma, shape);
  uint32_t scales_of = ~0u;
  for (uint32_t first = 0; first < shape.n; first += step) {
    for (uint32_t m = 0; m < shape.m; ++m) {
      if (shape.block && (m / 16 != scales_of)) {
        read_b_scales(mma, shape, work, m, first, first + step);
        scales_of = m / 16;
      }
      multiply_row(mma, shape, work, m, first, first + step);
    }
    scales_of = ~0u;
  }
  idle.push_back(std::move(held));
}

}  // namespace cupymla::emulate
