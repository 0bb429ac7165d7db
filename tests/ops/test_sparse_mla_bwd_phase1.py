"""sparse_mla_bwd_phase1 on the CPU: scores and delta against torch, and the public call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from case_kit import quick
from mla_oracle import assert_close, solve

from cupymla.ops.mla_cases import MlaCase
from cupymla.ops.sparse_mla_bwd_phase1 import cases, reference, sparse_mla_bwd_phase1
from cupymla_lab.problems import sparse_mla_bwd_phase1 as problems


@pytest.mark.parametrize("case", quick("sparse_mla_bwd_phase1"), ids=lambda case: case.name)
def test_reference_agrees_with_dense_products(case: MlaCase) -> None:
    """Catches a wrong mask, a scale where there is none, and a delta of the wrong axis."""
    arguments = cases.inputs(case, seed=1)
    arguments["out"] = (expected := solve(**{k: v for k, v in arguments.items() if k != "out"})).out
    p, delta = reference.sparse_mla_bwd_phase1(**arguments)
    assert_close("p", p, expected.p)
    assert_close("delta", delta, expected.delta)


@pytest.mark.parametrize("case", quick("sparse_mla_bwd_phase1"), ids=lambda case: case.name)
def test_call_and_same_precision(case: MlaCase) -> None:
    """The public path is the rounded reference; fp32 accumulation stays within its own rounding of it."""
    arguments = cases.inputs(case, seed=2)
    exact = reference.sparse_mla_bwd_phase1(**arguments)
    got = sparse_mla_bwd_phase1(**arguments)
    same = reference.sparse_mla_bwd_phase1(**arguments, precision="same")
    for array, rough, expected in zip(got, same, exact, strict=True):
        assert array.dtype == rough.dtype == np.float32
        np.testing.assert_array_equal(array, expected.astype(np.float32))
        # Sums of 576 products in fp32: 576 roundings of 2**-24, of partial sums up to twice the largest.
        assert_close("same", rough, expected, tolerance=2 * 576 * 2.0**-24)


def test_delta_of_empty_rows_is_still_the_row_sum() -> None:
    """delta depends on out and dout alone."""
    case = next(case for case in problems.CASES if case.selection == "nothing" and case.s_kv)
    arguments = cases.inputs(case, seed=3)
    arguments["out"] = np.ones_like(arguments["out"])
    p, delta = sparse_mla_bwd_phase1(**arguments)
    assert (p == -np.inf).all()
    np.testing.assert_allclose(delta, arguments["dout"].astype(np.float64).sum(axis=-1), rtol=1e-5, atol=1e-4)


def test_outputs_given_are_the_ones_returned() -> None:
    arguments = cases.inputs(problems.CASES[0], seed=4)
    shape = arguments["q"].shape[:2]
    memory = np.full((*shape, arguments["indices"].shape[1] + 3), 7, np.float32)
    given: dict[str, Any] = {"p": memory[..., :-3], "delta": np.full(shape[::-1], 7, np.float32).T}
    got = sparse_mla_bwd_phase1(**arguments, **given)
    assert got[0] is given["p"] and got[1] is given["delta"]
    for array, expected in zip(got, sparse_mla_bwd_phase1(**arguments), strict=True):
        np.testing.assert_array_equal(array, expected)
    assert (memory[..., -3:] == 7).all()
