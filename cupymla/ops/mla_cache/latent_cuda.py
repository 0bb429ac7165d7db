"""Bindings to the kernels on caches of latents."""

from __future__ import annotations

from collections.abc import Sequence

from ...tensor import View
from ..gpu import Launches, Results
from .cuda import CHANNELS, LANE_CHANNELS, launcher, lay_out_places, page_reciprocal, point_at_places
from .latent_spec import CONCAT, GATHER, ConcatProblem, ConcatViews, GatherProblem, GatherViews
from .records import ConcatParameters, GatherLatentParameters
from .spec import FLOATS

_WARP = 32
"""Threads that have a token; `kWarp` in cuda/mla_cache/sm80/concat_and_cache_mla.cu."""


class Concat(Launches):
    """`concat_and_cache_mla`: a binding; see `cupymla.ops.gpu`."""

    def __init__(self, views: ConcatViews, problem: ConcatProblem, results: Sequence[View], recorded: bool) -> None:
        pages, slots, layout = problem.pages, views.slot_mapping, problem.layout
        self._record = ConcatParameters(
            kv_c_row=views.kv_c.strides[0],
            k_pe_row=0 if views.k_pe is None else views.k_pe.strides[0],
            slots_row=slots.strides[0],
            block_bytes=pages.block_bytes,
            num_slots=pages.num_slots,
            tokens=problem.tokens,
            page=pages.page,
            page_reciprocal=page_reciprocal(pages.page),
            slots_wide=int(slots.dtype == "int64"),
            type=FLOATS.index(problem.dtype),
            rope=problem.rope,
            codes=layout.codes,
            row_bytes=layout.row_bytes(problem.channels + problem.rope),
            rope_begin=layout.wide_begin + 2 * (problem.channels - layout.codes),
            lanes_log2=(layout.group // LANE_CHANNELS).bit_length() - 1 if layout.group else 0,
            exponents=int(layout.exponents),
            pow2=int(layout.exponents or problem.options.scale_rule == "pow2"),
        )
        # Without a slot there is nothing to write, and no address.
        threads = problem.tokens * _WARP if pages.num_slots else 0
        super().__init__(launcher("concat_and_cache_mla", CONCAT.operator, problem.device, self._record, threads))

    def point(self, views: ConcatViews, results: Sequence[int], workspace: int) -> None:
        """Set every address."""
        record = self._record
        record.kv_c, record.cache, record.slots = views.kv_c.ptr, views.cache.ptr, views.slot_mapping.ptr
        record.k_pe = None if views.k_pe is None else views.k_pe.ptr


class Gather(Launches):
    """`gather_mla_cache`: a binding; see `cupymla.ops.gpu`."""

    def __init__(self, views: GatherViews, problem: GatherProblem, results: Sequence[View], recorded: bool) -> None:
        (kv,) = results
        pages, layout = problem.pages, problem.layout
        self._record = GatherLatentParameters(
            kv_row=kv.strides[0],
            block_bytes=pages.block_bytes,
            num_slots=pages.num_slots,
            rows=problem.rows,
            page=pages.page,
            blocks=pages.blocks,
            channels=problem.channels,
            codes=layout.codes,
            row_bytes=layout.row_bytes(problem.channels),
            wide_begin=layout.wide_begin,
            group_log2=layout.group.bit_length() - 1 if layout.group else 0,
            exponents=int(layout.exponents),
        )
        lay_out_places(self._record, views)
        threads = problem.rows * problem.channels // CHANNELS
        super().__init__(launcher("gather_mla_cache", GATHER.operator, problem.device, self._record, threads))

    def point(self, views: GatherViews, results: Sequence[int], workspace: int) -> None:
        """Set every address."""
        point_at_places(self._record, views)
        (self._record.kv,) = results


def gather_wanted(views: GatherViews, problem: GatherProblem) -> Results:
    """Shape and dtype of the result of `gather_mla_cache`."""
    return (((problem.rows, problem.channels), "bfloat16"),)
