"""Binding xl_paged_attention to its kernel: parameter record, workspace, outputs, launch."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ... import build, driver, tensor
from ...build import Kernel
from ...device import Device
from ...errors import CompileError
from ...launch import Geometry, Launcher, active_clusters
from ...tensor import Allocation, View
from ..calls import captured
from ..gpu import Launches, Results, check_record
from . import plan, spec
from .launches import RelativeScores
from .paging import cache_strides, elements_of_x, head_stride
from .spec import Problem, Views

T = TypeVar("T")

# Counters of arrived CTAs (cuda/xl_paged_attention/sm80/arrivals.cuh) lie in front of what CTAs leave behind, so that
# calls of any size can share one workspace. A kernel says how many bytes of them it uses.
_ARRIVALS_BYTES = 18432

# A kernel with more shared memory than this keeps tiles there, and wants room for as many CTAs as can run; others are
# served by L1.
_RINGS_BYTES = 16 * 1024

# A fused bias becomes a relative one: a launch ahead of the kernel computes it for every distance.
_FORMS = {"none": 0, "dense": 1, "relative": 2, "fused": 2, "alibi": 3}


class Parameters(ctypes.Structure):
    """Mirrors `Parameters` in cuda/xl_paged_attention/sm80/params.cuh; its size is compared with the kernel's own."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "k_cache", "v_cache", "block_tables", "context_lens")),
        *((name, ctypes.c_void_p) for name in ("pos_bias_u", "bias", "slopes", "k_scales", "v_scales")),
        *((name, ctypes.c_void_p) for name in ("out", "lse", "partials", "arrivals")),
        *((name, ctypes.c_int64) for name in ("query_seq_bytes", "query_head_bytes")),
        *((name, ctypes.c_int64) for name in ("k_block_bytes", "k_head_bytes", "k_token_bytes", "k_chunk_bytes")),
        *((name, ctypes.c_int64) for name in ("v_block_bytes", "v_head_bytes", "v_token_bytes", "v_channel_bytes")),
        *((name, ctypes.c_int64) for name in ("tables_seq", "lens_seq", "u_head_bytes")),
        *((name, ctypes.c_int64) for name in ("bias_seq", "bias_head", "slopes_head")),
        *((name, ctypes.c_int64) for name in ("k_scales_head", "v_scales_head")),
        *((name, ctypes.c_int64) for name in ("out_seq_bytes", "out_head_bytes", "lse_seq", "lse_head", "long_tiles")),
        *((name, ctypes.c_int32) for name in ("num_seqs", "num_kv_heads", "num_blocks", "block_size", "block_shift")),
        *((name, ctypes.c_int32) for name in ("group", "row_blocks", "capacity", "chunk")),
        *((name, ctypes.c_int32) for name in ("bias_form", "bias_wide", "u_wide", "extent", "clamp")),
        *((name, ctypes.c_int32) for name in ("large_parts", "even_parts")),
        *((name, ctypes.c_float) for name in ("score_log2", "bias_log2", "k_scale", "v_scale", "lse_unit", "max_unit")),
    )


class Workspace:
    """Memory in which the CTAs of a launch leave their parts, behind counters of them that are zero at first.

    Launches that share one must be ordered behind each other, and the first behind the stream that it is made on.

    Attributes:
        size_bytes: room for parts, beside the counters.
        arrivals: address of the counters, and of all of it.
        partials: address of the room for parts.
    """

    def __init__(self, like: Any, size_bytes: int, stream: int) -> None:
        self.size_bytes = size_bytes
        view = tensor.view(like, "query")
        self._memory: Allocation = tensor.allocate(view, (_ARRIVALS_BYTES + size_bytes,), "uint8", stream)
        self.arrivals = self._memory.ptr
        self.partials = self.arrivals + _ARRIVALS_BYTES
        driver.fill_zero(self.arrivals, _ARRIVALS_BYTES, stream)


class Binding(Launches):
    """A loaded kernel with what one problem and its layouts fix; `point` adds addresses and scales, `launch` runs it.

    One thread at a time may use it.

    Attributes:
        launcher: the laid-out launch; None when there is no sequence.
        parts_bytes: room for what a launch leaves behind on the way.
        workspace_bytes: the same and room for counters.
        place: the index of the device, and the framework whose memory it works in.
    """

    def __init__(self, views: Views, problem: Problem, device: Device, outputs: tuple[View, ...]) -> None:
        multiprocessors = driver.multiprocessor_count(device.index)
        chosen, kernel, running = _chosen(problem, device, multiprocessors)
        facts = kernel.facts
        check_record(chosen.source, facts, Parameters)
        if facts["arrivals_bytes"] > _ARRIVALS_BYTES:
            raise CompileError(
                chosen.source.path, f"counters of {facts['arrivals_bytes']} bytes, not {_ARRIVALS_BYTES}"
            )
        work = plan.units(problem, facts)
        if chosen.clusters:
            assignment = plan.assign_clusters(work.count, chosen.clusters, running, facts)
        else:
            assignment = plan.assign_work(work, multiprocessors, facts)
        self._parameters = _parameters(views, problem, outputs, work.row_blocks, assignment.fields)
        self._parts_bytes = -(-assignment.slots * facts["buffer_bytes"] // 256) * 256
        self._width = _held(min(problem.extent, problem.capacity)) if problem.bias == "fused" else 0
        self.place = device.index, views.query.framework
        self._scales = [name for name in spec.ARGUMENTS.numbers if isinstance(getattr(views, name), float)]
        self.parts_bytes = self._parts_bytes + 4 * problem.num_seqs * problem.num_heads * self._width
        self.workspace_bytes = _ARRIVALS_BYTES + self.parts_bytes
        self._scores: RelativeScores | None = None
        if views.pos_emb is not None:
            self._scores = RelativeScores(views.query, views.pos_emb, views.pos_bias_v, self._width, device)
        launcher = None
        if problem.num_seqs:
            launcher = Launcher(kernel, _geometry(facts, assignment.ctas), (self._parameters,))
            if facts["smem_bytes"] > _RINGS_BYTES:
                driver.prefer_shared_memory(kernel.function)
        super().__init__(None if self._scores is None else self._scores.launcher, launcher)

    def scale(self, *numbers: float) -> None:
        """Set those scales that are numbers for all heads."""
        for name, number in zip(self._scales, numbers, strict=True):
            setattr(self._parameters, name, number)

    def point(self, views: Views, results: Sequence[int], workspace: int) -> None:
        """Set every address. The views' layouts are those the binding was made for."""
        parameters = self._parameters
        parameters.query = views.query.ptr
        parameters.k_cache = views.k_cache.ptr
        parameters.v_cache = views.v_cache.ptr
        parameters.block_tables = views.block_tables.ptr
        parameters.context_lens = views.context_lens.ptr
        parameters.pos_bias_u = None if views.pos_bias_u is None else views.pos_bias_u.ptr
        bias = views.matrix_bd or views.rel_bias
        parameters.bias = None if bias is None else bias.ptr
        if self._scores is not None and views.pos_emb is not None:
            scores = workspace + _ARRIVALS_BYTES + self._parts_bytes
            offset = None if views.pos_bias_v is None else views.pos_bias_v.ptr
            self._scores.point(views.query.ptr, views.pos_emb.ptr, offset, scores)
            parameters.bias = scores
        parameters.slopes = None if views.alibi_slopes is None else views.alibi_slopes.ptr
        for name in spec.ARGUMENTS.numbers:
            scale: View | float = getattr(views, name)
            setattr(parameters, f"{name}s", scale.ptr if isinstance(scale, View) else None)
        parameters.out = results[0]
        parameters.lse = results[1] if len(results) > 1 else None
        parameters.partials = workspace + _ARRIVALS_BYTES
        parameters.arrivals = workspace


def _chosen(problem: Problem, device: Device, multiprocessors: int) -> tuple[plan.Plan, Kernel, int]:
    """The plan, its kernel, and how many clusters run at once where it has some.

    A part of a GPU may have room for no cluster: the kernel for any work wants none.
    """
    arch, capability = driver.arch_of(device), driver.compute_capability(device.index)
    chosen = plan.plan(problem, arch, capability, multiprocessors)
    kernel = build.kernel(chosen.source, device.index)
    if not chosen.clusters:
        return chosen, kernel, 0
    running = active_clusters(kernel, _geometry(kernel.facts, kernel.facts["cluster"]))
    if running:
        return chosen, kernel, running
    chosen = plan.plan(problem, arch, capability)
    return chosen, build.kernel(chosen.source, device.index), 0


def _geometry(facts: Mapping[str, int], ctas: int) -> Geometry:
    return Geometry((ctas, 1, 1), facts["threads"], facts["smem_bytes"], facts["cluster"])


def _held(keys: int) -> int:
    """A number of keys, or of distances, no larger than the kernel can count."""
    return min(keys, plan.MAX_CONTEXT)


def _parameters(
    views: Views, problem: Problem, outputs: tuple[View, ...], row_blocks: int, assigned: Mapping[str, int]
) -> Parameters:
    query, out = views.query.strides_bytes, outputs[0].strides_bytes
    lse = outputs[1].strides if len(outputs) > 1 else (0, 0)
    bias = views.matrix_bd or views.rel_bias
    bias_seq, bias_head = (0, 0) if bias is None else bias.strides[:2]
    if problem.bias == "fused":
        bias_head = _held(min(problem.extent, problem.capacity))
        bias_seq = problem.num_heads * bias_head
    strides = cache_strides(views.k_cache.strides_bytes, views.v_cache.strides_bytes, problem.kv_layout)
    log2e = math.log2(math.e)
    return Parameters(
        query_seq_bytes=query[0],
        query_head_bytes=query[1],
        **{f"{name}_bytes": step for name, step in strides.items()},
        tables_seq=views.block_tables.strides[0],
        lens_seq=views.context_lens.strides[0],
        u_head_bytes=0 if views.pos_bias_u is None else views.pos_bias_u.strides_bytes[0],
        bias_seq=bias_seq,
        bias_head=bias_head,
        slopes_head=0 if views.alibi_slopes is None else views.alibi_slopes.strides[0],
        k_scales_head=head_stride(views.k_scale),
        v_scales_head=head_stride(views.v_scale),
        k_scale=_number(views.k_scale),
        v_scale=_number(views.v_scale),
        out_seq_bytes=out[0],
        out_head_bytes=out[1],
        lse_seq=lse[0],
        lse_head=lse[1],
        num_seqs=problem.num_seqs,
        num_kv_heads=problem.num_kv_heads,
        num_blocks=problem.num_blocks,
        block_size=problem.block_size,
        block_shift=_log2(problem.block_size),
        group=problem.num_heads // problem.num_kv_heads,
        row_blocks=row_blocks,
        capacity=_held(problem.capacity),
        chunk=elements_of_x(problem.kv_dtype) if problem.kv_layout == "vllm" else problem.head_size,
        bias_form=_FORMS[problem.bias],
        bias_wide=int(problem.bias_dtype == "float32" or problem.bias == "fused"),
        u_wide=int(views.pos_bias_u is not None and views.pos_bias_u.dtype == "float32"),
        extent=_held(problem.extent),
        clamp=int(problem.rel_extend == "clamp"),
        **assigned,
        score_log2=problem.scale * log2e,
        bias_log2=problem.scale * log2e if problem.bias_scaled else log2e,
        lse_unit=1.0 if problem.lse_base == "2" else math.log(2.0),
        max_unit=_max_unit(problem),
    )


def _number(scale: float | View) -> float:
    """The number for all heads, which counts where there is no array."""
    return 1.0 if isinstance(scale, View) else scale


def _max_unit(problem: Problem) -> float:
    """What turns the kernel's scores, products with a rounded factor, into units of lse."""
    log2e = math.log2(math.e)
    rounded = ctypes.c_float(problem.scale * log2e).value
    unit = 1.0 if problem.lse_base == "2" else math.log(2.0)
    same_factor = problem.bias == "none" or problem.bias_scaled
    return unit * (problem.scale * log2e / rounded) if same_factor and rounded and math.isfinite(rounded) else unit


def _log2(size: int) -> int:
    """The exponent of a power of two, -1 for other sizes."""
    return size.bit_length() - 1 if size & (size - 1) == 0 else -1


class _Workspaces(threading.local):
    """This thread's workspaces, each kind emptied when full.

    Attributes:
        of_streams: by device, framework and stream, each with the id of its stream.
        of_captures: by capture as well. No capture comes again once it has ended: many must not push out the others.
    """

    def __init__(self) -> None:
        self.of_streams: dict[object, tuple[int, Workspace]] = {}
        self.of_captures: dict[object, Workspace] = {}


_workspaces = _Workspaces()
_MOST_WORKSPACES = 256


def memory(binding: Binding, like: Any, stream: int, prepared: bool) -> tuple[int, object]:
    """A workspace's address; see `cupymla.ops.calls.Calls`.

    A prepared call has one of its own. Others have this thread's for a stream, or for a stream of a capture; the latter
    is kept for good.
    """
    if prepared:
        own = Workspace(like, binding.parts_bytes, stream)
        return own.arrivals, own
    capture = driver.capture_id(stream)
    place = (*binding.place, stream)
    if capture is not None:
        kept = _workspaces.of_captures.get((*place, capture))
        if kept is None or kept.size_bytes < binding.parts_bytes:
            kept = Workspace(like, binding.parts_bytes, stream)
            _keep(_workspaces.of_captures, (*place, capture), kept)
            captured.append(kept)
        return kept.arrivals, None
    # Where a destroyed stream's address has come back, its last launch may still be at work in the workspace.
    number = driver.stream_id(stream) if stream > driver.PER_THREAD_STREAM else stream
    found = _workspaces.of_streams.get(place)
    if found is None or found[0] != number or found[1].size_bytes < binding.parts_bytes:
        found = number, Workspace(like, binding.parts_bytes, stream)
        _keep(_workspaces.of_streams, place, found)
    return found[1].arrivals, None


def _keep(workspaces: dict[object, T], key: object, made: T) -> None:
    if len(workspaces) >= _MOST_WORKSPACES:
        workspaces.clear()
    workspaces[key] = made


def wanted(views: Views, problem: Problem) -> Results:
    """Shapes and dtypes of the results."""
    rows = problem.num_seqs, problem.num_heads
    out = (*rows, problem.head_size), problem.dtype
    return (out, (rows, "float32")) if problem.return_lse else (out,)


def bind(views: Views, problem: Problem, results: Sequence[View], recorded: bool) -> Binding:
    """The kernel for these layouts; see `cupymla.ops.calls.Calls`.

    Raises UnsupportedError, CompileError, DriverError.
    """
    return Binding(views, problem, views.query.device, tuple(results))
