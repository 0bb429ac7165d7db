"""The machine: CTAs of a cluster, their groups of threads, and a scheduler that picks among them at random.

A group runs the front that lies furthest back, so that threads that took different ways meet again. What is
asynchronous on the hardware, copies above all, is finished at random moments. When nothing can go on any more, the
run ends with a Trap that says where everyone waits.
"""

from __future__ import annotations

import array
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from cupymla.tensormap import TileMap

from ..ptx.approximation import Approximation
from ..ptx.races import Races
from .barriers import ClusterBarrier, MBarrier, NamedBarrier
from .causality import Causality
from .grid_shadow import GridShadow
from .instructions import bind
from .memory import RANK_SHIFT, SHARED_START, Bytes, GlobalMemory, SharedMemory
from .outcomes import BLOCK, YIELD
from .program import BRANCH, EXIT, Program, Step
from .registers import RegisterPool
from .shadow import Shadow
from .threads import WARP, Front, Group, Lanes
from .traps import Trap
from .types import Array

_SLICE = 400
_SPIN = 64
_LANDING = 0.3


@dataclass(frozen=True, slots=True)
class Layout:
    """How a launch is laid out.

    Attributes:
        grid: (x, y, z) in CTAs.
        threads: per CTA.
        cluster: CTAs per cluster, along x.
        smem_bytes: dynamic shared memory per CTA.
        group: threads that are simulated together, a multiple of 128 where wgmma is used; 0 for the whole CTA.
        resident: clusters that run at the same time.
        max_steps: after so many executed instructions a run is taken to be endless.
        strict: whether ordinary reads of unwritten shared memory are a trap; if not they read 0xFF bytes.
        dependent: whether threads may not use global memory before they have waited for the grid ahead.
        approximation: where in its error ex2.approx lies.
        races: whether accesses to shared memory that nothing orders are a trap, see `causality.py`.
    """

    grid: tuple[int, int, int]
    threads: int
    cluster: int = 1
    smem_bytes: int = 0
    group: int = 128
    resident: int = 2
    max_steps: int = 50_000_000
    strict: bool = True
    dependent: bool = False
    approximation: Approximation = "exact"
    races: Races = "unchecked"


@dataclass(slots=True)
class Cluster:
    """The CTAs that run at the same time and reach each other's shared memory.

    Attributes:
        barrier: of all their threads.
        padded: thread numbers per CTA, whole warps.
        causality: which of their doings are ordered; None where races are not looked for.
        ctas: by rank.
    """

    barrier: ClusterBarrier
    padded: int
    causality: Causality | None = None
    ctas: list[Cta] = field(default_factory=list)


class Cta:
    """One CTA.

    Attributes:
        machine: what runs it.
        number: in the grid, x first.
        rank: in its cluster.
        shared: its shared memory.
        mbarriers: by their offset in shared memory.
        barriers: named ones.
        registers: what setmaxnreg deals out.
        late: asynchronous work that has been started, each with its owner; one owner's is finished in order.
        live: threads that have not exited.
        visits: when each thread of the cluster last used this CTA's shared memory from another one.
        parting: up to when its threads that have exited knew of each thread of the cluster.
    """

    def __init__(self, machine: Machine, number: int, rank: int, cluster: Cluster) -> None:
        self.machine: Machine = machine
        self.number: int = number
        self.rank: int = rank
        self.cluster: Cluster = cluster
        self.shared = SharedMemory(machine.shared_bytes, machine.layout.strict)
        self.mbarriers: dict[int, MBarrier] = {}
        self.barriers: dict[int, NamedBarrier] = {}
        warps = -(-machine.layout.threads // WARP)
        self.registers = RegisterPool(warps, machine.program.launch_registers)
        self.late: list[tuple[object, Callable[[], None]]] = []
        self.live = machine.layout.threads
        self.visits: Array | None = None
        self.parting: Array = np.zeros(0, np.int32)
        if cluster.causality is not None:
            self.shared.shadow = Shadow(cluster.causality, self.shared.size, machine.program.smallest_store)
            self.visits = np.zeros(cluster.causality.threads, np.int32)
            self.parting = np.zeros(cluster.causality.threads, np.int32)

    def peer(self, address: int) -> tuple[Cta, int]:
        """The CTA that a shared address means, and the offset there. Raises Trap when the cluster has no such CTA."""
        rank = address >> RANK_SHIFT
        offset = (address & ((1 << RANK_SHIFT) - 1)) - SHARED_START
        if rank == 0:
            return self, offset
        if rank > len(self.cluster.ctas):
            raise Trap(f"shared address {address:#x} of no CTA of the cluster")
        return self.cluster.ctas[rank - 1], offset

    def mbarrier(self, address: int) -> MBarrier:
        """The mbarrier at a shared address. Raises Trap where none has been initialised."""
        cta, offset = self.peer(address)
        found = cta.mbarriers.get(offset)
        if found is None:
            raise Trap(f"no mbarrier has been initialised at offset {offset} of shared memory")
        return found

    def land(self, probability: float) -> bool:
        """Finish, perhaps, one piece of asynchronous work."""
        rng = self.machine.rng
        if not self.late or rng.random() >= probability:
            return False
        owner, _ = self.late[rng.randrange(len(self.late))]
        at = next(k for k, (other, _) in enumerate(self.late) if other is owner)
        _, finish = self.late.pop(at)
        finish()
        self.machine.events += 1
        return True


class Watcher(Protocol):
    """Who is told of every instruction, see `cycles.recorder`."""

    def look(self, lanes: Lanes, step: Step) -> None:
        """Threads are about to try an instruction that is no branch."""

    def done(self, everyone: Lanes, step: Step, outcome: int | None) -> None:
        """Threads have executed one, those among them for which its guard holds; or are about to branch."""

    def overlooks(self, lanes: Lanes, step: Step) -> bool:
        """Whether a mbarrier.test_wait is to find nothing, whatever has come; as it might have in another schedule."""

    def landing(
        self, cta: Cta, where: list[Cta], barriers: list[MBarrier], bytes_: int, thread: int, stored: bool
    ) -> None:
        """A thread, by its number in the cluster, starts a bulk copy or a warp's st.async of so many bytes each."""


class Machine:
    """A launch of one kernel.

    Attributes:
        program: the kernel.
        layout: of the launch.
        memory: the buffers that it may use.
        rng: decides whose turn it is.
        leader: which lane of a whole warp elect.sync elects.
        events: counts what one thread does that another may be waiting for.
        count: executed instructions, each counted once for all threads that execute it together.
        lines: the PTX line of each, where races are looked for.
        maps: requests of tensor maps by the address of the parameter that holds them.
        parameters: the bytes of each parameter by its address.
        grid_shadow: the last writes to global memory, where races are looked for.
        ahead: those of the launches that may still run when this one begins.
        lets_in_early: whether a thread has permitted the next launch to begin before it waited for the one ahead.
        watcher: who is told of every instruction; None where nobody wants to know.
    """

    watcher: Watcher | None = None

    def __init__(
        self, program: Program, layout: Layout, parameters: Sequence[bytes], memory: GlobalMemory, seed: int = 0
    ) -> None:
        self.program: Program = program
        self.layout: Layout = layout
        self.memory = memory
        self.rng = random.Random(seed)
        self.leader = random.Random(f"leader {seed}").randrange(WARP)
        self.events = 0
        self.count = 0
        self.lines = array.array("i", [0])
        self.grid_shadow: GridShadow | None = None
        if layout.races != "unchecked":
            self.grid_shadow = GridShadow(memory, program.smallest_store)
        self.ahead: Sequence[GridShadow] = ()
        self.lets_in_early = False
        self.maps: dict[int, TileMap] = {}
        self.shared_bytes = _shared_bytes(program, layout)
        self.parameters: dict[int, Bytes] = {}
        if len(parameters) != len(program.parameters):
            raise Trap(f"{program.name} has {len(program.parameters)} parameters, {len(parameters)} were given")
        for parameter, given in zip(program.parameters, parameters, strict=True):
            if len(given) != parameter.size:
                raise Trap(f"{parameter.name} has {parameter.size} bytes, {len(given)} were given")
            self.parameters[parameter.address] = Bytes(np.frombuffer(given, np.uint8).copy())
        for name, content in program.constants.items():
            memory.add(name, content, False)
        bind(program)
        if program.threads and layout.threads > program.threads:
            raise Trap(f"{layout.threads} threads per CTA where {program.name} allows {program.threads}")

    def run(self, ctas: Sequence[int] | None = None) -> None:
        """Run the grid, or the clusters that some CTAs belong to. Raises Trap."""
        grid = self.layout.grid
        total = grid[0] * grid[1] * grid[2]
        size = self.layout.cluster
        waiting = sorted({cta // size for cta in (range(total) if ctas is None else ctas)})
        self.rng.shuffle(waiting)
        running: list[Group] = []
        with np.errstate(all="ignore"):
            while waiting or running:
                live = {id(group.cta.cluster) for group in running}
                while waiting and len(live) < self.layout.resident:
                    made = self._cluster(waiting.pop() * size)
                    live.add(id(made[0].cta.cluster))
                    running += made
                self._until_one_ends(running)

    def _cluster(self, first: int) -> list[Group]:
        layout = self.layout
        cluster = Cluster(ClusterBarrier(layout.threads * layout.cluster), -(-layout.threads // WARP) * WARP)
        if layout.races != "unchecked":
            cluster.causality = Causality(self, first, layout.threads, layout.cluster, layout.races == "practice")
        cluster.ctas = [Cta(self, first + rank, rank, cluster) for rank in range(layout.cluster)]
        size = layout.group or layout.threads
        starts = range(0, layout.threads, size)
        return [Group(cta, start, min(size, layout.threads - start)) for cta in cluster.ctas for start in starts]

    def _until_one_ends(self, running: list[Group]) -> None:
        quiet = 0
        while True:
            group = self.rng.choice(running)
            before = self.events
            busy = self._turn(group)
            for cta in group.cta.cluster.ctas:
                cta.land(_LANDING)
            if not group.fronts:
                running.remove(group)
                group.copies.finish_all()
                self._finish(group, running)
                return
            quiet = 0 if busy or self.events != before else quiet + 1
            if quiet > 60 * len(running) + 200:
                raise Trap("deadlock: " + ";\n  ".join(map(self._waiting, running)), self.program.name)
            if self.count > self.layout.max_steps:
                where = ";\n  ".join(map(self._waiting, running))
                raise Trap(f"no end after {self.count} instructions: {where}", self.program.name)

    def _finish(self, ended: Group, running: list[Group]) -> None:
        """When a cluster's last group has ended, its asynchronous work is finished too."""
        cluster = ended.cta.cluster
        if any(group.cta.cluster is cluster for group in running):
            return
        for cta in cluster.ctas:
            while cta.late:
                cta.land(1.0)
            # What refers to each other in circles would keep these arrays until Python happens to look for it.
            cta.shared.shadow = None
        if cluster.causality is not None:
            cluster.causality.end()

    def _waiting(self, group: Group) -> str:
        steps = self.program.steps
        at = [(front.lanes.count, steps[front.pc]) for front in group.fronts]
        places = [f"{n} at PTX line {s.line} {s.text[:60]}" + (f" ({s.location})" if s.location else "") for n, s in at]
        return f"CTA {group.cta.number} threads {group.first}+: " + ", ".join(places)

    # One turn --------------------------------------------------------------------------------------------------

    def _turn(self, group: Group) -> bool:
        """Run one front of a group for a while. Returns whether it did more than poll."""
        ready = [front for front in group.fronts if not front.stalled]
        if not ready:
            for front in group.fronts:
                front.stalled = False
            ready = group.fronts
        front = min(ready, key=lambda f: f.pc)
        start = self.count
        self._run(group, front)
        return self.count - start > _SPIN

    def _run(self, group: Group, front: Front) -> None:
        steps, fronts, races = self.program.steps, group.fronts, self.layout.races != "unchecked"
        for _ in range(_SLICE):
            step = steps[front.pc]
            self.count += 1
            if races:
                self.lines.append(step.line)
            try:
                if self._execute(group, front, step):
                    return
            except Trap as trap:
                if trap.line:
                    raise
                raise type(trap)(trap.what, _place(front, self.program), step.line, step.text, step.location) from trap
            if len(fronts) > 1 and self._meet(group, front):
                return

    def _execute(self, group: Group, front: Front, step: Step) -> bool:
        """Execute an instruction. Returns True when the front can go no further in this turn."""
        lanes, everyone, watcher = front.lanes, front.lanes, self.watcher
        if step.kind == BRANCH:
            if watcher is not None:
                watcher.look(everyone, step)
                watcher.done(everyone, step, None)
            self._branch(group, front, step)
            return False
        if step.test is not None:
            holds = step.test(lanes)
            if not holds.all():
                lanes = Lanes(group, front, lanes.index[holds])
        if step.kind == EXIT:
            return self._exit(group, front, lanes)
        if watcher is not None:
            watcher.look(lanes, step)
        outcome = step.run(lanes) if lanes.count else None
        if outcome == BLOCK:
            front.stalled = True
            return True
        if watcher is not None:
            watcher.done(everyone, step, outcome)
        front.pc += 1
        front.stalled = outcome == YIELD
        return front.stalled

    def _branch(self, group: Group, front: Front, step: Step) -> None:
        if step.test is None:
            front.pc = step.target
            return
        taken = step.test(front.lanes)
        if taken.all():
            front.pc = step.target
        elif not taken.any():
            front.pc += 1
        else:
            index = front.lanes.index
            group.fronts.append(Front(group, step.target, index[taken]))
            front.lanes = Lanes(group, front, index[~taken])
            front.pc += 1

    def _exit(self, group: Group, front: Front, lanes: Lanes) -> bool:
        cta = group.cta
        if cta.visits is not None:
            self._leave(cta, lanes)
        group.live_warps = group.live_warps - lanes.warps
        cta.live -= lanes.count
        cta.cluster.barrier.live -= lanes.count
        cta.cluster.barrier.settle()
        self.events += 1
        staying = np.setdiff1d(front.lanes.index, lanes.index, assume_unique=True)
        if not len(staying):
            group.fronts.remove(front)
            return True
        front.lanes = Lanes(group, front, staying)
        front.pc += 1
        return False

    def _leave(self, cta: Cta, lanes: Lanes) -> None:
        """Threads of a CTA exit. Raises Trap when the last ones cannot know that nobody uses its memory any more."""
        causality, visits = cta.cluster.causality, cta.visits
        if causality is None or visits is None:
            return
        cta.parting = np.maximum(cta.parting, causality.past_for(lanes.rows))
        late = visits > cta.parting
        if cta.live == lanes.count and late.any():
            who = int(np.argmax(late))
            when = causality.line(int(visits[who]))
            raise Trap(
                f"CTA {cta.number} exits, and nothing orders that behind the use of its shared memory by "
                f"{causality.thread(who)} at {when}"
            )

    def _meet(self, group: Group, front: Front) -> bool:
        """Join fronts that are at the same instruction. Returns whether another one lies further back."""
        behind = False
        for other in list(group.fronts):
            if other is front:
                continue
            if other.pc == front.pc and other.generation < 0 and front.generation < 0:
                index = np.sort(np.concatenate([front.lanes.index, other.lanes.index]))
                front.lanes = Lanes(group, front, index)
                front.stalled = False
                group.fronts.remove(other)
            elif other.pc < front.pc and not other.stalled:
                behind = True
        return behind


def _shared_bytes(program: Program, layout: Layout) -> int:
    """Static and dynamic shared memory, dynamic variables behind static ones."""
    start = max([program.shared_bytes, *(v.offset for v in program.shared.values() if not v.size)])
    return start + layout.smem_bytes


def _place(front: Front, program: Program) -> str:
    group = front.lanes.group
    threads = group.first + front.lanes.index
    return f"{program.name}, CTA {group.cta.number}, threads {int(threads[0])} to {int(threads[-1])} ({len(threads)})"
