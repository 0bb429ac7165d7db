"""The number formats and the scale layouts: NVFP4, MXFP4, and cuBLASLt's 128x4 blocks of scales.

A block-scaled 4-bit matrix is `[rows, k]` E2M1 codes, two per byte with the even `k` in the low nibble, and one scale
per row and block of `k`. NVFP4 has an E4M3 scale per 16 elements, MXFP4 an E8M0 scale per 32.

Sources: E2M1, E8M0 and the MXFP4 scale rule are OCP Microscaling Formats (MX) v1.0, sections 5.3, 5.4 and 6.3; E4M3 is
the OCP 8-bit Floating Point Specification v1.0; NVFP4's two scale levels are as NVIDIA's "Introducing NVFP4 for
Efficient and Accurate Low-Precision Inference" describes them; the 128x4 layout is the cuBLAS documentation's "1D block
scaling factors layout". Conversions are worked out from the formats' definitions, so that a cast from another library
can serve as an independent check.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E8M0_NAN = 0xFF


def _frozen(values: npt.ArrayLike) -> Float32:
    table = np.array(values, np.float32)
    table.flags.writeable = False
    return table


def _binary_float(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """The magnitude that a sign-less small float stands for; exponent 0 is subnormal."""
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    if exponent == 0:
        return mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


_E2M1_MAGNITUDES = [_binary_float(code, 2, 1, 1) for code in range(8)]
_E4M3_MAGNITUDES = [_binary_float(code, 4, 3, 7) for code in range(E4M3_NAN)]

E2M1 = _frozen([*_E2M1_MAGNITUDES, *(-v for v in _E2M1_MAGNITUDES)])
"""float32 [16]: what each E2M1 code stands for."""

E4M3 = _frozen([*_E4M3_MAGNITUDES, np.nan, *(-v for v in _E4M3_MAGNITUDES), np.nan])
"""float32 [256]: what each E4M3 code stands for; 0x7F and 0xFF are NaN, there is no infinity."""

E8M0 = _frozen([*(2.0 ** (code - 127) for code in range(E8M0_NAN)), np.nan])
"""float32 [256]: what each E8M0 code stands for, 2^-127 to 2^127; 0xFF is NaN."""

_E2M1_PAIRS = _frozen([(E2M1[byte & 15], E2M1[byte >> 4]) for byte in range(256)])


def _thresholds(magnitudes: list[float]) -> Float32:
    """For ascending values, the least float32 that rounds to value 1, 2, ... under round-to-nearest-even.

    A midpoint belongs to the neighbour whose code is even.
    """
    values = np.array(magnitudes, np.float32)
    midpoints = (values[:-1] + values[1:]) / np.float32(2)
    lower_is_even = np.arange(midpoints.size) % 2 == 0
    return _frozen(np.where(lower_is_even, np.nextafter(midpoints, np.float32(np.inf)), midpoints))


_E2M1_THRESHOLDS = _thresholds(_E2M1_MAGNITUDES)
_E4M3_THRESHOLDS = _thresholds(_E4M3_MAGNITUDES)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A 4-bit format with one scale per block.

    Attributes:
        name: the word callers pass, "nvfp4" or "mxfp4".
        block: elements of k that share a scale.
        scale_dtype: dtype label of a typed scale array.
    """

    name: str
    block: int
    scale_dtype: str

    def scale_columns(self, k: int) -> int:
        """Scales per row: ceil(k / block). The last one may cover fewer elements than the others."""
        return -(-k // self.block)

    def decode_scales(self, codes: Bytes) -> Float32:
        """Scale codes as float32, exact; same shape."""
        table = E4M3 if self.scale_dtype == "float8_e4m3fn" else E8M0
        return table[codes]


NVFP4 = BlockFormat("nvfp4", 16, "float8_e4m3fn")
MXFP4 = BlockFormat("mxfp4", 32, "float8_e8m0fnu")
FORMATS: tuple[BlockFormat, ...] = (NVFP4, MXFP4)


def named(name: str) -> BlockFormat:
    """The format of that name. Raises KeyError."""
    for known in FORMATS:
        if known.name == name:
            return known
    raise KeyError(name)


def decode_pairs(packed: Bytes) -> Float32:
    """E2M1 pairs `[..., k/2]` as float32 `[..., k]`, exact; the low nibble comes first."""
    return _E2M1_PAIRS[packed].reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def pack_pairs(codes: Bytes) -> Bytes:
    """E2M1 codes `[..., k]`, k even, one per byte, as pairs `[..., k/2]`."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def encode_e2m1(values: Float32) -> Bytes:
    """Round float32 to E2M1 codes: to nearest, ties to even, saturating at 6; -0 keeps its sign.

    NaN becomes code 7 (+6), as PTX's `cvt.rn.satfinite.e2m1x2.f32` has it.
    """
    code: Bytes = np.searchsorted(_E2M1_THRESHOLDS, np.abs(values), side="right").astype(np.uint8)
    negative = np.signbit(values) & ~np.isnan(values)
    code |= negative.astype(np.uint8) << np.uint8(3)
    return code


def encode_e4m3(values: Float32) -> Bytes:
    """Round float32 to E4M3 codes: to nearest, ties to even, saturating at 448; NaN becomes 0x7F."""
    code: Bytes = np.searchsorted(_E4M3_THRESHOLDS, np.abs(values), side="right").astype(np.uint8)
    code |= np.signbit(values).astype(np.uint8) << np.uint8(7)
    code[np.isnan(values)] = E4M3_NAN
    return code


def encode_e8m0_amax(amax: Float32) -> Bytes:
    """The MXFP4 scale of blocks whose largest magnitudes are `amax`: 2^(floor(log2 amax) - 2), clamped to 2^-127.

    2 is the exponent of E2M1's largest value. Zero gives 2^-127, infinity what the largest float32 gives, NaN 0xFF.
    """
    nan = np.isnan(amax)
    finite = np.minimum(np.where(nan, np.float32(1), amax), np.finfo(np.float32).max)
    _, exponent = np.frexp(finite)
    floor_log2 = np.where(finite == 0, -127, exponent - 1)
    code: Bytes = np.clip(floor_log2 - 2 + 127, 0, E8M0_NAN - 1).astype(np.uint8)
    code[nan] = E8M0_NAN
    return code


def padded(rows: int, columns: int) -> tuple[int, int]:
    """The extent of a `rows` x `columns` scale matrix in the 128x4 layout: each rounded up to whole blocks."""
    return -(-rows // 128) * 128, -(-columns // 4) * 4


def swizzle_offset(row: npt.NDArray[np.int64], column: npt.NDArray[np.int64], columns: int) -> npt.NDArray[np.int64]:
    """Byte offset of scale (row, column) in the 128x4 layout of a matrix with `columns` scale columns.

    128 rows x 4 columns are 512 consecutive bytes, ordered [row % 32][row % 128 // 32][column % 4]; such blocks follow
    each other along the columns first.
    """
    block = row // 128 * (padded(1, columns)[1] // 4) + column // 4
    return block * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


def swizzle(scales: Bytes) -> Bytes:
    """Linear scales `[rows, columns]` in the 128x4 layout, `[padded rows, padded columns]`, padding zero."""
    rows, columns = scales.shape
    all_rows, all_columns = padded(rows, columns)
    whole = np.zeros((all_rows, all_columns), np.uint8)
    whole[:rows, :columns] = scales
    blocks = whole.reshape(all_rows // 128, 4, 32, all_columns // 4, 4)
    return np.ascontiguousarray(blocks.transpose(0, 3, 2, 1, 4)).reshape(all_rows, all_columns)


def unswizzle(swizzled: Bytes, rows: int, columns: int) -> Bytes:
    """The linear scales `[rows, columns]` of a buffer in the 128x4 layout, whose padding is ignored."""
    all_rows, all_columns = padded(rows, columns)
    blocks = swizzled.reshape(all_rows // 128, all_columns // 4, 32, 4, 4)
    linear: Bytes = blocks.transpose(0, 3, 2, 1, 4).reshape(all_rows, all_columns)[:rows, :columns]
    return linear
