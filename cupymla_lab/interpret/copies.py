"""Copies that threads start and that finish later: cp.async with its groups, and bulk copies to global memory.

Source: PTX ISA 9.0, "Data Movement and Conversion Instructions: Asynchronous copy".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .memory import SHARED_START
from .shadow import require_apart
from .traps import Trap
from .types import Array, unsigned

if TYPE_CHECKING:
    from .barriers import MBarrier
    from .threads import Group, Lanes

# How often a copy is finished at once, so that a buffer that is filled too early shows as well as one read too early.
_AT_ONCE = 0.25


class Started:
    """Copies that one instruction started, one for each of some threads.

    Attributes:
        thread: numbers of the threads in their group.
        batch: how many groups of copies each thread had committed before.
        stamp: when.
    """

    __slots__ = ("_bytes", "_destination", "_size", "_source", "_words", "batch", "stamp", "thread")

    def __init__(
        self,
        thread: Array,
        batch: Array,
        destination: Array,
        source: Array,
        size: Array,
        bytes_: int,
        words: Array,
        stamp: int,
    ) -> None:
        self.thread = thread
        self.batch = batch
        self._destination = destination
        self._source = source
        self._size = size
        self._bytes = bytes_
        self._words = words
        self.stamp = stamp

    def part(self, which: Array) -> Started:
        """Some of the copies."""
        return Started(
            self.thread[which],
            self.batch[which],
            self._destination[which],
            self._source[which],
            self._size[which],
            self._bytes,
            self._words[which],
            self.stamp,
        )

    def finish(self, group: Group) -> None:
        """Copy; what lies beyond the source's size becomes zero."""
        shared, memory = group.cta.shared, group.machine.memory
        shared.end_landing(self._words.reshape(-1))
        word = unsigned(min(self._bytes, 8))
        data = np.zeros((len(self.thread), self._bytes // word.itemsize), word)
        whole = self._size == self._bytes
        data[whole] = memory.load(self._source[whole], word, data.shape[1])
        raw = data.view(np.uint8)
        for k in np.flatnonzero(~whole & (self._size > 0)):
            bytes_ = int(self._size[k])
            start = self._source[k] + np.arange(bytes_)
            raw[k, :bytes_] = memory.load(start, unsigned(1), 1)[:, 0]
        shared.store(self._destination, data)
        if shared.shadow is not None and group.causality is not None:
            units = shared.shadow.units(self._destination, self._bytes)
            by = group.causality.by_copies(group.base + self.thread)
            shared.shadow.note_writes(units, by[:, None], self.stamp, True)


class ThreadCopies:
    """The copies of a group's threads."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._started: list[Started] = []
        self._committed = np.zeros(group.size, np.int64)
        self._commits = np.zeros((group.size, 8), np.int64)
        self._bulk: list[tuple[Array, Array, Callable[[], None]]] = []
        self._bulk_committed = np.zeros(group.size, np.int64)

    def start(self, lanes: Lanes, destination: Array, source: Array, size: Array, bytes_: int) -> None:
        """cp.async: each thread copies `size` of `bytes_` bytes from a global to a shared address."""
        lanes.require_grid_ahead()
        if (source & (bytes_ - 1)).any():
            raise Trap(f"misaligned source of a copy of {bytes_} bytes")
        if (size > bytes_).any():
            raise Trap(f"cp.async with a source of more than {bytes_} bytes")
        offset = destination - SHARED_START
        shared, stamp = self._group.cta.shared, self._group.machine.count
        words = shared.start_landing(offset, bytes_).reshape(lanes.count, -1)
        if shared.shadow is not None:
            shared.shadow.require_free(shared.shadow.units(offset, bytes_), lanes.numbers)
            require_apart(offset, np.stack([np.where(size > 0, source, 0), size.astype(np.int64)], 1))
        grid = self._group.machine.grid_shadow
        if grid is not None:
            reads = np.flatnonzero(size > 0)
            grid.read(lanes, source[reads], bytes_, lanes.numbers[reads], "plain")
        made = Started(lanes.index, self._committed[lanes.index], offset, source, size, bytes_, words, stamp)
        if self._group.machine.rng.random() < _AT_ONCE:
            made.finish(self._group)
        else:
            self._started.append(made)

    def commit(self, lanes: Lanes) -> None:
        """Close each thread's present group."""
        if self._group.causality is not None:
            number = self._committed[lanes.index]
            if int(number.max()) >= self._commits.shape[1]:
                self._commits = np.pad(self._commits, ((0, 0), (0, self._commits.shape[1])))
            self._commits[lanes.index, number] = self._group.machine.count
        self._committed[lanes.index] += 1

    def _begun_before(self, lanes: Lanes, limit: Array) -> Array:
        """The moment up to which a wait for groups below a limit covers what threads started."""
        last = np.minimum(limit, self._committed[lanes.index]) - 1
        stamps = np.where(last < 0, 0, self._commits[lanes.index, np.maximum(last, 0)])
        return np.where(limit > self._committed[lanes.index], self._group.machine.count, stamps)

    def _take(self, lanes: Lanes, limit: Array) -> list[Started]:
        """Remove and return the threads' copies of groups below a limit."""
        allowed = np.zeros(self._group.size, np.int64)
        allowed[lanes.index] = limit
        taken, kept = [], []
        for started in self._started:
            which = started.batch < allowed[started.thread]
            if which.all():
                taken.append(started)
            elif not which.any():
                kept.append(started)
            else:
                taken.append(started.part(which))
                kept.append(started.part(~which))
        self._started = kept
        return taken

    def wait(self, lanes: Lanes, pending: int | None) -> None:
        """Finish all but the last `pending` groups of each thread; with None also what is not committed."""
        committed = self._committed[lanes.index]
        limit = committed + 1 if pending is None else committed - pending
        for started in self._take(lanes, limit):
            started.finish(self._group)
        if self._group.causality is not None:
            self._group.causality.copied(lanes.numbers, self._begun_before(lanes, limit))

    def arrive_when_done(self, lanes: Lanes, addresses: Array) -> None:
        """Arrive on an mbarrier for each thread once all its copies so far are finished."""
        taken = self._take(lanes, self._committed[lanes.index] + 1)
        group, numbers, stamp = self._group, lanes.numbers, self._group.machine.count
        barriers = [group.cta.mbarrier(int(address)) for address in addresses]
        told: dict[MBarrier, tuple[Array, Array]] = {}
        if group.causality is not None:
            for barrier in dict.fromkeys(barriers):
                who = numbers[[other is barrier for other in barriers]]
                # The arrivals come later, but not before these threads were here.
                told[barrier] = who, group.causality.before(who)

        def finish() -> None:
            if not group.cta.live:
                raise Trap(f"copies land in shared memory of CTA {group.cta.number}, which has exited")
            for started in taken:
                started.finish(group)
            if group.causality is not None:
                for barrier, (who, before) in told.items():
                    knowledge = group.causality.copies(who, np.full(len(who), stamp), before)
                    barrier.releases.add(group.cta.rank, False, knowledge)
                    if barrier.waits is not None:
                        barrier.waits.know(before)
            for barrier in barriers:
                barrier.arrive()

        group.cta.late.append((group, finish))

    # Bulk copies -----------------------------------------------------------------------------------------------

    def start_bulk(self, thread: int, finish: Callable[[], None]) -> None:
        """A bulk copy of one thread to global memory, finished when the thread waits for it at the latest."""
        self._bulk.append((np.array([thread]), self._bulk_committed[[thread]], finish))

    def commit_bulk(self, lanes: Lanes) -> None:
        """Close each thread's present bulk group."""
        self._bulk_committed[lanes.index] += 1

    def wait_bulk(self, lanes: Lanes, pending: int) -> None:
        """Finish all but the last `pending` bulk groups of each thread."""
        limit = np.zeros(self._group.size, np.int64)
        limit[lanes.index] = self._bulk_committed[lanes.index] - pending
        due = [entry for entry in self._bulk if (entry[1] < limit[entry[0]]).all()]
        self._bulk = [entry for entry in self._bulk if not (entry[1] < limit[entry[0]]).all()]
        for _, _, finish in due:
            finish()

    def finish_all(self) -> None:
        """The threads have exited: finish what nobody waited for. Raises Trap where its memory may be gone already."""
        cta = self._group.cta
        if self._bulk:
            thread = self._group.first + int(self._bulk[0][0][0])
            raise Trap(f"thread {thread} of CTA {cta.number} exits before its bulk copies have read shared memory")
        if self._started and not cta.live:
            raise Trap(f"copies land in shared memory of CTA {cta.number}, which has exited")
        for started in self._started:
            started.finish(self._group)
        self._started = []
