"""Which kernels serve a backward problem, and in which order. Pure: no array, no driver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ...errors import InputError, UnsupportedError, shown
from ..kv_rows import KvRows
from ..kv_rows import kv_rows as numbered
from ..mla import D_QK, DTYPES
from ..rows_in_order import found_more, named_by_any
from ..variants import BOTH, FLAGS, require_choice, require_target
from . import stored, two_phase, units
from .launches import STAGES, Launch, Stage, Workspace
from .layout import PART_ALIGNMENT, workspace
from .sizes import all_kv_rows, all_query_groups, all_tokens, fitting, group_word_bytes, list_bytes, partial_bytes
from .spec import OPERATOR, Problem

MAX_CTAS = 2**31 - 1
"""The extent of grid.x, on which queries and rows of kv lie (CUDA C++ Programming Guide)."""

CTA_HEADS = 64
"""Query heads whose P and dS a CTA makes on sm_90a. One copy of q or dout brings in as many, but for a cluster."""

HEAD_TILE = 32
"""Neighbouring heads that are one CTA's of a cluster on sm_90a, and that one tensor copy brings in: as `kHeadTile` in
cuda/sparse_mla_bwd/sm90/cluster_config.cuh."""

ROPE_COLUMNS = 32
"""Columns of the RoPE that a CTA of such a cluster has: as `kRopeColumns` there."""

CLUSTER_TOPK = 1 << 26
"""Entries of a query that such a cluster can count: blocks of 64 by the bits from `kBlock` on in
cuda/sparse_mla_bwd/sm90/cluster_consumer.cuh."""

BLOCK_HEADS = (64, 128)
"""Query heads that the CTAs of a query may take at a time; the kernel says the same of itself, which is compared when a
call is bound. The CTAs of a cluster have half of the channels of all of them each."""

ARCHS = ("sm_90a", "sm_100f")
"""Targets that have kernels."""

GROUP_ARCHS = ("sm_90a",)
"""Targets that have kernels for packed queries."""

GROUP_HEADS = {4: 16, 2: 32}
"""How many queries may be packed, and the heads that each of them has room for."""

GROUP_TOKENS = 1 << 17
"""Tokens of a batch entry that lists of rows can name: as `kMaxTokens` in cuda/sparse_mla_bwd/query_group.cuh."""

GROUP_ENTRIES = 8192
"""Rows that a list has room for: as `kMaxEntries` there."""

ORDER_STAGES: tuple[Stage, ...] = ("sort", "scatter")
"""What there is only for queries that take their rows in the order of tokens."""

ORDER_ARCHS = ("sm_90a",)
"""Targets that have these stages."""

ORDER_TOKENS = 1 << 18
"""Tokens of a batch entry that `sort` has room for: as `kMaxTokensSingle` in cuda/sparse_mla_bwd/query_group.cuh."""

LIST_BYTES = 128 << 20
"""What lists of rows, and a distribution in their order, may take at a time, or lists of entries when deterministic.
One query group's, or one chunk's, are made at a time where they need more."""

MAX_LISTS = 65535
"""The extent of grid.y, on which chunks lie whose entries are listed at once (CUDA C++ Programming Guide)."""

MANY_LISTS_ARCHS = ("sm_90a",)
"""Targets whose kernels list the entries of several chunks at once."""

PACKS_ROWS = True
"""Whether rows that entries add are stored by 16 bits a column where they can be: on sm_90a, of a 16-bit dkv, where
heads are one head block."""

PACKED_TOPK = 1 << 24
"""Entries of a query up to which they are: sixteen bytes of rows are counted in 32 bits."""

PARTIAL_BYTES = 5 << 28
"""What the rows that entries add may take at a time, when stored for sums in a fixed order; one query's at least. A
wave of 132 groups of four queries with a topk of 2048 has room, packed."""

# Cycles of an H200's multiprocessor, estimated (cuda/sparse_mla_bwd/sm90/README.md): a block of 64 entries or rows,
# what comes between queries, and what comes between query groups.
_BLOCK, _QUERY, _QUERY_GROUP = 9900, 13500, 40000

_MARGIN = 1.0
"""Queries are packed where that takes less than so much of the time that queries by themselves take."""

_ORDER_GAIN = 0.1
"""Rows are taken in the order of tokens where so much more of them is then expected to be found in L2."""

_L2_BYTES = 50e6  # of an H200

_ELEMENTS = (*DTYPES, "float32")  # by their CUPYMLA_FP16
_PACKED = 2  # the CUPYMLA_PARTIALS of rows by 16 bits a column
_PACKED_STAGES: tuple[Stage, ...] = ("attention", "dq_dkv", "sum")

_ROW_CTA_ROWS = 8  # rows that a CTA of the row-wise stages takes at a time, a warp each
_LIST_CTA_ROWS = 256  # that a CTA of `clear` takes at a time
_SINK_CTA_HEADS = 32
_CTAS_PER_MULTIPROCESSOR = 8  # of stages whose CTAs go over their rows again and again


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
        queries: how many neighbouring ones are packed; 1 where each takes its own.
        in_phases: whether P and dS come first, and dQ and dKV from them.
        columns_outermost: whether these are made of all queries for some columns first, then for the next.
        in_order: whether each takes its rows in the order of tokens, not of entries.
        query_groups: how many times that many there are.
        block_heads: query heads that they take at a time.
        head_blocks: how many times they go through its entries.
        packed: whether rows that entries add are stored by 16 bits a column.
        chunk: queries, or query groups of them, of one launch of the attention stage.
        lists: of how many chunks entries are listed at a time, when deterministic.
        row_ctas: CTAs of the row-wise stages.
        workspace: what is allocated beside the outputs.
    """

    problem: Problem
    arch: Arch
    tokens: int
    kv_rows: int
    kv_map: KvRows | None
    cluster: int
    queries: int
    in_phases: bool
    columns_outermost: bool
    in_order: bool
    query_groups: int
    block_heads: int
    head_blocks: int
    packed: bool
    chunk: int
    lists: int
    row_ctas: int
    workspace: Workspace

    @property
    def is_cluster(self) -> bool:
        """Whether sums are in the order of columns of a 2-CTA cluster on sm_90a, which two phases have as well."""
        return _is_cluster(self.arch.name, self.block_heads)

    @property
    def attends_in_clusters(self) -> bool:
        """Whether such a cluster has the attention, too."""
        return self.is_cluster and not self.in_phases

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
        if stage == "sink_lse":
            return units.SINGLE[stage].source(self.arch.name, {})
        if self.packed and not self.is_cluster and stage in stored.stages(self.queries):
            return stored.variant(self.arch, stage, shared.d_qk, shared.dtype, self.queries)
        written = self.problem.dkv_dtype if stage == "round" else shared.dtype
        return variant(
            self.arch,
            stage=stage,
            d_qk=shared.d_qk,
            dtype=written,
            block_heads=self.block_heads if self.queries == 1 else BLOCK_HEADS[0],
            partials=shared.options.deterministic and self.queries == 1,
            packed=self.packed and self.is_cluster,
            queries=self.queries,
        )

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
            yield from self._attention(first, last)
            if self.in_order and self.problem.has_attn_dist:
                yield Launch("scatter", last - first, first, last)
        yield from self._last()

    def _attention(self, first: int, last: int) -> Iterator[Launch]:
        if self.in_phases:
            yield Launch("p_ds", (last - first) * self.block_heads // CTA_HEADS, first, last)
            column_splits = two_phase.dq_dkv_ctas(self.problem)
            splits = column_splits if self.columns_outermost else 1
            yield Launch("dq_dkv", (last - first) * column_splits // splits, first, last, column_splits=splits)
        else:
            yield Launch("attention", (last - first) * self.cluster, first, last)

    def _in_fixed_order(self) -> Iterator[Launch]:
        """Lists of several chunks' entries, or of their query groups' rows, then these chunks."""
        for listed in range(0, self.query_groups, self.chunk * self.lists):
            end = min(listed + self.chunk * self.lists, self.query_groups)
            lists, queries = -(-(end - listed) // self.chunk), min(self.chunk, end - listed)
            if self.queries > 1:
                yield Launch("merge", end - listed, listed, end)
            else:
                yield Launch("clear", min(self.row_ctas, -(-self.kv_rows // _LIST_CTA_ROWS)), listed, end, lists)
                yield Launch("count", queries, listed, end, lists)
                yield Launch("scan", 1, listed, end, lists)
                yield Launch("place", queries, listed, end, lists)
            for number in range(lists):
                first = listed + number * self.chunk
                last = min(first + self.chunk, end)
                for launch in self._attention(first, last):
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
    shared = problem.shared
    tokens, kv_rows = all_tokens(problem), all_kv_rows(problem)
    block_heads = next((heads for heads in BLOCK_HEADS if shared.h_q <= heads), BLOCK_HEADS[-1])
    gathers = arch.name != "sm_90a"
    cluster = 2 if gathers else block_heads // CTA_HEADS
    if max(tokens * max(shared.h_q, cluster), kv_rows) > MAX_CTAS:
        wanted = f"{OPERATOR} on {tokens} queries of {shared.h_q} heads and {kv_rows} tokens"
        raise UnsupportedError(wanted, arch.name, f"up to {MAX_CTAS} heads, and as many tokens, in all")
    is_cluster = _is_cluster(arch.name, block_heads)
    if is_cluster and shared.topk > CLUSTER_TOPK:
        wanted = f"{OPERATOR} with a topk of {shown(shared.topk)} and {shared.h_q} heads"
        raise UnsupportedError(wanted, arch.name, f"up to {CLUSTER_TOPK} with more than {CTA_HEADS} heads")
    packable = _packable_queries(problem) if arch.name in GROUP_ARCHS else ()
    queries = next((n for n in packable if packs_queries(problem, n, multiprocessors)), 1)
    query_groups = all_query_groups(problem, queries)
    block_heads = GROUP_HEADS.get(queries, block_heads)
    packed = packs_rows(problem, arch.name)
    at_once = max(1, multiprocessors // cluster)
    in_order = arch.name in ORDER_ARCHS and queries == 1 and takes_rows_in_order(problem, at_once)
    in_phases = _can_take_phases(problem, arch.name) and two_phase.takes(problem, multiprocessors)
    if in_phases:  # whose CTAs are no clusters, and in the order that clusters would have
        cluster, at_once = 1, multiprocessors
    chunk = max(query_groups, 1)
    if problem.shared.options.deterministic:
        chunk = fitting(query_groups, partial_bytes(problem, packed, queries), PARTIAL_BYTES, at_once)
        if queries > 1:
            chunk = fitting(chunk, _group_list_bytes(problem, queries), LIST_BYTES, at_once)
    elif queries > 1 or in_order:
        chunk = fitting(query_groups, list_bytes(problem, queries), LIST_BYTES, at_once)
    if in_phases:
        chunk = fitting(chunk, two_phase.p_ds_bytes(problem), two_phase.P_DS_BYTES, at_once)
    lists = _lists(problem, chunk, queries, arch.name in MANY_LISTS_ARCHS)
    rows = max(kv_rows, tokens if problem.has_attn_dist else 0)
    row_ctas = min(-(-rows // _ROW_CTA_ROWS), multiprocessors * _CTAS_PER_MULTIPROCESSOR)
    head_blocks = -(-shared.h_q // block_heads)
    variant(arch)
    kv_map = numbered(shared, OPERATOR) if gathers else None
    return Plan(
        problem=problem,
        arch=arch,
        tokens=tokens,
        kv_rows=kv_rows,
        kv_map=kv_map,
        cluster=cluster,
        queries=queries,
        in_phases=in_phases,
        columns_outermost=in_phases and two_phase.columns_outermost(problem, multiprocessors),
        in_order=in_order,
        query_groups=query_groups,
        block_heads=block_heads,
        head_blocks=head_blocks,
        packed=packed,
        chunk=chunk,
        lists=lists,
        row_ctas=row_ctas,
        workspace=workspace(
            problem, chunk, queries, in_order, in_runs=is_cluster, packed=packed, lists=lists, in_phases=in_phases
        ),
    )


def _packable_queries(problem: Problem) -> tuple[int, ...]:
    """How many neighbouring queries can be packed, more before less."""
    shared = problem.shared
    is_summed = packs_rows(problem, "sm_90a") or not shared.options.deterministic  # whether sums can be made of rows
    if not is_summed or not 0 < shared.s_kv <= GROUP_TOKENS:
        return ()
    return tuple(n for n, heads in GROUP_HEADS.items() if shared.h_q <= heads and n * shared.topk <= GROUP_ENTRIES)


def packs_queries(problem: Problem, queries: int, multiprocessors: int) -> bool:
    """Whether that many neighbouring queries had better share a gather of all their rows.

    All of them are multiplied by each row that any of them has, so what is saved is what they have in common. That is
    taken to be what random selections have; real ones have more.
    """
    shared = problem.shared
    rows = shared.s_kv * named_by_any(min(queries, shared.s_q), shared.topk / shared.s_kv)
    packed_cycles = -(-all_query_groups(problem, queries) // multiprocessors) * (_QUERY_GROUP + rows / 64 * _BLOCK)
    single_cycles = -(-all_query_groups(problem, 1) // multiprocessors) * (_QUERY + shared.topk / 64 * _BLOCK)
    return packed_cycles < _MARGIN * single_cycles


def takes_rows_in_order(problem: Problem, at_once: int) -> bool:
    """Whether queries, `at_once` of them at a time, had better take their rows in the order of tokens.

    To L2 a row is its channels and its gradient's sums.
    """
    shared = problem.shared
    if shared.options.deterministic or not 0 < shared.s_kv <= ORDER_TOKENS or not 0 < shared.topk <= GROUP_ENTRIES:
        return False
    return found_more(shared, at_once, shared.d_qk * (2 + 4), _L2_BYTES) >= _ORDER_GAIN


def packs_rows(problem: Problem, arch_name: str) -> bool:
    """Whether rows that entries add are stored by 16 bits a column.

    They are off by 2^-14 of the largest of eight columns at most, which is little where dkv itself is rounded to 16
    bits. A second head block would have to add to what the first has packed.
    """
    shared = problem.shared
    return (
        PACKS_ROWS
        and shared.options.deterministic
        and problem.dkv_dtype != "float32"
        and shared.h_q <= BLOCK_HEADS[1]
        and shared.topk <= PACKED_TOPK
        and arch_name in stored.ARCHS
        and (stored.PACKS_ROWS or shared.h_q > CTA_HEADS)
    )


def _can_take_phases(problem: Problem, arch_name: str) -> bool:
    """Whether the attention can be in two phases: not where rows are stored that are not packed."""
    packed_as_stored = packs_rows(problem, arch_name) == problem.shared.options.deterministic
    return packed_as_stored and two_phase.can_take(problem, arch_name)


def _lists(problem: Problem, chunk: int, queries: int, many: bool) -> int:
    """Of how many chunks entries, or query groups' rows, are listed at a time: as many as there are, or as have
    room."""
    shared = problem.shared
    if not (many and shared.options.deterministic):
        return 1
    if queries > 1:
        each = chunk * _group_list_bytes(problem, queries)
    else:
        each = 4 * (chunk * shared.topk + all_kv_rows(problem))
    chunks = -(-all_query_groups(problem, queries) // chunk)
    return max(1, min(chunks, MAX_LISTS, LIST_BYTES // max(each, 1)))


def _group_list_bytes(problem: Problem, queries: int) -> int:
    """Of the lists of one query group whose rows are stored."""
    return list_bytes(problem, queries) + group_word_bytes(problem)


def _further_lists_limit(problem: Problem, tokens: int) -> int:
    """What lists of entries take at most where those of several chunks are made at once."""
    smallest = max(1, PARTIAL_BYTES // partial_bytes(problem, False) // 2)  # chunk, in whole waves of CTAs
    if any(_can_take_phases(problem, name) for name in ARCHS):
        smallest = min(smallest, max(1, two_phase.P_DS_BYTES // two_phase.p_ds_bytes(problem) // 2))
    return (
        min(LIST_BYTES, 4 * (2 * tokens * problem.shared.topk + -(-tokens // smallest) * all_kv_rows(problem))) + 1024
    )


def workspace_limit(problem: Problem) -> int:
    """Bytes of workspace that are enough on every GPU, for a caller who does not know on which one a call will run."""
    shared = problem.shared
    tokens, sizes = all_tokens(problem), []
    in_runs = shared.h_q > CTA_HEADS  # on sm_90a
    p_ds_bytes, can_take_phases = two_phase.p_ds_bytes(problem), any(_can_take_phases(problem, n) for n in ARCHS)
    if shared.options.deterministic:
        for packed in {packs_rows(problem, name) for name in ARCHS}:
            chunk = fitting(tokens, partial_bytes(problem, packed), PARTIAL_BYTES, 1)
            for in_phases in {False, can_take_phases}:
                # P and dS are stored for as many queries as partial sums.
                held = fitting(chunk, p_ds_bytes, two_phase.P_DS_BYTES, 1) if in_phases else chunk
                sizes.append(workspace(problem, held, in_runs=in_runs, packed=packed, in_phases=in_phases).bytes)
        sizes = [max(sizes) + _further_lists_limit(problem, tokens)]
        for n in _packable_queries(problem):
            groups = all_query_groups(problem, n)
            chunk = fitting(groups, partial_bytes(problem, True, n), PARTIAL_BYTES, 1)
            chunk = fitting(chunk, _group_list_bytes(problem, n), LIST_BYTES, 1)
            lists = groups * _group_list_bytes(problem, n)
            sizes.append(workspace(problem, chunk, n, packed=True).bytes + min(LIST_BYTES, lists) + 1024)
        return max(sizes)
    in_order = (1,) if takes_rows_in_order(problem, tokens) else ()
    sizes.append(workspace(problem, 1, in_runs=in_runs).bytes)
    for n in (*_packable_queries(problem), *in_order):
        chunk = fitting(all_query_groups(problem, n), list_bytes(problem, n), LIST_BYTES, 1)
        sizes.append(workspace(problem, chunk, n, n == 1, in_runs=in_runs).bytes)
    p_ds = min(max(1, tokens) * p_ds_bytes, two_phase.P_DS_BYTES) + PART_ALIGNMENT
    return max(sizes) + (p_ds if can_take_phases else 0)


def variant(
    arch: Arch,
    *,
    stage: str = "attention",
    d_qk: int = 576,
    dtype: str = "bfloat16",
    block_heads: int = 128,
    partials: bool = False,
    packed: bool = False,
    queries: int = 1,
) -> KernelSource:
    """One kernel. What its translation unit does not take (`units`) makes no variant of it.

    Args:
        arch: the target.
        stage: one of `STAGES`.
        d_qk: 576 or 512.
        dtype: "bfloat16" or "float16": of the arrays; dkv's in the stage `round`, which on sm_90a with 128 heads a head
            block may be "float32", too.
        block_heads: heads of one head block, 64 or 128 (more are taken in several head blocks); for the
            attention stage, and on sm_90a for the stages `zero` and `round` of its sums.
        partials: whether every entry's row is stored on its own instead of added up; for the stages `attention` and,
            with `packed`, `dq_dkv`.
        packed: whether these rows have 16 bits a column; with `partials`, on sm_90a with 128 heads a head block, for
            the stages `attention`, `dq_dkv` and `sum`.
        queries: neighbouring ones that are packed: 1, or on sm_90a 4 of up to 16 heads or 2 of up to 32,
            whatever `block_heads` is; without `partials`.

    Raises InputError, and UnsupportedError when the target has no kernel.
    """
    require_target(OPERATOR, arch, ARCHS, BOTH)
    choices = {"stage": (stage, STAGES), "d_qk": (d_qk, D_QK), "block_heads": (block_heads, BLOCK_HEADS)}
    require_choice(OPERATOR, **choices, partials=(partials, FLAGS), packed=(packed, FLAGS))
    counts = (1, *GROUP_HEADS) if arch.name in GROUP_ARCHS else (1,)
    require_choice(OPERATOR, f" on {arch.name}", queries=(queries, counts))
    is_cluster = queries == 1 and _is_cluster(arch.name, block_heads)
    if packed and not (is_cluster and partials):
        expected = "False but with partials=True and block_heads=128 on sm_90a"
        raise InputError("packed", expected, shown(packed), OPERATOR)
    dtypes = _dtypes(stage, is_cluster)
    require_choice(OPERATOR, dtype=(dtype, dtypes))
    if queries > 1:
        return _group_variant(arch, stage, d_qk, dtype, partials, queries)
    if stage not in _single_stages(arch.name):
        expected = "one of " + ", ".join(_single_stages(arch.name)) + f" with queries=1 on {arch.name}"
        raise InputError("stage", expected, shown(stage), OPERATOR)
    if stage in two_phase.STAGES and partials and not packed:
        raise InputError("partials", f"False, or packed as well, with stage={stage!r}", shown(partials), OPERATOR)
    values = {
        "D_QK": d_qk,
        "FP16": _ELEMENTS.index(dtype),
        "HEADS": block_heads,
        "PARTIALS": _PACKED if packed else int(partials),
        "CHUNKS": int(arch.name in MANY_LISTS_ARCHS),
    }
    return _unit(arch.name, stage, is_cluster, packed).source(arch.name, values)


def _unit(arch_name: str, stage: str, is_cluster: bool, packed: bool) -> units.Unit:
    """What a stage of queries that take their rows by themselves is compiled from."""
    if packed and stage == "sum":
        return units.CLUSTER_SUM
    own = units.CLUSTER if is_cluster else units.BLACKWELL if arch_name == "sm_100f" else {}
    return own.get(stage, units.SINGLE[stage])


def _group_variant(arch: Arch, stage: str, d_qk: int, dtype: str, partials: bool, queries: int) -> KernelSource:
    """A kernel for packed queries, of checked numbers."""
    unit = units.PACKED.get(stage)
    if partials or unit is None:
        argument, got = ("partials", shown(partials)) if partials else ("stage", shown(stage))
        expected = "False" if partials else "one of " + ", ".join(units.PACKED)
        raise InputError(argument, f"{expected} with queries={queries}", got, OPERATOR)
    values = {"D_QK": d_qk, "FP16": _ELEMENTS.index(dtype), "QUERIES": queries, "FIXED_ORDER": 0}
    return unit.source(arch.name, values)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """Every kernel, of one target or of all."""
    found = (
        variant(arches.named(name), stage=stage, d_qk=d_qk, dtype=dtype, **numbers)
        for name in ARCHS
        if arch_name in (None, name)
        for d_qk in D_QK
        for stages, numbers in _variants(name)
        for stage in stages
        for dtype in _dtypes(stage, _is_cluster(name, numbers["block_heads"]))
    )
    alone = (units.SINGLE["sink_lse"].source(n, {}) for n in ARCHS if arch_name in (None, n))
    return (*dict.fromkeys(found), *stored.sources(arch_name), *alone)


def _is_cluster(arch_name: str, block_heads: int) -> bool:
    """Whether so many heads a block, of one query, are a cluster's whose sums have an order of columns of their own."""
    return arch_name == "sm_90a" and block_heads == BLOCK_HEADS[1]


def _dtypes(stage: str, is_cluster: bool) -> tuple[str, ...]:
    """What a stage may be compiled for: every dkv is made from a cluster's sums on sm_90a, those in float32, too."""
    return _ELEMENTS if is_cluster and stage == "round" else DTYPES


def _single_stages(arch_name: str) -> tuple[Stage, ...]:
    """Stages of queries that take their rows by themselves."""
    further = ORDER_STAGES if arch_name in ORDER_ARCHS else ()
    further += two_phase.STAGES if arch_name in two_phase.ARCHS else ()
    left_out = {"merge", *ORDER_STAGES, *two_phase.STAGES}.difference(further)
    return tuple(stage for stage in STAGES if stage not in left_out)


def _variants(arch_name: str) -> Iterator[tuple[Iterable[str], dict[str, Any]]]:
    """What there is of a target beside types: stages, and further numbers of their variants."""
    for block_heads in BLOCK_HEADS:
        for partials in (False, True):
            stages = (stage for stage in _single_stages(arch_name) if not (partials and stage in two_phase.STAGES))
            yield stages, {"block_heads": block_heads, "partials": partials}
    if _is_cluster(arch_name, BLOCK_HEADS[1]):
        yield _PACKED_STAGES, {"block_heads": BLOCK_HEADS[1], "partials": True, "packed": True}
    for queries in GROUP_HEADS if arch_name in GROUP_ARCHS else ():
        yield units.PACKED, {"block_heads": BLOCK_HEADS[0], "queries": queries}
