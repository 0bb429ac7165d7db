"""Binding nvfp4_gemv to its tcgen05 kernel: tensor maps, parameter record, launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ... import build
from ...build.source import KernelSource
from ...launch import Geometry, Launcher
from ...tensormap import TileMap, encoded
from ..gpu import Launches, check_record
from .model import Tiling
from .spec import OUT_DTYPES, Problem, Views
from .validation import Operand

_LARGEST_STRIDE = 2**40 - 16
_HALF_WORDS = 256  # of 2 bytes: a 128x4 block of scales, the most that a box may have


class Parameters(ctypes.Structure):
    """Mirrors `Parameters` in cuda/nvfp4_gemv/sm100/params.cuh; its size is compared with the kernel's own."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("alpha", "bias", "c")),
        *((name, ctypes.c_int64) for name in ("alpha_batch", "alpha_row")),
        *((name, ctypes.c_int64) for name in ("bias_batch", "bias_row")),
        *((name, ctypes.c_int64) for name in ("c_batch", "c_row", "c_column")),
        *((name, ctypes.c_int64) for name in ("m", "k")),
        *((name, ctypes.c_uint32) for name in ("n", "tiles")),
        ("alpha_value", ctypes.c_float),
        ("out_type", ctypes.c_int32),
    )


def fits(views: Views, problem: Problem) -> bool:
    """Whether TMA can read a, b and their scales where they lie: 16-byte steps, forward ones, from 16-byte addresses.

    False for problems that the tcgen05 kernel does not take at all.
    """
    if problem.weight_only or problem.scale_layout == "linear" or views.sfb is None:
        return False
    matrices = _steps_fit(views.a, rows=True) and _steps_fit(views.b, rows=True)
    return matrices and _steps_fit(views.sfa, rows=False) and _steps_fit(views.sfb, rows=False)


def _steps_fit(operand: Operand, rows: bool) -> bool:
    """Of an array of bytes; 128x4 scales have no strides but that between batches."""
    steps = [operand.strides[-1]] if operand.shape[-1] > 1 else []
    if rows and operand.shape[0] > 1:
        steps.append(operand.strides[0])
    return operand.view.ptr % 16 == 0 and all(0 < step <= _LARGEST_STRIDE and step % 16 == 0 for step in steps)


def row_and_batch(operand: Operand | None) -> tuple[int, int]:
    """Strides of a value per row; 0 and 0 of a single value."""
    if operand is None or operand.view.shape in ((), (1,)):
        return 0, 0
    return operand.strides[0], operand.strides[-1]


class TileBinding(Launches):
    """The tcgen05 kernel with everything that one problem and one set of strides fix; `point` adds the addresses.

    One thread at a time may use it.
    """

    def __init__(
        self, views: Views, problem: Problem, c_strides: tuple[int, int, int], source: KernelSource, tiling: Tiling
    ) -> None:
        kernel = build.kernel(source, problem.device.index)
        facts = kernel.facts
        check_record(source, facts, Parameters)
        self._problem = problem
        self._parameters = _parameters(views, problem, tiling, c_strides)
        row_bytes = facts["chunk"] // 2
        blocks = facts["scale_blocks"]
        self._boxes = (
            (row_bytes, facts["tile_rows"], 1, 1),
            (facts["scale_block_bytes"] // 2, blocks, 1, 1),
            (row_bytes, facts["columns"], 1, 1),
            (facts["vector_block_bytes"] // 2, blocks, 1, 1),
        )
        geometry = Geometry((tiling.ctas, 1, 1), facts["threads"], facts["smem_bytes"], cluster=tiling.splits)
        self._product = Launcher(kernel, geometry, (*(ctypes.c_byte() for _ in self._boxes), self._parameters))
        super().__init__(self._product)

    def point(self, views: Views, results: Sequence[int], workspace: int) -> None:
        """Set every address. The views' layouts are those of the binding."""
        parameters = self._parameters
        parameters.alpha = None if views.alpha is None else views.alpha.view.ptr
        parameters.bias = None if views.bias is None else views.bias.view.ptr
        (parameters.c,) = results
        assert views.sfb is not None  # or `fits` would have said no
        requests = (
            self._codes(views.a, self._boxes[0]),
            self._scales(views.sfa, self._problem.m, self._boxes[1]),
            self._codes(views.b, self._boxes[2]),
            self._scales(views.sfb, 0, self._boxes[3]),
        )
        for index, request in enumerate(requests):
            self._product.replace(index, encoded(request))

    def scale(self, *numbers: float) -> None:
        """Set an alpha that is a number."""
        (self._parameters.alpha_value,) = numbers

    def _codes(self, operand: Operand, box: tuple[int, ...]) -> TileMap:
        """`[bytes of a row, rows, batches, 1]`."""
        rows, row_bytes, batches = operand.shape
        row = operand.strides[0] if rows > 1 else -(-row_bytes // 16) * 16
        batch = operand.strides[-1] if batches > 1 else row
        return TileMap(operand.view.ptr, "uint8", (row_bytes, rows, batches, 1), (row, batch, batch), box)

    def _scales(self, operand: Operand, rows: int, box: tuple[int, ...]) -> TileMap:
        """`[half words of a 128x4 block, blocks of k, blocks of rows, batches]`; of b, whose rows are one block's,
        `[half words, blocks of k, batches, 1]`.
        """
        blocks = -(-self._problem.format.scale_columns(self._problem.k) // 4)
        row = 2 * _HALF_WORDS * blocks
        batches = operand.shape[-1]
        batch = operand.strides[-1] if batches > 1 else row
        shape: tuple[int, ...] = (_HALF_WORDS, blocks, batches, 1)
        strides: tuple[int, ...] = (2 * _HALF_WORDS, batch, batch)
        if rows:
            shape, strides = (_HALF_WORDS, blocks, -(-rows // 128), batches), (2 * _HALF_WORDS, row, batch)
        return TileMap(operand.view.ptr, "uint16", shape, strides, box, swizzle=0)


def _parameters(views: Views, problem: Problem, tiling: Tiling, c_strides: tuple[int, int, int]) -> Parameters:
    alpha_row, alpha_batch = row_and_batch(views.alpha)
    bias_row, bias_batch = row_and_batch(views.bias)
    return Parameters(
        alpha_batch=alpha_batch,
        alpha_row=alpha_row,
        bias_batch=bias_batch,
        bias_row=bias_row,
        c_row=c_strides[0],
        c_column=c_strides[1],
        c_batch=c_strides[2],
        m=problem.m,
        k=problem.k,
        n=problem.n,
        tiles=tiling.tiles,
        alpha_value=views.alpha_value,
        out_type=OUT_DTYPES.index(problem.out_dtype),
    )
