"""Which accesses to shared memory came last, so that two of them that nothing orders are found in any schedule.

For every unit (4 bytes, or fewer where the kernel stores less at a time) stands there who wrote it when, and when each
warp of the cluster last read it since. An access is a trap unless its thread knows of those before it that it would
collide with (`causality.py`). What matrix products and copies read counts from the moment that somebody waited for
their end.
"""

from __future__ import annotations

import numpy as np

from .causality import FENCED, PAST, SEEN, Causality
from .traps import Trap
from .types import Array

_WARP = 32
ALL_LANES, ANY_LANE = 32, 33
"""In the place of a lane's number: a read by several lanes, or by a warp as one."""


class Reads:
    """The last reads by a warp: when (0: none since the last write), by which lane, whether in the generic proxy."""

    __slots__ = ("lane", "ordinary", "stamp")

    def __init__(self, units: int) -> None:
        self.stamp = np.zeros(units, np.int32)
        self.lane = np.zeros(units, np.uint8)
        self.ordinary = np.zeros(units, np.bool_)


def _by_lane(known: Array) -> Array:
    """Up to when each of a warp's lanes `[n, 32]` is known, then all of them, then any."""
    return np.concatenate([known, known.min(1, keepdims=True), known.max(1, keepdims=True)], 1)


def require_apart(address: Array, data: Array) -> None:
    """Raise Trap where threads that store together leave different `data` in one place: which one stays is anyone's."""
    together = np.sort(address)
    if (together[1:] != together[:-1]).all():
        return
    _, first, place = np.unique(address, return_index=True, return_inverse=True)
    raw = np.ascontiguousarray(data).view(np.uint8)
    wrong = (raw != raw[first][place.reshape(-1)]).any(axis=1)
    if wrong.any():
        raise Trap(f"race: threads store different values at {int(address[np.argmax(wrong)]):#x}, with one instruction")


class Shadow:
    """The last accesses to shared memory of one CTA.

    Attributes:
        causality: what decides which of them are ordered.
        unit: bytes that are looked at together.
    """

    def __init__(self, causality: Causality, size: int, unit: int) -> None:
        self.causality = causality
        self.unit = unit
        units = size // unit + 16
        self._writer = np.full(units, -1, np.int32)
        self._written = np.zeros(units, np.int32)
        self._ordinary = np.zeros(units, np.bool_)
        self._atomic = np.zeros(units, np.bool_)
        self._any_read = np.zeros(units, np.bool_)
        self._reads: dict[int, Reads] = {}

    def units(self, offset: Array, bytes_: int) -> Array:
        """The units of accesses of `bytes_` bytes at offsets, `[n, units]`."""
        return (offset // self.unit)[:, None] + np.arange(max(1, bytes_ // self.unit))

    # Reads -----------------------------------------------------------------------------------------------------

    def read(self, units: Array, numbers: Array, together: bool = False) -> None:
        """Threads read their units `[n, k]` and have what they read. Raises Trap for a race.

        Args:
            units: of each thread.
            numbers: the threads.
            together: whether each warp reads as one, so that any of its lanes stands for the others.
        """
        self.require_written(units, numbers)
        self.note_reads(units, numbers, together)

    def require_written(self, units: Array, numbers: Array) -> None:
        """Raise Trap unless threads `[n]` know of the last writes to their units `[n, k]`."""
        by, stamp = self._writer[units], self._written[units]
        known = self.causality.known(SEEN, numbers[:, None], np.maximum(by, 0))
        self._refuse((by >= 0) & (known < stamp), units, numbers, "reads")

    def require_written_for_all(self, units: Array, numbers: Array) -> None:
        """The same where all threads read all units `[k]`, by an asynchronous operation that they issue together."""
        pairs = self._writer[units].astype(np.int64) << 32 | self._written[units].astype(np.int64)
        _, first = np.unique(pairs, return_index=True)
        some = np.broadcast_to(units[first], (len(numbers), len(first)))
        self.require_written(some, numbers)
        ordinary = units[self._ordinary[units]]
        if len(ordinary):
            pairs = self._writer[ordinary].astype(np.int64) << 32 | self._written[ordinary].astype(np.int64)
            _, first = np.unique(pairs, return_index=True)
            self._require_fenced(np.broadcast_to(ordinary[first], (len(numbers), len(first))), numbers, "reads")

    def require_fenced_writes(self, units: Array, numbers: Array) -> None:
        """Raise Trap where threads `[n]` write units `[n, k]` asynchronously without a fence behind ordinary code.

        That concerns what ordinary code wrote, and to the letter what it read.
        """
        self._require_fenced(units, numbers, "writes")
        row, column = np.nonzero(self._any_read[units])
        if self.causality.practice or not len(row):
            return
        units = units[row, column]
        for warp, reads in self._reads.items():
            stamp = np.where(reads.ordinary[units], reads.stamp[units], 0)
            if stamp.any():
                late = _by_lane(self.causality.fenced_of_warp(numbers, warp))[row, reads.lane[units]] < stamp
                if late.any():
                    k = int(np.argmax(late))
                    missing = "no fence.proxy.async lies between the two"
                    self._refuse_write(int(units[k]), int(numbers[row[k]]), warp, "asynchronously writes", missing)

    def _require_fenced(self, units: Array, numbers: Array, does: str) -> None:
        by, stamp = self._writer[units], self._written[units]
        known = self.causality.known(FENCED, numbers[:, None], np.maximum(by, 0))
        wrong = (by >= 0) & self._ordinary[units] & (known < stamp)
        self._refuse(wrong, units, numbers, f"asynchronously {does}", "no fence.proxy.async lies")

    def note_reads(self, units: Array, numbers: Array, together: bool = False, ordinary: bool = True) -> None:
        """Threads have read their units `[n, k]`; `ordinary`: in the generic proxy."""
        self._any_read[units] = True
        warp = numbers // _WARP
        for one in np.unique(warp):
            which = slice(None) if warp[0] == warp[-1] else warp == one
            reads, mine = self._of_warp(int(one)), units[which]
            reads.stamp[mine] = self.causality.now
            reads.ordinary[mine] = ordinary
            if together:
                reads.lane[mine] = ANY_LANE
                continue
            lane = np.broadcast_to((numbers[which] % _WARP).astype(np.uint8)[:, None], mine.shape)
            reads.lane[mine] = lane
            several = reads.lane[mine] != lane
            if several.any():
                reads.lane[mine[several]] = ALL_LANES

    def note_reads_by_warps(self, units: Array, warps: Array) -> None:
        """Warps have read units `[k]` as one, by matrix products."""
        self._any_read[units] = True
        for warp in warps:
            reads = self._of_warp(int(warp))
            reads.stamp[units] = self.causality.now
            reads.ordinary[units] = False
            reads.lane[units] = ANY_LANE

    def _of_warp(self, warp: int) -> Reads:
        found = self._reads.get(warp)
        if found is None:
            found = self._reads[warp] = Reads(len(self._any_read))
        return found

    # Writes ----------------------------------------------------------------------------------------------------

    def write(self, units: Array, numbers: Array, atomic: bool = False) -> None:
        """Threads write their units `[n, k]` in the ordinary way. Raises Trap for a race."""
        self.require_free(units, numbers, atomic)
        self.note_writes(units, np.broadcast_to(numbers[:, None], units.shape), self.causality.now, True)
        self._atomic[units] = atomic

    def require_free(self, units: Array, numbers: Array, atomic: bool = False) -> None:
        """Raise Trap unless threads `[n]` know that all earlier reads and writes are over of their units `[n, k]`."""
        by, stamp = self._writer[units], self._written[units]
        known = self.causality.known(PAST, numbers[:, None], np.maximum(by, 0))
        late = (by >= 0) & (known < stamp)
        # Atomic operations on one place do not race with one another.
        self._refuse(late & ~self._atomic[units] if atomic else late, units, numbers, "writes")
        row, column = np.nonzero(self._any_read[units])
        if not len(row):
            return
        units = units[row, column]
        for warp, reads in self._reads.items():
            stamp = reads.stamp[units]
            if not stamp.any():
                continue
            late = _by_lane(self.causality.of_warp(numbers, warp))[row, reads.lane[units]] < stamp
            if late.any():
                k = int(np.argmax(late))
                self._refuse_write(int(units[k]), int(numbers[row[k]]), warp)

    def note_writes(self, units: Array, by: Array | int, stamp: Array | int, ordinary: bool) -> None:
        """Somebody has written units, at a moment of its own column; `ordinary`: in the generic proxy."""
        self._writer[units] = by
        self._written[units] = stamp
        self._ordinary[units] = ordinary
        self._atomic[units] = False
        read = units[self._any_read[units]]
        if len(read):
            for reads in self._reads.values():
                reads.stamp[read] = 0
            self._any_read[read] = False

    # Words -----------------------------------------------------------------------------------------------------

    def _refuse(
        self, wrong: Array, units: Array, numbers: Array, does: str, missing: str = "nothing orders the two"
    ) -> None:
        if not wrong.any():
            return
        k = int(np.argmax(wrong.reshape(-1)))
        unit = units.reshape(-1)[k]
        by, stamp = int(self._writer[unit]), int(self._written[unit])
        causality = self.causality
        when = f" at {causality.line(stamp)}" if causality.is_moment(by) else ""
        who = causality.thread(int(numbers[k // units.shape[1]]))
        end = missing if missing.startswith("nothing") else f"{missing} between the two"
        what = f"shared memory, offset {int(unit) * self.unit}, that {causality.doer(by)} wrote{when}"
        raise Trap(f"race: {who} {does} {what}, and {end}")

    def _refuse_write(
        self, unit: int, number: int, warp: int, does: str = "writes", missing: str = "nothing orders the two"
    ) -> None:
        causality, reads = self.causality, self._reads[warp]
        code = int(reads.lane[unit])
        first = causality.thread(warp * _WARP + (code if code < _WARP else 0))
        reader = first if code < _WARP else f"the warp of {first}"
        when = causality.line(int(reads.stamp[unit]))
        what = f"shared memory, offset {int(unit) * self.unit}, that {reader} read or was still reading at {when}"
        raise Trap(f"race: {causality.thread(number)} {does} {what}, and {missing}")
