"""A trace against a clock: when each event would happen where nothing but the rates of a multiprocessor holds it up.

Warps go through their events in order; the one that is furthest back in time goes next, so that who comes first is
served first. Every CTA has a multiprocessor to itself, or shares it with its neighbours.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import trace
from .rates import Rates
from .trace import Trace, WarpTrace

SCHEDULERS = 4
_CHUNK = 24
_WARP = 32


class Stuck(Exception):
    """A replay in which nobody can go on."""


@dataclass(slots=True)
class Server:
    """Something that serves one after the other: when it is free, and for how long it has been at work."""

    free: float = 0.0
    busy: float = 0.0

    def take(self, now: float, cycles: float) -> float:
        """Be at work for some cycles, from now on at the earliest. Returns when that is over."""
        self.free = max(self.free, now) + cycles
        self.busy += cycles
        return self.free


def _four() -> list[Server]:
    return [Server() for _ in range(SCHEDULERS)]


@dataclass(slots=True)
class TensorCore:
    """Of a scheduler: what waits for it, whose product is under way, whose came last, how long it has been at work."""

    queue: list[tuple[_Warp, trace.Product]] = field(default_factory=list)
    busy_with: _Warp | None = None
    last: _Warp | None = None
    busy: float = 0.0


@dataclass(slots=True)
class Multiprocessor:
    """What the warps of a CTA share; some of it scheduler by scheduler."""

    issue: list[Server] = field(default_factory=_four)
    alu: list[Server] = field(default_factory=_four)
    fma: list[Server] = field(default_factory=_four)
    imad: list[Server] = field(default_factory=_four)
    xu: list[Server] = field(default_factory=_four)
    multiplier: list[Server] = field(default_factory=_four)
    tensor: list[TensorCore] = field(default_factory=lambda: [TensorCore() for _ in range(SCHEDULERS)])
    shared: Server = field(default_factory=Server)
    gather: Server = field(default_factory=Server)
    memory: Server = field(default_factory=Server)
    store: Server = field(default_factory=Server)
    reduce: Server = field(default_factory=Server)
    cluster: Server = field(default_factory=Server)


@dataclass(slots=True)
class _Barrier:
    count: int
    pending: int
    bytes: int = 0
    over: list[float] = field(default_factory=list)
    waiting: list[tuple[_Warp, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Meeting:
    """A named barrier, or a cluster's."""

    arrived: int = 0
    expected: int = 0
    of_all: bool = False
    generation: int = 0
    over: float = 0.0
    waiting: list[_Warp] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Warp:
    recorded: WarpTrace
    sm: Multiprocessor
    scheduler: int
    at: int = 0
    left: trace.Run | None = None
    ready: list[float] = field(default_factory=list)
    gathered: float = 0.0
    gathers: list[float] = field(default_factory=list)
    stored: float = 0.0
    products: int = 0
    multiplied: list[float] = field(default_factory=list)
    queued: int = 0
    held: bool = False
    awaits: int = 0
    groups: list[int] = field(default_factory=list)
    generation: int = 0
    spans: list[float] = field(default_factory=list)
    end: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A warp that has gone through its events.

    Attributes:
        recorded: the warp.
        done: when it was through with each event.
        end: when it ended.
    """

    recorded: WarpTrace
    done: list[float]
    end: float

    def spent(self) -> dict[tuple[str, int], float]:
        """Its cycles by kind of event and PTX line."""
        sums: dict[tuple[str, int], float] = {}
        before = 0.0
        for event, place, done in zip(self.recorded.events, self.recorded.places, self.done, strict=True):
            key = type(event).__name__, place
            sums[key] = sums.get(key, 0.0) + done - before
            before = done
        return sums


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of it.

    Attributes:
        cycles: from the first event to the end of the last warp.
        multiprocessors: of each CTA.
        warps: one for each warp of the trace.
    """

    cycles: float
    multiprocessors: list[Multiprocessor]
    warps: list[Ended]


class _Replay:
    def __init__(self, recorded: Trace, rates: Rates, resident: int) -> None:
        self._trace, self._rates = recorded, rates
        shared = [Multiprocessor() for _ in range(0, len(recorded.clusters), resident)]
        self._sms = [shared[cta // resident] for cta in range(len(recorded.clusters))]
        self._barriers = [_Barrier(count, count) for count in recorded.counts]
        self._named: dict[tuple[int, int], _Meeting] = {}
        self._live = [recorded.threads] * len(recorded.clusters)
        live: dict[int, int] = {}
        for cluster in recorded.clusters:
            live[cluster] = live.get(cluster, 0) + recorded.threads
        self._clusters = {cluster: _Meeting(expected=threads) for cluster, threads in live.items()}
        self._warps = [_Warp(w, self._sms[w.cta], w.warp % SCHEDULERS, ready=[0.0] * w.loads) for w in recorded.warps]
        # When each sector that somebody has asked for is in L2.
        self._in_l2 = {sector: 0.0 for first, behind in recorded.in_l2 for sector in range(first, behind)}
        # What the launch stores is there for whoever reads it: the replay may let him come before it is stored.
        for warp in recorded.warps:
            for event in warp.events:
                if isinstance(event, trace.Global) and event.load < 0 and not event.reduces:
                    for first, behind in event.sectors:
                        self._in_l2.update(dict.fromkeys(range(first, behind), 0.0))
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Any]] = []
        self._steps: dict[type, Callable[[_Warp, Any, float], float | None]] = {
            trace.Run: self._run,
            trace.Use: self._use,
            trace.Shared: self._shared,
            trace.Exchange: self._exchange,
            trace.Global: self._global,
            trace.Gather: self._gather,
            trace.GatherCommit: self._gather_commit,
            trace.GatherWait: self._gather_wait,
            trace.GatherArrive: self._gather_arrive,
            trace.Landing: self._landing,
            trace.Prefetch: self._prefetch,
            trace.BulkStore: self._bulk_store,
            trace.BulkWait: self._bulk_wait,
            trace.Arrive: self._arrive,
            trace.Wait: self._wait,
            trace.Named: self._meet,
            trace.ClusterArrive: self._cluster_arrive,
            trace.ClusterWait: self._cluster_wait,
            trace.Product: self._product,
            trace.WarpProduct: self._warp_product,
            trace.ProductCommit: self._product_commit,
            trace.ProductWait: self._product_wait,
            trace.Fence: self._fence,
        }

    def run(self) -> Replayed:
        for warp in self._warps:
            self._push(0.0, warp)
        while self._queue:
            now, _, what = heapq.heappop(self._queue)
            if isinstance(what, _Warp):
                self._step(what, now)
            else:
                what(now)
        late = [w for w in self._warps if w.at < len(w.recorded.events)]
        if late:
            places = [f"CTA {w.recorded.cta} warp {w.recorded.warp} at {w.recorded.events[w.at]}" for w in late]
            raise Stuck("; ".join(places))
        ended = [Ended(w.recorded, w.spans, w.end) for w in self._warps]
        return Replayed(max((w.end for w in self._warps), default=0.0), self._sms, ended)

    def _push(self, when: float, what: object) -> None:
        heapq.heappush(self._queue, (when, next(self._order), what))

    def _step(self, warp: _Warp, now: float) -> None:
        events = warp.recorded.events
        if warp.at == len(events):
            warp.end = now
            self._exit(warp.recorded.cta, now)
            return
        event = events[warp.at]
        after = self._steps[type(event)](warp, event, now)
        if after is not None:
            self._leave(warp, after)

    def _leave(self, warp: _Warp, after: float) -> None:
        """A warp is done with its event."""
        if warp.left is None:
            warp.spans.append(after)
            warp.at += 1
        self._push(after, warp)

    # Instructions ----------------------------------------------------------------------------------------------

    def _issue(self, warp: _Warp, now: float, slots: float = 1.0) -> float:
        """Returns when the scheduler turns to the warp."""
        return warp.sm.issue[warp.scheduler].take(now, slots) - slots

    def _run(self, warp: _Warp, event: trace.Run, now: float) -> float:
        left = warp.left or event
        share = min(1.0, _CHUNK / max(left.issue, 1))
        rates, sm, on = self._rates, warp.sm, warp.scheduler
        slots, alu, fma, xu, imad = (part * share for part in left)
        start = self._issue(warp, now, slots)
        end = max(
            start + slots * rates.solo,
            sm.alu[on].take(start, alu * rates.alu),
            sm.fma[on].take(start, fma * rates.fma),
            sm.xu[on].take(start, xu * rates.xu),
            sm.imad[on].take(start, imad * rates.imad),
        )
        warp.left = None if share == 1.0 else trace.Run(*(part * (1 - share) for part in left))  # type: ignore[arg-type]
        return end

    def _use(self, warp: _Warp, event: trace.Use, now: float) -> float:
        return max(now, *(warp.ready[load] for load in event.loads))

    def _shared(self, warp: _Warp, event: trace.Shared, now: float) -> float:
        start = self._issue(warp, now)
        served = warp.sm.shared.take(start, event.wavefronts)
        if event.load >= 0:
            warp.ready[event.load] = served + self._rates.shared_latency
        return max(start + 1, served - 32)

    def _exchange(self, warp: _Warp, event: trace.Exchange, now: float) -> float:
        start = self._issue(warp, now)
        warp.ready[event.load] = warp.sm.shared.take(start, 1) + self._rates.exchange_latency
        return start + 1

    def _global(self, warp: _Warp, event: trace.Global, now: float) -> float:
        rates, sm = self._rates, warp.sm
        start = self._issue(warp, now)
        if event.reduces or event.load < 0:
            for first, behind in event.sectors:
                for sector in range(first, behind):
                    self._in_l2.setdefault(sector, start)
        if event.reduces:
            served = sm.reduce.take(start, event.bytes / rates.reduce_bytes)
            if event.load >= 0:
                warp.ready[event.load] = served + rates.l2_latency
            return max(start + 1, served - rates.reduce_queue / rates.reduce_bytes)
        if event.load >= 0:
            warp.ready[event.load] = self._fetch(sm, start, event.bytes, event.sectors)
            return start + 1
        served = sm.store.take(start, event.bytes / rates.store_bytes)
        return max(start + 1, served - rates.reduce_queue / rates.store_bytes)

    def _fence(self, warp: _Warp, event: trace.Fence, now: float) -> float:
        rates = self._rates
        cycles = {"proxy": rates.proxy_fence, "cta": rates.cta_fence, "gpu": rates.gpu_fence}[event.kind]
        return self._issue(warp, now) + cycles

    # Copies ----------------------------------------------------------------------------------------------------

    def _bring(self, sm: Multiprocessor, start: float, sectors: trace.Sectors) -> float:
        """When sectors are in L2: memory brings those that nobody has asked for; others may still be under way."""
        rates, known = self._rates, self._in_l2
        if math.isinf(rates.memory_bytes) and not rates.memory_latency:
            return start
        there, fresh = start, []
        for first, behind in sectors:
            for sector in range(first, behind):
                if sector in known:
                    there = max(there, known[sector])
                else:
                    fresh.append(sector)
        if fresh:
            cycles = len(fresh) * trace.SECTOR / rates.memory_bytes
            came = sm.memory.take(start, cycles) + rates.memory_latency
            known.update(dict.fromkeys(fresh, came))
            there = max(there, came)
        return there

    def _fetch(self, sm: Multiprocessor, start: float, bytes_: int, sectors: trace.Sectors) -> float:
        """When bytes have come through L2."""
        rates = self._rates
        out_of_l2 = sm.gather.take(start, bytes_ / rates.gather_bytes) + rates.l2_latency
        return max(out_of_l2, self._bring(sm, start, sectors))

    def _prefetch(self, warp: _Warp, event: trace.Prefetch, now: float) -> float:
        start = self._issue(warp, now)
        self._bring(warp.sm, start, event.sectors)
        return start + 1

    def _come(self, sm: Multiprocessor, bytes_: int, when: float) -> None:
        """Bytes land in shared memory, which keeps its banks busy then."""

        def land(now: float) -> None:
            sm.shared.take(now, bytes_ / self._rates.shared_bytes)

        self._push(when, land)

    def _gather(self, warp: _Warp, event: trace.Gather, now: float) -> float:
        start = self._issue(warp, now)
        done = self._fetch(warp.sm, start, event.bytes, event.sectors)
        warp.gathered = max(warp.gathered, done)
        self._come(warp.sm, event.bytes, done)
        return start + 4

    def _gather_commit(self, warp: _Warp, event: object, now: float) -> float:
        warp.gathers.append(warp.gathered)
        return now

    def _gather_wait(self, warp: _Warp, event: trace.GatherWait, now: float) -> float:
        if event.pending < 0:
            return max(now, warp.gathered)
        done = warp.gathers[: max(0, len(warp.gathers) - event.pending)]
        warp.gathers = warp.gathers[len(done) :]
        return max([now, *done])

    def _gather_arrive(self, warp: _Warp, event: trace.GatherArrive, now: float) -> float:
        self._push(max(now, warp.gathered), lambda when: self._tell(event.barrier, event.arrivals, 0, when))
        return self._issue(warp, now) + 1

    def _landing(self, warp: _Warp, event: trace.Landing, now: float) -> float:
        rates, receiver = self._rates, self._sms[event.to]
        if event.stored:
            served = warp.sm.cluster.take(now, event.bytes / rates.cluster_bytes)
            done, after = (
                served + rates.cluster_latency,
                max(now + 1, served - rates.cluster_queue / rates.cluster_bytes),
            )
        else:
            # Where it comes from is not recorded: from memory, as if nobody had asked for it before.
            done = max(
                receiver.gather.take(now, event.bytes / rates.gather_bytes) + rates.l2_latency,
                receiver.memory.take(now, event.bytes / rates.memory_bytes) + rates.memory_latency,
            )
            after = now + 1

        def land(when: float) -> None:
            receiver.shared.take(when, event.bytes / rates.shared_bytes)
            self._tell(event.barrier, 0, -event.bytes, when)

        self._push(done, land)
        return after

    def _bulk_store(self, warp: _Warp, event: trace.BulkStore, now: float) -> float:
        warp.sm.shared.take(now, event.bytes / self._rates.shared_bytes)
        warp.stored = warp.sm.store.take(now, event.bytes / self._rates.store_bytes) + self._rates.l2_latency
        return self._issue(warp, now) + 1

    def _bulk_wait(self, warp: _Warp, event: object, now: float) -> float:
        return max(now, warp.stored)

    # Barriers --------------------------------------------------------------------------------------------------

    def _tell(self, number: int, arrivals: int, bytes_: int, now: float) -> None:
        barrier = self._barriers[number]
        barrier.pending -= arrivals
        barrier.bytes += bytes_
        if barrier.pending or barrier.bytes:
            return
        barrier.pending = barrier.count
        barrier.over.append(now)
        waiting, barrier.waiting = barrier.waiting, []
        for warp, phases in waiting:
            if len(barrier.over) >= phases:
                self._leave(warp, now + self._rates.wake)
            else:
                barrier.waiting.append((warp, phases))

    def _arrive(self, warp: _Warp, event: trace.Arrive, now: float) -> float:
        start = self._issue(warp, now)
        when = start if event.to == warp.recorded.cta else start + self._rates.cluster_latency
        self._push(when, lambda at: self._tell(event.barrier, event.arrivals, event.bytes, at))
        return start + 1

    def _wait(self, warp: _Warp, event: trace.Wait, now: float) -> float | None:
        barrier = self._barriers[event.barrier]
        if len(barrier.over) >= event.phases:
            return self._issue(warp, now) + 4
        barrier.waiting.append((warp, event.phases))
        return None

    def _settle(self, meeting: _Meeting, now: float) -> None:
        if not meeting.arrived or meeting.arrived < meeting.expected:
            return
        meeting.arrived = 0
        meeting.generation += 1
        meeting.over = now
        waiting, meeting.waiting = meeting.waiting, []
        for warp in waiting:
            self._leave(warp, now + self._rates.named)

    def _exit(self, cta: int, now: float) -> None:
        """A warp has ended: barriers of all that live wait for one less."""
        self._live[cta] -= _WARP
        cluster = self._clusters[self._trace.clusters[cta]]
        cluster.expected -= _WARP
        self._settle(cluster, now)
        for (where, _), meeting in self._named.items():
            if where == cta and meeting.of_all:
                meeting.expected = self._live[cta]
                self._settle(meeting, now)

    def _meet(self, warp: _Warp, event: trace.Named, now: float) -> float | None:
        meeting = self._named.setdefault((warp.recorded.cta, event.number), _Meeting())
        start = self._issue(warp, now)
        meeting.of_all = not event.expected
        meeting.expected = event.expected or self._live[warp.recorded.cta]
        meeting.arrived += event.threads
        if event.waits:
            meeting.waiting.append(warp)
        self._settle(meeting, start)
        return None if event.waits else start + 1

    def _cluster_arrive(self, warp: _Warp, event: trace.ClusterArrive, now: float) -> float:
        meeting = self._clusters[self._trace.clusters[warp.recorded.cta]]
        warp.generation = meeting.generation
        start = self._issue(warp, now) + (0.0 if event.relaxed else self._rates.gpu_fence)

        def arrive(when: float) -> None:
            meeting.arrived += event.threads
            self._settle(meeting, when)

        self._push(start + self._rates.cluster_latency, arrive)
        return start + 1

    def _cluster_wait(self, warp: _Warp, event: object, now: float) -> float | None:
        meeting = self._clusters[self._trace.clusters[warp.recorded.cta]]
        if meeting.generation > warp.generation:
            return max(now, meeting.over) + self._rates.wake
        meeting.waiting.append(warp)
        return None

    # Products --------------------------------------------------------------------------------------------------

    def _product(self, warp: _Warp, event: trace.Product, now: float) -> float | None:
        issued = self._issue(warp, now)
        warp.products += 1
        core = warp.sm.tensor[warp.scheduler]
        core.queue.append((warp, event))
        warp.queued += 1
        self._push(issued, lambda when: self._multiply(core, when))
        if warp.queued <= self._rates.product_queue:
            return issued + 2
        warp.held = True
        return None

    def _multiply(self, core: TensorCore, now: float) -> None:
        """Begin the next product, unless one is under way. Warps take turns."""
        if core.busy_with is not None or not core.queue:
            return
        at = next((k for k, (warp, _) in enumerate(core.queue) if warp is not core.last), 0)
        warp, event = core.queue.pop(at)
        core.busy_with = core.last = warp
        warp.queued -= 1
        if warp.held:
            warp.held = False
            self._leave(warp, now + 2)
        read = warp.sm.shared.take(now, event.bytes / self._rates.shared_bytes / SCHEDULERS)
        cycles = event.columns / self._rates.tensor_columns
        core.busy += cycles
        self._push(max(now + cycles, read), lambda when: self._multiplied(core, warp, when))

    def _multiplied(self, core: TensorCore, warp: _Warp, now: float) -> None:
        core.busy_with = None
        warp.multiplied.append(now)
        if warp.awaits and len(warp.multiplied) >= warp.awaits:
            warp.awaits = 0
            self._leave(warp, now + self._rates.product_latency)
        self._multiply(core, now)

    def _warp_product(self, warp: _Warp, event: trace.WarpProduct, now: float) -> float:
        rates, start = self._rates, self._issue(warp, now)
        cycles = event.multiplications / rates.warp_products
        served = warp.sm.multiplier[warp.scheduler].take(start, cycles)
        warp.ready[event.load] = served - cycles + rates.warp_product_latency
        return max(start + 1, served - cycles)

    def _product_commit(self, warp: _Warp, event: object, now: float) -> float:
        warp.groups.append(warp.products)
        return now

    def _product_wait(self, warp: _Warp, event: trace.ProductWait, now: float) -> float | None:
        done = warp.groups[: max(0, len(warp.groups) - event.pending)]
        warp.groups = warp.groups[len(done) :]
        if not done or not done[-1]:
            return now
        if len(warp.multiplied) >= done[-1]:
            return max(now, warp.multiplied[done[-1] - 1] + self._rates.product_latency)
        warp.awaits = done[-1]
        return None


def replay(recorded: Trace, rates: Rates | None = None, resident: int = 1) -> Replayed:
    """When everything in a trace would happen, with so many CTAs to a multiprocessor.

    Raises Stuck for a trace that waits for what never comes.
    """
    return _Replay(recorded, rates or Rates(), resident).run()
