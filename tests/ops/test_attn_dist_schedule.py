"""The pipeline of the sm_90a attn_dist kernel as a model in plain Python: no deadlock, no overrun barrier, no race.

Roles are coroutines that follow producer.cuh with common/sm90/row_gather.cuh, and consumer.cuh with sums.cuh, line by
line, with the barriers of storage.cuh and their parities. A thread of the model is a warp. See schedule_machine.py for
what it finds. Registers that wgmma reads or writes while it runs are modelled as memory of their warp.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from sass_kit import require_groups_end_where_products_are_marked
from schedule_machine import Agent, Barrier, Clock, Item, Machine, Steps, Violation, Warp, schedule, steps_of

from cupymla import arch
from cupymla.ops.attn_dist import plan
from cupymla.ops.mla import D_QK

KERNEL = Path(__file__).resolve().parents[2] / "cuda" / "attn_dist" / "sm90"
WARPS = 2  # per warpgroup; the kernel has four
CONSUMER_WARPS = 2 * WARPS
BUFFERS = 3
TILES = 9
PASSES = 4


class Model(Machine):
    """One CTA on passes of so many blocks each. `q_parts`: 2 for 128 heads, 1 for 64."""

    def __init__(self, blocks: Sequence[int], q_parts: int, normalize: bool, drop: str = "nothing") -> None:
        super().__init__(drop)
        self.blocks, self.q_parts, self.normalize = blocks, q_parts, normalize
        producers = [f"p{w}" for w in range(WARPS)]
        consumers = [f"c{w}" for w in range(CONSUMER_WARPS)]
        words = 0 if drop == "arrival for the validity words" else WARPS
        self.full = [Barrier(f"full[{b}]", WARPS + words, consumers) for b in range(BUFFERS)]
        self.free = [Barrier(f"free[{b}]", CONSUMER_WARPS, producers, starts_free=True) for b in range(BUFFERS)]
        # With 64 heads each consumer sums over the heads of its own blocks.
        self.alternate = q_parts == 1
        groups = [consumers[:WARPS], consumers[WARPS:]] if self.alternate else [consumers]
        self.sums_ready = [Barrier(f"sums_ready[{g}]", len(who), who) for g, who in enumerate(groups)]
        self.masses_ready = Barrier("masses_ready", CONSUMER_WARPS, consumers)
        # Where a consumer's next products wait for the other's: the first may begin.
        self.order = [
            Barrier(f"order[{who}]", WARPS, consumers[who * WARPS :][:WARPS], starts_free=who == 0) for who in (0, 1)
        ]
        self.walk_read = Barrier("named 1", WARPS, producers)
        self.walk_moved = Barrier("named 2", WARPS, producers)
        self.written: dict[tuple[int, int], int] = {}
        self.divided: dict[int, int] = {}

    def tile_items(self, buffer: int) -> list[Item]:
        return [("k", buffer, tile, row) for tile in range(TILES) for row in range(WARPS)]

    def run(self, seed: int) -> None:
        threads: dict[str, Steps] = {f"p{w}": Producer(self, w).run() for w in range(WARPS)}
        threads |= {f"c{w}": Consumer(self, w).run() for w in range(CONSUMER_WARPS)}
        schedule(threads, seed)
        wanted = {(number, block): 1 for number, blocks in enumerate(self.blocks) for block in range(blocks)}
        if self.written != wanted:
            raise Violation(f"rows: {self.written}, not {wanted}")
        if self.normalize and any(self.divided.get(number) != CONSUMER_WARPS for number in self.full_passes()):
            raise Violation(f"divided: {self.divided}")

    def full_passes(self) -> list[int]:
        return [number for number, blocks in enumerate(self.blocks) if blocks]


class Producer(Warp[Model]):
    """producer.cuh and row_gather.cuh, one warp."""

    def __init__(self, model: Model, warp: int) -> None:
        super().__init__(model, Agent(f"p{warp}"))
        self.warp = warp
        self.copies = Agent(f"cp.async{warp}")
        self.tma = Agent("tma")
        self.buffer = self.passes = 0
        self.phase = [0] * BUFFERS
        self.named = [0, 0]

    def sync(self, which: int) -> Steps:
        barrier = (self.cta.walk_read, self.cta.walk_moved)[which]
        barrier.arrive(self.me)
        yield from self.wait(barrier, self.named[which], f"named {which + 1}")
        self.named[which] ^= 1

    def move(self, *place: int) -> None:
        if self.warp == 0:
            self.cta.write(self.me, ("walk",), place)

    def run(self) -> Steps:
        self.move(0)
        yield from self.sync(1)
        for number, blocks in enumerate(self.cta.blocks):
            self.cta.read(self.me, ("walk",), (number,))
            if blocks:
                yield from self.drop_invalid_end(number, blocks)
                yield from self.begin_pass(number)
                for block in range(blocks):
                    self.cta.read(self.me, ("walk",), (number, blocks))
                    yield from self.gather(number, block)
            yield from self.sync(0)
            self.move(number + 1)
            yield from self.sync(1)
        yield from self.wait_free()
        self.describe((-1,))
        self.cta.full[self.buffer].arrive(self.me)
        self.finish_buffer()

    def drop_invalid_end(self, number: int, blocks: int) -> Steps:
        for _ in range(number % 3 + 1):
            self.cta.read(self.me, ("walk",), (number,))
            yield from self.sync(0)
        self.move(number, blocks)
        yield from self.sync(1)

    def describe(self, tag: tuple[int, ...]) -> None:
        if self.warp == 0:
            which = 0 if self.cta.drop == "four places for passes" else self.passes % PASSES
            self.cta.write(self.me, ("pass", which), tag)

    def begin_pass(self, number: int) -> Steps:
        model = self.cta
        for part in range(model.q_parts):
            yield from self.wait_free()
            if part == 0:
                self.describe((number,))
            if self.warp == 0:
                # The arrival and the bytes: the phase completes when the copies are in.
                self.tma.follow(self.me)
                for item in model.tile_items(self.buffer):
                    model.write(self.tma, item, ("q", number, part), generic=False)
                yield None
                model.full[self.buffer].arrive(self.tma)
            else:
                model.full[self.buffer].arrive(self.me)
            self.finish_buffer()
        self.passes += 1

    def wait_free(self) -> Steps:
        yield from self.wait(self.cta.free[self.buffer], self.phase[self.buffer] ^ 1, "free for Q")

    def finish_buffer(self) -> None:
        if self.cta.has("arrival for the validity words"):
            self.cta.full[self.buffer].arrive(self.me)
        self.next()

    def next(self) -> None:
        self.phase[self.buffer] ^= 1
        self.buffer = (self.buffer + 1) % BUFFERS

    def gather(self, number: int, block: int) -> Steps:
        model, b = self.cta, self.buffer
        yield from self.wait(model.free[b], self.phase[b] ^ 1, "free")
        self.copies.follow(self.me)
        model.write(self.me, ("valid", b, self.warp), (number, block))
        if model.has("arrival for the validity words"):
            model.full[b].arrive(self.me)
        for tile in range(TILES):
            model.write(self.copies, ("k", b, tile, self.warp), ("kv", number, block))
        yield None
        model.full[b].arrive(self.copies)
        self.next()
        yield None


class Consumer(Warp[Model]):
    """consumer.cuh and sums.cuh, one warp; `warp` is counted over both consumers."""

    def __init__(self, model: Model, warp: int) -> None:
        super().__init__(model, Agent(f"c{warp}"))
        self.warp, self.who = warp, warp // WARPS
        self.mma = Agent(f"wgmma{warp}")
        self.buffer = self.parity = self.passes = self.turns = self.ended = self.round = self.masses = 0
        self.waiting: int | None = None
        self.group = self.who if model.alternate else 0
        self.done: Clock = {}  # what the group of products in flight will have done

    def advance_place(self) -> None:
        self.buffer = (self.buffer + 1) % BUFFERS
        self.parity ^= self.buffer == 0

    def free(self) -> None:
        self.cta.free[self.buffer].arrive(self.me)

    def describe(self, number: int) -> int:
        """What the description of the pass of that number, from 1, says: which of the model's it is, or -1."""
        full = self.cta.full_passes()
        index = full[number - 1] if number <= len(full) else -1
        which = 0 if self.cta.drop == "four places for passes" else (number - 1) % PASSES
        self.cta.read(self.me, ("pass", which), (index,))
        return index

    def run(self) -> Steps:
        model, more = self.cta, [True]
        while True:
            yield from self.begin_pass(more)
            if not more[-1]:
                break
            index = self.describe(self.passes)
            for block in range(model.blocks[index]):
                yield from self.wait(model.full[self.buffer], self.parity, "full")
                if not model.alternate or block % 2 == self.who:
                    yield from self.take(index, block)
                else:
                    self.free()
                self.advance_place()
                yield None
            if self.ended:
                yield from self.finish_waiting()
            self.ended = self.passes
        yield from self.finish_waiting()

    def begin_pass(self, more: list[bool]) -> Steps:
        model = self.cta
        yield from self.wait(model.full[self.buffer], self.parity, "Q")
        index = self.describe(self.passes + 1)
        if index < 0:
            more.append(False)
            return
        self.passes += 1
        for part in range(model.q_parts):
            if part != 0:
                yield from self.wait(model.full[self.buffer], self.parity, "second half of Q")
            if model.alternate or part == self.who:
                for item in model.tile_items(self.buffer):
                    model.read(self.me, item, ("q", index, part))
                self.fence("fence behind Q")
                model.write(self.me, ("registers of Q", self.warp), (index,), generic=False)
            yield None
            self.free()
            self.advance_place()
        model.write(self.me, ("lse", self.warp), (index,))

    def take(self, index: int, block: int) -> Steps:
        model, b = self.cta, self.buffer
        for row in range(WARPS):
            model.read(self.me, ("valid", b, row), (index, block))
        self.fence("fence behind gathered rows")
        if not model.alternate:
            yield from self.wait(model.order[self.who], (self.turns ^ (self.who == 0)) & 1, "order")
        self.mma.follow(self.me)
        model.read(self.mma, ("registers of Q", self.warp), (index,), "async")
        for item in model.tile_items(b):
            model.read(self.mma, item, ("kv", index, block), "async")
        model.write(self.mma, ("scores", self.warp), (index, block), generic=False)
        self.done = dict(self.mma.clock)
        if not model.alternate:
            model.order[1 - self.who].arrive(self.me)
        self.turns += 1
        yield from self.finish_waiting()
        if model.has("wgmma wait"):
            self.me.follow(Agent("", self.done))
        self.free()
        yield None
        model.read(self.me, ("scores", self.warp), (index, block))
        model.read(self.me, ("lse", self.warp), (index,))
        model.write(self.me, ("sums", self.sums_set(self.round), self.warp), (index, block))
        model.sums_ready[self.group].arrive(self.me)
        self.round += 1
        self.waiting = block
        yield None

    def finish_waiting(self) -> Steps:
        index = self.describe(self.ended or self.passes) if self.passes else -1
        if self.waiting is not None:
            yield from self.wait_sums("sums")
            self.add_up(index, self.waiting)
            self.waiting = None
        if self.ended and self.cta.normalize:
            yield from self.divide(index)
        self.ended = 0

    def sums_set(self, number: int) -> int:
        return 0 if self.cta.drop == "second set of sums" else number % 2

    def mass_set(self) -> int:
        return self.masses % 2 if self.cta.alternate and self.cta.drop != "second set of masses" else 0

    def wait_sums(self, step: str) -> Steps:
        yield from self.wait(self.cta.sums_ready[self.group], (self.round - 1) % 2, step)

    def first_owned(self) -> int:
        return self.warp % WARPS * 2 + self.who if self.cta.alternate else self.warp

    def add_up(self, index: int, block: int) -> None:
        if block % CONSUMER_WARPS != self.first_owned():
            return
        model = self.cta
        addends = range(self.who * WARPS, (self.who + 1) * WARPS) if model.alternate else range(CONSUMER_WARPS)
        for addend in addends:
            model.read(self.me, ("sums", self.sums_set(self.round - 1), addend), (index, block))
        model.written[index, block] = model.written.get((index, block), 0) + 1
        if model.normalize:
            model.write(self.me, ("mass", self.mass_set(), self.warp), (index,))

    def divide(self, index: int) -> Steps:
        model = self.cta
        if self.first_owned() >= model.blocks[index]:
            model.write(self.me, ("mass", self.mass_set(), self.warp), (index,))
        if model.alternate:
            model.masses_ready.arrive(self.me)
            yield from self.wait(model.masses_ready, self.masses % 2, "masses")
        else:
            model.sums_ready[0].arrive(self.me)
            self.round += 1
            yield from self.wait_sums("masses")
        for other in range(CONSUMER_WARPS):
            model.read(self.me, ("mass", self.mass_set(), other), (index,))
        self.masses += 1
        model.divided[index] = model.divided.get(index, 0) + 1
        yield None


MUTATIONS = (
    *("free", "free for Q", "named 1", "named 2", "Q", "second half of Q", "full", "wgmma wait"),
    *("sums", "masses", "second set of sums", "second set of masses"),
    *("fence behind gathered rows", "arrival for the validity words", "four places for passes", "fence behind Q"),
)


def passes(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice((0, 1, 1, 2, 3, 4, 5, 7)) for _ in range(rng.randint(1, 7))]


@pytest.mark.parametrize("q_parts", [1, 2], ids=["h64", "h128"])
@pytest.mark.parametrize("normalize", [False, True], ids=["raw", "l1"])
def test_every_schedule_is_free_of_races_and_deadlocks(q_parts: int, normalize: bool) -> None:
    for seed in range(60):
        Model(passes(seed), q_parts, normalize).run(seed)


@pytest.mark.parametrize("counts", [(a, b, c) for a in range(4) for b in range(4) for c in range(4)], ids=str)
@pytest.mark.parametrize("q_parts", [1, 2], ids=["h64", "h128"])
def test_any_order_of_short_passes(counts: tuple[int, ...], q_parts: int) -> None:
    for seed in range(2):
        Model(counts, q_parts, normalize=bool(seed)).run(seed)


@pytest.mark.parametrize("drop", MUTATIONS)
def test_the_model_misses_what_is_taken_away(drop: str) -> None:
    """Every wait, fence and early arrival is needed, and the model sees it."""
    with pytest.raises(Violation):
        for seed in range(60):
            Model(passes(seed), 1 + seed % 2, normalize=True, drop=drop).run(seed)


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("producer.cuh", (1, 4, 0, 5, 0, 0)),
        ("../../common/sm90/row_gather.cuh", (1, 2, 0, 0, 0, 0)),
        ("consumer.cuh", (5, 2, 1, 0, 1, 0)),
        ("products.cuh", (0, 0, 1, 0, 0, 0)),
        ("sums.cuh", (2, 3, 0, 0, 0, 0)),
        ("walk.cuh", (0, 0, 0, 0, 0, 0)),
        ("attn_dist.cu", (0, 0, 0, 0, 0, 0)),
    ],
)
def test_the_sources_have_the_steps_of_the_model(file: str, counts: tuple[int, ...]) -> None:
    assert steps_of(KERNEL / file) == counts


@pytest.mark.compile
@pytest.mark.parametrize("pass_heads", plan.PASS_HEADS)
@pytest.mark.parametrize("d_qk", D_QK)
def test_waits_are_for_no_more_products_than_they_say(d_qk: int, pass_heads: int, tmp_path: Path) -> None:
    """A block's products are one group, and its scores are waited for when the row of the block before is written."""
    source = plan.variant(arch.named("sm_90a"), d_qk=d_qk, pass_heads=pass_heads)
    require_groups_end_where_products_are_marked(source, {0}, tmp_path)


@pytest.mark.compile
@pytest.mark.parametrize("d_qk", D_QK)
def test_the_joint_kernel_waits_for_the_left_half_alone(d_qk: int, tmp_path: Path) -> None:
    source = plan.variant(arch.named("sm_90a"), d_qk=d_qk, queries=plan.JOINT_QUERIES)
    require_groups_end_where_products_are_marked(source, {0, 1}, tmp_path)
