"""The sm_100a kernel of sparse_mla_bwd_phase1 on the host emulator: its own plan and binding keep the comparison law.

Cases are the operator's, with fewer queries: the emulator takes seconds for each. The cheapest of each intent run
always, each in one mode, so that all modes have their turn; `--interpret-all` runs every small case in every mode.
Compiles, needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupymla.emulate import Settings
from cupymla.ops.mla_cases import MlaCase, sized
from cupymla.testing import compare
from cupymla.testing.emulated import emulated
from cupymla.testing.operators import Subject

OPERATOR = "sparse_mla_bwd_phase1"
MODES = ("lazy", "random", "eager")
QUERIES = 2
MOST_QUERIES = 6
MULTIPROCESSORS = 2
SUBJECT = Subject(OPERATOR)


def shortened(case: MlaCase, queries: int) -> MlaCase:
    """The case with fewer queries; which tokens they may see is the same."""
    fewer = max(1, queries // (case.batch or 1)) if case.s_q else 0
    return case if case.s_q <= fewer else replace(case, s_q=fewer)


def parameters() -> Iterator[object]:
    always = {case.name: MODES[k % len(MODES)] for k, case in enumerate(SUBJECT.small_grid(1))}
    for case in SUBJECT.cases.CASES:
        for mode in MODES:
            runs = always.get(case.name) == mode
            marks = [] if runs else [pytest.mark.interpret_all]
            few = shortened(case, QUERIES if runs else MOST_QUERIES)
            yield pytest.param(few, mode, id=f"{case.name}-{mode}", marks=marks)


def check(case: MlaCase, mode: Any, seed: int = 1) -> None:
    with emulated("sm_100a", MULTIPROCESSORS, Settings(mode, seed)) as machine:
        compare.require(machine.check(OPERATOR, case))


@pytest.mark.compile
@pytest.mark.parametrize(("case", "mode"), list(parameters()))
def test_kernel_keeps_the_law(case: MlaCase, mode: str) -> None:
    check(case, mode)


@pytest.mark.compile
def test_a_pair_of_ctas_walks_several_queries_of_several_blocks() -> None:
    """With one pair, queries come in groups: stages, accumulators and Q are used again, past a query without a slot."""
    case = sized(128, 512, 300, 5, 400, "_groups", "masks", lengths="hostile", selection="full")
    with emulated("sm_100a", MULTIPROCESSORS, Settings("random", seed=3)) as machine:
        compare.require(machine.check(OPERATOR, case))
        assert [geometry.grid[0] for geometry in machine.launches] == [2 * 4]


@pytest.mark.compile
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
    with emulated("sm_100a", MULTIPROCESSORS, Settings("random", seed=7)) as machine:
        results = machine.run(SUBJECT, inputs)
    exact, same = SUBJECT.reference(inputs, "float64"), SUBJECT.reference(inputs, "same")
    for name, got, like, right in zip(SUBJECT.outputs, results, same, exact, strict=True):
        compare.require([compare.compare(name, got, like, right)])
