"""The decode indexer on the CPU: what it means, said another way; what is refused; chunks and records."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupymla
from cupymla.device import Device
from cupymla.errors import InputError
from cupymla.ops.paged_indexer_topk import cuda, plan
from cupymla.ops.paged_indexer_topk.cases import PagedCase
from cupymla.ops.paged_indexer_topk.spec import Options, Problem
from cupymla.ops.topk import plan as selection
from cupymla_lab.subjects import Subject

ROOT = Path(__file__).resolve().parents[2]
SUBJECT = Subject("paged_indexer_topk")
CASES: tuple[PagedCase, ...] = SUBJECT.cases.CASES


def arguments_of(case: PagedCase, seed: int = 1) -> dict[str, Any]:
    arguments: dict[str, Any] = SUBJECT.cases.inputs(case, seed)
    return arguments


def rows_of(case: PagedCase, arguments: dict[str, Any]) -> list[list[list[int]]]:
    """Positions that each query of each request sees, by plain loops."""
    tables, lens = arguments["block_tables"], arguments["context_lens"]
    blocks, page = arguments["k_cache"].shape[:2]
    room = tables.shape[1] * page
    most = room if case.max_context is None else min(room, case.max_context)
    found: list[list[list[int]]] = []
    for b in range(case.requests):
        found.append([])
        for j in range(case.queries):
            length = int(lens[b, j]) if case.by_query else int(lens[b]) - case.queries + 1 + j
            seen = range(min(max(length, 0), most))
            found[-1].append([p for p in seen if 0 <= tables[b, p // page] < blocks])
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_the_dense_functions_on_what_is_seen(case: PagedCase) -> None:
    """Bit for bit: `indexer_logits` and `topk` of each query's keys, copied out of the pages."""
    arguments = arguments_of(case)
    logits = cupymla.paged_indexer_logits(**SUBJECT.cases.scored_arguments(arguments))
    indices, count, *others = cupymla.paged_indexer_topk(**arguments)
    cache, tables, page = arguments["k_cache"], arguments["block_tables"], case.page
    for b, queries in enumerate(rows_of(case, arguments)):
        for j, seen in enumerate(queries):
            slots = np.array([tables[b, p // page] * page + p % page for p in seen], np.int64)
            k, scale = copied(cache, slots, case)
            given = {"q": arguments["q"][b, j : j + 1], "weights": arguments["weights"][b, j : j + 1]}
            if "q_scale" in arguments:
                given["q_scale"] = arguments["q_scale"][b, j : j + 1]
            scores = cupymla.indexer_logits(**given, k=k, k_scale=scale, relu=case.relu)
            wanted = np.full(logits.shape[-1], -np.inf, np.float32)
            wanted[seen] = scores[0]
            np.testing.assert_array_equal(logits[b, j].view(np.int32)[seen], wanted.view(np.int32)[seen])
            np.testing.assert_array_equal(logits[b, j], wanted)
            ids, number, values = cupymla.topk(scores, case.topk, return_values=True)
            chosen = ids[0][: int(number[0])]
            names = slots[chosen] if case.positions == "slot" else np.array(seen, np.int64)[chosen]
            assert count[b, j] == number[0]
            assert indices[b, j].tolist() == [*names.tolist(), *[-1] * (case.topk - len(names))]
            if case.return_values:
                np.testing.assert_array_equal(others[0][b, j], values[0])
            if case.return_lse:
                lse = np.logaddexp.reduce(values[0].astype(np.float64), initial=-np.inf) if len(names) else np.inf
                factor = np.log(2) if case.lse_base == "2" else 1
                np.testing.assert_allclose(others[-1][b, j], lse / factor, rtol=1e-5)


def copied(cache: Any, slots: Any, case: PagedCase) -> tuple[Any, Any]:
    """Keys of some slots, and their scales with fp8, byte by byte."""
    if case.dtype != "fp8":
        return np.array([cache[s // case.page, s % case.page] for s in slots], cache.dtype).reshape(
            len(slots), case.channels
        ), None
    if case.channels == 128:
        k, scale = cupymla.gather_indexer_cache(cache, slots)
        return k, scale
    flat = [cache[block].reshape(-1) for block in range(len(cache))]
    size, d = case.page * case.channels, case.channels
    k = np.array([flat[s // case.page][s % case.page * d :][:d] for s in slots], np.uint8).reshape(len(slots), d)
    scales = [flat[s // case.page][size + s % case.page * 4 :][:4] for s in slots]
    return k, np.array(scales, np.uint8).reshape(len(slots), 4).copy().view(np.float32)[:, 0]


def test_a_fourth_axis_and_fp8_dtypes_change_nothing() -> None:
    arguments = arguments_of(CASES[0])
    wanted = cupymla.paged_indexer_topk(**arguments)
    fp8 = ml_dtypes.float8_e4m3fn
    deep = arguments | {"k_cache": arguments["k_cache"][:, :, None], "q": arguments["q"].view(fp8)}
    for got, array in zip(cupymla.paged_indexer_topk(**deep), wanted, strict=True):
        np.testing.assert_array_equal(got, array)


def test_results_are_written_by_name() -> None:
    arguments = arguments_of(CASES[1]) | {"return_lse": True}
    given = {
        "indices": np.zeros((2, 2, 20), np.int32),
        "count": np.zeros((2, 2), np.int32),
        "values": np.zeros((2, 2, 20), np.float32),
        "lse": np.zeros((2, 2), np.float32),
    }
    returned = SUBJECT.call(**arguments, **given)
    assert [one is two for one, two in zip(returned, given.values(), strict=True)] == [True] * 4
    logits = np.zeros((2, 2, 256), np.float32)
    assert (
        cupymla.paged_indexer_logits(**SUBJECT.cases.scored_arguments(arguments_of(CASES[1])), logits=logits) is logits
    )
    assert np.isfinite(logits).any()


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": np.zeros((3, 16, 128), np.uint8)}, r"'q': expected shape \[B, n, H, D\]"),
        ({"q": np.zeros((3, 0, 16, 128), np.uint8)}, "'q': expected 1 to .* queries"),
        ({"q": np.zeros((3, 1, 129, 128), np.uint8)}, "'q': expected 1 to 128 heads"),
        ({"q": np.zeros((3, 1, 16, 96), np.uint8)}, "'q': expected 64 or 128 channels"),
        ({"k_cache": np.zeros((3, 16, 128), np.uint8)}, r"'k_cache': expected shape \[blocks, page, 132\]"),
        ({"k_cache": np.zeros((3, 0, 132), np.uint8)}, "'k_cache': expected shape .* page at least 1"),
        ({"k_cache": np.zeros((3, 16, 132), np.float16)}, "'k_cache': expected dtype float8"),
        ({"k_cache": np.zeros((3, 16, 140), np.uint8)[..., :132]}, "'k_cache': expected blocks of page"),
        ({"k_cache": np.zeros(4 * 2115, np.uint8).reshape(4, 2115)[:, :2112]}, "'k_cache': expected shape"),
        ({"weights": np.zeros((3, 16), np.float32)}, "'weights': expected shape"),
        ({"weights": None}, "'weights'"),
        ({"block_tables": np.zeros((3, 13), np.int64)}, "'block_tables': expected dtype int32"),
        ({"block_tables": np.zeros(3, np.int32)}, r"'block_tables': expected shape \[3, width\]"),
        ({"block_tables": np.zeros((2, 13), np.int32)}, "'block_tables': expected shape"),
        ({"context_lens": np.zeros((3, 2), np.int32)}, r"'context_lens': expected shape \[3\] or \[3, 1\]"),
        ({"context_lens": np.zeros(4, np.int32)}, "'context_lens': expected shape"),
        ({"topk": 0}, "'topk'"),
        ({"positions": "block"}, "'positions': expected 'slot' or 'token'"),
        ({"max_context": -1}, "'max_context'"),
        ({"values": np.zeros((3, 1, 20), np.float32), "return_values": False}, "'values': expected None without"),
        ({"count": np.zeros((3,), np.int32)}, "'count': expected shape"),
        ({"workspace": np.zeros(4, np.float32)}, "'workspace'"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cupymla.paged_indexer_topk(**(arguments_of(CASES[0]) | changed))


def test_scales_belong_to_fp8() -> None:
    case = next(case for case in CASES if case.dtype == "bf16")
    with pytest.raises(InputError, match="'q_scale': expected None with bfloat16"):
        cupymla.paged_indexer_topk(**arguments_of(case), q_scale=np.ones((2, 2, 64), np.float32))


def test_tables_of_more_keys_than_are_counted() -> None:
    arguments = arguments_of(CASES[0])
    wide = np.lib.stride_tricks.as_strided(np.zeros(1, np.int32), (3, 2**27), (0, 0))
    with pytest.raises(InputError, match="'block_tables': expected room for up to"):
        cupymla.paged_indexer_topk(**arguments | {"block_tables": wide})


def test_indices_are_looked_at_where_that_is_asked_for() -> None:
    arguments = arguments_of(CASES[0])
    tables = arguments["block_tables"].copy()
    tables[:, -1] = -1
    blocks = len(arguments["k_cache"])
    tables[2, 5] = blocks
    given = arguments | {"block_tables": tables}
    scored = SUBJECT.cases.scored_arguments(given)
    for call, own in ((cupymla.paged_indexer_topk, given), (cupymla.paged_indexer_logits, scored)):
        call(**own)
        with pytest.raises(
            InputError, match=rf"{call.name}.*'block_tables': expected -1 to {blocks - 1}, got {blocks}"
        ):
            call(**own, check_indices=True)
        call(**own | {"context_lens": np.array([208, 208, 80], np.int32)}, check_indices=True)


# Chunks and records --------------------------------------------------------------------------------------------------


def problem(requests: int, queries: int, width: int, **options: Any) -> Problem:
    return Problem(
        requests=requests,
        queries=queries,
        heads=64,
        channels=128,
        dtype="float8_e4m3fn",
        blocks=100,
        page=64,
        block_bytes=64 * 132,
        row_bytes=128,
        width=width,
        lens_by_query=False,
        options=Options(topk=2048, **options),
        device=Device("cuda", 0),
    )


@pytest.mark.parametrize("sizes", [(128, 1, 2048), (1000, 1, 2048), (7, 8, 32768), (3, 8, 2**22), (1, 1, 1)])
def test_every_request_has_one_chunk_that_fits(sizes: tuple[int, int, int]) -> None:
    made = problem(*sizes)
    parts = list(plan.chunks(made))
    assert [r for part in parts for r in range(part.first, part.first + part.requests)] == list(range(sizes[0]))
    held = max(part.requests for part in parts)
    assert plan.workspace_limit(made) == held * sizes[1] * sizes[2] * 64 * 4
    assert held == 1 or plan.workspace_limit(made) <= plan.CHUNK_BYTES


def test_a_bound_of_the_lengths_saves_memory() -> None:
    assert plan.workspace_limit(problem(4, 1, 2048, max_context=1001)) == 4 * 1004 * 4
    assert plan.workspace_limit(problem(4, 1, 2048, max_context=0)) == plan.workspace_limit(problem(0, 1, 8)) == 0


@pytest.mark.parametrize(
    ("rows", "columns", "cluster", "keeps"),
    [
        (1, 8192, 1, True),
        (1, 32768, 8, True),
        (8, 131072, 8, True),
        (32, 131072, 4, True),
        (66, 65536, 2, True),
        (40, 131072, 3, True),
        (67, 49152, 1, True),
        (67, 65536, 1, False),
        (45, 131072, 2, False),
        (1, 393216, 8, True),
        (1, 393280, 8, False),
    ],
)
def test_few_rows_have_clusters(rows: int, columns: int, cluster: int, keeps: bool) -> None:
    """Which keep a row where it fits their shared memory."""
    from cupymla import arch

    selected = plan.selected(problem(rows, 1, columns // 64), rows)
    target = arch.named("sm_90a")
    chosen = plan.select(selected, target, 132)
    assert (chosen.cluster, chosen.ctas) == (cluster, rows * cluster) and chosen.threads >= 256
    assert bool(chosen.own) == keeps and chosen.array_bytes + selection.STORAGE_BYTES + 1024 <= target.smem_bytes
    assert dict(chosen.source.defines)["CUPYMLA_CLUSTER"] == int(keeps and cluster > 1)
    # Alone on its multiprocessor.
    assert not keeps or 2 * chosen.array_bytes > target.smem_bytes


@pytest.mark.parametrize(("rows", "columns"), [(132, 4096), (133, 4096), (132, 32768), (133, 24576)])
def test_short_rows_have_a_multiprocessor_each_where_there_are_enough(rows: int, columns: int) -> None:
    from cupymla import arch

    target = arch.named("sm_90a")
    chosen = plan.select(plan.selected(problem(rows, 1, columns // 64), rows), target, 132)
    assert chosen.own and chosen.ctas == rows
    assert chosen.array_bytes + 4096 <= target.smem_bytes
    together = target.smem_bytes // (chosen.array_bytes + 4096)
    assert (together == 1) == (rows <= 132)


def fields_of(struct: str) -> list[str]:
    text = (ROOT / "cuda" / "paged_indexer_topk" / "sm90" / "params.cuh").read_text(encoding="utf-8")
    body = re.sub(r"//.*", "", text[text.index(f"struct {struct}") :].partition("{")[2].partition("};")[0])
    return [name for line in body.split(";") for name in re.findall(r"(\w+)(?:,|$)", line.strip())]


@pytest.mark.parametrize(
    ("struct", "record"),
    [
        ("Paged", cuda.Paged),
        ("ScoringParameters", cuda.ScoringParameters),
        ("SelectionParameters", cuda.Parameters),
    ],
)
def test_records_are_the_kernels(struct: str, record: Any) -> None:
    """Fields in the order of the C++ structs; of a derived one, its own."""
    names = {"cache": "cache"}
    assert [names.get(name, name) for name in fields_of(struct)] == [name for name, *_ in record._fields_]


def test_cases_say_what_they_are() -> None:
    assert len({case.name for case in (*CASES, *SUBJECT.cases.LARGE, *SUBJECT.cases.BENCH)}) == len(
        (*CASES, *SUBJECT.cases.LARGE, *SUBJECT.cases.BENCH)
    )
    traits = {(case.page, case.dtype) for case in CASES}
    assert {page for page, _ in traits} >= {1, 16, 64, 256} and {dtype for _, dtype in traits} == {
        "fp8",
        "bf16",
        "fp16",
    }
    assert replace(CASES[0], name="") != CASES[1]
