"""Arrays that change while a kernel reads them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from cupymla_lab.emulated import Emulated

Ints = npt.NDArray[np.int32]


@contextlib.contextmanager
def written_by(write: Callable[[], None]) -> Iterator[list[int]]:
    """A block in which a thread of its own writes again and again; how often it did, at index 0."""
    done, count = threading.Event(), [0]

    def work() -> None:
        while not done.is_set():
            write()
            count[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield count
    finally:
        done.set()
        thread.join()


def writes_during_a_call(
    machine: Emulated, function: Any, arguments: dict[str, Any], limits: dict[str, int], tokens: int
) -> int:
    """Call a function while some of its arguments are written to; how often they were.

    Args:
        machine: makes no access out of bounds and no endless wait pass.
        function: the operator.
        arguments: its arguments.
        limits: below which the new values of an argument are, by its name; now and then they are beyond every limit.
        tokens: how many a kernel has room for; that number is among the values beyond.
    """
    hostile = np.array([-(2**31), 2**31 - 1, -1, tokens, 65536, -65536], np.int32)
    generator = np.random.default_rng(5)
    arrays: list[tuple[Ints, int]] = [(arguments[name].host, limit) for name, limit in limits.items()]

    def write() -> None:
        for array, limit in arrays:
            values = generator.integers(0, limit, 8)
            beyond = generator.random(8) < 0.3
            values[beyond] = generator.choice(hostile, int(beyond.sum()))
            array.reshape(-1)[generator.integers(0, array.size, 8)] = values

    with written_by(write) as count:
        machine.call(function, **arguments)
    return count[0]
