"""Queries of the forward that take their rows in the order of tokens: when, and in the interpreter how."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from writer_kit import uses_in_a_call

import cupymla
from cupymla import arch, driver
from cupymla.errors import InputError
from cupymla.ops.mla import MlaProblem
from cupymla.ops.mla_cases import MlaCase, sized
from cupymla.ops.rows_in_order import first_of_those
from cupymla.ops.sparse_mla_fwd import cases, order, plan, spec
from cupymla.testing import compare
from cupymla_lab.emulated import Emulated, emulated
from cupymla_lab.subjects import Subject
from cupymla_lab.without_gpu import small_cases

SUBJECT = Subject("sparse_mla_fwd")
SOURCES = Path(cupymla.__file__).parent.parent / "cuda" / "sparse_mla_fwd" / "sm90"
MULTIPROCESSORS = 2


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """A machine on which queries take their rows in order wherever they can."""
    monkeypatch.setattr(plan, "_ORDER_GAIN", -1.0)
    with emulated(multiprocessors=MULTIPROCESSORS, seed=5) as made:
        yield made
        assert set(made.launched) <= {"sparse_mla_fwd", plan.ORDER}


def case(h: int, q: int, k: int, kv: int, d: int = 512, **traits: Any) -> MlaCase:
    return sized(h, d, k, q, kv, "_x", "order", **traits)


def lists(machine: Emulated, given: dict[str, Any]) -> list[list[int]]:
    """What the stage lists for each query."""
    arguments = machine.arguments(given, SUBJECT.written)
    _, problem = spec.read(**given)
    size = machine.call(SUBJECT.call.workspace_bytes, **arguments)
    workspace = machine.empty((size,), np.dtype(np.uint8), "workspace")
    machine.call(SUBJECT.call, **arguments, workspace=workspace)
    layout = plan.workspace(problem)
    assert size == layout.bytes
    words = workspace.get().view(np.int32)
    queries = problem.s_q * (problem.batch or 1)
    counts = words[layout.lengths // 4 :][:queries]
    entries = words[layout.lists // 4 :][: queries * problem.topk].reshape(queries, problem.topk)
    return [row[:count].tolist() for row, count in zip(entries, counts, strict=True)]


# When ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "topk", "s_q", "s_kv", "in_order", "batch"),
    [
        (128, 2048, 4096, 8192, False, None),  # rows are in L2 anyhow
        (128, 2048, 4096, 32768, True, None),
        (128, 2048, 4096, 131072, True, None),
        (64, 2048, 4096, 65536, True, None),
        (128, 2048, 16, 131072, False, None),  # a query's entries are shared
        (128, 64, 4096, 131072, False, None),  # hardly a row is named twice at a time
        (128, 4097, 4096, 131072, False, None),  # no room for the entries
        (128, 2048, 4096, plan.ORDER_TOKENS + 1, False, None),  # or for the tokens
        (4, 2048, 4096, 65536, False, None),  # lists would be larger than the result
        (128, 2048, 0, 65536, False, None),
        (128, 2048, 1, 8192, False, 100),  # none of a batch entry's rows is another's
        (128, 2048, 16, 8192, True, 256),  # rows of the entries under way are more than there is room for
        (128, 2048, 1 << 18, 65536, False, None),  # lists of 2 GiB
    ],
)
def test_rows_are_taken_in_order_where_that_finds_more_in_l2(
    heads: int, topk: int, s_q: int, s_kv: int, in_order: bool, batch: int | None
) -> None:
    problem = MlaProblem(
        batch=batch,
        s_q=s_q,
        s_kv=s_kv,
        h_q=heads,
        d_qk=576,
        topk=topk,
        dtype="bfloat16",
        options=spec.Options(),
        has_topk_length=False,
        has_sink=False,
        q_strides=(0, heads * 576, 576),
        kv_strides=(0, 576),
        indices_strides=(0, topk),
        topk_length_strides=(0, 0),
    )
    chosen = plan.plan(problem, arch.named("sm_90a"), 132)
    assert (chosen.workspace is not None) == in_order
    limit = plan.workspace_limit(problem)
    assert limit >= (chosen.workspace.bytes if chosen.workspace is not None else 0)
    if chosen.workspace is not None:
        queries = s_q * (batch or 1)
        assert chosen.workspace.lengths >= queries * topk * 4
        assert limit == chosen.workspace.bytes >= chosen.workspace.lengths + queries * 4


def test_the_share_that_is_read_from_memory() -> None:
    """As counted for small numbers: queries that name two of three rows."""
    assert first_of_those(1, 2 / 3) == 1.0 and first_of_those(7, 0.0) == 1.0
    chosen = list(itertools.product(itertools.combinations(range(3), 2), repeat=2))
    counted = sum(len({*one, *other}) for one, other in chosen) / (4 * len(chosen))
    assert first_of_those(2, 2 / 3) == pytest.approx(counted)
    assert first_of_those(4, 1.5) == 0.25


def test_mirrored_constants_agree() -> None:
    text = (SOURCES / "order_params.cuh").read_text()
    assert re.search(r"kMaxOrderTokens = 1 << 18;", text) and plan.ORDER_TOKENS == 1 << 18
    assert re.search(rf"kMaxOrderEntries = {plan.ORDER_ENTRIES};", text)
    body = text[text.index("struct OrderParameters {") :]
    body = re.sub(r"//.*", "", body[body.index("{") + 1 : body.index("};")])
    names = [
        name.strip(" *")
        for declaration in body.split(";")
        if declaration.strip()
        for name in re.sub(r"^(const )?\w+\*? ", "", declaration.strip()).split(",")
    ]
    assert names == [field[0] for field in order.OrderParameters._fields_]


# How -----------------------------------------------------------------------------------------------------------------


MOST_QUERIES = 12  # more are done as these are

PROBLEMS = [
    replace(case, s_q=min(case.s_q, MOST_QUERIES))
    for case in small_cases(SUBJECT)
    if isinstance(case, MlaCase) and case.intent not in ("parts", "scales")
][::2]


@pytest.mark.compile
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda case: case.name)
def test_results_agree_with_the_reference(machine: Emulated, problem: MlaCase) -> None:
    given = SUBJECT.cases.inputs(problem, 11)
    compare.require(SUBJECT.reports(given, machine.results(SUBJECT, given)))


@pytest.mark.compile
@pytest.mark.parametrize("traits", [{}, {"lengths": "hostile", "batch": 2}, {"causal": True, "q_start": 90}])
def test_lists_are_the_valid_tokens_in_order(machine: Emulated, traits: dict[str, Any]) -> None:
    given = cases.inputs(case(5, 4, 70, 200, **traits), 3)
    indices = given["indices"].reshape(-1, 70)
    lengths = np.broadcast_to(given.get("topk_length", np.int32(70)), given["indices"].shape[:-1]).reshape(-1)
    found = lists(machine, given)
    for query, (row, length) in enumerate(zip(indices, lengths, strict=True)):
        limit = traits["q_start"] + query % 4 + 1 if traits.get("causal") else 200
        wanted = sorted(int(token) for token in row[: max(0, length)] if 0 <= token < limit)
        assert found[query] == wanted
    assert len(machine.launched) == 2


@pytest.mark.compile
def test_tokens_that_come_again_are_behind_the_others(machine: Emulated) -> None:
    given = cases.inputs(case(2, 3, 90, 4000), 3)
    given["indices"] = np.random.default_rng(1).integers(0, 64, (3, 90)).astype(np.int32) * 61
    found = lists(machine, given)
    for row, listed in zip(given["indices"], found, strict=True):
        tokens, counts = np.unique(row, return_counts=True)
        assert listed == [*tokens, *np.repeat(tokens, counts - 1)]


@pytest.mark.compile
def test_the_same_bits_whatever_comes_first(machine: Emulated) -> None:
    """Which of the entries that name a token is first is left to chance; nothing that is listed shows it."""
    given = cases.inputs(case(16, 3, 130, 60, selection="duplicates"), 3)
    given["indices"] = np.random.default_rng(1).integers(0, 60, (3, 130)).astype(np.int32)
    found = set()
    for seed in range(4):
        machine.seed = seed
        results = machine.results(SUBJECT, given)
        found.add(tuple(results[name].tobytes() for name in cases.OUTPUTS))
    assert len(found) == 1


@pytest.mark.compile
@pytest.mark.parametrize("heads", [5, 70])
def test_indices_and_lengths_may_change_while_it_runs(machine: Emulated, heads: int) -> None:
    """No hang, and no access out of bounds, whatever they hold by then."""
    given = SUBJECT.cases.inputs(case(heads, 5, 70, 400, lengths="hostile"), 2)
    arguments = machine.arguments(given, SUBJECT.written)
    limits = {"indices": 400, "topk_length": 71}
    assert sum(uses_in_a_call(machine, SUBJECT.call, arguments, limits, plan.ORDER_TOKENS)) > 500


@pytest.mark.compile
def test_too_small_a_workspace_is_refused_before_anything_is_launched(machine: Emulated) -> None:
    arguments = machine.arguments(cases.inputs(case(5, 4, 70, 200), 3))
    size = machine.call(SUBJECT.call.workspace_bytes, **arguments)
    small = machine.empty((size - 1,), np.dtype(np.uint8), "workspace")
    with pytest.raises(InputError, match=f"at least {size} bytes") as caught:
        machine.call(SUBJECT.call, **arguments, workspace=small)
    assert (caught.value.operator, caught.value.argument) == ("sparse_mla_fwd", "workspace")
    assert not machine.launches


@pytest.mark.compile
@pytest.mark.parametrize("capturing", [False, True])
def test_the_workspace_of_a_captured_call_is_kept(
    machine: Emulated, capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cupymla.ops import calls

    kept: list[object] = []
    monkeypatch.setattr(driver, "capturing", lambda stream: capturing)
    monkeypatch.setattr(calls, "captured", kept)
    machine.call(SUBJECT.call, **machine.arguments(cases.inputs(case(5, 4, 70, 200), 3)))
    assert len(kept) == capturing


def test_without_a_gpu_no_workspace_is_needed() -> None:
    given = cases.inputs(case(5, 4, 70, 200), 3)
    assert cupymla.sparse_mla_fwd.workspace_bytes(**given) == 0
