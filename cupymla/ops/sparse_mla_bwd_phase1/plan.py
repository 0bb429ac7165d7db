"""Which kernel serves the backward's first phase, and how queries are assigned to CTAs. Pure: no array, no driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ...errors import UnsupportedError
from ..kv_rows import KvRows, kv_rows
from ..mla import D_QK, DTYPES
from ..query_assignment import QueryAssignment, assign_queries
from ..variants import require_choice, require_target
from ..work_assignment import WorkAssignment
from .spec import OPERATOR, Problem

MAX_CTAS = 2**31 - 1
"""The extent of grid.x, on which queries and blocks of heads lie (CUDA C++ Programming Guide)."""

PAIR_CTAS = 2
"""CTAs that share a query; the kernel says the same of itself, which is compared when a call is bound."""

CTA_HEADS = 64
"""Query heads of each of them; compared as well."""

TARGETS = ("sm_100f",)
"""What the kernel is compiled for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one problem is computed.

    Attributes:
        source: what to compile.
        tokens: queries of all batch entries together.
        head_blocks: blocks of 128 heads.
        assignment: how queries are assigned to pairs of CTAs.
        rows: how rows of kv are numbered.
    """

    source: KernelSource
    tokens: int
    head_blocks: int
    assignment: QueryAssignment
    rows: KvRows

    @property
    def ctas(self) -> int:
        """The grid."""
        return self.assignment.ctas * self.head_blocks * PAIR_CTAS


def plan(problem: Problem, arch: Arch, multiprocessors: int) -> Plan:
    """Choose the kernel and its grid, for a GPU with that many multiprocessors.

    Raises UnsupportedError when the architecture has no kernel, or the grid cannot be that large.
    """
    source = variant(arch, d_qk=problem.d_qk, dtype=problem.dtype)
    tokens = problem.s_q * (1 if problem.batch is None else problem.batch)
    head_blocks, assigned = _assign_work(tokens, problem.h_q, multiprocessors)
    made = Plan(source, tokens, head_blocks, assigned, kv_rows(problem, OPERATOR))
    if max(made.ctas, tokens) > MAX_CTAS:
        wanted = f"{OPERATOR} on {tokens} queries of {problem.h_q} heads"
        raise UnsupportedError(wanted, arch.name, f"up to {MAX_CTAS} CTAs, two for each query and 128 heads")
    return made


def _assign_work(tokens: int, h_q: int, multiprocessors: int) -> tuple[int, QueryAssignment]:
    """Blocks of 128 heads, and how queries are assigned to the pairs of CTAs of one."""
    head_blocks = max(1, -(-h_q // (PAIR_CTAS * CTA_HEADS)))
    return head_blocks, assign_queries(tokens, head_blocks, max(1, multiprocessors // PAIR_CTAS))


def raw_work_assignment(
    source: KernelSource, facts: Mapping[str, int], multiprocessors: int, *, s_q: int, h_q: int, batch: int = 1
) -> WorkAssignment:
    """The work assignment for a launch on its own.

    Args:
        source: the variant.
        facts: its launch facts.
        multiprocessors: of the device.
        s_q: queries of a batch entry.
        h_q: heads of a query.
        batch: how many entries there are.
    """
    head_blocks, assigned = _assign_work(s_q * batch, h_q, multiprocessors)
    fields = {"groups": assigned.groups, "group_tokens": assigned.group_tokens, "head_block_clusters": assigned.ctas}
    return WorkAssignment(assigned.ctas * head_blocks * PAIR_CTAS, fields)


def variant(arch: Arch, *, d_qk: int = 576, dtype: str = "bfloat16") -> KernelSource:
    """One kernel variant.

    Args:
        arch: the target.
        d_qk: 576 or 512.
        dtype: "bfloat16" or "float16".

    Raises InputError, and UnsupportedError when the target has no kernel.
    """
    require_target(OPERATOR, arch, TARGETS, "Blackwell (sm_100f)")
    require_choice(OPERATOR, d_qk=(d_qk, D_QK), dtype=(dtype, DTYPES))
    defines = (("CUPYMLA_D_QK", d_qk), ("CUPYMLA_FP16", int(dtype == "float16")))
    return KernelSource("sparse_mla_bwd_phase1/sm100/sparse_mla_bwd_phase1.cu", OPERATOR, defines, arch.name)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """Every kernel variant, of one target or of all."""
    targets = [name for name in TARGETS if arch_name in (None, name)]
    return tuple(
        variant(arches.named(name), d_qk=d_qk, dtype=dtype) for name in targets for d_qk in D_QK for dtype in DTYPES
    )
