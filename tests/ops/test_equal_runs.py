"""The kit that compares runs on a GPU sees a bit that differs in one of them, and what a run has not written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from equal_runs_kit import require_equal_runs

MADE: tuple[Any, ...] = (np.arange(6, dtype=np.float32).reshape(2, 3), np.full(3, np.nan, np.float16))


class Stream(nullcontext[None]):
    """One on which everything is done at once."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def record(self) -> None:
        """There is nothing to wait for."""

    def wait_event(self, event: None) -> None:
        """Likewise."""


CUPY = SimpleNamespace(ones=np.ones, zeros=np.zeros, cuda=SimpleNamespace(Stream=Stream, get_current_stream=Stream))


def prepared(spoil: Callable[[int, tuple[Any, ...]], None]) -> Callable[[], Any]:
    """A call that makes the same arrays each time, to which something happens in each run."""
    arrays, runs = tuple(np.empty_like(array) for array in MADE), iter(range(9))

    def call() -> Any:
        for array, contents in zip(arrays, MADE, strict=True):
            array[...] = contents
        spoil(next(runs), arrays)
        return arrays

    return call


def flip(run: int, arrays: tuple[Any, ...]) -> None:
    if run == 3:
        arrays[1].view(np.uint16)[2] ^= 1


def leave_out(run: int, arrays: tuple[Any, ...]) -> None:
    if run:
        arrays[0].view(np.uint16)[1] = 0xA5A5  # as the run before left it


def test_equal_runs_are_equal() -> None:
    require_equal_runs(CUPY, prepared(lambda run, arrays: None), runs=5)
    require_equal_runs(CUPY, MADE[0].copy, runs=5)


@pytest.mark.parametrize("spoil", [flip, leave_out])
def test_one_that_is_not_is_seen(spoil: Callable[[int, tuple[Any, ...]], None]) -> None:
    with pytest.raises(AssertionError, match="differ"):
        require_equal_runs(CUPY, prepared(spoil), runs=5)
