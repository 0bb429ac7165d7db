"""topk_length may change while sparse_mla_fwd for sm_90a runs: lanes that search a query's slots together go by what
one of them has read, or they would wait for each other for ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupymla.ops.mla_cases import sized
from cupymla.testing.operators import Subject
from cupymla_lab.interpret.memory import GlobalMemory
from cupymla_lab.interpreted import interpreted

SUBJECT = Subject("sparse_mla_fwd")
# Heads, queries and multiprocessors: CTAs of 64 heads and of few; several that share a query's slots.
KERNELS = [
    pytest.param(33, 2, 1, id="many heads"),
    pytest.param(5, 2, 1, id="few heads"),
    pytest.param(70, 1, 132, id="sharing"),
]


@pytest.mark.compile
@pytest.mark.parametrize(("heads", "queries", "multiprocessors"), KERNELS)
def test_lengths_that_change_under_way_leave_the_lanes_in_agreement(
    heads: int, queries: int, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = SUBJECT.cases.inputs(sized(heads, 512, 300, queries, 300, "_changing", "masks", selection="full"), 1)
    inputs["topk_length"] = np.full(queries, 300, np.int32)
    rng, load, readings = np.random.default_rng(0), GlobalMemory.load, 0
    with interpreted("sm_90a", multiprocessors) as machine:
        given = machine.arguments(inputs, SUBJECT.written)
        begin = given["topk_length"].data.ptr

        def changing(self: GlobalMemory, address: Any, dtype: Any, count: int) -> Any:
            nonlocal readings
            values = load(self, address, dtype, count)
            lengths_read = (address >= begin) & (address < begin + 4 * queries)
            if lengths_read.any():
                # Another one for every thread that reads.
                values = values.copy()
                values[lengths_read] = rng.integers(0, 301, size=values[lengths_read].shape)
                readings += int(lengths_read.sum())
            return values

        monkeypatch.setattr(GlobalMemory, "load", changing)
        machine.call(SUBJECT.call, **given)
    assert readings > 0
