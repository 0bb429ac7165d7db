"""The attention of 65 to 128 heads in halves: P and dS of some queries are stored first, then dQ and dKV made of them.

Each half is a stage of its own; the kernels' page tells how they work (cuda/sparse_mla_bwd/sm90/README.md).
"""

from __future__ import annotations

from .launches import Stage
from .spec import Problem

ARCHS = ("sm_90a",)
"""Targets that have these stages."""

STAGES: tuple[Stage, ...] = ("weights", "columns")
"""What there is only for them."""

HEADS = (65, 128)
"""The fewest and the most heads."""

COLUMN_CTA_COLUMNS = 192
"""Columns of a query that a CTA of the stage `columns` has: `kTiles` of 64 in
cuda/sparse_mla_bwd/sm90/columns_storage.cuh."""

WEIGHT_BYTES = 1 << 30
"""What P and dS of the slots of some queries may take. One query has to have room."""

_WHEN = "where faster"
"""When the attention is in halves: "always" where it can be, "never", or where that was faster on an H200."""

_WHOLE_ROOM = 43e6
"""Up to how many bytes of rows of kv and their sums CTAs of all columns begin together, beside P and dS that pass
through L2 (50 MB on an H200): there 42.5 MB are 2% faster so, 44 MB 2% slower."""

_SHARE_ROOM = 50e6
"""Up to how many bytes of them one share of the columns may be. A pair of CTAs is as fast somewhere between 38 and 47
MB with d_qk 576 and a topk of 1024, 57 and 66 MB with 2048, and at 75 MB with d_qk 512 and 2048."""

_COLUMN_BYTES = 2 + 4  # of a row of kv, and of its sums

_BLOCK_SLOTS = 64


def can_take(problem: Problem, arch_name: str) -> bool:
    """Whether there are kernels for a problem, whose rows, if they are stored, are packed."""
    few, many = HEADS
    return (
        arch_name in ARCHS
        and _WHEN != "never"
        and few <= problem.shared.h_q <= many
        and weight_bytes(problem) <= WEIGHT_BYTES
    )


def takes(problem: Problem, at_once: int) -> bool:
    """Whether a problem that they can take is theirs.

    That is so where rows are stored, where `at_once` CTAs, which run at the same time, are all that `columns` has, or
    where L2 has room for what a share of the columns is of all rows.
    """
    shared = problem.shared
    one_wave = (shared.batch or 1) * shared.s_q * column_ctas(problem) <= at_once
    has_room = _bytes_at_once(problem, at_once, COLUMN_CTA_COLUMNS) <= _SHARE_ROOM
    return _WHEN == "always" or shared.options.deterministic or one_wave or has_room


def in_shares(problem: Problem, at_once: int) -> bool:
    """Whether CTAs of one share of columns had better all begin before those of the next, `at_once` at the same time.

    P and dS are then read from memory once for each share, but rows of kv and sums are found in L2 where all columns of
    them would not have room. Rows that are stored are no sums.
    """
    together = at_once // column_ctas(problem)  # queries under way where all columns of each are
    fits = _bytes_at_once(problem, together, problem.shared.d_qk) <= _WHOLE_ROOM
    return not problem.shared.options.deterministic and not fits


def _bytes_at_once(problem: Problem, queries: int, columns: int) -> int:
    """So many columns of all rows and their sums, of the batch entries that so many queries at the same time are of."""
    shared = problem.shared
    entries = max(1, min(shared.batch or 1, queries // max(1, shared.s_q)))
    return entries * shared.s_kv * columns * _COLUMN_BYTES


def weight_bytes(problem: Problem) -> int:
    """Of P and dS of one query, and of how many slots either half of its heads has them."""
    return -(-problem.shared.topk // _BLOCK_SLOTS) * HEADS[1] * _BLOCK_SLOTS * 2 * 2 + 2 * 4


def column_ctas(problem: Problem) -> int:
    """CTAs of the stage `columns` to a query."""
    return -(-problem.shared.d_qk // COLUMN_CTA_COLUMNS)
