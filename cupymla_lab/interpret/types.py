"""PTX's types as NumPy's.

Source: PTX ISA 9.0, "Types"; "Alternate Floating-Point Data Formats" for bf16 and the packed pairs.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
DType: TypeAlias = "np.dtype[Any]"

BOOL: DType = np.dtype(np.bool_)
BF16: DType = np.dtype(ml_dtypes.bfloat16)
F16: DType = np.dtype(np.float16)
F32: DType = np.dtype(np.float32)
F64: DType = np.dtype(np.float64)
E4M3: DType = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2: DType = np.dtype(ml_dtypes.float8_e5m2)

_WORDS = {
    f"{kind}{8 * size}": np.dtype(f"{'i' if kind == 's' else 'u'}{size}") for kind in "sub" for size in (1, 2, 4, 8)
}
TYPES: dict[str, DType] = {
    **_WORDS,
    "f16": F16,
    "bf16": BF16,
    "f32": F32,
    "f64": F64,
    "f16x2": np.dtype(np.uint32),
    "bf16x2": np.dtype(np.uint32),
    "pred": BOOL,
}
HALVES: dict[str, DType] = {"f16": F16, "bf16": BF16, "f16x2": F16, "bf16x2": BF16}
"""The element of a 16-bit float type or of a pair of them."""

SMALLEST_NORMAL = np.float32(2.0**-126)


def is_float(kind: str) -> bool:
    """Whether a PTX type is a floating-point type, pairs included."""
    return kind[0] == "f" or kind.startswith("bf")


def unsigned(bytes_: int) -> DType:
    """The unsigned word of that many bytes."""
    return np.dtype(f"u{bytes_}")


def register_dtype(kind: str) -> DType:
    """What a register of a PTX type is stored as: bits, or a truth value."""
    return BOOL if kind == "pred" else unsigned(TYPES[kind].itemsize)


def halves(words: Array, element: DType) -> Array:
    """32-bit words as `[n, 2]` 16-bit numbers, the lower half first."""
    return np.ascontiguousarray(words).view(np.uint16).view(element).reshape(-1, 2)


def joined(pairs: Array) -> Array:
    """`[n, 2]` 16-bit numbers as n 32-bit words, the first in the lower half."""
    words: Array = np.ascontiguousarray(pairs).view(np.uint16).reshape(-1, 2).view(np.uint32).reshape(-1)
    return words


def wide(numbers: Array) -> Array:
    """16-bit floats as float32."""
    if numbers.dtype == BF16:
        bits: Array = np.ascontiguousarray(numbers).view(np.uint16).astype(np.uint32) << np.uint32(16)
        single: Array = bits.view(np.float32)
        return single
    return numbers.astype(np.float32)


def flushed(x: Array) -> Array:
    """float32 numbers with subnormal ones replaced by zeros of their sign (`.ftz`)."""
    flat: Array = np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x).astype(np.float32)
    return flat
