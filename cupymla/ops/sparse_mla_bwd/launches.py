"""What a backward problem's plan consists of: launches of stages, and parts of the workspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Stage = Literal[
    "attention",
    "zero",
    "round",
    "sink",
    "list",
    "sum",
    "merge",
    "sort",
    "scatter",
    "p_ds",
    "dq_dkv",
    "sink_lse",
]
STAGES: tuple[Stage, ...] = get_args(Stage)[:-1]
"""Those that have variants, as `sink_lse` has not."""

ATTENDING: tuple[Stage, ...] = ("attention", "p_ds", "dq_dkv")
"""Those of them that take tensor maps, of q and dout among them, and a query's entries."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch.

    Attributes:
        stage: which kernel.
        ctas: the grid's first extent.
        query_begin, query_end: the queries, counted over all batch entries, that it takes; query groups of them, in
            `merge` and the attention after it.
        lists: for how many chunks of queries it makes lists of entries; 1 of what makes none.
        column_splits: splits of the columns whose CTAs begin one split after another; 1 where all of a query's begin
            at once.
        list: which of the chunks that have lists it takes; 0 of what reads none, or makes them.
        dependent: whether a launch of the call comes before it, which it may overlap with.
        has_dependent: whether one comes after it.
    """

    stage: Stage
    ctas: int
    query_begin: int
    query_end: int
    lists: int = 1
    column_splits: int = 1
    list: int = 0
    dependent: bool = False
    has_dependent: bool = False

    @property
    def grid(self) -> tuple[int, int, int]:
        """CTAs by blockIdx."""
        return self.ctas, self.lists * self.column_splits, 1


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where parts of the workspace begin, in bytes; None for parts that there are not.

    Attributes:
        sums: fp32 [batch * s_kv, d_qk], on sm_90a with `SPARE_ROWS` more; where dkv is not added to itself.
        sink_terms: fp32 [queries, h_q], with a sink.
        sink_lse: fp32 [queries, h_q], lse with the sink, where the distribution counts it.
        partials: fp32 [chunk, queries * topk, d_qk], or two bytes each where rows are packed; when deterministic.
        row_ends: int32 [lists, batch * s_kv], when deterministic, without the caller's lists and packed queries.
        entry_list: int32 [lists, chunk, topk], likewise.
        rows: int32 [lists, chunk, queries * topk], when queries are packed or in order, as the rest.
        row_topk_entries: uint16 [lists, chunk, queries * topk, queries], with a distribution.
        row_counts: uint32 [lists, chunk].
        group_words: uint32 [lists, chunk, ceil(s_kv / 32), 2], when queries are packed and deterministic.
        listed_dist: fp32 [chunk, topk], in order with a distribution.
        non_finite_rows: uint8 [batch * s_kv], when queries are packed.
        p_ds: 16-bit [chunk, blocks of 64 entries, 2, 2, 64 * 64], P and dS, and int32 [chunk, 2], how many entries
            there are, where the attention is in two phases.
        bytes: all of it.
    """

    sums: int | None
    sink_terms: int | None
    sink_lse: int | None
    partials: int | None
    row_ends: int | None
    entry_list: int | None
    rows: int | None
    row_topk_entries: int | None
    row_counts: int | None
    group_words: int | None
    listed_dist: int | None
    non_finite_rows: int | None
    p_ds: int | None
    bytes: int
