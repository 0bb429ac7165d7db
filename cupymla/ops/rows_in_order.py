"""What the order of tokens is worth to queries that run at the same time. Pure: no array, no driver."""

from __future__ import annotations


def first_of_those(queries: int, share: float) -> float:
    """Of the rows that queries name, the share that no other has named before: those are read from memory.

    Args:
        queries: how many take their rows in the order of tokens together.
        share: of all rows, how many each of them names, chosen at random and none twice.
    """
    share = min(1.0, share)
    named = queries * share
    return (1 - (1 - share) ** queries) / named if named else 1.0
