"""What models of kernel pipelines are made of: threads as coroutines, mbarriers, shared memory that knows its readers.

Order between accesses to shared memory is tracked with vector clocks, so a missing wait shows in almost any schedule,
whether or not it does harm in that one:

- cp.async, TMA and wgmma are agents of their own, ordered behind the thread that issues them and ahead of whoever waits
  for their barrier or group;
- a write of the generic proxy that wgmma reads must also have a proxy fence between the two, and so must any use by it
  of what TMA writes next;
- what is read must be the value that the reader means.

Source of the race rule: Flanagan and Freund, "FastTrack: efficient and precise dynamic race detection", PLDI 2009.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

Clock: TypeAlias = dict[str, int]
Item: TypeAlias = tuple[object, ...]
Tag: TypeAlias = tuple[object, ...]


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
        self.name, self.count, self.pending, self.outstanding = name, count, count, 0
        self.completed = 0
        self.before = 0 if starts_free else 1
        self.passed = dict.fromkeys(waiters, 0)
        self.clock: Clock = {}
        self.fenced: Clock = {}
        self._arrived = Agent(name)

    def arrive(self, agent: Agent, expected: int = 0) -> None:
        """`expected`: how many more deliveries the phase waits for."""
        agent.tick()
        self._arrived.follow(agent)
        self.pending -= 1
        self.outstanding += expected
        self._complete()

    def deliver(self, agent: Agent) -> None:
        """What the phase expects besides arrivals, before or after it has been told to."""
        agent.tick()
        self._arrived.follow(agent)
        self.outstanding -= 1
        self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.outstanding == 0:
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
    ordinary: Clock = field(default_factory=dict)  # those of them that are the generic proxy's


Steps: TypeAlias = Iterator[tuple[Barrier, int] | None]


class Machine:
    """The shared memory of a CTA, and steps of threads on it; `drop` names the steps that are left out."""

    def __init__(self, drop: str = "nothing") -> None:
        self.cells: dict[Item, Cell] = {}
        self.drop = drop

    def has(self, step: str) -> bool:
        return step != self.drop

    def wait(self, agent: Agent, barrier: Barrier, parity: int, step: str) -> Steps:
        waited = self.has(step)
        if waited:
            yield barrier, parity
        barrier.passed_by(agent, waited)

    def write(self, agent: Agent, item: Item, tag: Tag, generic: bool = True) -> None:
        self.require_unused(agent, item)
        if not generic:
            self.require_fenced(agent, item)
        self.cells[item] = Cell(tag, agent.name, agent.tick(), generic)

    def require_unused(self, agent: Agent, item: Item) -> None:
        """Nobody else may still be using it when the agent puts its memory to another use."""
        cell = self.cells.setdefault(item, Cell())
        for who, time in (*cell.reads.items(), (cell.writer, cell.written)):
            if agent.clock.get(who, 0) < time and who != agent.name:
                raise Violation(f"{agent.name} writes {item} while {who} may use it")

    def require_fenced(self, agent: Agent, item: Item) -> None:
        """A proxy fence lies behind what the generic proxy did with memory that the agent writes past it."""
        cell = self.cells[item]
        used = (*cell.ordinary.items(), *([(cell.writer, cell.written)] if cell.generic else []))
        for who, time in used:
            if agent.fenced.get(who, 0) < time:
                raise Violation(f"{agent.name} writes {item}: no proxy fence since {who} used it")

    def read(self, agent: Agent, item: Item, tag: Tag, proxy: str = "generic") -> None:
        cell = self.cells.get(item, Cell())
        if agent.clock.get(cell.writer, 0) < cell.written:
            raise Violation(f"{agent.name} reads {item} before {cell.writer} has surely written it")
        if proxy == "async" and cell.generic and agent.fenced.get(cell.writer, 0) < cell.written:
            raise Violation(f"{agent.name} reads {item}: no proxy fence since {cell.writer} wrote it")
        if cell.tag != tag:
            raise Violation(f"{agent.name} reads {item}: {cell.tag}, not {tag}")
        cell.reads[agent.name] = agent.tick()
        if proxy == "generic":
            cell.ordinary[agent.name] = cell.reads[agent.name]


CtaT = TypeVar("CtaT", bound=Machine)


class Warp(Generic[CtaT]):
    """A warp of a CTA: `me` is its agent."""

    def __init__(self, cta: CtaT, me: Agent) -> None:
        self.cta, self.me = cta, me

    def wait(self, barrier: Barrier, parity: int, step: str) -> Steps:
        yield from self.cta.wait(self.me, barrier, parity, step)

    def fence(self, step: str) -> None:
        """Between the proxies."""
        if self.cta.has(step):
            self.me.fence()

    def issue(self, mma: Agent, items: Sequence[Item], tag: Tag) -> None:
        """Products that read the items, which are `tag`'s."""
        mma.follow(self.me)
        for item in items:
            self.cta.read(mma, item, tag, "async")

    def collect(self, mma: Agent, step: str) -> None:
        """Waits for these products."""
        if self.cta.has(step):
            self.me.follow(mma)


def schedule(threads: dict[str, Steps], seed: int) -> None:
    """Random schedule: every thread has a speed of its own, so that roles run ahead as far as barriers let them."""
    rng = random.Random(seed)
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


def steps_of(file: Path) -> tuple[int, ...]:
    """How many steps of each kind a source of a kernel has, in the order of PATTERNS.

    A kernel that waits or arrives in more or fewer places wants its model looked at again.
    """
    text = re.sub(r"//[^\n]*", "", file.read_text())
    return tuple(count(text) for count in PATTERNS.values())


PATTERNS: dict[str, Callable[[str], int]] = {
    "waits": lambda text: len(re.findall(r"\.wait\(", text)),
    "arrivals": lambda text: len(re.findall(r"\.arrive\w*\(", text)),
    "fences": lambda text: len(re.findall(r"fence_async_shared\(", text)),
    "named": lambda text: len(re.findall(r"named_barrier_\w+\(", text)),
    "collects": lambda text: len(re.findall(r"wgmma_wait<", text)),
    "cluster": lambda text: len(re.findall(r"cluster_(?:arrive|wait)\(", text)),
}
"""What a kernel's sources are searched for, to see that a model has as many steps of each kind."""
