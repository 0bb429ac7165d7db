"""Memory that shows what was not written and what was written beside, with numpy and cupy alike."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from cupymla.testing.compare import Mismatch
from cupymla.testing.poison import POISON

GUARD_BYTES = 1024
_GUARD = 0xA5


class Guarded:
    """An array filled with poison, between two guard zones.

    Attributes:
        array: C-contiguous, of the asked shape and dtype, each byte 0xFF. It starts `GUARD_BYTES` into an allocation,
            so it is aligned as the allocation is (256 bytes under CuPy), up to 1024 bytes.

    Args:
        xp: numpy or cupy.
        shape: of the array.
        dtype: of the array.
        alignment: that the array is to have in NumPy's memory, a power of two up to 1024.
    """

    def __init__(self, xp: Any, shape: tuple[int, ...], dtype: Any, alignment: int = 1) -> None:
        self._shape, self._dtype = shape, np.dtype(dtype)
        self._size = math.prod(shape) * self._dtype.itemsize
        whole = xp.full(self._size + 2 * GUARD_BYTES + alignment - 1, _GUARD, dtype=np.uint8)
        first = -whole.ctypes.data % alignment if alignment > 1 else 0
        self._bytes = whole[first : first + self._size + 2 * GUARD_BYTES]
        inside = self._bytes[GUARD_BYTES : GUARD_BYTES + self._size]
        inside[...] = POISON
        self.array = inside.view(self._dtype).reshape(shape)

    def poison(self) -> None:
        """Fill the array with poison again."""
        self._bytes[GUARD_BYTES : GUARD_BYTES + self._size] = POISON

    def to_numpy(self) -> npt.NDArray[Any]:
        """The array's present content, in host memory."""
        content = self._bytes[GUARD_BYTES : GUARD_BYTES + self._size]
        host: npt.NDArray[Any] = content.copy() if isinstance(content, np.ndarray) else content.get()
        typed: npt.NDArray[Any] = host.view(self._dtype).reshape(self._shape)
        return typed

    def check(self, name: str) -> None:
        """Raise Mismatch when a guard zone was written to."""
        for side, zone in (("before", self._bytes[:GUARD_BYTES]), ("after", self._bytes[GUARD_BYTES + self._size :])):
            touched = (zone != _GUARD).nonzero()[0]
            if len(touched):
                offset = int(touched[0])
                raise Mismatch(f"{name}: wrote outside: {len(touched)} guard bytes {side} it, the first at {offset}")
