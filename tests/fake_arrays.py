"""Arrays of libraries that nobody knows, and views of memory that nobody reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupymla import dlpack
from cupymla.dlpack import Seen
from cupymla.tensor import Device, View
from cupymla.tensor.types import LABELS

CPU, CUDA0, CUDA1 = Device("cpu"), Device("cuda", 0), Device("cuda", 1)


class Foreign:
    """An array that has nothing but DLPack."""

    def __init__(self, kind: int = dlpack.CUDA, index: int = 1, flags: int = 0, host: Any = None) -> None:
        self.host = np.zeros((2, 3), np.float32) if host is None else host
        strides = tuple(s // self.host.itemsize for s in self.host.strides)
        self.seen = Seen(self.host.ctypes.data, self.host.shape, strides, LABELS[self.host.dtype], kind, index, flags)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.seen.kind, self.seen.index

    def __dlpack__(self, *, stream: Any = None, max_version: tuple[int, int] | None = None) -> object:
        return dlpack.export(self.seen, self, max_version is not None)


class Interface:
    """An array that has nothing but `__cuda_array_interface__`."""

    def __init__(self, **facts: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (2, 3),
            "typestr": "<f4",
            "data": (0x1000, False),
            "version": 3,
            **facts,
        }


def view_at(
    ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str = "int16", device: Device = CUDA0
) -> View:
    """A view of made-up memory."""
    return View(ptr, shape, strides, dtype, device, False, "cupy", None)
