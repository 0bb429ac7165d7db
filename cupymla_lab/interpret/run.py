"""Running one kernel: its source compiled to PTX, its parameters and its memory given, executed to the end."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence

from cupymla.build import KernelSource, content_hash, ptx
from cupymla.launch import Geometry
from cupymla.tensormap import TileMap

from ..ptx.approximation import Approximation
from ..ptx.races import Races
from .machine import Layout, Machine, Watcher
from .memory import GlobalMemory
from .program import Program, parse

_lock = threading.Lock()


def program_of(source: KernelSource) -> Program:
    """The kernel of a source, compiled to PTX and read, once while it is among those used last.

    Raises CompileError, PtxError and Trap.
    """
    with _lock:
        return _program(source, content_hash(source))


# A large kernel takes some 80 MB once it has run, and half a second to read again.
@functools.lru_cache(maxsize=12)
def _program(source: KernelSource, _content: str) -> Program:
    return parse(ptx(source), source.entry)


def interpret(
    source: KernelSource | Program,
    geometry: Geometry,
    parameters: Sequence[bytes],
    memory: GlobalMemory,
    *,
    maps: Mapping[int, TileMap] | None = None,
    seed: int = 0,
    group: int = 128,
    resident: int = 2,
    ctas: Sequence[int] | None = None,
    max_steps: int = 50_000_000,
    strict: bool = True,
    approximation: Approximation = "exact",
    races: Races = "unchecked",
    watch: Callable[[Program], Watcher] | None = None,
    ahead: Machine | None = None,
) -> Machine:
    """Run a kernel to its end.

    Args:
        source: the kernel: a source to compile, or a program that has been read.
        geometry: of the launch. With `pdl` a thread's use of global memory before its griddepcontrol.wait is a trap.
        parameters: the bytes of each parameter; those of a tensor map do not matter.
        memory: the buffers that the kernel may use.
        maps: the request of each parameter that is a tensor map, by the parameter's number.
        seed: of the schedule: another seed lets threads and copies take turns otherwise.
        group: threads that are simulated together, a multiple of 32, and of 128 where wgmma is used. Smaller groups
            take turns more finely and run slower.
        resident: clusters that run at the same time; all of a cooperative launch do.
        ctas: the CTAs to run, whole clusters; None for all.
        max_steps: after so many executed instructions the run is taken to be endless.
        strict: whether ordinary reads of unwritten shared memory are a trap; if not they read 0xFF bytes, NaN in all
            float formats.
        approximation: where in its error ex2.approx lies.
        races: whether accesses to shared memory that nothing orders are a trap, whatever the schedule made of them:
            "unchecked", by the "letter" of the ISA, or as "practice" goes beyond it, see `causality.py`.
        watch: makes who is told of every instruction.
        ahead: what the launch ahead gave, where this one is dependent on it.

    Returns the machine, for its counters and for the launch behind it. Raises Trap, and CompileError and PtxError for
    a source.
    """
    program = source if isinstance(source, Program) else program_of(source)
    total = geometry.grid[0] * geometry.grid[1] * geometry.grid[2]
    layout = Layout(
        geometry.grid,
        geometry.block,
        geometry.cluster,
        geometry.smem_bytes,
        min(group, geometry.block),
        max(1, total) if geometry.cooperative else resident,
        max_steps,
        strict,
        geometry.pdl,
        approximation,
        races,
    )
    machine = Machine(program, layout, parameters, memory, seed)
    for number, request in (maps or {}).items():
        machine.maps[program.parameters[number].address] = request
    if watch is not None:
        machine.watcher = watch(program)
    if ahead is not None and geometry.pdl and ahead.grid_shadow is not None:
        machine.ahead = (ahead.grid_shadow, *(ahead.ahead if ahead.lets_in_early else ()))
    machine.run(ctas)
    return machine
