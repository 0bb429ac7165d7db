"""What the PTX ISA says of tcgen05 instructions, in NumPy and by means of its own.

Matrices are put into shared memory atom by atom, as the ISA draws swizzling (16-byte chunks that change places within
a row), not by the address arithmetic that the model uses. Source: PTX ISA 9.0, "Canonical layouts", "Data Path Layout
Organization", "Block Scaling", "tcgen05.ld", "tcgen05.cp".
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

LANES, COLUMNS = 128, 512
SPANS = {0: 16, 1: 128, 2: 128, 4: 64, 6: 32}
"""Bytes of a swizzle row by the descriptor's code; 1 moves 32 bytes at a time."""

TYPES: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "u8": np.uint8,
    "s8": np.int8,
}
CODES = {
    **{"f16": 0, "bf16": 1, "tf32": 2, "u8": 0, "s8": 1},
    **{"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
}
K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
KIND_TYPES = {
    "f16": ("f16", "bf16"),
    "tf32": ("tf32",),
    "f8f6f4": ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"),
    "i8": ("u8", "s8"),
    "mxf8f6f4": ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"),
    "mxf4": ("e2m1",),
    "mxf4nvf4": ("e2m1",),
}


def random_matrix(rng: np.random.Generator, kind: str, rows: int, columns: int) -> Array:
    """Numbers that are exact in a type: small multiples of a power of two over a few binades."""
    if kind in ("u8", "s8"):
        info = np.iinfo(TYPES[kind])
        return rng.integers(info.min, info.max + 1, (rows, columns)).astype(TYPES[kind])
    values = rng.integers(-8, 9, (rows, columns)) * 2.0 ** rng.integers(-2, 1, (rows, columns))
    if kind == "e2m1":
        values = np.clip(values, -6, 6)
    return values.astype(np.float32).astype(TYPES[kind])


def bit_patterns(matrix: Array) -> Array:
    """Each element's bits as an unsigned integer."""
    width = matrix.dtype.itemsize
    return np.ascontiguousarray(matrix).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[width])


# Shared memory ---------------------------------------------------------------------------------------------------


def _lines(matrix: Array, kind: str, packed: bool) -> Array:
    """Rows as bytes, in groups of 16 bytes: 16 narrow elements fill the front of a group and leave the rest empty."""
    raw = bit_patterns(matrix)
    rows, count = raw.shape
    bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(kind, 8 * raw.dtype.itemsize)
    if bits >= 8:
        return raw.view(np.uint8).reshape(rows, -1)
    per_group = 32 if packed else 16
    groups = np.zeros((rows, count // per_group, 128), np.uint8)
    spread = (raw.reshape(rows, -1, per_group, 1).astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
    groups[:, :, : per_group * bits] = spread.reshape(rows, -1, per_group * bits)
    return np.packbits(groups, axis=-1, bitorder="little").reshape(rows, -1)


def _swizzled(chunk: int, row: int, code: int) -> int:
    """Where the chunk of 16 bytes of a row of an atom stands, as the ISA's figures have it."""
    if code == 0:
        return chunk
    if code == 1:
        return chunk ^ (2 * (row % 4))
    divisor = {2: 1, 4: 2, 6: 4}[code]
    return chunk ^ (row % 8 // divisor)


def place(image: Array, start: int, matrix: Array, kind: str, code: int, transposed: bool, packed: bool = False) -> int:
    """Write a matrix of (M or N) x K into shared memory and return its descriptor without the start of the window.

    Atoms are laid one behind the other: for a K-major matrix groups of 8 rows, for a transposed one first along M or
    N, then along K. `start` is a multiple of 1024.
    """
    span = SPANS[code]
    if transposed:
        return _place_transposed(image, start, matrix, kind, code)
    lines = _lines(matrix, kind, packed)
    rows, width = lines.shape
    leading, stride = (16 * rows, 128) if span == 16 else (16, 8 * span)
    for row in range(rows):
        for chunk in range(width // 16):
            data = lines[row, 16 * chunk : 16 * chunk + 16]
            if span == 16:
                at = row // 8 * stride + row % 8 * 16 + chunk * leading
            else:
                # Row r of an atom begins at r * span; chunks change places within lines of 128 bytes.
                line = row % 8 * span + 16 * chunk
                at = row // 8 * stride + line // 128 * 128 + 16 * _line_chunk(line, code)
            image[start + at : start + at + 16] = data
    return _descriptor(leading, stride, code)


def _line_chunk(byte: int, code: int) -> int:
    """The chunk within its line of 128 bytes that a byte of a swizzle atom moves to."""
    line, chunk = byte // 128, byte % 128 // 16
    bits = {2: 8, 4: 4, 6: 2}[code]
    return chunk ^ (line % bits)


def _place_transposed(image: Array, start: int, matrix: Array, kind: str, code: int) -> int:
    raw = bit_patterns(matrix).T
    ks, _ = raw.shape
    lines = np.ascontiguousarray(raw).view(np.uint8).reshape(ks, -1)
    span, group = SPANS[code], 4 if code == 1 else 8
    across, atom = lines.shape[1] // span, span * group
    # Along M or N first: neighbours across are one atom apart, groups of K follow all of them.
    near, far = atom, atom * across
    for k in range(ks):
        for byte in range(0, lines.shape[1], 16):
            line = k % group * span + byte % span
            if code == 0:
                inside = line
            elif code == 1:
                inside = line // 128 * 128 + 16 * _swizzled(line % 128 // 16, line // 128, 1)
            else:
                inside = line // 128 * 128 + 16 * _line_chunk(line, code)
            at = start + byte // span * near + k // group * far + inside
            image[at : at + 16] = lines[k, byte : byte + 16]
    return _descriptor(far, near, code) if code == 0 else _descriptor(near, far, code)


def _descriptor(leading: int, stride: int, code: int) -> int:
    return leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | code << 61


def with_start(descriptor: int, start: int) -> int:
    """A descriptor of a matrix that begins `start` bytes into dynamic shared memory."""
    return descriptor | start >> 4


# Instruction descriptors -------------------------------------------------------------------------------------------


def instruction(
    kind: str, m: int, n: int, a: str, b: str, *, a_transposed: bool = False, b_transposed: bool = False,
    d_f16: bool = False, negated: tuple[bool, bool] = (False, False), ue8m0: bool = True,
    ids: tuple[int, int] = (0, 0), saturate: bool = False, max_shift: int = 0,
    sparse: bool = False, selector: int = 0,
) -> int:  # fmt: skip
    """The instruction descriptor; `max_shift` of a weight-stationary product in columns, `selector` of a sparse one."""
    word = (
        selector
        | sparse << 2
        | negated[0] << 13
        | negated[1] << 14
        | a_transposed << 15
        | b_transposed << 16
        | n >> 3 << 17
    )
    if kind.startswith("mxf"):
        codes = (CODES[a], CODES[b]) if kind == "mxf8f6f4" else (1, 1)
        return word | codes[0] << 7 | codes[1] << 10 | ids[1] << 4 | ue8m0 << 23 | m >> 7 << 27 | ids[0] << 29
    result = 2 if kind == "i8" else 0 if d_f16 else 1
    word |= (0, 8, 16, 32).index(max_shift) << 30
    return word | saturate << 3 | result << 4 | CODES[a] << 7 | CODES[b] << 10 | m >> 4 << 24


# Tensor Memory -----------------------------------------------------------------------------------------------------


def column_mask(
    spans: tuple[int, int], starts: tuple[int, ...] = (0, 0, 0, 0), zero_first: tuple[int, ...] = (0, 0, 0, 0),
    shift: int = 0, any_zero: bool = True,
) -> int:  # fmt: skip
    """A zero-column mask; `spans` are how many columns in turn are used and are zero, lists begin with part 0."""
    word = any_zero << 39 | spans[1] - 1 << 40 | spans[0] - 1 << 48 | shift << 56
    for part in range(4):
        word |= starts[part] << 8 * part | zero_first[part] << 32 + part
    return word


def zero_columns(word: int, m: int, n: int) -> Array:
    """Which of the N columns a zero-column mask makes zero, as its patterns are written out in the ISA's examples."""
    parts = 128 // m
    if not word >> 39 & 1:
        return np.zeros(n, bool)
    zeros, ones = [0] * ((word >> 48 & 0xFF) + 1), [1] * ((word >> 40 & 0xFF) + 1)
    found: list[int] = []
    for part in range(parts):
        turn = ones + zeros if word >> 32 + part & 1 else zeros + ones
        start = word >> 8 * part & 0xFF
        found += (turn * (1 + (start + n) // len(turn)))[start : start + n // parts]
    return np.array(found, bool)


def result_places(group: int, m: int, n: int, ws: bool = False) -> tuple[Array, Array, Array]:
    """CTA of the pair, lane and column of each element of D, (m, n) (layouts A, B, D and F; of .ws D, E and G)."""
    row, column = np.indices((m, n))
    if ws:
        width = n // (128 // m)
        return 0 * row, column // width * m + row, column % width
    if group == 1 and m == 128:
        return 0 * row, row, column
    if group == 1:
        return 0 * row, row // 16 * 32 + row % 16, column
    if m == 256:
        return row // 128, row % 128, column
    half = column // (n // 2)
    return row // 64, row % 64 + 64 * half, column % (n // 2)


def results(tmem: Array, group: int, m: int, n: int, offset: int, ws: bool = False) -> Array:
    """D as an m x n matrix of words, from the Tensor Memory of one CTA or two: (CTAs, lanes, columns)."""
    cta, lane, at = result_places(group, m, n, ws)
    found: Array = tmem[cta, lane, at + offset]
    return found


def a_words(matrix: Array, kind: str, packed: bool) -> Array:
    """Rows of A as 32-bit words of Tensor Memory, 8 to a row."""
    raw = bit_patterns(matrix)
    if kind == "e2m1":
        if packed:
            pairs = raw[:, 0::2] | raw[:, 1::2] << 4
            return np.ascontiguousarray(pairs).view(np.uint32)
        raw = (raw << 2).astype(np.uint8)
    return np.ascontiguousarray(raw).view(np.uint32)


def put_a(tmem: Array, words: Array, group: int, m: int, offset: int, ws: bool = False) -> None:
    """A into Tensor Memory: lanes as D's rows, with a copy for each group of lanes that D's columns are split over."""
    if ws:
        tmem[0, :, offset : offset + 8] = np.tile(words, (128 // m, 1))
        return
    if group == 2 and m == 128:
        for half in (0, 1):
            tmem[:, 64 * half : 64 * half + 64, offset : offset + 8] = words.reshape(2, 64, 8)
        return
    cta, lane, _ = result_places(group, m, 1)
    tmem[cta[:, 0], lane[:, 0], offset : offset + 8] = words


CODES_OF_PAIRS, CODES_OF_FOUR = (0b0100, 0b1110), (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b0110, 0b1110)
"""Metadata that means something: in kind tf32 for every two elements of a row, in the others for every four."""


def random_codes(rng: np.random.Generator, kind: str, m: int) -> Array:
    """Metadata of a sparse matrix of m rows, one code for each chunk."""
    if kind == "tf32":
        return rng.choice(np.array(CODES_OF_PAIRS, np.uint32), (m, K[kind]))
    return rng.choice(np.array(CODES_OF_FOUR, np.uint32), (m, K[kind] // 2))


def expanded(stored: Array, codes: Array, kind: str) -> Array:
    """A sparse matrix in full, twice as wide as what is stored of it."""
    full = np.zeros((len(stored), 2 * stored.shape[1]), stored.dtype)
    for row, chunk in np.ndindex(codes.shape):
        code = int(codes[row, chunk])
        if kind == "tf32":
            full[row, 2 * chunk + {0b0100: 0, 0b1110: 1}[code]] = stored[row, chunk]
        else:
            for i, place in enumerate((code & 3, code >> 2)):
                full[row, 4 * chunk + place] = stored[row, 2 * chunk + i]
    return full


def put_metadata(tmem: Array, codes: Array, kind: str, offset: int) -> None:
    """A CTA's codes into its Tensor Memory, as the ISA's figures have them; of fewer than 128 rows several copies."""
    m = len(codes)
    if kind in ("f16", "tf32"):
        # Rows are 16 a + 8 b + c and chunks 4 d + e: lane 16 a + 8 d + c, bits 16 b + 4 e of one column.
        codes = codes.reshape(-1, 2, 8, 2, 4).transpose(0, 3, 2, 1, 4).reshape(m, 1, 8)
    words = (codes.reshape(m, -1, 8) << 4 * np.arange(8, dtype=np.uint32)).sum(axis=-1).astype(np.uint32)
    tmem[:, offset : offset + words.shape[1]] = np.tile(words, (128 // m, 1))


def put_scales(tmem: Array, factors: Array, offset: int, first_byte: int, cta: int) -> None:
    """Scale factors, (rows, blocks) bytes: row r in lane r % 32, column r // 32, in every quarter of the lanes."""
    rows, blocks = factors.shape
    bytes_ = tmem[cta].view(np.uint8).reshape(LANES, COLUMNS, 4)
    for row in range(rows):
        for quarter in range(4):
            lane, column = 32 * quarter + row % 32, offset + row // 32
            bytes_[lane, column, first_byte : first_byte + blocks] = factors[row]


def multiply(kind: str, a: Array, b: Array, scales: tuple[Array, Array] | None = None, block: int = 0) -> Array:
    """A times B transposed in float64, with a scale factor for every `block` elements of a row of either."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    if scales is not None:
        x = x * np.repeat(scales[0].astype(np.float64), block, axis=1)
        y = y * np.repeat(scales[1].astype(np.float64), block, axis=1)
    product: Array = x @ y.T
    return product


# tcgen05.ld and .st ------------------------------------------------------------------------------------------------


def move_place(shape: str, thread: int, index: int, split: int) -> tuple[int, int]:
    """Lane and column of a thread's register, as the ISA's figures of matrix fragments show them."""
    if shape == "32x32b":
        return thread, index
    if shape == "16x64b":
        # Eight rows of four threads; even threads of a pair hold rows 0-7, odd ones rows 8-15.
        return thread // 4 + 8 * (thread % 2), 2 * index + thread % 4 // 2
    if shape == "16x128b":
        return thread // 4 + 8 * (index % 2), 4 * (index // 2) + thread % 4
    if shape == "16x256b":
        return thread // 4 + 8 * (index % 4 // 2), 8 * (index // 4) + 2 * (thread % 4) + index % 2
    return thread % 16, index + split * (thread // 16)


MOVE_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
