"""The pipeline of the sm_90a kernel where heads are few: no deadlock, no overrun barrier, no race.

The roles of few_heads_scores.cuh and few_heads_values.cuh with the barriers of few_heads_storage.cuh, in the model that
test_sparse_mla_fwd_schedule.py describes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from schedule_machine import Agent, Barrier, Item, Steps, Violation, steps_of
from test_sparse_mla_fwd_schedule import KERNEL, VALUE_TILES, WARPS, Cluster, Consumer, Model, queries

BEGINS = (0, 2, 4, 6)  # first column tile of each part
LAST = len(BEGINS) - 1
DEEP, SHALLOW = 3, 2  # buffers of a part


@dataclass
class Ring:
    """Buffers used in turn."""

    stages: int
    turn: int = 0

    @property
    def stage(self) -> int:
        return self.turn % self.stages

    @property
    def full(self) -> int:
        return self.turn // self.stages % 2


class Places:
    """Where a block's parts lie."""

    def __init__(self, deep_parts: int) -> None:
        self.deep_parts = deep_parts
        self.deep, self.shallow = Ring(DEEP), Ring(SHALLOW)

    def ring(self, part: int) -> Ring:
        return self.deep if part < self.deep_parts else self.shallow

    def advance(self) -> None:
        self.deep.turn += 1
        self.shallow.turn += 1


class FewHeads(Model):
    """One CTA of few heads."""

    def __init__(
        self,
        blocks: Sequence[int],
        deep_parts: int,
        drop: str = "nothing",
        cluster: Cluster | None = None,
        rank: int = 0,
    ) -> None:
        super().__init__(blocks, True, drop, cluster, rank)
        self.deep_parts = deep_parts
        own = self.prefix
        scores, values, producers = ([f"{own}{role}{w}" for w in range(WARPS)] for role in ("c0.", "c1.", "p"))
        words = 0 if drop == "arrival for the validity words" else WARPS
        parts = range(LAST + 1)
        self.full = [
            [Barrier(f"full[{s}][{part}]", WARPS + (words if part == LAST else 0), scores) for part in parts]
            for s in range(DEEP)
        ]
        self.free = [
            [Barrier(f"free[{s}][{p}]", WARPS, producers, starts_free=True) for p in parts[deep_parts:]]
            for s in range(SHALLOW)
        ]
        self.p_ready = [Barrier(f"p_ready[{s}]", WARPS, values) for s in range(SHALLOW)]
        self.statistics_ready = [Barrier(f"statistics_ready[{s}]", WARPS, values) for s in (0, 1)]
        self.columns_out = Barrier("named 1", WARPS, scores)

    def part_items(self, places: Places, part: int, tiles: int) -> list[Item]:
        end = tiles if part == LAST else BEGINS[part + 1]
        return [("k", places.ring(part).stage, tile, row) for tile in range(BEGINS[part], end) for row in range(WARPS)]

    def gather(self, me: Agent, copies: Agent, warp: int, tag: tuple[int, int], places: Places) -> Steps:
        for part in range(LAST + 1):
            ring = places.ring(part)
            if part >= self.deep_parts:
                yield from self.wait(me, self.free[ring.stage][part - self.deep_parts], ring.full ^ 1, f"free {part}")
            copies.follow(me)
            for item in self.part_items(places, part, self.tiles):
                if item[-1] == warp:
                    self.write(copies, item, tag)
            yield None
            self.full[ring.stage][part].arrive(copies)
        self.write(me, ("valid", places.shallow.stage, warp), tag)
        if self.has("arrival for the validity words"):
            self.full[places.shallow.stage][LAST].arrive(me)
        places.advance()
        yield None

    def producer(self, warp: int) -> Steps:
        own = self.prefix
        me, copies, tma = Agent(f"{own}p{warp}"), Agent(f"{own}cp.async{warp}"), Agent(f"{own}tma")
        places = Places(self.deep_parts)
        for query, blocks in enumerate(self.blocks):
            if warp == 0:
                yield from self.wait(me, self.q_free, query % 2 ^ 1, "q_free")
                self.write(me, ("blocks",), (query,))
                self.q_full.arrive(me)
                tma.follow(me)
                self.write(tma, ("q",), (query,), generic=False)
                yield None
                self.q_full.arrive(tma)
            for block in range(blocks):
                yield from self.gather(me, copies, warp, (query, block), places)

    def consumer(self, who: int, warp: int) -> Steps:
        return (Values if who else Scores)(self, warp).run()


class Role(Consumer):
    """What both consumers do: one query after another."""

    def __init__(self, model: FewHeads, who: int, warp: int) -> None:
        super().__init__(model, who, warp)
        self.cta = model
        self.places = Places(model.deep_parts)

    def run(self) -> Steps:
        for query, blocks in enumerate(self.cta.blocks):
            self.query = query
            yield from self.wait(self.cta.q_full, query % 2, "q_full")
            self.cta.read(self.me, ("blocks",), (query,))
            yield from self.accumulate(blocks)
            yield from self.finish()

    def accumulate(self, blocks: int) -> Steps:
        raise NotImplementedError

    def finish(self) -> Steps:
        raise NotImplementedError

    def leave(self) -> Steps:
        assert self.cta.cluster is not None
        yield from self.merge(self.cta.cluster)


class Scores(Role):
    """few_heads_scores.cuh, one warp."""

    def __init__(self, model: FewHeads, warp: int) -> None:
        super().__init__(model, 0, warp)
        self.exchanges = 0

    def exchange(self, tag: tuple[int, int]) -> Steps:
        cta = self.cta
        where = 0 if cta.drop == "second set of columns" else self.exchanges % 2
        cta.write(self.me, ("columns", where, self.warp), tag)
        cta.columns_out.arrive(self.me)
        yield from self.wait(cta.columns_out, self.exchanges % 2, "named barrier of the columns")
        self.exchanges += 1
        for other in range(WARPS):
            cta.read(self.me, ("columns", where, other), tag)
            yield None

    def accumulate(self, blocks: int) -> Steps:
        cta = self.cta
        if blocks == 0 and cta.has("Q given up without a block"):
            cta.q_free.arrive(self.me)
        for block in range(blocks):
            tag, places = (self.query, block), self.places
            for part in range(LAST + 1):
                ring = places.ring(part)
                yield from self.wait(cta.full[ring.stage][part], ring.full, f"full {part}")
                if cta.has("fence behind gathered rows"):
                    self.me.fence()
                self.issue([("q",)], (self.query,))
                self.issue(cta.part_items(places, part, cta.tiles), tag)
            yield None
            self.collect("wgmma wait of scores")
            if block == blocks - 1 or cta.drop == "Q held until its last scores":
                cta.q_free.arrive(self.me)
            stage = places.shallow.stage
            for row in range(WARPS):
                cta.read(self.me, ("valid", stage, row), tag)
            yield from self.exchange(tag)
            if self.warp == 0:
                cta.write(self.me, ("base", stage), tag)
            cta.write(self.me, ("p", stage, self.warp), tag)
            if cta.has("fence behind P"):
                self.me.fence()
            cta.p_ready[stage].arrive(self.me)
            yield None
            places.advance()

    def finish(self) -> Steps:
        cta, which = self.cta, self.query % 2
        yield from self.exchange((self.query, -1))
        if cta.cluster is not None:
            yield from self.leave()
            return
        if cta.drop == "second set of results":
            which = 0
        if self.warp == 0:
            cta.write(self.me, ("result", which), (self.query,))
        yield None
        cta.statistics_ready[self.query % 2].arrive(self.me)


class Values(Role):
    """few_heads_values.cuh, one warp."""

    def __init__(self, model: FewHeads, warp: int) -> None:
        super().__init__(model, 1, warp)

    def accumulate(self, blocks: int) -> Steps:
        if self.cta.has("number of blocks read before Q is free"):
            self.cta.q_free.arrive(self.me)
        for block in range(blocks):
            yield from self.multiply((self.query, block))

    def multiply(self, tag: tuple[int, int]) -> Steps:
        cta, places = self.cta, self.places
        stage = places.shallow.stage
        yield from self.wait(cta.p_ready[stage], places.shallow.full, "P")
        cta.read(self.me, ("base", stage), tag)
        before = Agent("nothing")
        for part in range(LAST + 1):
            self.issue(cta.part_items(places, part, VALUE_TILES), tag)
            self.issue([("p", stage, row) for row in range(WARPS)], tag)
            issued = Agent("wgmma group", dict(self.mma.clock), dict(self.mma.fenced))
            yield None
            if part > cta.deep_parts:
                yield from self.give_back(part - 1, before)
            before = issued
        yield from self.give_back(LAST, before)
        places.advance()

    def give_back(self, part: int, done: Agent) -> Steps:
        """The wait for all groups up to one, and the part that it used."""
        if self.cta.has("wgmma wait of values"):
            self.me.follow(done)
        self.cta.free[self.places.shallow.stage][part - self.cta.deep_parts].arrive(self.me)
        yield None

    def finish(self) -> Steps:
        cta, which = self.cta, self.query % 2
        if cta.cluster is not None:
            yield from self.leave()
            return
        yield from self.wait(cta.statistics_ready[which], self.query // 2 % 2, "statistics")
        cta.read(self.me, ("result", 0 if cta.drop == "second set of results" else which), (self.query,))


class FewHeadsCluster(Cluster):
    """CTAs of few heads that share the slots of one query."""

    def __init__(self, blocks: Sequence[int], deep_parts: int, drop: str = "nothing") -> None:
        super().__init__(blocks, True, drop)
        self.ctas = [FewHeads([count], deep_parts, drop, self, rank) for rank, count in enumerate(blocks)]


MUTATIONS = (
    *("q_free", "q_full", "P", "statistics"),
    *(f"full {part}" for part in range(LAST + 1)),
    *("free 2", "free 3"),
    *("named barrier of the columns", "second set of columns", "second set of results"),
    *("wgmma wait of scores", "wgmma wait of values", "fence behind gathered rows", "fence behind P"),
    *("arrival for the validity words", "Q held until its last scores", "Q given up without a block"),
    "number of blocks read before Q is free",
)


@pytest.mark.parametrize("deep_parts", [2, 3])
def test_every_schedule_is_free_of_races_and_deadlocks(deep_parts: int) -> None:
    for seed in range(120):
        FewHeads(queries(seed), deep_parts).run(seed)


@pytest.mark.parametrize("counts", [(a, b, c) for a in range(3) for b in range(3) for c in (0, 1, 3)], ids=str)
def test_any_order_of_short_queries(counts: tuple[int, ...]) -> None:
    """Queries without a block among them: the scores warpgroup may then be far ahead of the values."""
    for seed in range(3):
        FewHeads((*counts, *counts), 2).run(seed)


@pytest.mark.parametrize("drop", MUTATIONS)
def test_the_model_misses_what_is_taken_away(drop: str) -> None:
    """Every wait, fence and early arrival is needed, and the model sees it."""
    with pytest.raises(Violation):
        for seed in range(60):
            FewHeads(queries(seed), 2, drop).run(seed)


@pytest.mark.parametrize("deep_parts", [2, 3])
def test_clusters_merge_without_races_and_deadlocks(deep_parts: int) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        FewHeadsCluster([rng.choice((0, 1, 2, 4)) for _ in range(rng.choice((2, 4)))], deep_parts).run(seed)


@pytest.mark.parametrize(
    "drop", ["named barrier before the merge", "cluster barrier before the merge", "cluster barrier after the merge"]
)
def test_the_model_misses_what_is_taken_away_from_a_merge(drop: str) -> None:
    with pytest.raises(Violation):
        for seed in range(40):
            FewHeadsCluster([2, 1, 0, 2], 2, drop).run(seed)


@pytest.mark.parametrize(
    ("file", "counts"),
    [("few_heads_scores.cuh", (2, 4, 2, 2, 1, 0)), ("few_heads_values.cuh", (3, 2, 0, 1, 2, 0))],
)
def test_the_sources_have_the_steps_of_the_model(file: str, counts: tuple[int, ...]) -> None:
    assert steps_of(KERNEL / file) == counts
