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

_WHEN = "unless in order"
"""When the attention is in halves: "always" where it can be, "never", or where queries do not take their rows in the
order of tokens: P and dS go through L2, which then has too little room for keys and sums as it is."""

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


def takes(in_order: bool) -> bool:
    """Whether a problem that they can take is theirs; `in_order`: whether its rows had better be taken in order."""
    return _WHEN == "always" or not in_order


def weight_bytes(problem: Problem) -> int:
    """Of P and dS of one query, and of how many slots either half of its heads has them."""
    return -(-problem.shared.topk // _BLOCK_SLOTS) * HEADS[1] * _BLOCK_SLOTS * 2 * 2 + 2 * 4


def column_ctas(problem: Problem) -> int:
    """CTAs of the stage `columns` to a query."""
    return -(-problem.shared.d_qk // COLUMN_CTA_COLUMNS)
