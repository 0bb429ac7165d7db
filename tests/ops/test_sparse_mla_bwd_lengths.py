"""topk_length is read once for a query: roles that read it for themselves could disagree, and wait for ever."""

from __future__ import annotations

import pytest
from emulated_kit import results_while_changing

from cupymla.ops.mla_cases import sized
from cupymla.ops.sparse_mla_bwd import halves
from cupymla.testing.operators import Array, Subject

QUERIES, SHORT, LONG = 6, 1, 260
KERNELS = [
    pytest.param("sparse_mla_bwd", "sm_90a", 16, "never", id="sm_90a, one CTA"),
    pytest.param("sparse_mla_bwd", "sm_90a", 128, "never", id="sm_90a, two CTAs"),
    pytest.param("sparse_mla_bwd", "sm_90a", 128, "always", id="sm_90a, two phases"),
    pytest.param("sparse_mla_bwd", "sm_100f", 5, "never", id="sm_100f, one CTA"),
    pytest.param("sparse_mla_bwd", "sm_100f", 70, "never", id="sm_100f, two CTAs"),
    pytest.param("sparse_mla_bwd_phase1", "sm_100f", 5, "never", id="phase1"),
]


def first_result(operator: str, arch: str, heads: int, lengths: tuple[int, ...]) -> Array:
    """dq, or p, of queries that have one of these lengths each, which go round and round under way."""
    subject = Subject(operator)
    case = sized(heads, 512, LONG, QUERIES, 300, "_changing", "masks", lengths="hostile", selection="full")
    inputs = subject.cases.inputs(case, 1)
    return results_while_changing(subject, inputs, {"topk_length": lengths}, multiprocessors=3, arch=arch)[0]


@pytest.mark.compile
@pytest.mark.parametrize(("operator", "arch", "heads", "when"), KERNELS)
def test_lengths_that_change_under_way_leave_the_roles_in_agreement(
    operator: str, arch: str, heads: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "_WHEN", when)
    short, long = (first_result(operator, arch, heads, (length,)) for length in (SHORT, LONG))
    got = first_result(operator, arch, heads, (SHORT, LONG))
    for query in range(QUERIES):
        assert got[query].tobytes() in {short[query].tobytes(), long[query].tobytes()}
