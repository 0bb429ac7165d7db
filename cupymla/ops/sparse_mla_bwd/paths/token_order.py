"""The order of tokens: queries take their rows sorted, so that those under way share them in L2.

Queries that take their rows by themselves do so, on Hopper, where rows do not fit in L2 and that finds a tenth more of
them there (`takes_rows_in_order`). Rows that are stored for sums are no sums in L2, so deterministic calls do not.
"""

from __future__ import annotations

from ...rows_in_order import found_more
from ..launches import Stage
from ..sizes import GROUP_ENTRIES
from ..spec import Problem

ORDER_STAGES: tuple[Stage, ...] = ("sort", "scatter")
"""The stages that list rows in this order, and take the distribution back to the order of entries."""

ORDER_TOKENS = 1 << 18
"""Tokens of a batch entry that `sort` has room for: as `kMaxTokensSingle` in cuda/sparse_mla_bwd/query_group.cuh."""

_ORDER_GAIN = 0.1
"""Rows are taken in the order of tokens where so much more of them is then expected to be found in L2."""

_L2_BYTES = 50e6  # of an H200


def can_sort(problem: Problem) -> bool:
    """Whether there are kernels that take a problem's rows in order."""
    shared = problem.shared
    return not shared.options.deterministic and 0 < shared.s_kv <= ORDER_TOKENS and 0 < shared.topk <= GROUP_ENTRIES


def takes_rows_in_order(problem: Problem, at_once: int) -> bool:
    """Whether queries, `at_once` of them at a time, had better take their rows in the order of tokens.

    To L2 a row is its channels and its gradient's sums.
    """
    shared = problem.shared
    if not can_sort(problem):
        return False
    return found_more(shared, at_once, shared.d_qk * (2 + 4), _L2_BYTES) >= _ORDER_GAIN
