"""Which kernels serve a backward problem, and in which order. Pure: no array, no driver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ...errors import InputError, UnsupportedError, shown
from ..kv_rows import KvRows
from ..kv_rows import kv_rows as numbered
from ..mla import D_QK, DTYPES
from .spec import OPERATOR, Problem

Stage = Literal["attention", "zero", "round", "sink", "clear", "count", "scan", "place", "sum"]
STAGES: tuple[Stage, ...] = ("attention", "zero", "round", "sink", "clear", "count", "scan", "place", "sum")
"""What the translation unit can be compiled to; a stage's place here is its CUPYMLA_STAGE."""

MAX_CTAS = 2**31 - 1
"""The extent of grid.x, on which queries and rows of kv lie (CUDA C++ Programming Guide)."""

CTA_HEADS = 64
"""Query heads that one tensor copy of q or dout brings in; on sm_90a a CTA has as many."""

PASS_HEADS = (64, 128)
"""Query heads that the CTAs of a query may take at a time; the kernel says the same of itself, which is compared when a
call is bound. On sm_90a each CTA has 64 of them; on sm_100a both CTAs of a pair have all, each half of the channels."""

FOLDERS = {"sm_90a": "sm90", "sm_100a": "sm100", "sm_103a": "sm100"}
"""Where each target's kernels lie."""

PARTIAL_BYTES = 640 << 20
"""What the rows that slots add may take at a time, when they are stored to be summed in a fixed order. One query's are
stored at a time where they need more."""

_PART_ALIGNMENT = 256  # of a workspace's parts from its start
_ROW_CTA_ROWS = 8  # rows that a CTA of the row-wise stages takes at a time, a warp each
_SINK_CTA_HEADS = 32
_CTAS_PER_MULTIPROCESSOR = 8  # of stages whose CTAs go over their rows again and again


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch.

    Attributes:
        stage: which kernel.
        ctas: the grid.
        query_begin, query_end: the queries, counted over all batch entries, that it takes.
        dependent: whether a launch of the call comes before it, which it may overlap with.
        followed: whether one comes after it.
    """

    stage: Stage
    ctas: int
    query_begin: int
    query_end: int
    dependent: bool = False
    followed: bool = False


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where parts of the workspace begin, in bytes; None for parts that there are not.

    Attributes:
        sums: fp32 [batch, s_kv, d_qk], where dkv is not fp32 itself.
        sink_terms: fp32 [queries, h_q], with a sink.
        partials: fp32 [chunk, topk, d_qk], when deterministic, as the rest.
        row_ends: int32 [batch * s_kv].
        slot_list: int32 [chunk, topk].
        bytes: all of it.
    """

    sums: int | None
    sink_terms: int | None
    partials: int | None
    row_ends: int | None
    slot_list: int | None
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How one problem is computed.

    Attributes:
        problem: the problem.
        arch: the target.
        tokens: queries of all batch entries together.
        kv_rows: tokens of kv of all batch entries together.
        kv_map: how their rows are numbered in a tensor map; None where the kernel does not gather by TMA.
        cluster: CTAs that share a query.
        pass_heads: query heads that they take at a time.
        passes: how many times they go through its slots.
        chunk: queries of one launch of the attention stage.
        row_ctas: CTAs of the row-wise stages.
        workspace: what is allocated beside the outputs.
    """

    problem: Problem
    arch: Arch
    tokens: int
    kv_rows: int
    kv_map: KvRows | None
    cluster: int
    pass_heads: int
    passes: int
    chunk: int
    row_ctas: int
    workspace: Workspace

    def source(self, stage: Stage) -> KernelSource:
        """What to compile for a stage."""
        shared = self.problem.shared
        return variant(
            self.arch,
            stage=stage,
            d_qk=shared.d_qk,
            dtype=shared.dtype,
            pass_heads=self.pass_heads,
            partials=self.problem.shared.options.deterministic,
        )

    def launches(self) -> tuple[Launch, ...]:
        """What is launched, in order; grids without CTAs are left out."""
        found = [launch for launch in self._in_order() if launch.ctas]
        last = len(found) - 1
        return tuple(replace(each, dependent=k > 0, followed=k < last) for k, each in enumerate(found))

    def _in_order(self) -> Iterator[Launch]:
        yield Launch("zero", self.row_ctas, 0, self.tokens)
        for first in range(0, self.tokens, self.chunk):
            last = min(first + self.chunk, self.tokens)
            attention = Launch("attention", (last - first) * self.cluster, first, last)
            if not self.problem.shared.options.deterministic:
                yield attention
                continue
            yield Launch("clear", self.row_ctas, first, last)
            yield Launch("count", last - first, first, last)
            yield Launch("scan", 1, first, last)
            yield Launch("place", last - first, first, last)
            yield attention
            yield Launch("sum", self.kv_rows, first, last)
        if self.workspace.sums is not None:
            yield Launch("round", self.row_ctas, 0, self.tokens)
        if self.problem.shared.has_sink:
            yield Launch("sink", -(-self.problem.shared.h_q // _SINK_CTA_HEADS), 0, self.tokens)


def plan(problem: Problem, arch: Arch, multiprocessors: int) -> Plan:
    """Choose the kernels and their grids, for a GPU with that many multiprocessors.

    Raises UnsupportedError when the architecture has no kernel, or a grid cannot be that large.
    """
    shared = problem.shared
    batch = 1 if shared.batch is None else shared.batch
    tokens, kv_rows = shared.s_q * batch, shared.s_kv * batch
    pass_heads = next((heads for heads in PASS_HEADS if shared.h_q <= heads), PASS_HEADS[-1])
    gathers = arch.name != "sm_90a"
    cluster = 2 if gathers else pass_heads // CTA_HEADS
    if max(tokens * max(shared.h_q, cluster), kv_rows) > MAX_CTAS:
        wanted = f"{OPERATOR} on {tokens} queries of {shared.h_q} heads and {kv_rows} tokens"
        raise UnsupportedError(wanted, arch.name, f"up to {MAX_CTAS} heads, and as many tokens, in all")
    chunk = max(tokens, 1)
    if problem.shared.options.deterministic:
        chunk = _chunk(tokens, shared.topk * shared.d_qk * 4, max(1, multiprocessors // cluster))
    rows = max(kv_rows, tokens if problem.has_attn_dist else 0)
    row_ctas = min(-(-rows // _ROW_CTA_ROWS), multiprocessors * _CTAS_PER_MULTIPROCESSOR)
    passes = -(-shared.h_q // pass_heads)
    variant(arch)
    kv_map = numbered(shared, OPERATOR) if gathers else None
    parts = workspace(problem, chunk)
    return Plan(problem, arch, tokens, kv_rows, kv_map, cluster, pass_heads, passes, chunk, row_ctas, parts)


def _chunk(tokens: int, query_bytes: int, wave: int) -> int:
    """Queries whose partial rows are stored at a time: as many as have room, in whole waves of CTAs where they can."""
    room = max(1, PARTIAL_BYTES // query_bytes)
    return max(1, min(tokens, room // wave * wave if room > wave else room))


def workspace(problem: Problem, chunk: int) -> Workspace:
    """Lay out the workspace of a problem whose slots are stored for `chunk` queries at a time."""
    shared = problem.shared
    batch = 1 if shared.batch is None else shared.batch
    kv_rows, slots = shared.s_kv * batch, chunk * shared.topk
    end = 0

    def part(wanted: bool, words: int) -> int | None:
        nonlocal end
        if not wanted:
            return None
        start = end
        end += -(-words * 4 // _PART_ALIGNMENT) * _PART_ALIGNMENT
        return start

    ordered = problem.shared.options.deterministic
    sums = part(problem.dkv_dtype != "float32", kv_rows * shared.d_qk)
    sink_terms = part(shared.has_sink, shared.s_q * batch * shared.h_q)
    partials = part(ordered, slots * shared.d_qk)
    row_ends, slot_list = part(ordered, kv_rows), part(ordered, slots)
    return Workspace(sums, sink_terms, partials, row_ends, slot_list, end)


def workspace_limit(problem: Problem) -> int:
    """Bytes of workspace that are enough on every GPU, for a caller who does not know on which one a call will run."""
    shared = problem.shared
    tokens = shared.s_q * (1 if shared.batch is None else shared.batch)
    chunk = _chunk(tokens, shared.topk * shared.d_qk * 4, 1) if problem.shared.options.deterministic else tokens
    return workspace(problem, max(chunk, 1)).bytes


def variant(
    arch: Arch,
    *,
    stage: str = "attention",
    d_qk: int = 576,
    dtype: str = "bfloat16",
    pass_heads: int = 128,
    partials: bool = False,
) -> KernelSource:
    """One kernel. Definitions that a stage does not depend on are the same in all of its variants.

    Args:
        arch: the target.
        stage: one of `STAGES`.
        d_qk: 576 or 512.
        dtype: "bfloat16" or "float16".
        pass_heads: heads of one pass over a query's slots, 64 or 128 (more are taken in several passes); for the
            attention stage.
        partials: whether every slot's row is stored on its own instead of added up; for the attention stage.

    Raises InputError, and UnsupportedError when the target has no kernel.
    """
    if arch.name not in FOLDERS:
        supported = "Hopper (sm_90a), Blackwell (sm_100a, sm_103a), or the CPU"
        raise UnsupportedError(OPERATOR, f"a GPU of architecture {arch.name}", supported)
    if type(stage) is not str or stage not in STAGES:
        raise InputError("stage", "one of " + ", ".join(STAGES), shown(stage), OPERATOR)
    if type(d_qk) is not int or d_qk not in D_QK:
        raise InputError("d_qk", "576 or 512", shown(d_qk), OPERATOR)
    if type(dtype) is not str or dtype not in DTYPES:
        raise InputError("dtype", "'bfloat16' or 'float16'", shown(dtype), OPERATOR)
    if type(pass_heads) is not int or pass_heads not in PASS_HEADS:
        raise InputError("pass_heads", "64 or 128", shown(pass_heads), OPERATOR)
    if type(partials) is not bool:
        raise InputError("partials", "True or False", shown(partials), OPERATOR)
    attends = stage == "attention"
    wide = attends or stage in ("zero", "round", "sum")
    heads = pass_heads if attends else PASS_HEADS[0]
    defines = (
        ("CUPYMLA_STAGE", STAGES.index(stage)),
        ("CUPYMLA_D_QK", d_qk if wide else 576),
        ("CUPYMLA_FP16", int(dtype == "float16" and stage in ("attention", "round"))),
        ("CUPYMLA_CLUSTER", heads // CTA_HEADS) if arch.name == "sm_90a" else ("CUPYMLA_HEADS", heads),
        ("CUPYMLA_PARTIALS", int(partials and attends)),
    )
    return KernelSource(f"sparse_mla_bwd/{FOLDERS[arch.name]}/sparse_mla_bwd.cu", OPERATOR, defines, arch.name)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """Every kernel, of one target or of all."""
    found = (
        variant(arches.named(name), stage=stage, d_qk=d_qk, dtype=dtype, pass_heads=pass_heads, partials=partials)
        for name in FOLDERS
        if arch_name in (None, name)
        for stage in STAGES
        for d_qk in D_QK
        for dtype in DTYPES
        for pass_heads in PASS_HEADS
        for partials in (False, True)
    )
    return tuple(dict.fromkeys(found))
