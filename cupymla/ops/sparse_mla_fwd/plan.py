"""Which kernel serves a problem. Pure: no array, no driver."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ...errors import InputError, UnsupportedError, shown
from ..mla import D_QK, DTYPES
from ..query_assignment import QueryAssignment, assign_queries
from ..rows_in_order import found_more
from ..variants import BOTH, FLAGS, require_choice, require_target
from ..work_assignment import WorkAssignment
from .spec import OPERATOR, Problem

MAX_CTAS = 2**31 - 1
"""The extent of grid.x, on which queries and blocks of heads lie (CUDA C++ Programming Guide)."""

CTA_HEADS = (16, 32, 64)
"""Query heads that one CTA can work on; a kernel says of itself which, and that is compared when a call is bound."""

BLACKWELL = "sm_100f"
"""The target that `blackwell_plan` is for."""

BLACKWELL_CTA_HEADS = 64
"""The same there."""

BLACKWELL_HEADS = (64, 128)
"""Query heads that one CTA, and a CTA pair, take there."""

CLUSTERS = (2, 4, 8, 16)
"""CTAs of a cluster, where there is one."""

_STEP_ENTRIES = 128  # entries of the two KV blocks that a CTA works on at a time

# What merging the parts of a query costs, in units of the time a CTA takes for two KV blocks.
_MERGE_STEPS = 1

# Cycles that a CTA of so many heads takes for two KV blocks and for a merge, where queries are so few that heads may be
# divided among more CTAs than need be: measured on an H200 (cuda/sparse_mla_fwd/sm90/README.md).
_STEP_CYCLES = {16: 4000, 32: 4300, 64: 6800}
_MERGE_CYCLES = {16: 4000, 32: 8000}

# sm_scale * log2(e) is a factor of -inf in the kernel that wants it positive, so it must not vanish in fp32.
SMALLEST_SCALE = 2.0**-100


STAGES = ("attention", "order")
"""What a launch on Hopper does: the attention, or ahead of it listing each query's tokens in ascending order."""

ORDER = f"{OPERATOR}_order"
"""The kernel that lists them."""

ORDER_TOKENS = 1 << 18
"""Tokens of a batch entry that `order` has room for: as `kMaxOrderTokens` in
cuda/sparse_mla_fwd/sm90/order_params.cuh."""

ORDER_ENTRIES = 4096
"""Entries of a query that it has room for: as `kMaxOrderEntries` there."""

_ORDER_GAIN = 0.05
"""Rows are taken in the order of tokens where so much more of them is then expected to be found in L2."""

_L2_BYTES = 25e6
"""What an H200's multiprocessor has of L2 next to it: one of two partitions."""

LIST_BYTES = 1 << 30
"""What lists may take; where they need more, rows are taken in the order of entries."""

_MOST_MULTIPROCESSORS = 144
"""Of any Hopper GPU: the whole die's."""

_PART_ALIGNMENT = 256  # of a workspace's parts from its start


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where parts of the workspace begin, in bytes.

    Attributes:
        lists: int32 [queries, topk].
        lengths: int32 [queries].
        bytes: all of it.
    """

    lists: int
    lengths: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel variant for one problem.

    Attributes:
        source: what to compile.
        heads: query heads of a CTA.
        tokens: queries of all batch entries together.
        head_blocks: CTAs that share a query's heads.
        parts: CTAs that share the entries of a query and a block of heads, as a cluster.
        assignment: how queries are assigned to CTAs.
        workspace: None where queries take their rows in the order of entries, else that for lists of them in the order
            of tokens.
    """

    source: KernelSource
    heads: int
    tokens: int
    head_blocks: int
    parts: int
    assignment: QueryAssignment
    workspace: Workspace | None = None

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.parts

    @property
    def clusters(self) -> int:
        """Clusters in the grid."""
        return self.assignment.ctas * self.head_blocks

    @property
    def ctas(self) -> int:
        """The grid."""
        return self.clusters * self.cluster


def cta_heads(h_q: int) -> int:
    """Query heads of a CTA: the fewest that hold all of a query's, else the most there are."""
    return next((heads for heads in CTA_HEADS if heads >= h_q), CTA_HEADS[-1])


def cheapest_parts(blocks: int, merge_blocks: int, sizes: Iterable[int], without: Collection[int]) -> int:
    """In how many parts to cut that many KV blocks: one, or of `sizes` but for those of `without`.

    Merging takes as long as `merge_blocks`.
    """

    def cost(size: int) -> int:
        return -(-blocks // size) + (merge_blocks if size > 1 else 0)

    return min((1, *(size for size in sizes if size not in without)), key=cost)


def parts(work: int, topk: int, multiprocessors: int, without: Collection[int] = ()) -> int:
    """CTAs, a power of two, to share the entries of each of `work` pairs of a query and a block of heads.

    More than one pays only where all of them run at once: past that, whole queries keep every multiprocessor busy. A
    cluster lies in one GPC, so fewer may run than multiprocessors would hold: sizes that the driver rules out for that
    are in `without`.
    """
    sizes = (size for size in CLUSTERS if size * work <= multiprocessors)
    return cheapest_parts(-(-topk // _STEP_ENTRIES), _MERGE_STEPS, sizes, without)


def few_queries_heads(h_q: int, tokens: int, topk: int, multiprocessors: int, without: Collection[int] = ()) -> int:
    """Query heads of a CTA, where there are so few queries that CTAs of the heads that `cta_heads` says are not more
    than multiprocessors: fewer heads bring more CTAs to a query, each of which has less to merge. `without`: as `parts`
    takes it."""
    most = cta_heads(h_q)

    def cost(heads: int) -> int:
        split = _split(heads, tokens * -(-h_q // heads), topk, multiprocessors, without)
        pairs = -(-topk // _STEP_ENTRIES)
        return -(-pairs // split) * _STEP_CYCLES[heads] + (_MERGE_CYCLES[heads] if split > 1 else 0)

    fitting = [heads for heads in CTA_HEADS if heads <= most and tokens * -(-h_q // heads) <= multiprocessors]
    return min(reversed(fitting), key=cost) if most in fitting else most


def _split(heads: int, work: int, topk: int, multiprocessors: int, without: Collection[int]) -> int:
    """`parts` for CTAs of so many heads; those of the most heads share no query."""
    return 1 if heads == CTA_HEADS[-1] else parts(work, topk, multiprocessors, without)


def plan(problem: Problem, arch: Arch, multiprocessors: int, without: Collection[int] = ()) -> Plan:
    """Choose the Hopper kernel and its grid, for a GPU with that many multiprocessors, without clusters of some sizes.

    `blackwell_plan` has Blackwell's.

    Raises UnsupportedError when the architecture is another, or the grid cannot be that large.
    """
    if arch.name != "sm_90a":
        raise UnsupportedError(f"{OPERATOR} by single CTAs", f"a GPU of architecture {arch.name}", "Hopper (sm_90a)")
    tokens = problem.s_q * (1 if problem.batch is None else problem.batch)
    if tokens * problem.h_q > MAX_CTAS:
        raise UnsupportedError(
            f"{OPERATOR} on {tokens} queries of {problem.h_q} heads", arch.name, f"up to {MAX_CTAS} heads in all"
        )
    any_scale = problem.options.scale(problem.d_qk) < SMALLEST_SCALE
    heads = few_queries_heads(problem.h_q, tokens, problem.topk, multiprocessors, without)
    head_blocks = -(-problem.h_q // heads)
    split = _split(heads, tokens * head_blocks, problem.topk, multiprocessors, without)
    assigned = assign_queries(tokens, head_blocks, multiprocessors) if split == 1 else QueryAssignment(0, 1, tokens)
    source = variant(arch, d_qk=problem.d_qk, heads=heads, dtype=problem.dtype, any_scale=any_scale, split=split > 1)
    at_once = max(1, multiprocessors // max(1, head_blocks))
    in_order = split == 1 and tokens > 0 and takes_rows_in_order(problem, at_once)
    return Plan(source, heads, tokens, head_blocks, split, assigned, workspace(problem) if in_order else None)


def takes_rows_in_order(problem: Problem, at_once: int) -> bool:
    """Whether queries, `at_once` of them at a time, had better take their rows in the order of tokens.

    Lists take no more room than `out` does, nor than `LIST_BYTES`.
    """
    if not 0 < problem.s_kv <= ORDER_TOKENS or not 0 < problem.topk <= min(
        ORDER_ENTRIES, problem.h_q * problem.d_v // 2
    ):
        return False
    if workspace(problem).bytes > LIST_BYTES:
        return False
    return found_more(problem, at_once, problem.d_qk * 2, _L2_BYTES) >= _ORDER_GAIN


def workspace(problem: Problem) -> Workspace:
    """Lay out the workspace of a problem whose queries take their rows in the order of tokens."""
    tokens = problem.s_q * (1 if problem.batch is None else problem.batch)
    lengths = _aligned(tokens * problem.topk * 4)
    return Workspace(lists=0, lengths=lengths, bytes=lengths + _aligned(tokens * 4))


def workspace_limit(problem: Problem) -> int:
    """Bytes of workspace that are enough on every GPU, for a caller who does not know on which one a call will run."""
    tokens = problem.s_q * (1 if problem.batch is None else problem.batch)
    at_once = min(tokens, _MOST_MULTIPROCESSORS)
    return workspace(problem).bytes if tokens and takes_rows_in_order(problem, at_once) else 0


def _aligned(size: int) -> int:
    return -(-size // _PART_ALIGNMENT) * _PART_ALIGNMENT


def raw_work_assignment(
    source: KernelSource, facts: Mapping[str, int], multiprocessors: int, *, s_q: int, h_q: int, batch: int = 1
) -> WorkAssignment:
    """The work assignment for a launch on its own, of a variant whose CTAs, or pairs of them on Blackwell, take queries
    whole.

    Args:
        source: the variant.
        facts: its launch facts.
        multiprocessors: of the device.
        s_q: queries of a batch entry.
        h_q: heads of a query.
        batch: how many entries there are.

    Raises UnsupportedError for other variants.
    """
    if source.entry == ORDER:
        return WorkAssignment(s_q * batch, {})
    if dict(source.defines)["CUPYMLA_SPLIT"]:
        raise UnsupportedError(f"a work assignment by sizes alone of {OPERATOR} with split", source.arch, "split=False")
    ctas = facts["cluster"]
    head_blocks = max(1, -(-h_q // (facts["heads_per_cta"] * ctas)))
    if source.arch == BLACKWELL:
        items = s_q * batch * head_blocks
        return WorkAssignment(
            ctas * max(1, min(items, multiprocessors // ctas)), {"head_blocks": head_blocks, "items": items}
        )
    assigned = assign_queries(s_q * batch, head_blocks, multiprocessors)
    fields = {"head_blocks": head_blocks, "groups": assigned.groups, "group_tokens": assigned.group_tokens}
    return WorkAssignment(assigned.ctas * head_blocks, fields)


def variant(
    arch: Arch,
    *,
    d_qk: int = 576,
    heads: int = 64,
    dtype: str = "bfloat16",
    any_scale: bool = False,
    split: bool = False,
    stage: str = "attention",
) -> KernelSource:
    """One kernel variant.

    Args:
        arch: the target.
        d_qk: 576 or 512.
        heads: query heads of a CTA, 16, 32 or 64, on Blackwell of a CTA, 64, or of a pair, 128; any of them serves any
            h_q, in as many CTAs as it takes.
        dtype: "bfloat16" or "float16".
        any_scale: whether sm_scale may be zero or negative.
        split: whether the CTAs of a cluster, up to 16, share the entries of a query; on sm_90a those of 16 or 32 heads.
        stage: one of `STAGES`, on Blackwell "attention"; nothing else changes "order", whose shared memory is
            `order.smem_bytes`.

    Raises InputError, and UnsupportedError when the target has no kernel.
    """
    require_target(OPERATOR, arch, ("sm_90a", BLACKWELL), BOTH)
    where = f" on {arch.name}"
    require_choice(OPERATOR, where, heads=(heads, BLACKWELL_HEADS if arch.name == BLACKWELL else CTA_HEADS))
    flags = {"any_scale": (any_scale, FLAGS), "split": (split, FLAGS)}
    require_choice(OPERATOR, d_qk=(d_qk, D_QK), dtype=(dtype, DTYPES), **flags)
    if split and arch.name == "sm_90a" and heads == CTA_HEADS[-1] and stage != "order":
        raise InputError("split", f"False with heads={heads}{where}", shown(split), OPERATOR)
    stages = STAGES[:1] if arch.name == BLACKWELL else STAGES
    require_choice(OPERATOR, where, stage=(stage, stages))
    if stage == "order":
        return KernelSource(f"{OPERATOR}/sm90/{ORDER}.cu", ORDER, (), arch.name)
    numbers = (
        ("CUPYMLA_D_QK", d_qk),
        ("CUPYMLA_HEADS", heads),
        ("CUPYMLA_FP16", int(dtype == "float16")),
        ("CUPYMLA_ANY_SCALE", int(any_scale)),
        ("CUPYMLA_SPLIT", int(split)),
    )
    folder = "sm100" if arch.name == BLACKWELL else "sm90"
    return KernelSource(f"{OPERATOR}/{folder}/{OPERATOR}.cu", OPERATOR, numbers, arch.name)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """Every kernel variant, of one target or of all."""
    return tuple(source for name in ("sm_90a", BLACKWELL) if arch_name in (None, name) for source in _sources(name))


def _sources(name: str) -> Iterator[KernelSource]:
    target, is_hopper = arches.named(name), name == "sm_90a"
    flags = (False, True)
    every = itertools.product(CTA_HEADS if is_hopper else BLACKWELL_HEADS, D_QK, DTYPES, flags, flags)
    for heads, d_qk, dtype, any_scale, split in every:
        if not (split and is_hopper and heads == CTA_HEADS[-1]):
            yield variant(target, d_qk=d_qk, heads=heads, dtype=dtype, any_scale=any_scale, split=split)
    if is_hopper:
        yield variant(target, stage="order")
