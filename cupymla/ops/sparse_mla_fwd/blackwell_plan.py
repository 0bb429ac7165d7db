"""Which Blackwell kernel serves a problem: pairs of CTAs that take 128 heads of one query after another, or CTAs by
themselves that take 64.

Pure: no array, no driver.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ...arch import Arch
from ...build.source import KernelSource
from ...errors import UnsupportedError
from ..kv_rows import KvRows, kv_rows
from . import plan
from .spec import OPERATOR, Problem

_CTA_ENTRIES = 64  # entries of a KV block for each CTA of an item

# What merging the parts of a query is taken to cost CTAs by themselves, and pairs, in units of the time that they take
# for a KV block: each CTA reads 128 KB of what others left. Estimates; they have not been timed.
_MERGE_BLOCKS, _PAIR_MERGE_BLOCKS = 6, 4


@dataclass(frozen=True, slots=True)
class BlackwellPlan:
    """A kernel variant for one problem.

    Attributes:
        source: what to compile.
        tokens: queries of all batch entries together.
        item_ctas: CTAs that take an item's heads together: a pair, or one.
        head_blocks: items of a query.
        parts: how many times as many share the entries of an item, as a cluster.
        clusters: clusters in the grid, no more than run at once.
        rows: how KV is one matrix.
    """

    source: KernelSource
    tokens: int
    item_ctas: int
    head_blocks: int
    parts: int
    clusters: int
    rows: KvRows

    @property
    def items(self) -> int:
        """What there is to do, in queries of as many heads as an item has or fewer."""
        return self.tokens * self.head_blocks

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.parts * self.item_ctas

    @property
    def ctas(self) -> int:
        """The grid."""
        return self.clusters * self.cluster


def item_ctas(h_q: int) -> int:
    """CTAs of an item: two where a query has more heads than one takes."""
    return 1 if h_q <= plan.BLACKWELL_CTA_HEADS else 2


def parts(items: int, topk: int, multiprocessors: int, ctas: int, without: Collection[int] = ()) -> int:
    """How many times the CTAs of an item, a power of two, are to share the entries of each.

    More than once only where all of them run at once. Those of `without` are left out: a GPU may have no room for
    clusters of that size.
    """
    merge_blocks = _MERGE_BLOCKS if ctas == 1 else _PAIR_MERGE_BLOCKS
    sizes = (cluster // ctas for cluster in plan.CLUSTERS if cluster * items <= multiprocessors)
    return plan.cheapest_parts(-(-topk // (_CTA_ENTRIES * ctas)), merge_blocks, sizes, without)


def blackwell_plan(problem: Problem, arch: Arch, multiprocessors: int, without: Collection[int] = ()) -> BlackwellPlan:
    """Choose the kernel and its grid, for a GPU with that many multiprocessors; `without` as `parts` takes it.

    Raises UnsupportedError when the architecture has no such kernel, or the problem is too large to number.
    """
    tokens = problem.s_q * (1 if problem.batch is None else problem.batch)
    if tokens * problem.h_q > plan.MAX_CTAS:
        limit = f"up to {plan.MAX_CTAS} heads in all"
        raise UnsupportedError(f"{OPERATOR} on {tokens} queries of {problem.h_q} heads", arch.name, limit)
    ctas = item_ctas(problem.h_q)
    heads = ctas * plan.BLACKWELL_CTA_HEADS
    head_blocks = max(1, -(-problem.h_q // heads))
    items = tokens * head_blocks
    split = parts(items, problem.topk, multiprocessors, ctas, without)
    clusters = max(1, min(items, multiprocessors // ctas))
    any_scale = problem.options.scale(problem.d_qk) < plan.SMALLEST_SCALE
    source = plan.variant(
        arch, d_qk=problem.d_qk, heads=heads, dtype=problem.dtype, any_scale=any_scale, split=split > 1
    )
    return BlackwellPlan(source, tokens, ctas, head_blocks, split, clusters, kv_rows(problem, OPERATOR))
