"""Combinations in which every two values meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupymla.ops.pairwise import Row, pairwise
from cupymla.ops.xl_paged_attention import cases


def pairs(row: Row) -> set[tuple[Any, ...]]:
    """Two choices with their values."""
    return set(itertools.combinations(enumerate(row), 2))


def all_pairs(choices: Sequence[Sequence[Any]], allowed: Callable[[Row], bool]) -> set[tuple[Any, ...]]:
    return set().union(*(pairs(row) for row in itertools.product(*choices) if allowed(row)))


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.integers(0, 6))
def test_every_pair_that_can_meet_does(sizes: list[int], forbidden: int) -> None:
    """With rows left out by a rule that no pair alone tells of, too."""
    choices = [range(size) for size in sizes]

    def allowed(row: Row) -> bool:
        return sum(row) != forbidden or not any(row)

    rows = pairwise(choices, allowed)
    assert all(map(allowed, rows))
    assert set().union(*map(pairs, rows)) == all_pairs(choices, allowed)
    assert rows == pairwise(choices, allowed)


def test_no_row_is_there_for_nothing() -> None:
    choices = [range(4), range(5), range(3), range(3)]
    rows = pairwise(choices, lambda row: True)
    assert 20 <= len(rows) <= 26  # all pairs of the two longest take twenty
    for k in range(len(rows)):
        seen = set().union(*(pairs(row) for row in rows[:k]))
        assert not pairs(rows[k]) <= seen


def test_cases_of_paged_attention_have_all_pairs() -> None:
    """Of sizes, element types, layouts and forms of bias."""
    made = [case for case in cases.CASES if case.intent == "pairs"]
    found = {
        field: {getattr(case, field) for case in made}
        for field in ("head_size", "block_size", "dtype", "kv_dtype", "kv_layout", "bias")
    }
    for (one, these), (other, those) in itertools.combinations(found.items(), 2):
        met = {(getattr(case, one), getattr(case, other)) for case in made}
        missing = set(itertools.product(these, those)) - met
        assert not missing, (one, other, missing)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_layout_that_a_head_size_does_not_fit_is_left_out(kv_dtype: str) -> None:
    sizes = {case.head_size for case in cases.CASES if case.kv_dtype == kv_dtype and case.kv_layout == "vllm"}
    assert 120 not in sizes and 112 in sizes
