"""The pipeline of the sm_90a kernel as a model in plain Python: no deadlock, no overrun barrier, no race.

Roles are coroutines that follow producer.cuh, consumer.cuh and epilogue.cuh line by line, with the barriers of
storage.cuh and their parities. A thread of the model is a warp. Order between accesses to shared memory is tracked with
vector clocks, so a missing wait shows in almost any schedule, whether or not it does harm in that one:

- cp.async, TMA and wgmma are agents of their own, ordered behind the thread that issues them and ahead of whoever waits
  for their barrier or group;
- a write of the generic proxy that wgmma reads must also have a proxy fence between the two;
- what is read must be the value of the right query and block.

Source of the race rule: Flanagan and Freund, "FastTrack: efficient and precise dynamic race detection", PLDI 2009.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pytest

KERNEL = Path(__file__).resolve().parents[2] / "cuda" / "sparse_mla_fwd" / "sm90"
WARPS = 2  # per warpgroup; the kernel has four
PARTS = ((0, 2), (2, 4), (4, 6), (6, None))
LEFT_PARTS = 2
VALUE_TILES = 8
HALF_TILES = 4

Clock: TypeAlias = dict[str, int]
Item: TypeAlias = tuple[object, ...]
Tag: TypeAlias = tuple[int, ...]


class Violation(Exception):
    """The protocol does not hold."""


def join(into: Clock, other: Clock) -> None:
    for who, time in other.items():
        into[who] = max(into.get(who, 0), time)


@dataclass
class Agent:
    """A thread, or an asynchronous engine that works for one. `fenced`: what a proxy fence lies behind."""

    name: str
    clock: Clock = field(default_factory=dict)
    fenced: Clock = field(default_factory=dict)

    def tick(self) -> int:
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]

    def follow(self, other: Agent | Barrier) -> None:
        join(self.clock, other.clock)
        join(self.fenced, other.fenced)

    def fence(self) -> None:
        self.fenced = dict(self.clock)


class Barrier:
    """An mbarrier. `clock` is what the last completed phase released."""

    def __init__(self, name: str, count: int, waiters: Sequence[str], starts_free: bool = False) -> None:
        self.name, self.count, self.pending = name, count, count
        self.completed = 0
        self.before = 0 if starts_free else 1
        self.passed = dict.fromkeys(waiters, 0)
        self.clock: Clock = {}
        self.fenced: Clock = {}
        self._arrived = Agent(name)

    def arrive(self, agent: Agent) -> None:
        agent.tick()
        self._arrived.follow(agent)
        self.pending -= 1
        if self.pending == 0:
            self.pending = self.count
            self.completed += 1
            late = [who for who, passed in self.passed.items() if passed < self.completed - self.before]
            if late:
                raise Violation(f"{self.name} overruns {late}")
            self.clock, self.fenced = dict(self._arrived.clock), dict(self._arrived.fenced)

    def done(self, parity: int) -> bool:
        """mbarrier.try_wait.parity: the phase before the current one has that parity."""
        return (self.completed - 1) % 2 == parity

    def passed_by(self, agent: Agent, waited: bool) -> None:
        self.passed[agent.name] += 1
        if waited:
            if self.completed != self.passed[agent.name] - 1 + self.before:
                raise Violation(f"{agent.name} took phase {self.completed} of {self.name} for an earlier one")
            agent.follow(self)


@dataclass
class Cell:
    tag: Tag = ()
    writer: str = ""
    written: int = 0
    generic: bool = True
    reads: Clock = field(default_factory=dict)


Steps: TypeAlias = Iterator[tuple[Barrier, int] | None]


class Model:
    """One CTA on queries of so many blocks each; `drop` names the steps that are left out."""

    def __init__(self, blocks: Sequence[int], rope: bool, drop: str = "nothing") -> None:
        self.blocks, self.rope, self.drop = blocks, rope, drop
        self.tiles = 9 if rope else 8
        self.cells: dict[Item, Cell] = {}
        self.live = True
        names = {role: [f"{role}{w}" for w in range(WARPS)] for role in ("c0.", "c1.", "p")}
        consumers = (names["c0."], names["c1."])
        words = 0 if drop == "arrival for the validity words" else WARPS
        self.q_full = Barrier("q_full", 2, consumers[0] + consumers[1])
        self.q_free = Barrier("q_free", 2 * WARPS, ["p0"], starts_free=True)
        self.full = [
            [Barrier(f"full[{b}][{part}]", WARPS + (words if part == 3 else 0), consumers[b]) for part in range(4)]
            for b in (0, 1)
        ]
        self.free = [
            [Barrier(f"free[{b}][{side}]", WARPS, names["p"], starts_free=True) for side in (0, 1)] for b in (0, 1)
        ]
        self.base_ready = Barrier("base_ready", WARPS, consumers[1])
        self.p_ready = [Barrier(f"p_ready[{w}]", WARPS, consumers[1 - w]) for w in (0, 1)]
        self.statistics_ready = [Barrier(f"statistics_ready[{w}]", WARPS, consumers[1 - w]) for w in (0, 1)]
        self.keys_read = Barrier("named 1", WARPS, consumers[0])

    def has(self, step: str) -> bool:
        return step != self.drop

    def wait(self, agent: Agent, barrier: Barrier, parity: int, step: str) -> Steps:
        waited = self.has(step)
        if waited:
            yield barrier, parity
        barrier.passed_by(agent, waited)

    # Shared memory ---------------------------------------------------------------------------------------------------

    def write(self, agent: Agent, item: Item, tag: Tag, generic: bool = True) -> None:
        cell = self.cells.setdefault(item, Cell())
        for who, time in (*cell.reads.items(), (cell.writer, cell.written)):
            if agent.clock.get(who, 0) < time and who != agent.name:
                raise Violation(f"{agent.name} writes {item} while {who} may use it")
        self.cells[item] = Cell(tag, agent.name, agent.tick(), generic)

    def read(self, agent: Agent, item: Item, tag: Tag, proxy: str = "generic") -> None:
        cell = self.cells.get(item, Cell())
        if agent.clock.get(cell.writer, 0) < cell.written:
            raise Violation(f"{agent.name} reads {item} before {cell.writer} has surely written it")
        if proxy == "async" and cell.generic and agent.fenced.get(cell.writer, 0) < cell.written:
            raise Violation(f"{agent.name} reads {item}: no proxy fence since {cell.writer} wrote it")
        if cell.tag != tag:
            raise Violation(f"{agent.name} reads {item}: {cell.tag}, not {tag}")
        cell.reads[agent.name] = agent.tick()

    def p_items(self, buffer: int) -> list[Item]:
        if self.rope and buffer == 0:
            return [("k", 0, VALUE_TILES, row) for row in range(WARPS)]
        return [("p", buffer, row) for row in range(WARPS)]

    def key_items(self, buffer: int, first: int, end: int) -> list[Item]:
        return [("k", buffer, tile, row) for tile in range(first, end) for row in range(WARPS)]

    # Roles -----------------------------------------------------------------------------------------------------------

    def producer(self, warp: int) -> Steps:
        me, copies, tma = Agent(f"p{warp}"), Agent(f"cp.async{warp}"), Agent("tma")
        phase, q_round = [0, 0], 0
        for query, blocks in enumerate(self.blocks):
            if warp == 0:
                yield from self.wait(me, self.q_free, q_round ^ 1, "q_free")
                self.q_full.arrive(me)
                tma.follow(me)
                self.write(tma, ("q",), (query,), generic=False)
                yield None
                self.q_full.arrive(tma)
            q_round ^= 1
            for block in range(blocks):
                b = block % 2
                for part, (first, end) in enumerate(PARTS):
                    if part == 0:
                        yield from self.wait(me, self.free[b][0], phase[b] ^ 1, "free left")
                    if part == LEFT_PARTS:
                        yield from self.wait(me, self.free[b][1], phase[b] ^ 1, "free right")
                    copies.follow(me)
                    for tile in range(first, end or self.tiles):
                        self.write(copies, ("k", b, tile, warp), (query, block))
                    yield None
                    self.full[b][part].arrive(copies)
                self.write(me, ("valid", b, warp), (query, block))
                if self.has("arrival for the validity words"):
                    self.full[b][3].arrive(me)
                phase[b] ^= 1
                yield None

    def consumer(self, who: int, warp: int) -> Steps:
        return Consumer(self, who, warp).run()

    def run(self, seed: int) -> None:
        """Random schedule: every thread has a speed of its own, so that roles run ahead as far as barriers let them."""
        rng = random.Random(seed)
        threads: dict[str, Steps] = {f"p{w}": self.producer(w) for w in range(WARPS)}
        threads |= {f"c{who}.{w}": self.consumer(who, w) for who in (0, 1) for w in range(WARPS)}
        waits: dict[str, tuple[Barrier, int]] = {}
        speed = {name: 10 ** rng.uniform(-2, 0) for name in threads}
        while threads:
            ready = [name for name in threads if name not in waits or waits[name][0].done(waits[name][1])]
            if not ready:
                raise Violation("deadlock: " + ", ".join(f"{name} at {b.name}" for name, (b, _) in waits.items()))
            name = rng.choices(ready, [speed[name] for name in ready])[0]
            waits.pop(name, None)
            try:
                step = next(threads[name])
            except StopIteration:
                del threads[name]
                continue
            if step is not None:
                waits[name] = step


class Consumer:
    """consumer.cuh and epilogue.cuh, one warp. Scores, P and the output live in registers and are not modelled."""

    def __init__(self, model: Model, who: int, warp: int) -> None:
        self.model, self.who, self.other, self.warp = model, who, 1 - who, warp
        self.me, self.mma = Agent(f"c{who}.{warp}"), Agent(f"wgmma{who}.{warp}")
        self.k_parity = self.p_parity = self.base_parity = self.q_parity = self.named_parity = 0
        self.query = 0

    def run(self) -> Steps:
        for query, blocks in enumerate(self.model.blocks):
            self.query = query
            yield from self.accumulate(blocks)
            yield from self.finish_rows()
            self.q_parity ^= 1

    def wait(self, barrier: Barrier, parity: int, step: str) -> Steps:
        yield from self.model.wait(self.me, barrier, parity, step)

    def issue(self, items: Sequence[Item], tag: Tag) -> None:
        self.mma.follow(self.me)
        for item in items:
            self.model.read(self.mma, item, tag, "async")

    def collect(self, step: str) -> None:
        if self.model.has(step):
            self.me.follow(self.mma)

    def scores(self, block: int, last: bool) -> Steps:
        model = self.model
        for part, (first, end) in enumerate(PARTS):
            yield from self.wait(model.full[self.who][part], self.k_parity, f"full {part}")
            if model.has("fence behind gathered rows"):
                self.me.fence()
            self.issue([("q",)], (self.query,))
            self.issue(model.key_items(self.who, first, end or model.tiles), (self.query, block))
        yield None
        self.collect("wgmma wait of scores")
        self.k_parity ^= 1
        if last or model.drop == "Q held until its last scores":
            model.q_free.arrive(self.me)
        for row in range(WARPS):
            model.read(self.me, ("valid", self.who, row), (self.query, block))

    def values(self, buffer: int, block: int) -> Steps:
        model, early = self.model, self.model.drop == "columns held until their products are done"
        first = self.who * HALF_TILES
        self.issue(model.key_items(buffer, first, first + HALF_TILES), (self.query, block))
        if buffer != self.who:
            self.issue(model.p_items(buffer), (self.query, block))
        if early:
            model.free[buffer][self.who].arrive(self.me)
        yield None
        self.collect("wgmma wait of values")
        if not early:
            model.free[buffer][self.who].arrive(self.me)

    def publish(self, block: int) -> Steps:
        model = self.model
        if self.who == 0 and model.rope:
            model.keys_read.arrive(self.me)
            yield from self.wait(model.keys_read, self.named_parity, "named barrier")
            self.named_parity ^= 1
        model.write(self.me, model.p_items(self.who)[self.warp], (self.query, block))
        if model.has("fence behind P"):
            self.me.fence()
        model.p_ready[self.who].arrive(self.me)
        yield None

    def share_base(self, block: int) -> None:
        self.model.write(self.me, ("base", self.who, self.warp), (self.query, block))

    def read_base(self, block: int) -> None:
        self.model.read(self.me, ("base", self.other, self.warp), (self.query, block))

    def wait_for_other_base(self, block: int, step: str) -> Steps:
        yield from self.wait(self.model.base_ready, self.base_parity, step)
        self.base_parity ^= 1
        self.read_base(block)

    def wait_for_other_probabilities(self) -> Steps:
        yield from self.wait(self.model.p_ready[self.other], self.p_parity, f"P of {self.other}")
        self.p_parity ^= 1

    def first_block(self, block: int, last: bool) -> Steps:
        yield from self.scores(block, last)
        self.share_base(block)
        self.model.base_ready.arrive(self.me)
        yield None
        yield from self.publish(block)
        yield from self.values(self.who, block)

    def first_of_pair(self, block: int, last: bool) -> Steps:
        yield from self.first_block(block, last)
        yield from self.wait_for_other_probabilities()
        self.read_base(block + 1)
        yield from self.values(self.other, block + 1)

    def second_of_pair(self, block: int, last: bool) -> Steps:
        yield from self.scores(block + 1, last)
        yield from self.wait_for_other_base(block, "base")
        self.share_base(block + 1)
        yield from self.publish(block + 1)
        yield from self.wait_for_other_probabilities()
        yield from self.values(self.other, block)
        yield from self.values(self.who, block + 1)

    def accumulate(self, blocks: int) -> Steps:
        model = self.model
        yield from self.wait(model.q_full, self.q_parity, "q_full")
        single = blocks % 2 != 0
        last_pair = -1 if self.who == 0 and single else blocks // 2 - 1
        if blocks < 1 + self.who and model.has("Q given up by who has no block"):
            model.q_free.arrive(self.me)
        step = self.first_of_pair if self.who == 0 else self.second_of_pair
        for pair in range(blocks // 2):
            yield from step(2 * pair, pair == last_pair)
        if single and self.who == 0:
            yield from self.first_block(blocks - 1, True)
        elif single:
            yield from self.wait_for_other_base(blocks - 1, "base of a single block")
            yield from self.wait_for_other_probabilities()
            yield from self.values(self.other, blocks - 1)

    def finish_rows(self) -> Steps:
        model, ready = self.model, self.model.statistics_ready
        which = {w: 0 if model.drop == f"second set of statistics of {w}" else self.q_parity for w in (0, 1)}
        model.write(self.me, ("statistics", which[self.who], self.who, self.warp), (self.query,))
        yield None
        if self.who == 0:
            yield from self.wait(ready[1], self.q_parity, "statistics of 1")
            ready[0].arrive(self.me)
        else:
            ready[1].arrive(self.me)
            yield from self.wait(ready[0], self.q_parity, "statistics of 0")
        yield None
        model.read(self.me, ("statistics", which[self.other], self.other, self.warp), (self.query,))


MUTATIONS = (
    *("q_free", "free left", "free right", "q_full", "full 0", "full 1", "full 2", "full 3"),
    *("base", "P of 0", "P of 1", "named barrier", "statistics of 0", "statistics of 1"),
    *("wgmma wait of scores", "wgmma wait of values", "fence behind gathered rows", "fence behind P"),
    *("arrival for the validity words", "Q held until its last scores", "Q given up by who has no block"),
    *("columns held until their products are done", "second set of statistics of 0", "second set of statistics of 1"),
)


def queries(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice((0, 1, 2, 3, 3, 4, 5)) for _ in range(rng.randint(1, 6))]


@pytest.mark.parametrize("rope", [True, False], ids=["d576", "d512"])
def test_every_schedule_is_free_of_races_and_deadlocks(rope: bool) -> None:
    for seed in range(150):
        Model(queries(seed), rope).run(seed)


@pytest.mark.parametrize("counts", [(a, b, c) for a in range(4) for b in range(4) for c in (0, 1, 2, 3)], ids=str)
def test_any_order_of_short_queries(counts: tuple[int, ...]) -> None:
    for seed in range(2):
        Model(counts, rope=True).run(seed)


@pytest.mark.parametrize("drop", MUTATIONS)
def test_the_model_misses_what_is_taken_away(drop: str) -> None:
    """Every wait, fence and early arrival is needed, and the model sees it."""
    with pytest.raises(Violation):
        for seed in range(40):
            Model(queries(seed), rope=True, drop=drop).run(seed)


def test_without_the_rope_tile_no_named_barrier_is_needed() -> None:
    for seed in range(20):
        Model(queries(seed), rope=False, drop="named barrier").run(seed)


PATTERNS: dict[str, Callable[[str], int]] = {
    "waits": lambda text: len(re.findall(r"\.wait\(", text)),
    "arrivals": lambda text: len(re.findall(r"\.arrive\w*\(", text)),
    "fences": lambda text: len(re.findall(r"fence_async_shared\(", text)),
    "named": lambda text: len(re.findall(r"named_barrier_sync\(", text)),
    "collects": lambda text: len(re.findall(r"wgmma_wait<", text)),
}


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("producer.cuh", (3, 3, 0, 0, 0)),
        ("consumer.cuh", (4, 5, 2, 1, 2)),
        ("epilogue.cuh", (2, 2, 0, 0, 0)),
        ("sparse_mla_fwd.cu", (0, 0, 0, 0, 0)),
    ],
)
def test_the_sources_have_the_steps_of_the_model(file: str, counts: tuple[int, ...]) -> None:
    """A kernel that waits or arrives in more or fewer places wants its model looked at again."""
    text = re.sub(r"//[^\n]*", "", (KERNEL / file).read_text())
    assert tuple(count(text) for count in PATTERNS.values()) == counts
