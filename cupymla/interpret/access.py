"""Loads and stores of some threads, by state space; generic addresses find their space themselves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .memory import LOCAL_WINDOW, PARAMETER_STRIDE, PARAMETER_WINDOW, RANK_SHIFT, SHARED_START, SHARED_WINDOW
from .threads import Lanes
from .traps import Trap
from .types import Array, DType

_OFFSET_BITS = (1 << RANK_SHIFT) - 1


def load(lanes: Lanes, space: str, address: Array, dtype: DType, count: int) -> Array:
    """`[n, count]` elements at int64 addresses of a state space."""
    return _LOADS[space](lanes, address, dtype, count)


def touch(lanes: Lanes, space: str, address: Array) -> None:
    """What concerns memory at these addresses without a load or a store, such as a prefetch: may it be done now?"""
    if space == "global" or (space == "generic" and any(found == "global" for found, _, _ in spaces(address))):
        lanes.require_grid_ahead()


def store(lanes: Lanes, space: str, address: Array, data: Array) -> None:
    """Write `[n, count]` elements at int64 addresses of a state space."""
    lanes.group.machine.events += 1
    _STORES[space](lanes, address, data)


def _load_shared(lanes: Lanes, address: Array, dtype: DType, count: int) -> Array:
    rank = address >> RANK_SHIFT
    if not rank.any():
        return lanes.group.cta.shared.load(address - SHARED_START, dtype, count)
    out = np.empty((len(address), count), dtype)
    for one in np.unique(rank):
        which = rank == one
        cta, _ = lanes.group.cta.peer(int(one) << RANK_SHIFT)
        out[which] = cta.shared.load((address[which] & _OFFSET_BITS) - SHARED_START, dtype, count)
    return out


def _store_shared(lanes: Lanes, address: Array, data: Array) -> None:
    rank = address >> RANK_SHIFT
    if not rank.any():
        lanes.group.cta.shared.store(address - SHARED_START, data)
        return
    for one in np.unique(rank):
        which = rank == one
        cta, _ = lanes.group.cta.peer(int(one) << RANK_SHIFT)
        cta.shared.store((address[which] & _OFFSET_BITS) - SHARED_START, data[which])


def _load_global(lanes: Lanes, address: Array, dtype: DType, count: int) -> Array:
    lanes.require_grid_ahead()
    return lanes.group.machine.memory.load(address, dtype, count)


def _load_constant(lanes: Lanes, address: Array, dtype: DType, count: int) -> Array:
    return lanes.group.machine.memory.load(address, dtype, count)


def _store_global(lanes: Lanes, address: Array, data: Array) -> None:
    lanes.require_grid_ahead()
    lanes.group.machine.memory.store(address, data)


def _load_local(lanes: Lanes, address: Array, dtype: DType, count: int) -> Array:
    if lanes.group.local is None:
        raise Trap("the kernel has no local memory")
    return lanes.group.local.load(lanes.index, address, dtype, count)


def _store_local(lanes: Lanes, address: Array, data: Array) -> None:
    if lanes.group.local is None:
        raise Trap("the kernel has no local memory")
    lanes.group.local.store(lanes.index, address, data)


def _load_parameter(lanes: Lanes, address: Array, dtype: DType, count: int) -> Array:
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


def _store_parameter(lanes: Lanes, address: Array, data: Array) -> None:
    raise Trap("write to a parameter")


_WINDOWS = ((SHARED_WINDOW, "shared"), (LOCAL_WINDOW, "local"), (PARAMETER_WINDOW, "param"))


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


def _load_generic(lanes: Lanes, address: Array, dtype: DType, count: int) -> Array:
    out = np.empty((len(address), count), dtype)
    for name, window, which in spaces(address):
        start = 0 if name == "param" else window
        some = Lanes(lanes.group, lanes.front, lanes.index[which])
        out[which] = _LOADS[name](some, address[which] - start, dtype, count)
    return out


def _store_generic(lanes: Lanes, address: Array, data: Array) -> None:
    for name, window, which in spaces(address):
        start = 0 if name == "param" else window
        some = Lanes(lanes.group, lanes.front, lanes.index[which])
        _STORES[name](some, address[which] - start, data[which])


_LOADS: dict[str, Callable[[Lanes, Array, DType, int], Array]] = {
    "shared": _load_shared,
    "global": _load_global,
    "const": _load_constant,
    "local": _load_local,
    "param": _load_parameter,
    "generic": _load_generic,
}
_STORES: dict[str, Callable[[Lanes, Array, Array], None]] = {
    "shared": _store_shared,
    "global": _store_global,
    "local": _store_local,
    "param": _store_parameter,
    "generic": _store_generic,
}
