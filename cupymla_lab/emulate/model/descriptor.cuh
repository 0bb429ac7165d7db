// Matrix descriptors of shared memory, instruction descriptors and zero-column masks, read exactly as the PTX ISA's
// tables say (PTX ISA 9.0, "Shared memory descriptor", "Instruction descriptor", "Canonical layouts", "Zero-Column Mask
// Descriptor"). Compiles on the host as well.
#pragma once

#include "common/types.cuh"

namespace cupymla::emulate {

#ifdef __CUDACC__
#define CUPYMLA_BOTH __host__ __device__ __forceinline__
#else
#define CUPYMLA_BOTH inline
#endif

enum Kind : uint32_t { kTf32 = 0, kF16 = 1, kF8f6f4 = 2, kI8 = 3, kMxf8f6f4 = 4, kMxf4 = 5, kMxf4nvf4 = 6 };

enum Element : uint32_t {
  kElementF16 = 0,
  kElementBf16,
  kElementTf32,
  kElementE4m3,
  kElementE5m2,
  kElementE2m3,
  kElementE3m2,
  kElementE2m1,
  kElementE2m1Packed,  // two per byte, without padding
  kElementU8,
  kElementS8,
  kElementNone,
};

enum Result : uint32_t { kResultF16 = 0, kResultF32 = 1, kResultS32 = 2 };

enum DescriptorDefect : uint32_t {
  kSound = 0,
  kDefectReserved,
  kDefectSwizzle,
  kDefectAbsolute,
  kDefectFormat,
  kDefectShape,
  kDefectTranspose,
  kDefectScaleId,
  kDefectSparse,
};

// Where the bytes of a matrix lie in shared memory. `row` is the index along M or N.
struct Matrix {
  uint32_t start_bytes;
  uint32_t leading_bytes;
  uint32_t stride_bytes;
  uint32_t base_offset;
  uint32_t span_bytes;   // of a swizzle row: 16 (none), 32, 64, 128
  uint32_t atom_log2;    // of the bytes that a swizzle moves as one: 4, or 5 for 128-byte swizzling by 32
  uint32_t swizzle_bits;
  bool transposed;       // M or N runs along the contiguous bytes
};

CUPYMLA_BOTH uint32_t bits(uint64_t word, uint32_t first, uint32_t count) {
  return static_cast<uint32_t>(word >> first) & ((1u << count) - 1u);
}

CUPYMLA_BOTH DescriptorDefect decode_matrix(uint64_t descriptor, bool transposed, Matrix& matrix) {
  matrix.start_bytes = bits(descriptor, 0, 14) << 4;
  matrix.leading_bytes = bits(descriptor, 16, 14) << 4;
  matrix.stride_bytes = bits(descriptor, 32, 14) << 4;
  matrix.base_offset = bits(descriptor, 49, 3);
  matrix.transposed = transposed;
  const bool reserved = bits(descriptor, 14, 2) || bits(descriptor, 30, 2) || bits(descriptor, 53, 8);
  if (reserved || bits(descriptor, 46, 3) != 1) return kDefectReserved;
  if (bits(descriptor, 52, 1)) return kDefectAbsolute;
  const uint32_t mode = bits(descriptor, 61, 3);
  matrix.atom_log2 = mode == 1 ? 5 : 4;
  switch (mode) {
    case 0: matrix.span_bytes = 16, matrix.swizzle_bits = 0; break;
    case 1: matrix.span_bytes = 128, matrix.swizzle_bits = 2; break;
    case 2: matrix.span_bytes = 128, matrix.swizzle_bits = 3; break;
    case 4: matrix.span_bytes = 64, matrix.swizzle_bits = 2; break;
    case 6: matrix.span_bytes = 32, matrix.swizzle_bits = 1; break;
    default: return kDefectSwizzle;
  }
  // 32-byte atoms exist for transposed matrices alone, and no other way to swizzle by 128 bytes has rows of 4.
  if (mode == 1 && !transposed) return kDefectSwizzle;
  return kSound;
}

// The address that swizzling puts a byte at. The pattern repeats from addresses that are a multiple of its size; the
// base offset says by how many rows of 128 bytes a matrix's own pattern is shifted against that.
CUPYMLA_BOTH uint32_t swizzle(const Matrix& matrix, uint32_t address) {
  const uint32_t mask = (1u << matrix.swizzle_bits) - 1u;
  const uint32_t row = (address >> 7) - matrix.base_offset;
  return address ^ ((row & mask) << matrix.atom_log2);
}

// The byte that holds byte `k` of row `row`, K contiguous.
CUPYMLA_BOTH uint32_t k_major_address(const Matrix& matrix, uint32_t row, uint32_t k) {
  uint32_t offset = row % 8 * matrix.span_bytes + row / 8 * matrix.stride_bytes;
  offset += matrix.span_bytes == 16 ? k / 16 * matrix.leading_bytes + k % 16 : k;
  return swizzle(matrix, matrix.start_bytes + offset);
}

// The byte that holds byte `row` (M or N times the element's bytes) of column k, M or N contiguous.
CUPYMLA_BOTH uint32_t mn_major_address(const Matrix& matrix, uint32_t row, uint32_t k) {
  const uint32_t group = matrix.atom_log2 == 5 ? 4 : 8;  // columns of an atom
  const uint32_t across = row / matrix.span_bytes, along = k / group;
  const bool plain = matrix.swizzle_bits == 0;
  const uint32_t offset = row % matrix.span_bytes + k % group * matrix.span_bytes +
                          across * (plain ? matrix.stride_bytes : matrix.leading_bytes) +
                          along * (plain ? matrix.leading_bytes : matrix.stride_bytes);
  return swizzle(matrix, matrix.start_bytes + offset);
}

// What a tcgen05.mma multiplies, from its kind and instruction descriptor.
struct Shape {
  uint32_t m, n, k;
  Element a, b;
  Result d;
  bool a_negated, b_negated, a_transposed, b_transposed, saturate;
  uint32_t block;         // elements of K that share a scale factor; 0 without scaling
  bool scale_is_ue8m0;    // else ue4m3
  uint32_t a_scale_id, b_scale_id;
  bool sparse;            // of A half the elements are stored, and metadata says which
  uint32_t selector;      // of the metadata's column
  uint32_t max_shift;     // columns that a zero-column mask may shift B by; .ws alone
};

CUPYMLA_BOTH bool scaled(uint32_t kind) { return kind >= kMxf8f6f4; }
CUPYMLA_BOTH bool packed_fp4(uint32_t kind) { return kind == kMxf4 || kind == kMxf4nvf4; }

CUPYMLA_BOTH Element element_of(uint32_t kind, uint32_t code) {
  switch (kind) {
    case kTf32: return code == 2 ? kElementTf32 : kElementNone;
    case kF16: return code == 0 ? kElementF16 : code == 1 ? kElementBf16 : kElementNone;
    case kI8: return code == 0 ? kElementU8 : code == 1 ? kElementS8 : kElementNone;
    case kMxf4:
    case kMxf4nvf4: return code == 1 ? kElementE2m1Packed : kElementNone;
    default: break;
  }
  switch (code) {
    case 0: return kElementE4m3;
    case 1: return kElementE5m2;
    case 3: return kElementE2m3;
    case 4: return kElementE3m2;
    case 5: return kElementE2m1;
    default: return kElementNone;
  }
}

// Bytes that 16 elements take along a row in shared memory, padding included.
CUPYMLA_BOTH uint32_t sixteen_bytes(Element element) {
  if (element == kElementTf32) return 64;
  if (element == kElementF16 || element == kElementBf16) return 32;
  return element == kElementE2m1Packed ? 8 : 16;
}

// Which M and N a kind has (PTX ISA, "Matrix Shape").
CUPYMLA_BOTH bool has_shape(uint32_t kind, uint32_t cta_group, bool ws, uint32_t m, uint32_t n) {
  if (ws) return (m == 32 || m == 64 || m == 128) && (n == 64 || n == 128 || n == 256);
  if (n < 8 || n > 256) return false;
  if (scaled(kind)) {
    if (cta_group == 1) return m == 128 && n % 8 == 0;
    return (m == 128 || m == 256) && n % 16 == 0;
  }
  if (cta_group == 2) return (m == 128 || m == 256) && n % (m == 128 || kind == kI8 ? 32 : 16) == 0;
  if (kind == kI8) return (m == 64 || m == 128) && (n == 8 || n == 24 || n % 16 == 0) && (m == 64 || n % 16 == 0);
  return (m == 64 && n % 8 == 0) || (m == 128 && n % 16 == 0);
}

CUPYMLA_BOTH DescriptorDefect decode_plain(uint32_t kind, bool ws, bool sparse, uint32_t word, Shape& shape) {
  if (bits(word, 2, 1) != sparse) return kDefectSparse;
  shape.sparse = sparse;
  shape.selector = bits(word, 0, 2);
  if ((shape.selector && !sparse) || bits(word, 6, 1) || bits(word, 23, 1) || bits(word, 29, 1)) return kDefectReserved;
  const uint32_t shift = bits(word, 30, 2);
  if (shift && !ws) return kDefectReserved;
  shape.max_shift = shift ? 4u << shift : 0;
  shape.saturate = bits(word, 3, 1);
  if (shape.saturate && kind != kI8) return kDefectReserved;
  const uint32_t result = bits(word, 4, 2);
  const bool f16_result = result == kResultF16 && (kind == kF16 || kind == kF8f6f4);
  if (!(kind == kI8 ? result == kResultS32 : result == kResultF32 || f16_result)) return kDefectFormat;
  shape.d = static_cast<Result>(result);
  shape.m = bits(word, 24, 5) << 4;
  shape.block = 0;
  return kSound;
}

CUPYMLA_BOTH DescriptorDefect decode_scaled(uint32_t kind, uint32_t vector, uint32_t word, Shape& shape) {
  if (bits(word, 2, 1)) return kDefectSparse;
  const bool reserved = bits(word, 0, 2) || bits(word, 3, 1) || bits(word, 6, 1) || bits(word, 24, 3);
  if (reserved || (packed_fp4(kind) ? bits(word, 12, 1) : bits(word, 31, 1))) return kDefectReserved;
  if (bits(word, 31, 1)) return kDefectShape;  // K = 96 is sm_103's
  shape.m = bits(word, 27, 2) << 7;
  shape.d = kResultF32;
  shape.saturate = false;
  shape.b_scale_id = bits(word, 4, 2);
  shape.a_scale_id = bits(word, 29, 2);
  shape.scale_is_ue8m0 = bits(word, 23, 1);
  shape.block = 32;
  if (kind == kMxf4nvf4 && vector == 4) shape.block = 16;
  const bool may_be_ue4m3 = shape.block == 16;
  if (!shape.scale_is_ue8m0 && !may_be_ue4m3) return kDefectFormat;
  const uint32_t ids = shape.a_scale_id | shape.b_scale_id;
  if (packed_fp4(kind) && (shape.block == 16 ? ids != 0 : (ids & 1) != 0)) return kDefectScaleId;
  return kSound;
}

// `vector` is the N of .scale_vec::NX, or 0; `ws` and `sparse` say what the instruction is.
CUPYMLA_BOTH DescriptorDefect decode_instruction(uint32_t kind, uint32_t cta_group, uint32_t vector, uint32_t word,
                                                 Shape& shape, bool ws = false, bool sparse = false) {
  shape.max_shift = shape.selector = 0;
  shape.sparse = false;
  shape.a_scale_id = shape.b_scale_id = 0;
  shape.scale_is_ue8m0 = true;
  const DescriptorDefect defect =
      scaled(kind) ? decode_scaled(kind, vector, word, shape) : decode_plain(kind, ws, sparse, word, shape);
  if (defect != kSound) return defect;
  shape.a = element_of(kind, bits(word, 7, 3));
  shape.b = element_of(kind, bits(word, 10, packed_fp4(kind) ? 2 : 3));
  if (shape.a == kElementNone || shape.b == kElementNone) return kDefectFormat;
  shape.a_negated = bits(word, 13, 1);
  shape.b_negated = bits(word, 14, 1);
  if (kind == kI8 && (shape.a_negated || shape.b_negated)) return kDefectReserved;
  shape.a_transposed = bits(word, 15, 1);
  shape.b_transposed = bits(word, 16, 1);
  shape.n = bits(word, 17, 6) << 3;
  shape.k = (kind == kTf32 ? 8 : kind == kF16 ? 16 : packed_fp4(kind) ? 64 : 32) << sparse;
  // Elements of less than 8 bits do not transpose, and 8-bit ones ask for whole groups of 16 columns.
  const bool narrow_a = shape.a == kElementE2m3 || shape.a == kElementE3m2 || shape.a == kElementE2m1;
  const bool narrow_b = shape.b == kElementE2m3 || shape.b == kElementE3m2 || shape.b == kElementE2m1;
  if ((shape.a_transposed && (packed_fp4(kind) || narrow_a)) || (shape.b_transposed && (packed_fp4(kind) || narrow_b)))
    return kDefectTranspose;
  const bool bytes = kind != kTf32 && kind != kF16;
  if (shape.b_transposed && bytes && shape.n % (cta_group == 2 ? 32 : 16)) return kDefectTranspose;
  if (ws && sparse && shape.n > 128) return kDefectShape;
  return has_shape(kind, cta_group, ws, shape.m, shape.n) ? kSound : kDefectShape;
}

// Into how many groups of lanes the columns of D are split, each of which has all rows.
CUPYMLA_BOTH uint32_t splits(uint32_t cta_group, bool ws, uint32_t rows) {
  if (ws) return 128 / rows;
  return cta_group == 2 && rows == 128 ? 2 : 1;
}

// Where an element of D lies; `half` says which CTA of a pair.
struct Place {
  uint32_t half, lane, column;
};

// Element (m, n) of D (PTX ISA, "Data Path Layout Organization": layouts A, B, D and F, and of .ws D, E and G).
CUPYMLA_BOTH Place place_of(uint32_t cta_group, bool ws, uint32_t rows, uint32_t columns, uint32_t m, uint32_t n) {
  const uint32_t width = columns / splits(cta_group, ws, rows);
  if (ws) return Place{0, m + n / width * rows, n % width};
  if (cta_group == 1) return Place{0, rows == 128 ? m : m / 16 * 32 + m % 16, n};
  if (rows == 256) return Place{m / 128, m % 128, n};
  return Place{m / 64, m % 64 + n / width * 64, n % width};
}

// Where the metadata of a sparse A lies in Tensor Memory: four bits for every two elements of a row in kind tf32, for
// every four in the others. `column` counts from the metadata's address.
struct MetadataPlace {
  uint32_t lane, column, bit;
};

// The bits that belong to element k of a CTA's row, with all 128 lanes in use; for .ws, among the lanes of a group.
// The ISA has figures; these are CuTe's fragments (tmem_e_frg and tmem_e_frg_ws) and, for the selector, CUTLASS's
// use of it.
CUPYMLA_BOTH MetadataPlace metadata_place(uint32_t kind, uint32_t selector, uint32_t row, uint32_t k) {
  if (kind != kF16 && kind != kTf32) return MetadataPlace{row, k / 32, k % 32 / 4 * 4};
  const uint32_t half = kind == kTf32 ? 8 : 16, each = kind == kTf32 ? 2 : 1;
  const uint32_t bit = row / 8 % 2 * 16 + k % half * each / 4 * 4;
  return MetadataPlace{row % 8 + k / half * 8 + row / 16 * 16, selector, bit};
}

// Columns of B that count as zero in a weight-stationary product, and how far B's columns are shifted against D's.
// A mask has one part for each group of lanes that D's columns are split over. In every part columns that are used and
// columns that are zero take turns; `start` says how far into that pattern the part begins.
//
// The table of the ISA exchanges "skip" and "use" against its own four examples; those, the names of the fields and
// CUTLASS's MaskAndShiftB agree, and are followed here.
struct ColumnMask {
  bool any;
  uint32_t used_span, zero_span, shift;
  uint32_t start[4];
  bool zero_first[4];
};

CUPYMLA_BOTH DescriptorDefect decode_column_mask(uint64_t descriptor, ColumnMask& mask) {
  for (uint32_t part = 0; part < 4; ++part) {
    mask.start[part] = bits(descriptor, 8 * part, 8);
    mask.zero_first[part] = bits(descriptor, 32 + part, 1);
  }
  mask.any = bits(descriptor, 39, 1);
  mask.zero_span = bits(descriptor, 40, 8) + 1;
  mask.used_span = bits(descriptor, 48, 8) + 1;
  mask.shift = bits(descriptor, 56, 6);
  return bits(descriptor, 36, 3) || bits(descriptor, 62, 2) ? kDefectReserved : kSound;
}

// Whether column n of an m x columns product meets zeros in place of B.
CUPYMLA_BOTH bool is_zero_column(const ColumnMask& mask, uint32_t m, uint32_t columns, uint32_t n) {
  if (!mask.any) return false;
  const uint32_t width = columns / (128 / m), part = n / width;
  const uint32_t at = (n % width + mask.start[part]) % (mask.used_span + mask.zero_span);
  return mask.zero_first[part] ? at < mask.zero_span : at >= mask.used_span;
}

}  // namespace cupymla::emulate
