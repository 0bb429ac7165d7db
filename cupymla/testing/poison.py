"""Arrays with gaps of poison. Helpers take `xp`, numpy or cupy, and work the same with both."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .compare import is_float

POISON = 0xFF
"""0xFF bytes are NaN in every float dtype (e4m3fn and e5m2 included) and -1 in signed integers."""


def span_bytes(array: npt.NDArray[Any]) -> int:
    """Bytes from an array's first element to the end of its last. Raises ValueError for negative strides."""
    if any(stride < 0 for stride in array.strides):
        raise ValueError(f"negative strides: {array.strides}")
    if not array.size:
        return 0
    steps = zip(array.shape, array.strides, strict=True)
    return int(sum((extent - 1) * stride for extent, stride in steps)) + array.itemsize


def strided_like(xp: Any, array: Any) -> Any:
    """A copy of a NumPy array in xp's memory, with the same strides; the gaps between rows hold poison.

    Axes of stride 0 stay so. Raises ValueError for negative strides. Dtypes that CuPy lacks (fp8) become uint8.
    """
    dtype = array.dtype
    if xp is not np and dtype.itemsize == 1 and is_float(dtype):
        array, dtype = array.view(np.uint8), np.dtype(np.uint8)
    if array.flags.c_contiguous:
        return xp.array(array)
    distinct = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)
    memory = xp.full(max(span_bytes(array), dtype.itemsize), POISON, dtype=np.uint8).view(dtype)
    view = xp.lib.stride_tricks.as_strided(memory, array.shape, array.strides)
    view[distinct] = xp.asarray(np.ascontiguousarray(array[distinct]))
    return view
