"""Which Blackwell kernel serves a problem: pairs of CTAs that take 128 heads of one query after another. Pure: no array,
no driver."""

from __future__ import annotations

from dataclasses import dataclass

from ...arch import Arch
from ...build.source import KernelSource
from ...errors import UnsupportedError
from ..kv_rows import KvRows, kv_rows
from ..mla import MlaProblem
from . import plan

CTAS = 2
"""CTAs of a pair."""


@dataclass(frozen=True, slots=True)
class PairPlan:
    """A kernel variant for one problem.

    Attributes:
        source: what to compile.
        tokens: queries of all batch entries together.
        head_blocks: blocks of 128 heads of a query.
        pairs: pairs of CTAs in the grid, no more than run at once.
        rows: how KV is one matrix.
    """

    source: KernelSource
    tokens: int
    head_blocks: int
    pairs: int
    rows: KvRows

    @property
    def items(self) -> int:
        """What there is to do, in queries of 128 heads or fewer."""
        return self.tokens * self.head_blocks

    @property
    def ctas(self) -> int:
        """The grid."""
        return self.pairs * CTAS


def pair_plan(problem: MlaProblem, arch: Arch, multiprocessors: int) -> PairPlan:
    """Choose the kernel and its grid, for a GPU with that many multiprocessors.

    Raises UnsupportedError when the architecture has no such kernel, or the problem is too large to number.
    """
    tokens = problem.s_q * (1 if problem.batch is None else problem.batch)
    if tokens * problem.h_q > plan.MAX_CTAS:
        raise UnsupportedError(
            f"{plan.OPERATOR} on {tokens} queries of {problem.h_q} heads", arch.name, f"up to {plan.MAX_CTAS} heads in all"
        )
    head_blocks = -(-problem.h_q // (CTAS * plan.PAIR_CTA_HEADS))
    pairs = max(1, min(tokens * head_blocks, multiprocessors // CTAS))
    source = plan.variant(
        arch, d_qk=problem.d_qk, dtype=problem.dtype, any_scale=problem.sm_scale < plan.SMALLEST_SCALE
    )
    return PairPlan(source, tokens, head_blocks, pairs, kv_rows(problem, plan.OPERATOR))
