"""indexer_bwd on a GPU: timing sizes against the reference, graphs, and equal bits in every run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from equal_runs_kit import require_equal_runs

import cupymla
from cupymla.testing import compare
from cupymla.testing.operators import arguments_on
from cupymla_lab.subjects import Subject

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

SUBJECT = Subject("indexer_bwd")
BENCH: list[Any] = list(SUBJECT.cases.BENCH)


@pytest.mark.parametrize("case", BENCH, ids=[case.name for case in BENCH])
def test_large_problems(case: Any) -> None:
    """A few queries of each; only they have a gradient, so that dk is theirs alone."""
    inputs = SUBJECT.cases.inputs(case, 1)
    rows = np.arange(0, case.queries, case.queries // 16)
    others = np.setdiff1d(np.arange(case.queries), rows)
    inputs["grad_logits"][others] = 0
    dq, dk, dweights = (cupy.asnumpy(result) for result in cupymla.indexer_bwd(**arguments_on(cupy, inputs)))
    by_row = ("q", "weights", "grad_logits", "indices")
    part = {name: value[rows] if name in by_row else value for name, value in inputs.items()}
    compare.require(SUBJECT.reports(part, {"dq": dq[rows], "dk": dk, "dweights": dweights[rows]}))
    assert not dq[others].any() and not dweights[others].any()


@pytest.mark.parametrize("case", [case for case in BENCH if case.deterministic], ids=lambda case: case.name)
def test_integer_sums_are_equal_in_every_run(case: Any) -> None:
    """Beside other work; and they are the sums that floats make, but for rounding."""
    given = arguments_on(cupy, SUBJECT.cases.inputs(case, 1)) | {"dk_dtype": "float32"}
    require_equal_runs(cupy, cupymla.indexer_bwd.prepare(**given))
    (_, integers, _), (_, dk, _) = (cupymla.indexer_bwd(**given | {"deterministic": each}) for each in (True, False))
    assert float(cupy.abs(dk - integers).max()) <= 1e-5 * float(cupy.abs(dk).max())


def test_only_dk_may_differ_without_integer_sums() -> None:
    """dq and dweights have the same bits in every run, though it is not asked for."""
    given = arguments_on(cupy, SUBJECT.cases.inputs(BENCH[0], 1))
    prepared = cupymla.indexer_bwd.prepare(**given)
    require_equal_runs(cupy, lambda: prepared()[::2])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_graph_replays_every_stage(deterministic: bool) -> None:
    """Sums, bounds and bits are cleared inside the graph, not once before it."""
    case = SUBJECT.cases.CASES[0]
    inputs = SUBJECT.cases.inputs(case, 0) | {"deterministic": deterministic}
    prepared = cupymla.indexer_bwd.prepare(**arguments_on(cupy, inputs))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        results = prepared(stream=stream)
        graph = stream.end_capture()
    for _ in range(3):
        graph.launch(stream)
    stream.synchronize()
    compare.require(SUBJECT.reports(inputs, SUBJECT.named(tuple(cupy.asnumpy(result) for result in results))))
