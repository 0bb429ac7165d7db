"""Threads in lockstep: a group shares registers laid out thread by thread; its fronts are the places it has reached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .copies import ThreadCopies
from .memory import LocalMemory
from .traps import Trap
from .types import BOOL, Array, DType

if TYPE_CHECKING:
    from .machine import Cta, Machine

WARP = 32
_WARPGROUP = 4  # warps
ALL_LANES = 0xFFFFFFFF


class Lanes:
    """Some threads of a group, which execute an instruction together.

    Attributes:
        group: theirs.
        front: where they are.
        index: their numbers in the group, rising.
        select: the same as an index into registers: a slice where they are neighbours.
        count: how many.
    """

    __slots__ = ("_warps", "count", "front", "group", "index", "select")

    def __init__(self, group: Group, front: Front, index: Array) -> None:
        self.group = group
        self.front = front
        self.index = index
        self.count = len(index)
        self.select: Any = index
        if self.count and int(index[-1]) - int(index[0]) + 1 == self.count:
            self.select = slice(int(index[0]), int(index[-1]) + 1)
        self._warps: Array | None = None

    def require_grid_ahead(self) -> None:
        """Raise Trap where one of these threads, in a dependent launch, has not waited for the grid ahead."""
        early = self.group.early
        if early is not None and early[self.index].any():
            thread = self.group.first + int(self.index[np.argmax(early[self.index])])
            raise Trap(f"thread {thread} of a dependent launch uses global memory before its griddepcontrol.wait")

    @property
    def numbers(self) -> Array:
        """Their numbers in the cluster, see `Causality`."""
        return self.index + self.group.base

    @property
    def rows(self) -> Any:
        """The same as an index: a slice where they are neighbours."""
        if isinstance(self.select, slice):
            base = self.group.base
            return slice(self.select.start + base, self.select.stop + base)
        return self.numbers

    def visit(self, cta: Cta, which: Array | None = None) -> None:
        """These threads, or some of them, use shared memory of a CTA. Raises Trap when it may have exited."""
        if cta is self.group.cta:
            return
        self.require_started(cta, which)
        if not cta.live:
            raise Trap(f"use of shared memory of CTA {cta.number}, which has exited")
        if cta.visits is not None:
            numbers = self.numbers if which is None else self.numbers[which]
            cta.visits[numbers] = self.group.machine.count

    def require_started(self, cta: Cta, which: Array | None = None) -> None:
        """Raise Trap unless these threads, or some of them, know that a CTA of the cluster has started."""
        causality = self.group.causality
        if causality is not None and cta is not self.group.cta:
            causality.require_started(self.numbers if which is None else self.numbers[which], cta.rank, cta.number)

    @property
    def warps(self) -> Array:
        """Of how many of these threads each warp of the group consists."""
        if self._warps is None:
            self._warps = np.bincount(self.index >> 5, minlength=self.group.warps)
        return self._warps

    def converged(self, mask: Array | None = None) -> bool:
        """Whether every live thread that an instruction synchronises is here.

        Args:
            mask: `membermask` of each thread; None for instructions of whole warps.

        Raises Trap when a thread that is not in its own mask executes the instruction.
        """
        if mask is None or not (mask != ALL_LANES).any():
            live, here = self.group.live_warps, self.warps
            return bool((here[here > 0] == live[here > 0]).all())
        lane = (self.index & 31).astype(np.uint32)
        if not ((mask >> lane) & 1).all():
            raise Trap("a thread executes an instruction whose membermask leaves it out")
        here_bits = np.zeros(self.group.warps, np.uint32)
        np.bitwise_or.at(here_bits, self.index >> 5, np.uint32(1) << lane)
        warp = self.index >> 5
        return not (mask & self.group.live_bits()[warp] & ~here_bits[warp]).any()

    def are_warpgroups(self) -> bool:
        """Whether each warpgroup of which threads are here has all its warps here; groups of less cannot tell."""
        if self.group.size % (_WARPGROUP * WARP):
            return True
        here = (self.warps > 0).reshape(-1, _WARPGROUP).sum(axis=1)
        return bool(((here == 0) | (here == _WARPGROUP)).all())


class Front:
    """Threads of a group that have come to the same instruction.

    Attributes:
        pc: the instruction.
        lanes: the threads.
        generation: of the named barrier they wait at, -1 when at none.
        stalled: whether they found nothing to do when they were last tried.
    """

    __slots__ = ("generation", "lanes", "pc", "stalled")

    def __init__(self, group: Group, pc: int, index: Array) -> None:
        self.pc = pc
        self.lanes = Lanes(group, self, index)
        self.generation = -1
        self.stalled = False


def _unset(dtype: DType, rows: int, size: int) -> Array:
    """Registers that nothing has written: NaN in all float formats, -1, true."""
    return (
        np.full((rows, size * dtype.itemsize), 0xFF, np.uint8).view(dtype)
        if dtype != BOOL
        else np.ones((rows, size), BOOL)
    )


class Group:
    """Threads of a CTA that are simulated together.

    Attributes:
        cta: theirs.
        first: number in the CTA of the first of them.
        base: its number in the cluster, where each CTA's numbers begin with a whole warp.
        size: how many.
        warps: of how many warps they are.
        fronts: where they are; empty when all have exited.
        live_warps: how many threads of each warp have not exited.
        ports: views of registers as types, as the program's binder numbers them; None where not made yet.
        touched: registers of products that ordinary code has used since the last fence for them.
        copies: what they copy asynchronously.
        early: which threads have not waited for the grid ahead; None where none needs to (any more).
        cluster_generation: of the cluster barrier when each thread arrived there, -1 before.
        causality: of its cluster; None where races are not looked for.
    """

    def __init__(self, cta: Cta, first: int, size: int) -> None:
        program = cta.machine.program
        self.cta: Cta = cta
        self.first: int = first
        self.base: int = first + cta.rank * cta.cluster.padded
        self.size: int = size
        self.warps: int = -(-size // WARP)
        self.index: Array = np.arange(size)
        self.thread: Array = (first + self.index).astype(np.uint32)
        self.fronts = [Front(self, 0, self.index)]
        self.live_warps = np.bincount(self.index >> 5, minlength=self.warps)
        self.ports: list[Array | None] = [None] * len(program.ports)
        self._places = program.ports
        self._files = {dtype: _unset(dtype, rows, size) for dtype, rows in program.rows.items()}
        self._locked: set[tuple[DType, int]] = set()
        self._of_products = program.product_registers
        self.touched: set[tuple[DType, int]] = set()
        self.local = LocalMemory(size, program.local_bytes) if program.local_bytes else None
        self.cluster_generation = np.full(size, -1)
        self.causality = cta.cluster.causality
        self.copies = ThreadCopies(self)
        self.early: Array | None = np.ones(size, np.bool_) if cta.machine.layout.dependent else None
        self.products: Any = None
        self.specials: dict[str, Array] = {}

    @property
    def machine(self) -> Machine:
        """What runs them."""
        return self.cta.machine

    def live_bits(self) -> Array:
        """For each warp the lanes that have not exited, as bits."""
        bits = np.zeros(self.warps, np.uint32)
        for front in self.fronts:
            index = front.lanes.index
            np.bitwise_or.at(bits, index >> 5, np.uint32(1) << (index & 31).astype(np.uint32))
        return bits

    def file(self, dtype: DType) -> Array:
        """All registers of a kind, `[registers, threads]`."""
        return self._files[dtype]

    def open(self, number: int) -> Array:
        """Make a port: a register of all threads, seen as a type. Raises Trap for one that a wgmma still uses."""
        kind, row, dtype = self._places[number]
        if self._locked and (kind, row) in self._locked:
            raise Trap("a register of an unfinished wgmma is used before wgmma.wait_group")
        if (kind, row) in self._of_products:
            self.touched.add((kind, row))
        port: Array = self._files[kind][row]
        # Code without loops opens a port for nearly every instruction, so that an empty view would count.
        if dtype is not kind:
            port = port.view(dtype)
        self.ports[number] = port
        return port

    def lock(self, registers: frozenset[tuple[DType, int]]) -> None:
        """Make the use of registers a trap, until `unlock`."""
        self._locked |= registers
        by_register = self.machine.program.ports_of
        for register in registers:
            for number in by_register.get(register, ()):
                self.ports[number] = None

    def watch_products(self) -> None:
        """From now on note which registers of products ordinary code uses, in `touched`."""
        self.touched.clear()
        by_register = self.machine.program.ports_of
        for register in self._of_products:
            for number in by_register.get(register, ()):
                self.ports[number] = None

    def unlock(self, but: frozenset[tuple[DType, int]]) -> None:
        """Allow the use of all locked registers but some."""
        self._locked = set(but)
