"""The GEMM of gemm.cu, compiled for sm_100f, translated, launched."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from device import Kernel, Memory, Where, tile_map

from cupymla import build as service
from cupymla import tensormap
from cupymla.build import KernelSource
from cupymla.launch import Geometry
from cupymla_lab.emulate import Program, Settings, build
from cupymla_lab.emulate.host.library import Model

SOURCE = KernelSource("gemm.cu", "gemm", arch="sm_100f", root=str(Path(__file__).resolve().parent))
TILE_M, TILE_N, TILE_K = 128, 64, 64
THREADS, SMEM_BYTES = 192, 107520


class Parameters(ctypes.Structure):
    """`Parameters` of gemm.cu."""

    _fields_ = (("tiles_m", ctypes.c_uint32), ("tiles_n", ctypes.c_uint32), ("tiles_k", ctypes.c_uint32))


@functools.cache
def ptx() -> str:
    return service.ptx(SOURCE)


@functools.cache
def program() -> Program:
    return build(ptx(), "gemm.ptx")


@functools.cache
def _on_gpu() -> Runner:
    return Runner("gpu")


def run_on_gpu(settings: Settings) -> float:
    """`Runner.run` on a GPU, as a function that another process finds by its name."""
    return _on_gpu().run(settings)


class Runner:
    """A loaded GEMM with a problem in memory. K is no multiple of the ring, and every CTA has more than two tiles."""

    def __init__(
        self, where: Where, m: int = 256, n: int = 192, k: int = 320, ctas: int = 2, model: Model = "native"
    ) -> None:
        self.kernel = Kernel(ptx(), "gemm.ptx", where, model=model)
        self._shape, self._ctas, self._where = (m, n, k), ctas, where
        rng = np.random.default_rng(7)
        self._a = rng.integers(-3, 4, (m, k)).astype(ml_dtypes.bfloat16)
        self._b = rng.integers(-3, 4, (n, k)).astype(ml_dtypes.bfloat16)
        self._memory = [Memory(array, where) for array in (self._a, self._b)]

    def _maps(self, d: Memory) -> list[Any]:
        m, n, k = self._shape
        a, b = (memory.pointer for memory in self._memory)
        requests = (
            tensormap.TileMap(a, "bfloat16", (k, m), (2 * k,), (TILE_K, TILE_M)),
            tensormap.TileMap(b, "bfloat16", (k, n), (2 * k,), (TILE_K, TILE_N)),
            tensormap.TileMap(d.pointer, "float32", (n, m), (4 * n,), (32, TILE_M), 0),
        )
        return [tile_map(request, self._where) for request in requests]

    def run(self, settings: Settings) -> float:
        """The largest error of a run; NaN where an element was not written."""
        m, n, k = self._shape
        d = Memory(np.full((m, n), np.nan, np.float32), self._where)
        try:
            geometry = Geometry((self._ctas, 1, 1), THREADS, SMEM_BYTES)
            parameters = Parameters(m // TILE_M, n // TILE_N, k // TILE_K)
            self.kernel.launch(geometry, [*self._maps(d), parameters], settings)
            wanted = self._a.astype(np.float64) @ self._b.astype(np.float64).T
            return float(np.max(np.abs(d.read() - wanted)))
        finally:
            d.free()
