"""The decode indexer on a GPU: large problems, bits of the dense kernels, graphs whose lengths change, equal runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupymla
from cupymla.testing.operators import arguments_on
from cupymla_lab.subjects import Subject

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

SUBJECT = Subject("paged_indexer_topk")
LARGE = [pytest.param(case, id=case.name) for case in SUBJECT.cases.LARGE]


def bits(array: Any) -> Any:
    return cupy.asnumpy(array).view(np.uint8)


def case_of(ending: str) -> Any:
    return next(case for case in SUBJECT.cases.CASES if case.name.endswith(ending))


@pytest.mark.parametrize("case", LARGE)
def test_large_selections_are_those_of_the_other_two_functions(case: Any) -> None:
    """Bit for bit, of positions, in several chunks; some requests of many."""
    given = replace(case, positions="token", return_values=True)
    inputs = arguments_on(cupy, SUBJECT.cases.inputs(given, 1))
    indices, count, values, *_ = cupymla.paged_indexer_topk(**inputs)
    few = slice(0, 12)
    by_request = ("q", "weights", "q_scale", "block_tables", "context_lens")
    scored = SUBJECT.cases.scored_arguments(inputs)
    part = {name: value[few] if name in by_request else value for name, value in scored.items()}
    logits = cupymla.paged_indexer_logits(**part)
    expected = cupymla.topk(logits, case.topk, return_values=True)
    for got, wanted in zip((indices, count, values), expected, strict=True):
        np.testing.assert_array_equal(bits(got[few]), bits(wanted))


@pytest.mark.parametrize("case", LARGE)
def test_large_selections_are_those_of_the_reference(case: Any) -> None:
    """A few requests of each, the longest among them; scores are exact."""
    inputs = SUBJECT.cases.inputs(case, 2)
    made = cupymla.paged_indexer_topk(**arguments_on(cupy, inputs))
    few = [0, case.requests - 1]
    by_request = ("q", "weights", "q_scale", "block_tables", "context_lens")
    part = {name: value[few] if name in by_request else value for name, value in inputs.items()}
    for got, wanted in zip(made, cupymla.paged_indexer_topk(**part), strict=True):
        found = cupy.asnumpy(got)[few]
        if got is made[-1] and case.return_lse:
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
        else:
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_scores_have_the_bits_of_the_dense_kernel(dtype: str) -> None:
    """Of numbers whose sums no reference has to the bit, at any place."""
    case = replace(case_of("fp8_h64_b2_n2_l256_k20"), keys=5056, dtype=dtype, scales=dtype == "fp8", values="normal")
    inputs = arguments_on(cupy, SUBJECT.cases.inputs(case, 3))
    logits = cupymla.paged_indexer_logits(**SUBJECT.cases.scored_arguments(inputs))
    tables, place = inputs["block_tables"][1].astype(np.int64), cupy.arange(case.keys)
    slots = tables[place // case.page] * case.page + place % case.page
    dense: dict[str, Any] = {name: inputs[name][1] for name in ("q", "weights", "q_scale") if name in inputs}
    if dtype == "fp8":
        dense["k"], dense["k_scale"] = cupymla.gather_indexer_cache(inputs["k_cache"], slots)
    else:
        # CuPy gathers no bf16.
        keys = inputs["k_cache"].reshape(-1, case.channels)
        dense["k"] = keys.view(np.uint16)[slots].view(keys.dtype)
    wanted = cupymla.indexer_logits(**dense)
    for query in range(case.queries):
        seen = case.keys - case.queries + 1 + query
        np.testing.assert_array_equal(bits(logits[1, query, :seen]), bits(wanted[query, :seen]))


def test_a_graph_follows_lengths_and_tables() -> None:
    case = replace(case_of("k30_page16_hostile"), requests=37, keys=4000, topk=300, return_lse=False)
    host = SUBJECT.cases.inputs(case, 1)
    inputs = arguments_on(cupy, host)
    prepared = cupymla.paged_indexer_topk.prepare(**inputs)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        results = prepared()
        graph = stream.end_capture()
    for seed in range(5):
        rng = np.random.default_rng(seed)
        host["context_lens"] = SUBJECT.cases.context_lens(case, rng)
        host["block_tables"] = rng.permuted(host["block_tables"], axis=1)
        for name in ("context_lens", "block_tables"):
            inputs[name][...] = cupy.asarray(host[name])
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        for got, wanted in zip(results, cupymla.paged_indexer_topk(**host), strict=True):
            np.testing.assert_array_equal(bits(got), wanted.view(np.uint8))


def test_a_thousand_equal_runs_beside_other_work() -> None:
    case = replace(case_of("k30_page16_hostile"), requests=40, keys=8000, topk=500, values="ties")
    prepared = cupymla.paged_indexer_topk.prepare(**arguments_on(cupy, SUBJECT.cases.inputs(case, 3)))
    first = [array.copy() for array in prepared()]
    other, noise = cupy.cuda.Stream(non_blocking=True), cupy.ones((2048, 2048), np.float32)
    differ = cupy.zeros((), np.int64)
    for _ in range(1000):
        with other:
            noise @ noise
        results = prepared()
        differ += sum((a.view(np.int32) != b.view(np.int32)).sum() for a, b in zip(results, first, strict=True))
    assert int(differ) == 0
