"""The sm_100a kernels of the backward read topk_length once for a query, as test_sparse_mla_bwd_lengths.py says of
sparse_mla_bwd for sm_90a: roles that read it for themselves could disagree, and wait for ever."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from emulated_kit import settings

from cupymla.ops.mla_cases import sized
from cupymla.testing.emulated import emulated
from cupymla.testing.operators import Array, Subject

QUERIES, SHORT, LONG = 6, 1, 260


def first_result(operator: str, heads: int, lengths: tuple[int, ...]) -> Array:
    """dq, or p, of queries that have one of these lengths each, which go round and round under way."""
    subject = Subject(operator)
    case = sized(heads, 512, LONG, QUERIES, 300, "_changing", "masks", lengths="hostile", selection="full")
    inputs = subject.cases.inputs(case, 1)
    inputs["topk_length"] = np.full(QUERIES, lengths[0], np.int32)
    done = threading.Event()
    with emulated("sm_100a", 2, settings("random")) as machine:
        given = machine.arguments(inputs, subject.written)
        memory = given["topk_length"].host

        def change() -> None:
            while not done.is_set():
                for length in lengths:
                    memory.fill(length)

        thread = threading.Thread(target=change)
        thread.start()
        try:
            found: Array = machine.call(subject.call, **given)[0].get()
        finally:
            done.set()
            thread.join()
    return found


@pytest.mark.compile
@pytest.mark.parametrize(
    ("operator", "heads"), [("sparse_mla_bwd", 5), ("sparse_mla_bwd", 70), ("sparse_mla_bwd_phase1", 5)]
)
def test_lengths_that_change_under_way_leave_the_roles_in_agreement(operator: str, heads: int) -> None:
    short, long = first_result(operator, heads, (SHORT,)), first_result(operator, heads, (LONG,))
    got = first_result(operator, heads, (SHORT, LONG))
    for query in range(QUERIES):
        assert got[query].tobytes() in {short[query].tobytes(), long[query].tobytes()}
