"""Timing cases with options: the arithmetic that is counted is that of the entries that count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupymla.ops.mla_cases import MlaCase, sized
from cupymla.ops.mla_reference import select
from cupymla.ops.sparse_mla_fwd import cases


def small(case: MlaCase) -> MlaCase:
    """The case in little: as many entries and queries for each token, the same options."""
    options = {name: value // 8 if name == "q_start" else value for name, value in case.options.items()}
    return replace(case, s_q=case.s_q // 8, s_kv=case.s_kv // 8, topk=case.topk // 8, h_q=1, options=options)


@pytest.mark.parametrize(
    "case", [case for case in cases.BENCH if case.s_q == 4096 and case.s_kv == 8192], ids=lambda case: case.name
)
def test_entries_that_count_are_counted(case: MlaCase) -> None:
    made = small(case)
    given = cases.inputs(made, 0)
    options = made.softmax
    _, selection = select(
        *(given["kv"], given["indices"], False, given.get("topk_length")),
        *(options.causal, options.q_start, options.k_stride),
    )
    entries = selection.valid(0, slice(0, made.s_q))
    assert entries.shape == (made.s_q, made.topk) and given["indices"].max() < made.s_kv
    # Of 512 lengths between none and all the mean is off by 0.013, one time in three by more.
    assert entries.mean() == pytest.approx(made.counting, abs=0.05 if "topk_length" in given else 0.003)
    assert cases.flops(made) == pytest.approx(2 * made.s_q * made.topk * made.counting * (made.d_qk + 512))
    assert made.counting == pytest.approx(case.counting, abs=1e-3)


@pytest.mark.parametrize(("q_start", "k_stride"), [(0, 1), (0, 4), (-9, 4), (30, 3)])
def test_causal_entries_are_those_that_a_query_sees(q_start: int, k_stride: int) -> None:
    """The first k_stride - 1 positions see a key, as division is towards zero."""
    case = sized(1, 576, 16, 64, 16, causal=True, q_start=q_start, k_stride=k_stride)
    given = cases.inputs(case, 0)
    limits = np.trunc((q_start + np.arange(64) + 1 - k_stride) / k_stride)
    assert case.counting == pytest.approx(float((given["indices"] <= limits[:, None]).mean()))


def test_options_leave_entries_out() -> None:
    shares = {case.name.rpartition("_")[2]: case.counting for case in cases.BENCH if case.counting < 1}
    assert shares == {"causal": pytest.approx(0.75, abs=1e-3), "lengths": 0.5, "few": 0.025}
