"""Binding indexer_logits to its kernel: tensor maps, parameter record, output, launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence

from ... import build, driver
from ...launch import Geometry, Launcher
from ...tensor import View
from ...tensormap import TileMap
from ..gpu import Launches, Results, check_record, tiles
from ..mla import batched_strides, set_strides
from ..work_assignment import WorkAssignment
from . import plan
from .spec import OPERATOR, Problem, Views

_HEADED = ("weights", "q_scale")
_ARRAYS = (*_HEADED, "k_scale", "starts", "ends", "logits")


class Parameters(ctypes.Structure):
    """Mirrors `Parameters` in cuda/indexer_logits/sm90/params.cuh; its size is compared with the kernel's own."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        *((f"{name}_{axis}", ctypes.c_int64) for name in _HEADED for axis in ("batch", "query", "head")),
        *((f"k_scale_{axis}", ctypes.c_int64) for axis in ("batch", "key")),
        *((f"{name}_{axis}", ctypes.c_int64) for name in ("starts", "ends", "logits") for axis in ("batch", "query")),
        *((name, ctypes.c_int64) for name in ("q_start", "k_stride")),
        *((name, ctypes.c_int32) for name in ("batch", "queries", "keys", "heads", "query_tiles", "key_tiles")),
        *((name, ctypes.c_int32) for name in ("bf16_weights", "causal")),
        ("floor", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("fills", "has_dependent")),
    )


def filled(problem: Problem, work: WorkAssignment, views: Views, logits: View) -> Parameters:
    """The parameters of a launch."""
    made = Parameters(
        q_start=problem.options.q_start,
        k_stride=problem.options.k_stride,
        batch=problem.batch,
        queries=problem.queries,
        keys=problem.keys,
        heads=problem.heads,
        bf16_weights=int(views.weights.dtype == "bfloat16"),
        causal=int(problem.options.causal),
        floor=0.0 if problem.options.relu else -math.inf,
        **work.fields,
    )
    axes = {"weights": "batch query head", "q_scale": "batch query head", "k_scale": "batch key"}
    for name in _ARRAYS:
        seen = logits if name == "logits" else getattr(views, name)
        setattr(made, name, None if seen is None else seen.ptr)
        set_strides(made, name, seen, axes.get(name, "batch query").split(), more=int(name == "logits"))
    return made


def q_tiles(problem: Problem, q: View, facts: Mapping[str, int]) -> TileMap:
    """Tiles of q: channels, heads, queries, batch."""
    batch, query, head, _ = (stride * q.itemsize for stride in batched_strides(q.strides, 4))
    shape = (problem.channels, problem.heads, problem.queries, problem.batch)
    box = (facts["tile_bytes"] // q.itemsize, facts["tile_heads"], facts["tile_queries"], 1)
    return tile_map(problem, q, shape, (head, query, batch), box, facts["tile_bytes"])


def k_tiles(problem: Problem, k: View, facts: Mapping[str, int]) -> TileMap:
    """Tiles of k: channels, keys, batch, and an axis of extent 1."""
    batch, key, _ = (stride * k.itemsize for stride in batched_strides(k.strides, 3))
    shape = (problem.channels, problem.keys, problem.batch, 1)
    box = (facts["tile_bytes"] // k.itemsize, facts["tile_keys"], 1, 1)
    return tile_map(problem, k, shape, (key, batch, 0), box, facts["tile_bytes"])


def tile_map(
    problem: Problem,
    view: View,
    shape: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> TileMap:
    """Tiles of an array of channels and three more axes. One of extent 1 may have any stride, and drivers need not take
    all."""
    strides = tuple(
        stride if extent > 1 else problem.channels * view.itemsize
        for stride, extent in zip(strides_bytes, shape[1:], strict=True)
    )
    return TileMap(view.ptr, problem.dtype, shape, strides, box, swizzle)


class Binding(Launches):
    """The kernel with everything that one problem and its layouts fix; it launches nothing without a query or a key."""

    def __init__(
        self,
        views: Views,
        problem: Problem,
        logits: View,
        *,
        fills: bool = True,
        dependent: bool = False,
        has_dependent: bool = False,
    ) -> None:
        """Bind arrays of these layouts. `fills`: whether scores of keys that a query does not see are written.
        `dependent`, `has_dependent`: whether a kernel of the same call comes before and after it, and may overlap.

        Raises UnsupportedError, CompileError, DriverError.
        """
        self._pointers: tuple[int, int] | None = None
        launcher = None
        if 0 not in problem.shape:
            index = problem.device.index
            source = plan.plan(problem, driver.arch_of(problem.device))
            kernel = build.kernel(source, index)
            facts = kernel.facts
            check_record(source, facts, Parameters)
            work = plan.work_assignment(problem, facts, driver.multiprocessor_count(index))
            geometry = Geometry(
                (work.ctas, 1, 1), facts["threads"], facts["smem_bytes"], facts["cluster"], pdl=dependent
            )
            self._record = filled(problem, work, views, logits)
            self._record.fills, self._record.has_dependent = int(fills), int(has_dependent)
            self._maps = q_tiles(problem, views.q, facts), k_tiles(problem, views.k, facts)
            launcher = Launcher(kernel, geometry, (ctypes.c_byte(), ctypes.c_byte(), self._record))
        super().__init__(launcher)

    def point(self, views: Views, results: Sequence[int], workspace: int) -> None:
        """Set every address. The views' layouts are those the binding was made for."""
        if self.launcher is None:
            return
        pointers = views.q.ptr, views.k.ptr
        if self._pointers != pointers:
            self._pointers = None
            self.launcher.replace(0, tiles(self._maps[0]._replace(ptr=views.q.ptr), "q", OPERATOR))
            self.launcher.replace(1, tiles(self._maps[1]._replace(ptr=views.k.ptr), "k", OPERATOR))
            self._pointers = pointers
        for name in _ARRAYS[:-1]:
            seen: View | None = getattr(views, name)
            setattr(self._record, name, None if seen is None else seen.ptr)
        (self._record.logits,) = results


def wanted(views: Views, problem: Problem) -> Results:
    """Shape and dtype of the result."""
    return ((problem.shape, "float32"),)


def bind(views: Views, problem: Problem, results: Sequence[View], recorded: bool) -> Binding:
    """The kernel for these layouts; see `cupymla.ops.calls.Calls`.

    Raises UnsupportedError, CompileError, DriverError.
    """
    return Binding(views, problem, results[0])
