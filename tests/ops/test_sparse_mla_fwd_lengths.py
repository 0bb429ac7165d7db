"""topk_length may change while sparse_mla_fwd for sm_90a runs: lanes that search a query's entries together go by what
one of them has read, or they would wait for each other for ever."""

from __future__ import annotations

import numpy as np
import pytest

from cupymla.ops.mla_cases import sized
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject

SUBJECT = Subject("sparse_mla_fwd")
# Heads, columns, queries and multiprocessors: CTAs of 64 heads and of few; several that share a query's entries.
KERNELS = [
    pytest.param(33, 512, 2, 1, id="many heads"),
    pytest.param(5, 512, 2, 1, id="few heads"),
    pytest.param(70, 576, 1, 132, id="sharing"),
]


@pytest.mark.compile
@pytest.mark.parametrize(("heads", "d_qk", "queries", "multiprocessors"), KERNELS)
def test_lengths_that_change_under_way_leave_the_lanes_in_agreement(
    heads: int, d_qk: int, queries: int, multiprocessors: int
) -> None:
    inputs = SUBJECT.cases.inputs(sized(heads, d_qk, 300, queries, 300, "_changing", "masks", selection="full"), 1)
    inputs["topk_length"] = np.full(queries, 300, np.int32)
    rng, readings = np.random.default_rng(0), 0
    with emulated("sm_90a", multiprocessors) as machine:
        given = machine.arguments(inputs, SUBJECT.written)
        lengths = given["topk_length"]

        def changing(address: int, size: int, loads: bool, stores: bool) -> None:
            nonlocal readings
            # Another one for every thread that reads.
            lengths.host[...] = rng.integers(0, 301, size=queries)
            readings += 1

        machine.watch(lengths, changing)
        machine.call(SUBJECT.call, **given)
    assert readings > 0
