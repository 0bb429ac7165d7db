"""Binding indexer_loss_dense to its kernels: parameter records, tensor maps, workspace, launches."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

from ... import build, driver
from ...launch import Geometry, Launcher
from ...tensor import View
from ...tensormap import TileMap
from ..bound import Launches, Results
from ..gpu import check_record, tiles
from ..indexer_logits import cuda as scoring
from ..indexer_logits.spec import Views as ScoringViews
from ..log2_scales import log2_scales
from ..mla import set_strides
from . import plan
from .spec import ARGUMENTS, OPERATOR, Problem, Views

_AXES = {
    "q": ("query", "head"),
    "k": ("key",),
    "weights": ("query", "head"),
    "mla_lse": ("query", "head"),
    **dict.fromkeys(("starts", "ends", "grad_loss", "loss"), ("query",)),
    "dq": ("query", "head"),
    "dk": ("key",),
    "dweights": ("query", "head"),
}
_EVERY_AXIS = ("weights", "mla_lse", "starts", "ends", "grad_loss", "loss", "dweights")
"""Arrays whose axes all have a field, but the batch's; others end with a contiguous one that has none."""

_POINTERS = ("q", "k", "weights", "mla_lse", "starts", "ends", "grad_loss", "loss", "dq", "dk", "dweights")
_WORKSPACE = (*("lse", "target", "gradients", "states", "bounds", "largest", "largest_term", "bad_keys", "sums"),)
_SCORED = ("q", "k", "weights", "starts", "ends")
_MAPPED = (("q", "k"), ("mla_q", "mla_kv"))
"""Arrays of the two tensor maps, of stages that work on the indexer and on MLA."""

_DK_TYPES = ("bfloat16", "float16", "float32")


class Parameters(ctypes.Structure):
    """Mirrors `Parameters` in cuda/indexer_loss_dense/sm90/params.cuh; its size is compared with the kernels' own."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_POINTERS, *_WORKSPACE)),
        *((f"{name}_{axis}", ctypes.c_int64) for name, axes in _AXES.items() for axis in axes),
        *((name, ctypes.c_int64) for name in ("row_stride", "q_start", "k_stride")),
        *((name, ctypes.c_int32) for name in ("batch", "first_query", "queries", "keys", "heads", "mla_heads")),
        *((name, ctypes.c_int32) for name in ("chunk_rows", "slices", "slice_rows", "adds")),
        *((name, ctypes.c_int32) for name in ("bf16_weights", "causal", "relu", "dk_type")),
        *((name, ctypes.c_float) for name in ("scale_log2", "unit", "unit_rest")),
    )


def filled(problem: Problem, block: plan.Block, arrays: dict[str, View | None]) -> Parameters:
    """The parameters of a block's launches, without addresses; `arrays` by name, outputs included."""
    scores, options = problem.scores, problem.options
    scales = log2_scales(options.scale(problem.mla_channels), options.lse_base)
    made = Parameters(
        row_stride=plan.row_stride(problem),
        q_start=options.q_start + block.first,
        k_stride=options.k_stride,
        batch=block.entry,
        first_query=block.first,
        queries=block.rows,
        keys=scores.keys,
        heads=scores.heads,
        mla_heads=problem.mla_heads,
        chunk_rows=plan.chunk_rows(problem),
        slices=plan.slices(problem),
        slice_rows=plan.slice_rows(problem),
        adds=int(block.first > 0),
        bf16_weights=int(problem.weights_dtype == "bfloat16"),
        causal=int(options.causal),
        relu=int(options.relu),
        dk_type=_DK_TYPES.index(problem.dk_dtype),
        scale_log2=scales.score,
        unit=scales.unit,
        unit_rest=scales.unit_rest,
    )
    batched = int(bool(scores.lead))
    for name, axes in _AXES.items():
        view = arrays[name]
        entry = None if view is None else replace(view, shape=view.shape[batched:], strides=view.strides[batched:])
        set_strides(made, name, entry, axes, more=int(name not in _EVERY_AXIS))
    return made


def maps(problem: Problem, views: Views) -> tuple[tuple[TileMap, TileMap], tuple[TileMap, TileMap]]:
    """Tiles of heads and of keys, of the indexer and of MLA; an array without elements has the other's address."""
    made = []
    for (heads_name, keys_name), heads, channels in zip(
        _MAPPED,
        (problem.scores.heads, problem.mla_heads),
        (problem.scores.channels, problem.mla_channels),
        strict=True,
    ):
        scores = problem.scores
        queries, keys = max(1, scores.queries), max(1, scores.keys)
        problem_like = replace(scores, heads=heads, channels=channels, queries=queries, keys=keys)
        own = plan.tile_heads(heads)
        of_heads = {"tile_bytes": 128, "tile_heads": own, "tile_queries": plan.COLUMNS // own}
        made.append(
            (
                scoring.q_tiles(problem_like, getattr(views, heads_name), of_heads),
                scoring.k_tiles(problem_like, getattr(views, keys_name), {"tile_bytes": 128, "tile_keys": 64}),
            )
        )
    return made[0], made[1]


class _Part:
    """The launches of a block of rows."""

    def __init__(self, views: Views, problem: Problem, arrays: dict[str, View | None], block: plan.Block) -> None:
        scores, index = problem.scores, problem.device.index
        self._block, self._layout = block, plan.workspace(problem)
        batched = bool(scores.lead)
        self._offsets = {
            name: 0 if view is None else _before(view, name, block, batched) for name, view in arrays.items()
        }
        self.record = filled(problem, block, arrays)
        self._scored = ScoringViews(**{name: _part_of(arrays[name], name, block, batched) for name in _SCORED})  # type: ignore[arg-type]
        own_options = replace(scores.options, q_start=scores.options.q_start + block.first)
        own_scores = replace(scores, lead=(), queries=block.rows, options=own_options)
        stride = plan.row_stride(problem)
        logits = View(0, (block.rows, scores.keys), (stride, 1), "float32", problem.device, False, "raw", None)
        self._scoring = scoring.Binding(self._scored, own_scores, logits)
        arch = driver.arch_of(problem.device)
        self._launchers: dict[str, Launcher] = {}
        for stage in plan.STAGES:
            ctas = plan.ctas(problem, stage, block.rows)
            is_last = block.first + block.rows == scores.queries
            if not ctas or (stage == "mask" and block.first) or (stage == "round" and not is_last):
                continue
            source = plan.source(problem, arch, stage)
            kernel = build.kernel(source, index)
            check_record(source, kernel.facts, Parameters)
            geometry = Geometry((ctas, 1, 1), kernel.facts["threads"], kernel.facts["smem_bytes"])
            self._launchers[stage] = Launcher(kernel, geometry, (ctypes.c_byte(), ctypes.c_byte(), self.record))

    def launchers(self) -> list[Launcher | None]:
        """In order."""
        found: list[Launcher | None] = []
        for stage in plan.STAGES:
            found.append(self._launchers.get(stage))
            if stage == "target":
                found.append(self._scoring.launcher)
        return found

    def replace(self, encoded: Sequence[Sequence[object]]) -> None:
        """Give the launches their tensor maps: heads and keys of the indexer, then those of MLA."""
        for stage, launcher in self._launchers.items():
            for place, tensor_map in enumerate(encoded[int(stage in ("lse", "target"))]):
                launcher.replace(place, tensor_map)  # type: ignore[arg-type]

    def point(self, addresses: dict[str, int | None], workspace: int) -> None:
        """Set every address; `addresses` of whole arrays by name."""
        for name in _POINTERS:
            address = addresses[name]
            setattr(self.record, name, None if address is None else address + self._offsets[name])
        for name in _WORKSPACE:
            setattr(self.record, name, workspace + self._layout.offsets[name])
        for name in _SCORED:
            seen: View | None = getattr(self._scored, name)
            if seen is not None:
                seen.ptr = getattr(self.record, name)
        self._scoring.point(self._scored, (self.record.gradients,), 0)


def _before(view: View, name: str, block: plan.Block, batched: bool) -> int:
    """Bytes from an array's first element to that of a block's part."""
    entry = block.entry * view.strides[0] if batched else 0
    first = 0 if name in ("k", "dk") else block.first * view.strides[int(batched)]
    return (entry + first) * view.itemsize


def _part_of(view: View | None, name: str, block: plan.Block, batched: bool) -> View | None:
    """A block's part of an array, as a view whose address is still to be set."""
    if view is None:
        return None
    shape, strides = view.shape[int(batched) :], view.strides[int(batched) :]
    if name != "k":
        shape = (block.rows, *shape[1:])
    return replace(view, shape=shape, strides=strides, owner=None, capsule=None, stream=None)


class Binding(Launches):
    """The kernels with everything that one problem and its layouts fix."""

    def __init__(self, views: Views, problem: Problem, results: Sequence[View]) -> None:
        arrays: dict[str, View | None] = {name: getattr(views, name) for name in _POINTERS[:7]}
        arrays |= dict(zip(ARGUMENTS.results, results, strict=True))
        self._parts = [_Part(views, problem, arrays, block) for block in plan.blocks(problem)]
        self._maps = maps(problem, views) if self._parts else None
        self._pointers: tuple[int, ...] | None = None
        super().__init__(*(launcher for part in self._parts for launcher in part.launchers()))
        self.workspace_bytes = plan.workspace_limit(problem)

    def point(self, views: Views, results: Sequence[int], workspace: int) -> None:
        """Set every address. The views' layouts are those the binding was made for."""
        addresses: dict[str, int | None] = {}
        for name in _POINTERS[:7]:
            seen: View | None = getattr(views, name)
            addresses[name] = None if seen is None else seen.ptr
        addresses |= dict(zip(ARGUMENTS.results, results, strict=True))
        for part in self._parts:
            part.point(addresses, workspace)
        pointers = tuple(getattr(views, name).ptr for names in _MAPPED for name in names)
        if self._maps is None or pointers == self._pointers:
            return
        self._pointers = None
        encoded = [
            [
                tiles(request._replace(ptr=getattr(views, name).ptr or workspace), name, OPERATOR)
                for request, name in zip(requests, names, strict=True)
            ]
            for requests, names in zip(self._maps, _MAPPED, strict=True)
        ]
        for part in self._parts:
            part.replace(encoded)
        self._pointers = pointers


def wanted(views: Views, problem: Problem) -> Results:
    """Shapes and dtypes of the results."""
    return problem.results


def workspace_bytes(views: Views, problem: Problem) -> int:
    """How large a workspace a call needs, in bytes. Raises UnsupportedError."""
    plan.wanted_sources(problem, driver.arch_of(problem.device))
    return plan.workspace_limit(problem)


def bind(views: Views, problem: Problem, results: Sequence[View], recorded: bool) -> Binding:
    """The kernels for these layouts; see `cupymla.ops.bound.Operation`.

    Raises UnsupportedError, CompileError, DriverError.
    """
    return Binding(views, problem, results)
