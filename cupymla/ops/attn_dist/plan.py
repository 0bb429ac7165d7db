"""Which kernel serves a problem, and how its queries and their entries are assigned to CTAs. Pure: no array, no
driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ...errors import InputError, UnsupportedError, shown
from ..mla import D_QK, DTYPES
from ..query_assignment import assign_queries
from ..rows_in_order import named_by_any
from ..variants import BOTH, require_choice, require_target
from ..work_assignment import WorkAssignment
from .spec import OPERATOR, Problem

SOURCES = {
    "sm_90a": "attn_dist/sm90/attn_dist.cu",
    "sm_100f": "attn_dist/sm100/attn_dist.cu",
}
"""The kernel of each target."""

GROUP_KERNEL = "attn_dist_packed"
"""The kernel for packed queries."""

GROUP_SOURCES = {"sm_90a": "attn_dist/sm90/attn_dist_packed.cu"}
"""Its source for each target that has it."""

GROUP_SIZE = 8
"""Queries of a group, as `PackedConfig::kQueries`; the next three mirror its limits."""

GROUP_HEADS = 16
GROUP_TOPK = 2048
GROUP_TOKENS = 16384

MAX_CTAS = 2**31 - 1
"""The extent of grid.x, on which queries and slices of their entries lie (CUDA C++ Programming Guide)."""

BLOCK_HEADS = (64, 128)
"""Heads of one head block of a kernel variant."""


# Cycles of an H200's multiprocessor, estimated (cuda/attn_dist/sm90/README.md): a block of 64 entries of one query, and
# what comes between queries; a block of 64 rows of a query group, and what comes between query groups, where no
# products queue.
_BLOCK, _QUERY = 2005, 900
_GROUP_BLOCK, _QUERY_GROUP = 2790, 26000

_MARGIN = 1.0
"""Queries are packed where that takes less than so much of the time that queries by themselves take."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel variant for one problem.

    Attributes:
        source: what to compile.
        tokens: queries of all batch entries together.
        queries: how many neighbouring ones are packed; 1 where each takes its own.
    """

    source: KernelSource
    tokens: int
    queries: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """How queries and their entries are assigned to CTAs.

    Attributes:
        groups: work tiles of `group_tokens` neighbouring queries; every other one is one query. Where queries are
            packed there are no others, and each CTA takes work tiles until there are none.
        group_tokens: queries of such a work tile.
        slices: CTAs, or on Blackwell clusters, that divide the entries of a work tile's queries between them.
        slice_blocks: blocks of entries in a slice.
        ctas: all CTAs. On Blackwell each takes work tiles until there are none.
    """

    groups: int
    group_tokens: int
    slices: int
    slice_blocks: int
    ctas: int

    @property
    def slicing(self) -> dict[str, int]:
        """What every kernel's parameter record has of it."""
        return {"slices": self.slices, "slice_blocks": self.slice_blocks}

    @property
    def sharing(self) -> dict[str, int]:
        """What Hopper's has beside that."""
        return {"groups": self.groups, "group_tokens": self.group_tokens}


def plan(problem: Problem, arch: Arch, multiprocessors: int) -> Plan:
    """Choose the kernel. Raises UnsupportedError when the architecture has none, or the grid cannot be that large."""
    tokens = problem.s_q * (1 if problem.batch is None else problem.batch)
    if tokens > MAX_CTAS:
        raise UnsupportedError(f"{OPERATOR} on {tokens} queries", arch.name, f"up to {MAX_CTAS}")
    grouped = arch.name in GROUP_SOURCES and packs_queries(problem, tokens, multiprocessors)
    queries = GROUP_SIZE if grouped else 1
    block_heads = next((heads for heads in BLOCK_HEADS if problem.h_q <= heads), BLOCK_HEADS[-1])
    source = variant(arch, d_qk=problem.d_qk, dtype=problem.dtype, block_heads=block_heads, queries=queries)
    return Plan(source, tokens, queries)


def packs_queries(problem: Problem, tokens: int, multiprocessors: int) -> bool:
    """Whether neighbouring queries had better share a gather of all their rows.

    Every query multiplies the rows of all then, so it depends on how many rows they have in common. That is taken to be
    what random selections have; real ones have more.
    """
    if problem.h_q > GROUP_HEADS or problem.topk > GROUP_TOPK or not 0 < problem.s_kv <= GROUP_TOKENS or not tokens:
        return False
    rows = problem.s_kv * named_by_any(min(GROUP_SIZE, problem.s_q), problem.topk / problem.s_kv)
    packed_cycles = -(-_query_groups(problem.s_q, problem.batch or 1) // multiprocessors) * (
        _QUERY_GROUP + rows / 64 * _GROUP_BLOCK
    )
    # Several multiprocessors share a query where there are more of them, but not if its row is to be normalised.
    rounds = tokens / multiprocessors
    single_cycles = (rounds if problem.options.normalize is None else max(rounds, 1)) * (
        _QUERY + problem.topk / 64 * _BLOCK
    )
    return packed_cycles < _MARGIN * single_cycles


def _query_groups(s_q: int, batch: int) -> int:
    return -(-s_q // GROUP_SIZE) * batch


def assign_work(
    source: KernelSource,
    facts: Mapping[str, int],
    multiprocessors: int,
    *,
    s_q: int,
    topk: int,
    batch: int = 1,
    normalized: bool = False,
) -> Assignment:
    """Assign the queries of a call to the CTAs of a kernel.

    Args:
        source: the kernel.
        facts: its launch facts.
        multiprocessors: of the device.
        s_q: queries of a batch entry.
        topk: entries of a query.
        batch: how many entries there are.
        normalized: whether rows are divided by their sums.
    """
    entries = facts["tile_keys"]
    if source.entry == GROUP_KERNEL:
        return assign_query_groups(s_q, batch, topk, multiprocessors)
    if source.arch == "sm_90a":
        return assign_at_once(s_q * batch, topk, normalized, entries, multiprocessors)
    return assign_in_turn(s_q * batch, topk, normalized, entries, multiprocessors, facts["cluster"])


def raw_work_assignment(
    source: KernelSource,
    facts: Mapping[str, int],
    multiprocessors: int,
    *,
    s_q: int,
    topk: int,
    batch: int = 1,
    normalized: bool = False,
) -> WorkAssignment:
    """The work assignment for a launch on its own; arguments as those of `assign_work`. Raises InputError."""
    if topk < 1:
        raise InputError("topk", "at least one entry", shown(topk), OPERATOR)
    found = assign_work(source, facts, multiprocessors, s_q=s_q, topk=topk, batch=batch, normalized=normalized)
    return WorkAssignment(
        found.ctas, found.slicing | (found.sharing if source.arch == "sm_90a" else {"queries": s_q * batch})
    )


def assign_query_groups(s_q: int, batch: int, topk: int, multiprocessors: int) -> Assignment:
    """Assign query groups to as many CTAs as run at a time, one after another."""
    query_groups = _query_groups(s_q, batch)
    return Assignment(query_groups, GROUP_SIZE, 1, -(-topk // 64), min(query_groups, multiprocessors))


def assign_at_once(tokens: int, topk: int, normalized: bool, tile_keys: int, multiprocessors: int) -> Assignment:
    """Assign queries, and where they are fewer than multiprocessors, slices of them."""
    assigned = assign_queries(tokens, 1, multiprocessors)
    slices, slice_blocks = _slices(tokens, topk, normalized, tile_keys, multiprocessors)
    return Assignment(assigned.groups, assigned.group_tokens, slices, slice_blocks, assigned.ctas * slices)


def assign_in_turn(
    tokens: int, topk: int, normalized: bool, tile_keys: int, multiprocessors: int, cluster: int
) -> Assignment:
    """Assign queries or slices of them to as many clusters as run at a time, one after another."""
    clusters = max(1, multiprocessors // cluster)
    slices, slice_blocks = _slices(tokens, topk, normalized, tile_keys, clusters)
    return Assignment(0, 1, slices, slice_blocks, cluster * min(clusters, tokens * slices))


def _slices(tokens: int, topk: int, normalized: bool, tile_keys: int, places: int) -> tuple[int, int]:
    """In how many slices a row is assigned, and blocks of each, where so many can be worked on at a time.

    A row that is to be normalised stays in one place, where its sum is then known.
    """
    row_blocks = -(-topk // tile_keys)
    slices = 1
    if not normalized and 0 < tokens < places:
        slices = min(row_blocks, places // tokens)
    slice_blocks = -(-row_blocks // slices)
    return -(-row_blocks // slice_blocks), slice_blocks


def variant(
    arch: Arch, *, d_qk: int = 576, dtype: str = "bfloat16", block_heads: int = 128, queries: int = 1
) -> KernelSource:
    """One kernel variant.

    Args:
        arch: the target.
        d_qk: 576 or 512.
        dtype: "bfloat16" or "float16".
        block_heads: heads of one head block, 64 or 128; more are taken in several head blocks.
        queries: neighbouring ones that are packed: 1, or on sm_90a 8, which have up to 16 heads in one
            block, whatever `block_heads` is.

    Raises InputError, and UnsupportedError when the target has no kernel.
    """
    require_target(OPERATOR, arch, SOURCES, BOTH)
    require_choice(OPERATOR, d_qk=(d_qk, D_QK), dtype=(dtype, DTYPES), block_heads=(block_heads, BLOCK_HEADS))
    counts = (1, GROUP_SIZE) if arch.name in GROUP_SOURCES else (1,)
    require_choice(OPERATOR, f" on {arch.name}", queries=(queries, counts))
    defines = (("CUPYMLA_D_QK", d_qk), ("CUPYMLA_FP16", int(dtype == "float16")))
    if queries != 1:
        return KernelSource(GROUP_SOURCES[arch.name], GROUP_KERNEL, defines, arch.name)
    return KernelSource(SOURCES[arch.name], OPERATOR, (*defines, ("CUPYMLA_HEADS", block_heads)), arch.name)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """Every kernel variant, of one target or of all."""
    return tuple(
        variant(arches.named(name), d_qk=d_qk, dtype=dtype, **numbers)
        for name in SOURCES
        if arch_name in (None, name)
        for d_qk in D_QK
        for dtype in DTYPES
        for numbers in (
            *({"block_heads": heads} for heads in BLOCK_HEADS),
            *({"queries": GROUP_SIZE} for target in GROUP_SOURCES if target == name),
        )
    )
