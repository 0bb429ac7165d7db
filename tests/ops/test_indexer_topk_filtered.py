"""Rows whose scores are filtered, without a GPU and with limits small enough for that: every kernel of the filter,
lists that overflow, thresholds that are too high, and rows that are flagged for it. Compiles, needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupymla
from cupymla.ops.indexer_topk import plan, spec
from cupymla.ops.indexer_topk.cases import IndexerTopkCase
from cupymla.ops.topk import plan as selection
from cupymla_lab.emulate import Settings
from cupymla_lab.emulated import Emulated, emulated
from cupymla_lab.subjects import Subject

pytestmark = pytest.mark.compile

SUBJECT = Subject("indexer_topk")
SMALL: IndexerTopkCase = next(case for case in SUBJECT.cases.CASES if case.name.endswith("_h64_t3_l200_k20"))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CAPACITY", 220)
    monkeypatch.setattr(plan, "FILTERED_KEYS", (512, 4096))
    monkeypatch.setattr(plan, "FILTERED_TOPK", (32, 64))
    monkeypatch.setattr(plan, "FILTERED_ROWS", 8)
    monkeypatch.setattr(plan, "_SAMPLES", 128)
    monkeypatch.setattr(plan, "_SAMPLED_ENTRIES", 8)
    monkeypatch.setattr(plan, "CHUNK_BYTES", 9 * 2400)


def scored(queries: int = 9, keys: int = 800, **traits: Any) -> IndexerTopkCase:
    chosen = replace(SMALL.scored, queries=queries, keys=keys, values="normal", **traits)
    return replace(SMALL, scored=chosen, topk=48, return_values=False)


def flagged(machine: Emulated, arguments: dict[str, Any]) -> int:
    """Require of a call that it selects what `topk` does of all scores. Returns how many rows of the last part were
    flagged."""
    return found(machine, arguments)[0]


def found(machine: Emulated, arguments: dict[str, Any]) -> tuple[int, np.ndarray[Any, Any]]:
    """The same, and how many entries were counted of each of these rows."""
    all_scores = machine.arguments(SUBJECT.cases.scored_arguments(arguments))
    expected = cupymla.topk(machine.call(cupymla.indexer_logits, **all_scores).get(), arguments["topk"])
    _, problem = spec.read(**arguments)
    size = plan.workspace_limit(problem)
    workspace = machine.array(np.full(size, 0xEE, np.uint8), True, "workspace")
    indices, count = machine.call(cupymla.indexer_topk, **machine.arguments(arguments), workspace=workspace)
    np.testing.assert_array_equal(indices.get(), expected[0])
    np.testing.assert_array_equal(count.get(), expected[1])
    *_, part = plan.parts(problem)
    assert isinstance(part, plan.Filtered)
    at, words = plan.layout(problem, part), workspace.get().view(np.uint32)
    return int(words[at.flagged // 4 :][: len(part.flagged)].sum()), words[at.counts // 4 :][: part.rows.rows]


def test_lists_hold_what_is_selected() -> None:
    with emulated("sm_90a", 3, Settings("random", seed=3, races="hardware")) as machine:
        assert flagged(machine, SUBJECT.cases.inputs(scored(scales=True), 1)) == 0
        filtering, of_a_chunk = ["indexer_logits", "indexer_topk"] * 2, ["indexer_logits", "indexer_topk"]
        assert machine.launched[1:] == filtering + of_a_chunk * 2


def test_rows_that_see_few_keys_and_rows_that_see_none() -> None:
    """A causal mask: the first rows are not filtered, for their lists would have room for all that they see."""
    given = scored(queries=24, causal=True, q_start=215, limits="windows")
    with emulated("sm_90a", 3) as machine:
        flagged(machine, SUBJECT.cases.inputs(given, 2))
        assert machine.launched[1:3] == ["indexer_logits", "indexer_topk"]


def test_a_batch_of_which_nothing_is_contiguous() -> None:
    arguments = SUBJECT.cases.inputs(scored(batch=2, strided=True, bf16_weights=True, scales=True), 3)
    with emulated("sm_90a", 3) as machine:
        scores = machine.call(cupymla.indexer_logits, **machine.arguments(SUBJECT.cases.scored_arguments(arguments)))
        expected = cupymla.topk(scores.get(), 48)
        indices, count = machine.call(cupymla.indexer_topk, **machine.arguments(arguments))
    np.testing.assert_array_equal(indices.get(), expected[0])
    np.testing.assert_array_equal(count.get(), expected[1])


@pytest.mark.parametrize("what", ["equal", "numbers"])
def test_more_than_a_list_holds(what: str) -> None:
    """All scores are equal, or NaN for some keys and equal for others: rows are flagged, and scored again."""
    arguments = SUBJECT.cases.inputs(scored(), 4)
    arguments["k"][:] = arguments["k"][0]
    if what == "numbers":
        arguments["k"].view(np.uint8)[::3, 0] = 0x7F
    with emulated("sm_90a", 3, Settings("lazy", seed=4, races="hardware")) as machine:
        assert flagged(machine, arguments) == 9


def test_clusters_select_in_flagged_rows_and_leave_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "CLUSTER_ROW", 512)
    arguments = SUBJECT.cases.inputs(scored(), 4)
    arguments["k"][:] = arguments["k"][0]
    arguments["ends"] = np.where(np.arange(9) % 2, 200, 800).astype(np.int32)
    with emulated("sm_90a", 132) as machine:
        assert flagged(machine, arguments) == 5
        assert machine.launches[-1].cluster == 8


def test_a_full_list_is_not_counted_on() -> None:
    """Each count in global memory is waited for: of many equal rows that would be most of the time."""
    arguments = SUBJECT.cases.inputs(scored(), 4)
    arguments["k"][:] = arguments["k"][0]
    with emulated("sm_90a", 3) as machine:
        counts = found(machine, arguments)[1]
    assert counts.min() > plan.CAPACITY and counts.max() < 800


def test_a_sample_that_misleads() -> None:
    """Its keys have the largest scores by far: too few others reach the threshold."""
    arguments = SUBJECT.cases.inputs(scored(relu=False), 5)
    with emulated("sm_90a", 3, Settings("eager", seed=5, races="hardware")) as machine:
        (part,) = plan.parts(spec.read(**arguments)[1])
        assert isinstance(part, plan.Filtered)
        arguments["k_scale"] = np.where(np.arange(800) % part.sample_stride, 1e-3, 1).astype(np.float32)
        assert flagged(machine, arguments) > 0


def test_lists_in_shared_memory_overflow() -> None:
    """The largest scores are of neighbouring keys, more than shared memory has room for in a run."""
    arguments = SUBJECT.cases.inputs(scored(), 6)
    arguments["k_scale"] = np.where(np.arange(800) // 160 == 2, 1, 1e-6).astype(np.float32)
    arguments["weights"] = np.abs(arguments["weights"])
    with emulated("sm_90a", 3, Settings("random", seed=5, races="hardware")) as machine:
        assert flagged(machine, arguments) == 0
