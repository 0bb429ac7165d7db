"""Asynchronous copies: cp.async, bulk copies with and without a tensor map, and st.async.

Source: PTX ISA 9.0, "cp.async", "cp.async.bulk", "cp.async.bulk.tensor", "cp.async.bulk.prefetch", "st.async"; the
swizzle modes are told in "Tensors: Swizzling Modes".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cupymla.tensormap import TileMap, element_bytes

from ...ptx.syntax import Address, Vector
from ..barriers import MBarrier
from ..causality import ANYONE, require_fenced_init
from ..memory import RANK_SHIFT, SHARED_START
from ..operands import Getter, Operands, items, number
from ..program import Step
from ..threads import Group, Lanes
from ..traps import Trap, Unknown
from ..types import TYPES, Array, unsigned
from .kit import Builder, Handler, kind_of

if TYPE_CHECKING:
    from ..machine import Cta


def _copy(operands: Operands, step: Step) -> Handler:
    parts = step.parts
    if parts[1] == "reduce":
        raise Unknown("cp.reduce")
    if "bulk" in parts:
        return _bulk(operands, step)
    if parts[2] in ("ca", "cg"):
        return _start(operands, step)
    if parts[2] == "mbarrier":
        return _arrive_when_done(operands, step)
    if parts[2] == "commit_group":
        return lambda lanes: lanes.group.copies.commit(lanes)
    pending = number(step.operands[0]) if parts[2] == "wait_group" else None
    return lambda lanes: lanes.group.copies.wait(lanes, pending)


def source_size(operands: Operands, step: Step) -> Getter | None:
    """How many bytes cp.async takes from its source; None where it takes all."""
    rest = step.operands[3:-1] if any(p == "L2::cache_hint" for p in step.parts) else step.operands[3:]
    return operands.read(rest[0], "u32") if rest else None


def _start(operands: Operands, step: Step) -> Handler:
    destination, source = operands.address(step.operands[0]), operands.address(step.operands[1])
    bytes_ = number(step.operands[2])
    if bytes_ not in (4, 8, 16) or ("cg" in step.parts and bytes_ != 16):
        raise Unknown(f"cp.async of {bytes_} bytes")
    size = source_size(operands, step)

    def run(lanes: Lanes) -> None:
        sizes = np.full(lanes.count, bytes_, np.uint32) if size is None else np.array(size(lanes))
        lanes.group.copies.start(lanes, destination(lanes), source(lanes), sizes, bytes_)

    return run


def _arrive_when_done(operands: Operands, step: Step) -> Handler:
    address = operands.address(step.operands[0])
    counts = "noinc" not in step.parts

    def run(lanes: Lanes) -> None:
        places = np.array(address(lanes))
        if counts:
            for place in places:
                lanes.group.cta.mbarrier(int(place)).expect_arrival()
        lanes.group.copies.arrive_when_done(lanes, places)

    return run


# Bulk copies ---------------------------------------------------------------------------------------------------


def _bulk(operands: Operands, step: Step) -> Handler:
    parts = step.parts
    if "prefetch" in parts:
        return _prefetch_tile if "tensor" in parts else _prefetch(operands, step)
    if "commit_group" in parts:
        return lambda lanes: lanes.group.copies.commit_bulk(lanes)
    if "wait_group" in parts:
        pending = number(step.operands[0])
        return lambda lanes: lanes.group.copies.wait_bulk(lanes, pending)
    into_shared = parts.index(next(p for p in parts if p.startswith("shared"))) < parts.index("global")
    if "im2col" in parts or any(p.startswith(("cta_group", "tile::")) for p in parts):
        raise Unknown("a mode of bulk copies")
    if "tensor" in parts:
        return _tile_in(operands, step) if into_shared else _tile_out(operands, step)
    return _range_in(operands, step) if into_shared else _range_out(operands, step)


def _prefetch_tile(lanes: Lanes) -> None:
    """A prefetch by a tensor map."""
    lanes.require_grid_ahead()


def _prefetch(operands: Operands, step: Step) -> Handler:
    address, size = operands.address(step.operands[0]), operands.read(step.operands[1], "u32")

    def run(lanes: Lanes) -> None:
        lanes.require_grid_ahead()
        for place, bytes_ in zip(address(lanes), size(lanes), strict=True):
            if place % 16 or bytes_ % 16:
                raise Trap(f"misaligned prefetch: {bytes_} bytes at {place:#x}")
            if bytes_ and lanes.group.machine.memory.find(int(place), int(place) + int(bytes_), False) is None:
                raise Trap(f"prefetch out of bounds: {bytes_} bytes at {place:#x}")

    return run


def _later(
    cta: Cta,
    where: list[tuple[Cta, Array]],
    barriers: list[MBarrier],
    bytes_: int,
    fetch: Callable[[], Array],
    numbers: Array,
    sender: tuple[int, bool] = (ANYONE, True),
    ordinary: bool = False,
) -> None:
    """Fetch rows of `bytes_` bytes some time later, put row k at offset k of some CTAs, tell an mbarrier of each.

    What a copy reads, it reads when it is finished: the latest moment that it may.

    Args:
        cta: of the threads that start it.
        where: the receivers.
        barriers: one of each of them.
        bytes_: of a row.
        fetch: what is copied.
        numbers: of the threads that start it: one for all rows, or one for each.
        sender: the CTA that a wait for the copy has to reach by its scope, and whether its scope may be the cluster.
        ordinary: whether it writes in the generic proxy.
    """
    if cta.machine.watcher is not None:
        receivers = [to for to, _ in where]
        total = bytes_ * len(where[0][1])
        cta.machine.watcher.landing(cta, receivers, barriers, total, int(numbers[0]), ordinary)
    marked = [(to, place, to.shared.start_landing(place, bytes_)) for to, place in where]
    causality = cta.cluster.causality
    before = np.zeros(0, np.int32) if causality is None else causality.before(numbers)
    for to, place, _ in marked:
        if to.shared.shadow is not None:
            units = to.shared.shadow.units(place, bytes_)
            if len(numbers) == 1:
                units = np.unique(units)[:, None]
            to.shared.shadow.require_free(units, np.broadcast_to(numbers, len(units)))
            if not ordinary:
                to.shared.shadow.require_fenced_writes(units, np.broadcast_to(numbers, len(units)))
        if not ordinary:
            to.shared.require_fenced(np.unique(place >> 4), "write")

    def finish() -> None:
        values = fetch()
        for (to, place, words), barrier in zip(marked, barriers, strict=True):
            if not to.live:
                raise Trap(f"a copy lands in shared memory of CTA {to.number}, which has exited")
            to.shared.end_landing(words)
            to.shared.store(place, values, ordinary)
            if to.shared.shadow is not None:
                shadow = to.shared.shadow
                shadow.note_writes(shadow.units(place, bytes_), barrier.column, barrier.phase + 1, ordinary)
                landed = shadow.causality.landed(barrier.column, barrier.phase + 1, before)
                barrier.releases.add(*sender, landed)
                if barrier.waits is not None:
                    barrier.waits.know(before)
            barrier.expect(-values.nbytes)
            barrier.settle()

    cta.late.append((finish, finish))


def _require_ordered(lanes: Lanes, k: int, address: Array, bytes_: int) -> None:
    """Raise Trap unless a thread that starts a copy of pieces of global memory knows what the launch wrote there."""
    grid = lanes.group.machine.grid_shadow
    if grid is not None:
        grid.read(lanes, address, bytes_, np.repeat(lanes.numbers[k : k + 1], len(address)), "asynchronous")


def _receivers(
    lanes: Lanes, k: int, destination: int, barrier: int, mask: Getter | None
) -> list[tuple[Cta, int, MBarrier]]:
    """The CTAs that get a copy, the offset in each, and the mbarrier that is told, if thread k's copy may tell it."""
    cta, causality = lanes.group.cta, lanes.group.causality
    if mask is None:
        if cta.peer(destination)[0] is not cta.peer(barrier)[0]:
            raise Trap("a bulk copy to one CTA with an mbarrier of another")
        made = [(*cta.peer(destination), cta.mbarrier(barrier))]
    else:
        offset_bits = (1 << RANK_SHIFT) - 1
        bits = int(mask(lanes)[k])
        made = []
        for rank in (rank for rank in range(16) if bits >> rank & 1):
            window = (rank + 1) << RANK_SHIFT
            to, offset = cta.peer((destination & offset_bits) | window)
            made.append((to, offset, cta.mbarrier((barrier & offset_bits) | window)))
    for to, _, _ in made:
        lanes.require_started(to)
    if causality is not None:
        for _, _, told in made:
            require_fenced_init(causality, lanes.numbers[k : k + 1], told.maker)
    return made


def _mask(operands: Operands, step: Step, at: int) -> Getter | None:
    multicast = any(part == "multicast::cluster" for part in step.parts)
    return operands.read(step.operands[at], "u16") if multicast else None


def store_async(operands: Operands, step: Step) -> Handler:
    """st.async: each thread's registers, to a CTA of the cluster; they land warp by warp."""
    if "mbarrier::complete_tx::bytes" not in step.parts or "shared::cluster" not in step.parts:
        raise Unknown("st.async that is not to shared memory of the cluster, with an mbarrier")
    kind = kind_of(step)
    destination, barrier = operands.address(step.operands[0]), operands.address(step.operands[2])
    reads = [operands.read(item, kind) for item in items(step.operands[1])]
    word = unsigned(TYPES[kind].itemsize)

    def run(lanes: Lanes) -> None:
        data = np.stack([get(lanes) for get in reads], 1).astype(TYPES[kind], copy=False).view(word)
        to, told, cta = destination(lanes), barrier(lanes), lanes.group.cta
        if (to >> RANK_SHIFT != told >> RANK_SHIFT).any():
            raise Trap("st.async to one CTA with an mbarrier of another")
        # Threads that store to one CTA and tell one mbarrier, warp by warp.
        shares = np.stack([lanes.index >> 5, to >> RANK_SHIFT, told], 1)
        for share in np.unique(shares, axis=0):
            which = (shares == share).all(axis=1)
            receiver, first = cta.peer(int(to[which][0]))
            offset = to[which] - int(to[which][0]) + first
            values = functools.partial(np.array, data[which])
            lanes.require_started(receiver, which)
            told_there = [cta.mbarrier(int(share[2]))]
            causality = lanes.group.causality
            sender = (ANYONE if causality is None or causality.practice else cta.rank), True
            _later(
                cta,
                [(receiver, offset)],
                told_there,
                data[0].nbytes,
                values,
                lanes.numbers[which],
                sender,
                ordinary=True,
            )
        lanes.group.machine.events += 1

    return run


def _range_in(operands: Operands, step: Step) -> Handler:
    destination, source = operands.address(step.operands[0]), operands.address(step.operands[1])
    size, barrier = operands.read(step.operands[2], "u32"), operands.address(step.operands[3])
    mask = _mask(operands, step, 4)

    def run(lanes: Lanes) -> None:
        lanes.require_grid_ahead()
        to, from_, bytes_, told = destination(lanes), source(lanes), size(lanes), barrier(lanes)
        for k in range(lanes.count):
            length = _length(int(bytes_[k]), int(to[k]), int(from_[k]))
            start = int(from_[k]) + np.arange(0, length, 16)
            receivers = _receivers(lanes, k, int(to[k]), int(told[k]), mask)
            places = [(cta, offset + np.arange(0, length, 16)) for cta, offset, _ in receivers]
            fetch = functools.partial(lanes.group.machine.memory.load, start, unsigned(8), 2)
            _require_ordered(lanes, k, start, 16)
            _later(lanes.group.cta, places, [b for _, _, b in receivers], 16, fetch, lanes.numbers[k : k + 1])

    return run


def _length(bytes_: int, shared: int, global_: int) -> int:
    if bytes_ % 16 or shared % 16 or global_ % 16:
        raise Trap(f"misaligned bulk copy: {bytes_} bytes between {global_:#x} and {shared:#x}")
    return bytes_


def _range_out(operands: Operands, step: Step) -> Handler:
    destination, source = operands.address(step.operands[0]), operands.address(step.operands[1])
    size = operands.read(step.operands[2], "u32")

    def run(lanes: Lanes) -> None:
        lanes.require_grid_ahead()
        for k in range(lanes.count):
            to, from_ = int(destination(lanes)[k]), int(source(lanes)[k])
            length = _length(int(size(lanes)[k]), from_, to)
            offset = from_ - SHARED_START + np.arange(0, length, 16)
            _store_later(lanes, k, offset, to + np.arange(0, length, 16), 16)

    return run


def _store_later(lanes: Lanes, k: int, offset: Array, address: Array, bytes_: int) -> None:
    """A thread's copy of pieces of shared memory to global memory, read when it is finished."""
    group = lanes.group
    shared, memory = group.cta.shared, group.machine.memory
    shared.require_fenced(offset >> 4)
    granules = np.unique(offset >> 4)
    shared.start_reading(granules)
    shadow, number, memory_writes = shared.shadow, lanes.numbers[k : k + 1], group.machine.grid_shadow
    if shadow is not None:
        units = np.unique(shadow.units(offset, bytes_))
        shadow.require_written_for_all(units, number)

    def finish() -> None:
        shared.end_reading(granules)
        if memory_writes is not None:
            memory_writes.write(lanes, address, bytes_, np.repeat(number, len(address)))
        if shadow is not None:
            shadow.note_reads(units[None, :], number, ordinary=False)
        memory.store(address, shared.load(offset, unsigned(min(bytes_, 8)), max(1, bytes_ // 8)))

    group.copies.start_bulk(int(lanes.index[k]), finish)


# Tiles by a tensor map -----------------------------------------------------------------------------------------


def _coordinates(operands: Operands, address: object) -> tuple[Getter, list[Getter]]:
    """The tensor map and the coordinates in `[map, {c0, c1}]`."""
    if not isinstance(address, Address) or len(address.items) != 2 or not isinstance(address.items[1], Vector):
        raise Unknown("the operand of a tensor copy")
    return operands.read(address.items[0], "u64"), [operands.read(item, "s32") for item in address.items[1].items]


def _map_at(group: Group, address: int) -> TileMap:
    found = group.machine.maps.get(address)
    if found is None:
        raise Trap(f"no tensor map at {address:#x}")
    return found


class Tile:
    """The box of a tensor map at some coordinates.

    Attributes:
        element_bytes: of one element.
        offset: of each element from the box's start in shared memory, swizzled by `place`.
        address: of each element in global memory.
        inside: whether it is part of the array.
    """

    def __init__(self, request: TileMap, coordinates: list[int], element_bytes: int) -> None:
        if len(coordinates) != len(request.shape):
            raise Trap(f"a tensor copy of {len(coordinates)} dimensions by a map of {len(request.shape)}")
        self.element_bytes = element_bytes
        self.swizzle = request.swizzle
        self.fill = request.fill
        axes = [start + np.arange(extent) for start, extent in zip(coordinates, request.box, strict=True)]
        steps = (element_bytes, *request.strides_bytes)
        grid = np.meshgrid(*reversed(axes), indexing="ij")
        address = np.full(grid[0].shape, request.ptr, np.int64)
        inside = np.ones(grid[0].shape, np.bool_)
        for place, step, extent in zip(reversed(grid), steps, request.shape, strict=True):
            address += place * step
            inside &= (place >= 0) & (place < extent)
        self.address, self.inside = address.reshape(-1), inside.reshape(-1)
        self.bytes = self.inside.size * element_bytes

    def place(self, start: int) -> Array:
        """Where each element lies in shared memory when the box begins at an offset."""
        mode = {0: 0, 32: 1, 64: 3, 128: 7}[self.swizzle]
        if (start + SHARED_START) % (128 if mode else 16):
            raise Trap(f"misaligned shared address of a tensor copy: offset {start}")
        address = start + SHARED_START + np.arange(0, self.bytes, self.element_bytes)
        return (address ^ ((address >> 7 & mode) << 4)) - SHARED_START

    def filling(self) -> Array:
        """Elements that are all outside the array."""
        word = unsigned(self.element_bytes)
        nan = {2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FFFFFFFFFFFFFFF}
        return np.full(self.inside.size, nan[self.element_bytes] if self.fill == "nan" else 0, word)


def _tile(group: Group, map_: int, coordinates: list[int]) -> Tile:
    request = _map_at(group, map_)
    return Tile(request, coordinates, element_bytes(request.dtype))


def _tile_in(operands: Operands, step: Step) -> Handler:
    destination, barrier = operands.address(step.operands[0]), operands.address(step.operands[2])
    map_, coordinates = _coordinates(operands, step.operands[1])
    mask = _mask(operands, step, 3)

    def run(lanes: Lanes) -> None:
        lanes.require_grid_ahead()
        places = [coordinate(lanes) for coordinate in coordinates]
        maps, to, told = map_(lanes), destination(lanes), barrier(lanes)
        for k in range(lanes.count):
            tile = _tile(lanes.group, int(maps[k]), [int(place[k]) for place in places])
            receivers = _receivers(lanes, k, int(to[k]), int(told[k]), mask)
            where = [(cta, tile.place(offset)) for cta, offset, _ in receivers]
            barriers = [b for _, _, b in receivers]
            fetch = _fetch(lanes.group, tile)
            _require_ordered(lanes, k, tile.address[tile.inside], tile.element_bytes)
            _later(lanes.group.cta, where, barriers, tile.element_bytes, fetch, lanes.numbers[k : k + 1])

    return run


def _fetch(group: Group, tile: Tile) -> Callable[[], Array]:
    memory, word = group.machine.memory, unsigned(tile.element_bytes)

    def fetch() -> Array:
        values = tile.filling()
        values[tile.inside] = memory.load(tile.address[tile.inside], word, 1)[:, 0]
        return values[:, None]

    return fetch


def _tile_out(operands: Operands, step: Step) -> Handler:
    map_, coordinates = _coordinates(operands, step.operands[0])
    source = operands.address(step.operands[1])

    def run(lanes: Lanes) -> None:
        lanes.require_grid_ahead()
        places = [coordinate(lanes) for coordinate in coordinates]
        maps, from_ = map_(lanes), source(lanes)
        for k in range(lanes.count):
            tile = _tile(lanes.group, int(maps[k]), [int(place[k]) for place in places])
            offset = tile.place(int(from_[k]) - SHARED_START)
            _store_later(lanes, k, offset[tile.inside], tile.address[tile.inside], tile.element_bytes)

    return run


HANDLERS: dict[str, Builder] = {"cp": _copy}
