"""The pipeline of the sm_90a kernel as a model in plain Python: no deadlock, no overrun barrier, no race.

Roles are coroutines that follow producer.cuh with common/sm90/row_gather.cuh, consumer.cuh, epilogue.cuh and merge.cuh
line by line, with the barriers of storage.cuh and their parities. A thread of the model is a warp. See
schedule_machine.py for what it finds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from schedule_machine import Agent, Barrier, Item, Machine, Steps, Violation, Warp, schedule, steps_of

KERNEL = Path(__file__).resolve().parents[2] / "cuda" / "sparse_mla_fwd" / "sm90"
WARPS = 2  # per warpgroup; the kernel has four
PARTS = ((0, 2), (2, 4), (4, 6), (6, None))
LEFT_PARTS = 2
VALUE_TILES = 8
HALF_TILES = 4


class Cluster:
    """CTAs that share the slots of one query: so many blocks each."""

    def __init__(self, blocks: Sequence[int], rope: bool, drop: str = "nothing") -> None:
        self.ctas = [Model([count], rope, drop, self, rank) for rank, count in enumerate(blocks)]
        everyone = [f"{rank}/c{who}.{w}" for rank in range(len(blocks)) for who in (0, 1) for w in range(WARPS)]
        # The hardware's cluster barrier: producers have exited or will, and exited threads are not waited for.
        self.barrier = Barrier("cluster", len(everyone), everyone)

    def run(self, seed: int) -> None:
        schedule({name: steps for cta in self.ctas for name, steps in cta.threads().items()}, seed)


class Model(Machine):
    """One CTA on queries of so many blocks each; `drop` names the steps that are left out."""

    def __init__(
        self,
        blocks: Sequence[int],
        rope: bool,
        drop: str = "nothing",
        cluster: Cluster | None = None,
        rank: int = 0,
    ) -> None:
        super().__init__(drop)
        self.blocks, self.rope = blocks, rope
        self.cluster = cluster
        self.prefix = "" if cluster is None else f"{rank}/"
        self.tiles = 9 if rope else 8
        names = {role: [f"{self.prefix}{role}{w}" for w in range(WARPS)] for role in ("c0.", "c1.", "p")}
        consumers = (names["c0."], names["c1."])
        words = 0 if drop == "arrival for the validity words" else WARPS
        self.q_full = Barrier("q_full", 2, consumers[0] + consumers[1])
        self.q_free = Barrier("q_free", 2 * WARPS, names["p"][:1], starts_free=True)
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
        self.counted = Barrier("named 2", WARPS, names["p"])
        self.tiles_read = Barrier("tiles_read", 2 * WARPS, consumers[0] + consumers[1])

    # Shared memory ---------------------------------------------------------------------------------------------------

    def p_items(self, buffer: int) -> list[Item]:
        if self.rope and buffer == 0:
            return [("k", 0, VALUE_TILES, row) for row in range(WARPS)]
        return [("p", buffer, row) for row in range(WARPS)]

    def key_items(self, buffer: int, first: int, end: int) -> list[Item]:
        return [("k", buffer, tile, row) for tile in range(first, end) for row in range(WARPS)]

    def left_over(self) -> list[Item]:
        """What the output of a split query goes over."""
        return [("q",), *(item for buffer in (0, 1) for item in self.key_items(buffer, 0, self.tiles))]

    # Roles -----------------------------------------------------------------------------------------------------------

    def producer(self, warp: int) -> Steps:
        own = self.prefix
        me, copies, tma = Agent(f"{own}p{warp}"), Agent(f"{own}cp.async{warp}"), Agent(f"{own}tma")
        phase, q_round = [0, 0], 0
        for query, blocks in enumerate(self.blocks):
            counts = 0 if self.drop == "second set of counts" else q_round
            self.write(me, ("counts", counts, warp), (query,))
            self.counted.arrive(me)
            yield from self.wait(me, self.counted, q_round, "named barrier of the counts")
            for other in range(WARPS):
                self.read(me, ("counts", counts, other), (query,))
                yield None
            if warp == 0:
                yield from self.wait(me, self.q_free, q_round ^ 1, "q_free")
                self.write(me, ("blocks",), (query,))
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

    def threads(self) -> dict[str, Steps]:
        threads: dict[str, Steps] = {f"{self.prefix}p{w}": self.producer(w) for w in range(WARPS)}
        threads |= {f"{self.prefix}c{who}.{w}": self.consumer(who, w) for who in (0, 1) for w in range(WARPS)}
        return threads

    def run(self, seed: int) -> None:
        schedule(self.threads(), seed)


class Consumer(Warp[Model]):
    """consumer.cuh, epilogue.cuh and merge.cuh, one warp. Scores, P and the output live in registers: not modelled."""

    def __init__(self, model: Model, who: int, warp: int) -> None:
        own = model.prefix
        super().__init__(model, Agent(f"{own}c{who}.{warp}"))
        self.who, self.other, self.warp = who, 1 - who, warp
        self.mma = Agent(f"{own}wgmma{who}.{warp}")
        self.k_parity = self.p_parity = self.base_parity = self.q_parity = self.named_parity = 0
        self.query = 0

    def run(self) -> Steps:
        for query, blocks in enumerate(self.cta.blocks):
            self.query = query
            yield from self.accumulate(blocks)
            yield from self.join_statistics()
            self.q_parity ^= 1

    def await_part(self, part: int, fenced: set[int]) -> Steps:
        """Parts behind it that have arrived as well share its fence."""
        model, full = self.cta, self.cta.full[self.who]
        yield from self.wait(full[part], self.k_parity, f"full {part}")
        for later in range(part + 1, len(PARTS)):
            if model.drop == "look at later parts" or full[later].done(self.k_parity):
                fenced.add(later)
                if model.drop != "look at later parts":
                    yield from self.wait(full[later], self.k_parity, f"full {later}")
        self.fence("fence behind gathered rows")

    def scores(self, block: int, last: bool) -> Steps:
        model = self.cta
        fenced: set[int] = set()
        for part, (first, end) in enumerate(PARTS):
            if part not in fenced:
                yield from self.await_part(part, fenced)
            self.issue(self.mma, [("q",)], (self.query,))
            self.issue(self.mma, model.key_items(self.who, first, end or model.tiles), (self.query, block))
        yield None
        self.collect(self.mma, "wgmma wait of scores")
        self.k_parity ^= 1
        if last or model.drop == "Q held until its last scores":
            model.q_free.arrive(self.me)
        for row in range(WARPS):
            model.read(self.me, ("valid", self.who, row), (self.query, block))

    def values(self, buffer: int, block: int) -> Steps:
        model, early = self.cta, self.cta.drop == "columns held until their products are done"
        first = self.who * HALF_TILES
        self.issue(self.mma, model.key_items(buffer, first, first + HALF_TILES), (self.query, block))
        if buffer != self.who:
            self.issue(self.mma, model.p_items(buffer), (self.query, block))
        if early:
            model.free[buffer][self.who].arrive(self.me)
        yield None
        self.collect(self.mma, "wgmma wait of values")
        if not early:
            model.free[buffer][self.who].arrive(self.me)

    def publish(self, block: int) -> Steps:
        model = self.cta
        if self.who == 0 and model.rope:
            model.keys_read.arrive(self.me)
            yield from self.wait(model.keys_read, self.named_parity, "named barrier")
            self.named_parity ^= 1
        model.write(self.me, model.p_items(self.who)[self.warp], (self.query, block))
        self.fence("fence behind P")
        model.p_ready[self.who].arrive(self.me)
        yield None

    def share_base(self, block: int) -> None:
        self.cta.write(self.me, ("base", self.who, self.warp), (self.query, block))

    def read_base(self, block: int) -> None:
        self.cta.read(self.me, ("base", self.other, self.warp), (self.query, block))

    def wait_for_other_base(self, block: int, step: str) -> Steps:
        yield from self.wait(self.cta.base_ready, self.base_parity, step)
        self.base_parity ^= 1
        self.read_base(block)

    def wait_for_other_probabilities(self) -> Steps:
        yield from self.wait(self.cta.p_ready[self.other], self.p_parity, f"P of {self.other}")
        self.p_parity ^= 1

    def first_block(self, block: int, last: bool) -> Steps:
        yield from self.scores(block, last)
        self.share_base(block)
        self.cta.base_ready.arrive(self.me)
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
        yield from self.wait_for_other_probabilities()
        yield from self.values(self.other, block)
        self.share_base(block + 1)
        yield from self.publish(block + 1)
        yield from self.values(self.who, block + 1)

    def accumulate(self, blocks: int) -> Steps:
        model = self.cta
        yield from self.wait(model.q_full, self.q_parity, "q_full")
        model.read(self.me, ("blocks",), (self.query,))
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

    def join_statistics(self) -> Steps:
        model, ready = self.cta, self.cta.statistics_ready
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

    def merge(self, cluster: Cluster) -> Steps:
        model = self.cta
        model.tiles_read.arrive(self.me)
        yield from self.wait(model.tiles_read, 0, "tiles_read")
        for item in model.left_over():
            model.require_unused(self.me, item)
        model.write(self.me, ("left", self.who, self.warp), (0,))
        yield None
        yield from self.meet(cluster, 0, "cluster barrier before the merge")
        for cta in cluster.ctas:
            for who in (0, 1):
                for row in range(WARPS):
                    cta.read(self.me, ("left", who, row), (0,))
            yield None
        yield from self.meet(cluster, 1, "cluster barrier after the merge")
        # Its shared memory ends with the CTA.
        for who in (0, 1):
            for row in range(WARPS):
                model.require_unused(self.me, ("left", who, row))

    def meet(self, cluster: Cluster, parity: int, step: str) -> Steps:
        cluster.barrier.arrive(self.me)
        yield from self.wait(cluster.barrier, parity, step)


MUTATIONS = (
    *("q_free", "free left", "free right", "q_full", "full 0", "full 1", "full 2", "full 3"),
    *("base", "P of 0", "P of 1", "named barrier", "statistics of 0", "statistics of 1"),
    *("wgmma wait of scores", "wgmma wait of values", "fence behind gathered rows", "fence behind P"),
    "look at later parts",
    *("arrival for the validity words", "Q held until its last scores", "Q given up by who has no block"),
    *("named barrier of the counts", "second set of counts"),
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


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("producer.cuh", (2, 4, 0, 1, 0, 0)),
        ("../../common/sm90/row_gather.cuh", (1, 2, 0, 0, 0, 0)),
        ("consumer.cuh", (4, 5, 2, 1, 2, 0)),
        ("epilogue.cuh", (2, 2, 0, 0, 0, 0)),
        ("storage.cuh", (0, 0, 0, 0, 0, 0)),
        ("few_heads_storage.cuh", (1, 1, 0, 0, 0, 0)),
        ("merge.cuh", (0, 0, 0, 0, 0, 4)),
        ("sparse_mla_fwd.cu", (0, 0, 0, 0, 0, 0)),
    ],
)
def test_the_sources_have_the_steps_of_the_model(file: str, counts: tuple[int, ...]) -> None:
    assert steps_of(KERNEL / file) == counts
