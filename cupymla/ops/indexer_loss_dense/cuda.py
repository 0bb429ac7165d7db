"""Binding indexer_loss_dense to its kernels: parameter records, tensor maps, workspace, launches."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ... import build, driver
from ...launch import Geometry, Launcher
from ...tensor import View
from ...tensormap import EncodedMap, TileMap
from ..gpu import Launches, Results, check_record, tiles
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
_WORKSPACE = ("lse", "target", "gradients", "states", "bounds", "largest", "largest_term", "bad_keys", "sums")
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
        *((name, ctypes.c_int32) for name in ("chunk_rows", "slices", "slice_rows", "splits_keys", "adds")),
        *((name, ctypes.c_int32) for name in ("bf16_weights", "causal", "relu", "dk_type")),
        *((name, ctypes.c_float) for name in ("scale_log2", "unit", "unit_rest")),
    )


def filled(problem: Problem, block: plan.Block, arrays: Mapping[str, View | None]) -> Parameters:
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
        splits_keys=int(plan.splits_keys(problem, block.rows)),
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


class _Scores:
    """The launch of `indexer_logits` for a block of rows."""

    def __init__(self, problem: Problem, arrays: Mapping[str, View | None], block: plan.Block) -> None:
        scores = problem.scores
        batched = bool(scores.lead)
        self._views = ScoringViews(**{name: _part_of(arrays[name], name, block, batched) for name in _SCORED})  # type: ignore[arg-type]
        options = replace(scores.options, q_start=scores.options.q_start + block.first)
        stride = plan.row_stride(problem)
        logits = View(0, (block.rows, scores.keys), (stride, 1), "float32", problem.device, False, "raw", None)
        own = replace(scores, lead=(), queries=block.rows, options=options)
        self._binding = scoring.Binding(self._views, own, logits)
        self.launcher = self._binding.launcher

    def point(self, record: Parameters) -> None:
        """Set every address to that in a record."""
        for name in _SCORED:
            seen: View | None = getattr(self._views, name)
            if seen is not None:
                seen.ptr = getattr(record, name)
        self._binding.point(self._views, (record.gradients,), 0)


class _Step:
    """The launches of some stages on a block of rows.

    Attributes:
        launchers: in order.
    """

    def __init__(
        self, problem: Problem, arrays: Mapping[str, View | None], block: plan.Block, stages: Sequence[str]
    ) -> None:
        self._layout = plan.workspace(problem)
        self._lse_before = block.first * problem.mla_heads * 8
        batched = bool(problem.scores.lead)
        self._offsets = {
            name: 0 if view is None else _before(view, name, block, batched) for name, view in arrays.items()
        }
        self._record = filled(problem, block, arrays)
        self._scores: _Scores | None = None
        self._own: list[tuple[str, Launcher]] = []
        self.launchers: list[Launcher | None] = []
        arch, index = driver.arch_of(problem.device), problem.device.index
        for stage in stages:
            ctas = plan.ctas(problem, stage, block.rows)
            if not ctas:
                continue
            source = plan.source(problem, arch, stage)
            kernel = build.kernel(source, index)
            check_record(source, kernel.facts, Parameters)
            geometry = Geometry((ctas, 1, 1), kernel.facts["threads"], kernel.facts["smem_bytes"])
            launcher = Launcher(kernel, geometry, (ctypes.c_byte(), ctypes.c_byte(), self._record))
            self._own.append((stage, launcher))
            self.launchers.append(launcher)
            if stage == "target":
                self._scores = _Scores(problem, arrays, block)
                self.launchers.append(self._scores.launcher)

    def replace(self, encoded: Sequence[Sequence[EncodedMap]]) -> None:
        """Give the launches their tensor maps: heads and keys of the indexer, then those of MLA."""
        for stage, launcher in self._own:
            for place, tensor_map in enumerate(encoded[int(stage in plan.OF_TEACHER)]):
                launcher.replace(place, tensor_map)

    def point(self, addresses: Mapping[str, int | None], workspace: int) -> None:
        """Set every address; `addresses` of whole arrays by name."""
        for name in _POINTERS:
            address = addresses[name]
            setattr(self._record, name, None if address is None else address + self._offsets[name])
        for name in _WORKSPACE:
            setattr(self._record, name, workspace + self._layout.offsets[name])
        self._record.lse += self._lse_before
        if self._scores is not None:
            self._scores.point(self._record)


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
        self._steps = [_Step(problem, arrays, block, stages) for block, stages in plan.steps(problem)]
        self._maps = maps(problem, views) if self._steps else None
        self._pointers: tuple[int, ...] | None = None
        super().__init__(*(launcher for step in self._steps for launcher in step.launchers))
        self.workspace_bytes = plan.workspace_limit(problem)

    def point(self, views: Views, results: Sequence[int], workspace: int) -> None:
        """Set every address. The views' layouts are those the binding was made for."""
        addresses: dict[str, int | None] = {}
        for name in _POINTERS[:7]:
            seen: View | None = getattr(views, name)
            addresses[name] = None if seen is None else seen.ptr
        addresses |= dict(zip(ARGUMENTS.results, results, strict=True))
        for step in self._steps:
            step.point(addresses, workspace)
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
        for step in self._steps:
            step.replace(encoded)
        self._pointers = pointers


def wanted(views: Views, problem: Problem) -> Results:
    """Shapes and dtypes of the results."""
    return problem.results


def workspace_bytes(views: Views, problem: Problem) -> int:
    """How large a workspace a call needs, in bytes. Raises UnsupportedError."""
    plan.wanted_sources(problem, driver.arch_of(problem.device))
    return plan.workspace_limit(problem)


def bind(views: Views, problem: Problem, results: Sequence[View], recorded: bool) -> Binding:
    """The kernels for these layouts; see `cupymla.ops.calls.Calls`.

    Raises UnsupportedError, CompileError, DriverError.
    """
    return Binding(views, problem, results)
