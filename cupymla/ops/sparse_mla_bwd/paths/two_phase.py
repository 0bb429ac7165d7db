"""Two phases for queries of 65 to 128 heads on Hopper: P and dS of some are stored first, then dQ and dKV made of them.

They are chosen where they were faster than a 2-CTA cluster on an H200 (`takes`): where `dq_dkv` is one wave of CTAs,
where L2 has room for a split of the columns of all rows, and where rows are stored, if they are packed. CTAs of all
columns begin together where their rows and sums fit in L2, and else one split of the columns after another
(`columns_outermost`). Each phase is a kernel of its own; the kernels' page tells how they work
(cuda/sparse_mla_bwd/sm90/README.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from ...units import Unit
from .. import units
from ..launches import Launch, Stage
from ..spec import Problem
from . import fixed_order, token_order
from .path import BLOCK_HEADS, CTA_HEADS, Held, Path

STAGES: tuple[Stage, ...] = ("p_ds", "dq_dkv")
"""What there is only for them."""

HEADS = (65, 128)
"""The fewest and the most heads."""

DQ_DKV_CTA_COLUMNS = 192
"""Columns of a query that a CTA of the kernel `dq_dkv` has: `kTiles` of 64 in
cuda/sparse_mla_bwd/sm90/dq_dkv_storage.cuh."""

P_DS_BYTES = 1 << 30
"""What P and dS of the entries of some queries may take. One query has to have room."""

_WHEN = "where faster"
"""When the attention is in two phases: "always" where it can be, "never", or where that was faster on an H200."""

_ALL_COLUMNS_BYTES = 43e6
"""Up to how many bytes of rows of kv and their sums CTAs of all columns begin together, beside P and dS that pass
through L2 (50 MB on an H200): there 42.5 MB are 2% faster so, 44 MB 2% slower."""

_COLUMN_SPLIT_BYTES = 50e6
"""Up to how many bytes of them one split of the columns may be. A 2-CTA cluster is as fast somewhere between 38 and 47
MB with d_qk 576 and a topk of 1024, 57 and 66 MB with 2048, and at 75 MB with d_qk 512 and 2048."""

_COLUMN_BYTES = 2 + 4  # of a row of kv, and of its sums

_BLOCK_KEYS = 64


@dataclass(frozen=True, slots=True)
class TwoPhase(Path):
    """Two kernels: `p_ds`, two CTAs a query, each half of the heads, and `dq_dkv`, a CTA for each split of the columns.

    Attributes:
        columns_outermost: whether these are made of all queries for some columns first, then for the next.
    """

    block_heads: int = BLOCK_HEADS[1]
    columns_outermost: bool = False

    title: ClassVar[str] = "two-phase"
    heads: ClassVar[range] = range(HEADS[0], HEADS[1] + 1)
    row_ctas: ClassVar[int] = HEADS[1] // CTA_HEADS
    attention_stages: ClassVar[tuple[Stage, ...]] = STAGES
    packed_units: ClassVar[Mapping[str, Unit]] = {"sum": units.CLUSTER_SUM}

    @classmethod
    def every(cls) -> Iterator[Self]:
        """Stored rows are packed, and need no splits."""
        for in_order in (False, True):
            yield from (cls(in_order=in_order, columns_outermost=outermost) for outermost in (False, True))
        yield cls("packed")

    @classmethod
    def ways(cls, problem: Problem) -> Iterator[Self]:
        """In either order, with or without splits of the columns, whose rules exclude each other."""
        if can_take(problem):
            best, can_sort = fixed_order.rows(problem)[0], token_order.can_sort(problem)
            yield from (path for path in cls.every() if path.rows == best and (can_sort or not path.in_order))

    def pays(self, problem: Problem, multiprocessors: int) -> bool:
        """Whether it is faster than a 2-CTA cluster, and its form the fastest."""
        return (
            self.columns_outermost == columns_outermost(problem, multiprocessors)
            and takes(problem, multiprocessors)
            and self.in_order == self.is_better_in_order(problem, multiprocessors)
        )

    @property
    def forms(self) -> tuple[str, ...]:
        """Whether columns are split."""
        return ("split-N",) if self.columns_outermost else ()

    def attention(self, problem: Problem, first: int, last: int) -> Iterator[Launch]:
        """Both phases."""
        yield Launch("p_ds", (last - first) * self.row_ctas, first, last)
        column_splits = dq_dkv_ctas(problem)
        splits = column_splits if self.columns_outermost else 1
        yield Launch("dq_dkv", (last - first) * column_splits // splits, first, last, column_splits=splits)

    def wave(self, multiprocessors: int) -> int:
        """Whole waves of either phase."""
        return multiprocessors

    def held(self, problem: Problem) -> tuple[Held, ...]:
        """P and dS besides."""
        return (*Path.held(self, problem), Held(p_ds_bytes(problem), P_DS_BYTES))

    def p_ds_bytes(self, problem: Problem) -> int:
        """As the function says."""
        return p_ds_bytes(problem)


def can_take(problem: Problem) -> bool:
    """Whether there are kernels for a problem, whose rows, if they are stored, are packed."""
    return _WHEN != "never" and problem.shared.h_q in TwoPhase.heads and p_ds_bytes(problem) <= P_DS_BYTES


def takes(problem: Problem, at_once: int) -> bool:
    """Whether a problem that they can take is theirs.

    That is so where rows are stored, where `at_once` CTAs, which run at the same time, are all that `dq_dkv` has, or
    where L2 has room for what a split of the columns is of all rows.
    """
    shared = problem.shared
    one_wave = (shared.batch or 1) * shared.s_q * dq_dkv_ctas(problem) <= at_once
    has_room = _bytes_at_once(problem, at_once, DQ_DKV_CTA_COLUMNS) <= _COLUMN_SPLIT_BYTES
    return _WHEN == "always" or shared.options.deterministic or one_wave or has_room


def columns_outermost(problem: Problem, at_once: int) -> bool:
    """Whether CTAs of one split of the columns had better all begin before the next, `at_once` at a time.

    P and dS are then read from memory once for each split, but rows of kv and sums are found in L2 where all columns of
    them would not have room. Rows that are stored are no sums.
    """
    queries = at_once // dq_dkv_ctas(problem)  # queries under way where all columns of each are
    fits = _bytes_at_once(problem, queries, problem.shared.d_qk) <= _ALL_COLUMNS_BYTES
    return not problem.shared.options.deterministic and not fits


def _bytes_at_once(problem: Problem, queries: int, columns: int) -> int:
    """So many columns of all rows and their sums, of the batch entries that so many queries at the same time are of."""
    shared = problem.shared
    entries = max(1, min(shared.batch or 1, queries // max(1, shared.s_q)))
    return entries * shared.s_kv * columns * _COLUMN_BYTES


def p_ds_bytes(problem: Problem) -> int:
    """Of P and dS of one query, and of how many entries either half of its heads has them."""
    return -(-problem.shared.topk // _BLOCK_KEYS) * HEADS[1] * _BLOCK_KEYS * 2 * 2 + 2 * 4


def dq_dkv_ctas(problem: Problem) -> int:
    """CTAs of the kernel `dq_dkv` to a query."""
    return -(-problem.shared.d_qk // DQ_DKV_CTA_COLUMNS)
