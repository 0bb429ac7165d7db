"""The registers of a CTA that `setmaxnreg` moves between its warps.

Sources: PTX ISA 9.0, "setmaxnreg" (a pool for each CTA; an increase blocks until it has enough); CUDA C++ Programming
Guide, "Compute Capabilities" (65536 registers of a multiprocessor, 255 per thread).
"""

from __future__ import annotations

from .traps import Trap
from .types import Array

FILE = 65536
_LEAST, _MOST, _STEP = 24, 256, 8


def at_launch(threads: int, ctas: int) -> int:
    """Registers per thread that ptxas gives a kernel whose launch bounds are `threads`, `ctas` of them on an SM."""
    return min(_MOST, FILE // (threads * ctas) // _STEP * _STEP)


class RegisterPool:
    """What a CTA got at launch, and what its warps have of it.

    Registers of warps that have exited do not come back: nothing documented says that they would.

    Attributes:
        free: registers per thread of one warp that nobody has.
        held: registers per thread of each warp.
    """

    __slots__ = ("free", "held")

    def __init__(self, warps: int, registers: int) -> None:
        self.free = 0
        self.held = [registers] * warps

    def give_back(self, warps: Array, registers: int) -> None:
        """Reduce the warps' registers. Raises Trap where they have fewer."""
        for warp in warps:
            if self.held[warp] < registers:
                raise Trap(f"setmaxnreg.dec to {registers} registers where a warp has {self.held[warp]}")
            self.free += self.held[warp] - registers
            self.held[warp] = registers

    def take(self, warps: Array, registers: int) -> bool:
        """Increase the warps' registers, all or none; whether there were enough. Raises Trap where they have more."""
        for warp in warps:
            if self.held[warp] > registers:
                raise Trap(f"setmaxnreg.inc to {registers} registers where a warp has {self.held[warp]}")
        wanted = sum(registers - self.held[warp] for warp in warps)
        if wanted > self.free:
            return False
        self.free -= wanted
        for warp in warps:
            self.held[warp] = registers
        return True


def check(registers: int) -> None:
    """Raises Trap for a number that setmaxnreg does not take."""
    if not _LEAST <= registers <= _MOST or registers % _STEP:
        raise Trap(f"setmaxnreg of {registers} registers: multiples of {_STEP} from {_LEAST} to {_MOST} are allowed")
