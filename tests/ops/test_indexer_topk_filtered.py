"""Rows whose scores are filtered, without a GPU and with limits small enough for that: every kernel of the filter, lists
that overflow, thresholds that are too high, and rows that are flagged for it. Compiles, needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupymla
from cupymla.ops.indexer_topk import plan
from cupymla.ops.indexer_topk.cases import IndexerTopkCase
from cupymla.testing.operators import Subject
from cupymla_lab.emulate import MODES, Settings
from cupymla_lab.emulate.settings import Mode
from cupymla_lab.emulated import Emulated, emulated

pytestmark = pytest.mark.compile

SUBJECT = Subject("indexer_topk")
SMALL: IndexerTopkCase = next(case for case in SUBJECT.cases.CASES if case.name.endswith("_h64_t3_l200_k20"))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CAPACITY", 200)
    monkeypatch.setattr(plan, "FILTERED_KEYS", (512, 4096))
    monkeypatch.setattr(plan, "FILTERED_TOPK", (32, 64))
    monkeypatch.setattr(plan, "FILTERED_ROWS", 9)
    monkeypatch.setattr(plan, "_SAMPLES", 128)
    monkeypatch.setattr(plan, "_SAMPLED_ENTRIES", 8)
    monkeypatch.setattr(plan, "CHUNK_BYTES", 12 * 5000)


def case(queries: int = 12, keys: int = 1300, **traits: Any) -> IndexerTopkCase:
    scored = replace(SMALL.scored, queries=queries, keys=keys, values="normal", **traits)
    return replace(SMALL, scored=scored, topk=48, return_values=False)


def launches(machine: Emulated, kernel: str) -> int:
    return sum(geometry is not None and name == kernel for name, geometry in machine.launches)


def selected(machine: Emulated, arguments: dict[str, Any]) -> None:
    """A call selects what topk does of all scores, and says how many they are."""
    expected = cupymla.topk(
        machine.call(cupymla.indexer_logits, **machine.arguments(SUBJECT.cases.scored_arguments(arguments))).get(),
        arguments["topk"],
    )
    indices, count = machine.call(cupymla.indexer_topk, **machine.arguments(arguments))
    np.testing.assert_array_equal(indices.get(), expected[0])
    np.testing.assert_array_equal(count.get(), expected[1])


@pytest.mark.parametrize("mode", MODES)
def test_lists_have_what_is_selected(mode: Mode) -> None:
    with emulated("sm_90a", 3, Settings(mode, seed=3, races="hardware")) as machine:
        selected(machine, SUBJECT.cases.inputs(case(), 1))
