"""Queries of the backward that take their rows in the order of tokens, in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from writer_kit import uses_in_a_call

from cupymla.ops.mla_cases import MlaCase, sized
from cupymla.ops.sparse_mla_bwd import sizes
from cupymla.ops.sparse_mla_bwd.paths import packed_queries, token_order, two_phase
from cupymla.testing import compare
from cupymla_lab.emulated import Emulated, emulated
from cupymla_lab.subjects import Subject
from cupymla_lab.without_gpu import small_cases

SUBJECT = Subject("sparse_mla_bwd")
ALWAYS = -2.0
"""A gain that every order has."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """A machine on which queries take their rows in order wherever they can, none packed, and not in two phases."""
    monkeypatch.setattr(packed_queries, "_MARGIN", 0.0)
    monkeypatch.setattr(token_order, "_ORDER_GAIN", ALWAYS)
    monkeypatch.setattr(two_phase, "_WHEN", "never")
    with emulated(multiprocessors=2, seed=5) as made:
        yield made
        assert "sparse_mla_bwd_sort" in made.launched and "sparse_mla_bwd_merge" not in made.launched


def case(h: int, q: int, k: int, kv: int, d: int = 512, **traits: Any) -> MlaCase:
    return sized(h, d, k, q, kv, "_x", "order", dtype="float16", **traits)


# The case of the most tokens, whose dkv has 600 MB, is for a GPU.
EMULATED = [
    case
    for case in small_cases(SUBJECT)
    if isinstance(case, MlaCase) and case.intent == "order" and case.s_kv < token_order.ORDER_TOKENS
]


@pytest.mark.compile
@pytest.mark.parametrize("problem", EMULATED, ids=lambda case: case.name)
def test_gradients_and_distribution_agree_with_the_reference(machine: Emulated, problem: MlaCase) -> None:
    given = SUBJECT.cases.inputs(problem, 11)
    compare.require(SUBJECT.reports(given, machine.results(SUBJECT, given)))
    sinks = problem.sink != "none"
    assert len(machine.launched) == len(("zero", "sort", "attention", "round")) + problem.wants_dist + sinks


@pytest.mark.compile
def test_chunks_of_queries_use_the_same_lists(machine: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk's lists are written over the last one's, and its distribution is scattered before."""
    monkeypatch.setattr(sizes, "LIST_BYTES", 2 * 70 * (4 + 2 + 4))
    problem = case(5, 5, 70, 150, batch=2, lengths="hostile", wants_dist=True, sink="finite")
    given = SUBJECT.cases.inputs(problem, 1)
    compare.require(SUBJECT.reports(given, machine.results(SUBJECT, given)))
    assert len(machine.launched) == 1 + 3 * 5 + 1 + 1


@pytest.mark.compile
@pytest.mark.parametrize(("heads", "d_qk", "when"), [(5, 512, "never"), (70, 576, "never"), (70, 512, "always")])
def test_indices_and_lengths_may_change_while_it_runs(
    machine: Emulated, monkeypatch: pytest.MonkeyPatch, heads: int, d_qk: int, when: str
) -> None:
    """No hang, and no access out of bounds, whatever they hold by then."""
    monkeypatch.setattr(two_phase, "_WHEN", when)
    given = SUBJECT.cases.inputs(case(heads, 5, 70, 400, d_qk, lengths="hostile", wants_dist=True), 2)
    arguments = machine.arguments(given, SUBJECT.written)
    limits = {"indices": 400, "topk_length": 71}
    assert sum(uses_in_a_call(machine, SUBJECT.call, arguments, limits, token_order.ORDER_TOKENS)) > 1000
    attention = 2 if when == "always" else 1
    assert len(machine.launched) == len(("zero", "sort", "scatter", "round")) + attention


@pytest.mark.compile
@pytest.mark.parametrize("room", [-1.0, 1e15], ids=["columns_outermost", "all at once"])
def test_chunks_of_queries_in_two_phases(machine: Emulated, monkeypatch: pytest.MonkeyPatch, room: float) -> None:
    """Each chunk's P, dS and lists are written over the last one's; the last chunk is shorter."""
    monkeypatch.setattr(two_phase, "_WHEN", "always")
    monkeypatch.setattr(two_phase, "_ALL_COLUMNS_BYTES", room)
    problem = case(66, 5, 70, 150, batch=1, lengths="hostile", wants_dist=True, sink="finite")
    given = SUBJECT.cases.inputs(problem, 1)
    # Of two queries: two blocks of 64 entries, and how many entries there are.
    monkeypatch.setattr(two_phase, "P_DS_BYTES", 2 * (2 * 128 * 64 * 2 * 2 + 2 * 4))
    compare.require(SUBJECT.reports(given, machine.results(SUBJECT, given)))
    assert len(machine.launched) == 1 + len(("sort", "p_ds", "dq_dkv", "scatter")) * 3 + 1 + 1


@pytest.mark.compile
def test_blocks_hold_valid_entries_alone(machine: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are listed without gaps: of few valid entries no more blocks are worked on than hold them."""
    given = SUBJECT.cases.inputs(case(4, 2, 700, 1200, selection="few"), 3)
    valid = (given["indices"] >= 0) & (given["indices"] < 1200)
    assert valid.sum(axis=-1).max() <= 64

    def steps(gain: float) -> int:
        monkeypatch.setattr(token_order, "_ORDER_GAIN", gain)
        before = machine.turns
        compare.require(SUBJECT.reports(given, machine.results(SUBJECT, given)))
        return machine.turns - before

    assert 2 * steps(ALWAYS) < steps(1.0)


@pytest.mark.compile
def test_numbers_that_are_not_finite_stay_with_their_query(machine: Emulated) -> None:
    given = SUBJECT.cases.inputs(case(3, 4, 40, 60, dkv_dtype="float32", wants_dist=True), 6)
    given["kv"] = np.array(given["kv"])
    given["kv"][17, 3] = np.nan
    compare.require(SUBJECT.reports(given, machine.results(SUBJECT, given)))
