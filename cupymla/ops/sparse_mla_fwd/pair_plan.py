"""Which Blackwell kernel serves a problem: pairs of CTAs that take 128 heads of one query after another.

Pure: no array, no driver.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ...arch import Arch
from ...build.source import KernelSource
from ...errors import UnsupportedError
from ..kv_rows import KvRows, kv_rows
from ..mla import MlaProblem
from . import plan

CTAS = 2
"""CTAs of a pair."""

_BLOCK_SLOTS = 128  # slots of a KV block
_PARTS = (1, 2, 4, 8)

# What merging the parts of a query is taken to cost, in units of the time that a pair takes for a KV block: each CTA
# reads 128 KB of what others left. An estimate; it has not been timed.
_MERGE_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class PairPlan:
    """A kernel variant for one problem.

    Attributes:
        source: what to compile.
        tokens: queries of all batch entries together.
        head_blocks: blocks of 128 heads of a query.
        parts: pairs that share the slots of an item, as a cluster.
        clusters: clusters in the grid, no more than run at once.
        rows: how KV is one matrix.
    """

    source: KernelSource
    tokens: int
    head_blocks: int
    parts: int
    clusters: int
    rows: KvRows

    @property
    def items(self) -> int:
        """What there is to do, in queries of 128 heads or fewer."""
        return self.tokens * self.head_blocks

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.parts * CTAS

    @property
    def ctas(self) -> int:
        """The grid."""
        return self.clusters * self.cluster


def parts(items: int, topk: int, multiprocessors: int, without: Collection[int] = ()) -> int:
    """Pairs, a power of two, to share the slots of each item: more than one only where all of them run at once.

    Those of `without` are left out: a GPU may have no room for clusters of that size.
    """
    blocks = -(-topk // _BLOCK_SLOTS)

    def cost(size: int) -> int:
        return -(-blocks // size) + (_MERGE_BLOCKS if size > 1 else 0)

    fitting = [size for size in _PARTS if size not in without and size * items * CTAS <= multiprocessors]
    return min((1, *fitting), key=cost)


def pair_plan(problem: MlaProblem, arch: Arch, multiprocessors: int, without: Collection[int] = ()) -> PairPlan:
    """Choose the kernel and its grid, for a GPU with that many multiprocessors; `without` as `parts` takes it.

    Raises UnsupportedError when the architecture has no such kernel, or the problem is too large to number.
    """
    tokens = problem.s_q * (1 if problem.batch is None else problem.batch)
    if tokens * problem.h_q > plan.MAX_CTAS:
        limit = f"up to {plan.MAX_CTAS} heads in all"
        raise UnsupportedError(f"{plan.OPERATOR} on {tokens} queries of {problem.h_q} heads", arch.name, limit)
    head_blocks = max(1, -(-problem.h_q // (CTAS * plan.PAIR_CTA_HEADS)))
    items = tokens * head_blocks
    split = parts(items, problem.topk, multiprocessors, without)
    clusters = max(1, min(items, multiprocessors // CTAS))
    any_scale = problem.sm_scale < plan.SMALLEST_SCALE
    source = plan.variant(arch, d_qk=problem.d_qk, dtype=problem.dtype, any_scale=any_scale, split=split > 1)
    return PairPlan(source, tokens, head_blocks, split, clusters, kv_rows(problem, plan.OPERATOR))
