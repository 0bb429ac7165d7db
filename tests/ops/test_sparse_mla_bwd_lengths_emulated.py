"""The sm_100f kernels of the backward read topk_length once for a query, as test_sparse_mla_bwd_lengths.py says of
sparse_mla_bwd for sm_90a: roles that read it for themselves could disagree, and wait for ever."""

from __future__ import annotations

import pytest
from emulated_kit import results_while_changing

from cupymla.ops.mla_cases import sized
from cupymla.testing.operators import Array, Subject

QUERIES, SHORT, LONG = 6, 1, 260


def first_result(operator: str, heads: int, lengths: tuple[int, ...]) -> Array:
    """dq, or p, of queries that have one of these lengths each, which go round and round under way."""
    subject = Subject(operator)
    case = sized(heads, 512, LONG, QUERIES, 300, "_changing", "masks", lengths="hostile", selection="full")
    inputs = subject.cases.inputs(case, 1)
    return results_while_changing(subject, inputs, {"topk_length": lengths})[0]


@pytest.mark.compile
@pytest.mark.parametrize(
    ("operator", "heads"), [("sparse_mla_bwd", 5), ("sparse_mla_bwd", 70), ("sparse_mla_bwd_phase1", 5)]
)
def test_lengths_that_change_under_way_leave_the_roles_in_agreement(operator: str, heads: int) -> None:
    short, long = first_result(operator, heads, (SHORT,)), first_result(operator, heads, (LONG,))
    got = first_result(operator, heads, (SHORT, LONG))
    for query in range(QUERIES):
        assert got[query].tobytes() in {short[query].tobytes(), long[query].tobytes()}
