"""The backward's kernel for neighbouring queries, in the interpreter: what the operator's cases do not bring about."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from backward_plan_kit import PACKED, SINGLE
from non_finite_kit import NON_FINITE_QUERY, NON_FINITE_TOKEN, WHERE, non_finite, non_finite_problem
from writer_kit import uses_in_a_call

from cupymla.ops.mla_cases import MlaCase, sized
from cupymla.ops.sparse_mla_bwd import sizes
from cupymla.ops.sparse_mla_bwd.paths import packed_queries
from cupymla.testing import compare
from cupymla_lab.emulated import Emulated, emulated
from cupymla_lab.subjects import Subject

SUBJECT = Subject("sparse_mla_bwd")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """A machine on which neighbours are packed wherever they can be."""
    monkeypatch.setattr(packed_queries, "_MARGIN", 1e9)
    with emulated(multiprocessors=2, seed=3) as made:
        yield made
        assert PACKED in made.launched and SINGLE not in made.launched


def case(h: int, q: int, k: int, kv: int, **traits: Any) -> MlaCase:
    return sized(h, 512, k, q, kv, "_x", "packed_queries", dtype="float16" if h <= 16 else "bfloat16", **traits)


@pytest.mark.compile
def test_indices_and_lengths_may_change_while_it_runs(machine: Emulated) -> None:
    """No hang, and no access out of bounds, whatever they hold by then."""
    given = SUBJECT.cases.inputs(case(5, 5, 70, 400, lengths="hostile", wants_dist=True), 2)
    arguments = machine.arguments(given, SUBJECT.written)
    limits = {"indices": 400, "topk_length": 71}
    assert sum(uses_in_a_call(machine, SUBJECT.call, arguments, limits, packed_queries.GROUP_TOKENS)) > 1000


@pytest.mark.compile
@pytest.mark.parametrize(("where", "heads"), [*zip(WHERE, itertools.cycle((17, 3))), ("q", 17), ("dout", 3)])
def test_what_is_not_finite_stays_with_its_query(machine: Emulated, where: str, heads: int) -> None:
    """Products have rows of several queries as sums, where zero times NaN is NaN: such a query group is taken apart.

    In each array with few or many heads; in a factor of either product with both.
    """
    given = non_finite_problem(where, heads)
    compare.require(SUBJECT.reports(given, machine.results(SUBJECT, given)))


@pytest.mark.compile
def test_a_large_lse_gives_no_weight_to_entries_that_are_not_valid() -> None:
    """Nor where each query takes its rows by itself: its distribution is summed over entries that are not valid too."""
    given = non_finite_problem("factor", 3)
    with emulated(multiprocessors=2) as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_queries, "_MARGIN", 0.0)
        compare.require(SUBJECT.reports(given, made.results(SUBJECT, given)))
        assert SINGLE in made.launched and PACKED not in made.launched


@pytest.mark.parametrize("where", WHERE)
def test_what_is_not_finite_shows_where_it_was_put(where: str) -> None:
    """Else the test above would see nothing."""
    given = non_finite_problem(where, 3)
    expected = SUBJECT.expected(given, "float64")
    shows = where in ("kv", "q", "dout", "out", "lse")
    assert non_finite(expected["dq"], (1, 2)) == ({NON_FINITE_QUERY} if shows else set())
    named = {NON_FINITE_TOKEN} if where == "kv" else {int(t) for t in given["indices"][NON_FINITE_QUERY] if t >= 0}
    assert non_finite(expected["dkv"], (1,)) == (named if shows else set())


@pytest.mark.compile
def test_chunks_of_query_groups_use_the_same_lists(machine: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk's lists are written over the last one's; so many launches, of which every one but the first waits."""
    monkeypatch.setattr(sizes, "LIST_BYTES", 2 * (4 * 70 * 4 + 4 * 70 * 4 * 2))
    problem = case(16, 11, 70, 150, wants_dist=True, batch=2, lengths="hostile", sink="finite")
    given = SUBJECT.cases.inputs(problem, 1)
    compare.require(SUBJECT.reports(given, machine.results(SUBJECT, given)))
    assert len(machine.launched) == 1 + 3 * 2 + 1 + 1


@pytest.mark.compile
@pytest.mark.parametrize("heads", [16, 32])
def test_gradients_are_what_queries_by_themselves_give(heads: int) -> None:
    """Of dq to the bits but for the order in which rows come, of the distribution to the bits."""
    given = SUBJECT.cases.inputs(case(heads, 6, 100, 130, selection="full", wants_dist=True), 7)
    results = {}
    for margin in (0.0, 1e9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed_queries, "_MARGIN", margin)
            with emulated(multiprocessors=2) as made:
                results[margin] = made.results(SUBJECT, given)
                assert {SINGLE, PACKED}.intersection(made.launched) == {PACKED if margin else SINGLE}
    np.testing.assert_array_equal(results[0.0]["attn_dist"], results[1e9]["attn_dist"])
    for name in ("dq", "dkv"):
        apart, together = (results[margin][name].astype(np.float64) for margin in (0.0, 1e9))
        assert np.abs(apart - together).max() <= 2.0**-8 * np.abs(apart).max(), name
