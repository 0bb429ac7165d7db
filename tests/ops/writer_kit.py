"""Arrays that change while a kernel reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupymla_lab.interpreted import Interpreted

Ints = npt.NDArray[np.int32]


class Writer:
    """Writes to arrays while a kernel runs: a watcher of the interpreter's.

    Args:
        arrays: each with the limit below which its new values are.
        tokens: how many a kernel has room for; that number is among the values beyond every limit.
    """

    def __init__(self, arrays: list[tuple[Ints, int]], tokens: int) -> None:
        self.hostile = np.array([-(2**31), 2**31 - 1, -1, tokens, 65536, -65536], np.int32)
        self.generator = np.random.default_rng(5)
        self.arrays = arrays
        self.turns = 0

    def look(self, *_: Any) -> None:
        """At an instruction: every fourth time eight elements of each array get another value below its limit."""
        self.turns += 1
        if self.turns % 4:
            return
        for array, limit in self.arrays:
            values = self.generator.integers(0, limit, 8)
            hostile = self.generator.random(8) < 0.3
            values[hostile] = self.generator.choice(self.hostile, int(hostile.sum()))
            array.reshape(-1)[self.generator.integers(0, array.size, 8)] = values

    def done(self, *_: Any) -> None:
        """Nothing to write."""

    def landing(self, *_: Any) -> None:
        """Nothing to write."""

    def overlooks(self, *_: Any) -> bool:
        """Looks at an mbarrier find what there is."""
        return False


def turns_of_a_call(
    machine: Interpreted, function: Any, arguments: dict[str, Any], limits: dict[str, int], tokens: int
) -> list[int]:
    """Call a function while some of its arguments are written to; how many turns a writer had in each launch.

    Args:
        machine: strict, as no access out of bounds may be made.
        function: the operator.
        arguments: its arguments.
        limits: as of `Writer`, by the names of the arguments that change.
        tokens: as of `Writer`.
    """
    machine.strict = True
    machine.max_steps = 20_000_000
    written: list[Writer] = []

    def watch(_: object) -> Writer:
        written.append(Writer([(arguments[name].host, limit) for name, limit in limits.items()], tokens))
        return written[-1]

    machine.watch = watch
    machine.call(function, **arguments)
    return [writer.turns for writer in written]
