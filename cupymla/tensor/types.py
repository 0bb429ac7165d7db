"""A view, and the element types it can have."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ..device import Device
from ..dlpack import contiguous_strides

_NUMPY_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_ML_NAMES = (
    *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"),
)

NUMPY_DTYPES: dict[str, np.dtype] = {
    **{name: np.dtype(name) for name in _NUMPY_NAMES},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_NAMES if hasattr(ml_dtypes, name)},
    "float4_e2m1fn_x2": np.dtype("uint8"),
}
"""The NumPy type that holds each label. Packed 4-bit pairs have none of their own and are bytes."""

LABELS: dict[np.dtype, str] = {dtype: name for name, dtype in NUMPY_DTYPES.items() if name != "float4_e2m1fn_x2"}
"""The label of each NumPy type, native byte order only. "float4_e2m1fn" and the 6-bit types take a byte each."""

BYTE_LABELS = frozenset(name for name, dtype in NUMPY_DTYPES.items() if dtype.itemsize == 1 and "float" in name)
"""Labels that plain bytes can be declared to be."""

strides_of = functools.lru_cache(maxsize=1024)(contiguous_strides)


@dataclass(slots=True, eq=False)
class View:
    """Somebody else's array, seen without a copy.

    Immutable by agreement: frozen dataclasses take three times as long to make, and every call makes several.

    Attributes:
        ptr: address of element 0.
        shape: extent of each axis.
        strides: distance between neighbours along each axis, in elements; may be zero or negative. An axis of extent
            1, and every axis of an empty array, has the stride of C order, whatever the array says.
        dtype: label, such as "float32", "bfloat16", "float8_e4m3fn" or "float4_e2m1fn_x2" (two per byte).
        device: where the memory is.
        readonly: whether writing is forbidden.
        framework: "numpy", "cupy", "torch", "jax", "dlpack" for any other, or "raw" for memory that is known by its
            address alone, whose stream and life are the caller's affair.
        owner: the caller's array, kept alive; None for raw memory.
        stream: the CUDA stream behind which the data is ready, as an address, when the array's protocol names one;
            None where the framework's current stream is that stream (or on the CPU).
        capsule: what else must stay alive while the memory is used, such as a DLPack capsule.
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: Device
    readonly: bool
    framework: str
    owner: object
    stream: int | None = None
    capsule: object = None

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element; a pair of 4-bit numbers is one element."""
        return NUMPY_DTYPES[self.dtype].itemsize

    @property
    def strides_bytes(self) -> tuple[int, ...]:
        """Distance between neighbours along each axis, in bytes."""
        itemsize = self.itemsize
        return tuple([stride * itemsize for stride in self.strides])

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie side by side in C order."""
        return self.strides == strides_of(self.shape)


def contiguous(like: View, shape: tuple[int, ...], dtype: str) -> View:
    """A view of memory to come, C-contiguous on the device of `like`: whoever makes it sets the address."""
    return View(0, shape, strides_of(shape), dtype, like.device, False, "raw", None)
