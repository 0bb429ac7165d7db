"""The pipeline of a pair of CTAs in the sm_90a backward as a model: no deadlock, no overrun barrier, no race.

Roles are coroutines that follow pair_producer.cuh, pair_consumer.cuh, pair_gradients.cuh, pair_statistics.cuh and
pair_attention.cuh step by step, with the barriers of pair_storage.cuh and their parities. Everything that one CTA sends
to the other is an agent of its own, which lands at any time until it says so. Agents, barriers and the race rule are
those of the forward's model. An arrival at the other CTA's barrier counts as an order between the two, which in the
letter of the ISA it is not (docs/interpreter.md).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from schedule_machine import Agent, Barrier, Clock, Item, Machine, Steps, Tag, Violation, Warp, join, schedule

WARPS = 2  # per warpgroup; the kernel has four. With two the first has the statistics of the own heads.
CONSUMERS = (0, 1)
KINDS = (P, DS) = ("P", "dS")


class Link(Barrier):
    """Between the CTAs: what is sent lands in no particular order. Who waits for it waits for something to be sent."""

    def __init__(self) -> None:
        super().__init__("link", 1, [])
        self.under_way: list[tuple[Barrier, Agent]] = []
        self.threads: dict[str, Steps] = {}

    def done(self, parity: int) -> bool:
        return bool(self.under_way) or len(self.threads) == 1

    def deliveries(self, threads: dict[str, Steps], rng: random.Random) -> Steps:
        """A thread beside `threads`, which ends when all of them have."""
        self.threads = threads
        while True:
            yield self, 0
            if not self.under_way:
                return
            barrier, store = self.under_way.pop(rng.randrange(len(self.under_way)))
            barrier.deliver(store)
            yield None


class Cta(Machine):
    """One CTA of the pair."""

    def __init__(self, pair: Pair, rank: int) -> None:
        super().__init__(pair.drop)
        self.pair, self.rank = pair, rank
        self.consumers = [f"{rank}/c{who}.{w}" for who in CONSUMERS for w in range(WARPS)]
        self.producers = [f"{rank}/p{w}" for w in range(WARPS)]
        first, both = self.consumers[:WARPS], self.consumers
        self.heads_full = Barrier("heads_full", 1, both)
        self.full = Barrier("full", 2 * WARPS, both)
        self.free = Barrier("free", len(both), self.producers, starts_free=True)
        self.room = Barrier("room", len(both), both, starts_free=True)
        self.partial = {
            kind: [Barrier(f"partial {kind} {name}", 1, [name]) for name in self.consumers] for kind in KINDS
        }
        self.ready = Barrier("ready", len(both), both)
        self.delta_in = Barrier("delta_in", 1, [f"{rank}/c{who}.0" for who in CONSUMERS])
        self.distribution_in = Barrier("distribution_in", 1, first)
        self.statistics_out = Barrier("statistics_out", len(both), both)
        self.slots_in = Barrier("slots_in", 1, self.producers + both)
        self.used_from_afar: list[tuple[str, int]] = []
        self.left_at: Clock = {}

    @property
    def other(self) -> Cta:
        return self.pair.ctas[1 - self.rank]

    def reach(self, agent: Agent) -> None:
        """An agent of the other CTA uses this one's memory."""
        self.used_from_afar.append((agent.name, agent.tick()))

    def leave(self, agent: Agent) -> None:
        """A thread of this CTA has ended; with the last one its memory is gone."""
        join(self.left_at, agent.clock)

    def require_left_alone(self) -> None:
        for who, time in self.used_from_afar:
            if self.left_at.get(who, 0) < time:
                raise Violation(f"CTA {self.rank} leaves while {who} may use its memory")

    def send(self, agent: Agent, items: Sequence[Item], tag: Tag, barrier: Barrier) -> Steps:
        """`st.async` of an agent of this CTA to the other one, whose barrier it delivers to."""
        store = Agent(f"{self.rank}/st.async of {items[0]} {tag} by {agent.name}")
        store.follow(agent)
        for item in items:
            self.other.write(store, item, tag)
        self.other.reach(store)
        self.pair.link.under_way.append((barrier, store))
        yield None

    def producer(self, warp: int) -> Steps:
        me, copies, tma = (Agent(f"{self.rank}/{name}{warp}") for name in ("p", "cp.async", "tma"))
        phase = token_set = 0
        yield from self.pair.learn_slots(me, self)
        for number in range(self.pair.passes):
            if warp == 0:
                self.heads_full.arrive(me, expected=1)
                tma.follow(me)
                for item in (("q",), ("dout",)):
                    self.write(tma, item, (number,), generic=False)
                yield None
                self.heads_full.deliver(tma)
            for block in range(self.pair.blocks):
                tag = (number, block)
                self.write(me, ("tokens", 0 if self.drop == "second set of tokens" else token_set, warp), tag)
                token_set ^= 1
                yield from self.wait(me, self.free, phase ^ 1, "free")
                copies.follow(me)
                self.write(copies, ("k", warp), tag)
                yield None
                self.write(me, ("valid", warp), tag)
                self.full.arrive(me)
                self.full.arrive(copies)
                phase ^= 1
                yield None
            if number + 1 < self.pair.passes:
                yield from self.pair.meet(me, number & 1)
        self.leave(me)

    def threads(self) -> dict[str, Steps]:
        threads: dict[str, Steps] = {f"{self.rank}/p{w}": self.producer(w) for w in range(WARPS)}
        return threads | {
            f"{self.rank}/c{who}.{w}": Consumer(self, who, w).run_query() for who in CONSUMERS for w in range(WARPS)
        }


class Pair:
    """A query of two CTAs: `blocks` blocks of slots in each of `passes` passes; `drop` names the step left out.

    `global_memory` has the distribution.
    """

    def __init__(self, blocks: int, passes: int, rope: bool, distribution: bool = True, drop: str = "nothing") -> None:
        self.blocks, self.passes, self.rope, self.wants_distribution = blocks, passes, rope, distribution
        self.drop = drop
        self.link = Link()
        self.ctas = [Cta(self, rank) for rank in (0, 1)]
        everyone = [name for cta in self.ctas for name in cta.producers + cta.consumers]
        self.barrier = Barrier("cluster", len(everyone), everyone)
        self.global_memory = Machine()

    def meet(self, agent: Agent, parity: int) -> Steps:
        self.barrier.arrive(agent)
        yield from self.ctas[0].wait(agent, self.barrier, parity, "cluster barrier")

    def learn_slots(self, agent: Agent, cta: Cta) -> Steps:
        """Both CTAs have begun, which is not modelled. A thread of the first sends the second the number of slots."""
        if agent.name == "0/c0.0":
            yield from cta.send(agent, [("slots",)], (0,), cta.other.slots_in)
        elif cta.rank:
            if agent.name == "1/c0.0":
                cta.slots_in.arrive(agent, expected=1)
            yield from cta.wait(agent, cta.slots_in, 0, "slots_in")
            cta.read(agent, ("slots",), (0,))

    def run(self, seed: int) -> None:
        threads = {name: steps for cta in self.ctas for name, steps in cta.threads().items()}
        threads["link"] = self.link.deliveries(threads, random.Random(seed))
        schedule(threads, seed)
        for cta in self.ctas:
            cta.require_left_alone()


class Consumer(Warp[Cta]):
    """One warp of a consumer. What lives in registers is not modelled, but scores and gradients while they are made."""

    def __init__(self, cta: Cta, who: int, warp: int) -> None:
        super().__init__(cta, Agent(f"{cta.rank}/c{who}.{warp}"))
        self.who, self.warp = who, warp
        self.mma, self.sums_mma, self.query_mma, self.red = (
            Agent(f"{cta.rank}/{name}{who}.{warp}")
            for name in ("wgmma of scores", "wgmma of sums", "wgmma of dQ", "red")
        )
        self.parity = 0
        self.tag: tuple[int, int] = (0, 0)

    def keys(self) -> list[Item]:
        return [("k", row) for row in range(WARPS)]

    def weights(self, kind: str, consumers: Sequence[int]) -> list[Item]:
        """Tiles of P or dS, the halves of their rows that are this CTA's heads and the other's."""
        return [(kind, half, who, row) for half in ("own", "other") for who in consumers for row in range(WARPS)]

    def landing(self, kind: str) -> list[Item]:
        """Where the other CTA's part of S or dP comes."""
        return [(kind, "own", self.who, self.warp), ("spare", kind, self.who, self.warp)]

    def run_query(self) -> Steps:
        cta, pair = self.cta, self.cta.pair
        yield from pair.learn_slots(self.me, cta)
        for number in range(pair.passes):
            self.tag = (number, 0)
            yield from self.make_statistics(number)
            if pair.blocks:
                yield from self.wait_for_keys()
                self.issue_scores(self.tag)
                yield from self.finish_scores()
                yield from self.make_weights()
            for block in range(pair.blocks):
                more = block + 1 < pair.blocks
                yield from self.begin_gradients()
                yield from self.gradients(is_last=not more and number + 1 == pair.passes)
                self.parity ^= 1
                if more:
                    self.tag = (number, block + 1)
                    yield from self.wait_for_keys()
                self.issue_scores(self.tag)  # behind the last block in vain
                yield from self.finish_scores()
                if more:
                    yield from self.make_weights()
            self.end_pass(number)
            yield None
            if number + 1 < pair.passes:
                yield from self.meet_consumers(1, "statistics_out at the end of a pass")
                if self.who == 0 and self.warp == 0:
                    cta.write(self.me, ("pass",), (number + 1,))
                yield from pair.meet(self.me, number & 1)
        cta.leave(self.me)

    def make_statistics(self, number: int) -> Steps:
        cta = self.cta
        self.read_pass(number)
        if self.who == 0 and self.warp == 0:
            cta.delta_in.arrive(self.me, expected=len(CONSUMERS))
        yield from self.wait(cta.heads_full, number & 1, "heads_full")
        cta.read(self.me, ("dout",), (number,))
        self.fence("fence behind dO")
        if self.warp == 0:
            yield from self.wait(cta.delta_in, number & 1, "delta_in")
            cta.read(self.me, ("other delta", self.who), (number,))
            cta.write(self.me, ("statistics", self.who), (number,))
        else:
            yield from cta.send(self.me, [("other delta", self.who)], (number,), cta.other.delta_in)
        yield from self.meet_consumers(0, "statistics_out")

    def meet_consumers(self, time: int, step: str) -> Steps:
        self.cta.statistics_out.arrive(self.me)
        yield from self.wait(self.cta.statistics_out, time, step)

    def end_pass(self, number: int) -> None:
        if self.who == 0:
            for who in CONSUMERS:
                self.cta.read(self.me, ("statistics", who), (number,))
        self.read_pass(number)

    def read_pass(self, number: int) -> None:
        self.cta.read(self.me, ("pass",), (number,) if number else ())

    def wait_for_keys(self) -> Steps:
        yield from self.wait(self.cta.full, self.parity, "full")
        self.fence("fence behind gathered rows")

    def issue_scores(self, tag: tuple[int, int]) -> None:
        self.issue(self.mma, [("q",)], tag[:1])
        self.issue(self.mma, self.keys(), tag)
        self.cta.write(self.mma, ("scores", self.who, self.warp), tag, generic=False)

    def finish_scores(self, of: str = "S") -> Steps:
        yield None
        self.collect(self.mma, f"wgmma wait of {of}")

    def make_weights(self) -> Steps:
        cta = self.cta
        self.read_validity()
        cta.read(self.me, ("scores", self.who, self.warp), self.tag, "registers")
        yield from self.wait(cta.room, self.parity ^ 1, "room")
        yield from self.hand_over(P)
        if cta.pair.rope:
            yield from self.make_probabilities()
        self.issue(self.mma, [("dout",)], self.tag[:1])
        self.issue(self.mma, self.keys(), self.tag)
        cta.write(self.mma, ("gradients", self.who, self.warp), self.tag, generic=False)
        if not cta.pair.rope:
            yield from self.make_probabilities()
        yield from self.finish_scores("dP")
        cta.read(self.me, ("gradients", self.who, self.warp), self.tag, "registers")
        yield from self.hand_over(DS)
        yield from self.take_over(DS)
        yield from self.put_out(DS)
        # One thread of all says how much the other CTA sends: P and dS of each of its warps.
        speaks = self.who == 0 and self.warp == 0
        cta.ready.arrive(self.me, expected=len(KINDS) * len(cta.consumers) if speaks else 0)
        yield None

    def read_validity(self) -> None:
        token_set = 0 if self.cta.drop == "second set of tokens" else self.parity
        self.cta.read(self.me, ("tokens", token_set, self.warp), self.tag)
        for row in range(WARPS):
            self.cta.read(self.me, ("valid", row), self.tag)

    def partial(self, cta: Cta, kind: str) -> Barrier:
        return cta.partial[kind][self.who * WARPS + self.warp]

    def hand_over(self, kind: str) -> Steps:
        yield from self.cta.send(self.me, self.landing(kind), (*self.tag, "sent"), self.partial(self.cta.other, kind))

    def take_over(self, kind: str) -> Steps:
        mine = self.partial(self.cta, kind)
        mine.arrive(self.me, expected=1)
        yield from self.wait(mine, self.parity, f"partial of {kind}")
        for item in self.landing(kind):
            self.cta.read(self.me, item, (*self.tag, "sent"))
        self.cta.read(self.me, ("statistics", self.who), self.tag[:1])

    def make_probabilities(self) -> Steps:
        cta = self.cta
        yield from self.take_over(P)
        if cta.pair.wants_distribution:
            yield from self.sum_over_heads()
        yield from self.put_out(P)

    def sum_over_heads(self) -> Steps:
        cta = self.cta
        if cta.rank == 0:
            cta.write(self.me, ("distribution", self.who, self.warp), self.tag)
        else:
            item = ("other distribution", self.who, self.warp)
            yield from cta.send(self.me, [item], self.tag, cta.other.distribution_in)

    def put_out(self, kind: str) -> Steps:
        cta = self.cta
        cta.write(self.me, (kind, "own", self.who, self.warp), self.tag)
        cta.read(self.me, (kind, "own", self.who, self.warp), self.tag)
        yield from cta.send(self.me, [(kind, "other", self.who, self.warp)], self.tag, cta.other.ready)

    def begin_gradients(self) -> Steps:
        cta = self.cta
        yield from self.wait(cta.ready, self.parity, "ready")
        self.fence("fence behind P and dS")
        if self.who == 0 and cta.rank == 0 and cta.pair.wants_distribution:
            yield from self.add_distribution()

    def add_distribution(self) -> Steps:
        cta = self.cta
        if self.warp == 0:
            cta.distribution_in.arrive(self.me, expected=len(cta.consumers))
        yield from self.wait(cta.distribution_in, self.parity, "distribution_in")
        if self.warp == 0:
            for name in ("distribution", "other distribution"):
                for who in CONSUMERS:
                    for row in range(WARPS):
                        cta.read(self.me, (name, who, row), self.tag)
            self.red.follow(self.me)
            cta.pair.global_memory.write(self.red, ("attn_dist", self.tag[1]), self.tag)
        yield None

    def gradients(self, is_last: bool) -> Steps:
        cta = self.cta
        number = self.tag[:1]
        # dQ, and with it dKV of the RoPE, whose products are waited for sooner.
        self.issue(self.query_mma, self.weights(DS, CONSUMERS if cta.pair.rope else [self.who]), self.tag)
        self.issue(self.query_mma, [("q",)] if cta.pair.rope else [], number)
        self.issue(self.query_mma, self.keys(), self.tag)
        for tile in (0, 1):
            self.issue(self.sums_mma, self.weights(DS, CONSUMERS), self.tag)
            self.issue(self.sums_mma, self.weights(P, CONSUMERS), self.tag)
            self.issue(self.sums_mma, [("q",), ("dout",)], number)
            yield None
            if tile == 0:
                self.collect(self.query_mma, "wgmma wait of dQ")
                cta.free.arrive(self.me)
                yield None
            self.collect(self.sums_mma, "wgmma wait of dKV")
        if not is_last or not cta.has("nothing said behind the last block"):
            cta.other.reach(self.me)
            cta.other.room.arrive(self.me)
        yield None
