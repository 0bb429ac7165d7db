"""Which writes to global memory came last in a launch, so that reads and writes that nothing orders are found.

For every unit of a buffer that the launch writes stands there who wrote it when. A later read or write by another
thread is a trap unless that thread knows of it (`causality.py`), or both are atomic. Between clusters knowledge passes
through atomic operations with release and acquire, or with fences around relaxed ones (PTX ISA 9.0, "Memory Consistency
Model": "Release and Acquire Patterns"). Not looked at: writes to what another thread may still read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from .causality import FENCED, PAST, SEEN, Causality, Gift, richer
from .traps import Trap
from .types import Array

if TYPE_CHECKING:
    from .memory import Buffer, GlobalMemory
    from .threads import Lanes


_UNORDERED = "nothing orders the two"


class Writes:
    """The last writes to a buffer: by which cluster (-1: by none) and which of its columns, when, whether atomic."""

    __slots__ = ("atomic", "by", "cluster", "stamp")

    def __init__(self, units: int) -> None:
        self.cluster = np.full(units, -1, np.int32)
        self.by = np.zeros(units, np.int32)
        self.stamp = np.zeros(units, np.int32)
        self.atomic = np.zeros(units, np.bool_)


class GridShadow:
    """The last writes of a launch to global memory, and what atomic operations handed on.

    Attributes:
        unit: bytes that are looked at together.
    """

    def __init__(self, memory: GlobalMemory, unit: int) -> None:
        self.unit = unit
        self._memory = memory
        self._writes: dict[int, Writes] = {}
        self._handed: dict[int, Gift] = {}
        self._pending: dict[tuple[int, int], Gift] = {}
        self._clusters: dict[int, Causality] = {}

    def _shares(self, address: Array, bytes_: int, make: bool) -> Iterator[tuple[Buffer, Writes, Array, Array]]:
        """For each buffer of some addresses: its last writes, which they are, and their units `[n, k]`."""
        left = np.ones(len(address), np.bool_)
        for number, buffer in enumerate(self._memory.buffers):
            if not buffer.writable or (number not in self._writes and not make):
                continue
            inside = left & (address >= buffer.base) & (address < buffer.base + buffer.size)
            if not inside.any():
                continue
            left &= ~inside
            writes = self._writes.get(number)
            if writes is None:
                writes = self._writes[number] = Writes(buffer.size // self.unit + 16)
            offset = address[inside] - buffer.base
            yield buffer, writes, inside, (offset // self.unit)[:, None] + np.arange(max(1, bytes_ // self.unit))
            if not left.any():
                return

    def read(self, lanes: Lanes, address: Array, bytes_: int, numbers: Array, how: str) -> None:
        """Threads read global memory: raise Trap unless they know of the last writes there.

        Args:
            lanes: of the threads' cluster.
            address: of each read.
            bytes_: of each.
            numbers: the threads.
            how: "plain", "atomic", "asynchronous" or "read-only".
        """
        causality = lanes.group.causality
        if how == "read-only":
            for ahead in lanes.group.machine.ahead:
                ahead.require_unwritten(address, bytes_)
        if causality is None or not self._writes:
            return
        for buffer, writes, inside, units in self._shares(address, bytes_, False):
            written = writes.cluster[units] >= 0
            if not written.any():
                continue
            if how == "read-only":
                place = int(units.reshape(-1)[np.argmax(written.reshape(-1))]) * self.unit
                raise Trap(f"ld.global.nc of byte {place} of '{buffer.name}', which this launch writes")
            wrong = written & (self._known(causality, writes, units, numbers[inside], SEEN) < writes.stamp[units])
            if how == "atomic":
                wrong &= ~writes.atomic[units]
            self._refuse(causality, buffer, writes, units, numbers[inside], wrong, "reads", _UNORDERED)
            if how == "asynchronous":
                late = self._known(causality, writes, units, numbers[inside], FENCED) < writes.stamp[units]
                # fence.proxy.async.shared::cta, which most kernels have, is for shared memory alone.
                late |= not lanes.group.machine.program.fences_global
                missing = "no fence.proxy.async lies between the two"
                self._refuse(causality, buffer, writes, units, numbers[inside], written & late, "reads", missing)

    def require_unwritten(self, address: Array, bytes_: int) -> None:
        """Raise Trap where this launch has written some of these bytes, and may still run when another one begins."""
        for buffer, writes, _, units in self._shares(address, bytes_, False):
            written = (writes.cluster[units] >= 0).reshape(-1)
            if written.any():
                place = int(units.reshape(-1)[np.argmax(written)]) * self.unit
                raise Trap(
                    f"ld.global.nc of byte {place} of '{buffer.name}', which the launch ahead writes: it may still run "
                    "when this one begins"
                )

    def write(self, lanes: Lanes, address: Array, bytes_: int, numbers: Array, atomic: bool = False) -> None:
        """Threads write global memory: raise Trap unless they know that earlier writes there are over."""
        causality = lanes.group.causality
        if causality is None:
            return
        self._clusters[causality.cluster] = causality
        for buffer, writes, inside, units in self._shares(address, bytes_, True):
            wrong = writes.cluster[units] >= 0
            if wrong.any():
                wrong &= self._known(causality, writes, units, numbers[inside], PAST) < writes.stamp[units]
                if atomic:
                    wrong &= ~writes.atomic[units]
                self._refuse(
                    causality, buffer, writes, units, numbers[inside], wrong, "writes", "nothing orders the two"
                )
            writes.cluster[units] = causality.cluster
            writes.by[units] = numbers[inside][:, None]
            writes.stamp[units] = causality.now
            writes.atomic[units] = atomic

    def _known(self, causality: Causality, writes: Writes, units: Array, numbers: Array, plane: int) -> Array:
        cluster, by = writes.cluster[units], writes.by[units]
        known = np.zeros(units.shape, np.int64)
        rows = np.broadcast_to(numbers[:, None], units.shape)
        for one in np.unique(cluster[cluster >= 0]):
            which = cluster == one
            known[which] = causality.known_of(plane, rows[which], int(one), by[which])
        return known

    def _refuse(
        self,
        causality: Causality,
        buffer: Buffer,
        writes: Writes,
        units: Array,
        numbers: Array,
        wrong: Array,
        does: str,
        missing: str,
    ) -> None:
        if not wrong.any():
            return
        k = int(np.argmax(wrong.reshape(-1)))
        unit = units.reshape(-1)[k]
        cluster = int(writes.cluster[unit])
        other = self._clusters[cluster].thread(int(writes.by[unit]))
        if cluster != causality.cluster:
            other += f" of cluster {cluster}"
        when = causality.line(int(writes.stamp[unit]))
        who = causality.thread(int(numbers[k // units.shape[1]]))
        place = f"byte {int(unit) * self.unit} of '{buffer.name}'"
        raise Trap(f"race: {who} {does} {place} that {other} wrote at {when}, and {missing}")

    # What atomic operations hand on ----------------------------------------------------------------------------

    def take(self, lanes: Lanes, address: int, acquires: bool) -> None:
        """One thread reads what atomic operations write: now, or with its next fence, it knows what they handed on."""
        causality, found = lanes.group.causality, self._handed.get(address)
        if causality is None or found is None:
            return
        number = int(lanes.numbers[0])
        if acquires:
            causality.receive(number, found)
        else:
            key = causality.cluster, number
            self._pending[key] = richer(self._pending.get(key), found)

    def give(self, lanes: Lanes, address: int, releases: bool, adds: bool) -> None:
        """One thread writes what atomic operations read: what it knows now, or knew at its last fence, goes with it.

        Args:
            lanes: the thread.
            address: where.
            releases: whether it hands on what it knows now.
            adds: whether it is read and written at once, so that what others handed on stays with it.
        """
        causality = lanes.group.causality
        if causality is None:
            return
        gift = causality.gift(int(lanes.numbers[0]), not releases)
        old = self._handed.get(address) if adds else None
        self._handed[address] = richer(old, gift)

    def fence(self, lanes: Lanes) -> None:
        """A fence for the whole GPU: what relaxed operations of these threads have read counts from now on."""
        causality = lanes.group.causality
        if causality is None or not self._pending:
            return
        for number in lanes.numbers:
            found = self._pending.pop((causality.cluster, int(number)), None)
            if found is not None:
                causality.receive(int(number), found)
