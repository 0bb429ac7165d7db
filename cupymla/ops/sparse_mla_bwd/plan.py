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
from . import halves
from .launches import ATTENDING, STAGES, Launch, Stage, Workspace
from .sizes import all_bunches, all_kv_rows, all_tokens, fitting, list_bytes, partial_bytes
from .spec import OPERATOR, Problem

MAX_CTAS = 2**31 - 1
"""The extent of grid.x, on which queries and rows of kv lie (CUDA C++ Programming Guide)."""

CTA_HEADS = 64
"""Query heads whose P and dS a CTA makes on sm_90a. One tensor copy of q or dout brings in as many, but for a pair."""

PAIR_RUN = 32
"""Neighbouring heads that are one CTA's of a pair on sm_90a, and that one tensor copy brings in: twin of `kRun` in
cuda/sparse_mla_bwd/sm90/pair_config.cuh."""

ROPE_COLUMNS = 32
"""Columns of the RoPE that a CTA of such a pair has: twin of `kRopeColumns` there."""

SPARE_ROWS = 64
"""Rows behind all others, to which such a pair adds what it has for slots that are not valid: twin of `kSpareRows` in
cuda/sparse_mla_bwd/sm90/pair_rows.cuh."""

PAIR_SLOTS = 1 << 26
"""Slots of a query that such a pair can count: blocks of 64 by the bits from `kBlock` on in
cuda/sparse_mla_bwd/sm90/pair_consumer.cuh."""

PASS_HEADS = (64, 128)
"""Query heads that the CTAs of a query may take at a time; the kernel says the same of itself, which is compared when a
call is bound. The CTAs of a pair have half of the channels of all of them each."""

FOLDERS = {"sm_90a": "sm90", "sm_100f": "sm100"}
"""Where each target's kernels lie."""

JOINT = "sparse_mla_bwd_joint"
"""The kernel for neighbouring queries that take their rows together."""

JOINT_SOURCES = {"sm_90a": "sparse_mla_bwd/sm90/sparse_mla_bwd_joint.cu"}
"""Its source for each target that has it."""

JOINT_HEADS = {4: 16, 2: 32}
"""How many queries may take their rows together, and the heads that each of them has room for."""

JOINT_TOKENS = 1 << 17
"""Tokens of a batch entry that lists of rows can name: twin of `kMaxTokens` in cuda/sparse_mla_bwd/bunch.cuh."""

JOINT_ENTRIES = 8192
"""Rows that a list has room for: twin of `kMaxEntries` there."""

JOINT_STAGES: tuple[Stage, ...] = ("attention", "zero", "round", "sink", "merge")
"""What is compiled from that source."""

ORDER_STAGES: tuple[Stage, ...] = ("sort", "deal")
"""What there is only for queries that take their rows in the order of tokens."""

ORDER_ARCHS = ("sm_90a",)
"""Targets that have these stages."""

ORDER_TOKENS = 1 << 18
"""Tokens of a batch entry that `sort` has room for: twin of `kMaxTokensAlone` in cuda/sparse_mla_bwd/bunch.cuh."""

LIST_BYTES = 128 << 20
"""What lists of rows, and a distribution in their order, may take at a time, or lists of slots when deterministic. One
bunch's, or one chunk's, are made at a time where they need more."""

MAX_LISTS = 65535
"""The extent of grid.y, on which chunks lie whose slots are listed at once (CUDA C++ Programming Guide)."""

MANY_LISTS_ARCHS = ("sm_90a",)
"""Targets whose kernels list the slots of several chunks at once."""

PACKS_ROWS = True
"""Whether rows that slots add are stored by 16 bits a column where they can be: a pair's on sm_90a, of a 16-bit dkv, in
one pass over the slots."""

PACKED_SLOTS = 1 << 24
"""Slots of a query up to which they are: sixteen bytes of rows are counted in 32 bits."""

PARTIAL_BYTES = 1 << 30
"""What the rows that slots add may take at a time, when they are stored to be summed in a fixed order. One query's are
stored at a time where they need more."""

# Cycles of an H200's multiprocessor, estimated (cuda/sparse_mla_bwd/sm90/README.md): a block of 64 slots or rows, what
# comes between queries, and what comes between bunches.
_BLOCK, _QUERY, _BUNCH = 9900, 13500, 40000

_MARGIN = 1.0
"""Rows are taken together where that takes less than so much of the time that queries by themselves take."""

_ORDER_GAIN = 0.1
"""Rows are taken in the order of tokens where so much more of them is then expected to be found in L2."""

_L2_BYTES = 50e6  # of an H200

_ELEMENTS = (*DTYPES, "float32")  # by their CUPYMLA_FP16
_PACKED = 2  # the CUPYMLA_PARTIALS of rows by 16 bits a column
_PACKED_STAGES: tuple[Stage, ...] = ("attention", "columns", "sum")
_PAIR_STAGES = ("zero", "round")  # beside the attention, that pairs on sm_90a have of their own

_PART_ALIGNMENT = 256  # of a workspace's parts from its start
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
        queries: how many neighbouring ones take their rows together; 1 where each takes its own.
        in_halves: whether P and dS come first, and dQ and dKV from them.
        in_shares: whether these are made of all queries for some columns first, then for the next.
        in_order: whether each takes its rows in the order of tokens, not of slots.
        bunches: how many times that many there are.
        pass_heads: query heads that they take at a time.
        passes: how many times they go through its slots.
        packed: whether rows that slots add are stored by 16 bits a column.
        chunk: queries, or bunches of them, of one launch of the attention stage.
        lists: of how many chunks slots are listed at a time, when deterministic.
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
    in_halves: bool
    in_shares: bool
    in_order: bool
    bunches: int
    pass_heads: int
    passes: int
    packed: bool
    chunk: int
    lists: int
    row_ctas: int
    workspace: Workspace

    @property
    def is_pair(self) -> bool:
        """Whether sums are in the order of columns of a pair of CTAs on sm_90a, which halves have as well."""
        return _is_pair(self.arch.name, self.pass_heads)

    @property
    def attends_in_pairs(self) -> bool:
        """Whether such a pair has the attention, too."""
        return self.is_pair and not self.in_halves

    @property
    def box_heads(self) -> int:
        """Heads that one tensor copy of q or dout brings in."""
        return PAIR_RUN if self.attends_in_pairs else CTA_HEADS // self.queries

    @property
    def maps(self) -> int:
        """Tensor maps that the attention takes: of q, of dout, and of kv, or for a pair of the RoPE's columns of q."""
        return 2 + (self.attends_in_pairs or self.kv_map is not None)

    def source(self, stage: Stage) -> KernelSource:
        """What to compile for a stage."""
        shared = self.problem.shared
        written = self.problem.dkv_dtype if stage == "round" else shared.dtype
        return variant(
            self.arch,
            stage=stage,
            d_qk=shared.d_qk,
            dtype=written,
            pass_heads=self.pass_heads if self.queries == 1 else PASS_HEADS[0],
            partials=shared.options.deterministic,
            packed=self.packed,
            queries=self.queries,
        )

    def launches(self) -> tuple[Launch, ...]:
        """What is launched, in order; grids without CTAs are left out."""
        found = [launch for launch in self._in_order() if launch.ctas]
        last = len(found) - 1
        return tuple(replace(each, dependent=k > 0, followed=k < last) for k, each in enumerate(found))

    def _in_order(self) -> Iterator[Launch]:
        yield Launch("zero", self.row_ctas, 0, self.tokens)
        if self.problem.shared.options.deterministic:
            yield from self._in_fixed_order()
            yield from self._last()
            return
        for first in range(0, self.bunches, self.chunk):
            last = min(first + self.chunk, self.bunches)
            if self.queries > 1:
                yield Launch("merge", last - first, first, last)
            if self.in_order:
                yield Launch("sort", last - first, first, last)
            yield from self._attention(first, last)
            if self.in_order and self.problem.has_attn_dist:
                yield Launch("deal", last - first, first, last)
        yield from self._last()

    def _attention(self, first: int, last: int) -> Iterator[Launch]:
        if self.in_halves:
            yield Launch("weights", (last - first) * self.pass_heads // CTA_HEADS, first, last)
            shares = halves.column_ctas(self.problem)
            apart = shares if self.in_shares else 1
            yield Launch("columns", (last - first) * shares // apart, first, last, shares=apart)
        else:
            yield Launch("attention", (last - first) * self.cluster, first, last)

    def _in_fixed_order(self) -> Iterator[Launch]:
        """Lists of several chunks' slots, then these chunks."""
        for listed in range(0, self.tokens, self.chunk * self.lists):
            end = min(listed + self.chunk * self.lists, self.tokens)
            lists, queries = -(-(end - listed) // self.chunk), min(self.chunk, end - listed)
            yield Launch("clear", min(self.row_ctas, -(-self.kv_rows // _LIST_CTA_ROWS)), listed, end, lists)
            yield Launch("count", queries, listed, end, lists)
            yield Launch("scan", 1, listed, end, lists)
            yield Launch("place", queries, listed, end, lists)
            for number in range(lists):
                first = listed + number * self.chunk
                last = min(first + self.chunk, end)
                yield from self._attention(first, last)
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
    pass_heads = next((heads for heads in PASS_HEADS if shared.h_q <= heads), PASS_HEADS[-1])
    gathers = arch.name != "sm_90a"
    cluster = 2 if gathers else pass_heads // CTA_HEADS
    if max(tokens * max(shared.h_q, cluster), kv_rows) > MAX_CTAS:
        wanted = f"{OPERATOR} on {tokens} queries of {shared.h_q} heads and {kv_rows} tokens"
        raise UnsupportedError(wanted, arch.name, f"up to {MAX_CTAS} heads, and as many tokens, in all")
    is_pair = _is_pair(arch.name, pass_heads)
    if is_pair and shared.topk > PAIR_SLOTS:
        wanted = f"{OPERATOR} with a topk of {shown(shared.topk)} and {shared.h_q} heads"
        raise UnsupportedError(wanted, arch.name, f"up to {PAIR_SLOTS} with more than {CTA_HEADS} heads")
    together = _queries_together(problem) if arch.name in JOINT_SOURCES else ()
    queries = next((n for n in together if takes_rows_together(problem, n, multiprocessors)), 1)
    bunches = all_bunches(problem, queries)
    pass_heads = JOINT_HEADS.get(queries, pass_heads)
    packed = packs_rows(problem, arch.name)
    at_once = max(1, multiprocessors // cluster)
    in_order = arch.name in ORDER_ARCHS and queries == 1 and takes_rows_in_order(problem, at_once)
    in_halves = _can_take_halves(problem, arch.name) and halves.takes(problem, multiprocessors)
    if in_halves:  # whose CTAs are no clusters, and in the order that pairs would have
        cluster, at_once = 1, multiprocessors
    chunk = max(bunches, 1)
    if problem.shared.options.deterministic:
        chunk = fitting(tokens, partial_bytes(problem, packed), PARTIAL_BYTES, at_once)
    elif queries > 1 or in_order:
        chunk = fitting(bunches, list_bytes(problem, queries), LIST_BYTES, at_once)
    if in_halves:
        chunk = fitting(chunk, halves.weight_bytes(problem), halves.WEIGHT_BYTES, at_once)
    lists = _lists(problem, chunk, arch.name in MANY_LISTS_ARCHS)
    rows = max(kv_rows, tokens if problem.has_attn_dist else 0)
    row_ctas = min(-(-rows // _ROW_CTA_ROWS), multiprocessors * _CTAS_PER_MULTIPROCESSOR)
    passes = -(-shared.h_q // pass_heads)
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
        in_halves=in_halves,
        in_shares=in_halves and halves.in_shares(problem, multiprocessors),
        in_order=in_order,
        bunches=bunches,
        pass_heads=pass_heads,
        passes=passes,
        packed=packed,
        chunk=chunk,
        lists=lists,
        row_ctas=row_ctas,
        workspace=workspace(
            problem, chunk, queries, in_order, in_runs=is_pair, packed=packed, lists=lists, in_halves=in_halves
        ),
    )


def _queries_together(problem: Problem) -> tuple[int, ...]:
    """How many neighbouring queries can take their rows together, more before less."""
    shared = problem.shared
    if shared.options.deterministic or not 0 < shared.s_kv <= JOINT_TOKENS:
        return ()
    return tuple(n for n, heads in JOINT_HEADS.items() if shared.h_q <= heads and n * shared.topk <= JOINT_ENTRIES)


def takes_rows_together(problem: Problem, queries: int, multiprocessors: int) -> bool:
    """Whether that many neighbouring queries had better share a gather of all their rows.

    All of them are multiplied by each row that any of them has, so what is saved is what they have in common. That is
    taken to be what random selections have; real ones have more.
    """
    shared = problem.shared
    rows = shared.s_kv * named_by_any(min(queries, shared.s_q), shared.topk / shared.s_kv)
    together = -(-all_bunches(problem, queries) // multiprocessors) * (_BUNCH + rows / 64 * _BLOCK)
    apart = -(-all_bunches(problem, 1) // multiprocessors) * (_QUERY + shared.topk / 64 * _BLOCK)
    return together < _MARGIN * apart


def takes_rows_in_order(problem: Problem, at_once: int) -> bool:
    """Whether queries, `at_once` of them at a time, had better take their rows in the order of tokens.

    To L2 a row is its channels and its gradient's sums.
    """
    shared = problem.shared
    if shared.options.deterministic or not 0 < shared.s_kv <= ORDER_TOKENS or not 0 < shared.topk <= JOINT_ENTRIES:
        return False
    return found_more(shared, at_once, shared.d_qk * (2 + 4), _L2_BYTES) >= _ORDER_GAIN


def packs_rows(problem: Problem, arch_name: str) -> bool:
    """Whether rows that slots add are stored by 16 bits a column.

    They are off by 2^-14 of the largest of eight columns at most, which is little where dkv itself is rounded to 16
    bits. A second pass over the slots would have to add to what the first has packed.
    """
    shared = problem.shared
    one_pass = CTA_HEADS < shared.h_q <= PASS_HEADS[1]
    return (
        PACKS_ROWS
        and shared.options.deterministic
        and problem.dkv_dtype != "float32"
        and one_pass
        and shared.topk <= PACKED_SLOTS
        and _is_pair(arch_name, PASS_HEADS[1])
    )


def _can_take_halves(problem: Problem, arch_name: str) -> bool:
    """Whether the attention can be in halves: not where rows are stored that are not packed."""
    packed_as_stored = packs_rows(problem, arch_name) == problem.shared.options.deterministic
    return packed_as_stored and halves.can_take(problem, arch_name)


def _lists(problem: Problem, chunk: int, many: bool) -> int:
    """Of how many chunks slots are listed at a time: as many as there are, or as have room."""
    shared = problem.shared
    if not (many and shared.options.deterministic):
        return 1
    each = 4 * (chunk * shared.topk + all_kv_rows(problem))
    chunks = -(-all_tokens(problem) // chunk)
    return max(1, min(chunks, MAX_LISTS, LIST_BYTES // max(each, 1)))


def workspace(
    problem: Problem,
    chunk: int,
    queries: int = 1,
    in_order: bool = False,
    *,
    in_runs: bool = False,
    packed: bool = False,
    lists: int = 1,
    in_halves: bool = False,
) -> Workspace:
    """Lay out the workspace of a problem whose slots are stored for `chunk` queries at a time, or whose rows are listed
    for `chunk` bunches of `queries`, or queries by themselves `in_order`. `in_runs`: whether sums have their columns in
    a pair's order, so that no dkv can be the sums, and have spare rows. `packed`: whether stored rows have 16 bits a
    column. `lists`: of how many chunks slots are listed at a time. `in_halves`: whether P and dS are stored."""
    shared = problem.shared
    kv_rows, slots = all_kv_rows(problem), chunk * shared.topk
    end = 0

    def part(wanted: bool, words: int) -> int | None:
        nonlocal end
        if not wanted:
            return None
        start = end
        end += -(-words * 4 // _PART_ALIGNMENT) * _PART_ALIGNMENT
        return start

    ordered = problem.shared.options.deterministic
    sum_rows = kv_rows + (SPARE_ROWS if in_runs else 0)
    sums = part(in_runs or problem.dkv_dtype != "float32", sum_rows * shared.d_qk)
    sink_terms = part(shared.has_sink, all_tokens(problem) * shared.h_q)
    partials = part(ordered, chunk * partial_bytes(problem, packed) // 4)
    row_ends, slot_list = part(ordered, lists * kv_rows), part(ordered, lists * slots)
    joint = queries > 1
    listed = joint or in_order
    return Workspace(
        sums=sums,
        sink_terms=sink_terms,
        partials=partials,
        row_ends=row_ends,
        slot_list=slot_list,
        rows=part(listed, slots * queries),
        row_slots=part(listed and problem.has_attn_dist, -(-slots * queries * queries // 2)),
        row_counts=part(listed, chunk),
        listed_dist=part(in_order and problem.has_attn_dist, slots),
        strange_rows=part(joint, -(-kv_rows // 4)),
        weights=part(in_halves, chunk * halves.weight_bytes(problem) // 4),
        bytes=end,
    )


def _further_lists_limit(problem: Problem, tokens: int) -> int:
    """What lists of slots take at most where those of several chunks are made at once."""
    smallest = max(1, PARTIAL_BYTES // partial_bytes(problem, False) // 2)  # chunk, in whole waves of CTAs
    if any(_can_take_halves(problem, name) for name in FOLDERS):
        smallest = min(smallest, max(1, halves.WEIGHT_BYTES // halves.weight_bytes(problem) // 2))
    return (
        min(LIST_BYTES, 4 * (2 * tokens * problem.shared.topk + -(-tokens // smallest) * all_kv_rows(problem))) + 1024
    )


def _weights_limit(problem: Problem) -> int:
    """What P and dS take at most, where the attention is in halves."""
    if not any(_can_take_halves(problem, name) for name in FOLDERS):
        return 0
    return min(max(1, all_tokens(problem)) * halves.weight_bytes(problem), halves.WEIGHT_BYTES) + _PART_ALIGNMENT


def workspace_limit(problem: Problem) -> int:
    """Bytes of workspace that are enough on every GPU, for a caller who does not know on which one a call will run."""
    shared = problem.shared
    tokens = all_tokens(problem)
    in_runs = shared.h_q > CTA_HEADS  # on sm_90a
    if shared.options.deterministic:
        sizes = []
        for packed in {packs_rows(problem, name) for name in FOLDERS}:
            chunk = fitting(tokens, partial_bytes(problem, packed), PARTIAL_BYTES, 1)
            sizes.append(workspace(problem, chunk, in_runs=in_runs, packed=packed).bytes)
        return max(sizes) + _further_lists_limit(problem, tokens) + _weights_limit(problem)
    in_order = (1,) if takes_rows_in_order(problem, tokens) else ()
    sizes = [workspace(problem, 1, in_runs=in_runs).bytes]
    for n in (*_queries_together(problem), *in_order):
        chunk = fitting(all_bunches(problem, n), list_bytes(problem, n), LIST_BYTES, 1)
        sizes.append(workspace(problem, chunk, n, n == 1, in_runs=in_runs).bytes)
    return max(sizes) + _weights_limit(problem)


def variant(
    arch: Arch,
    *,
    stage: str = "attention",
    d_qk: int = 576,
    dtype: str = "bfloat16",
    pass_heads: int = 128,
    partials: bool = False,
    packed: bool = False,
    queries: int = 1,
) -> KernelSource:
    """One kernel. Definitions that a stage does not depend on are the same in all of its variants.

    Args:
        arch: the target.
        stage: one of `STAGES`.
        d_qk: 576 or 512.
        dtype: "bfloat16" or "float16": of the arrays; dkv's in the stage `round`, which on sm_90a with 128 heads a pass
            may be "float32", too.
        pass_heads: heads of one pass over a query's slots, 64 or 128 (more are taken in several passes); for the
            attention stage, and on sm_90a for the stages `zero` and `round` of its sums.
        partials: whether every slot's row is stored on its own instead of added up; for the stages `attention` and,
            with `packed`, `columns`.
        packed: whether these rows have 16 bits a column; with `partials`, on sm_90a with 128 heads a pass, for the
            stages `attention`, `columns` and `sum`.
        queries: neighbouring ones that take their rows together: 1, or on sm_90a 4 of up to 16 heads or 2 of up to 32,
            whatever `pass_heads` is; without `partials`.

    Raises InputError, and UnsupportedError when the target has no kernel.
    """
    if arch.name not in FOLDERS:
        supported = "Hopper (sm_90a), Blackwell (sm_100f), or the CPU"
        raise UnsupportedError(OPERATOR, f"a GPU of architecture {arch.name}", supported)
    if type(stage) is not str or stage not in STAGES:
        raise InputError("stage", "one of " + ", ".join(STAGES), shown(stage), OPERATOR)
    if type(d_qk) is not int or d_qk not in D_QK:
        raise InputError("d_qk", "576 or 512", shown(d_qk), OPERATOR)
    if type(pass_heads) is not int or pass_heads not in PASS_HEADS:
        raise InputError("pass_heads", "64 or 128", shown(pass_heads), OPERATOR)
    for name, flag in (("partials", partials), ("packed", packed)):
        if type(flag) is not bool:
            raise InputError(name, "True or False", shown(flag), OPERATOR)
    counts = (1, *JOINT_HEADS) if arch.name in JOINT_SOURCES else (1,)
    if type(queries) is not int or queries not in counts:
        raise InputError("queries", " or ".join(map(str, counts)) + f" on {arch.name}", shown(queries), OPERATOR)
    is_pair = queries == 1 and _is_pair(arch.name, pass_heads)
    if packed and not (is_pair and partials):
        expected = "False but with partials=True and pass_heads=128 on sm_90a"
        raise InputError("packed", expected, shown(packed), OPERATOR)
    dtypes = _dtypes(stage, is_pair)
    if type(dtype) is not str or dtype not in dtypes:
        raise InputError("dtype", " or ".join(map(repr, dtypes)), shown(dtype), OPERATOR)
    if queries > 1:
        return _joint_variant(arch, stage, d_qk, dtype, partials, queries)
    if stage not in _stages_alone(arch.name):
        expected = "one of " + ", ".join(_stages_alone(arch.name)) + f" with queries=1 on {arch.name}"
        raise InputError("stage", expected, shown(stage), OPERATOR)
    if stage in halves.STAGES and partials and not packed:
        raise InputError("partials", f"False, or packed as well, with stage={stage!r}", shown(partials), OPERATOR)
    attends = stage in ATTENDING
    wide = attends or stage in ("zero", "round", "sum")
    heads = pass_heads if stage == "attention" or (is_pair and stage in _PAIR_STAGES) else PASS_HEADS[0]
    defines = (
        ("CUPYMLA_STAGE", STAGES.index(stage)),
        ("CUPYMLA_D_QK", d_qk if wide else 576),
        ("CUPYMLA_FP16", _ELEMENTS.index(dtype) if attends or stage == "round" else 0),
        ("CUPYMLA_CLUSTER", heads // CTA_HEADS) if arch.name == "sm_90a" else ("CUPYMLA_HEADS", heads),
        ("CUPYMLA_PARTIALS", _PACKED if packed and stage in _PACKED_STAGES else int(partials and stage == "attention")),
    )
    return KernelSource(f"sparse_mla_bwd/{FOLDERS[arch.name]}/sparse_mla_bwd.cu", OPERATOR, defines, arch.name)


def _joint_variant(arch: Arch, stage: Stage, d_qk: int, dtype: str, partials: bool, queries: int) -> KernelSource:
    """A kernel for queries that take their rows together, of checked numbers."""
    if partials or stage not in JOINT_STAGES:
        argument, got = ("partials", shown(partials)) if partials else ("stage", shown(stage))
        expected = "False" if partials else "one of " + ", ".join(JOINT_STAGES)
        raise InputError(argument, f"{expected} with queries={queries}", got, OPERATOR)
    defines = (
        ("CUPYMLA_STAGE", STAGES.index(stage)),
        ("CUPYMLA_D_QK", 576 if stage in ("sink", "merge") else d_qk),
        ("CUPYMLA_FP16", int(dtype == "float16" and stage in ("attention", "zero", "round"))),
        ("CUPYMLA_QUERIES", queries if stage in ("attention", "merge") else min(JOINT_HEADS)),
    )
    return KernelSource(JOINT_SOURCES[arch.name], JOINT, defines, arch.name)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """Every kernel, of one target or of all."""
    found = (
        variant(arches.named(name), stage=stage, d_qk=d_qk, dtype=dtype, **numbers)
        for name in FOLDERS
        if arch_name in (None, name)
        for d_qk in D_QK
        for stages, numbers in _variants(name)
        for stage in stages
        for dtype in _dtypes(stage, _is_pair(name, numbers["pass_heads"]))
    )
    return tuple(dict.fromkeys(found))


def _is_pair(arch_name: str, pass_heads: int) -> bool:
    """Whether so many heads a pass, of one query, are a pair's whose sums have an order of columns of their own."""
    return arch_name == "sm_90a" and pass_heads == PASS_HEADS[1]


def _dtypes(stage: str, is_pair: bool) -> tuple[str, ...]:
    """What a stage may be compiled for: every dkv is made from the sums of a pair on sm_90a, those in float32, too."""
    return _ELEMENTS if is_pair and stage == "round" else DTYPES


def _stages_alone(arch_name: str) -> tuple[Stage, ...]:
    """Stages of queries that take their rows by themselves."""
    further = ORDER_STAGES if arch_name in ORDER_ARCHS else ()
    further += halves.STAGES if arch_name in halves.ARCHS else ()
    left_out = {"merge", *ORDER_STAGES, *halves.STAGES}.difference(further)
    return tuple(stage for stage in STAGES if stage not in left_out)


def _variants(arch_name: str) -> Iterator[tuple[Iterable[Stage], dict[str, Any]]]:
    """What there is of a target beside types: stages, and further numbers of their variants."""
    for pass_heads in PASS_HEADS:
        for partials in (False, True):
            stages = (stage for stage in _stages_alone(arch_name) if not (partials and stage in halves.STAGES))
            yield stages, {"pass_heads": pass_heads, "partials": partials}
    if _is_pair(arch_name, PASS_HEADS[1]):
        yield _PACKED_STAGES, {"pass_heads": PASS_HEADS[1], "partials": True, "packed": True}
    for queries in JOINT_HEADS if arch_name in JOINT_SOURCES else ():
        yield JOINT_STAGES, {"pass_heads": PASS_HEADS[0], "queries": queries}
