"""The pipeline of the sm_90a backward as a model in plain Python: no deadlock, no overrun barrier, no race.

Of a single CTA, with one query or several; a pair's pipeline is modelled in sparse_mla_bwd_pair_schedule.py.

Roles are coroutines that follow producer.cuh with common/sm90/row_gather.cuh, consumer.cuh, gradients.cuh,
statistics.cuh and attention.cuh step by step, with the barriers of storage.cuh and their parities. Agents, barriers and
the race rule are those of the forward's model.
"""

from __future__ import annotations

from collections.abc import Sequence

from schedule_machine import Agent, Barrier, Item, Machine, Steps, Warp, schedule

WARPS = 2  # per warpgroup; the kernel has four
VALUE_TILES, HALF_TILES = 8, 4
PARTS = {9: (0, 3, 5, 7, 9), 8: (0, 2, 4, 6, 8)}
SIDES = {0: 0, 2: 1, 3: 2}
"""Which of the barriers that say its tiles are free is waited for ahead of a part. Consumers arrive at all together, so
that the first is the one that orders anything."""
HEADS = [("rows", who, row) for who in (0, 1) for row in range(WARPS)]


class Cta(Machine):
    """One CTA on one query: `blocks` blocks of slots in each of `passes` passes.

    Or on several that take their rows together, where more than one pass means that they are taken apart. `drop` names
    the step that is left out. `global_memory` has the distribution.
    """

    def __init__(
        self,
        blocks: int,
        passes: int,
        rope: bool,
        distribution: bool = True,
        drop: str = "nothing",
        joint: bool = False,
    ) -> None:
        super().__init__(drop)
        self.blocks, self.passes, self.rope, self.wants_distribution = blocks, passes, rope, distribution
        self.joint = joint
        self.tiles = 9 if rope else 8
        producers, first, second = ([f"{role}{w}" for w in range(WARPS)] for role in ("p", "c0.", "c1."))
        both = first + second
        self.heads_full = Barrier("heads_full", 2, both)
        self.heads_free = Barrier("heads_free", 2 * WARPS, producers[:1], starts_free=True)
        self.parts = [Barrier(f"full[{part}]", WARPS * (2 if part == 3 else 1), both) for part in range(4)]
        self.sides = [Barrier(f"free[{side}]", 2 * WARPS, producers, starts_free=True) for side in (0, 1, 2)]
        self.tiles_free = Barrier("tiles_free", 2 * WARPS, first, starts_free=True)
        self.probabilities_ready = [Barrier(f"p_ready[{half}]", WARPS, second) for half in (0, 1)]
        self.ds_ready = Barrier("ds_ready", WARPS, both)
        self.decided = Barrier("decided", 2 * WARPS, producers)
        self.statistics_out = Barrier("statistics_out", 2 * WARPS, both)
        self.cleared = Barrier("cleared", 2 * WARPS, both)
        self.distribution = Barrier("named 1", WARPS, first)
        self.global_memory = Machine()

    @property
    def apart(self) -> bool:
        return self.joint and self.passes > 1

    def heads_tag(self, number: int) -> tuple[int, ...]:
        """Of Q and dO when products read them."""
        return (number, 1) if self.apart else (number,)

    def producer(self, warp: int) -> Steps:
        me, copies, tma = (Agent(f"{name}{warp}") for name in ("p", "cp.async", "tma"))
        phase = pass_phase = token_set = 0
        for number in range(self.passes):
            if warp == 0:
                yield from self.wait(me, self.heads_free, pass_phase ^ 1, "heads_free")
                self.heads_full.arrive(me)
                tma.follow(me)
                for rows in HEADS:
                    self.write(tma, rows, (number,), generic=False)
                yield None
                self.heads_full.arrive(tma)
            pass_phase ^= 1
            if self.joint and number == 0:
                yield from self.wait(me, self.decided, 0, "decided")
                for who in (0, 1):
                    self.read(me, ("apart", who), (0,))
            for block in range(self.blocks):
                tag = (number, block)
                self.write(me, ("tokens", 0 if self.drop == "second set of tokens" else token_set, warp), tag)
                token_set ^= 1
                bounds = PARTS[self.tiles]
                for part in range(4):
                    if part in SIDES:
                        side = SIDES[part]
                        yield from self.wait(me, self.sides[side], phase ^ 1, f"free {side}")
                    copies.follow(me)
                    for tile in range(bounds[part], bounds[part + 1]):
                        self.write(copies, ("k", 0, tile, warp), tag)
                    yield None
                    self.parts[part].arrive(copies)
                self.write(me, ("valid", warp), tag)
                self.parts[3].arrive(me)
                phase ^= 1
                yield None

    def threads(self) -> dict[str, Steps]:
        threads: dict[str, Steps] = {f"p{w}": self.producer(w) for w in range(WARPS)}
        return threads | {f"c{who}.{w}": Consumer(self, who, w).run_query() for who in (0, 1) for w in range(WARPS)}

    def run(self, seed: int) -> None:
        schedule(self.threads(), seed)


class Consumer(Warp[Cta]):
    """One warp of a consumer. Of what lives in registers scores are modelled, and not sums and dQ."""

    def __init__(self, cta: Cta, who: int, warp: int) -> None:
        super().__init__(cta, Agent(f"c{who}.{warp}"))
        self.who, self.warp = who, warp
        self.mma, self.query_mma, self.red = (Agent(f"{name}{who}.{warp}") for name in ("wgmma", "wgmma of dQ", "red"))
        self.k_parity = self.pass_parity = self.distribution_parity = 0
        self.tag: tuple[int, int] = (0, 0)
        self.has_narrow = cta.rope and who == 0
        self.has_key_rope = cta.rope and who == 1
        self.multiplies_ahead = not self.has_narrow

    def rows(self, name: str) -> list[Item]:
        return [(name, half, row) for half in (0, 1) for row in range(WARPS)]

    def keys(self, first: int, end: int) -> list[Item]:
        return [("k", 0, tile, row) for tile in range(first, end) for row in range(WARPS)]

    def run_query(self) -> Steps:
        cta = self.cta
        for number in range(cta.passes):
            yield from self.wait(cta.heads_full, self.pass_parity, "heads_full")
            own_heads = ("rows", self.who, self.warp)
            cta.read(self.me, own_heads, (number,))
            self.fence("fence behind dO")
            cta.write(self.me, ("statistics", self.who, self.warp), (number,))
            if cta.joint and number == 0 and self.warp == 0:
                cta.write(self.me, ("apart", self.who), (0,))
            yield from self.meet_consumers(0, "statistics_out")
            if cta.joint:
                for who in (0, 1):
                    cta.read(self.me, ("apart", who), (0,))
                if number == 0:
                    cta.decided.arrive(self.me)
                if cta.apart:
                    cta.write(self.me, own_heads, cta.heads_tag(number))
                    self.fence("fence behind cleared heads")
                    cta.cleared.arrive(self.me)
                    yield from self.wait(cta.cleared, number & 1, "cleared")
            self.read_statistics(number)
            if cta.blocks and self.multiplies_ahead:
                yield from self.multiply_scores((number, 0))
            for block in range(cta.blocks):
                self.tag = (number, block)
                yield from self.block()
                self.k_parity ^= 1
            self.read_statistics(number)
            cta.heads_free.arrive(self.me)
            self.pass_parity ^= 1
            yield None
            yield from self.meet_consumers(1, "statistics_out at the end of a pass")

    def meet_consumers(self, time: int, step: str) -> Steps:
        self.cta.statistics_out.arrive(self.me)
        yield from self.wait(self.cta.statistics_out, time, step)

    def read_statistics(self, number: int) -> None:
        for who in (0, 1):
            for row in range(WARPS):
                self.cta.read(self.me, ("statistics", who, row), (number,))

    def block(self) -> Steps:
        cta = self.cta
        yield from self.scores()
        if self.who == 0:
            yield from self.make_probabilities()
            if cta.wants_distribution:
                cta.write(self.me, ("distribution", self.warp), self.tag)
                yield from self.add_distribution()
        else:
            yield from self.make_score_gradients()
        yield from self.wait(cta.ds_ready, self.k_parity, f"ds_ready of {self.who}")
        yield from self.gradients()

    def multiply_scores(self, tag: tuple[int, int]) -> Steps:
        for part in range(4):
            yield from self.wait_for_keys([part], self.k_parity)
            self.issue_scores(part, tag)
        yield from self.finish_scores()

    def wait_for_keys(self, parts: Sequence[int], parity: int) -> Steps:
        """One fence for all of these parts."""
        for part in parts:
            yield from self.wait(self.cta.parts[part], parity, f"full {part}")
        self.fence("fence behind gathered rows")

    def issue_scores(self, part: int, tag: tuple[int, int]) -> None:
        cta = self.cta
        bounds = PARTS[cta.tiles]
        end = bounds[part + 1] if self.who == 0 else min(bounds[part + 1], VALUE_TILES)
        self.issue(self.mma, HEADS, cta.heads_tag(tag[0]))
        self.issue(self.mma, self.keys(bounds[part], end), tag)
        cta.write(self.mma, ("scores", self.who, self.warp), tag, generic=False)

    def finish_scores(self) -> Steps:
        yield None
        self.collect(self.mma, "wgmma wait of scores")

    def multiply_ahead(self) -> Steps:
        number, block = self.tag
        if self.multiplies_ahead and block + 1 < self.cta.blocks:
            yield from self.wait_for_keys(range(4), self.k_parity ^ 1)
            for part in range(4):
                self.issue_scores(part, (number, block + 1))
            yield from self.finish_scores()

    def scores(self) -> Steps:
        cta = self.cta
        if not self.multiplies_ahead:
            yield from self.multiply_scores(self.tag)
        cta.read(self.me, ("scores", self.who, self.warp), self.tag, "registers")
        for row in range(WARPS):
            cta.read(self.me, ("valid", row), self.tag)
            token_set = 0 if cta.drop == "second set of tokens" else self.k_parity
            cta.read(self.me, ("tokens", token_set, row), self.tag)

    def make_probabilities(self) -> Steps:
        cta = self.cta
        yield from self.wait(cta.tiles_free, self.k_parity ^ 1, "tiles_free")
        for half in (0, 1):
            cta.write(self.me, ("p", half, self.warp), self.tag)
            cta.write(self.me, ("ds", half, self.warp), (*self.tag, 0))
            self.fence("fence behind P")
            cta.probabilities_ready[half].arrive(self.me)
            yield None

    def add_distribution(self) -> Steps:
        cta = self.cta
        yield from self.meet_distribution("named barrier before adding")
        for row in range(WARPS):
            cta.read(self.me, ("distribution", row), self.tag)
        if self.warp == 0:
            self.red.follow(self.me)
            cta.global_memory.write(self.red, ("attn_dist", self.tag[1]), self.tag)
        yield None
        yield from self.meet_distribution("named barrier behind adding")

    def meet_distribution(self, step: str) -> Steps:
        self.cta.distribution.arrive(self.me)
        yield from self.wait(self.cta.distribution, self.distribution_parity, step)
        self.distribution_parity ^= 1

    def make_score_gradients(self) -> Steps:
        cta = self.cta
        for half in (0, 1):
            yield from self.wait(cta.probabilities_ready[half], self.k_parity, f"p_ready {half}")
            cta.read(self.me, ("p", half, self.warp), self.tag)
            cta.read(self.me, ("ds", half, self.warp), (*self.tag, 0))
            cta.write(self.me, ("ds", half, self.warp), (*self.tag, 1))
        self.fence("fence behind dS")
        cta.ds_ready.arrive(self.me)
        yield None

    def issue_wide(self) -> None:
        self.issue(self.query_mma, self.rows("ds"), (*self.tag, 1))
        self.issue(self.query_mma, self.keys(self.who * HALF_TILES, (self.who + 1) * HALF_TILES), self.tag)

    def issue_narrow(self) -> None:
        if self.has_narrow:
            self.issue(self.query_mma, self.rows("ds"), (*self.tag, 1))
            self.issue(self.query_mma, self.keys(VALUE_TILES, self.cta.tiles), self.tag)

    def gradients(self) -> Steps:
        cta = self.cta
        for number in range(HALF_TILES + self.has_key_rope):
            self.issue_sums()
            if number == 1:
                yield None
                self.collect(self.query_mma, "wgmma wait of dQ")
                for side in cta.sides:
                    side.arrive(self.me)
            yield None
            self.collect(self.mma, "wgmma wait of dKV")
            if number == 0:
                self.issue_wide()
                self.issue_narrow()
            if number == 2:
                yield from self.multiply_ahead()
        cta.tiles_free.arrive(self.me)

    def issue_sums(self) -> None:
        """Products of a tile of dKV."""
        self.issue(self.mma, self.rows("ds"), (*self.tag, 1))
        self.issue(self.mma, self.rows("p"), self.tag)
        self.issue(self.mma, HEADS, self.cta.heads_tag(self.tag[0]))
