"""Moves between registers, addresses of one space in another, and what means nothing here.

Source: PTX ISA 9.0, "Data Movement and Conversion Instructions" (mov, cvta, mapa, isspacep), "Miscellaneous".
"""

from __future__ import annotations

import numpy as np

from ...ptx.syntax import Vector
from .. import access
from ..memory import LOCAL_WINDOW, PARAMETER_WINDOW, RANK_SHIFT, SHARED_WINDOW
from ..operands import Operands
from ..outcomes import BLOCK
from ..program import Step
from ..registers import check
from ..threads import WARP, Lanes
from ..traps import Trap, Unknown
from ..types import TYPES, unsigned
from .kit import Builder, Handler, nothing
from .memory import space_of


def _move(operands: Operands, step: Step) -> Handler:
    kind = step.parts[-1]
    if isinstance(step.operands[0], Vector):
        return _unpack(operands, step, kind)
    if isinstance(step.operands[1], Vector):
        return _pack(operands, step, kind)
    value, put = operands.read(step.operands[1], kind), operands.write(step.operands[0], kind)
    return lambda lanes: put(lanes, value(lanes))


def _unpack(operands: Operands, step: Step, kind: str) -> Handler:
    targets = step.operands[0]
    assert isinstance(targets, Vector)
    count = len(targets.items)
    word = unsigned(TYPES[kind].itemsize // count)
    value = operands.read(step.operands[1], kind)
    puts = operands.all_written(targets, f"b{8 * word.itemsize}")

    def run(lanes: Lanes) -> None:
        parts = np.array(value(lanes)).view(word).reshape(lanes.count, count)
        for k, put in enumerate(puts):
            put(lanes, parts[:, k])

    return run


def _pack(operands: Operands, step: Step, kind: str) -> Handler:
    sources = step.operands[1]
    assert isinstance(sources, Vector)
    size = TYPES[kind].itemsize // len(sources.items)
    values = operands.all(sources, f"b{8 * size}")
    put = operands.write(step.operands[0], kind)
    dtype = TYPES[kind]
    return lambda lanes: put(lanes, np.stack([get(lanes) for get in values], 1).view(dtype).reshape(-1))


_WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}


def _convert_address(operands: Operands, step: Step) -> Handler:
    kind = step.parts[-1]
    value, put = operands.read(step.operands[1], kind), operands.write(step.operands[0], kind)
    window = next((w for part in step.parts for space, w in _WINDOWS.items() if part.startswith(space)), 0)
    by = np.uint64(window)
    if kind != "u64":
        raise Unknown("32-bit generic addresses")
    if "to" in step.parts:
        return lambda lanes: put(lanes, value(lanes) - by)
    return lambda lanes: put(lanes, value(lanes) + by)


def _map_address(operands: Operands, step: Step) -> Handler:
    kind = step.parts[-1]
    if not any(part.startswith("shared") for part in step.parts):
        raise Unknown("mapa of generic addresses")
    value, rank = operands.read(step.operands[1], kind), operands.read(step.operands[2], "u32")
    put = operands.write(step.operands[0], kind)

    def run(lanes: Lanes) -> None:
        to = rank(lanes).astype(np.uint64)
        if (to >= len(lanes.group.cta.cluster.ctas)).any():
            raise Trap(f"mapa to rank {int(to.max())} of a cluster of {len(lanes.group.cta.cluster.ctas)} CTAs")
        offset = value(lanes).astype(np.uint64) & np.uint64((1 << RANK_SHIFT) - 1)
        put(lanes, (((to + np.uint64(1)) << np.uint64(RANK_SHIFT)) | offset).astype(TYPES[kind]))

    return run


def _is_space(operands: Operands, step: Step) -> Handler:
    value, put = operands.read(step.operands[1], "u64"), operands.write(step.operands[0], "pred")
    space = step.parts[1].split("::")[0]
    if space == "global":
        return lambda lanes: put(lanes, value(lanes) < np.uint64(PARAMETER_WINDOW))
    low, size = np.uint64(_WINDOWS[space]), np.uint64(1 << 32)
    return lambda lanes: put(lanes, (value(lanes) >= low) & (value(lanes) - low < size))


def _policy(operands: Operands, step: Step) -> Handler:
    put = operands.write(step.operands[0], "b64")
    return lambda lanes: put(lanes, np.zeros(lanes.count, np.uint64))


def _set_registers(operands: Operands, step: Step) -> Handler:
    wanted = operands.read(step.operands[0], "u32")
    grows = "inc" in step.parts

    def run(lanes: Lanes) -> int | None:
        if not (lanes.converged() and lanes.are_warpgroups()):
            return BLOCK
        registers, group = int(wanted(lanes)[0]), lanes.group
        if not group.machine.program.launch_registers:
            raise Trap("setmaxnreg in a kernel without launch bounds, where ptxas ignores it")
        check(registers)
        warps, pool = np.flatnonzero(lanes.warps) + group.first // WARP, group.cta.registers
        if not grows:
            pool.give_back(warps, registers)
        elif not pool.take(warps, registers):
            return BLOCK
        group.machine.events += 1
        return None

    return run


def _let_in(lanes: Lanes) -> None:
    early = lanes.group.early
    if early is not None and early[lanes.index].any():
        lanes.group.machine.lets_in_early = True


def _grid_dependency(operands: Operands, step: Step) -> Handler:
    if "wait" not in step.parts:
        return _let_in

    def run(lanes: Lanes) -> None:
        group = lanes.group
        if group.early is not None:
            group.early[lanes.index] = False
            if not group.early.any():
                group.early = None

    return run


def _hint(operands: Operands, step: Step) -> Handler:
    """prefetch, applypriority, discard: nothing changes, but the memory is named. A tensor map is no data."""
    if "tensormap" in step.parts:
        return nothing(operands, step)
    address, space = operands.address(step.operands[0]), space_of(step)
    return lambda lanes: access.touch(lanes, space, address(lanes))


def _trap(operands: Operands, step: Step) -> Handler:
    def run(lanes: Lanes) -> None:
        raise Trap("the kernel executed trap")

    return run


def _no_calls(operands: Operands, step: Step) -> Handler:
    raise Unknown("calls are not known to the interpreter; mark the function __forceinline__")


HANDLERS: dict[str, Builder] = {
    "mov": _move,
    "cvta": _convert_address,
    "mapa": _map_address,
    "isspacep": _is_space,
    "createpolicy": _policy,
    "trap": _trap,
    "call": _no_calls,
    "setmaxnreg": _set_registers,
    "prefetch": _hint,
    "prefetchu": _hint,
    "griddepcontrol": _grid_dependency,
    "applypriority": _hint,
    "discard": _hint,
    "nanosleep": nothing,
    "pmevent": nothing,
}
