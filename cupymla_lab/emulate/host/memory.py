"""The arrays of global memory that a kernel on the host may use: what lies outside of them, or was never written, is no
memory of its."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt


class _Region(ctypes.Structure):
    """`Region` of memory.hpp."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("written", ctypes.c_uint64),
        ("launches", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("writable", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class _Watched(ctypes.Structure):
    """`Watched` of memory.hpp."""

    _fields_ = (("base", ctypes.c_uint64), ("size", ctypes.c_uint64))


_WATCHER = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)

Watcher = Callable[[int, int, bool, bool], None]
"""Is told of a use of memory before it happens: address, bytes, whether it loads and whether it stores."""


class Arrays:
    """Memory that launches use, by its host addresses. Whoever adds it keeps it alive."""

    def __init__(self) -> None:
        self._regions: list[_Region] = []
        self._written: dict[int, npt.NDArray[np.uint8]] = {}
        self._launches: dict[int, npt.NDArray[np.uint32]] = {}
        self._watched: list[tuple[int, int, Watcher]] = []
        self.launch = 0
        """The number of the last launch, from 1."""
        self.beside: frozenset[int] = frozenset()
        """Launches that may still run beside the next one, if that is a dependent one."""

    def add(self, name: str, base: int, size: int, writable: bool = True, initialised: bool = True) -> None:
        """Let kernels use some memory.

        Args:
            name: for messages.
            base: the address of its first byte.
            size: in bytes; nothing is added where it is 0.
            writable: whether they may write to it.
            initialised: False when a kernel must write a byte before it may read it.
        """
        if not size:
            return
        region = _Region(base, size, 0, 0, name.encode(), writable)
        if not initialised:
            written = self._written[base] = np.zeros(size, np.uint8)
            region.written = written.ctypes.data
        self._regions.append(region)

    def initialise(self, base: int, size: int) -> None:
        """Note that something else than a kernel has written these bytes."""
        for region in self._regions:
            written = self._written.get(region.base)
            if written is not None and region.base <= base < region.base + region.size:
                written[base - region.base : base - region.base + size] = 1

    def remember(self) -> None:
        """From now on note which launch has written each byte last, for `ld.global.nc` in the one behind it."""
        for region in self._regions:
            if region.writable and region.base not in self._launches:
                kept = self._launches[region.base] = np.zeros(region.size, np.uint32)
                region.launches = kept.ctypes.data

    def watch(self, base: int, size: int, watcher: Watcher) -> None:
        """Have somebody told of each use of some memory, who may change what is there."""
        self._watched.append((base, size, watcher))

    def watched(self) -> tuple[ctypes.Array[_Watched], Any]:
        """What is watched, as the runtime reads it, and the function that it calls."""

        def told(address: int, size: int, how: int) -> None:
            for base, length, watcher in self._watched:
                if address < base + length and base < address + size:
                    watcher(address, size, bool(how & 1), bool(how & 2))

        return (_Watched * len(self._watched))(*(each[:2] for each in self._watched)), _WATCHER(told)  # type: ignore[misc]

    def table(self) -> ctypes.Array[_Region]:
        """All of it, by rising addresses, as the runtime reads it."""
        ordered = sorted(self._regions, key=lambda region: int(region.base))
        return (_Region * len(ordered))(*ordered)
