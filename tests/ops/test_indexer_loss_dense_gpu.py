"""indexer_loss_dense on a GPU: sizes that fill it and timing sizes against the reference, graphs, equal bits."""

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

SUBJECT = Subject("indexer_loss_dense")
LARGE: list[Any] = list(SUBJECT.cases.LARGE)
BENCH: list[Any] = list(SUBJECT.cases.BENCH)


@pytest.mark.parametrize("case", LARGE, ids=[case.name for case in LARGE])
def test_sizes_that_fill_a_gpu(case: Any) -> None:
    inputs = SUBJECT.cases.inputs(case, 1)
    results = cupymla.indexer_loss_dense(**arguments_on(cupy, inputs))
    compare.require(SUBJECT.reports(inputs, SUBJECT.named(tuple(cupy.asnumpy(result) for result in results))))


@pytest.mark.parametrize("case", BENCH, ids=[case.name for case in BENCH])
def test_large_problems(case: Any) -> None:
    """A few queries of each; only they have a slope, so that dk is theirs alone."""
    inputs = SUBJECT.cases.inputs(case, 1)
    rows = np.arange(3, case.queries, case.queries // 4)
    others = np.setdiff1d(np.arange(case.queries), rows)
    inputs["grad_loss"] = np.isin(np.arange(case.queries), rows).astype(np.float32)
    loss, dq, dk, dweights = (cupy.asnumpy(r) for r in cupymla.indexer_loss_dense(**arguments_on(cupy, inputs)))
    part = dict(inputs)
    for name in ("q", "weights", "mla_q", "mla_lse", "grad_loss"):
        if name in inputs:
            part[name] = inputs[name][rows]
    if part.pop("causal", False):
        part["ends"] = np.minimum(part.pop("q_start") + rows + 1, case.keys).astype(np.int32)
    results = {"loss": loss[rows], "dq": dq[rows], "dk": dk, "dweights": dweights[rows]}
    compare.require(SUBJECT.reports(part, results))
    assert not dq[others].any() and not dweights[others].any()


@pytest.mark.parametrize("case", SUBJECT.cases.REPEATED, ids=lambda case: case.name)
def test_results_are_equal_in_every_run(case: Any) -> None:
    """Beside other work."""
    given = arguments_on(cupy, SUBJECT.cases.inputs(case, 1)) | {"dk_dtype": "float32"}
    require_equal_runs(cupy, cupymla.indexer_loss_dense.prepare(**given))


def test_a_graph_replays_every_stage() -> None:
    """Sums are made anew inside the graph, not added to those of the last time."""
    case = SUBJECT.cases.CASES[0]
    inputs = SUBJECT.cases.inputs(case, 0)
    prepared = cupymla.indexer_loss_dense.prepare(**arguments_on(cupy, inputs))
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
