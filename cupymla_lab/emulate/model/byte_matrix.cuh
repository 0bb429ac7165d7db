// Which byte of which row every thread of a warp has after ldmatrix .m16n16 and .m8n16, and before stmatrix .m16n8 (PTX
// ISA 9.0, "ldmatrix", "stmatrix"). The ISA shows the places as figures; these are CuTe's traits of the same
// instructions (SM100_U8x8_LDSM_T and its siblings), which tests compare. Compiles on the host as well.
#pragma once

#include "descriptor.cuh"

namespace cupymla::emulate {

// A byte of a matrix in shared memory: its row, which has an address of its own, and its place among the row's 16.
struct MatrixByte {
  uint32_t row, byte;
};

// Byte `byte` of the register that a lane loads: of register `half` of a .m16n16 matrix, which is transposed, or of the
// register of a .m8n16 matrix.
CUPYMLA_BOTH MatrixByte loaded_byte(bool tall, uint32_t lane, uint32_t half, uint32_t byte) {
  if (tall) return MatrixByte{lane % 4 * 4 + byte, lane / 4 + half * 8};
  return MatrixByte{lane / 4, lane % 4 * 4 + byte};
}

// Byte `byte` of the register that a lane stores of a .m16n8 matrix, which is transposed: eight rows in memory.
CUPYMLA_BOTH MatrixByte stored_byte(uint32_t lane, uint32_t byte) {
  return MatrixByte{lane % 4 * 2 + byte % 2, lane / 4 + byte / 2 * 8};
}

}  // namespace cupymla::emulate
