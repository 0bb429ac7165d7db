"""sparse_mla_decode's plan, its parameter record, and what a cluster's CTAs compute."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupymla import arch as arches
from cupymla.device import Device
from cupymla.errors import InputError, UnsupportedError
from cupymla.ops.query_assignment import QueryAssignment
from cupymla.ops.sparse_mla_decode import cuda, plan
from cupymla.ops.sparse_mla_decode.cases import DecodeCase
from cupymla.ops.sparse_mla_decode.plan import Division
from cupymla.ops.sparse_mla_decode.spec import Cache, Options, Problem
from cupymla.testing import compare
from cupymla_lab.emulate import Settings
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject

ROOT = Path(__file__).resolve().parents[2]
HOPPER = arches.named("sm_90a")
SUBJECT = Subject("sparse_mla_decode")


def problem(rows: int, heads: int, topk: int = 2048, **options: Any) -> Problem:
    caches = (Cache(100, 64, 64 * 656, topk),)
    return Problem(rows, 1, heads, 576, "bfloat16", caches, Options("v32_fp8", **options), Device("cuda", 0))


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 16, 32, 64, 100, 128, 1000])
@pytest.mark.parametrize("heads", [1, 16, 17, 32, 64, 128])
def test_rows_are_divided_until_multiprocessors_are_busy(rows: int, heads: int) -> None:
    chosen = plan.plan(problem(rows, heads), HOPPER, 132)
    division = chosen.division
    cluster_heads = division.heads * division.sharers
    assert cluster_heads * chosen.head_blocks >= heads > cluster_heads * (chosen.head_blocks - 1)
    taken = chosen.rows
    assert taken.groups * taken.group_tokens + taken.ctas - taken.groups == rows
    assert chosen.clusters == taken.ctas * chosen.head_blocks
    assert chosen.ctas == chosen.clusters * division.parts * division.sharers
    assert division.parts == 1, "which only a caller asks for"
    assert (chosen.merge is None) == (division.shares == 1)
    assert chosen.workspace_bytes == (division.shares * rows * heads * 2064 if division.shares > 1 else 0)
    # What is left idle could not be used by twice as many.
    most = division.shares == 32 or division.heads < plan.cta_heads(heads)
    assert most or 2 * chosen.ctas * division.shares > 132


@pytest.mark.parametrize("rows", [0, 1, 8, 32, 128, 3000])
@pytest.mark.parametrize(("heads", "topk"), [(1, 64), (16, 2048), (64, 2048), (128, 65536)])
def test_a_workspace_of_the_limit_is_enough_on_every_gpu(rows: int, heads: int, topk: int) -> None:
    limit = plan.workspace_limit(problem(rows, heads, topk))
    assert limit <= plan.SHARES_BYTES
    taken = {plan.plan(problem(rows, heads, topk), HOPPER, count).workspace_bytes for count in (1, 78, 114, 132, 200)}
    assert max(taken) <= limit
    assert plan.workspace_limit(problem(rows, heads, topk, splits=3)) == 0


def test_shares_are_merged_in_so_much_memory() -> None:
    """Rows of many waves would want room for all of them."""
    for rows in (1, 60, 100, 140, 3000):
        chosen = plan.plan(problem(rows, 128, topk=65536), HOPPER, 132)
        assert chosen.workspace_bytes <= plan.SHARES_BYTES
        assert chosen.division.shares <= plan.MAX_SHARES


def test_sizes_of_clusters_that_do_not_fit_are_left_out() -> None:
    def chosen(rows: int, heads: int, pairs: bool = True) -> Division:
        return plan.plan(problem(rows, heads), HOPPER, 132, pairs).division

    # CTAs that share rows are a cluster where they have all of a row's entries, or a share of them, too.
    assert chosen(200, 128) == Division(64, 1, 2)
    assert chosen(200, 128, pairs=False) == Division(64, 1)
    assert chosen(32, 128) == Division(64, 1, 2, 2)
    assert chosen(32, 128, pairs=False) == Division(64, 1, 1, 2)
    # Half as many heads start earlier, and their shares leave less to merge.
    assert chosen(8, 64) == Division(32, 1, 1, 8)


PAIR = Division(64, 1, 2)


@pytest.mark.parametrize(
    ("rows", "groups", "each", "clusters"),
    [
        (66, 0, 1, 66),
        (67, 1, 2, 66),
        (128, 62, 2, 66),
        (134, 34, 3, 66),
        (256, 64, 4, 64),
        (265, 66, 2, 199),
        (1000, 184, 4, 448),
    ],
)
def test_pairs_take_several_rows(rows: int, groups: int, each: int, clusters: int) -> None:
    """On 132 multiprocessors 66 pairs do. Of more than four rows for each some come one by one, last."""
    assert plan.assigned(rows, 1, PAIR, 132, plan.MOST_ROWS) == QueryAssignment(groups, each, clusters)


@given(st.integers(1, 3000), st.integers(1, 2), st.sampled_from([1, 2]), st.integers(1, 200))
def test_clusters_have_all_rows_once(rows: int, head_blocks: int, sharers: int, count: int) -> None:
    """None waits for a place while another is at several rows, but for those of one that follow one another."""
    found = plan.assigned(rows, head_blocks, Division(64, 1, sharers), count, plan.MOST_ROWS)
    single = found.ctas - found.groups
    assert found.groups * found.group_tokens + single == rows and min(found.groups, single) >= 0
    at_once = max(1, count // sharers // head_blocks)
    assert found.group_tokens in range(1, plan.MOST_ROWS + 1)
    if found.group_tokens > 1 and rows <= at_once * plan.MOST_ROWS:
        assert found.groups <= at_once and single <= (at_once - found.groups) * found.group_tokens


def test_who_takes_several_rows() -> None:
    even, uneven = problem(128, 128), replace(problem(128, 128), has_lengths=True)
    assert plan.plan(even, HOPPER, 132).rows.group_tokens == 2
    # Where rows may be shorter than others, who is done first takes the next one.
    assert plan.plan(uneven, HOPPER, 132).rows == QueryAssignment(0, 1, 128)
    assert plan.plan(problem(128, 128, splits=1), HOPPER, 132).rows == QueryAssignment(0, 1, 128)
    assert plan.most_rows(PAIR, "v32_fp8", "bfloat16") == plan.most_rows(Division(64, 1), "bf16", "bfloat16") == 4
    assert plan.most_rows(Division(64, 1), "v32_fp8", "float16") == 4
    for one in (Division(64, 1), Division(32, 1), Division(64, 1, 2, 2), Division(64, 2, 2)):
        assert plan.most_rows(one, "v32_fp8", "bfloat16") == 1


def test_short_rows_are_not_divided() -> None:
    assert plan.plan(problem(1, 16, topk=100), HOPPER, 132).division.parts == 1


@pytest.mark.parametrize("heads", [1, 16, 40, 128])
def test_splits_leave_nothing_to_the_batch(heads: int) -> None:
    expected = Division(plan.cta_heads(heads), 3, 2 if heads > 64 else 1)
    found = {
        plan.plan(problem(rows, heads, splits=3), HOPPER, count, pairs=False).division
        for rows in (1, 5, 200)
        for count in (1, 132)
    }
    assert found == {expected}


def test_rows_are_shared_by_ctas_that_convert_them_for_other_heads() -> None:
    assert plan.shared(65, "v32_fp8", "bfloat16", 8) == Division(64, 8, 2)
    assert plan.shared(128, "v4_fp8", "bfloat16", 8) == Division(64, 8, 2)
    assert plan.shared(64, "v32_fp8", "bfloat16", 1) is None, "there is one block of heads"
    assert plan.shared(128, "bf16", "bfloat16", 1) is None, "rows are copied"
    assert plan.shared(128, "v4_fp8", "float16", 1) is None, "registers"
    assert plan.shared(128, "v32_fp8", "bfloat16", 16) is None, "a cluster has sixteen CTAs at most"
    # As many parts as were asked for: without, where a cluster would be larger than every GPU can run.
    assert plan.plan(problem(1, 128, splits=4), HOPPER, 132).division == Division(64, 4, 2)
    assert plan.plan(problem(1, 128, splits=5), HOPPER, 132).division == Division(64, 5)


def test_other_targets_have_no_kernel() -> None:
    for name in ("sm_80", "sm_100f"):
        with pytest.raises(UnsupportedError, match="Hopper"):
            plan.variant(arches.named(name))
    with pytest.raises(UnsupportedError, match="CTAs"):
        plan.plan(problem(2**28, 128, splits=16), HOPPER, 132)


@pytest.mark.parametrize(
    "wrong",
    [
        {"cache_format": "fp8"},
        {"d_qk": 512},
        {"heads": 8},
        {"dtype": "float32"},
        {"cache_format": None},
        {"heads": 32, "sharers": 2},
    ],
)
def test_a_variant_has_known_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        plan.variant(HOPPER, **wrong)


def fields(text: str) -> list[str]:
    """Names of numbers and pointers that a struct declares."""
    declared = re.findall(r"(?:(?:const )?\w+\*|int64_t|int32_t|uint32_t) ([\w, ]+);", text)
    return [name for line in declared for name in line.split(", ")]


def test_record_is_the_kernels() -> None:
    """Fields by name and in order; a kernel's size is compared when a call is bound."""
    text = re.sub(r"//[^\n]*", "", (ROOT / "cuda/sparse_mla_decode/sm90/params.cuh").read_text())
    body = text[text.index("struct Source {") : text.index("struct Parameters")]
    assert fields(body) == [name for name, *_ in cuda.Source._fields_]
    assert [name for name, *_ in cuda.Parameters._fields_] == [
        "sources",
        *fields(text[text.index("struct Parameters") :]),
    ]


def run(given: dict[str, Any], count: int, **settings: Any) -> Any:
    with emulated("sm_90a", count, Settings(**settings)) as machine:
        return machine.run(SUBJECT, given), [geometry.cluster for geometry in machine.launches]


@pytest.mark.compile
def test_with_splits_a_row_has_its_bits_in_any_batch() -> None:
    (case,) = SUBJECT.those(SUBJECT.cases.CASES, ["v32_d576_h16_b2_n1_k400_splits3"])
    given = SUBJECT.cases.inputs(case, 1)
    together, clusters = run(given, 132)
    assert clusters == [3]
    alone, _ = run({n: a[1:] if n in ("q", "indices") else a for n, a in given.items()}, 7)
    for one, of_many in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), of_many[1:].view(np.uint8))


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "splits", "cluster", "seed"),
    [
        ("v32_d576_h64_b2_n2_k70+130_second_lengths", 2, 2, 1),
        ("v4_d512_h16_b2_n1_k40+90_second", 2, 2, 2),
        ("bf16_d576_h64_b1_n1_k520_splits16", 4, 4, 3),
        ("v32_d576_h16_b2_n2_k150_holes", 1, 1, 4),
        ("v32_d576_h72_b2_n1_k700_pair", 3, 6, 5),
    ],
)
def test_no_races(name: str, splits: int, cluster: int, seed: int) -> None:
    """Buffers come round, clusters merge, and threads are late by chance."""
    (case,) = SUBJECT.those(SUBJECT.cases.CASES, [name])
    assert isinstance(case, DecodeCase)
    case = replace(case, batch=1, splits=splits)
    given = SUBJECT.cases.inputs(case, 1)
    with emulated("sm_90a", 132, Settings("random", seed=seed, races="hardware")) as machine:
        compare.require(SUBJECT.reports(given, machine.results(SUBJECT, given)))
        assert [geometry.cluster for geometry in machine.launches] == [cluster]


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "division", "seed"),
    [
        ("v32_d576_h64_b2_n2_k70+130_second_lengths", Division(64, 1, 1, 3), 1),
        ("v4_d512_h16_b2_n1_k40+90_second", Division(16, 1, 1, 2), 2),
        ("bf16_d576_h64_b1_n1_k520_splits16", Division(32, 1, 1, 5), 3),
        ("v32_d576_h72_b2_n1_k700_pair", Division(64, 1, 2, 11), 4),
        ("v4_d512_h64_b1_n1_k140_fp16", Division(64, 1, 1, 2), 5),
    ],
)
def test_shares_of_rows_are_merged(name: str, division: Division, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty shares and rows among them, both kinds of consumers, pairs, more shares than are on their way at once."""
    monkeypatch.setattr(plan, "division", lambda *_, **__: division)
    (case,) = SUBJECT.those(SUBJECT.cases.CASES, [name])
    assert isinstance(case, DecodeCase)
    given = SUBJECT.cases.inputs(replace(case, splits=None), 1)
    with emulated("sm_90a", 132, Settings("random", seed=seed, races="hardware")) as machine:
        compare.require(SUBJECT.reports(given, machine.results(SUBJECT, given)))
        decode, merge = machine.launches
        assert (decode.grid[1], decode.cluster) == (division.shares, division.sharers)
        assert merge.grid == (case.rows * case.heads, 1, 1)


@pytest.mark.compile
def test_rows_are_not_shared_where_two_ctas_cannot_run_at_once() -> None:
    (case,) = SUBJECT.those(SUBJECT.cases.CASES, ["v32_d576_h128_b1_n1_k330_pair"])
    assert isinstance(case, DecodeCase)
    given = SUBJECT.cases.inputs(replace(case, topk=70, splits=None), 1)
    assert [run(given, count)[1] for count in (1, 2)] == [[1], [2]]


@pytest.mark.compile
def test_ctas_that_share_rows_go_by_one_length_when_it_changes_under_way() -> None:
    """Each waits for rows that the other brings: of two lengths, they would wait for ever."""
    (case,) = SUBJECT.those(SUBJECT.cases.CASES, ["v32_d576_h128_b1_n1_k330_pair"])
    assert isinstance(case, DecodeCase)
    given = SUBJECT.cases.inputs(replace(case, heads=66, invalid=0.0), 1)
    lengths = [np.full((1, 1), length, np.int32) for length in (40, 300)]  # one block, and five
    with emulated("sm_90a", 132) as machine:
        steady = [machine.results(SUBJECT, given | {"topk_length": length})["out"].tobytes() for length in lengths]
        arguments = machine.arguments(given | {"topk_length": lengths[0]})
        read = arguments["topk_length"]

        def changing(address: int, size: int, loads: bool, stores: bool) -> None:
            lengths.reverse()  # another one for every thread that reads
            read.host[...] = lengths[0]

        machine.watch(read, changing)
        found = SUBJECT.named(machine.call(SUBJECT.call, **arguments))["out"].get().tobytes()
        assert [geometry.cluster for geometry in machine.launches] == [2, 2, 2]
    assert found in steady


def fill_scales(given: dict[str, Any], numbers: list[float], exponents: list[int]) -> None:
    """Scales by chance, of all rows of the cache: fp32 numbers, or with v4_fp8 exponents."""
    cache, rng = given["k_cache"], np.random.default_rng(0)
    blocks, page = cache.shape[:2]
    if given["cache_format"] == "v32_fp8":
        cache[..., 512:528] = rng.choice(np.array(numbers, np.float32), (blocks, page, 4)).view(np.uint8)
    else:
        places = cache.reshape(blocks, -1)[:, page * 576 :]
        places[:] = rng.choice(np.array(exponents, np.uint8), places.shape)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("v32_d576_h16_b2_n1_k100", 1),
        ("v4_d512_h8_b1_n3_k130", 2),
        # Of the half that consumers convert.
        ("v32_d576_h64_b1_n1_k100_zero_scale", 3),
        ("v4_d512_h64_b2_n1_k70", 6),
    ],
)
def test_scales_are_any_numbers(name: str, group: int) -> None:
    """Subnormal, huge, negative and zero ones, exponents 0 and 255, and a NaN whose upper bits are an infinity's."""
    (case,) = SUBJECT.those(SUBJECT.cases.CASES, [name])
    assert isinstance(case, DecodeCase)
    given = SUBJECT.cases.inputs(replace(case, splits=1), 5)
    fill_scales(given, [2.0**-126, 1e-41, 3.3e-30, 7.7e9, -2.5, 0.0], [0, 1, 100, 127, 130, 160])
    cache = given["k_cache"]
    blocks, page = cache.shape[:2]
    block, place = divmod(int(given["indices"][0, 0, 3]), page)
    if given["cache_format"] == "v32_fp8":
        at = 512 + 4 * group
        cache[block, place, at : at + 4] = np.array([0x7F800001], np.uint32).view(np.uint8)
    else:
        cache.reshape(blocks, -1)[block, page * 576 + place * 8 + group] = 255
    given["sm_scale"] = 1e-12
    with emulated("sm_90a", 132) as machine:
        results = machine.results(SUBJECT, given)
    compare.require(SUBJECT.reports(given, results))
    assert np.isnan(results["out"][0, 0].astype(np.float32)).all()
    assert case.rows == 1 or np.isfinite(results["lse"]).any()


@pytest.mark.compile
@pytest.mark.parametrize("name", ["v32_d576_h64_b1_n1_k100_zero_scale", "v4_d512_h64_b2_n1_k70"])
def test_elements_of_large_scales_keep_their_place(name: str) -> None:
    """Those that are made again, where every row of values counts about as much."""
    (case,) = SUBJECT.those(SUBJECT.cases.CASES, [name])
    assert isinstance(case, DecodeCase)
    given = SUBJECT.cases.inputs(replace(case, splits=1), 5)
    fill_scales(given, [0.5, 3.0, 100.0, 300.0], [125, 128, 133, 136])
    given["sm_scale"] = 1e-7
    with emulated("sm_90a", 132, Settings("random", seed=1, races="hardware")) as machine:
        compare.require(SUBJECT.reports(given, machine.results(SUBJECT, given)))
