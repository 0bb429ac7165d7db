"""topk on the CPU: what is selected, in which order, and what is refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupymla
from cupymla.errors import InputError


def brute(row: Any, topk: int, begin: int, end: int) -> list[int]:
    """The selection of one row by sorting pairs, descending scores and ascending ids."""
    pairs = [(-float(row[s]), s) for s in range(begin, end) if float(row[s]) > -np.inf]
    return [s for _, s in sorted(pairs)[:topk]]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("topk", [1, 5, 40, 100])
def test_selection_is_that_of_a_sort(dtype: Any, topk: int) -> None:
    rng = np.random.default_rng(topk)
    scores = np.round(rng.standard_normal((20, 40)), 1).astype(dtype)  # many equals
    scores[rng.random(scores.shape) < 0.1] = np.nan
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    scores[rng.random(scores.shape) < 0.05] = np.inf
    starts = rng.integers(-10, 50, 20, dtype=np.int32)
    ends = rng.integers(-10, 50, 20, dtype=np.int32)
    by_score = cupymla.topk(scores, topk, starts=starts, ends=ends, order="score", return_values=True)
    by_index = cupymla.topk(scores, topk, starts=starts, ends=ends, return_values=True)
    for t in range(20):
        wanted = brute(scores[t], topk, max(starts[t], 0), min(ends[t], 40))
        for (indices, count, values), order in ((by_score, wanted), (by_index, sorted(wanted))):
            assert count[t] == len(wanted)
            assert indices[t].tolist() == order + [-1] * (topk - len(wanted))
            assert values.dtype == scores.dtype
            np.testing.assert_array_equal(values[t, : len(wanted)], scores[t][order])
            assert (values[t, len(wanted) :] == -np.inf).all()


def test_zeros_of_both_signs_are_equal() -> None:
    scores = np.array([[-0.0, 0.0, -1.0, -0.0, 0.0]], np.float32)
    indices, _ = cupymla.topk(scores, 3, order="score")
    assert indices.tolist() == [[0, 1, 3]]


def test_a_batch_is_its_entries() -> None:
    scores = np.random.default_rng(0).standard_normal((3, 4, 30)).astype(np.float32)
    indices, count = cupymla.topk(scores, 7)
    for entry in range(3):
        own, own_count = cupymla.topk(scores[entry], 7)
        np.testing.assert_array_equal(indices[entry], own)
        np.testing.assert_array_equal(count[entry], own_count)


def test_arrays_that_are_given_are_written_and_returned() -> None:
    scores = np.random.default_rng(0).standard_normal((4, 30)).astype(np.float32)
    indices, count = np.full((4, 7), -9, np.int32), np.full(4, -9, np.int32)
    values = np.full((4, 7), np.nan, np.float32)
    made: tuple[Any, ...] = cupymla.topk(scores, 7, return_values=True, indices=indices, count=count, values=values)
    assert made[0] is indices and made[1] is count and made[2] is values
    for given, fresh in zip(made, cupymla.topk(scores, 7, return_values=True), strict=True):
        np.testing.assert_array_equal(given, fresh)


SCORES = np.zeros((4, 30), np.float32)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"scores": SCORES.astype(np.float64)}, "'scores': expected dtype float32"),
    ({"scores": SCORES[0]}, r"'scores': expected shape \[T, L\]"),
    ({"scores": SCORES[:, ::2]}, "'scores': expected a contiguous last axis"),
    ({"scores": SCORES[:, ::-1]}, "'scores': expected a contiguous last axis"),
    ({"topk": 0}, "'topk': expected an integer from 1"),
    ({"topk": 2.0}, "'topk': expected an integer from 1"),
    ({"topk": True}, "'topk': expected an integer from 1"),
    ({"order": "value"}, "'order': expected 'index' or 'score'"),
    ({"return_values": 1}, "'return_values': expected True or False"),
    ({"starts": np.zeros(3, np.int32)}, r"'starts': expected shape \[4\]"),
    ({"ends": np.zeros(4, np.int64)}, "'ends': expected dtype int32"),
    ({"indices": np.zeros((4, 6), np.int32)}, r"'indices': expected shape \[4, 5\]"),
    ({"values": np.zeros((4, 5), np.float32)}, "'values': expected None without return_values"),
    ({"values": np.zeros((4, 5), np.float16), "return_values": True}, "'values': expected dtype float32"),
    ({"count": np.zeros(4, np.float32)}, "'count': expected dtype int32"),
]


@pytest.mark.parametrize(("changed", "message"), BAD)
def test_what_cannot_be_used_is_refused(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"scores": SCORES, "topk": 5} | changed
    with pytest.raises(InputError, match="topk: argument " + message):
        cupymla.topk(**arguments)


def test_outputs_may_not_overlap() -> None:
    memory = np.zeros((4, 6), np.int32)
    with pytest.raises(InputError, match="overlaps argument 'starts'"):
        cupymla.topk(SCORES, 5, starts=memory[:, 0], indices=memory[:, :5])
