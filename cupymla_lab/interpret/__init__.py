"""A SIMT interpreter of PTX on NumPy: runs kernels on a machine without a GPU, functionally exact.

`interpret` runs one kernel on registered memory. Threads diverge and meet again, barriers block, copies finish late,
and the order of everything comes from a seed. Accesses out of bounds, misaligned or of unwritten memory, writes that
race with asynchronous reads, uses of registers of unfinished wgmma, misused barriers and deadlocks end the run with a
`Trap` that names the thread and the instruction; on request, so do accesses to shared memory that nothing orders. There
are no caches and there is no time, but `cycles` replays what a run did against a clock.
"""

from __future__ import annotations

from ..ptx.races import Races
from .machine import Machine, Watcher
from .memory import GlobalMemory
from .program import Program, parse
from .run import interpret, program_of
from .traps import Trap, Unknown

__all__ = [
    "GlobalMemory",
    "Machine",
    "Program",
    "Races",
    "Trap",
    "Unknown",
    "Watcher",
    "interpret",
    "parse",
    "program_of",
]
