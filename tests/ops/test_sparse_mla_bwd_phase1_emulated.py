"""The sm_100f kernel of sparse_mla_bwd_phase1 on the host emulator: its own plan and binding meet the accuracy
criterion.

Compiles, needs no GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
from emulated_kit import case_parameters, check, check_inputs

from cupymla.ops.mla_cases import MlaCase, sized
from cupymla_lab.subjects import Subject

pytestmark = pytest.mark.compile

SUBJECT = Subject("sparse_mla_bwd_phase1")


@pytest.mark.parametrize(("case", "mode"), list(case_parameters(SUBJECT)))
def test_kernel_meets_the_accuracy_criterion(case: MlaCase, mode: str) -> None:
    check(SUBJECT, case, mode)


def test_a_pair_of_ctas_walks_several_queries_of_several_blocks() -> None:
    """With one pair, queries come in groups: stages, accumulators and Q are used again, past a query without an
    entry."""
    case = sized(128, 512, 300, 5, 400, "_groups", "masks", lengths="hostile", selection="full")
    launches = check(SUBJECT, case, "random", seed=3)
    assert [geometry.grid[0] for geometry in launches] == [2 * 4]


@pytest.mark.parametrize("layout", ["odd batch stride", "one kv for all", "one token for all"])
def test_rows_that_no_stride_of_tokens_reaches(layout: str) -> None:
    """Row numbers count in units that fit the strides of tokens and batch entries, of zero too."""
    case = sized(16, 576, 3, 1, 6, "_layout", "strides", batch=2, selection="full")
    inputs = SUBJECT.cases.inputs(case, 5)
    kv = np.random.default_rng(5).standard_normal((2, 6, 576), np.float32).astype(inputs["kv"].dtype)
    if layout == "odd batch stride":
        memory = np.zeros(2 * 6 * 576 + 8, kv.dtype)
        inputs["kv"] = np.lib.stride_tricks.as_strided(memory, kv.shape, (2 * (6 * 576 + 8), 2 * 576, 2))
        inputs["kv"][...] = kv
    else:
        inputs["kv"] = np.broadcast_to(kv[:1] if layout == "one kv for all" else kv[:, :1], kv.shape)
    check_inputs(SUBJECT, inputs, "random", seed=7)
