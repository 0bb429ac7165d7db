"""Arrays that change while a kernel reads them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from cupymla_lab.emulated import Emulated

Ints = npt.NDArray[np.int32]


class Writer:
    """Writes to arrays while a kernel runs, whenever it uses one of them.

    Args:
        arrays: each with the limit below which its new values are.
        tokens: how many a kernel has room for; that number is among the values beyond every limit.
    """

    def __init__(self, arrays: list[tuple[Ints, int]], tokens: int) -> None:
        self.hostile = np.array([-(2**31), 2**31 - 1, -1, tokens, 65536, -65536], np.int32)
        self.generator = np.random.default_rng(5)
        self.arrays = arrays

    def look(self, *_: Any) -> None:
        """Before a use: eight elements of each array get another value below its limit."""
        for array, limit in self.arrays:
            values = self.generator.integers(0, limit, 8)
            hostile = self.generator.random(8) < 0.3
            values[hostile] = self.generator.choice(self.hostile, int(hostile.sum()))
            array.reshape(-1)[self.generator.integers(0, array.size, 8)] = values


def uses_in_a_call(
    machine: Emulated, function: Any, arguments: dict[str, Any], limits: dict[str, int], tokens: int
) -> list[int]:
    """Call a function while some of its arguments are written to; how often each launch used them.

    Args:
        machine: it knows its arrays, as no access out of bounds may be made.
        function: the operator.
        arguments: its arguments.
        limits: as of `Writer`, by the names of the arguments that change.
        tokens: as of `Writer`.
    """
    writer = Writer([(arguments[name].host, limit) for name, limit in limits.items()], tokens)
    before, uses = len(machine.launched), Counter[int]()

    def look(*_: Any) -> None:
        uses[len(machine.launched) - before] += 1
        writer.look()

    for name in limits:
        machine.watch(arguments[name], look)
    machine.call(function, **arguments)
    return [uses[number] for number in range(len(machine.launched) - before)]
