"""Barriers and fences.

Source: PTX ISA 9.0, "bar", "barrier", "barrier.cluster", "mbarrier", "fence". The order that fences give to ordinary
accesses is there anyway, because the machine executes one instruction at a time; what is checked is the fence between
ordinary writes and asynchronous reads.
"""

from __future__ import annotations

import numpy as np

from ..barriers import MBarrier, NamedBarrier
from ..causality import Releases, Waits, require_known
from ..memory import RANK_SHIFT, SHARED_START
from ..operands import Getter, Operands
from ..outcomes import BLOCK, YIELD
from ..program import Step
from ..threads import Lanes
from ..traps import Trap, Unknown
from ..types import Array
from .kit import Builder, Handler

_BARRIERS = 16


def _barrier(operands: Operands, step: Step) -> Handler:
    parts = step.parts
    if parts[1] == "warp":
        mask = operands.read(step.operands[0], "u32")
        return _warp(mask)
    if parts[1] == "cluster":
        return _cluster_arrive(step) if "arrive" in parts else _cluster_wait(step)
    if "red" in parts:
        return _reducing(operands, step)
    identifier = operands.read(step.operands[0], "u32")
    count = operands.read(step.operands[1], "u32") if len(step.operands) > 1 else None
    return _named(identifier, count, waits="arrive" not in parts)


def _warp(mask: Getter) -> Handler:
    def run(lanes: Lanes) -> int | None:
        if not lanes.converged(mask(lanes)):
            return BLOCK
        if lanes.group.causality is not None:
            lanes.group.causality.join_warps(lanes)
        return None

    return run


def _scope(step: Step) -> bool:
    """Whether the scope of an operation contains the cluster."""
    return any(part in ("cluster", "gpu", "sys") for part in step.parts)


def _release(lanes: Lanes, releases: Releases, cluster: bool, relaxed: bool = False) -> None:
    """Threads arrive: what they know goes to the barrier."""
    causality = lanes.group.causality
    if causality is not None:
        releases.add(lanes.group.cta.rank, cluster, causality.release(lanes.rows, relaxed))


def _arrive_at(lanes: Lanes, barrier: MBarrier, cluster: bool, relaxed: bool) -> None:
    """Threads are about to arrive at an mbarrier."""
    _release(lanes, barrier.releases, cluster, relaxed)
    if barrier.waits is not None and lanes.group.causality is not None:
        barrier.waits.know(lanes.group.causality.before(lanes.rows))


def _acquire(lanes: Lanes, releases: Releases, cluster: bool) -> None:
    """Threads have waited: what the barrier was given goes to them."""
    causality = lanes.group.causality
    if causality is not None and lanes.count:
        causality.acquire(lanes.rows, releases.to(lanes.group.cta.rank, cluster, causality.practice))


def _named(identifier: Getter, count: Getter | None, waits: bool) -> Handler:
    def run(lanes: Lanes) -> int | None:
        if not lanes.converged():
            return BLOCK
        barrier = _find(lanes, identifier(lanes))
        if lanes.front.generation < 0:
            generation = barrier.generation
            _release(lanes, barrier.releases, False)
            barrier.arrive(_whole_warps(lanes), _expected(lanes, count))
            lanes.group.machine.events += 1
            if not waits:
                return None
            lanes.front.generation = generation
        if barrier.generation == lanes.front.generation:
            return BLOCK
        lanes.front.generation = -1
        _acquire(lanes, barrier.releases, False)
        return None

    return run


def _reducing(operands: Operands, step: Step) -> Handler:
    """barrier.red: everyone gets what the predicates of all add up to."""
    mode = next(p for p in step.parts if p in ("popc", "and", "or"))
    put = operands.write(step.operands[0], "u32" if mode == "popc" else "pred")
    identifier, holds = operands.read(step.operands[1], "u32"), operands.read(step.operands[-1], "pred")
    count = operands.read(step.operands[2], "u32") if len(step.operands) > 3 else None

    def run(lanes: Lanes) -> int | None:
        if not lanes.converged():
            return BLOCK
        barrier, expected = _find(lanes, identifier(lanes)), _expected(lanes, count)
        if lanes.front.generation < 0:
            lanes.front.generation = barrier.generation
            _release(lanes, barrier.releases, False)
            barrier.arrive(_whole_warps(lanes), expected, int(holds(lanes).sum()))
            lanes.group.machine.events += 1
        if barrier.generation == lanes.front.generation:
            return BLOCK
        lanes.front.generation = -1
        _acquire(lanes, barrier.releases, False)
        total = {"popc": barrier.result, "and": barrier.result == expected, "or": barrier.result > 0}[mode]
        put(lanes, np.full(lanes.count, total))
        return None

    return run


def _find(lanes: Lanes, identifiers: Array) -> NamedBarrier:
    number = int(identifiers[0])
    if (identifiers != number).any():
        raise Trap("threads that execute one barrier instruction name several barriers")
    if number >= _BARRIERS:
        raise Trap(f"there is no named barrier {number}")
    return lanes.group.cta.barriers.setdefault(number, NamedBarrier())


def _expected(lanes: Lanes, count: Getter | None) -> int:
    if count is None:
        return -(-lanes.group.cta.live // 32) * 32
    expected = int(count(lanes)[0])
    if expected % 32 or not expected:
        raise Trap(f"a named barrier of {expected} threads, which are no whole warps")
    return expected


def _whole_warps(lanes: Lanes) -> int:
    """The barrier counts warps: threads that have exited count with their warp."""
    return 32 * int((lanes.warps > 0).sum())


def _cluster_arrive(step: Step) -> Handler:
    relaxed = "relaxed" in step.parts

    def run(lanes: Lanes) -> int | None:
        if "aligned" in step.parts and not lanes.converged():
            return BLOCK
        barrier, group = lanes.group.cta.cluster.barrier, lanes.group
        if (group.cluster_generation[lanes.index] == barrier.generation).any():
            raise Trap("barrier.cluster.arrive twice without a wait")
        group.cluster_generation[lanes.index] = barrier.generation
        _release(lanes, barrier.releases, True, relaxed)
        barrier.arrived += lanes.count
        barrier.settle()
        group.machine.events += 1
        return None

    return run


def _cluster_wait(step: Step) -> Handler:
    def run(lanes: Lanes) -> int | None:
        arrived = lanes.group.cluster_generation[lanes.index]
        if (arrived < 0).any():
            raise Trap("barrier.cluster.wait before an arrive")
        barrier = lanes.group.cta.cluster.barrier
        if (arrived == barrier.generation).any():
            return BLOCK
        _acquire(lanes, barrier.releases, True)
        return None

    return run


# mbarrier ------------------------------------------------------------------------------------------------------


def _mbarrier(operands: Operands, step: Step) -> Handler:
    what = step.parts[1]
    if what == "init":
        return _init(operands, step)
    if what == "inval":
        return _invalidate(operands, step)
    if what in ("arrive", "arrive_drop"):
        return _arrive(operands, step)
    if what in ("expect_tx", "complete_tx"):
        return _count_bytes(operands, step)
    if what in ("try_wait", "test_wait"):
        return _wait(operands, step)
    raise Unknown(f"mbarrier.{what}")


def _init(operands: Operands, step: Step) -> Handler:
    address, count = operands.address(step.operands[0]), operands.read(step.operands[1], "u32")

    def run(lanes: Lanes) -> None:
        cta = lanes.group.cta
        for place, number, thread in zip(address(lanes), count(lanes), lanes.numbers, strict=True):
            offset = int(place) - SHARED_START
            cta.shared.check(np.array([offset]), 8, True)
            cta.shared.hold(offset, 8)
            cta.mbarriers[offset] = _made(lanes, int(thread), int(number))

    return run


def _made(lanes: Lanes, thread: int, count: int) -> MBarrier:
    """What a thread among these makes."""
    causality = lanes.group.causality
    if causality is None:
        return MBarrier(count)
    return MBarrier(count, (thread, causality.now), causality.column(), Waits(causality))


def _anywhere(step: Step) -> bool:
    """Whether an operation on an mbarrier names the window of the cluster, in which other CTAs' lie."""
    return "shared::cluster" in step.parts or not any(part.startswith("shared") for part in step.parts)


def _barrier_at(lanes: Lanes, address: int, anywhere: bool) -> MBarrier:
    """The mbarrier that threads use. Raises Trap when they need not know that there is one."""
    if address >> RANK_SHIFT and not anywhere:
        raise Trap(f"address {address:#x}, which mapa made, for an mbarrier in .shared::cta")
    cta, _ = lanes.group.cta.peer(address)
    lanes.visit(cta)
    barrier, causality = lanes.group.cta.mbarrier(address), lanes.group.causality
    if causality is not None:
        require_known(causality, lanes.numbers, barrier.maker, "an mbarrier before it knows of the mbarrier.init")
    return barrier


def _invalidate(operands: Operands, step: Step) -> Handler:
    address = operands.address(step.operands[0])

    def run(lanes: Lanes) -> None:
        for place in address(lanes):
            lanes.group.cta.mbarrier(int(place))
            del lanes.group.cta.mbarriers[int(place) - SHARED_START]
            lanes.group.cta.shared.let_go(int(place) - SHARED_START, 8)

    return run


def _arrive(operands: Operands, step: Step) -> Handler:
    put = operands.write(step.operands[0], "b64")
    address = operands.address(step.operands[1])
    number = operands.read(step.operands[2], "u32") if len(step.operands) > 2 else None
    expects, drops = "expect_tx" in step.parts, step.parts[1] == "arrive_drop"
    cluster, relaxed, anywhere = _scope(step), "relaxed" in step.parts, _anywhere(step)

    def run(lanes: Lanes) -> None:
        numbers = np.ones(lanes.count, np.uint32) if number is None else number(lanes)
        tokens = np.zeros(lanes.count, np.uint64)
        lanes.group.machine.events += 1
        places = address(lanes)
        if not (expects or drops) and _arrive_together(lanes, places, numbers, tokens, (cluster, relaxed, anywhere)):
            put(lanes, tokens)
            return
        for k, (place, given) in enumerate(zip(places, numbers, strict=True)):
            one = Lanes(lanes.group, lanes.front, lanes.index[k : k + 1])
            barrier = _barrier_at(one, int(place), anywhere)
            _arrive_at(one, barrier, cluster, relaxed)
            tokens[k] = barrier.phase
            arrivals = 1 if expects else int(given)
            if expects:
                barrier.expect(int(given))
            if drops:
                barrier.count -= arrivals
            barrier.arrive(arrivals)
        put(lanes, tokens)

    return run


def _arrive_together(lanes: Lanes, places: Array, numbers: Array, tokens: Array, how: tuple[bool, bool, bool]) -> bool:
    """The arrivals of all threads at once, where they are on one barrier and of one phase; whether they were."""
    if (places != places[0]).any():
        return False
    cluster, relaxed, anywhere = how
    barrier, total = _barrier_at(lanes, int(places[0]), anywhere), int(numbers.sum())
    if total > barrier.pending or not numbers.all():
        return False
    _arrive_at(lanes, barrier, cluster, relaxed)
    tokens[:] = barrier.phase
    barrier.arrive(total)
    return True


def _count_bytes(operands: Operands, step: Step) -> Handler:
    address, number = operands.address(step.operands[0]), operands.read(step.operands[1], "u32")
    sign, anywhere = 1 if step.parts[1] == "expect_tx" else -1, _anywhere(step)

    def run(lanes: Lanes) -> None:
        for place, given in zip(address(lanes), number(lanes), strict=True):
            barrier = _barrier_at(lanes, int(place), anywhere)
            barrier.expect(sign * int(given))
            barrier.settle()
        lanes.group.machine.events += 1

    return run


def _wait(operands: Operands, step: Step) -> Handler:
    put, address = operands.write(step.operands[0], "pred"), operands.address(step.operands[1])
    parity = "parity" in step.parts
    token = operands.read(step.operands[2], "u32" if parity else "b64")
    cluster, relaxed = _scope(step), "relaxed" in step.parts
    looks = step.parts[1] == "test_wait"

    def run(lanes: Lanes) -> int | None:
        done = np.zeros(lanes.count, np.bool_)
        watcher = lanes.group.machine.watcher if looks else None
        if watcher is not None and watcher.overlooks(lanes, step):
            put(lanes, done)
            return YIELD
        places, wanteds = address(lanes), token(lanes)
        if lanes.count > 1 and (places == places[0]).all() and (wanteds == wanteds[0]).all():
            places, wanteds = places[:1], wanteds[:1]
        for k, (place, wanted) in enumerate(zip(places, wanteds, strict=True)):
            # Only a CTA's own threads can wait (PTX ISA, "mbarrier.try_wait").
            barrier = _barrier_at(lanes, int(place), False)
            phase = barrier.phase
            done[k] = (phase & 1) != (int(wanted) & 1) if parity else phase != int(wanted)
            if done[k] and not relaxed:
                one = lanes if len(places) < lanes.count else Lanes(lanes.group, lanes.front, lanes.index[k : k + 1])
                _acquire(one, barrier.releases, cluster)
                if barrier.waits is not None:
                    barrier.waits.add(one.rows)
        if len(places) < lanes.count:
            done[:] = done[0]
        put(lanes, done)
        return None if done.all() else YIELD

    return run


def _fence(operands: Operands, step: Step) -> Handler:
    if "proxy" not in step.parts:
        return _between_ordinary(step)
    if not any(part.startswith("async") for part in step.parts):
        return lambda lanes: None
    if "global" in step.parts:
        raise Unknown("a proxy fence for global memory alone")

    def run(lanes: Lanes) -> None:
        # A fence covers what it is ordered behind, other threads' writes among it. Time stands for that order where
        # races are not looked for.
        lanes.group.cta.shared.fence()
        if lanes.group.causality is not None:
            lanes.group.causality.fence_proxy(lanes.rows)

    return run


def _between_ordinary(step: Step) -> Handler:
    everywhere = any(part in ("gpu", "sys", "gl") for part in step.parts)

    def run(lanes: Lanes) -> None:
        grid = lanes.group.machine.grid_shadow
        if lanes.group.causality is not None and "mbarrier_init" in step.parts:
            lanes.group.causality.fence_init(lanes.rows)
        if lanes.group.causality is not None and grid is not None:
            if everywhere:
                grid.fence(lanes)
            lanes.group.causality.fence(lanes.rows, everywhere)

    return run


HANDLERS: dict[str, Builder] = {
    "bar": _barrier,
    "barrier": _barrier,
    "mbarrier": _mbarrier,
    "fence": _fence,
    "membar": _fence,
}
