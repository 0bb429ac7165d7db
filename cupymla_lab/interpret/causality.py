"""Who knows of whom: the causality order of a cluster's threads, kept in vector clocks.

Time is the machine's count of executed instructions. For every thread stands there up to which moment it sees what
each other thread did (`SEEN`), as far as a proxy fence made it known to asynchronous operations (`FENCED`), up to which
moment it knows that what the other did is over (`PAST`), and how far the other must have come for it to be where it is
(`BEFORE`: nothing about memory, whatever scopes and orders say). An arrival hands a thread's knowledge to the barrier
(release), a successful wait takes it from there (acquire), if the scopes of both contain both threads. What copies
write is known to nobody before their completion is: the copies of cp.async have a column per thread that started them,
those that an mbarrier counts one per mbarrier.

To the letter of the ISA an arrival whose scope is the CTA tells other CTAs of the cluster nothing. In practice it tells
them that the accesses before it are over, though it publishes no writes: CUTLASS frees buffers like that which another
CTA fills (ClusterBarrier, PipelineUmmaConsumerAsync), and what st.async brings is there for ordinary waits.

Source: PTX ISA 9.0, "Memory Consistency Model": "Causality Order", "Synchronizes", "Morally strong operations",
"Proxy-preserved base causality order". Vector clocks: Mattern 1989; epochs of accesses: Flanagan and Freund,
"FastTrack", 2009.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .traps import Trap
from .types import Array

if TYPE_CHECKING:
    from .machine import Machine
    from .threads import Lanes

SEEN, FENCED, PAST, BEFORE = 0, 1, 2, 3
_PLANES = 4
ANYONE = -1
_WARP = 32
_ROOM = 192
_BLOCK = 128
_ALWAYS = np.iinfo(np.int32).max


def newer(old: Array | None, new: Array) -> Array:
    """The knowledge of two, `[planes, columns]` each; one may have fewer columns."""
    if old is None:
        return new
    if old.shape[1] < new.shape[1]:
        old, new = new, old
    out: Array = old.copy()
    np.maximum(out[:, : new.shape[1]], new, out=out[:, : new.shape[1]])
    return out


Gift: TypeAlias = "dict[int, Array]"
"""What one cluster's thread hands to others: by cluster, the knowledge `[planes, threads]` of its threads."""


def richer(old: Gift | None, new: Gift) -> Gift:
    """The knowledge of two gifts."""
    out = dict(old or {})
    for cluster, knowledge in new.items():
        out[cluster] = newer(out.get(cluster), knowledge)
    return out


class Releases:
    """What arrivals handed to a barrier, by the CTA that they came from and whether their scope was the cluster."""

    __slots__ = ("_done", "_pending")

    def __init__(self) -> None:
        self._pending: dict[tuple[int, bool], Array] = {}
        self._done: dict[tuple[int, bool], Array] = {}

    def add(self, rank: int, cluster: bool, knowledge: Array) -> None:
        """An arrival of a thread of a CTA (ANYONE: what every wait takes, whatever its scope)."""
        key = rank, cluster
        self._pending[key] = newer(self._pending.get(key), knowledge)

    def complete(self) -> None:
        """The phase is complete: whoever waits gets to know of its arrivals, and of those before."""
        for key, knowledge in self._pending.items():
            self._done[key] = newer(self._done.get(key), knowledge)
        self._pending.clear()

    def to(self, rank: int, cluster: bool, practice: bool) -> Array | None:
        """What a wait in a CTA takes; of arrivals out of scope what came before and, in practice, is over."""
        found: Array | None = None
        for (from_, wide), knowledge in self._done.items():
            if from_ in (ANYONE, rank) or (wide and cluster):
                found = newer(found, knowledge)
            else:
                rest = np.zeros_like(knowledge)
                rest[BEFORE] = knowledge[BEFORE]
                if practice:
                    rest[PAST] = knowledge[PAST]
                found = newer(found, rest)
        return found


class Waits:
    """When threads last found a phase of an mbarrier complete, and how far they had come for the next one to complete.

    A wait by parity knows phases apart only from their neighbours. A thread that came to it late, when the next phase
    is complete as well, would wait for one that may never come. So the next phase must not end before every wait has.
    """

    __slots__ = ("_causality", "_known", "_waited")

    def __init__(self, causality: Causality) -> None:
        self._causality = causality
        self._waited = np.zeros(causality.threads, np.int32)
        self._known = np.zeros(causality.threads, np.int32)

    def add(self, rows: Any) -> None:
        """Threads have found a phase complete."""
        self._waited[rows] = self._causality.now

    def know(self, before: Array) -> None:
        """An arrival by threads before which each thread must have come so far."""
        np.maximum(self._known, before, out=self._known)

    def require_over(self) -> None:
        """A phase is complete. Raise Trap unless the waits for the one before must have been over."""
        late = self._waited > self._known
        if late.any():
            number = int(np.argmax(late))
            who = f"{self._causality.thread(number)} at {self._causality.line(int(self._waited[number]))}"
            raise Trap(
                f"race: the wait for an mbarrier of {who} is not ordered before the end of the next phase: had it come "
                "later, it would have missed its own"
            )


class Causality:
    """The knowledge of a cluster's threads.

    Attributes:
        cluster: its number.
        padded: thread numbers per CTA, whole warps.
        threads: thread numbers of the cluster.
        warps: of the cluster.
        practice: whether what the letter of the ISA leaves open is taken as hardware does it.
    """

    def __init__(self, machine: Machine, cluster: int, threads: int, ctas: int, practice: bool) -> None:
        self._machine = machine
        self.cluster = cluster
        self._foreign: dict[int, tuple[int, int]] = {}
        self.practice = practice
        self.padded = -(-threads // _WARP) * _WARP
        self.threads = self.padded * ctas
        self.warps = self.threads // _WARP
        self._columns = self.threads
        self._known = np.zeros((_PLANES, self.threads, self._columns + _ROOM * ctas), np.int32)
        self._of_copies = np.full(self.threads, -1, np.int64)
        self._fences: dict[int, Array] = {}
        self._wide_fences: dict[int, Array] = {}
        self._init_fences: dict[int, int] = {}
        self._started = np.zeros((ctas, self.threads), np.bool_)

    @property
    def now(self) -> int:
        """The present moment."""
        return self._machine.count

    def column(self, count: int = 1) -> int:
        """A new column, for what an mbarrier counts; or several."""
        missing = self._columns + count - self._known.shape[2]
        if missing > 0:
            self._known = np.pad(self._known, ((0, 0), (0, 0), (0, missing + self._columns)))
        self._columns += count
        return self._columns - count

    def by_copies(self, numbers: Array) -> Array:
        """The columns of the copies that threads started with cp.async."""
        new = numbers[self._of_copies[numbers] < 0]
        if len(new):
            self._of_copies[new] = self.column(len(new)) + np.arange(len(new))
        found: Array = self._of_copies[numbers]
        return found

    def end(self) -> None:
        """The cluster has ended: forget what its threads knew."""
        self._known = np.zeros((_PLANES, 0, 0), np.int32)
        self._fences.clear()
        self._wide_fences.clear()

    # Edges -----------------------------------------------------------------------------------------------------

    def release(self, rows: Any, alone: bool = False) -> Array:
        """What some threads together know now, `[planes, columns]`, their own doings among it.

        Args:
            rows: their numbers, or a slice of them.
            alone: only what their last fences made known, as relaxed operations hand it on.
        """
        knowledge: Array = self._known[:, rows, : self._columns].max(axis=1)
        for plane in (SEEN, PAST, BEFORE):
            knowledge[plane, rows] = self.now
        if alone:
            before = knowledge[BEFORE]
            knowledge = self._behind_fences(rows)
            knowledge[BEFORE] = before
        return knowledge

    def _behind_fences(self, rows: Any) -> Array:
        out = np.zeros((_PLANES, self._columns), np.int32)
        for number in np.arange(self.threads)[rows]:
            found = self._fences.get(int(number))
            if found is not None:
                out = newer(out, found)
        return out

    def acquire(self, rows: Any, knowledge: Array | None) -> None:
        """Some threads get to know of it."""
        if knowledge is None:
            return
        # Large clusters' threads know of few others: blocks of columns that hold nothing are left out.
        used = np.add.reduceat(knowledge.any(axis=0), np.arange(0, knowledge.shape[1], _BLOCK)) > 0
        edges = np.flatnonzero(np.diff(used, prepend=False, append=False))
        for first, last in zip(edges[::2] * _BLOCK, edges[1::2] * _BLOCK, strict=True):
            mine = self._known[:, rows, first : min(last, knowledge.shape[1])]
            self._known[:, rows, first : min(last, knowledge.shape[1])] = np.maximum(
                mine, knowledge[:, None, first:last]
            )

    def join(self, rows: Any) -> None:
        """Threads that wait for one another and are all here."""
        self.acquire(rows, self.release(rows))

    def join_warps(self, lanes: Lanes) -> None:
        """The same for each warp by itself."""
        numbers = lanes.numbers
        for warp in np.unique(numbers // _WARP):
            first, last = np.searchsorted(numbers, [warp * _WARP, (warp + 1) * _WARP])
            low, high = int(numbers[first]), int(numbers[last - 1]) + 1
            self.join(slice(low, high) if high - low == last - first else numbers[first:last])

    def fence(self, rows: Any, everywhere: bool) -> None:
        """A fence between ordinary accesses: later relaxed operations of these threads release what came before it.

        Args:
            rows: their numbers, or a slice of them.
            everywhere: whether its scope is the whole GPU.
        """
        for number in np.arange(self.threads)[rows]:
            known = self.release(slice(int(number), int(number) + 1))
            self._fences[int(number)] = known
            if everywhere:
                self._wide_fences[int(number)] = known

    def fence_init(self, rows: Any) -> None:
        """fence.mbarrier_init: copies know of the mbarriers that these threads have initialised."""
        for number in np.arange(self.threads)[rows]:
            self._init_fences[int(number)] = self.now

    def fence_proxy(self, rows: Any) -> None:
        """A proxy fence: what these threads know of is known to asynchronous operations behind it as well."""
        known = self._known
        known[FENCED, rows] = np.maximum(known[FENCED, rows], known[SEEN, rows])
        numbers = np.arange(self.threads)[rows]
        known[FENCED, numbers, numbers] = self.now

    def copied(self, numbers: Array, stamps: Array) -> None:
        """Threads have waited for what they copied with cp.async up to a moment each."""
        columns = self.by_copies(numbers)
        for plane in (SEEN, PAST):
            self._known[plane, numbers, columns] = np.maximum(self._known[plane, numbers, columns], stamps)

    def copies(self, numbers: Array, stamps: Array, before: Array) -> Array:
        """What an arrival of copies by cp.async makes known: the copies, and what came before they were started."""
        columns = self.by_copies(numbers)
        out = np.zeros((_PLANES, self._columns), np.int32)
        np.maximum.at(out[SEEN], columns, stamps.astype(np.int32))
        out[PAST] = out[SEEN]
        out[BEFORE, : len(before)] = before
        return out

    def landed(self, column: int, stamp: int, before: Array) -> Array:
        """What the end of a phase with copies makes known: the copies, and what came before they were started."""
        out = np.zeros((_PLANES, column + 1), np.int32)
        out[SEEN, column] = out[PAST, column] = stamp
        out[BEFORE, : len(before)] = before
        return out

    # Other clusters --------------------------------------------------------------------------------------------

    def gift(self, number: int, behind_fence: bool) -> Gift:
        """What a thread hands to threads of any cluster: all that it knows, or what it knew at its last fence."""
        known = self.release(slice(number, number + 1))
        if behind_fence:
            known = self._wide_fences.get(number, np.zeros_like(known))
        out = {self.cluster: known[:, : self.threads]}
        for cluster, (first, count) in self._foreign.items():
            if first + count <= known.shape[1]:
                out[cluster] = known[:, first : first + count]
        return out

    def receive(self, number: int, gift: Gift) -> None:
        """A thread gets to know what threads of any cluster handed on."""
        for cluster, knowledge in gift.items():
            first, count = (0, self.threads) if cluster == self.cluster else self._block(cluster, knowledge.shape[1])
            mine = self._known[:, number, first : first + count]
            np.maximum(mine, knowledge, out=mine)

    def _block(self, cluster: int, count: int) -> tuple[int, int]:
        """The columns of another cluster's threads: the first, and how many."""
        if cluster not in self._foreign:
            self._foreign[cluster] = self.column(count), count
        return self._foreign[cluster]

    def known_of(self, plane: int, numbers: Array, cluster: int, columns: Array) -> Array:
        """Up to which moment threads know of columns of some cluster."""
        if cluster == self.cluster:
            return self.known(plane, numbers, columns)
        if cluster not in self._foreign:
            return np.zeros(len(numbers), np.int32)
        found: Array = self._known[plane, numbers, columns + self._foreign[cluster][0]]
        return found

    # Questions -------------------------------------------------------------------------------------------------

    def known(self, plane: int, numbers: Array, columns: Array) -> Array:
        """Up to which moment threads `[n, ...]` know of columns of the same shape; of themselves they always do."""
        found: Array = self._known[plane, numbers, columns]
        if plane != FENCED:
            found = np.where(columns == numbers, _ALWAYS, found)
        return found

    def of_warp(self, numbers: Array, warp: int) -> Array:
        """Up to which moment threads know that the doings of each thread of a warp are over, `[n, 32]`."""
        first = warp * _WARP
        found: Array = self._known[PAST, numbers, first : first + _WARP].copy()
        mine = np.flatnonzero(numbers // _WARP == warp)
        found[mine, numbers[mine] - first] = _ALWAYS
        return found

    def fenced_of_warp(self, numbers: Array, warp: int) -> Array:
        """Up to which moment a proxy fence lies between the doings of each thread of a warp and threads, `[n, 32]`."""
        first = warp * _WARP
        found: Array = self._known[FENCED, numbers, first : first + _WARP]
        return found

    def init_fence(self, number: int) -> int:
        """When a thread last executed fence.mbarrier_init; 0 when it has not."""
        return self._init_fences.get(number, 0)

    def before(self, rows: Any) -> Array:
        """How far each thread must have come for some of these to be where they are, themselves till now."""
        out: Array = self._known[BEFORE, rows, : self.threads].max(axis=0)
        out[rows] = self.now
        return out

    def require_started(self, numbers: Array, rank: int, cta: int) -> None:
        """Raise Trap unless threads know of anything that a thread of the CTA of that rank did, so that it runs."""
        unsure = numbers[~self._started[rank, numbers]]
        if not len(unsure):
            return
        columns = slice(rank * self.padded, (rank + 1) * self.padded)
        known = self._known[BEFORE, unsure, columns].any(axis=1)
        if not known.all():
            who = self.thread(int(unsure[np.argmin(known)]))
            raise Trap(f"{who} uses shared memory of CTA {cta}, which need not have started: nothing says that it has")
        self._started[rank, unsure] = True

    def past_for(self, rows: Any) -> Array:
        """Up to which moment some of these threads know that each thread's doings are over."""
        past: Array = self._known[PAST, rows, : self.threads].max(axis=0)
        return past

    # Words -----------------------------------------------------------------------------------------------------

    def thread(self, number: int) -> str:
        """A thread in words."""
        if self.threads == self.padded:
            return f"thread {number}"
        return f"thread {number % self.padded} of the CTA with rank {number // self.padded}"

    def doer(self, column: int) -> str:
        """Whose doings a column stands for."""
        if column < self.threads:
            return self.thread(column)
        started = np.flatnonzero(self._of_copies == column)
        if len(started):
            return f"a cp.async of {self.thread(int(started[0]))}"
        return "a copy that an mbarrier counts"

    def is_moment(self, column: int) -> bool:
        """Whether the stamps of a column are moments, not the phases of an mbarrier."""
        return column < self.threads or bool((self._of_copies == column).any())

    def line(self, stamp: int) -> str:
        """Where in the PTX a moment was, and in the CUDA sources as far as is known."""
        if stamp >= len(self._machine.lines):
            return "some time"
        line = self._machine.lines[stamp]
        location = next((step.location for step in self._machine.program.steps if step.line == line), "")
        return f"PTX line {line}" + (f" ({location})" if location else "")


def require_fenced_init(causality: Causality, numbers: Array, maker: tuple[int, int]) -> None:
    """Raise Trap unless a copy that threads start may tell an mbarrier that a thread initialised at a moment."""
    by, stamp = maker
    column = np.full(len(numbers), by)
    fence = causality.init_fence(by)
    if fence >= stamp and (causality.known(SEEN, numbers, column) >= fence).all():
        return
    if (causality.known(FENCED, numbers, column) < stamp).any():
        at = f"{causality.thread(by)} at {causality.line(stamp)}"
        raise Trap(
            f"race: a copy tells an mbarrier that {at} initialised, and no fence.mbarrier_init lies between the two"
        )


def require_known(causality: Causality, numbers: Array, maker: tuple[int, int], what: str) -> None:
    """Raise Trap unless threads know of what a thread did at a moment."""
    by, stamp = maker
    known = causality.known(SEEN, numbers, np.full(len(numbers), by))
    if (known < stamp).any():
        who = causality.thread(int(numbers[np.argmax(known < stamp)]))
        raise Trap(
            f"race: {who} uses {what} of {causality.thread(by)} at {causality.line(stamp)}, and nothing orders the two"
        )
