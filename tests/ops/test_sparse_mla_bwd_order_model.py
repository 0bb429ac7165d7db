"""What the plan expects of L2 where queries take their rows in the order of tokens, against a cache that is simulated.

Queries under way are workers on a common clock. A block of rows takes a worker longer the more of them it misses, so
those who are ahead are slower and those behind are faster; times vary by chance besides.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from plan_kit import MLA

from cupymla.ops.sparse_mla_bwd import plan, spec

ROUNDS, BLOCK = 12, 8  # queries of a worker; rows that it takes at a time


class Cache:
    """The rows that were used last."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._held: OrderedDict[int, None] = OrderedDict()

    def misses(self, rows: list[int]) -> int:
        """How many of these it did not hold; it does now."""
        missed = 0
        for row in rows:
            missed += row not in self._held
            self._held[row] = None
            self._held.move_to_end(row)
            if len(self._held) > self._rows:
                self._held.popitem(last=False)
        return missed


def missed(tokens: int, cached: int, slots: int, workers: int, in_order: bool, jitter: float) -> float:
    """The share of a selection's rows that are not in a cache of so many rows."""
    rng = np.random.default_rng(3)

    def selection() -> list[int]:
        named = rng.choice(tokens, slots, replace=False)
        return [int(token) for token in (np.sort(named) if in_order else named)]

    cache, misses = Cache(cached), 0
    left = [(ROUNDS, selection()) for _ in range(workers)]
    clock = [(0.0, worker) for worker in range(workers)]
    while clock:
        now, worker = heapq.heappop(clock)
        rounds, rows = left[worker]
        found = cache.misses(rows[:BLOCK])
        misses += found
        now += max(1.0, 2 * found / BLOCK) * (1 + jitter * rng.standard_normal())
        rest = rows[BLOCK:]
        left[worker] = (rounds, rest) if rest else (rounds - 1, selection())
        if left[worker][0]:
            heapq.heappush(clock, (now, worker))
    return misses / (ROUNDS * workers * slots)


@pytest.mark.parametrize("jitter", [0.0, 0.15])
@pytest.mark.parametrize(("tokens", "workers"), [(2048, 66), (8192, 66), (2048, 132)])
def test_rows_are_missed_as_often_as_the_plan_expects(
    tokens: int, workers: int, jitter: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sixteenth of 32768 and 131072 tokens, 2048 slots and an H200's L2."""
    cached = int(plan._L2_BYTES / (576 * (2 + 4)) / 16)
    shared = replace(MLA, s_q=4096, s_kv=tokens, topk=128, options=spec.Options())
    problem = spec.Problem(shared, has_attn_dist=False, dkv_dtype="bfloat16", dkv_shape=(tokens, 576))
    monkeypatch.setattr(plan, "_L2_BYTES", plan._L2_BYTES / 16)
    gain = missed(tokens, cached, 128, workers, False, jitter) - missed(tokens, cached, 128, workers, True, jitter)
    monkeypatch.setattr(plan, "_ORDER_GAIN", gain - 0.04)
    assert plan.takes_rows_in_order(problem, workers)
    monkeypatch.setattr(plan, "_ORDER_GAIN", gain + 0.04)
    assert not plan.takes_rows_in_order(problem, workers)
