"""Watches a machine and writes down what its warps do.

What a handler does to barriers and memory is read off its operands just before it runs; where it could not run yet,
nothing is written down.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ...ptx.syntax import names_in
from ..instructions.copies import source_size
from ..instructions.kit import kind_of
from ..instructions.memory import space_of
from ..instructions.wgmma import shape_of
from ..operands import Getter, Operands, items, number
from ..outcomes import YIELD
from ..program import BRANCH, Program, Step
from ..threads import WARP, Lanes
from ..types import TYPES, Array, DType
from . import trace
from .costs import cost
from .trace import Event, Trace, WarpTrace

if TYPE_CHECKING:
    from ..barriers import MBarrier
    from ..machine import Cta

_Register: TypeAlias = tuple[DType, int]
_Notes: TypeAlias = list[tuple[int, Event]]
_Look: TypeAlias = "Callable[[Lanes], _Notes]"

_LINE = 128  # of L2: what a prefetch of an address brings
_BANKS = 32
_NOTHING = trace.Run(0, 0, 0, 0)
_PHASE_BYTES = 128
# How far, in events, and over how many other accesses a load is brought forward.
_WINDOW, _AHEAD = 64, 8
# What nothing is brought forward over.
_ENDS = frozenset(
    (
        trace.GatherWait,
        trace.BulkWait,
        trace.Wait,
        trace.Named,
        trace.ClusterWait,
        trace.Fence,
        trace.ProductWait,
    )
)


class Recorder:
    """What a machine tells of each instruction.

    Args:
        program: of the machine, bound.
        machine_code: what each line of its PTX became, see `costs.of_machine_code`; None to go by the PTX alone.

    Attributes:
        program: of the machine.
        trace: so far.
    """

    def __init__(self, program: Program, machine_code: Mapping[int, trace.Run] | None = None) -> None:
        self.program = program
        self.trace = Trace()
        self._machine_code = machine_code
        # The one that bound the program, so that its ports are used again.
        self._operands = program.operands or Operands(program)
        self._looks: dict[int, _Look | None] = {}
        self._costs: dict[int, trace.Run] = {}
        self._registers: dict[int, frozenset[_Register]] = {}
        self._warps: dict[tuple[int, int], WarpTrace] = {}
        self._results: dict[int, list[_Register]] = {}
        self._loading: dict[tuple[int, int], dict[_Register, int]] = {}
        self._origins: dict[tuple[int, int], dict[_Register, frozenset[int]]] = {}
        self._polling: set[tuple[int, int]] = set()
        self._looked: dict[tuple[int, int], Step] = {}  # where a warp's last operation on an mbarrier found nothing
        self._ctas: dict[int, int] = {}
        self._clusters: dict[int, int] = {}
        self._barriers: dict[int, int] = {}
        self._kept: list[object] = []
        self._wavefronts: dict[bytes, int] = {}
        self._notes: _Notes = []
        self._line = 0
        for step in program.steps:
            self._bind(step, program)

    # What the machine calls ------------------------------------------------------------------------------------

    def look(self, lanes: Lanes, step: Step) -> None:
        """Threads are about to execute an instruction."""
        self._line = step.line
        look = self._looks[id(step)]
        self._notes = look(lanes) if look is not None and lanes.count else []

    def done(self, all_lanes: Lanes, step: Step, outcome: int | None) -> None:
        """Threads have executed it, or a branch; those of `all_lanes` whose guard was false have passed it."""
        cta, first = self._cta(all_lanes.group.cta), all_lanes.group.first // WARP
        registers, price = self._registers[id(step)], self._costs[id(step)]
        found: dict[int, list[Event]] = {}
        for warp, event in self._notes:
            found.setdefault(warp, []).append(event)
        self._notes = []
        for warp in map(int, np.flatnonzero(all_lanes.warps)):
            key = cta, first + warp
            events = found.get(warp, [])
            if outcome == YIELD and not events:
                # A test_wait may be a look that the warp goes on from, until it comes to the same one again.
                if step.parts[1] != "test_wait" or self._looked.get(key) is step:
                    self._polling.add(key)
                self._looked[key] = step
            elif step.parts[0] == "mbarrier":
                self._polling.discard(key)
                self._looked.pop(key, None)
            if key in self._polling:
                continue
            to = self._warp(key)
            loading, origins = self._loading[key], self._origins[key]
            needs: frozenset[int] = frozenset()
            if loading and (used := registers & loading.keys()):
                needs = frozenset(loading[register] for register in used)
                for register in used:
                    origins[register] = frozenset((loading.pop(register),))
                to.add(trace.Use(tuple(needs)), step.line)
            if origins or needs:
                for register in registers & origins.keys():
                    needs |= origins[register]
            for event in events:
                if not self._early(to, event, step.line, needs):
                    to.add(event, step.line)
                self._expect(step, event, loading, origins)
                if type(event) in _ENDS:
                    origins.clear()
            if needs and step.operands and not events:
                for place in self._results[id(step)]:
                    origins[place] = needs
            if price.issue:
                to.add(price, step.line)

    def overlooks(self, lanes: Lanes, step: Step) -> bool:
        """A look is in vain unless it follows one: what it finds would depend on the schedule, and with it the path."""
        return any(self._looked.get(key) is not step for _, key in self._keys(lanes))

    def landing(
        self, cta: Cta, where: list[Cta], barriers: list[MBarrier], bytes_: int, thread: int, stored: bool
    ) -> None:
        """A thread of a CTA, by its number in the cluster, starts a copy of so many bytes to each receiver."""
        warp = (thread - cta.rank * cta.cluster.padded) // WARP
        to = self._warp((self._cta(cta), warp))
        for receiver, barrier in zip(where, barriers, strict=True):
            to.add(trace.Landing(self._barrier(receiver, barrier), bytes_, self._cta(receiver), stored), self._line)

    # Numbers ---------------------------------------------------------------------------------------------------

    def _cta(self, cta: Cta) -> int:
        known = self._ctas.get(cta.number)
        if known is None:
            known = self._ctas[cta.number] = len(self._ctas)
            self.trace.clusters.append(self._clusters.setdefault(id(cta.cluster), len(self._clusters)))
            self.trace.threads = cta.machine.layout.threads
            self._kept.append(cta.cluster)
        return known

    def _warp(self, key: tuple[int, int]) -> WarpTrace:
        known = self._warps.get(key)
        if known is None:
            known = self._warps[key] = WarpTrace(*key)
            self.trace.warps.append(known)
            self._loading[key] = {}
            self._origins[key] = {}
        return known

    def _barrier(self, home: Cta, barrier: MBarrier) -> int:
        known = self._barriers.get(id(barrier))
        if known is None:
            known = self._barriers[id(barrier)] = len(self._barriers)
            self._kept.append(barrier)
            self.trace.counts.append(barrier.count)
            self._cta(home)
        return known

    def _load(self, key: tuple[int, int]) -> int:
        to = self._warp(key)
        to.loads += 1
        return to.loads - 1

    @staticmethod
    def _early(to: WarpTrace, event: Event, line: int, needs: frozenset[int]) -> bool:
        """Put a load where ptxas would, ahead of uses of loads that its address does not come from; whether it did."""
        if not isinstance(event, trace.Shared | trace.Global) or event.load < 0:
            return False
        found, passed = -1, 0
        for at in range(len(to.events) - 1, max(-1, len(to.events) - _WINDOW), -1):
            other = to.events[at]
            if isinstance(other, trace.Use):
                if not needs.isdisjoint(other.loads):
                    break
                found = at
            elif type(other) in _ENDS or (_stores(other) and isinstance(event, trace.Shared)):
                break
            elif not isinstance(other, trace.Run):
                passed += 1
                if passed >= _AHEAD:
                    break
        if found < 0:
            return False
        to.events.insert(found, event)
        to.places.insert(found, line)
        return True

    def _expect(
        self, step: Step, event: Event, loading: dict[_Register, int], origins: dict[_Register, frozenset[int]]
    ) -> None:
        """What a load brings is waited for where its registers are used first."""
        load = getattr(event, "load", -1)
        if load >= 0:
            for place in self._results[id(step)]:
                loading[place] = load
                origins.pop(place, None)

    # Instructions ----------------------------------------------------------------------------------------------

    def _bind(self, step: Step, program: Program) -> None:
        self.trace.lines[step.line] = step.location
        names = {name for operand in step.operands for name in names_in(operand)}
        if step.guard is not None:
            names.add(step.guard.register)
        self._registers[id(step)] = frozenset(program.registers[n] for n in names if n in program.registers)
        first = items(step.operands[0]) if step.operands else ()
        results = [program.registers.get(str(item).split("|")[0]) for item in first]
        self._results[id(step)] = [place for place in results if place is not None]
        look = None if step.kind == BRANCH else self._looking(step)
        self._looks[id(step)] = look
        # What has an event of its own takes its issue slot with it.
        price = cost(step) if look is None else _NOTHING
        # Divisions of 64 bits are subroutines, of which no line is told.
        if self._machine_code is not None and not (step.parts[0] in ("div", "rem") and step.parts[-1].endswith("64")):
            price = self._machine_code.get(step.line, _NOTHING)
        self._costs[id(step)] = price

    def _looking(self, step: Step) -> _Look | None:
        name, parts = step.parts[0], step.parts
        if name in ("ld", "ldu", "st", "atom", "red") and "async" not in parts:
            return self._access(step)
        if name in ("ldmatrix", "stmatrix"):
            return self._tiles(step)
        if name in ("shfl", "vote", "redux", "activemask", "elect", "match"):
            return lambda lanes: [(warp, trace.Exchange(self._load(key))) for warp, key in self._keys(lanes)]
        if name == "cp":
            return self._copy(step)
        if name == "prefetch" and "tensormap" not in parts:
            return self._line_prefetch(step)
        if name == "mbarrier" and parts[1] not in ("init", "inval"):
            return self._mbarrier(step)
        if name in ("bar", "barrier"):
            return self._cta_barrier(step)
        if name == "wgmma":
            return self._product(step)
        if name == "mma":
            return self._warp_product(step)
        if name in ("fence", "membar"):
            if "mbarrier_init" in parts:
                return None
            kind = "proxy" if "proxy" in parts else "cta" if "cta" in parts else "gpu"
            return self._same(trace.Fence(kind))
        return None

    def _same(self, event: Event) -> _Look:
        return lambda lanes: [(int(warp), event) for warp in np.flatnonzero(lanes.warps)]

    def _in_all(self, kind: Callable[[int], Event], sizes: Getter) -> _Look:
        """An event of each warp with the bytes of its threads together."""

        def look(lanes: Lanes) -> _Notes:
            bytes_, warps = np.asarray(sizes(lanes)), lanes.index >> 5
            return [(warp, kind(int(bytes_[warps == warp].sum()))) for warp, _ in self._keys(lanes)]

        return look

    def _keys(self, lanes: Lanes) -> Iterator[tuple[int, tuple[int, int]]]:
        cta, first = self._cta(lanes.group.cta), lanes.group.first // WARP
        return ((int(warp), (cta, first + int(warp))) for warp in np.flatnonzero(lanes.warps))

    def _access(self, step: Step) -> _Look | None:
        space, name = space_of(step), step.parts[0]
        if space in ("param", "local", "const"):
            return None
        returns = name in ("ld", "ldu", "atom")
        at = step.operands[1] if returns else step.operands[0]
        address = self._operands.address(at)
        vector = next((int(part[1:]) for part in step.parts if part in ("v2", "v4", "v8")), 1)
        width = TYPES[kind_of(step)].itemsize * vector

        def look(lanes: Lanes) -> _Notes:
            notes: _Notes = []
            places, warps = np.asarray(address(lanes)), lanes.index >> 5
            for warp, key in self._keys(lanes):
                mine = places[warps == warp]
                load = self._load(key) if returns else -1
                if space == "shared" or (space == "generic" and int(mine[0]) < 1 << 32):
                    notes.append((warp, trace.Shared(self._conflicts(mine, width), load)))
                else:
                    sectors = _sectors(mine, width)
                    reduces = name in ("atom", "red")
                    notes.append((warp, trace.Global(len(sectors) * trace.SECTOR, load, reduces, _rows(sectors))))
            return notes

        return look

    def _conflicts(self, places: Array, width: int) -> int:
        """Cycles of the banks for an access of a warp: a part of its lanes at a time, one word of a bank each."""
        relative = (places - places[0] // _PHASE_BYTES * _PHASE_BYTES).astype(np.int32)
        key = relative.tobytes() + bytes([width])
        known = self._wavefronts.get(key)
        if known is None:
            lanes = max(1, min(32, _PHASE_BYTES // max(width, 4)))
            known = 0
            for start in range(0, len(relative), lanes):
                words = np.unique((relative[start : start + lanes, None] + np.arange(0, width, 4)) // 4)
                known += int(np.bincount(words % _BANKS).max())
            self._wavefronts[key] = known
        return known

    def _tiles(self, step: Step) -> _Look:
        loads = step.parts[0] == "ldmatrix"
        address = self._operands.address(step.operands[1 if loads else 0])
        tiles = len(items(step.operands[0 if loads else 1]))

        def look(lanes: Lanes) -> _Notes:
            notes: _Notes = []
            places, warps = np.asarray(address(lanes)), lanes.index >> 5
            for warp, key in self._keys(lanes):
                mine = places[warps == warp]
                cycles = sum(self._conflicts(mine[8 * k : 8 * k + 8], 16) for k in range(tiles))
                notes.append((warp, trace.Shared(cycles, self._load(key) if loads else -1)))
            return notes

        return look

    # Copies ----------------------------------------------------------------------------------------------------

    def _copy(self, step: Step) -> _Look | None:
        parts = step.parts
        if "bulk" in parts:
            return self._bulk(step)
        if parts[2] in ("ca", "cg"):
            return self._gather(step)
        if parts[2] == "mbarrier":
            return self._arrive_behind(step)
        if parts[2] == "commit_group":
            return self._same(trace.GatherCommit())
        return self._same(trace.GatherWait(number(step.operands[0]) if parts[2] == "wait_group" else -1))

    def _gather(self, step: Step) -> _Look:
        size, most = source_size(self._operands, step), number(step.operands[2])
        source = self._operands.address(step.operands[1])

        def look(lanes: Lanes) -> _Notes:
            notes: _Notes = []
            places, warps = np.asarray(source(lanes)), lanes.index >> 5
            sizes = np.full(lanes.count, most) if size is None else np.asarray(size(lanes))
            for warp, _ in self._keys(lanes):
                sectors = _sectors(places[(warps == warp) & (sizes > 0)], most)
                notes.append((warp, trace.Gather(len(sectors) * trace.SECTOR, _rows(sectors))))
            return notes

        return look

    def _line_prefetch(self, step: Step) -> _Look:
        address = self._operands.address(step.operands[0])

        def look(lanes: Lanes) -> _Notes:
            places, warps = np.asarray(address(lanes)) // _LINE * _LINE, lanes.index >> 5
            return [(warp, _prefetch(_sectors(places[warps == warp], _LINE))) for warp, _ in self._keys(lanes)]

        return look

    def _range_prefetch(self, step: Step) -> _Look:
        address, size = self._operands.address(step.operands[0]), self._operands.read(step.operands[1], "u32")

        def look(lanes: Lanes) -> _Notes:
            notes: _Notes = []
            places, sizes, warps = np.asarray(address(lanes)), np.asarray(size(lanes)), lanes.index >> 5
            for warp, _ in self._keys(lanes):
                mine = zip(places[warps == warp], sizes[warps == warp], strict=True)
                ranges = [_sectors(np.array([place]), int(bytes_)) for place, bytes_ in mine if bytes_]
                notes.append((warp, _prefetch(np.unique(np.concatenate([np.zeros(0, np.int64), *ranges])))))
            return notes

        return look

    def _arrive_behind(self, step: Step) -> _Look:
        address, counted = self._operands.address(step.operands[0]), "noinc" not in step.parts

        def look(lanes: Lanes) -> _Notes:
            notes: _Notes = []
            for warp, barrier, home, threads in self._told(lanes, np.asarray(address(lanes))):
                arrivals = int(threads.sum())
                if counted:
                    notes.append((warp, trace.Arrive(barrier, -arrivals, 0, home)))
                notes.append((warp, trace.GatherArrive(barrier, arrivals)))
            return notes

        return look

    def _told(self, lanes: Lanes, places: Array) -> Iterator[tuple[int, int, int, Array]]:
        """Which warps tell which mbarriers of which CTAs, and which threads of them do."""
        cta, warps = lanes.group.cta, lanes.index >> 5
        for warp in np.flatnonzero(lanes.warps):
            mine = warps == warp
            for place in np.unique(places[mine]):
                home, _ = cta.peer(int(place))
                barrier = self._barrier(home, cta.mbarrier(int(place)))
                yield int(warp), barrier, self._cta(home), mine & (places == place)

    def _bulk(self, step: Step) -> _Look | None:
        parts = step.parts
        if "commit_group" in parts:
            return None
        if "wait_group" in parts:
            return self._same(trace.BulkWait())
        into = next((k for k, part in enumerate(parts) if part.startswith("shared")), len(parts))
        if "prefetch" not in parts and into < parts.index("global"):
            return None  # the machine tells of its landing
        kind = trace.Prefetch if "prefetch" in parts else trace.BulkStore
        if "tensor" in parts:
            return self._same(kind(0))
        if "prefetch" in parts:
            return self._range_prefetch(step)
        return self._in_all(kind, self._operands.read(step.operands[2], "u32"))

    # Barriers --------------------------------------------------------------------------------------------------

    def _mbarrier(self, step: Step) -> _Look:
        parts, what = step.parts, step.parts[1]
        if what in ("try_wait", "test_wait"):
            return self._wait(step)
        returned = what in ("arrive", "arrive_drop")
        operands = step.operands[1:] if returned else step.operands
        address = self._operands.address(operands[0])
        given = self._operands.read(operands[1], "u32") if len(operands) > 1 else None
        bytes_told = "expect_tx" in parts
        sign = -1 if what == "complete_tx" else 1

        def look(lanes: Lanes) -> _Notes:
            notes: _Notes = []
            numbers = np.ones(lanes.count, np.int64) if given is None else np.asarray(given(lanes)).astype(np.int64)
            for warp, barrier, home, threads in self._told(lanes, np.asarray(address(lanes))):
                total = int(numbers[threads].sum())
                if not returned:
                    arrivals, bytes_ = 0, sign * total
                elif bytes_told:
                    arrivals, bytes_ = int(threads.sum()), total
                else:
                    arrivals, bytes_ = total, 0
                notes.append((warp, trace.Arrive(barrier, arrivals, bytes_, home)))
            return notes

        return look

    def _wait(self, step: Step) -> _Look:
        address = self._operands.address(step.operands[1])
        parity = "parity" in step.parts
        token = self._operands.read(step.operands[2], "u32" if parity else "b64")
        looks = step.parts[1] == "test_wait"

        def look(lanes: Lanes) -> _Notes:
            notes: _Notes = []
            if looks and self.overlooks(lanes, step):
                return notes
            places, wanteds = np.asarray(address(lanes)), np.asarray(token(lanes))
            cta, warps = lanes.group.cta, lanes.index >> 5
            for warp in np.flatnonzero(lanes.warps):
                mine = warps == warp
                for place, wanted in {(int(p), int(w)) for p, w in zip(places[mine], wanteds[mine], strict=True)}:
                    barrier = cta.mbarrier(place)
                    over = (barrier.phase & 1) != (wanted & 1) if parity else barrier.phase != wanted
                    if over:
                        home, _ = cta.peer(place)
                        notes.append((int(warp), trace.Wait(self._barrier(home, barrier), barrier.phase)))
            return notes

        return look

    def _cta_barrier(self, step: Step) -> _Look | None:
        parts = step.parts
        if parts[1] == "warp":
            return None
        if parts[1] == "cluster":
            if "arrive" not in parts:
                return self._same(trace.ClusterWait())
            relaxed = "relaxed" in parts
            return lambda lanes: [
                (int(warp), trace.ClusterArrive(int(lanes.warps[warp]), relaxed))
                for warp in np.flatnonzero(lanes.warps)
            ]
        at = 1 if "red" in parts else 0
        identifier = self._operands.read(step.operands[at], "u32")
        counted = len(step.operands) > (3 if "red" in parts else 1)
        count = self._operands.read(step.operands[at + 1], "u32") if counted else None
        waits = "arrive" not in parts

        def look(lanes: Lanes) -> _Notes:
            expected = 0 if count is None else int(count(lanes)[0])
            name = int(identifier(lanes)[0])
            return [(int(warp), trace.Named(name, expected, WARP, waits)) for warp in np.flatnonzero(lanes.warps)]

        return look

    # Products --------------------------------------------------------------------------------------------------

    def _product(self, step: Step) -> _Look | None:
        what = step.parts[1]
        if what == "fence":
            return None
        if what == "commit_group":
            return self._same(trace.ProductCommit())
        if what == "wait_group":
            return self._same(trace.ProductWait(number(step.operands[0])))
        shape = shape_of(step)
        bytes_ = 2 * 16 * (shape.columns + (0 if shape.from_registers else 64))
        return self._same(trace.Product(shape.columns, bytes_))

    def _warp_product(self, step: Step) -> _Look:
        shape = next(part for part in step.parts if re.fullmatch(r"m\d+n\d+k\d+", part))
        size = math.prod(map(int, re.findall(r"\d+", shape)))
        if "s8" in step.parts:
            size //= 2  # rates are those of 16-bit floats
        return lambda lanes: [(warp, trace.WarpProduct(size, self._load(key))) for warp, key in self._keys(lanes)]


def _sectors(places: Array, width: int) -> Array:
    """The sectors that accesses of so many bytes at these addresses touch, in order."""
    ends = np.append(np.arange(0, width, trace.SECTOR), width - 1)
    return np.unique((places[:, None].astype(np.int64) + ends) // trace.SECTOR)


def _rows(sectors: Array) -> trace.Sectors:
    """Sectors in order, as those in a row."""
    breaks = np.flatnonzero(np.diff(sectors) != 1) + 1
    return tuple((int(row[0]), int(row[-1]) + 1) for row in np.split(sectors, breaks) if len(row))


def _prefetch(sectors: Array) -> trace.Prefetch:
    return trace.Prefetch(len(sectors) * trace.SECTOR, _rows(sectors))


def _stores(event: Event) -> bool:
    """Whether an event writes to shared memory."""
    return isinstance(event, trace.Shared) and event.load < 0
