"""The workspace of a backward problem: which parts it has, and where they begin."""

from __future__ import annotations

from .launches import Workspace
from .sizes import all_kv_rows, all_tokens, group_word_bytes, partial_bytes
from .spec import Problem

PART_ALIGNMENT = 256
"""Of a workspace's parts from its start, in bytes."""

SPARE_ROWS = 64
"""Rows behind all others, to which what there is for entries that are not valid is added on sm_90a: as `kSpareRows` in
cuda/sparse_mla_bwd/sm90/runs.cuh."""


def workspace(
    problem: Problem,
    chunk: int,
    queries: int = 1,
    in_order: bool = False,
    *,
    in_runs: bool = False,
    packed: bool = False,
    lists: int = 1,
    p_ds_bytes: int = 0,
) -> Workspace:
    """Lay out the workspace of a problem whose entries are stored for `chunk` queries at a time, or whose rows are
    listed for `chunk` query groups of `queries`, or queries by themselves `in_order`. `in_runs`: whether sums have
    columns in an order of their own, so that no dkv can be the sums, and have spare rows. `packed`: whether stored
    rows have 16 bits a column. `lists`: of how many chunks entries, or rows of stored query groups, are listed at a
    time. `p_ds_bytes`: of P and dS of one query, 0 where they are not stored."""
    shared = problem.shared
    kv_rows = all_kv_rows(problem)
    listed_queries = lists * chunk  # or query groups
    entries = listed_queries * shared.topk
    end = 0

    def part(wanted: bool, words: int) -> int | None:
        nonlocal end
        if not wanted:
            return None
        start = end
        end += -(-words * 4 // PART_ALIGNMENT) * PART_ALIGNMENT
        return start

    ordered = problem.shared.options.deterministic
    sum_rows = kv_rows + (SPARE_ROWS if in_runs else 0)
    sums = part(in_runs or problem.dkv_dtype != "float32", sum_rows * shared.d_qk)
    sink_terms = part(shared.has_sink, all_tokens(problem) * shared.h_q)
    sink_lse = part(problem.counts_sink, all_tokens(problem) * shared.h_q)
    partials = part(ordered, chunk * partial_bytes(problem, packed, queries) // 4)
    grouped = queries > 1
    by_entries = ordered and not grouped and not problem.has_lists
    row_ends, entry_list = part(by_entries, lists * kv_rows), part(by_entries, entries)
    listed = grouped or in_order
    return Workspace(
        sums=sums,
        sink_terms=sink_terms,
        sink_lse=sink_lse,
        partials=partials,
        row_ends=row_ends,
        entry_list=entry_list,
        rows=part(listed, entries * queries),
        row_topk_entries=part(listed and problem.has_attn_dist, -(-entries * queries * queries // 2)),
        row_counts=part(listed, listed_queries),
        group_words=part(ordered and grouped, listed_queries * group_word_bytes(problem) // 4),
        listed_dist=part(in_order and problem.has_attn_dist, entries),
        non_finite_rows=part(grouped, -(-kv_rows // 4)),
        p_ds=part(p_ds_bytes > 0, chunk * p_ds_bytes // 4),
        bytes=end,
    )
