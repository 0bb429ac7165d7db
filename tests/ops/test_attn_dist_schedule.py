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
from schedule_machine import Agent, Barrier, Clock, Item, Machine, Steps, Violation, schedule, steps_of

from cupymla import arch
from cupymla.ops.attn_dist import plan
from cupymla.ops.mla import D_QK

KERNEL = Path(__file__).resolve().parents[2] / "cuda" / "attn_dist" / "sm90"
WARPS = 2  # per warpgroup; the kernel has four
CONSUMER_WARPS = 2 * WARPS
BUFFERS = 3
TILES = 9
PARTS = ((0, 2), (2, 4), (4, 6), (6, TILES))
LEFT_PARTS = 2
PASSES = 4


class Model(Machine):
    """One CTA on passes of so many blocks each. `q_parts`: 2 for 128 heads, 1 for 64."""

    def __init__(self, blocks: Sequence[int], q_parts: int, normalize: bool, drop: str = "nothing") -> None:
        super().__init__(drop)
        self.blocks, self.q_parts, self.normalize = blocks, q_parts, normalize
        producers = [f"p{w}" for w in range(WARPS)]
        consumers = [f"c{w}" for w in range(CONSUMER_WARPS)]
        words = 0 if drop == "arrival for the validity words" else WARPS
        counts = [WARPS + (words if part == 0 else 0) for part in range(len(PARTS))]
        self.full = [
            [Barrier(f"full[{b}][{part}]", count, consumers) for part, count in enumerate(counts)]
            for b in range(BUFFERS)
        ]
        self.free = [
            [Barrier(f"free[{b}][{half}]", CONSUMER_WARPS, producers, starts_free=True) for half in (0, 1)]
            for b in range(BUFFERS)
        ]
        self.sums_ready = Barrier("sums_ready", CONSUMER_WARPS, consumers)
        # Where a consumer's next products wait for the other's: the first may begin.
        self.order = [
            Barrier(f"order[{who}]", WARPS, consumers[who * WARPS :][:WARPS], starts_free=who == 0) for who in (0, 1)
        ]
        self.walk_read = Barrier("named 1", WARPS, producers)
        self.walk_moved = Barrier("named 2", WARPS, producers)
        self.written: dict[tuple[int, int], int] = {}
        self.divided: dict[int, int] = {}

    def tile_items(self, buffer: int, first: int, end: int) -> list[Item]:
        return [("k", buffer, tile, row) for tile in range(first, end) for row in range(WARPS)]

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


class Producer:
    """producer.cuh and row_gather.cuh, one warp."""

    def __init__(self, model: Model, warp: int) -> None:
        self.model, self.warp = model, warp
        self.me, self.copies = Agent(f"p{warp}"), Agent(f"cp.async{warp}")
        self.tma = [Agent(f"tma{part}") for part in range(len(PARTS))]
        self.buffer = self.passes = 0
        self.phase = [0] * BUFFERS
        self.named = [0, 0]

    def wait(self, barrier: Barrier, parity: int, step: str) -> Steps:
        yield from self.model.wait(self.me, barrier, parity, step)

    def sync(self, which: int) -> Steps:
        barrier = (self.model.walk_read, self.model.walk_moved)[which]
        barrier.arrive(self.me)
        yield from self.wait(barrier, self.named[which], f"named {which + 1}")
        self.named[which] ^= 1

    def move(self, *place: int) -> None:
        if self.warp == 0:
            self.model.write(self.me, ("walk",), place)

    def run(self) -> Steps:
        self.move(0)
        yield from self.sync(1)
        for number, blocks in enumerate(self.model.blocks):
            self.model.read(self.me, ("walk",), (number,))
            if blocks:
                yield from self.drop_invalid_end(number, blocks)
                yield from self.begin_pass(number)
                for block in range(blocks):
                    self.model.read(self.me, ("walk",), (number, blocks))
                    yield from self.gather(number, block)
            yield from self.sync(0)
            self.move(number + 1)
            yield from self.sync(1)
        yield from self.wait_free()
        self.describe((-1,))
        self.model.full[self.buffer][0].arrive(self.me)
        self.finish_buffer()

    def drop_invalid_end(self, number: int, blocks: int) -> Steps:
        for _ in range(number % 3 + 1):
            self.model.read(self.me, ("walk",), (number,))
            yield from self.sync(0)
        self.move(number, blocks)
        yield from self.sync(1)

    def describe(self, tag: tuple[int, ...]) -> None:
        if self.warp == 0:
            which = 0 if self.model.drop == "four places for passes" else self.passes % PASSES
            self.model.write(self.me, ("pass", which), tag)

    def begin_pass(self, number: int) -> Steps:
        model = self.model
        for part in range(model.q_parts):
            yield from self.wait_free()
            if part == 0:
                self.describe((number,))
            for arrival, (first, end) in enumerate(PARTS):
                if self.warp == 0:
                    # The arrival and the bytes: the phase completes when the copies are in.
                    tma = self.tma[arrival]
                    tma.follow(self.me)
                    for item in model.tile_items(self.buffer, first, end):
                        model.write(tma, item, ("q", number, part), generic=False)
                    yield None
                    model.full[self.buffer][arrival].arrive(tma)
                else:
                    model.full[self.buffer][arrival].arrive(self.me)
            self.finish_buffer()
        self.passes += 1

    def wait_free(self) -> Steps:
        left, right = self.model.free[self.buffer]
        yield from self.wait(right, self.phase[self.buffer] ^ 1, "free for Q")
        left.passed_by(self.me, waited=True)

    def finish_buffer(self) -> None:
        if self.model.has("arrival for the validity words"):
            self.model.full[self.buffer][0].arrive(self.me)
        self.next()

    def next(self) -> None:
        self.phase[self.buffer] ^= 1
        self.buffer = (self.buffer + 1) % BUFFERS

    def gather(self, number: int, block: int) -> Steps:
        model, b = self.model, self.buffer
        for part, (first, end) in enumerate(PARTS):
            if part == 0:
                yield from self.wait(model.free[b][0], self.phase[b] ^ 1, "free left")
            if part == LEFT_PARTS:
                yield from self.wait(model.free[b][1], self.phase[b] ^ 1, "free right")
            self.copies.follow(self.me)
            for tile in range(first, end):
                model.write(self.copies, ("k", b, tile, self.warp), ("kv", number, block))
            yield None
            model.full[b][part].arrive(self.copies)
            if part == 0:
                model.write(self.me, ("valid", b, self.warp), (number, block))
                if model.has("arrival for the validity words"):
                    model.full[b][0].arrive(self.me)
        self.next()
        yield None


class Consumer:
    """consumer.cuh and sums.cuh, one warp; `warp` is counted over both consumers."""

    def __init__(self, model: Model, warp: int) -> None:
        self.model, self.warp, self.who = model, warp, warp // WARPS
        self.me, self.mma = Agent(f"c{warp}"), Agent(f"wgmma{warp}")
        self.buffer = self.parity = self.passes = self.round = self.block = self.scores = self.order = 0
        self.groups: list[Clock] = []  # committed and not waited for, oldest first

    def wait(self, barrier: Barrier, parity: int, step: str) -> Steps:
        yield from self.model.wait(self.me, barrier, parity, step)

    def before(self, positions: int) -> int:
        return (self.buffer - positions) % BUFFERS

    def advance_place(self) -> None:
        self.buffer = (self.buffer + 1) % BUFFERS
        self.parity ^= self.buffer == 0

    def free_half(self, buffer: int, half: int) -> None:
        self.model.free[buffer][half].arrive(self.me)

    def describe(self, number: int) -> int:
        """What the description of the pass of that number, from 1, says: which of the model's it is, or -1."""
        full = self.model.full_passes()
        index = full[number - 1] if number <= len(full) else -1
        which = 0 if self.model.drop == "four places for passes" else (number - 1) % PASSES
        self.model.read(self.me, ("pass", which), (index,))
        return index

    def run(self) -> Steps:
        yield from self.begin_pass()
        if self.describe(self.passes) < 0:
            return
        yield from self.issue()
        more = [True]
        while more[-1]:
            yield from self.advance(more)

    def begin_pass(self) -> Steps:
        model = self.model
        yield from self.wait(model.full[self.buffer][0], self.parity, "first part of Q")
        model.full[self.buffer][0].passed[self.me.name] -= 1  # it is waited for once more below
        self.passes += 1
        index = self.describe(self.passes)
        if index < 0:
            return
        self.block = 0
        for part in range(model.q_parts):
            for arrival in range(len(PARTS)):
                yield from self.wait(model.full[self.buffer][arrival], self.parity, f"Q {arrival}")
            if model.q_parts == 1 or part == self.who:
                for item in model.tile_items(self.buffer, 0, TILES):
                    model.read(self.me, item, ("q", index, part))
                if model.has("fence behind Q"):
                    self.me.fence()
                model.write(self.me, ("registers of Q", self.warp), (index,), generic=False)
            yield None
            self.free_half(self.buffer, 0)
            self.free_half(self.buffer, 1)
            self.advance_place()
        which = 0 if model.drop == "second set of lse" else self.passes % 2
        model.write(self.me, ("lse", which, self.warp), (index,))

    def commit(self) -> None:
        self.groups.append(dict(self.mma.clock))

    def collect(self, pending: int, step: str) -> None:
        while len(self.groups) > pending:
            done = self.groups.pop(0)
            if self.model.has(step):
                self.me.follow(Agent("", done))

    def issue(self) -> Steps:
        """Into the set of scores that is not in use."""
        model, b = self.model, self.buffer
        index = self.describe(self.passes)
        self.scores ^= 1
        in_order = model.q_parts == 2
        for part, (first, end) in enumerate(PARTS):
            yield from self.wait(model.full[b][part], self.parity, f"full {part}")
            if part == 0 and in_order:
                yield from self.wait(model.order[self.who], self.order ^ (self.who == 0), "order")
            if part == 0:
                for row in range(WARPS):
                    model.read(self.me, ("valid", b, row), (index, self.block))
            if model.has("fence behind gathered rows"):
                self.me.fence()
            self.mma.follow(self.me)
            model.read(self.mma, ("registers of Q", self.warp), (index,), "async")
            for item in model.tile_items(b, first, end):
                model.read(self.mma, item, ("kv", index, self.block), "async")
            model.write(self.mma, ("scores", self.warp, self.scores), (index, self.block), generic=False)
            self.commit()
        if in_order:
            model.order[1 - self.who].arrive(self.me)
            self.order ^= 1
        self.advance_place()

    def advance(self, more: list[bool]) -> Steps:
        self.collect(len(PARTS) - LEFT_PARTS, "wgmma wait of the left half")
        self.free_half(self.before(1), 0)
        yield None
        present, block, scores = self.passes, self.block, self.scores
        last = block + 1 == self.model.blocks[self.describe(present)]
        if last:
            self.collect(0, "wgmma wait of the last block")
            self.free_half(self.before(1), 1)
            yield None
            yield from self.begin_pass()
            if self.describe(self.passes) < 0:
                yield from self.finish(present, block, scores, last)
                more.append(False)
                return
        else:
            self.block += 1
        yield from self.issue()
        self.collect(len(PARTS), "wgmma wait of the right half")
        if not last:
            self.free_half(self.before(2), 1)
        yield None
        yield from self.finish(present, block, scores, last)

    def finish(self, present: int, block: int, scores: int, last: bool) -> Steps:
        model = self.model
        index = self.describe(present)
        model.read(self.me, ("scores", self.warp, scores), (index, block))
        model.read(self.me, ("lse", 0 if model.drop == "second set of lse" else present % 2, self.warp), (index,))
        if block != 0:
            yield from self.wait_sums("sums of the block before")
            self.add_up(present, block - 1)
        model.write(self.me, ("sums", self.sums_set(self.round), self.warp), (index, block))
        model.sums_ready.arrive(self.me)
        self.round += 1
        yield None
        if last:
            yield from self.wait_sums("sums of the last block")
            self.add_up(present, block)
            if model.normalize:
                yield from self.divide(present)

    def sums_set(self, number: int) -> int:
        return 0 if self.model.drop == "second set of sums" else number % 2

    def wait_sums(self, step: str) -> Steps:
        yield from self.wait(self.model.sums_ready, (self.round - 1) % 2, step)

    def add_up(self, present: int, block: int) -> None:
        if block % CONSUMER_WARPS != self.warp:
            return
        model, index = self.model, self.describe(present)
        for addend in range(CONSUMER_WARPS):
            model.read(self.me, ("sums", self.sums_set(self.round - 1), addend), (index, block))
        model.written[index, block] = model.written.get((index, block), 0) + 1
        if model.normalize:
            model.write(self.me, ("mass", self.warp), (index,))

    def divide(self, present: int) -> Steps:
        model, index = self.model, self.describe(present)
        if self.warp >= model.blocks[index]:
            model.write(self.me, ("mass", self.warp), (index,))
        model.sums_ready.arrive(self.me)
        self.round += 1
        yield from self.wait_sums("masses")
        for other in range(CONSUMER_WARPS):
            model.read(self.me, ("mass", other), (index,))
        model.divided[index] = model.divided.get(index, 0) + 1
        yield None


MUTATIONS = (
    *("free left", "free right", "free for Q", "named 1", "named 2"),
    *("first part of Q", "Q 0", "Q 1", "Q 2", "Q 3", "full 0", "full 1", "full 2", "full 3"),
    *("wgmma wait of the left half", "wgmma wait of the right half", "wgmma wait of the last block"),
    *("sums of the block before", "sums of the last block", "masses", "second set of sums"),
    *("fence behind gathered rows", "arrival for the validity words", "four places for passes"),
    *("second set of lse", "fence behind Q"),
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
        ("consumer.cuh", (6, 2, 0, 0, 3, 0)),
        ("products.cuh", (1, 0, 2, 0, 0, 0)),
        ("sums.cuh", (1, 2, 0, 0, 0, 0)),
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
    """Else the wait for one block's scores is for half of the next block's too."""
    source = plan.variant(arch.named("sm_90a"), d_qk=d_qk, pass_heads=pass_heads)
    waits = {0, len(PARTS) - LEFT_PARTS, len(PARTS)}
    require_groups_end_where_products_are_marked(source, waits, tmp_path)
