"""How much there is of a backward problem, and how much of it has room at a time."""

from __future__ import annotations

from .spec import Problem

GROUP_ENTRIES = 8192
"""Rows that a list has room for: as `kMaxEntries` in cuda/sparse_mla_bwd/query_group.cuh."""

LIST_BYTES = 128 << 20
"""What lists of rows, and a distribution in their order, may take at a time, or lists of entries when deterministic.
One query group's, or one chunk's, are made at a time where they need more."""


def partial_bytes(problem: Problem, packed: bool, queries: int = 1) -> int:
    """Of the rows that one query's entries add, or of the whole blocks of 64 of so many packed queries."""
    rows = problem.shared.topk if queries == 1 else -(-queries * problem.shared.topk // 64) * 64
    return rows * problem.shared.d_qk * (2 if packed else 4)


def _batch(problem: Problem) -> int:
    return 1 if problem.shared.batch is None else problem.shared.batch


def all_tokens(problem: Problem) -> int:
    """Queries of all batch entries."""
    return problem.shared.s_q * _batch(problem)


def all_kv_rows(problem: Problem) -> int:
    """Tokens of kv of all batch entries."""
    return problem.shared.s_kv * _batch(problem)


def all_query_groups(problem: Problem, queries: int) -> int:
    """Query groups of so many neighbouring queries, the last of each batch entry perhaps not full."""
    return -(-problem.shared.s_q // queries) * _batch(problem)


def list_bytes(problem: Problem, queries: int) -> int:
    """Of the lists of one query group."""
    entries = queries * problem.shared.topk
    listed_dist = 4 if queries == 1 else 0
    return entries * (4 + (queries * 2 + listed_dist if problem.has_attn_dist else 0))


def group_word_bytes(problem: Problem) -> int:
    """Of what tells where each token stands in one query group's list: eight for 32 tokens."""
    return -(-problem.shared.s_kv // 32) * 8


def fitting(count: int, each_bytes: int, limit_bytes: int, wave: int) -> int:
    """Queries or query groups whose rows are stored at a time: as many as have room, in whole waves of CTAs if
    possible."""
    room = max(1, limit_bytes // max(each_bytes, 1))
    return max(1, min(count, room // wave * wave if room > wave else room))
