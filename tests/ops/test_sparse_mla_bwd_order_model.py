"""What the plan expects of L2 where queries take their rows in the order of tokens, against a cache that is simulated.

Queries under way are workers on a common clock. A block of rows takes a worker longer the more of them it misses, so
those who are ahead are slower and those behind are faster; times vary by chance besides. Sizes are an eighth of the
real ones, blocks as many as in the kernel: with fewer and larger ones chance moves workers further apart.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from plan_kit import MLA

from cupymla.ops.sparse_mla_bwd import spec
from cupymla.ops.sparse_mla_bwd.paths import token_order

SCALE, ROUNDS, BLOCK = 8, 12, 8  # of the sizes; queries of a worker if not said; rows that it takes at a time
TOPK = 2048 // SCALE


class Cache:
    """The rows that were used last."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._held: OrderedDict[int, None] = OrderedDict()

    def misses(self, rows: list[int]) -> int:
        """How many of these it did not hold; it does now."""
        held, used, missed = self._held, self._held.move_to_end, 0
        for row in rows:
            if row in held:
                used(row)
                continue
            held[row] = None
            missed += 1
            if len(held) > self._rows:
                held.popitem(last=False)
        return missed


def missed(
    tokens: int, cached: int, workers: int, in_order: bool, jitter: float, fewest: int = TOPK, rounds: int = ROUNDS
) -> float:
    """The share of all selections' rows, `fewest` to `TOPK` of each query, that are not in a cache of so many rows."""
    rng = np.random.default_rng(3)
    taken = 0

    def selection() -> list[int]:
        nonlocal taken
        named = rng.choice(tokens, rng.integers(fewest, TOPK, endpoint=True), replace=False)
        taken += len(named)
        rows: list[int] = (np.sort(named) if in_order else named).tolist()
        return rows

    cache, misses = Cache(cached), 0
    left = [(rounds, selection()) for _ in range(workers)]
    clock = [(0.0, worker) for worker in range(workers)]
    while clock:
        now, worker = heapq.heappop(clock)
        still, rows = left[worker]
        found = cache.misses(rows[:BLOCK])
        misses += found
        now += max(1.0, 2 * found / BLOCK) * (1 + jitter * rng.standard_normal())
        rest = rows[BLOCK:]
        if rest or still > 1:
            left[worker] = (still, rest) if rest else (still - 1, selection())
            heapq.heappush(clock, (now, worker))
    return misses / taken


def rows_in_l2(room: float = 1.0) -> int:
    """As many as an H200's L2, or a share of it, holds with their sums."""
    return int(token_order._L2_BYTES * room / (576 * (2 + 4)) / SCALE)


@pytest.mark.parametrize(
    ("s_kv", "workers", "room", "jitter"),
    [
        *((32768, 66, 1.0, 0.0), (32768, 66, 0.5, 0.15)),
        *((131072, 66, 1.0, 0.15), (131072, 66, 0.5, 0.0)),
        *((32768, 132, 1.0, 0.15), (32768, 132, 0.5, 0.0)),
    ],
)
def test_rows_are_missed_as_often_as_the_plan_expects(
    s_kv: int, workers: int, room: float, jitter: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2048 entries in an H200's L2, or in half of it. Every two of the choices meet."""
    tokens, cached = s_kv // SCALE, rows_in_l2(room)
    by_entries = missed(tokens, cached, workers, False, jitter)
    in_order = missed(tokens, cached, workers, True, jitter)
    named = workers * TOPK / tokens
    assert in_order == pytest.approx((1 - math.exp(-named)) / named, abs=0.02)
    assert by_entries == pytest.approx(1 - cached / tokens, abs=0.02)

    shared = replace(MLA, s_q=4096, s_kv=tokens, topk=TOPK, options=spec.Options())
    problem = spec.Problem(shared, has_attn_dist=False, dkv_dtype="bfloat16", dkv_shape=(tokens, 576))
    monkeypatch.setattr(token_order, "_L2_BYTES", token_order._L2_BYTES * room / SCALE)
    monkeypatch.setattr(token_order, "_ORDER_GAIN", by_entries - in_order - 0.04)
    assert token_order.takes_rows_in_order(problem, workers)
    monkeypatch.setattr(token_order, "_ORDER_GAIN", by_entries - in_order + 0.04)
    assert not token_order.takes_rows_in_order(problem, workers)


@pytest.mark.parametrize(("s_kv", "in_order"), [(32768, 0.33), (131072, 0.86)])
def test_queries_of_unlike_lengths_find_fewer(s_kv: int, in_order: float) -> None:
    """Half to all of 2048 entries valid, 4096 queries: they begin at different times, and lose each other in a long
    sweep."""
    found = missed(s_kv // SCALE, rows_in_l2(), 66, True, 0.1, fewest=TOPK // 2, rounds=62)
    assert found == pytest.approx(in_order, abs=0.03)
