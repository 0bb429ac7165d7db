"""The indexer's operators on a GPU: large problems, exact bits, equal runs beside other work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from equal_runs_kit import require_equal_runs

import cupymla
from cupymla.testing import compare
from cupymla.testing.operators import arguments_on
from cupymla_lab.subjects import Subject

cupy = pytest.importorskip("cupy")

TOPK, LOGITS, SELECTED = Subject("topk"), Subject("indexer_logits"), Subject("indexer_topk")


def named(cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in cases]


def bits(array: Any) -> Any:
    return cupy.asnumpy(array).view(np.uint8)


@pytest.mark.gpu
@pytest.mark.parametrize("case", named(TOPK.cases.LARGE))
def test_large_selections(case: Any) -> None:
    inputs = TOPK.cases.inputs(case, 1)
    made = cupymla.topk(**arguments_on(cupy, inputs))
    for got, wanted in zip(made, TOPK.reference(inputs, "same"), strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(got).astype(np.float64), wanted.astype(np.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("case", named(LOGITS.cases.LARGE))
def test_large_scores(case: Any) -> None:
    """Some queries of them, for the reference takes long."""
    inputs = LOGITS.cases.inputs(case, 1)
    logits = cupy.asnumpy(cupymla.indexer_logits(**arguments_on(cupy, inputs)))
    every = max(1, case.queries // 6)
    for first in range(0, case.queries, every):
        rows = slice(first, first + 1)
        per_query = ("q", "weights", "q_scale", "starts", "ends")
        part = {name: value[rows] if name in per_query else value for name, value in inputs.items()}
        if case.causal:
            part["q_start"] = case.q_start + first
        compare.require(LOGITS.reports(part, {"logits": logits[rows]}))


@pytest.mark.gpu
@pytest.mark.parametrize("values", ["normal", "own"])
@pytest.mark.parametrize("case", named(SELECTED.cases.LARGE))
def test_large_selections_are_those_of_the_two_functions(case: Any, values: str) -> None:
    """Bit for bit, of rows in several chunks; the case's own values have ties."""
    scored = case.scored if values == "own" else replace(case.scored, values=values)
    drawn = replace(case, scored=scored, return_values=True)
    inputs = arguments_on(cupy, SELECTED.cases.inputs(drawn, 1))
    made = cupymla.indexer_topk(**inputs)
    logits = cupymla.indexer_logits(**SELECTED.cases.scored_arguments(inputs))
    expected = cupymla.topk(logits, case.topk, return_values=True)
    for got, wanted in zip(made[:3], expected, strict=True):
        np.testing.assert_array_equal(bits(got), bits(wanted))
    if case.return_lse:
        lse = np.logaddexp.reduce(cupy.asnumpy(expected[2]).astype(np.float64), axis=-1, initial=-np.inf)
        lse[cupy.asnumpy(expected[1]) == 0] = np.inf
        np.testing.assert_allclose(cupy.asnumpy(made[3]), lse, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_exact_sums_have_the_bits_of_the_cpu(dtype: str) -> None:
    cases = LOGITS.cases
    case = cases._case(9, 300, 20, "exact", "exact", values="exact", dtype=dtype, scales=dtype == "fp8")
    inputs = cases.inputs(case, 5)
    # Weights and scales are any numbers: the order of the fp32 operations is the same, too.
    inputs["weights"] = np.random.default_rng(0).standard_normal(inputs["weights"].shape).astype(np.float32)
    np.testing.assert_array_equal(
        bits(cupymla.indexer_logits(**arguments_on(cupy, inputs))), cupymla.indexer_logits(**inputs).view(np.uint8)
    )


@pytest.mark.gpu
def test_a_score_has_the_same_bits_wherever_it_stands() -> None:
    inputs = arguments_on(cupy, LOGITS.cases.inputs(LOGITS.cases.LARGE[0], 2))
    whole = cupymla.indexer_logits(**inputs)
    rows, keys = slice(37, 80), slice(129, 1000)
    part = {name: value[rows] if name in ("q", "weights", "q_scale") else value for name, value in inputs.items()}
    part |= {"k": inputs["k"][keys], "k_scale": inputs["k_scale"][keys]}
    np.testing.assert_array_equal(bits(cupymla.indexer_logits(**part)), bits(cupy.ascontiguousarray(whole[rows, keys])))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("subject", "case"),
    [(TOPK, TOPK.cases.LARGE[1]), (LOGITS, LOGITS.cases.LARGE[0]), (SELECTED, SELECTED.cases.LARGE[4])],
)
def test_a_thousand_equal_runs_beside_other_work(subject: Subject, case: Any) -> None:
    call: Any = subject.call
    require_equal_runs(cupy, call.prepare(**arguments_on(cupy, subject.cases.inputs(case, 3))))
