"""indexer_loss on a GPU: timing sizes against the reference, and equal bits in every run."""

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

SUBJECT = Subject("indexer_loss")


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in SUBJECT.cases.BENCH])
def test_large_problems(case: Any) -> None:
    """A few queries of each, and equal runs beside other work."""
    inputs = SUBJECT.cases.inputs(case, 1)
    given = arguments_on(cupy, inputs)
    loss, grad = cupymla.indexer_loss(**given)
    rows = np.arange(0, case.queries, case.queries // 16)
    part = {name: value if name == "k" else value[rows] for name, value in inputs.items()}
    compare.require(SUBJECT.reports(part, {"loss": cupy.asnumpy(loss)[rows], "grad_logits": cupy.asnumpy(grad)[rows]}))
    require_equal_runs(cupy, cupymla.indexer_loss.prepare(**given))
