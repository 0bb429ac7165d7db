"""Deterministic gradients of up to 64 heads on Hopper: one CTA packs the rows that it stores, and packs queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backward_plan_kit import LISTS, ORDERED, PROBLEM, STORED, planned
from emulated_kit import settings
from non_finite_kit import NON_FINITE_TOKEN, non_finite, non_finite_problem
from writer_kit import uses_in_a_call

from cupymla import arch
from cupymla.ops.mla_cases import INT_MAX, INT_MIN, MlaCase, sized
from cupymla.ops.sparse_mla_bwd import plan, sizes, units
from cupymla.ops.sparse_mla_bwd.launches import Stage
from cupymla.ops.sparse_mla_bwd.paths import fixed_order, packed_queries
from cupymla.testing import compare
from cupymla_lab.emulated import Emulated, emulated
from cupymla_lab.subjects import Subject

SUBJECT = Subject("sparse_mla_bwd")
_ROW_WISE: tuple[Stage, ...] = ("zero", "round", "sink")
MANY: dict[str, Any] = {"s_q": 4096, "s_kv": 8192, "topk": 2048, "options": ORDERED}


@pytest.mark.parametrize(("heads", "queries", "chunk"), [(16, 4, 132), (17, 2, 264), (33, 1, 528), (64, 1, 528)])
def test_rows_are_packed_and_so_are_queries(heads: int, queries: int, chunk: int) -> None:
    """By whole waves of 132 CTAs; packed queries' lists are made once, and serve the sums."""
    chosen = planned(**MANY, h_q=heads)
    assert (chosen.packed, chosen.queries, chosen.chunk) == (True, queries, chunk)
    lists = ["merge"] if queries > 1 else LISTS
    assert [x.stage for x in chosen.launches()] == ["zero", *lists, *["attention", "sum"] * 8, "round"]
    others = units.SINGLE if queries == 1 else units.PACKED
    stages: tuple[Stage, ...] = ("attention", "sum", "merge") if queries > 1 else ("attention", "sum")
    for stage in (*_ROW_WISE, *stages):
        assert chosen.source(stage).entry == {**others, **units.STORED}[stage].kernel
    sizes = chosen.workspace
    assert sizes.partials is not None and chosen.chunk * queries * 2048 * 576 * 2 <= fixed_order.PARTIAL_BYTES
    assert (sizes.group_words is None, sizes.entry_list is None) == (queries == 1, queries > 1)
    assert set(plan.sources()) >= {chosen.source(stage) for stage in stages}


@pytest.mark.parametrize(
    ("problem", "target"),
    [(replace(PROBLEM, dkv_dtype="float32"), "sm_90a"), (PROBLEM, "sm_100f")],
    ids=["float32", "blackwell"],
)
def test_what_is_stored_in_float32_is_added_by_entries(problem: Any, target: str) -> None:
    chosen = planned(problem, arch.named(target), **MANY, h_q=16)
    assert (chosen.packed, chosen.queries) == (False, 1)
    assert all(chosen.source(x.stage).entry == units.SINGLE[x.stage].kernel for x in chosen.launches())


# In the interpreter -------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """A machine on which neighbours are packed wherever they can be."""
    monkeypatch.setattr(packed_queries, "_MARGIN", 1e9)
    with emulated(multiprocessors=2, seed=3) as made:
        yield made
        assert STORED in made.launched


def case(h: int, q: int, k: int, kv: int, **traits: Any) -> MlaCase:
    dtype = "float16" if h <= 32 else "bfloat16"
    return sized(h, 512, k, q, kv, "_x", "stored_queries", deterministic=True, dtype=dtype, **traits)


@pytest.mark.compile
@pytest.mark.parametrize("listed", [1, 2])
def test_chunks_of_query_groups_add_up(machine: Emulated, monkeypatch: pytest.MonkeyPatch, listed: int) -> None:
    """Three chunks of two query groups, whose lists are made for one or two chunks at a time."""
    monkeypatch.setattr(fixed_order, "PARTIAL_BYTES", 2 * 320 * 512 * 2)
    each = 4 * 70 * 4 + 4 * 70 * 4 * 2 + 5 * 8
    monkeypatch.setattr(sizes, "LIST_BYTES", 2 * each * listed)
    problem = case(16, 11, 70, 150, wants_dist=True, batch=2, lengths="hostile", sink="finite", selection="duplicates")
    given = SUBJECT.cases.inputs(problem, 1)
    compare.require(SUBJECT.reports(given, machine.results(SUBJECT, given)))
    assert len(machine.launched) == 1 + 3 * 2 + (3 if listed == 1 else 2) + 2


@pytest.mark.compile
@pytest.mark.parametrize("wants_lists", [False, True])
def test_chunks_of_queries_add_up(machine: Emulated, monkeypatch: pytest.MonkeyPatch, wants_lists: bool) -> None:
    """With the caller's lists, which have the entries of all chunks and of masked tokens, no kernel makes any."""
    monkeypatch.setattr(fixed_order, "PARTIAL_BYTES", 2 * 70 * 512 * 2)
    traits: dict[str, Any] = {"lengths": "hostile", "sink": "finite", "causal": True, "q_start": 70}
    problem = case(64, 5, 70, 90, selection="duplicates", batch=2, wants_lists=wants_lists, **traits)
    given = SUBJECT.cases.inputs(problem, 1)
    compare.require(SUBJECT.reports(given, machine.results(SUBJECT, given)))
    assert len(machine.launched) == 1 + (not wants_lists) + 5 * 2 + 2


@pytest.mark.compile
@pytest.mark.parametrize("bad", [[INT_MAX] * 40, [INT_MIN] * 40, list(range(280, 240, -1))])
@pytest.mark.parametrize(("heads", "dkv_dtype"), [(64, None), (5, "float32"), (100, None)])
def test_lists_that_are_none_are_read_within_bounds(bad: list[int], heads: int, dkv_dtype: str | None) -> None:
    """Sums of the tokens with such lists are wrong then, and nothing else."""
    problem = case(heads, 4, 70, 90, sink="finite", wants_lists=True, dkv_dtype=dkv_dtype)
    given = SUBJECT.cases.inputs(problem, 1)
    lists = given["lists"].copy()
    lists[51:91] = bad
    # Entries of the last tokens, and what is behind them.
    rest = lists[91 + lists[50] :]
    rest[...] = np.resize(np.array([INT_MAX, -1, 279, 280, INT_MIN, 5], np.int32), len(rest))
    with emulated("sm_90a", 2, settings("random", 3)) as made:
        found = made.results(SUBJECT, given | {"lists": lists})
        expected = made.results(SUBJECT, given)
    np.testing.assert_array_equal(found["dkv"][:50], expected["dkv"][:50])
    np.testing.assert_array_equal(found["dq"], expected["dq"])


@pytest.mark.compile
def test_lists_that_change_between_two_reads_do_no_harm() -> None:
    given = SUBJECT.cases.inputs(case(64, 4, 70, 9, sink="finite", wants_lists=True), 1)
    rng = np.random.default_rng(2)
    with emulated("sm_90a", 2, replace(settings("random", 3), races="unchecked")) as made:
        # All of it written, as rows that nobody has stored may be added.
        arguments = made.arguments(given | {"workspace": np.zeros(1 << 22, np.uint8)}, ("workspace",))
        lists = arguments["lists"]

        def changing(address: int, size: int, *_: object) -> None:
            place = (address - lists.data.ptr) // 4
            lists.host[place : place + size // 4] = rng.integers(-300, 600)

        made.watch(lists, changing)
        made.call(SUBJECT.call, **arguments)


@pytest.mark.compile
@pytest.mark.parametrize("heads", [16, 50])
def test_results_have_the_same_bits_in_every_order_of_threads(monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    """Queries that name three tokens again and again, so that lists have most of their rows behind the tokens."""
    monkeypatch.setattr(packed_queries, "_MARGIN", 1e9)
    given = SUBJECT.cases.inputs(case(heads, 6, 40, 3, selection="duplicates", wants_dist=True), 3)
    found = []
    for seed in (1, 2):
        with emulated("sm_90a", 2, settings("random", seed)) as made:
            found.append({name: array.tobytes() for name, array in made.results(SUBJECT, given).items()})
    assert "attn_dist" in found[0] and found[0] == found[1]


@pytest.mark.compile
@pytest.mark.parametrize(("where", "heads"), [("kv", 3), ("q", 17), ("dout", 3), ("lse", 17), ("empty", 3)])
def test_what_is_not_finite_stays_with_its_query(machine: Emulated, where: str, heads: int) -> None:
    """Query groups are taken apart: rows are written for one query, and added to for the others."""
    given = non_finite_problem(where, heads, (576, "bfloat16")) | {"deterministic": True, "dkv_dtype": None}
    results = machine.results(SUBJECT, given)
    compare.require(SUBJECT.reports(given, results))
    expected = SUBJECT.expected(given, "float64")
    assert non_finite(results["dkv"].astype(np.float32), (1,)) == non_finite(expected["dkv"], (1,))
    assert where != "kv" or not np.isfinite(results["dkv"][NON_FINITE_TOKEN].astype(np.float32)).any()


@pytest.mark.compile
def test_indices_and_lengths_may_change_while_it_runs(machine: Emulated) -> None:
    """No hang, and no access out of bounds, whatever they hold by then."""
    given = SUBJECT.cases.inputs(case(5, 5, 70, 400, lengths="hostile", wants_dist=True), 2)
    arguments = machine.arguments(given, SUBJECT.written)
    limits = {"indices": 400, "topk_length": 71}
    assert sum(uses_in_a_call(machine, SUBJECT.call, arguments, limits, packed_queries.GROUP_TOKENS)) > 1000
