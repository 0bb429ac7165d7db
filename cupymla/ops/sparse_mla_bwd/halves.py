"""The attention of 65 to 128 heads in halves: P and dS of some queries are stored first, then dQ and dKV made of them.

Each half is a stage of its own; the kernels' page tells how they work (cuda/sparse_mla_bwd/sm90/halves.md).
"""

from __future__ import annotations

from ...arch import Arch
from ...build.source import KernelSource
from ...errors import InputError, shown
from ..mla import DTYPES
from .launches import STAGES as ALL_STAGES
from .launches import Stage
from .spec import OPERATOR, Problem

ENTRY = "sparse_mla_bwd_halves"
"""The kernel."""

SOURCES = {"sm_90a": "sparse_mla_bwd/sm90/sparse_mla_bwd_halves.cu"}
"""Its source for each target that has it."""

STAGES: tuple[Stage, ...] = ("weights", "columns")
"""What is compiled from that source."""

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
_PACKED = 2  # the CUPYMLA_PARTIALS of rows by 16 bits a column


def can_take(problem: Problem, arch_name: str) -> bool:
    """Whether there are kernels for a problem, whose rows, if they are stored, are packed."""
    few, many = HEADS
    return (
        arch_name in SOURCES
        and _WHEN != "never"
        and few <= problem.shared.h_q <= many
        and weight_bytes(problem) <= WEIGHT_BYTES
    )


def takes(in_order: bool) -> bool:
    """Whether a problem that they can take is theirs; `in_order`: whether its rows had better be taken in order."""
    return _WHEN == "always" or not in_order


def weight_bytes(problem: Problem) -> int:
    """Of P and dS of one query."""
    return -(-problem.shared.topk // _BLOCK_SLOTS) * HEADS[1] * _BLOCK_SLOTS * 2 * 2


def column_ctas(problem: Problem) -> int:
    """CTAs of the stage `columns` to a query."""
    return -(-problem.shared.d_qk // COLUMN_CTA_COLUMNS)


def variant(arch: Arch, stage: Stage, d_qk: int, dtype: str, partials: bool, packed: bool) -> KernelSource:
    """One of the kernels, of numbers that `plan.variant` has checked. Raises InputError for rows stored whole."""
    if partials and not packed:
        raise InputError("partials", f"False, or packed as well, with stage={stage!r}", shown(partials), OPERATOR)
    defines = (
        ("CUPYMLA_STAGE", ALL_STAGES.index(stage)),
        ("CUPYMLA_D_QK", d_qk),
        ("CUPYMLA_FP16", DTYPES.index(dtype)),
        ("CUPYMLA_PARTIALS", _PACKED if packed and stage == "columns" else 0),
    )
    return KernelSource(SOURCES[arch.name], ENTRY, defines, arch.name)
