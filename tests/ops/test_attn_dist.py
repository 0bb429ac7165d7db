"""attn_dist on the CPU: the distribution against torch, its row sums, and the public call."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from case_kit import quick
from mla_oracle import assert_close, solve

from cupymla.ops.attn_dist import attn_dist, cases, reference
from cupymla.ops.mla_cases import MlaCase
from cupymla.ops.sparse_mla_fwd import sparse_mla_fwd
from cupymla_lab.problems import attn_dist as problems


@pytest.mark.parametrize("case", quick("attn_dist"), ids=lambda case: case.name)
def test_reference_agrees_with_a_dense_softmax(case: MlaCase) -> None:
    """Catches a wrong mask, base or normalisation, and weight on entries that do not count."""
    arguments = cases.inputs(case, seed=1)
    expected = solve(**arguments)
    arguments["lse"] = expected.lse / math.log(2) if case.softmax.lse_base == "2" else expected.lse
    dist = reference.attn_dist(**arguments)
    wanted = expected.dist
    if case.options.get("normalize") == "l1":
        wanted = wanted / np.maximum(wanted.sum(axis=-1, keepdims=True), 1e-10)
    assert_close("dist", dist, wanted)
    assert not dist[~expected.valid].any()


# What a sum depends on beside the weights, which are compared one by one above.
CASES: list[Any] = quick("attn_dist")
SUMS = {(case.options.get("normalize"), case.selection, case.dtype): case for case in CASES}


@pytest.mark.parametrize("case", SUMS.values(), ids=lambda case: case.name)
def test_rows_sum_to_the_heads(case: MlaCase) -> None:
    """With the forward's lse every head has mass 1: h_q raw, 1 normalised, 0 for empty rows."""
    arguments = cases.inputs(case, seed=2)
    options = {name: value for name, value in arguments.items() if name not in ("lse", "normalize")}
    lse = sparse_mla_fwd(**options)[2]
    dist = attn_dist(**(arguments | {"lse": lse}))
    occupied = ~np.isinf(lse).all(axis=-1)
    total = 1 if case.options.get("normalize") == "l1" else case.h_q
    # lse is rounded to fp32: 2**-24 of values up to 2**6; dist once more.
    np.testing.assert_allclose(dist.astype(np.float64).sum(axis=-1), np.where(occupied, total, 0), rtol=2.0**-16)


@pytest.mark.parametrize("case", quick("attn_dist"), ids=lambda case: case.name)
def test_call_and_same_precision(case: MlaCase) -> None:
    """The public path is the rounded reference; the fp32 one stays within fp32's rounding of it."""
    arguments = cases.inputs(case, seed=3)
    exact = reference.attn_dist(**arguments)
    got = attn_dist(**arguments)
    same = reference.attn_dist(**arguments, precision="same")
    assert got.dtype == same.dtype == np.float32
    np.testing.assert_array_equal(got, exact.astype(np.float32))
    # A score up to 2**6 of 576 products moves by 576 * 2**-24 * 2**6 at most, and exp moves by as much of itself.
    assert_close("same", same, exact, tolerance=576 * 2.0**-18)


def test_l1_of_a_row_without_mass_is_zero() -> None:
    """An lse far above every score leaves less than eps: the row is divided by eps, not by itself."""
    case = next(case for case in problems.CASES if case.selection == "full")
    arguments = cases.inputs(case, seed=4)
    arguments["lse"] = np.full_like(arguments["lse"], 60.0)
    raw = reference.attn_dist(**arguments)
    assert (raw.sum(axis=-1) < 1e-10).all()
    assert_close("l1", attn_dist(**arguments, normalize="l1"), raw / 1e-10, tolerance=2.0**-23)


def test_output_given_is_the_one_returned() -> None:
    arguments = cases.inputs(problems.CASES[0], seed=5)
    memory = np.full((3, 140), 7, np.float32)
    dist = attn_dist(**arguments, dist=memory[:, :130])
    assert dist.base is memory and (memory[:, 130:] == 7).all()
    np.testing.assert_array_equal(dist, attn_dist(**arguments))


def test_an_lse_of_further_keys_gives_entries_their_part_of_that_softmax() -> None:
    """As DeepSeek-V4's teacher, beside a window and a sink: nothing is normalised over the entries alone."""
    arguments = cases.inputs(next(case for case in problems.CASES if case.name == "h16_d576_k65_q3_kv300"), seed=5)
    given = {name: arguments[name] for name in ("q", "kv")}
    joint = sparse_mla_fwd(**given, indices=arguments["indices"])[2]
    whole = attn_dist(**given, indices=arguments["indices"], lse=joint)
    selected = np.ascontiguousarray(arguments["indices"][:, :40])
    np.testing.assert_array_equal(attn_dist(**given, indices=selected, lse=joint), whole[:, :40])
    halved = attn_dist(**given, indices=selected, lse=np.logaddexp(joint, joint))  # a sink as large as all of them
    np.testing.assert_allclose(halved, whole[:, :40] / 2, rtol=1e-5)
