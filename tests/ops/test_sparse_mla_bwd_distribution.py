"""The distribution that the backward adds up, from two CTAs, head block after head block: the same bits whatever the
schedule, and an output like the others to whoever runs cases."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from backward_plan_kit import CLUSTER, PROBLEM, planned
from variants_kit import compiled

from cupymla.build import KernelSource, ptx
from cupymla.ops.sparse_mla_bwd import cases, cuda, sparse_mla_bwd, spec
from cupymla.ops.sparse_mla_bwd.paths import token_order
from cupymla.testing import compare
from cupymla_lab.emulated import emulated
from cupymla_lab.problems import sparse_mla_bwd as problems
from cupymla_lab.subjects import Subject

NAMED = next(case for case in problems.CASES if case.name == "h192_d576_k65_q2_kv100_det_dist")
CASE = replace(NAMED, s_q=1)


@pytest.mark.compile
def test_two_ctas_add_in_a_fixed_order() -> None:
    inputs = cases.inputs(CASE, 0)
    expected: dict[str, Any] = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in inputs.items()}
    sparse_mla_bwd(**expected)
    results = []
    for seed in (0, 1):
        with emulated(multiprocessors=3, seed=seed) as machine:
            given = machine.arguments(inputs, cases.WRITTEN)
            machine.call(sparse_mla_bwd, **given)
            results.append(given["attn_dist"].get())
            assert any(geometry.cluster == 2 for geometry in machine.launches)
    # 192 exponentials of fp32 scores, rounded once each and in their sum.
    np.testing.assert_allclose(results[0], expected["attn_dist"], rtol=2e-5, atol=1e-6)
    assert results[0].tobytes() == results[1].tobytes()


FENCE = re.compile(r"^\s*(?:fence\.\S*\.(?:gpu|sys)\b|membar\.(?:gl|sys)\b).*", re.MULTILINE)
PAIRS = [source for source in compiled("cupymla.ops.sparse_mla_bwd") if source.entry == CLUSTER]


@pytest.mark.compile
@pytest.mark.parametrize("source", PAIRS, ids=str)
def test_no_addition_is_fenced(source: KernelSource) -> None:
    """One thread adds what both CTAs have, in all head blocks; a fence would wait for all that was added to dKV
    before."""
    text = ptx(source)
    assert "red.async" in text or "st.async" in text
    assert FENCE.findall(text) == []
    assert FENCE.findall("\tfence.acq_rel.gpu;\n\tmembar.gl;") != []


@pytest.mark.compile
def test_a_case_whose_distribution_is_not_written_fails() -> None:
    point = cuda.point
    with emulated(multiprocessors=3) as machine:
        elsewhere = machine.empty((1, 65), np.dtype(np.float32), "elsewhere")

        def astray(record: cuda.Parameters, *facts: Any) -> None:
            point(record, *facts)
            record.attn_dist = elsewhere.data.ptr

        with mock.patch.object(cuda, "point", astray):
            reports: Sequence[compare.Report] = machine.check("sparse_mla_bwd", CASE)
    assert [report.output for report in reports if report.failure] == ["attn_dist"]


def test_the_reference_leaves_the_inputs_of_a_case_alone() -> None:
    inputs = cases.inputs(CASE, 0)
    expected = Subject("sparse_mla_bwd").expected(inputs, "float64")
    assert list(expected) == ["dq", "dkv", "d_sink", "attn_dist"]
    assert np.isnan(inputs["attn_dist"]).all() and np.isfinite(expected["attn_dist"]).all()


@pytest.mark.parametrize("in_order", [False, True])
def test_a_sink_that_counts_is_the_attentions_lse(in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention has no sink besides, or P would leave room for it twice; the last stage has its terms."""
    monkeypatch.setattr(token_order, "_ORDER_GAIN", -1.0 if in_order else 9.0)
    options = spec.Options(attn_dist_sink=True)
    chosen = planned(replace(PROBLEM, has_attn_dist=True), s_q=5, h_q=16, has_sink=True, options=options)
    assert chosen.workspace.sink_lse is not None and chosen.in_order == in_order
    stages = [launch.stage for launch in chosen.launches()]
    assert stages[:2] == ["zero", "sink_lse"] and stages[-1] == "sink"
    record = cuda.Parameters(lse=1, attn_sink=2, sink_terms=3, lse_batch=4, lse_query=5, lse_head=6, sm_scale=0.5)
    cuda.make_sink_a_key(record, 1 << 20, chosen.problem.shared)
    assert (record.lse, record.attn_sink, record.sink_terms, record.sm_scale) == (1 << 20, None, None, 0.5)
    assert (record.lse_batch, record.lse_query, record.lse_head) == (5 * 16, 16, 1)
