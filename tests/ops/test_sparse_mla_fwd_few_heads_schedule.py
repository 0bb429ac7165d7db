"""The pipeline of the sm_90a kernel where heads are few: no deadlock, no overrun barrier, no race.

The roles of few_heads_scores.cuh and few_heads_values.cuh with the barriers of few_heads_storage.cuh, in the model that
test_sparse_mla_fwd_schedule.py describes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from sass_kit import machine_code, marked_products, product_waits
from schedule_machine import Agent, Barrier, Item, Steps, Tag, Violation, steps_of
from test_sparse_mla_fwd_schedule import KERNEL, VALUE_TILES, WARPS, Cluster, Consumer, Model, queries

from cupymla import arch, build
from cupymla.ops.mla import D_QK
from cupymla.ops.sparse_mla_fwd import plan

BEGINS = (0, 2, 4, 6)  # first column tile of each part
PARTS = range(len(BEGINS))
LAST = len(BEGINS) - 1
BUFFERS, HANDOVERS = 3, 2
EARLY = 2  # parts whose scores are issued before the softmax of the block before


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

    def advance(self) -> None:
        self.turn += 1


class FewHeads(Model):
    """One CTA of few heads."""

    def __init__(
        self,
        blocks: Sequence[int],
        rope: bool,
        drop: str = "nothing",
        cluster: Cluster | None = None,
        rank: int = 0,
    ) -> None:
        super().__init__(blocks, rope, drop, cluster, rank)
        own = self.prefix
        scores, values, producers = ([f"{own}{role}{w}" for w in range(WARPS)] for role in ("c0.", "c1.", "p"))
        words = 0 if drop == "arrival for the validity words" else WARPS
        self.full = [
            [Barrier(f"full[{b}][{part}]", WARPS + (words if part == LAST else 0), scores) for part in PARTS]
            for b in range(BUFFERS)
        ]
        self.free = [
            [Barrier(f"free[{b}][{part}]", WARPS, producers, starts_free=True) for part in PARTS]
            for b in range(BUFFERS)
        ]
        self.p_ready = [Barrier(f"p_ready[{h}]", WARPS, values) for h in range(HANDOVERS)]
        self.p_free = [Barrier(f"p_free[{h}]", WARPS, scores, starts_free=True) for h in range(HANDOVERS)]

    def part_items(self, buffer: int, part: int, tiles: int) -> list[Item]:
        return self.key_items(buffer, BEGINS[part], tiles if part == LAST else BEGINS[part + 1])

    def left_over(self) -> list[Item]:
        return [item for buffer in range(BUFFERS) for item in self.key_items(buffer, 0, self.tiles)]

    def blocks_item(self, buffer: int) -> Item:
        return ("blocks", 0 if self.drop == "number of blocks beside each Q" else buffer)

    def load_query(self, me: Agent, warp: int, query: int, ring: Ring) -> Steps:
        for part in PARTS:
            yield from self.wait(me, self.free[ring.stage][part], ring.full ^ 1, f"free {part}")
            full = self.full[ring.stage][part]
            if warp == 0:
                if part == LAST:
                    self.write(me, self.blocks_item(ring.stage), (query,))
                tma = Agent(f"{self.prefix}tma")
                tma.follow(me)
                for item in self.part_items(ring.stage, part, self.tiles):
                    self.write(tma, item, (query, "q"), generic=False)
                yield None
                full.arrive(tma)
            else:
                full.arrive(me)
            if part == LAST and self.has("arrival for the validity words"):
                full.arrive(me)
        ring.advance()

    def gather(self, me: Agent, copies: Agent, warp: int, tag: tuple[int, int], ring: Ring) -> Steps:
        for part in PARTS:
            yield from self.wait(me, self.free[ring.stage][part], ring.full ^ 1, f"free {part}")
            copies.follow(me)
            for item in self.part_items(ring.stage, part, self.tiles):
                if item[-1] == warp:
                    self.write(copies, item, tag)
            yield None
            self.full[ring.stage][part].arrive(copies)
        self.write(me, ("valid", ring.stage, warp), tag)
        if self.has("arrival for the validity words"):
            self.full[ring.stage][LAST].arrive(me)
        ring.advance()
        yield None

    def producer(self, warp: int) -> Steps:
        own = self.prefix
        me, copies = Agent(f"{own}p{warp}"), Agent(f"{own}cp.async{warp}")
        ring = Ring(BUFFERS)
        for query, blocks in enumerate(self.blocks):
            yield from self.load_query(me, warp, query, ring)
            for block in range(blocks):
                yield from self.gather(me, copies, warp, (query, block), ring)

    def consumer(self, who: int, warp: int) -> Steps:
        return (Values if who else Scores)(self, warp).run()


class Role(Consumer):
    """What both consumers do: one query after another."""

    cta: FewHeads

    def __init__(self, model: FewHeads, who: int, warp: int) -> None:
        super().__init__(model, who, warp)
        self.ring, self.handover = Ring(BUFFERS), Ring(HANDOVERS)

    def run(self) -> Steps:
        for query, blocks in enumerate(self.cta.blocks):
            self.query = query
            yield from self.accumulate(blocks)
            yield from self.finish()

    def accumulate(self, blocks: int) -> Steps:
        raise NotImplementedError

    def finish(self) -> Steps:
        raise NotImplementedError

    @property
    def place(self) -> int:
        """Where the next handover lies."""
        return 0 if self.cta.drop == "second place for P" else self.handover.stage

    def leave(self) -> Steps:
        assert self.cta.cluster is not None
        yield from self.merge(self.cta.cluster)


class Scores(Role):
    """few_heads_scores.cuh, one warp."""

    def __init__(self, model: FewHeads, warp: int) -> None:
        super().__init__(model, 0, warp)

    def load_query(self) -> Steps:
        cta, buffer, early = self.cta, self.ring.stage, self.cta.drop == "Q held until it is in registers"
        for part in PARTS:
            yield from self.wait(cta.full[buffer][part], self.ring.full, f"full {part}")
            if early:
                cta.free[buffer][part].arrive(self.me)
                yield None
            for item in cta.part_items(buffer, part, cta.tiles):
                cta.read(self.me, item, (self.query, "q"))
        cta.read(self.me, cta.blocks_item(buffer), (self.query,))
        self.fence("fence behind Q")
        yield None
        if not early:
            for part in PARTS:
                cta.free[buffer][part].arrive(self.me)
        self.ring.advance()

    def await_rows(self, part: int) -> Steps:
        yield from self.wait(self.cta.full[self.ring.stage][part], self.ring.full, f"full {part}")

    def issue_part(self, part: int, tag: tuple[int, int]) -> None:
        self.issue(self.mma, self.cta.part_items(self.ring.stage, part, self.cta.tiles), tag)

    def await_early(self) -> Steps:
        for part in PARTS[:EARLY]:
            yield from self.await_rows(part)
        self.fence("fence behind early rows")

    def issue_early(self, tag: tuple[int, int]) -> Steps:
        for part in PARTS[:EARLY]:
            self.issue_part(part, tag)
        yield None

    def issue_late(self, tag: tuple[int, int]) -> Steps:
        for part in PARTS[EARLY:]:
            if part not in self.fenced:
                yield from self.await_rows(part)
                self.fence("fence behind late rows")
            self.issue_part(part, tag)
        yield None

    def look_for_late(self) -> Steps:
        full = self.cta.full[self.ring.stage]
        self.fenced: set[int] = {part for part in PARTS[EARLY:] if full[part].done(self.ring.full)}
        for part in sorted(self.fenced):
            yield from self.await_rows(part)

    def wait_for_handover(self) -> Steps:
        yield from self.wait(self.cta.p_free[self.handover.stage], self.handover.full ^ 1, "P free")

    def take_scores(self, tag: tuple[int, int], last: bool) -> Steps:
        for row in range(WARPS):
            self.cta.read(self.me, ("valid", self.ring.stage, row), tag)
        self.ring.advance()
        yield from self.wait_for_handover()
        if not last:
            yield from self.await_early()
        self.collect(self.mma, "wgmma wait of scores")
        if not last:
            yield from self.issue_early((self.query, tag[1] + 1))

    def hand_over_probabilities(self, tag: tuple[int, int], last: bool) -> Steps:
        self.cta.write(self.me, ("p", self.place, self.warp), tag)
        if not last:
            yield from self.look_for_late()
        self.fence("fence behind P")
        yield from self.hand_over(tag)

    def hand_over(self, tag: Tag) -> Steps:
        cta = self.cta
        cta.write(self.me, ("factor", self.place, self.warp), tag)
        cta.p_ready[self.handover.stage].arrive(self.me)
        yield None
        self.handover.advance()
        yield None

    def accumulate(self, blocks: int) -> Steps:
        yield from self.load_query()
        self.fenced = set()
        if blocks > 0:
            yield from self.await_early()
            yield from self.issue_early((self.query, 0))
        for block in range(blocks):
            tag, last = (self.query, block), block + 1 == blocks
            yield from self.issue_late(tag)
            yield from self.take_scores(tag, last)
            yield from self.hand_over_probabilities(tag, last)

    def finish(self) -> Steps:
        yield from self.wait_for_handover()
        yield from self.hand_over((self.query, "end"))
        if self.cta.cluster is not None:
            yield from self.leave()


class Values(Role):
    """few_heads_values.cuh, one warp."""

    def __init__(self, model: FewHeads, warp: int) -> None:
        super().__init__(model, 1, warp)

    def take(self, tag: Tag) -> Steps:
        cta = self.cta
        yield from self.wait(cta.p_ready[self.handover.stage], self.handover.full, "P")
        for row in range(WARPS):
            cta.read(self.me, ("factor", self.place, row), tag)

    def hand_back(self) -> None:
        self.cta.p_free[self.handover.stage].arrive(self.me)
        self.handover.advance()

    def accumulate(self, blocks: int) -> Steps:
        self.ring.advance()
        for block in range(blocks):
            yield from self.multiply((self.query, block))
        yield from self.take((self.query, "end"))

    def multiply(self, tag: tuple[int, int]) -> Steps:
        cta, buffer = self.cta, self.ring.stage
        yield from self.take(tag)
        before = Agent("nothing")
        for part in PARTS:
            self.issue(self.mma, cta.part_items(buffer, part, VALUE_TILES), tag)
            self.issue(self.mma, [("p", self.place, row) for row in range(WARPS)], tag)
            issued = Agent("wgmma group", dict(self.mma.clock), dict(self.mma.fenced))
            yield None
            if part > 0:
                yield from self.give_back(part - 1, before)
            before = issued
        yield from self.give_back(LAST, before)
        self.hand_back()
        self.ring.advance()

    def give_back(self, part: int, done: Agent) -> Steps:
        """The wait for all groups up to one, and the part that it used."""
        if self.cta.has("wgmma wait of values"):
            self.me.follow(done)
        self.cta.free[self.ring.stage][part].arrive(self.me)
        yield None

    def finish(self) -> Steps:
        self.hand_back()
        yield None
        if self.cta.cluster is not None:
            yield from self.leave()


class FewHeadsCluster(Cluster):
    """CTAs of few heads that share the slots of one query."""

    def __init__(self, blocks: Sequence[int], rope: bool, drop: str = "nothing") -> None:
        super().__init__(blocks, rope, drop)
        self.ctas = [FewHeads([count], rope, drop, self, rank) for rank, count in enumerate(blocks)]


MUTATIONS = (
    *(f"{side} {part}" for side in ("full", "free") for part in PARTS),
    *("P", "P free", "second place for P", "number of blocks beside each Q", "Q held until it is in registers"),
    *("wgmma wait of scores", "wgmma wait of values"),
    *("fence behind P", "fence behind Q"),
    *("fence behind early rows", "fence behind late rows", "arrival for the validity words"),
)


@pytest.mark.parametrize("rope", [True, False])
def test_every_schedule_is_free_of_races_and_deadlocks(rope: bool) -> None:
    for seed in range(120):
        FewHeads(queries(seed), rope).run(seed)


@pytest.mark.parametrize("counts", [(a, b, c) for a in range(3) for b in range(3) for c in (0, 1, 3)], ids=str)
def test_any_order_of_short_queries(counts: tuple[int, ...]) -> None:
    """Queries without a block among them: every buffer may then hold a Q."""
    for seed in range(3):
        FewHeads((*counts, *counts), True).run(seed)


@pytest.mark.parametrize("drop", MUTATIONS)
def test_the_model_misses_what_is_taken_away(drop: str) -> None:
    """Every wait, fence and arrival is needed, and the model sees it."""
    with pytest.raises(Violation):
        for seed in range(60):
            FewHeads(queries(seed), True, drop).run(seed)


@pytest.mark.parametrize("rope", [True, False])
def test_clusters_merge_without_races_and_deadlocks(rope: bool) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        FewHeadsCluster([rng.choice((0, 1, 2, 4)) for _ in range(rng.choice((2, 4)))], rope).run(seed)


@pytest.mark.parametrize("drop", ["tiles_read", "cluster barrier before the merge", "cluster barrier after the merge"])
def test_the_model_misses_what_is_taken_away_from_a_merge(drop: str) -> None:
    with pytest.raises(Violation):
        for seed in range(40):
            FewHeadsCluster([2, 1, 0, 2], True, drop).run(seed)


@pytest.mark.parametrize(
    ("file", "counts"),
    [("few_heads_scores.cuh", (4, 2, 4, 0, 1, 0)), ("few_heads_values.cuh", (1, 2, 0, 0, 2, 0))],
)
def test_the_sources_have_the_steps_of_the_model(file: str, counts: tuple[int, ...]) -> None:
    assert steps_of(KERNEL / file) == counts


@pytest.mark.compile
@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("d_qk", D_QK)
def test_a_part_is_given_back_before_the_next_ones_products_are_done(d_qk: int, heads: int, tmp_path: Path) -> None:
    """One product of each part of the values is marked, so a wait for all parts but one is for no more."""
    pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")
    code = machine_code(build.cubin(plan.variant(arch.named("sm_90a"), d_qk=d_qk, heads=heads)), tmp_path)
    assert marked_products(code, f"64x{heads}x16") == len(PARTS)
    assert product_waits(code) == {0, 1}
