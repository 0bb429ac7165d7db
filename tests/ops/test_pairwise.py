"""Combinations in which every two values meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupymla.ops.xl_paged_attention import cases
from cupymla.ops.xl_paged_attention.paging import HEAD_SIZES, LAYOUTS, elements_of_x
from cupymla_lab.problems import xl_paged_attention as problems
from cupymla_lab.problems.pairwise import Row, pairwise


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
    """Of all that is declared, whatever the cases have: sizes, types of query and cache, layouts and forms of bias."""
    elements = list(itertools.product(("bfloat16", "float16", "float32"), ("", "float8_e4m3fn", "float8_e5m2")))
    forms = [tuple(sorted(form.items())) for form in problems._FORMS]
    choices = (HEAD_SIZES, (1, 2, 3, 8, 16, 32, 64, 100, 128, 256), elements, LAYOUTS, forms)
    wanted = all_pairs(choices, lambda row: row[3] != "vllm" or row[0] % elements_of_x(row[2][1] or row[2][0]) == 0)

    def row(case: cases.XlCase) -> Row:
        (form,) = (form for form in forms if fits(case, dict(form)))
        return case.head_size, case.block_size, (case.dtype, case.kv_dtype), case.kv_layout, form

    made = [row(case) for case in problems.CASES if case.intent == "pairs"]
    assert set().union(*map(pairs, made)) == wanted
    assert len(wanted) == 562, "the rule keeps no two values apart for good"


def fits(case: cases.XlCase, form: dict[str, Any]) -> bool:
    """Whether a case has this form of bias, and what it leaves out as it is by default."""
    asked = {"extent": 0, "rel_extend": "zero", **form}
    return all(getattr(case, name) == value for name, value in asked.items())


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_layout_that_a_head_size_does_not_fit_is_left_out(kv_dtype: str) -> None:
    made = [case for case in problems.CASES if case.intent == "pairs"]
    sizes = {case.head_size for case in made if case.kv_dtype == kv_dtype and case.kv_layout == "vllm"}
    assert 120 not in sizes and 112 in sizes
