"""Queries that take their rows in the order of tokens: what that is worth, and how lists of rows lie.

Pure: no array, no driver.
"""

from __future__ import annotations

from .mla import MaskOptions, MlaProblem


def named_by_any(queries: int, share: float) -> float:
    """The share of all rows that any of so many queries names, each that share of them, at random and none twice."""
    return 1 - (1 - min(1.0, share)) ** queries


def first_of_those(queries: int, share: float) -> float:
    """Of the rows that queries name, the share that no other has named before: those are read from memory.

    Arguments as of `named_by_any`.
    """
    named = queries * min(1.0, share)
    return named_by_any(queries, share) / named if named else 1.0


def found_more(problem: MlaProblem[MaskOptions], at_once: int, row_bytes: int, l2_bytes: float) -> float:
    """By how much the share of rows that are found in L2 is larger in the order of tokens than in that of entries.

    Queries that began together are at about the same tokens at any time, so that of several that have a row the first
    brings it in for the others. In the order of entries a row is found as often as there is room, for those of all
    batch entries under way. Selections are taken to be random.

    Args:
        problem: with at least one token.
        at_once: how many queries run at the same time.
        row_bytes: of what a row is to L2.
        l2_bytes: the room.
    """
    entries = max(1, min(problem.batch or 1, at_once // max(1, problem.s_q)))
    missed_in_entries = max(0.0, 1 - l2_bytes / (entries * problem.s_kv * row_bytes))
    return missed_in_entries - first_of_those(min(problem.s_q, max(1, at_once)), problem.topk / problem.s_kv)


def list_strides(problem: MlaProblem[MaskOptions]) -> dict[str, int]:
    """Strides of lists of every query's rows and of their lengths, which an attention takes in the place of indices and
    topk_length: by the names that parameter records have for those."""
    return {
        "indices_batch": problem.s_q * problem.topk,
        "indices_query": problem.topk,
        "topk_length_batch": problem.s_q,
        "topk_length_query": 1,
    }
