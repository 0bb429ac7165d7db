"""indexer_topk: the selection of two other functions, in chunks of rows, and the log-sum-exp of what is selected."""

from __future__ import annotations

import re
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
from cupymla.ops.indexer_logits.spec import Options as ScoringOptions
from cupymla.ops.indexer_logits.spec import Problem as ScoringProblem
from cupymla.ops.indexer_topk import cuda, plan, run
from cupymla.ops.indexer_topk.cases import IndexerTopkCase
from cupymla.ops.indexer_topk.spec import Options, Problem
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
    rows = [
        entry * queries + row
        for part in parts
        for entry in range(part.first_entry, part.first_entry + part.entries)
        for row in range(part.first_row, part.first_row + part.rows)
    ]
    assert rows == list(range(max(batch, 1) * queries))
    held = max(part.entries * part.rows for part in parts)
    assert plan.workspace_limit(made) == held * plan.row_stride(made) * 4
    assert held == 1 or plan.workspace_limit(made) <= plan.CHUNK_BYTES


@pytest.mark.parametrize(("keys", "parts", "rows"), [(4096, 1, 4096), (32768, 4, 1024), (131072, 16, 256)])
def test_chunks_are_of_about_equal_size_and_of_whole_waves(keys: int, parts: int, rows: int) -> None:
    sizes = [part.rows for part in plan.chunks(problem(4096, keys))]
    assert sizes == [rows] * parts


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
    assert selecting == [0, 48]
