"""Loads, stores and atomic operations.

Source: PTX ISA 9.0, "ld", "ld.global.nc", "st", "atom", "red". Atomic operations of the threads that execute one
together happen one after the other, in rising order of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import access
from ..operands import Getter, Operands, Setter, items
from ..program import Step
from ..threads import Lanes
from ..traps import Unknown
from ..types import TYPES, Array, DType, unsigned
from .copies import store_async
from .kit import Builder, Handler, kind_of

_STRONG = ("volatile", "relaxed", "acquire", "release")
_SPACES = ("shared", "global", "const", "local", "param")


def space_of(step: Step) -> str:
    """The state space that an opcode names, else "generic"."""
    return next((p.split("::")[0] for p in step.parts[1:] if p.split("::")[0] in _SPACES), "generic")


def _window_of(step: Step) -> str:
    """The same, where an address of another CTA's shared memory is told from one of this CTA's."""
    return "shared::cluster" if "shared::cluster" in step.parts else space_of(step)


def _load(operands: Operands, step: Step) -> Handler:
    kind = kind_of(step)
    dtype = TYPES[kind]
    puts = operands.all_written(step.operands[0], kind)
    parameter = operands.parameter(step.operands[1]) if "param" in step.parts else None
    if parameter is not None:
        return _load_parameter(puts, dtype, *parameter)
    space, address, count = _window_of(step), operands.address(step.operands[1]), len(puts)
    strong = any(part in _STRONG for part in step.parts)
    how = access.ATOMIC if strong else access.READ_ONLY if "nc" in step.parts else access.PLAIN

    def run(lanes: Lanes) -> None:
        places = address(lanes)
        if strong:
            _take(lanes, places, "acquire" in step.parts)
        values = access.load(lanes, space, places, dtype, count, how)
        for k, put in enumerate(puts):
            put(lanes, values[:, k])

    return run


def _singly(lanes: Lanes) -> list[Lanes]:
    return [Lanes(lanes.group, lanes.front, lanes.index[k : k + 1]) for k in range(lanes.count)]


def _take(lanes: Lanes, places: Array, acquires: bool) -> None:
    """Threads read with a strong operation, where races are looked for."""
    grid = lanes.group.machine.grid_shadow
    if grid is not None:
        for one, place in zip(_singly(lanes), places, strict=True):
            grid.take(one, int(place), acquires)


def _give(lanes: Lanes, places: Array, releases: bool, adds: bool) -> None:
    """The same for writes; `adds`: they are read in the same operation."""
    grid = lanes.group.machine.grid_shadow
    if grid is not None:
        for one, place in zip(_singly(lanes), places, strict=True):
            grid.give(one, int(place), releases, adds)


def _load_parameter(puts: list[Setter], dtype: DType, place: int, offset: int) -> Handler:
    def run(lanes: Lanes) -> None:
        content = lanes.group.machine.parameters[place].content
        values = content[offset : offset + len(puts) * dtype.itemsize].view(dtype)
        for k, put in enumerate(puts):
            put(lanes, values[k])

    return run


def _store(operands: Operands, step: Step) -> Handler:
    if "async" in step.parts:
        return store_async(operands, step)
    kind = kind_of(step)
    word = TYPES[kind]
    space, address = _window_of(step), operands.address(step.operands[0])
    values = [operands.read(item, kind) for item in items(step.operands[1])]
    strong = any(part in _STRONG for part in step.parts)

    def run(lanes: Lanes) -> None:
        data = np.stack([get(lanes) for get in values], 1) if len(values) > 1 else values[0](lanes)[:, None]
        places = address(lanes)
        if strong:
            _give(lanes, places, "release" in step.parts, False)
        how = access.ATOMIC if strong else access.PLAIN
        access.store(lanes, space, places, data.astype(word, copy=False), how)

    return run


def _add(old: Any, new: Any, dtype: DType) -> Any:
    if dtype.kind in "iu":
        return (
            np.array([(int(old) + int(new)) % 2 ** (8 * dtype.itemsize)], np.uint64)
            .astype(unsigned(dtype.itemsize))
            .view(dtype)[0]
        )
    return dtype.type(old + new)


_ATOMIC: dict[str, Callable[[Any, Any, DType], Any]] = {
    "add": _add,
    "min": lambda old, new, dtype: min(old, new),
    "max": lambda old, new, dtype: max(old, new),
    "inc": lambda old, new, dtype: dtype.type(0 if old >= new else old + 1),
    "dec": lambda old, new, dtype: dtype.type(new if old == 0 or old > new else old - 1),
    "exch": lambda old, new, dtype: new,
    "and": lambda old, new, dtype: old & new,
    "or": lambda old, new, dtype: old | new,
    "xor": lambda old, new, dtype: old ^ new,
}


def _atomic(operands: Operands, step: Step) -> Handler:
    kind = kind_of(step)
    returns = step.parts[0] == "atom"
    vector = any(part in ("v2", "v4", "v8") for part in step.parts)
    if ("noftz" in step.parts and kind.endswith("x2")) or "b128" in step.parts or (vector and returns):
        raise Unknown("atomic operations on pairs, and on vectors with a result")
    rest = step.operands[1:] if returns else step.operands
    dtype, space, address = TYPES[kind], _window_of(step), operands.address(rest[0])
    if vector:
        return _vector_reduction(operands, step)
    put = operands.write(step.operands[0], kind) if returns else None
    first = operands.read(rest[1], kind)
    if "cas" in step.parts:
        swap = operands.read(rest[2], kind)
        updates = _swapping(first, swap)
        return _one_by_one(step, space, address, dtype, put, updates)
    return _one_by_one(step, space, address, dtype, put, _combining(step, first, dtype))


def _swapping(expected: Getter, swap: Getter) -> Callable[[Lanes], Callable[[int, Any], Any]]:
    return lambda lanes: _compare_and_swap(expected(lanes), swap(lanes))


def _combining(step: Step, read: Getter, dtype: DType) -> Callable[[Lanes], Callable[[int, Any], Any]]:
    combine = next(_ATOMIC[part] for part in step.parts if part in _ATOMIC)

    def updates(lanes: Lanes) -> Callable[[int, Any], Any]:
        operand = np.array(read(lanes))
        return lambda k, old: combine(old, operand[k], dtype)

    return updates


def _vector_reduction(operands: Operands, step: Step) -> Handler:
    """`red` on neighbouring elements: each is an operation of its own, the vector has to be aligned as a whole."""
    kind = kind_of(step)
    dtype, space, address = TYPES[kind], _window_of(step), operands.address(step.operands[0])
    reads = [operands.read(item, kind) for item in items(step.operands[1])]

    def at(place: int) -> Getter:
        return lambda lanes: address(lanes) + place * dtype.itemsize

    parts = [
        _one_by_one(step, space, at(place), dtype, None, _combining(step, read, dtype))
        for place, read in enumerate(reads)
    ]

    def run(lanes: Lanes) -> None:
        access.load(lanes, space, address(lanes), dtype, len(reads), access.ATOMIC)
        for part in parts:
            part(lanes)

    return run


def _compare_and_swap(expected: Array, swap: Array) -> Callable[[int, Any], Any]:
    return lambda k, old: swap[k] if old == expected[k] else old


def _one_by_one(
    step: Step,
    space: str,
    address: Getter,
    dtype: DType,
    put: Setter | None,
    updates: Callable[[Lanes], Callable[[int, Any], Any]],
) -> Handler:
    acquires = "acquire" in step.parts or "acq_rel" in step.parts
    releases = "release" in step.parts or "acq_rel" in step.parts
    # Sums of floats are no counters; looking at each of them would take long.
    orders = step.parts[0] == "atom" or releases or dtype.kind in "iu"

    def run(lanes: Lanes) -> None:
        places, update = address(lanes), updates(lanes)
        old = np.empty(lanes.count, dtype)
        access.note_atomic(lanes, space, places, dtype.itemsize)
        if orders:
            _take(lanes, places, acquires)
            _give(lanes, places, releases, True)
        for k in range(lanes.count):
            one = Lanes(lanes.group, lanes.front, lanes.index[k : k + 1])
            old[k] = access.load(one, space, places[k : k + 1], dtype, 1, access.UNNOTED)[0, 0]
            access.store(one, space, places[k : k + 1], np.array([[update(k, old[k])]], dtype), access.UNNOTED)
        if put is not None:
            put(lanes, old)

    return run


HANDLERS: dict[str, Builder] = {"ld": _load, "ldu": _load, "st": _store, "atom": _atomic, "red": _atomic}
