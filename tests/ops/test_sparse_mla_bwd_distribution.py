"""The distribution that the backward adds up, from two CTAs, pass after pass: the same bits whatever the schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupymla.ops.sparse_mla_bwd import cases, sparse_mla_bwd
from cupymla.testing.interpreted import interpreted

CASE = next(case for case in cases.CASES if case.name == "h192_d576_k65_q2_kv100_det_dist")


@pytest.mark.compile
def test_two_ctas_add_in_a_fixed_order() -> None:
    inputs = cases.inputs(CASE, 0)
    expected: dict[str, Any] = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in inputs.items()}
    sparse_mla_bwd(**expected)
    results = []
    for seed in (0, 1):
        with interpreted(multiprocessors=3, seed=seed) as machine:
            given = machine.arguments(inputs, cases.WRITTEN)
            machine.call(sparse_mla_bwd, **given)
            results.append(given["attn_dist"].get())
            assert any(geometry.cluster == 2 for geometry in machine.launches)
    # 192 exponentials of fp32 scores, rounded once each and in their sum.
    np.testing.assert_allclose(results[0], expected["attn_dist"], rtol=2e-5, atol=1e-6)
    assert results[0].tobytes() == results[1].tobytes()
