"""Calls on a GPU give the same bits in every run, whatever else the GPU has to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupymla.testing.operators import as_tuple

RUNS = 1000

OTHER_WORK = (512, 1024, 2048)
"""Extents of the products that run beside a call, one of them each time: they hold multiprocessors for 20, 50 and
350 us of an H200, so that the call's CTAs begin in other orders."""


def require_equal_runs(cp: Any, call: Callable[[], Any], runs: int = RUNS) -> None:
    """Every run makes the bits of the first one, beside work on another stream that begins with it.

    Args:
        cp: CuPy.
        call: makes contiguous arrays of 16 bits an element or more. It may make the same ones each time, as a prepared
            call does: in between they are overwritten.
        runs: how many.
    """
    first = [result.copy() for result in as_tuple(call())]
    other = cp.cuda.Stream(non_blocking=True)
    busy = [cp.ones((extent, extent), np.float32) for extent in OTHER_WORK]
    differing = cp.zeros(len(first), np.int64)
    for run in range(runs):
        other.wait_event(cp.cuda.get_current_stream().record())
        with other:
            array = busy[run % len(busy)]
            array @ array
        for place, (result, wanted) in enumerate(zip(as_tuple(call()), first, strict=True)):
            bits = result.view(np.uint16)
            differing[place] += (bits != wanted.view(np.uint16)).sum()
            bits.fill(0xA5A5)
    assert differing.tolist() == [0] * len(first), "elements of 16 bits that differ, over all runs, by result"
