"""The pipeline of the sm_90a backward as a model in plain Python: no deadlock, no overrun barrier, no race.

Roles are coroutines that follow producer.cuh with common/sm90/row_gather.cuh, consumer.cuh, gradients.cuh,
statistics.cuh and attention.cuh step by step, with the barriers of storage.cuh and their parities. Agents, barriers and
the race rule are those of the forward's model.
"""

from __future__ import annotations

from collections.abc import Sequence

from schedule_machine import Agent, Barrier, Clock, Item, Machine, Steps, Violation, schedule

WARPS = 2  # per warpgroup; the kernel has four
VALUE_TILES, HALF_TILES, STAGING_TILES = 8, 4, 4
PARTS = {9: (0, 3, 5, 7, 9), 8: (0, 2, 4, 6, 8)}
LEFT_PARTS = 2
HEADS = [("rows", who, row) for who in (0, 1) for row in range(WARPS)]


class Cta(Machine):
    """One CTA on one query: `blocks` blocks of slots in each of `passes` passes.

    Or on several that take their rows together, where more than one pass means that they are taken apart.
    """

    def __init__(self, query: Query, rank: int) -> None:
        super().__init__(query.drop)
        self.query, self.rank = query, rank
        self.tiles = 9 if query.rope else 8
        self.left = self.tiles - STAGING_TILES
        producers, first, second = ([f"{rank}/{role}{w}" for w in range(WARPS)] for role in ("p", "c0.", "c1."))
        both = first + second
        self.heads_full = Barrier("heads_full", 2, both)
        self.heads_free = Barrier("heads_free", 2 * WARPS, producers[:1], starts_free=True)
        self.parts = [Barrier(f"full[{part}]", WARPS * (2 if part == 3 else 1), both) for part in range(4)]
        self.sides = [Barrier(f"free[{side}]", 2 * WARPS, producers, starts_free=True) for side in (0, 1, 2)]
        self.tiles_free = Barrier("tiles_free", 2 * WARPS, first, starts_free=True)
        self.probabilities_ready = [Barrier(f"p_ready[{half}]", WARPS, second) for half in (0, 1)]
        self.ds_ready = Barrier("ds_ready", WARPS, both)
        self.staging_ready = Barrier("staging_ready", 2 * WARPS, both)
        self.first_ready = Barrier("first_ready", WARPS, first)
        self.received = [Barrier(f"received[{w}]", 1 + WARPS, names) for w, names in enumerate((first, second))]
        self.drained = [Barrier(f"drained[{w}]", WARPS, names) for w, names in enumerate((first, second))]
        self.decided = Barrier("decided", 2 * WARPS, producers)
        self.statistics_out = Barrier("statistics_out", 2 * WARPS, both)
        self.cleared = Barrier("cleared", 2 * WARPS, both)
        self.slots_in = Barrier("slots_in", 1, producers + both)
        self.distribution = Barrier("named 1", WARPS, first)
        self.used_from_afar: list[tuple[str, int]] = []
        self.left_at: Clock = {}

    @property
    def other(self) -> Cta:
        return self.query.ctas[1 - self.rank]

    def reach(self, agent: Agent) -> None:
        """An agent of the other CTA uses this one's memory."""
        self.used_from_afar.append((agent.name, agent.tick()))

    def leave(self, agent: Agent) -> None:
        """A thread of this CTA has ended; with the last one its memory is gone."""
        for who, time in agent.clock.items():
            self.left_at[who] = max(self.left_at.get(who, 0), time)

    def require_left_alone(self) -> None:
        for who, time in self.used_from_afar:
            if self.left_at.get(who, 0) < time:
                raise Violation(f"CTA {self.rank} leaves while {who} may use its memory")

    def staging(self, who: int) -> range:
        return range(self.left + 2 * who, self.left + 2 * who + 2)

    def producer(self, warp: int) -> Steps:
        me, copies, tma = (Agent(f"{self.rank}/{name}{warp}") for name in ("p", "cp.async", "tma"))
        phase = pass_phase = token_set = cluster = 0
        yield from self.query.learn_slots(me, self)
        for number in range(self.query.passes):
            if warp == 0:
                yield from self.wait(me, self.heads_free, pass_phase ^ 1, "heads_free")
                self.heads_full.arrive(me)
                tma.follow(me)
                for rows in HEADS:
                    self.write(tma, rows, (number,), generic=False)
                yield None
                self.heads_full.arrive(tma)
            pass_phase ^= 1
            if self.query.joint and number == 0:
                yield from self.wait(me, self.decided, 0, "decided")
                for who in (0, 1):
                    self.read(me, ("apart", who), (0,))
            for block in range(self.query.blocks):
                tag = (number, block)
                self.write(me, ("tokens", 0 if self.drop == "second set of tokens" else token_set, warp), tag)
                token_set ^= 1
                bounds = PARTS[self.tiles]
                for part in range(4):
                    if part == 0:
                        yield from self.wait(me, self.sides[0], phase ^ 1, "free left")
                    if part >= LEFT_PARTS:
                        side = 1 + part - LEFT_PARTS
                        yield from self.wait(me, self.sides[side], phase ^ 1, f"free staging {side - 1}")
                    copies.follow(me)
                    for tile in range(bounds[part], bounds[part + 1]):
                        self.write(copies, ("k", 0, tile, warp), tag)
                        for who, row in ((w, r) for w in (0, 1) for r in range(WARPS) if tile in self.staging(w)):
                            self.require_unused(copies, ("staging", who, row))
                    yield None
                    self.parts[part].arrive(copies)
                self.write(me, ("valid", warp), tag)
                self.parts[3].arrive(me)
                phase ^= 1
                yield None
            yield from self.query.end_pass(me, number, cluster)
            cluster ^= 1
        self.leave(me)

    def consumer(self, who: int, warp: int) -> Steps:
        return Consumer(self, who, warp).run_query()

    def threads(self) -> dict[str, Steps]:
        threads: dict[str, Steps] = {f"{self.rank}/p{w}": self.producer(w) for w in range(WARPS)}
        return threads | {f"{self.rank}/c{who}.{w}": self.consumer(who, w) for who in (0, 1) for w in range(WARPS)}


class Query:
    """The CTAs of one query; `drop` names the step that is left out. `global_memory` has the distribution."""

    def __init__(
        self,
        ctas: int,
        blocks: int,
        passes: int,
        rope: bool,
        distribution: bool = True,
        drop: str = "nothing",
        partials: bool = False,
        joint: bool = False,
    ) -> None:
        self.blocks, self.passes, self.rope, self.wants_distribution = blocks, passes, rope, distribution
        self.drop, self.partials, self.joint = drop, partials, joint
        self.ctas = [Cta(self, rank) for rank in range(ctas)]
        everyone = [name for cta in self.ctas for name in cta.threads()]
        self.barrier = Barrier("cluster", len(everyone), everyone)
        self.global_memory = Cta(self, 2)

    @property
    def apart(self) -> bool:
        return self.joint and self.passes > 1

    def heads_tag(self, number: int) -> tuple[int, ...]:
        """Of Q and dO when products read them."""
        return (number, 1) if self.apart else (number,)

    def meet(self, agent: Agent, parity: int) -> Steps:
        if len(self.ctas) > 1:
            self.barrier.arrive(agent)
            yield from self.ctas[0].wait(agent, self.barrier, parity, "cluster barrier")

    def end_pass(self, agent: Agent, number: int, parity: int) -> Steps:
        if number + 1 < self.passes:
            yield from self.meet(agent, parity)

    def learn_slots(self, agent: Agent, cta: Cta) -> Steps:
        """All CTAs have begun, which is not modelled. A thread of the first sends the second the number of slots."""
        if len(self.ctas) == 1:
            return
        if cta.rank == 0 and agent.name == "0/c0.0":
            other, store = cta.other, Agent("0/st.async of slots")
            store.follow(agent)
            other.reach(store)
            other.write(store, ("slots",), (0,))
            yield None
            other.slots_in.arrive(store)
        elif cta.rank:
            yield from cta.wait(agent, cta.slots_in, 0, "slots_in")
            cta.read(agent, ("slots",), (0,))

    def run(self, seed: int) -> None:
        schedule({name: steps for cta in self.ctas for name, steps in cta.threads().items()}, seed)
        for cta in self.ctas:
            cta.require_left_alone()


class Consumer:
    """One warp of a consumer. Scores, sums and dQ live in registers: not modelled."""

    def __init__(self, cta: Cta, who: int, warp: int) -> None:
        self.cta, self.who, self.warp = cta, who, warp
        names = ("c", "wgmma", "wgmma of own sums", "wgmma of dQ", "st.async", "red")
        self.me, self.mma, self.own_mma, self.query_mma, self.store, self.red = (
            Agent(f"{cta.rank}/{name}{who}.{warp}") for name in names
        )
        self.k_parity = self.pass_parity = self.distribution_parity = self.cluster_parity = 0
        self.received = self.drained = 0
        self.tag: tuple[int, int] = (0, 0)
        self.has_narrow = cta.query.rope and who == 0
        self.has_key_rope = cta.query.rope and who == 1
        # Parts of a block's scores that are multiplied in the block before.
        self.ahead = 0
        if len(cta.query.ctas) == 1:
            self.ahead = 0 if self.has_narrow else 4
        elif who == 1 and not cta.query.partials:
            self.ahead = LEFT_PARTS

    def wait(self, barrier: Barrier, parity: int, step: str) -> Steps:
        yield from self.cta.wait(self.me, barrier, parity, step)

    def rows(self, name: str) -> list[Item]:
        return [(name, half, row) for half in (0, 1) for row in range(WARPS)]

    def keys(self, first: int, end: int) -> list[Item]:
        return [("k", 0, tile, row) for tile in range(first, end) for row in range(WARPS)]

    def issue(self, mma: Agent, items: Sequence[Item], tag: tuple[int, ...]) -> None:
        mma.follow(self.me)
        for item in items:
            self.cta.read(mma, item, tag, "async")

    def collect(self, mma: Agent, step: str) -> None:
        if self.cta.has(step):
            self.me.follow(mma)

    def run_query(self) -> Steps:
        query = self.cta.query
        yield from query.learn_slots(self.me, self.cta)
        for number in range(query.passes):
            yield from self.wait(self.cta.heads_full, self.pass_parity, "heads_full")
            own_heads = ("rows", self.who, self.warp)
            self.cta.read(self.me, own_heads, (number,))
            if self.cta.has("fence behind dO"):
                self.me.fence()
            self.cta.write(self.me, ("statistics", self.who, self.warp), (number,))
            if query.joint and number == 0 and self.warp == 0:
                self.cta.write(self.me, ("apart", self.who), (0,))
            yield from self.meet_consumers(0, "statistics_out")
            if query.joint:
                for who in (0, 1):
                    self.cta.read(self.me, ("apart", who), (0,))
                if number == 0:
                    self.cta.decided.arrive(self.me)
                if query.apart:
                    self.cta.write(self.me, own_heads, query.heads_tag(number))
                    if self.cta.has("fence behind cleared heads"):
                        self.me.fence()
                    self.cta.cleared.arrive(self.me)
                    yield from self.wait(self.cta.cleared, number & 1, "cleared")
            self.read_statistics(number)
            if query.blocks:
                yield from self.multiply_scores(range(self.ahead), self.k_parity, (number, 0))
            for block in range(query.blocks):
                self.tag = (number, block)
                yield from self.block()
                self.k_parity ^= 1
            self.read_statistics(number)
            self.cta.heads_free.arrive(self.me)
            self.pass_parity ^= 1
            yield None
            yield from self.meet_consumers(1, "statistics_out at the end of a pass")
            self.me.follow(self.red)  # the cluster's barrier publishes reductions too
            yield from query.end_pass(self.me, number, self.cluster_parity)
            self.cluster_parity ^= 1
        self.cta.leave(self.me)

    def meet_consumers(self, time: int, step: str) -> Steps:
        self.cta.statistics_out.arrive(self.me)
        yield from self.wait(self.cta.statistics_out, time, step)

    def read_statistics(self, number: int) -> None:
        for who in (0, 1):
            for row in range(WARPS):
                self.cta.read(self.me, ("statistics", who, row), (number,))

    def block(self) -> Steps:
        cta = self.cta
        wants = cta.query.wants_distribution and self.who == 0
        yield from self.scores()
        if self.who == 0:
            yield from self.make_probabilities()
            if wants:
                cta.write(self.me, ("distribution", self.warp), self.tag)
            if wants and cta.rank == 0:
                yield from self.add_distribution()
        else:
            yield from self.make_score_gradients()
        yield from self.wait(cta.ds_ready, self.k_parity, f"ds_ready of {self.who}")
        yield from self.gradients()
        if wants and cta.rank == 1:
            yield from self.add_distribution()

    def multiply_scores(self, parts: Sequence[int], parity: int, tag: tuple[int, int]) -> Steps:
        for joined in self.joined(parts):
            yield from self.wait_for_keys(joined, parity)
            for part in joined:
                self.issue_scores(part, tag)
        yield from self.finish_scores()

    def joined(self, parts: Sequence[int]) -> list[Sequence[int]]:
        """Parts that are waited for together, with one fence."""
        if len(self.cta.query.ctas) == 1:
            return [[part] for part in parts]
        left = [part for part in parts if part < LEFT_PARTS]
        right = [part for part in parts if part >= LEFT_PARTS]
        return [group for group in (left, *([right] if self.who else [[part] for part in right])) if group]

    def wait_for_keys(self, parts: Sequence[int], parity: int) -> Steps:
        for part in parts:
            yield from self.wait(self.cta.parts[part], parity, f"full {part}")
        if self.cta.has("fence behind gathered rows"):
            self.me.fence()

    def issue_scores(self, part: int, tag: tuple[int, int]) -> None:
        cta = self.cta
        bounds = PARTS[cta.tiles]
        end = bounds[part + 1] if self.who == 0 else min(bounds[part + 1], VALUE_TILES)
        self.issue(self.mma, HEADS, cta.query.heads_tag(tag[0]))
        self.issue(self.mma, self.keys(bounds[part], end), tag)

    def finish_scores(self) -> Steps:
        yield None
        self.collect(self.mma, "wgmma wait of scores")

    def multiply_ahead(self) -> Steps:
        number, block = self.tag
        if block + 1 < self.cta.query.blocks:
            yield from self.multiply_scores(range(self.ahead), self.k_parity ^ 1, (number, block + 1))

    def scores(self) -> Steps:
        cta = self.cta
        yield from self.multiply_scores(range(self.ahead, 4), self.k_parity, self.tag)
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
            if cta.has("fence behind P"):
                self.me.fence()
            cta.probabilities_ready[half].arrive(self.me)
            yield None

    def add_distribution(self) -> Steps:
        cta = self.cta
        yield from self.meet_distribution("named barrier before adding")
        for row in range(WARPS):
            cta.read(self.me, ("distribution", row), self.tag)
        if self.warp == 0:
            self.red.follow(self.me)
            cta.query.global_memory.write(self.red, ("attn_dist", self.tag[1]), self.tag)
            if cta.rank == 0 and cta.has("fence behind adding"):
                self.me.follow(self.red)
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
        if cta.has("fence behind dS"):
            self.me.fence()
        cta.ds_ready.arrive(self.me)
        yield None

    def gradients(self) -> Steps:
        yield from self.keep_all() if len(self.cta.query.ctas) == 1 else self.exchange_all()

    def issue_wide(self) -> None:
        self.issue(self.query_mma, self.rows("ds"), (*self.tag, 1))
        self.issue(self.query_mma, self.keys(self.who * HALF_TILES, (self.who + 1) * HALF_TILES), self.tag)

    def issue_narrow(self) -> None:
        if self.has_narrow:
            self.issue(self.query_mma, self.rows("ds"), (*self.tag, 1))
            self.issue(self.query_mma, self.keys(VALUE_TILES, self.cta.tiles), self.tag)

    def keep_all(self) -> Steps:
        cta = self.cta
        for number in range(HALF_TILES + self.has_key_rope):
            self.issue_sums()
            if number == 1:
                yield None
                self.collect(self.query_mma, "wgmma wait of dQ")
                for side in cta.sides:
                    side.arrive(self.me)
            yield from self.finish_sums()
            if number == 0:
                self.issue_wide()
                self.issue_narrow()
            if number == 2:
                yield from self.multiply_ahead()
        cta.tiles_free.arrive(self.me)

    def exchange_all(self) -> Steps:
        cta, other = self.cta, self.cta.other
        if self.who == 0:
            self.issue_narrow()
            yield None
            self.collect(self.query_mma, "wgmma wait of dQ")
            cta.sides[2].arrive(self.me)
            other.reach(self.me)
            other.staging_ready.arrive(self.me)
            yield from self.wait(cta.first_ready, self.k_parity, "first_ready")
        self.issue_wide()
        self.issue_sums()
        if self.who == 1:
            self.issue_sums(own=True)
        yield None
        self.collect(self.query_mma, "wgmma wait of dQ")
        cta.sides[0].arrive(self.me)
        if self.who == 1:
            cta.sides[1].arrive(self.me)
            other.reach(self.me)
            other.staging_ready.arrive(self.me)
        yield from self.finish_sums()
        if self.who == 0:
            yield from self.exchange(first=True, last=False)
            self.issue_sums()
            yield from self.finish_sums()
            yield from self.exchange(first=False, last=True)
        else:
            cta.first_ready.arrive(self.me)
            yield from self.exchange_by_turns()

    def exchange_by_turns(self) -> Steps:
        """Consumer 1, behind its first two tiles' products, one of which is done."""
        cta = self.cta
        yield from self.hand_over(first=True)
        yield from self.finish_sums(own=True)
        yield from self.take_over(last=False)
        self.issue_sums()
        yield None
        self.issue_sums(own=True)
        yield from self.finish_sums()
        yield from self.hand_over(first=False)
        yield from self.finish_sums(own=True)
        if self.has_key_rope:
            yield from self.take_over(last=False)
            self.issue_sums()
            yield from self.finish_sums()
            cta.tiles_free.arrive(self.me)
            yield from self.exchange_rope()
        else:
            cta.tiles_free.arrive(self.me)
            yield from self.take_over(last=True)
            yield from self.multiply_ahead()

    def exchange_rope(self) -> Steps:
        number, block = self.tag
        ahead = self.ahead > 0 and block + 1 < self.cta.query.blocks
        yield from self.hand_over(first=False)
        if ahead:
            yield from self.wait_for_keys(range(LEFT_PARTS), self.k_parity ^ 1)
            self.issue_scores(0, (number, block + 1))
        yield from self.take_over(last=True)
        if ahead:
            self.issue_scores(1, (number, block + 1))
            yield from self.finish_scores()

    def issue_sums(self, *, own: bool = False) -> None:
        """Products of a tile of dKV; `own`: of those that consumer 1 has two of under way, the later ones."""
        mma = self.own_mma if own else self.mma
        self.issue(mma, self.rows("ds"), (*self.tag, 1))
        self.issue(mma, self.rows("p"), self.tag)
        self.issue(mma, HEADS, self.cta.query.heads_tag(self.tag[0]))

    def finish_sums(self, *, own: bool = False) -> Steps:
        yield None
        self.collect(self.own_mma if own else self.mma, "wgmma wait of dKV")

    def exchange(self, *, first: bool, last: bool) -> Steps:
        yield from self.hand_over(first=first)
        self.issue_sums()
        yield from self.finish_sums()
        if last:
            self.cta.tiles_free.arrive(self.me)
        yield from self.take_over(last=last)

    def hand_over(self, *, first: bool) -> Steps:
        cta, other = self.cta, self.cta.other
        if first:
            yield from self.wait(cta.staging_ready, self.k_parity, "staging_ready")
        else:
            yield from self.wait(cta.drained[self.who], self.drained, "drained")
            self.drained ^= 1
        self.store.follow(self.me)
        for tile in other.staging(self.who):
            for row in range(WARPS):
                other.require_unused(self.store, ("k", 0, tile, row))
        other.write(self.store, ("staging", self.who, self.warp), self.tag)
        yield None
        other.reach(self.store)
        other.received[self.who].arrive(self.store)

    def take_over(self, *, last: bool) -> Steps:
        cta, other = self.cta, self.cta.other
        if self.warp == 0:
            cta.received[self.who].arrive(self.me)
        yield from self.wait(cta.received[self.who], self.received, "received")
        self.received ^= 1
        cta.read(self.me, ("staging", self.who, self.warp), self.tag)
        if last:
            cta.sides[1 + self.who].arrive(self.me)
        else:
            other.reach(self.me)
            other.drained[self.who].arrive(self.me)
        yield None
