"""The variance of results from run to run, counted on numbers of which it is known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cupymla import driver
from cupymla.ops.mla_cases import sized
from cupymla_lab import variance
from cupymla_lab.subjects import Subject


def test_spread_is_between_any_two_runs() -> None:
    runs = itertools.cycle([(np.array([1.0, 2.0, 2.0]),), (np.array([1.0, 2.5, 2.0]),), (np.array([1.0, 1.5, 2.0]),)])
    (row,) = variance.rows(np, "x", False, ("dq",), lambda: next(runs), 3)
    assert (row.case, row.result, row.runs) == ("x", "dq", 3)
    assert row.differing == pytest.approx(1 / 3)
    assert row.largest_difference == pytest.approx(1.0 / np.sqrt((1 + 2.5**2 + 4) / 3))


def test_equal_runs_have_none() -> None:
    rows = list(variance.rows(np, "x", True, ("dq", "dkv"), lambda: (np.zeros(3), np.ones((2, 2), np.float16)), 5))
    assert [(row.result, row.differing, row.largest_difference) for row in rows] == [
        ("dq", 0.0, 0.0),
        ("dkv", 0.0, 0.0),
    ]


def test_every_result_of_a_call_has_a_row() -> None:
    """Without a sink there is no d_sink."""
    assert all(case.sink == "finite" for case, _ in variance.CASES)
    subject = Subject("sparse_mla_bwd")
    case = sized(16, 576, 8, 2, 32, sink="finite")
    given = subject.cases.inputs(case, 0)
    rows = list(variance.rows(np, case.name, False, subject.outputs, lambda: subject.call(**given), 2))
    assert [(row.result, row.differing) for row in rows] == [("dq", 0.0), ("dkv", 0.0), ("d_sink", 0.0)]


def test_every_kernel_is_measured_both_ways() -> None:
    assert len({case.name for case, _ in variance.CASES}) == len(variance.CASES) == 6
    assert {bool(case.options.get("deterministic")) for case, _ in variance.CASES} == {False, True}


@pytest.mark.skipif(driver.available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert variance.main([]) == 2
    assert "there is none" in capsys.readouterr().err
