"""indexer_topk: the selection of two other functions, in chunks of rows, and the log-sum-exp of what is selected."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupymla
from cupymla import arch
from cupymla.device import Device
from cupymla.errors import InputError
from cupymla.ops.indexer_logits import plan as scoring
from cupymla.ops.indexer_logits.spec import Options as ScoringOptions
from cupymla.ops.indexer_logits.spec import Problem as ScoringProblem
from cupymla.ops.indexer_topk import cuda, plan, run
from cupymla.ops.indexer_topk.cases import IndexerTopkCase
from cupymla.ops.indexer_topk.spec import Options, Problem, read
from cupymla.testing import compare
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject

ROOT = Path(__file__).resolve().parents[2]
SUBJECT = Subject("indexer_topk")
HOPPER = arch.Gpu(arch.named("sm_90a"), (9, 0), 132)
CASES: tuple[IndexerTopkCase, ...] = SUBJECT.cases.CASES


def problem(queries: int, keys: int, batch: int = 0) -> Problem:
    lead = (batch,) if batch else ()
    scores = ScoringProblem(lead, queries, keys, 64, 128, "bfloat16", False, ScoringOptions(), Device("cuda", 0))
    return Problem(scores, Options(topk=2048))


def named(ending: str) -> IndexerTopkCase:
    return next(case for case in CASES if case.name.endswith(ending))


def inexact(case: IndexerTopkCase, seed: int) -> dict[str, Any]:
    """Arguments of a case whose scores no reference has to the bit."""
    arguments: dict[str, Any] = SUBJECT.cases.inputs(replace(case, scored=replace(case.scored, values="normal")), seed)
    return arguments


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_the_selection_of_the_two_functions(case: IndexerTopkCase) -> None:
    arguments = inexact(case, 1)
    indices, count, *others = cupymla.indexer_topk(**arguments)
    expected = cupymla.topk(
        cupymla.indexer_logits(**SUBJECT.cases.scored_arguments(arguments)), case.topk, return_values=True
    )
    np.testing.assert_array_equal(indices, expected[0])
    np.testing.assert_array_equal(count, expected[1])
    if case.return_values:
        np.testing.assert_array_equal(others.pop(0), expected[2])
    if case.return_lse:
        lse = np.logaddexp.reduce(expected[2].astype(np.float64), axis=-1, initial=-np.inf)
        lse[expected[1] == 0] = np.inf
        np.testing.assert_allclose(others.pop(0), lse / (np.log(2) if case.lse_base == "2" else 1), rtol=1e-5)
    assert not others


def test_results_that_are_not_asked_for_are_refused() -> None:
    arguments = SUBJECT.cases.inputs(CASES[0], 0)
    for name, array in (("values", np.zeros((3, 20), np.float32)), ("lse", np.zeros(3, np.float32))):
        with pytest.raises(InputError, match=f"'{name}': expected None without return_{name}"):
            SUBJECT.call(**arguments, **{name: array})


def test_a_workspace_has_memory_of_its_own() -> None:
    """Elsewhere a chunk's scores would be written over what is read or returned."""
    arguments = SUBJECT.cases.inputs(CASES[0], 0)
    count = np.zeros(3, np.int32)
    with pytest.raises(InputError, match="'workspace': expected memory of its own"):
        SUBJECT.call(**arguments, count=count, workspace=count.view(np.uint8))


def test_scores_that_are_far_apart_have_a_sum(recwarn: pytest.WarningsRecorder) -> None:
    q, k = np.ones((1, 8, 64), ml_dtypes.bfloat16), np.ones((2, 64), ml_dtypes.bfloat16)
    k[1] *= -1
    given = q, k, np.full((1, 8), 5e35, np.float32)
    _, count, lse = cupymla.indexer_topk(*given, 2, relu=False, return_lse=True)
    assert count == 2 and lse == cupymla.indexer_logits(*given, relu=False).max() and not recwarn.list


def test_results_are_written_by_name() -> None:
    """lse without values: a third result, but the fourth name."""
    arguments = SUBJECT.cases.inputs(replace(named("lse2"), return_values=False), 0)
    lse = np.full(3, np.nan, np.float32)
    _, _, returned = cupymla.indexer_topk(**arguments, lse=lse)
    assert returned is lse and np.isfinite(lse).all()


# Chunks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queries", "keys", "batch"),
    [(4096, 4096, 0), (4096, 131072, 0), (4097, 1048576, 0), (5, 2**31 - 128, 0), (7, 1000, 3000), (4096, 32768, 3)],
)
def test_every_row_has_one_chunk_that_fits(queries: int, keys: int, batch: int) -> None:
    made = problem(queries, keys, batch)
    parts = list(plan.chunks(made))
    assert rows_of(parts, queries) == list(range(max(batch, 1) * queries))
    held = max(part.entries * part.rows for part in parts)
    if not any(isinstance(part, plan.Filtered) for part in plan.parts(made)):
        assert plan.workspace_limit(made) == held * plan.row_stride(made) * 4
        assert held == 1 or plan.workspace_limit(made) <= plan.CHUNK_BYTES


def rows_of(parts: Iterable[plan.Chunk], queries: int) -> list[int]:
    """Of all batch entries, in the order in which they are computed."""
    return [
        entry * queries + row
        for part in parts
        for entry in range(part.first_entry, part.first_entry + part.entries)
        for row in range(part.first_row, part.first_row + part.rows)
    ]


@pytest.mark.parametrize(("queries", "keys", "batch"), [(4096, 131072, 0), (4097, 32768, 3), (1024, 1 << 19, 2)])
def test_every_row_is_filtered_once_and_flagged_ones_have_a_chunk(queries: int, keys: int, batch: int) -> None:
    made = problem(queries, keys, batch)
    parts = [part for part in plan.parts(made) if isinstance(part, plan.Filtered)]
    every = list(range(max(batch, 1) * queries))
    assert rows_of((part.rows for part in parts), queries) == every
    assert rows_of((chunk for part in parts for chunk in part.flagged), queries) == every
    assert plan.workspace_limit(made) <= 256 << 20
    for part in parts:
        places = plan.layout(made, part)
        assert places.samples >= part.rows.rows * plan.CAPACITY * 8
        scores = max(chunk.rows for chunk in part.flagged) * plan.row_stride(made) * 4
        assert max(scores, places.samples + part.rows.rows * part.sample_row * 4) <= places.thresholds
        # Of keys that have a period, as pages of 64, all places are in a sample.
        assert all(math.gcd(part.sample_stride, 1 << bits) == 1 for bits in range(1, 12))
        # A sample has so many of the selected keys that a list of twice what is expected is seldom full.
        expected = made.options.topk / part.sample_stride
        assert expected >= 32
        assert (expected + 6 * expected**0.5 + 2) * part.sample_stride * 1.5 <= plan.CAPACITY


@pytest.mark.parametrize("keys", [32768, 65536, 131072, 1 << 19])
@pytest.mark.parametrize("q_start", [None, 16384])
@pytest.mark.parametrize("facts", [(8, 128, 2), (16, 128, 2), (4, 64, 3), (8, 64, 3)])
def test_what_a_unit_is_expected_to_list_has_room_in_shared_memory(
    keys: int, q_start: int | None, facts: tuple[int, int, int]
) -> None:
    """Of 32 and 64 heads, fp8 and 16 bits. Entries beyond are waited for, each for as long as memory takes."""
    made = problem(2048, keys)
    made = replace(made, options=replace(made.options, causal=q_start is not None, q_start=q_start or 0))
    share = plan.listed_share(made, next(part for part in plan.parts(made) if isinstance(part, plan.Filtered)))
    named_facts = dict(zip(("tile_queries", "tile_keys", "consumers"), facts, strict=True))
    unit = scoring.work_assignment(made.scores, named_facts, 132, share).fields["unit_steps"]
    shortest = facts[2]
    assert unit == shortest or unit * facts[1] * share <= scoring.LISTED_ENTRIES / facts[0]
    config = (ROOT / "cuda/indexer_logits/sm90/config.cuh").read_text()
    assert f"kListBytes = {16 * scoring.LISTED_ENTRIES};" in config


@pytest.mark.parametrize(("q_start", "k_stride"), [(0, 1), (-3, 1), (5, 2), (-4, 3), (100, 7)])
def test_a_filter_scores_every_key_that_a_causal_mask_leaves(q_start: int, k_stride: int) -> None:
    case = replace(named("causal_stride4").scored, q_start=q_start, k_stride=k_stride)
    arguments = SUBJECT.cases.inputs(replace(named("causal_stride4"), scored=case), 0)
    scores = cupymla.indexer_logits(**SUBJECT.cases.scored_arguments(arguments))
    _, made = read(**arguments)
    assert [plan.seen_keys(made, row) for row in range(case.queries)] == list((scores > -np.inf).sum(axis=1))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float16"])
def test_every_filter_is_among_the_variants(dtype: str) -> None:
    kind = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    for heads in scoring.FILTERED_HEADS:
        q = np.zeros((1, heads, 128), kind)
        given = {"q": np.broadcast_to(q, (1024, heads, 128)), "k": np.broadcast_to(q[0, :1], (32768, 128))}
        weights = np.broadcast_to(np.float32(1), (1024, heads))
        wanted = run.sources(HOPPER, **given, weights=weights, topk=2048)
        assert {dict(source.defines).get("CUPYMLA_FILTER") for source in wanted} >= {1, 2}
        assert set(wanted) <= set(plan.variants())


def test_what_is_filtered() -> None:
    def first(queries: int = 4096, keys: int = 32768, **options: Any) -> int | None:
        """The first row that is."""
        made = problem(queries, keys)
        made = replace(made, options=replace(made.options, **options))
        return next((part.rows.first_row for part in plan.parts(made) if isinstance(part, plan.Filtered)), None)

    assert first() == 0
    assert first(keys=32767) is first(queries=1023) is first(topk=2049) is first(return_values=True) is None
    assert first(causal=True, q_start=8192) == 0
    assert first(causal=True, q_start=8000) == 192
    assert first(causal=True, q_start=0) is None
    assert first(queries=16384, causal=True, q_start=0, k_stride=1) == 8192


def test_chunks_are_of_about_equal_size() -> None:
    sizes = [part.rows for part in plan.chunks(problem(4096, 131072))]
    assert len(sizes) == 11 and max(sizes) == 376 and min(sizes) == 336


@pytest.mark.parametrize("sizes", [(0, 100), (100, 0)])
def test_nothing_to_do_needs_no_memory(sizes: tuple[int, int]) -> None:
    assert plan.workspace_limit(problem(*sizes)) == 0


@pytest.mark.compile
@pytest.mark.parametrize("ending", ["k8_causal", "windows", "batch", "batch_strided"])
def test_chunks_change_nothing(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in many parts: each has its own part of every array, and its own position."""
    case = named(ending)
    # Four rows, or one.
    monkeypatch.setattr(plan, "CHUNK_BYTES", 1 if ending == "batch_strided" else 4 * 4 * (case.scored.keys + 3))
    with emulated("sm_90a", 3) as machine:
        compare.require(machine.check("indexer_topk", case))
        assert len(machine.launches) > 2


@pytest.mark.compile
def test_the_kernels_select_what_the_two_functions_kernels_select() -> None:
    """Of scores that are not exact, which the reference may rank otherwise."""
    arguments = inexact(named("windows"), 3)
    with emulated("sm_90a", 3) as machine:
        indices, count, values, _ = machine.run(SUBJECT, arguments)
        (logits,) = machine.run(Subject("indexer_logits"), SUBJECT.cases.scored_arguments(arguments))
        given = {"scores": logits, "topk": arguments["topk"], "return_values": True}
        expected = machine.run(Subject("topk"), given)
    for got, wanted in zip((indices, count, values), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_the_record_is_the_kernels() -> None:
    """Its own fields, which stand behind topk's, in the order of the C++ struct."""
    text = (ROOT / "cuda" / "indexer_topk" / "sm90" / "params.cuh").read_text(encoding="utf-8")
    body = re.sub(r"//.*", "", text[text.index("struct Parameters") :].partition("{")[2].partition("};")[0])
    fields = [name for line in body.split(";") for name in re.findall(r"(\w+)(?:,|$)", line.strip())]
    assert fields == [name for name, *_ in cuda.Parameters._fields_]


def test_a_call_compiles_what_each_of_its_chunks_wants() -> None:
    """Of 241 batch entries the last chunk has one, whose rows are few enough for CTAs that keep them."""
    row = np.zeros(64, ml_dtypes.bfloat16)
    q, k = (np.broadcast_to(row, (241, *shape, 64)) for shape in ((100, 8), (30000,)))
    found = run.sources(HOPPER, q=q, k=k, weights=np.zeros((241, 100, 8), np.float32), topk=2048)
    selecting = [dict(source.defines)["CUPYMLA_SHORT"] for source in found if source.entry == "indexer_topk"]
    assert selecting == [0, 32]
