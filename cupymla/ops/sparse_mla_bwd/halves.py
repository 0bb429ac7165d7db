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
"""When the attention is in halves: "always" where it can be, "never", or where queries had better not take their rows
in the order of tokens, or L2 has room for what a share of columns is of all rows."""

_L2_ROOM = 40e6
"""Bytes of L2 (50 MB on an H200) for rows of kv and their sums, beside P and dS that pass through."""

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


def takes(problem: Problem, in_order: bool, at_once: int) -> bool:
    """Whether a problem that they can take is theirs.

    Args:
        problem: the problem.
        in_order: whether its rows had better be taken in the order of tokens.
        at_once: how many CTAs run at the same time.
    """
    return _WHEN == "always" or not in_order or _has_room(problem, at_once, COLUMN_CTA_COLUMNS)


def in_shares(problem: Problem, at_once: int) -> bool:
    """Whether CTAs of one share of columns had better all begin before those of the next.

    P and dS are then read from memory once for each share, but rows of kv and sums are found in L2 where all columns of
    them would not have room. Rows that are stored are no sums.
    """
    return not problem.shared.options.deterministic and not _has_room(problem, at_once, problem.shared.d_qk)


def _has_room(problem: Problem, at_once: int, columns: int) -> bool:
    """Whether L2 has room for so many columns of all rows of the batch entries whose queries run at the same time."""
    shared = problem.shared
    entries = max(1, min(shared.batch or 1, at_once // max(1, shared.s_q)))
    return entries * shared.s_kv * columns * _COLUMN_BYTES <= _L2_ROOM


def weight_bytes(problem: Problem) -> int:
    """Of P and dS of one query, and of how many slots either half of its heads has them."""
    return -(-problem.shared.topk // _BLOCK_SLOTS) * HEADS[1] * _BLOCK_SLOTS * 2 * 2 + 2 * 4


def column_ctas(problem: Problem) -> int:
    """CTAs of the stage `columns` to a query."""
    return -(-problem.shared.d_qk // COLUMN_CTA_COLUMNS)
