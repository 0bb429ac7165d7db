"""Loads and stores of some threads, by state space; generic addresses find their space themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .memory import LOCAL_WINDOW, PARAMETER_STRIDE, PARAMETER_WINDOW, RANK_SHIFT, SHARED_START, SHARED_WINDOW
from .shadow import require_apart
from .threads import Lanes
from .traps import Trap
from .types import Array, DType

if TYPE_CHECKING:
    from .machine import Cta

How = Literal["plain", "together", "atomic", "read-only", "unnoted"]
PLAIN: How = "plain"
TOGETHER: How = "together"
"""By each warp as one, so that any of its lanes stands for the others."""
ATOMIC: How = "atomic"
READ_ONLY: How = "read-only"
"""By ld.global.nc, which may see what was there before the launch."""
UNNOTED: How = "unnoted"
"""Without a look at races: `note_atomic` has done that."""

_OFFSET_BITS = (1 << RANK_SHIFT) - 1


def load(lanes: Lanes, space: str, address: Array, dtype: DType, count: int, how: How = PLAIN) -> Array:
    """`[n, count]` elements at int64 addresses of a state space."""
    return _LOADS[space](lanes, address, dtype, count, how)


def touch(lanes: Lanes, space: str, address: Array) -> None:
    """What concerns memory at these addresses without a load or a store, such as a prefetch: may it be done now?"""
    if space == "global" or (space == "generic" and any(found == "global" for found, _, _ in spaces(address))):
        lanes.require_grid_ahead()


def note_atomic(lanes: Lanes, space: str, address: Array, bytes_: int) -> None:
    """Threads are about to update memory atomically, each its place, with loads and stores that are UNNOTED."""
    machine = lanes.group.machine
    if machine.grid_shadow is None:
        return
    shares = spaces(address) if space == "generic" else [(space, 0, np.ones(len(address), np.bool_))]
    for name, window, which in shares:
        some = Lanes(lanes.group, lanes.front, lanes.index[which])
        if name == "global":
            machine.grid_shadow.read(some, address[which], bytes_, some.numbers, ATOMIC)
            machine.grid_shadow.write(some, address[which], bytes_, some.numbers, True)
        elif name.startswith("shared"):
            for cta, part, offset in _shares(some, address[which] - window):
                if cta.shared.shadow is not None:
                    cta.shared.shadow.write(cta.shared.shadow.units(offset, bytes_), some.numbers[part], True)


def store(lanes: Lanes, space: str, address: Array, data: Array, how: How = PLAIN) -> None:
    """Write `[n, count]` elements at int64 addresses of a state space."""
    lanes.group.machine.events += 1
    _STORES[space](lanes, address, data, how)


def _shares(lanes: Lanes, address: Array) -> list[tuple[Cta, Any, Array]]:
    """For shared addresses: each CTA that some lie in, which they are, and their offsets there."""
    rank = address >> RANK_SHIFT
    cta = lanes.group.cta
    if not rank.any():
        return [(cta, slice(None), address - SHARED_START)]
    found = []
    for one in np.unique(rank):
        which = rank == one
        to, _ = cta.peer(int(one) << RANK_SHIFT)
        lanes.visit(to, which)
        found.append((to, which, (address[which] & _OFFSET_BITS) - SHARED_START))
    return found


def _load_shared(lanes: Lanes, address: Array, dtype: DType, count: int, how: How) -> Array:
    out: Array = np.empty((0, count), dtype)
    for cta, which, offset in _shares(lanes, address):
        values = cta.shared.load(offset, dtype, count)
        shadow = cta.shared.shadow
        if shadow is not None and how not in (ATOMIC, UNNOTED):
            shadow.read(shadow.units(offset, dtype.itemsize * count), lanes.numbers[which], how == TOGETHER)
        if len(values) == len(address):
            return values
        if not len(out):
            out = np.empty((len(address), count), dtype)
        out[which] = values
    return out


def _own(address: Array) -> Array:
    """Addresses of the window of the CTA that uses them. Raises Trap for others."""
    if (address >> RANK_SHIFT).any():
        wrong = int(address[np.argmax(address >> RANK_SHIFT != 0)])
        raise Trap(f"address {wrong:#x}, which mapa made, in an access to .shared::cta and not .shared::cluster")
    return address


def _load_own(lanes: Lanes, address: Array, dtype: DType, count: int, how: How) -> Array:
    return _load_shared(lanes, _own(address), dtype, count, how)


def _store_own(lanes: Lanes, address: Array, data: Array, how: How) -> None:
    _store_shared(lanes, _own(address), data, how)


def _store_shared(lanes: Lanes, address: Array, data: Array, how: How) -> None:
    if lanes.group.causality is not None and how == PLAIN:
        require_apart(address, data)
    for cta, which, offset in _shares(lanes, address):
        values, shadow = data[which], cta.shared.shadow
        if shadow is not None and how != UNNOTED:
            units = shadow.units(offset, data.dtype.itemsize * data.shape[1])
            shadow.write(units, lanes.numbers[which], how == ATOMIC)
        cta.shared.store(offset, values)


def _load_global(lanes: Lanes, address: Array, dtype: DType, count: int, how: How) -> Array:
    lanes.require_grid_ahead()
    grid = lanes.group.machine.grid_shadow
    if grid is not None and how != UNNOTED:
        grid.read(lanes, address, dtype.itemsize * count, lanes.numbers, how)
    return lanes.group.machine.memory.load(address, dtype, count)


def _load_constant(lanes: Lanes, address: Array, dtype: DType, count: int, how: How) -> Array:
    return lanes.group.machine.memory.load(address, dtype, count)


def _store_global(lanes: Lanes, address: Array, data: Array, how: How) -> None:
    lanes.require_grid_ahead()
    grid = lanes.group.machine.grid_shadow
    if grid is not None and how == PLAIN:
        require_apart(address, data)
    if grid is not None and how != UNNOTED:
        grid.write(lanes, address, data.dtype.itemsize * data.shape[1], lanes.numbers, how == ATOMIC)
    lanes.group.machine.memory.store(address, data)


def _load_local(lanes: Lanes, address: Array, dtype: DType, count: int, how: How) -> Array:
    if lanes.group.local is None:
        raise Trap("the kernel has no local memory")
    return lanes.group.local.load(lanes.index, address, dtype, count)


def _store_local(lanes: Lanes, address: Array, data: Array, how: How) -> None:
    if lanes.group.local is None:
        raise Trap("the kernel has no local memory")
    lanes.group.local.store(lanes.index, address, data)


def _load_parameter(lanes: Lanes, address: Array, dtype: DType, count: int, how: How) -> Array:
    out = np.empty((len(address), count), dtype)
    bytes_ = dtype.itemsize * count
    # Nearly always all threads read the same.
    alike = (address == address[0]).all()
    for one in address[:1] if alike else np.unique(address):
        offset = (int(one) - PARAMETER_WINDOW) % PARAMETER_STRIDE
        content = lanes.group.machine.parameters.get(int(one) - offset)
        if content is None or offset + bytes_ > len(content.content):
            raise Trap(f"read of parameters out of bounds: {bytes_} bytes at {int(one):#x}")
        if offset % bytes_:
            raise Trap(f"misaligned access to a parameter: {bytes_} bytes at offset {offset}")
        out[... if alike else address == one] = content.content[offset : offset + bytes_].view(dtype)
    return out


def _store_parameter(lanes: Lanes, address: Array, data: Array, how: How) -> None:
    raise Trap("write to a parameter")


_WINDOWS = ((SHARED_WINDOW, "shared::cluster"), (LOCAL_WINDOW, "local"), (PARAMETER_WINDOW, "param"))


def spaces(address: Array) -> list[tuple[str, int, Array]]:
    """For generic addresses: each space that some lie in, where its window begins, and which lie there."""
    found: list[tuple[str, int, Array]] = []
    left = np.ones(len(address), np.bool_)
    for window, name in _WINDOWS:
        inside = left & (address >= window)
        if inside.any():
            found.append((name, window, inside))
            left &= ~inside
    if left.any() or not found:
        found.append(("global", 0, left))
    return found


def _load_generic(lanes: Lanes, address: Array, dtype: DType, count: int, how: How) -> Array:
    out = np.empty((len(address), count), dtype)
    for name, window, which in spaces(address):
        start = 0 if name == "param" else window
        some = Lanes(lanes.group, lanes.front, lanes.index[which])
        out[which] = _LOADS[name](some, address[which] - start, dtype, count, how)
    return out


def _store_generic(lanes: Lanes, address: Array, data: Array, how: How) -> None:
    for name, window, which in spaces(address):
        start = 0 if name == "param" else window
        some = Lanes(lanes.group, lanes.front, lanes.index[which])
        _STORES[name](some, address[which] - start, data[which], how)


_LOADS: dict[str, Callable[[Lanes, Array, DType, int, How], Array]] = {
    "shared": _load_own,
    "shared::cluster": _load_shared,
    "global": _load_global,
    "const": _load_constant,
    "local": _load_local,
    "param": _load_parameter,
    "generic": _load_generic,
}
_STORES: dict[str, Callable[[Lanes, Array, Array, How], None]] = {
    "shared": _store_own,
    "shared::cluster": _store_shared,
    "global": _store_global,
    "local": _store_local,
    "param": _store_parameter,
    "generic": _store_generic,
}
