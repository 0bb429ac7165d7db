"""The Blackwell kernel of sparse_mla_fwd on the host emulator: its own plan and binding keep the comparison law.

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

from cupymla import arch, build
from cupymla.emulate import MODES, Settings
from cupymla.ops.mla_cases import MlaCase, sized
from cupymla.ops.sparse_mla_fwd import pair_plan, plan
from cupymla.testing import compare
from cupymla.testing.emulated import emulated
from cupymla.testing.operators import Subject
from cupymla.testing.without_gpu import small_cases

pytestmark = pytest.mark.compile

OPERATOR = "sparse_mla_fwd"
SUBJECT = Subject(OPERATOR)
QUERIES, MOST_QUERIES = 2, 6
PATIENCE_SECONDS = 20.0  # a shared machine may not come to run a process for seconds


def shortened(case: MlaCase, queries: int) -> MlaCase:
    """The case with fewer queries; which tokens they may see is the same."""
    fewer = max(1, queries // (case.batch or 1))
    return case if case.s_q <= fewer else replace(case, s_q=fewer)


def parameters() -> Iterator[object]:
    always = {case.name: MODES[k % len(MODES)] for k, case in enumerate(SUBJECT.small_grid(1))}
    for case in small_cases(SUBJECT):
        assert isinstance(case, MlaCase)
        for mode in MODES:
            runs = always.get(case.name) == mode
            marks = [] if runs else [pytest.mark.interpret_all]
            few = shortened(case, QUERIES if runs else MOST_QUERIES)
            yield pytest.param(few, mode, id=f"{case.name}-{mode}", marks=marks)


def check(case: MlaCase, mode: Any, multiprocessors: int = 2, seed: int = 1) -> list[Any]:
    settings = Settings(mode, seed, patience_seconds=PATIENCE_SECONDS)
    with emulated("sm_100a", multiprocessors, settings) as machine:
        compare.require(machine.check(OPERATOR, case))
        return list(machine.launches)


@pytest.mark.parametrize(("case", "mode"), list(parameters()))
def test_kernel_keeps_the_law(case: MlaCase, mode: str) -> None:
    check(case, mode)


def test_a_pair_walks_several_queries_of_several_blocks() -> None:
    """Stages of the ring serve Q, keys and values in turn, past queries without a slot: a warp that gets ahead of a
    barrier's phases, or falls behind them, shows only after several. Heads are padded in the second CTA alone."""
    case = sized(100, 576, 200, 9, 250, "_walk", "masks", lengths="hostile", selection="full")
    (launch,) = check(case, "random", seed=3)
    assert (launch.grid, launch.cluster) == ((2, 1, 1), 2)


@pytest.mark.parametrize("mode", ["eager", "random"])
def test_a_pair_walks_many_queries_of_one_block(mode: Any) -> None:
    """Q of the next query is staged while this one's only block is multiplied."""
    check(sized(16, 512, 70, 9, 200, "_short", "masks"), mode, seed=4)


PARTS = [pytest.param(2, 8, 2, id="2"), pytest.param(1, 8, 4, id="4", marks=pytest.mark.interpret_all)]


@pytest.mark.parametrize(("queries", "multiprocessors", "parts"), PARTS)
def test_pairs_of_a_cluster_share_the_slots_of_a_query(
    monkeypatch: pytest.MonkeyPatch, queries: int, multiprocessors: int, parts: int
) -> None:
    """Three blocks for two pairs, and for four, one of which has none; the plan is told that merging costs nothing, so
    that it splits so few. Statistics and a sink go through the merge, and a query without a slot."""
    monkeypatch.setattr(pair_plan, "_MERGE_BLOCKS", 0)
    lengths: Any = "hostile" if queries > 1 else "none"
    case = sized(70, 576, 300, queries, 400, "_split", "parts", sink="finite", lengths=lengths)
    (launch,) = check(case, "random", multiprocessors, seed=2)
    assert (launch.cluster, launch.grid) == (2 * parts, (2 * parts * queries, 1, 1))


@pytest.mark.parametrize("mode", ["lazy", "random"])
def test_output_is_rescaled_where_the_maximum_grows(mode: Any) -> None:
    """Later blocks hold ever larger scores, by far more than the slack of the base, in some heads only."""
    case = sized(128, 512, 600, 1, 600, "_growing", "options", selection="full")
    inputs = SUBJECT.cases.inputs(case, 2)
    inputs["indices"] = np.arange(600, dtype=np.int32).reshape(1, 600)
    growth = np.linspace(0.1, 6, 600).astype(np.float32)[:, None]
    inputs["kv"] = (inputs["kv"].astype(np.float32) * growth).astype(inputs["kv"].dtype)
    inputs["q"][:, ::3] *= inputs["q"].dtype.type(8)
    with emulated("sm_100a", 2, Settings(mode, 5, patience_seconds=PATIENCE_SECONDS)) as machine:
        results = machine.run(SUBJECT, inputs)
    exact, same = SUBJECT.reference(inputs, "float64"), SUBJECT.reference(inputs, "same")
    for name, got, like, right in zip(SUBJECT.outputs, results, same, exact, strict=True):
        compare.require([compare.compare(name, got, like, right)])


SOURCES = [source for target in plan.PAIRED for source in plan.sources(target)]


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_tensor_memory_and_shared_memory_are_within_budget(source: build.KernelSource) -> None:
    facts = build.cubin(source, fail_on_spill=True).facts
    assert facts["tmem_columns"] <= 512 and facts["smem_bytes"] <= arch.named(source.arch).smem_bytes
