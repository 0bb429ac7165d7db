"""Bindings to the kernels: parameter records, outputs, launches."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

from ... import build, driver
from ...build.source import KernelSource
from ...device import Device
from ...launch import Geometry, Launcher
from ...tensor import View
from ..gpu import Launches, Results, check_record
from . import plan
from .formats import INDEXER_FP8
from .paged_spec import GATHER, WRITE, GatherProblem, GatherViews, PlacesViews, WriteProblem, WriteViews
from .records import (
    ConcatParameters,
    DequantizeParameters,
    GatherLatentParameters,
    GatherParameters,
    HadamardParameters,
    QuantizeParameters,
)
from .reference import hadamard_factor
from .spec import ARGUMENTS, DEQUANTIZE, FLOATS, HADAMARD, DequantizeViews, HadamardViews, Problem, Views

CHANNELS = 8
"""Of a thread; `kChannels` in cuda/mla_cache/sm80/floats.cuh."""

LANE_CHANNELS = 16
"""Of a thread that makes codes; `kLaneChannels` in cuda/mla_cache/sm80/group.cuh."""

_CTAS_PER_SM, _THREADS_PER_SM = 16, 4096
"""Of a grid, whichever is more: a grid-stride loop with more would only start and end them."""

_RECORDS: dict[str, type[ctypes.Structure]] = {
    "quantize_fp8": QuantizeParameters,
    "dequantize_fp8": DequantizeParameters,
    "gather_indexer_cache": GatherParameters,
    "hadamard": HadamardParameters,
    "concat_and_cache_mla": ConcatParameters,
    "gather_mla_cache": GatherLatentParameters,
}


def record(source: KernelSource) -> type[ctypes.Structure]:
    """The parameter record of a kernel."""
    return _RECORDS[source.entry]


def launcher(
    name: str,
    function: str,
    device: Device,
    record: ctypes.Structure,
    threads: int,
    cta_threads: int = 0,
    smem_bytes: int = 0,
) -> Launcher | None:
    """A launch of a grid-stride kernel; None for no thread. Raises UnsupportedError, CompileError, DriverError.

    Args:
        name: of the kernel.
        function: the public function, for errors.
        device: where.
        record: the parameters.
        threads: with something to do, over all.
        cta_threads: of a CTA; 0 for what the kernel says of itself.
        smem_bytes: beside what the kernel says of itself.
    """
    if not threads:
        return None
    source = plan.kernel(name, driver.arch_of(device), function)
    kernel = build.kernel(source, device.index)
    check_record(source, kernel.facts, type(record))
    size = cta_threads or kernel.facts["threads"]
    most = max(_CTAS_PER_SM, _THREADS_PER_SM // size) * driver.multiprocessor_count(device.index)
    number = min(-(-threads // size), most)
    return Launcher(kernel, Geometry((number, 1, 1), size, kernel.facts["smem_bytes"] + smem_bytes), (record,))


def _lay_out(record: ctypes.Structure, problem: Problem, **arrays: View) -> None:
    """Write the rows' extents and each array's strides on them, by its name, where there is something to do."""
    if math.prod(problem.shape):
        extents, strides = plan.merged(problem.rows, *(view.strides[:-1] for view in arrays.values()))
        record.extents = extents
        for name, steps in zip(arrays, strides, strict=True):
            setattr(record, f"{name}_strides", steps)


class Quantize(Launches):
    """`quantize_fp8`: a binding; see `cupymla.ops.gpu`."""

    def __init__(self, views: Views, problem: Problem, results: Sequence[View], recorded: bool) -> None:
        codes, scales = results
        self._record = QuantizeParameters(
            groups=problem.channels // problem.options.group,
            lanes_log2=(problem.options.group // LANE_CHANNELS).bit_length() - 1,
            type=FLOATS.index(problem.dtype),
            pow2=int(problem.options.scale_rule == "pow2"),
            scales_group=scales.strides[-1],
        )
        _lay_out(self._record, problem, x=views.x, codes=codes, scales=scales)
        threads = math.prod(problem.shape) // LANE_CHANNELS
        super().__init__(launcher("quantize_fp8", ARGUMENTS.operator, problem.device, self._record, threads))

    def point(self, views: Views, results: Sequence[int], workspace: int) -> None:
        """Set every address."""
        self._record.x = views.x.ptr
        self._record.codes, self._record.scales = results


class Dequantize(Launches):
    """`dequantize_fp8`: a binding; see `cupymla.ops.gpu`."""

    def __init__(self, views: DequantizeViews, problem: Problem, results: Sequence[View], recorded: bool) -> None:
        (out,) = results
        self._record = DequantizeParameters(
            channels=problem.channels,
            group_log2=problem.options.group.bit_length() - 1,
            scales_group=views.scales.strides[-1],
        )
        _lay_out(self._record, problem, codes=views.codes, scales=views.scales, out=out)
        threads = math.prod(problem.shape) // CHANNELS
        super().__init__(launcher("dequantize_fp8", DEQUANTIZE.operator, problem.device, self._record, threads))

    def point(self, views: DequantizeViews, results: Sequence[int], workspace: int) -> None:
        """Set every address."""
        self._record.codes, self._record.scales = views.codes.ptr, views.scales.ptr
        (self._record.out,) = results


class Hadamard(Launches):
    """`hadamard`: a binding; see `cupymla.ops.gpu`."""

    def __init__(self, views: HadamardViews, problem: Problem, results: Sequence[View], recorded: bool) -> None:
        (out,) = results
        lanes = problem.channels // CHANNELS
        self._record = HadamardParameters(
            lanes_log2=lanes.bit_length() - 1,
            type=FLOATS.index(problem.dtype),
            factor=hadamard_factor(problem.channels),
        )
        _lay_out(self._record, problem, x=views.x, out=out)
        threads, smem_bytes = plan.hadamard_cta(lanes)
        number = math.prod(problem.shape) // CHANNELS
        super().__init__(
            launcher("hadamard", HADAMARD.operator, problem.device, self._record, number, threads, smem_bytes)
        )

    def point(self, views: HadamardViews, results: Sequence[int], workspace: int) -> None:
        """Set every address."""
        self._record.x = views.x.ptr
        (self._record.out,) = results


def page_reciprocal(page: int) -> int:
    """Its product with a slot has the slot's block, or the one before, above bit 31."""
    return (2**32 - 1) // page


class Write(Launches):
    """`indexer_k_quant_and_cache`: a binding; see `cupymla.ops.gpu`. The kernel is that of `quantize_fp8`."""

    def __init__(self, views: WriteViews, problem: WriteProblem, results: Sequence[View], recorded: bool) -> None:
        pages, slots = problem.pages, views.slot_mapping
        self._record = QuantizeParameters(
            extents=(1, 1, problem.tokens),
            x_strides=(0, 0, views.k.strides[0]),
            slots_row=slots.strides[0],
            block_bytes=pages.block_bytes,
            num_slots=pages.num_slots,
            page=pages.page,
            page_reciprocal=page_reciprocal(pages.page),
            slots_wide=int(slots.dtype == "int64"),
            groups=1,
            lanes_log2=(INDEXER_FP8.channels // LANE_CHANNELS).bit_length() - 1,
            type=FLOATS.index(problem.dtype),
            pow2=int(problem.options.scale_rule == "pow2"),
        )
        # Without a slot there is nothing to write, and no address.
        threads = problem.tokens * INDEXER_FP8.channels // LANE_CHANNELS if pages.num_slots else 0
        super().__init__(launcher("quantize_fp8", WRITE.operator, problem.device, self._record, threads))

    def point(self, views: WriteViews, results: Sequence[int], workspace: int) -> None:
        """Set every address."""
        record = self._record
        record.x, record.codes, record.slots = views.k.ptr, views.cache.ptr, views.slot_mapping.ptr


def lay_out_places(record: Any, views: PlacesViews) -> None:
    """Write the strides of what names a gather's places."""
    slots, tables, lens = views.slots, views.block_tables, views.cu_lens
    if slots is not None:
        record.slots_row, record.slots_wide = slots.strides[0], int(slots.dtype == "int64")
    elif tables is not None and lens is not None:
        record.requests, record.width = tables.shape
        record.tables_request, record.tables_block = tables.strides
        (record.lens_request,) = lens.strides


def point_at_places(record: Any, views: PlacesViews) -> None:
    """Set the addresses of the cache and of what names a gather's places."""
    record.cache = views.cache.ptr
    for name in ("slots", "block_tables", "cu_lens"):
        seen = getattr(views, name)
        setattr(record, name, None if seen is None else seen.ptr)


_GATHERED_BYTES = 16
"""Of a thread; `kBytes` in cuda/mla_cache/sm80/gather_indexer_cache.cu."""


class Gather(Launches):
    """`gather_indexer_cache`: a binding; see `cupymla.ops.gpu`."""

    def __init__(self, views: GatherViews, problem: GatherProblem, results: Sequence[View], recorded: bool) -> None:
        k, k_scale = results
        pages = problem.pages
        self._record = GatherParameters(
            k_row=k.strides[0],
            k_scale_row=k_scale.strides[0],
            block_bytes=pages.block_bytes,
            num_slots=pages.num_slots,
            rows=problem.rows,
            page=pages.page,
            blocks=pages.blocks,
        )
        lay_out_places(self._record, views)
        threads = problem.rows * INDEXER_FP8.channels // _GATHERED_BYTES
        super().__init__(launcher("gather_indexer_cache", GATHER.operator, problem.device, self._record, threads))

    def point(self, views: GatherViews, results: Sequence[int], workspace: int) -> None:
        """Set every address."""
        record = self._record
        point_at_places(record, views)
        record.k, record.k_scale = results


def hadamard_wanted(views: HadamardViews, problem: Problem) -> Results:
    """Shape and dtype of the result of `hadamard`."""
    return ((problem.shape, problem.dtype),)


def nothing_wanted(views: object, problem: object) -> Results:
    """What is written in place makes no results."""
    return ()


def gather_wanted(views: GatherViews, problem: GatherProblem) -> Results:
    """Shapes and dtypes of the results of `gather_indexer_cache`."""
    return ((problem.rows, INDEXER_FP8.channels), "float8_e4m3fn"), ((problem.rows,), "float32")


def wanted(views: Views, problem: Problem) -> Results:
    """Shapes and dtypes of the results of `quantize_fp8`."""
    groups = problem.channels // problem.options.group
    return (problem.shape, "float8_e4m3fn"), ((*problem.rows, groups), "float32")


def dequantize_wanted(views: DequantizeViews, problem: Problem) -> Results:
    """Shape and dtype of the result of `dequantize_fp8`."""
    return ((problem.shape, problem.dtype),)
