"""What the threads of a warp do together. Source: PTX ISA 9.0, "shfl.sync", "vote.sync", "redux.sync", "elect.sync"."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...ptx.syntax import Operand
from ..operands import Getter, Operands, pair
from ..outcomes import BLOCK
from ..program import Step
from ..threads import Lanes
from ..traps import Trap, Unknown
from ..types import TYPES, Array
from .kit import Builder, Handler, kind_of


def _mask(operands: Operands, operand: Operand) -> Getter:
    return operands.read(operand, "u32")


def _shuffle(operands: Operands, step: Step) -> Handler:
    if step.parts[1] != "sync":
        raise Unknown("instructions of a warp without .sync")
    first, second = pair(step.operands[0])
    put = operands.write(first, "b32")
    tell = None if second is None else operands.write(second, "pred")
    value = operands.read(step.operands[1], "b32")
    by, limit = operands.read(step.operands[2], "u32"), operands.read(step.operands[3], "u32")
    mask, mode = _mask(operands, step.operands[4]), step.parts[2]

    def run(lanes: Lanes) -> int | None:
        if not lanes.converged(mask(lanes)):
            return BLOCK
        lane = lanes.index & 31
        source, inside = _source(mode, lane, by(lanes).astype(np.int64) & 31, limit(lanes).astype(np.int64))
        from_ = lanes.index - lane + np.where(inside, source, lane)
        everyone = np.zeros(lanes.group.size, np.uint32)
        everyone[lanes.select] = value(lanes)
        here = np.zeros(lanes.group.size, np.bool_)
        here[lanes.select] = True
        if not here[from_].all():
            raise Trap("shfl reads a lane that does not take part")
        put(lanes, everyone[from_])
        if tell is not None:
            tell(lanes, inside)
        return None

    return run


def _source(mode: str, lane: Array, by: Array, limit: Array) -> tuple[Array, Array]:
    """The lane each one reads, and whether that is inside its segment."""
    segment, clamp = limit >> 8 & 31, limit & 31
    low = lane & segment
    high = low | (clamp & ~segment)
    if mode == "up":
        source = lane - by
        return source, source >= high
    if mode == "bfly":
        source = lane ^ by
    elif mode == "idx":
        source = low | (by & ~segment)
    else:
        source = lane + by
    return source, source <= high


def _vote(operands: Operands, step: Step) -> Handler:
    if step.parts[1] != "sync":
        raise Unknown("instructions of a warp without .sync")
    kind, mode = step.parts[-1], step.parts[2]
    holds, put = operands.read(step.operands[1], "pred"), operands.write(step.operands[0], kind)
    mask = _mask(operands, step.operands[2])

    def run(lanes: Lanes) -> int | None:
        if not lanes.converged(mask(lanes)):
            return BLOCK
        yes, warp = holds(lanes), lanes.index >> 5
        if mode == "ballot":
            bits = np.zeros(lanes.group.warps, np.uint32)
            np.bitwise_or.at(bits, warp[yes], np.uint32(1) << (lanes.index[yes] & 31).astype(np.uint32))
            put(lanes, bits[warp])
            return None
        ayes = np.bincount(warp, weights=yes, minlength=lanes.group.warps)
        all_ = ayes == lanes.warps
        result = {"any": ayes > 0, "all": all_, "uni": all_ | (ayes == 0)}[mode]
        put(lanes, result[warp])
        return None

    return run


_REDUCTIONS: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _reduce(operands: Operands, step: Step) -> Handler:
    kind = kind_of(step)
    if kind == "f32":
        raise Unknown("redux.sync of floats")
    value, put = operands.read(step.operands[1], kind), operands.write(step.operands[0], kind)
    function, mask = _REDUCTIONS[step.parts[2]], _mask(operands, step.operands[2])

    def run(lanes: Lanes) -> int | None:
        if not lanes.converged(mask(lanes)):
            return BLOCK
        values, warp = value(lanes), lanes.index >> 5
        starts = np.flatnonzero(np.diff(warp, prepend=-1))
        reduced = function.reduceat(values, starts)  # type: ignore[attr-defined]
        put(lanes, np.repeat(reduced.astype(TYPES[kind]), np.diff(starts, append=lanes.count)))
        return None

    return run


def _elect(operands: Operands, step: Step) -> Handler:
    first, second = pair(step.operands[0])
    put = operands.write(first, "b32")
    chosen = None if second is None else operands.write(second, "pred")
    mask = _mask(operands, step.operands[1])

    def run(lanes: Lanes) -> int | None:
        if not lanes.converged(mask(lanes)):
            return BLOCK
        # Any lane, but always the same one of the same threads (PTX ISA, "elect.sync").
        counts = lanes.warps[lanes.warps > 0]
        chosen_at = np.cumsum(counts) - counts + lanes.group.machine.leader % counts
        leads = np.zeros(lanes.count, np.bool_)
        leads[chosen_at] = True
        put(lanes, np.repeat(lanes.index[chosen_at] & 31, counts).astype(np.uint32))
        if chosen is not None:
            chosen(lanes, leads)
        return None

    return run


def _active(operands: Operands, step: Step) -> Handler:
    put = operands.write(step.operands[0], "b32")

    def run(lanes: Lanes) -> None:
        bits = np.zeros(lanes.group.warps, np.uint32)
        np.bitwise_or.at(bits, lanes.index >> 5, np.uint32(1) << (lanes.index & 31).astype(np.uint32))
        put(lanes, bits[lanes.index >> 5])

    return run


def _match(operands: Operands, step: Step) -> Handler:
    if step.parts[1] != "any":
        raise Unknown("match.all")
    value, put = operands.read(step.operands[1], step.parts[-1]), operands.write(step.operands[0], "b32")
    mask = _mask(operands, step.operands[2])

    def run(lanes: Lanes) -> int | None:
        if not lanes.converged(mask(lanes)):
            return BLOCK
        values, warp = value(lanes), lanes.index >> 5
        alike = (values[:, None] == values[None, :]) & (warp[:, None] == warp[None, :])
        bit = (np.uint64(1) << (lanes.index & 31).astype(np.uint64))[None, :]
        put(lanes, np.where(alike, bit, np.uint64(0)).sum(1).astype(np.uint32))
        return None

    return run


HANDLERS: dict[str, Builder] = {
    "shfl": _shuffle,
    "vote": _vote,
    "redux": _reduce,
    "elect": _elect,
    "activemask": _active,
    "match": _match,
}
