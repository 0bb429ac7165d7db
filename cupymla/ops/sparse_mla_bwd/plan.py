"""Which kernels serve a backward problem, and in which order. Which path it takes, `paths` says, a file for each.

Pure: no array, no driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...arch import Arch
from ...build.source import KernelSource
from ...errors import UnsupportedError
from ..entry_lists import LIST_CTAS, list_ranges
from ..kv_rows import KvRows
from ..kv_rows import kv_rows as numbered
from ..variants import BOTH, require_target
from . import paths
from .launches import Launch, Stage, Workspace
from .paths.cluster import HEAD_TILE
from .paths.path import CTA_HEADS, Path
from .paths.two_phase import TwoPhase
from .sizes import all_kv_rows, all_query_groups, all_tokens
from .spec import OPERATOR, Problem
from .variants import sources, variant

__all__ = ["Plan", "plan", "planned", "sources", "variant", "workspace_limit"]

MAX_CTAS = 2**31 - 1
"""The extent of grid.x, on which queries and rows of kv lie (CUDA C++ Programming Guide)."""

_ROW_CTA_ROWS = 8  # rows that a CTA of the row-wise stages takes at a time, a warp each
_SINK_CTA_HEADS = 32
_CTAS_PER_MULTIPROCESSOR = 8  # of stages whose CTAs go over their rows again and again

workspace_limit = paths.workspace_limit


@dataclass(frozen=True, slots=True)
class Plan:
    """How one problem is computed.

    Attributes:
        problem: the problem.
        arch: the target.
        multiprocessors: of the GPU.
        path: how its attention and its sums are made.
        tokens: queries of all batch entries together.
        kv_rows: tokens of kv of all batch entries together.
        kv_map: how their rows are numbered in a tensor map; None where the kernel does not gather by TMA.
        query_groups: how many times `queries` neighbouring ones there are.
        head_blocks: how many times CTAs go through a query's entries.
        chunk: queries, or query groups of them, of one launch of the attention stage.
        lists: of how many chunks entries are listed at a time, when deterministic.
        row_ctas: CTAs of the row-wise stages.
        workspace: what is allocated beside the outputs.
    """

    problem: Problem
    arch: Arch
    multiprocessors: int
    path: Path
    tokens: int
    kv_rows: int
    kv_map: KvRows | None
    query_groups: int
    head_blocks: int
    chunk: int
    lists: int
    row_ctas: int
    workspace: Workspace

    @property
    def cluster(self) -> int:
        """CTAs that share a query."""
        return self.path.cluster

    @property
    def queries(self) -> int:
        """How many neighbouring ones are packed; 1 where each takes its own."""
        return self.path.queries

    @property
    def block_heads(self) -> int:
        """Query heads that they take at a time."""
        return self.path.block_heads

    @property
    def in_phases(self) -> bool:
        """Whether P and dS come first, and dQ and dKV from them."""
        return isinstance(self.path, TwoPhase)

    @property
    def columns_outermost(self) -> bool:
        """Whether these are made of all queries for some columns first, then for the next."""
        return isinstance(self.path, TwoPhase) and self.path.columns_outermost

    @property
    def in_order(self) -> bool:
        """Whether each takes its rows in the order of tokens, not of entries."""
        return self.path.in_order

    @property
    def packed(self) -> bool:
        """Whether rows that entries add are stored by 16 bits a column."""
        return self.path.rows == "packed"

    @property
    def attends_in_clusters(self) -> bool:
        """Whether a 2-CTA cluster on sm_90a has the attention."""
        return self.path.attends_in_clusters

    @property
    def box_heads(self) -> int:
        """Heads that one tensor copy of q or dout brings in."""
        return HEAD_TILE if self.attends_in_clusters else CTA_HEADS // self.queries

    @property
    def maps(self) -> int:
        """Tensor maps of the attention: of q, of dout, and of kv, or for a cluster of the RoPE's columns of q."""
        return 2 + (self.attends_in_clusters or self.kv_map is not None)

    def source(self, stage: Stage) -> KernelSource:
        """What to compile for a stage."""
        shared = self.problem.shared
        dtype = self.problem.dkv_dtype if stage == "round" else shared.dtype
        return self.path.source(stage, shared.d_qk, dtype)

    def launches(self) -> tuple[Launch, ...]:
        """What is launched, in order; grids without CTAs are left out."""
        found = [launch for launch in self._in_order() if launch.ctas]
        last = len(found) - 1
        return tuple(replace(each, dependent=k > 0, has_dependent=k < last) for k, each in enumerate(found))

    def _in_order(self) -> Iterator[Launch]:
        yield Launch("zero", self.row_ctas, 0, self.tokens)
        if self.problem.counts_sink:
            yield Launch("sink_lse", self.tokens, 0, self.tokens)
        if self.problem.shared.options.deterministic:
            yield from self._in_fixed_order()
            yield from self._last()
            return
        for first in range(0, self.query_groups, self.chunk):
            last = min(first + self.chunk, self.query_groups)
            if self.queries > 1:
                yield Launch("merge", last - first, first, last)
            if self.in_order:
                yield Launch("sort", last - first, first, last)
            yield from self.path.attention(self.problem, first, last)
            if self.in_order and self.problem.has_attn_dist:
                yield Launch("scatter", last - first, first, last)
        yield from self._last()

    def _in_fixed_order(self) -> Iterator[Launch]:
        """Lists of several chunks' entries, or of their query groups' rows, then these chunks."""
        for listed in range(0, self.query_groups, self.chunk * self.lists):
            end = min(listed + self.chunk * self.lists, self.query_groups)
            lists = -(-(end - listed) // self.chunk)
            if self.queries > 1:
                yield Launch("merge", end - listed, listed, end)
            elif not self.problem.has_lists:
                ranges = list_ranges(self.kv_rows, lists, self.multiprocessors)
                yield Launch("list", ranges * LIST_CTAS, listed, end, lists)
            for number in range(lists):
                first = listed + number * self.chunk
                last = min(first + self.chunk, end)
                for launch in self.path.attention(self.problem, first, last):
                    yield replace(launch, list=number)
                yield Launch("sum", self.kv_rows, first, last, list=number)

    def _last(self) -> Iterator[Launch]:
        if self.workspace.sums is not None:
            yield Launch("round", self.row_ctas, 0, self.tokens)
        if self.problem.shared.has_sink:
            yield Launch("sink", -(-self.problem.shared.h_q // _SINK_CTA_HEADS), 0, self.tokens)


def plan(problem: Problem, arch: Arch, multiprocessors: int) -> Plan:
    """Choose the kernels and their grids, for a GPU with that many multiprocessors.

    Raises UnsupportedError when the architecture has no kernel, or a grid cannot be that large.
    """
    require_target(OPERATOR, arch, paths.ARCHS, BOTH)
    return planned(problem, arch, multiprocessors, paths.choose(problem, arch, multiprocessors))


def planned(problem: Problem, arch: Arch, multiprocessors: int, path: Path) -> Plan:
    """The kernels and their grids of one of `paths.ways`. Raises UnsupportedError when a grid cannot be that large."""
    shared = problem.shared
    tokens, kv_rows = all_tokens(problem), all_kv_rows(problem)
    if max(tokens * max(shared.h_q, path.cluster), kv_rows) > MAX_CTAS:
        wanted = f"{OPERATOR} on {tokens} queries of {shared.h_q} heads and {kv_rows} tokens"
        raise UnsupportedError(wanted, arch.name, f"up to {MAX_CTAS} heads, and as many tokens, in all")
    path.require(problem)
    chunk = path.chunk(problem, path.wave(multiprocessors))
    lists = path.lists(problem, chunk)
    rows = max(kv_rows, tokens if problem.has_attn_dist else 0)
    return Plan(
        problem=problem,
        arch=arch,
        multiprocessors=multiprocessors,
        path=path,
        tokens=tokens,
        kv_rows=kv_rows,
        kv_map=numbered(shared, OPERATOR) if path.gathers else None,
        query_groups=all_query_groups(problem, path.queries),
        head_blocks=-(-shared.h_q // path.block_heads),
        chunk=chunk,
        lists=lists,
        row_ctas=min(-(-rows // _ROW_CTA_ROWS), multiprocessors * _CTAS_PER_MULTIPROCESSOR),
        workspace=path.workspace(problem, chunk, lists),
    )
