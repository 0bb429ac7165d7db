"""Which kernel serves a problem, and how its queries and their slots are dealt to CTAs. Pure: no array, no driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ...errors import InputError, UnsupportedError, shown
from ..mla import D_QK, DTYPES
from ..rows_in_order import named_by_any
from ..shares import shares
from ..work_assignment import WorkAssignment
from .spec import OPERATOR, Problem

SOURCES = {
    "sm_90a": "attn_dist/sm90/attn_dist.cu",
    "sm_100f": "attn_dist/sm100/attn_dist.cu",
}
"""The kernel of each target."""

JOINT = "attn_dist_joint"
"""The kernel for neighbouring queries that take their rows together."""

JOINT_SOURCES = {"sm_90a": "attn_dist/sm90/attn_dist_joint.cu"}
"""Its source for each target that has it."""

JOINT_QUERIES = 8
"""Queries that take their rows together: twin of `JointConfig::kQueries`, as the next three are of its limits."""

JOINT_HEADS = 16
JOINT_SLOTS = 2048
JOINT_TOKENS = 16384

MAX_CTAS = 2**31 - 1
"""The extent of grid.x, on which queries and slices of their slots lie (CUDA C++ Programming Guide)."""

PASS_HEADS = (64, 128)
"""Heads that a kernel variant takes in one pass over a query's slots."""


# Cycles of an H200's multiprocessor, estimated (cuda/attn_dist/sm90/README.md): a block of 64 slots of one query, and
# what comes between queries; a block of 64 rows of a bunch, and what comes between bunches, where no products queue.
_BLOCK, _QUERY = 2005, 900
_JOINT_BLOCK, _BUNCH = 2790, 26000

_MARGIN = 1.0
"""Rows are taken together where that takes less than so much of the time that queries by themselves take."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel variant for one problem.

    Attributes:
        source: what to compile.
        tokens: queries of all batch entries together.
        queries: how many neighbouring ones take their rows together; 1 where each takes its own.
    """

    source: KernelSource
    tokens: int
    queries: int


@dataclass(frozen=True, slots=True)
class Deal:
    """How queries and their slots are dealt to CTAs.

    Attributes:
        groups: shares of `group_tokens` neighbouring queries; every other share is one query. Where neighbours take
            their rows together there are no others, and each CTA takes shares until there are none.
        group_tokens: queries of such a share.
        slices: CTAs, or on Blackwell clusters, that divide the slots of a share's queries between them.
        slice_blocks: blocks of slots in a slice.
        ctas: all CTAs. On Blackwell each takes shares until there are none.
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
    joint = arch.name in JOINT_SOURCES and takes_rows_together(problem, tokens, multiprocessors)
    queries = JOINT_QUERIES if joint else 1
    pass_heads = next((heads for heads in PASS_HEADS if problem.h_q <= heads), PASS_HEADS[-1])
    source = variant(arch, d_qk=problem.d_qk, dtype=problem.dtype, pass_heads=pass_heads, queries=queries)
    return Plan(source, tokens, queries)


def takes_rows_together(problem: Problem, tokens: int, multiprocessors: int) -> bool:
    """Whether neighbouring queries had better share a gather of all their rows.

    Every query multiplies the rows of all then, so it depends on how many rows they have in common. That is taken to be
    what random selections have; real ones have more.
    """
    if problem.h_q > JOINT_HEADS or problem.topk > JOINT_SLOTS or not 0 < problem.s_kv <= JOINT_TOKENS or not tokens:
        return False
    rows = problem.s_kv * named_by_any(min(JOINT_QUERIES, problem.s_q), problem.topk / problem.s_kv)
    together = -(-_bunches(problem.s_q, problem.batch or 1) // multiprocessors) * (_BUNCH + rows / 64 * _JOINT_BLOCK)
    # Several multiprocessors share a query where there are more of them, but not if its row is to be normalised.
    rounds = tokens / multiprocessors
    apart = (rounds if problem.options.normalize is None else max(rounds, 1)) * (_QUERY + problem.topk / 64 * _BLOCK)
    return together < _MARGIN * apart


def _bunches(s_q: int, batch: int) -> int:
    return -(-s_q // JOINT_QUERIES) * batch


def deal(
    source: KernelSource,
    facts: Mapping[str, int],
    multiprocessors: int,
    *,
    s_q: int,
    topk: int,
    batch: int = 1,
    normalized: bool = False,
) -> Deal:
    """Deal out the queries of a call to the CTAs of a kernel.

    Args:
        source: the kernel.
        facts: its launch facts.
        multiprocessors: of the device.
        s_q: queries of a batch entry.
        topk: slots of a query.
        batch: how many entries there are.
        normalized: whether rows are divided by their sums.
    """
    slots = facts["block_slots"]
    if source.entry == JOINT:
        return deal_bunches(s_q, batch, topk, multiprocessors)
    if source.arch == "sm_90a":
        return deal_at_once(s_q * batch, topk, normalized, slots, multiprocessors)
    return deal_in_turn(s_q * batch, topk, normalized, slots, multiprocessors, facts["cluster"])


def raw_deal(
    source: KernelSource,
    facts: Mapping[str, int],
    multiprocessors: int,
    *,
    s_q: int,
    topk: int,
    batch: int = 1,
    normalized: bool = False,
) -> WorkAssignment:
    """The deal for a launch on its own; arguments as those of `deal`. Raises InputError."""
    if topk < 1:
        raise InputError("topk", "at least one slot", shown(topk), OPERATOR)
    found = deal(source, facts, multiprocessors, s_q=s_q, topk=topk, batch=batch, normalized=normalized)
    return WorkAssignment(
        found.ctas, found.slicing | (found.sharing if source.arch == "sm_90a" else {"queries": s_q * batch})
    )


def deal_bunches(s_q: int, batch: int, topk: int, multiprocessors: int) -> Deal:
    """Deal out bunches of queries that take their rows together to as many CTAs as run at a time, one after another."""
    bunches = _bunches(s_q, batch)
    return Deal(bunches, JOINT_QUERIES, 1, -(-topk // 64), min(bunches, multiprocessors))


def deal_at_once(tokens: int, topk: int, normalized: bool, block_slots: int, multiprocessors: int) -> Deal:
    """Deal out queries, and where they are fewer than multiprocessors, slices of them."""
    dealt = shares(tokens, 1, multiprocessors)
    slices, slice_blocks = _slices(tokens, topk, normalized, block_slots, multiprocessors)
    return Deal(dealt.groups, dealt.group_tokens, slices, slice_blocks, dealt.ctas * slices)


def deal_in_turn(
    tokens: int, topk: int, normalized: bool, block_slots: int, multiprocessors: int, cluster: int
) -> Deal:
    """Deal queries or slices of them out to as many clusters as run at a time, one after another."""
    clusters = max(1, multiprocessors // cluster)
    slices, slice_blocks = _slices(tokens, topk, normalized, block_slots, clusters)
    return Deal(0, 1, slices, slice_blocks, cluster * min(clusters, tokens * slices))


def _slices(tokens: int, topk: int, normalized: bool, block_slots: int, places: int) -> tuple[int, int]:
    """In how many slices a row is dealt, and blocks of each, where so many can be worked on at a time.

    A row that is to be normalised stays in one place, where its sum is then known.
    """
    row_blocks = -(-topk // block_slots)
    slices = 1
    if not normalized and 0 < tokens < places:
        slices = min(row_blocks, places // tokens)
    slice_blocks = -(-row_blocks // slices)
    return -(-row_blocks // slice_blocks), slice_blocks


def variant(
    arch: Arch, *, d_qk: int = 576, dtype: str = "bfloat16", pass_heads: int = 128, queries: int = 1
) -> KernelSource:
    """One kernel variant.

    Args:
        arch: the target.
        d_qk: 576 or 512.
        dtype: "bfloat16" or "float16".
        pass_heads: heads of one pass over a query's slots, 64 or 128; more are taken in several passes.
        queries: neighbouring ones that take their rows together: 1, or on sm_90a 8, which have up to 16 heads in one
            pass, whatever `pass_heads` is.

    Raises InputError, and UnsupportedError when the target has no kernel.
    """
    if arch.name not in SOURCES:
        supported = "Hopper (sm_90a), Blackwell (sm_100f), or the CPU"
        raise UnsupportedError(OPERATOR, f"a GPU of architecture {arch.name}", supported)
    if type(d_qk) is not int or d_qk not in D_QK:
        raise InputError("d_qk", "576 or 512", shown(d_qk), OPERATOR)
    if type(dtype) is not str or dtype not in DTYPES:
        raise InputError("dtype", "'bfloat16' or 'float16'", shown(dtype), OPERATOR)
    if type(pass_heads) is not int or pass_heads not in PASS_HEADS:
        raise InputError("pass_heads", "64 or 128", shown(pass_heads), OPERATOR)
    counts = (1, JOINT_QUERIES) if arch.name in JOINT_SOURCES else (1,)
    if type(queries) is not int or queries not in counts:
        raise InputError("queries", " or ".join(map(str, counts)) + f" on {arch.name}", shown(queries), OPERATOR)
    defines = (("CUPYMLA_D_QK", d_qk), ("CUPYMLA_FP16", int(dtype == "float16")))
    if queries != 1:
        return KernelSource(JOINT_SOURCES[arch.name], JOINT, defines, arch.name)
    return KernelSource(SOURCES[arch.name], OPERATOR, (*defines, ("CUPYMLA_HEADS", pass_heads)), arch.name)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """Every kernel variant, of one target or of all."""
    return tuple(
        variant(arches.named(name), d_qk=d_qk, dtype=dtype, **numbers)
        for name in SOURCES
        if arch_name in (None, name)
        for d_qk in D_QK
        for dtype in DTYPES
        for numbers in (
            *({"pass_heads": heads} for heads in PASS_HEADS),
            *({"queries": JOINT_QUERIES} for target in JOINT_SOURCES if target == name),
        )
    )
