// Which bytes of shared memory an operation of the model will use, when it is issued: for races.hpp. The same places as
// those that `read_operand`, `copy_row` and `copy_tile_row` use when it is carried out.
#pragma once

#include <algorithm>

namespace cupymla::emulate {

inline void announce_operand(uint64_t descriptor, bool transposed, Element element, uint32_t first, uint32_t rows,
                             uint32_t k_count, uint32_t rank) {
  Matrix matrix;
  decode_matrix(descriptor, transposed, matrix);
  const uint32_t per_chunk = chunk_elements(element);
  const auto read = [&](uint32_t address) { races::read_by_tensor(rank, address & 0x3fff0u, 16); };
  for (uint32_t row = 0; !transposed && row < rows; ++row) {
    for (uint32_t k = 0; k < k_count; k += per_chunk) read(k_major_address(matrix, first + row, k / per_chunk * 16));
  }
  for (uint32_t k = 0; transposed && k < k_count; ++k) {
    for (uint32_t row = first / per_chunk * per_chunk; row < first + rows; row += per_chunk) {
      read(mn_major_address(matrix, row * (16 / per_chunk), k));
    }
  }
}

inline void announce_mma(const Mma& mma, const Shape& shape) {
  if (!races::causality()) return;
  ColumnMask mask;
  decode_column_mask(mma.column_mask, mask);
  for (uint32_t half = 0; half < mma.cta_group; ++half) {
    const uint32_t rank = rank_of_half(mma, half), rows = shape.m / mma.cta_group, columns = shape.n / mma.cta_group;
    if (!mma.a_in_tmem) {
      announce_operand(mma.a, shape.a_transposed, shape.a, 0, rows, shape.k >> shape.sparse, rank);
    }
    announce_operand(mma.b, shape.b_transposed, shape.b, mask.shift, columns, shape.k, rank);
  }
}

inline void announce_copy(const TmemCopy& copy) {
  if (!races::causality()) return;
  Matrix matrix;
  decode_matrix(copy.descriptor, false, matrix);
  for (uint32_t half = 0; half < copy.cta_group; ++half) {
    const uint32_t rank = copy.cta_group == 1 ? hardware::cluster_rank() : (hardware::cluster_rank() & ~1u) | half;
    for (uint32_t row = 0; row < copy.rows(); ++row) {
      for (uint32_t part = 0; part < copy.columns() / 4; ++part) {
        races::read_by_tensor(rank, k_major_address(matrix, row, part * 16) & 0x3fff0u, 16);
      }
    }
  }
}

template <typename Each>
void each_chunk(const Tile& tile, const TileInfo& info, uint32_t rows, const Each& each) {
  const uint32_t row_bytes = info.box[0] * info.element_bits / 8;
  for (uint32_t at = 0; at < rows * row_bytes; at += 16) {
    each(tile_swizzle((tile.destination & 0xffffffu) + at, info.swizzle));
  }
}

// The same of global memory: the part of a row that the tensor has.
template <typename Each>
void each_row_inside(const Tile& tile, const TileInfo& info, uint32_t rows, const Each& each) {
  const int64_t bits = info.element_bits, from = tile.at(0) * bits / 8, row_bytes = info.box[0] * bits / 8;
  const int64_t first = std::max<int64_t>(from, 0);
  const int64_t end = std::min<int64_t>(from + row_bytes, static_cast<int64_t>(info.shape[0]) * bits / 8);
  uint64_t address;
  for (uint32_t row = 0; row < rows; ++row) {
    if (row_address(tile, info, row, address) && first < end) each(address + first, end - first);
  }
}

inline void announce_tile(const Tile& tile, const TileInfo& info) {
  if (!races::causality()) return;
  each_row_inside(tile, info, tile_rows(tile, info), [](uint64_t address, uint64_t bytes) {
    machine::read_global(*machine::current, address, bytes, true);
  });
  for (uint32_t rank = 0; rank < hardware::cluster_size(); ++rank) {
    if (!goes_to(tile, rank)) continue;
    const uint32_t told = tile_barrier(tile, rank);
    races::hold(told);
    each_chunk(tile, info, tile_rows(tile, info),
               [&](uint32_t place) { races::write_later(hardware::map_to_rank(place, rank), 16, told); });
  }
}

inline void announce_scatter(const Tile& tile, const TileInfo& info) {
  if (!races::causality()) return;
  each_row_inside(tile, info, 4, [](uint64_t address, uint64_t bytes) {
    machine::write_global(*machine::current, address, bytes, false);
  });
  each_chunk(tile, info, 4, [&](uint32_t place) {
    races::read_by_store(hardware::map_to_rank(place, tile.destination >> 24), 16);
  });
}

inline void announce_answer(uint32_t barrier, uint32_t mask, uint32_t place) {
  for (uint32_t rank = 0; rank < hardware::cluster_size(); ++rank) {
    if (mask ? !(mask >> rank & 1) : rank != barrier >> 24) continue;
    races::hold(hardware::map_to_rank(barrier, rank));
    races::write_later(hardware::map_to_rank(place, rank), 16, hardware::map_to_rank(barrier, rank));
  }
}

}  // namespace cupymla::emulate
