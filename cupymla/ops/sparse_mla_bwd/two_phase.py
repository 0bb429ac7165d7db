"""The attention of 65 to 128 heads in two phases: P and dS of some queries are stored first, then dQ and dKV made of
them.

Each phase is a kernel of its own; the kernels' page tells how they work (cuda/sparse_mla_bwd/sm90/README.md).
"""

from __future__ import annotations

from .launches import Stage
from .spec import Problem

ARCHS = ("sm_90a",)
"""Targets that have these stages."""

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


def can_take(problem: Problem, arch_name: str) -> bool:
    """Whether there are kernels for a problem, whose rows, if they are stored, are packed."""
    few, many = HEADS
    return (
        arch_name in ARCHS
        and _WHEN != "never"
        and few <= problem.shared.h_q <= many
        and p_ds_bytes(problem) <= P_DS_BYTES
    )


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
