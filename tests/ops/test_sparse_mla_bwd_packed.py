"""Deterministic gradients of a cluster on Hopper: entries' rows with eight columns in sixteen bytes, and lists of
chunks."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from backward_plan_kit import LISTS, ORDERED, PROBLEM, planned

from cupymla import arch
from cupymla.build import KernelSource
from cupymla.launch import Geometry
from cupymla.ops.mla_cases import MlaCase, sized
from cupymla.ops.sparse_mla_bwd import cases, sizes, sparse_mla_bwd, spec
from cupymla.ops.sparse_mla_bwd.paths import fixed_order
from cupymla.testing import compare
from cupymla_lab.emulate import load
from cupymla_lab.emulate.host.memory import Arrays
from cupymla_lab.emulated import Emulated, emulated

HEADS = 65
BLACKWELL = arch.named("sm_100f")


def test_blackwell_lists_the_entries_of_one_chunk_at_a_time() -> None:
    chosen = planned(target=BLACKWELL, options=ORDERED, s_q=500, topk=2048, s_kv=4096)
    assert (chosen.chunk, chosen.lists) == (264, 1)
    stages = [launch.stage for launch in chosen.launches()]
    assert stages == ["zero", *[*LISTS, "attention", "sum"] * 2, "round"]


def test_lists_are_made_again_where_they_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "LIST_BYTES", 4 * (528 * 2048 + 4096) * 2)
    chosen = planned(options=ORDERED, s_q=2000, topk=2048, s_kv=4096)
    stages = [launch.stage for launch in chosen.launches()]
    assert (chosen.chunk, chosen.lists) == (528, 2)
    assert stages == ["zero", *[*LISTS, *["p_ds", "dq_dkv", "sum"] * 2] * 2, "round"]
    lists = [(x.query_begin, x.query_end, x.lists) for x in chosen.launches() if x.stage == "list"]
    assert lists == [(0, 1056, 2), (1056, 2000, 2)]


@pytest.mark.parametrize(
    ("changes", "packed"),
    [
        ({}, True),
        ({"h_q": 65}, True),
        ({"h_q": 64}, True),
        ({"h_q": 129}, False),
        ({"options": spec.Options()}, False),
        ({"topk": fixed_order.PACKED_TOPK + 1}, False),
    ],
    ids=str,
)
def test_which_rows_are_packed(changes: dict[str, Any], packed: bool) -> None:
    """Of one head block: a second one would add to them."""
    numbers: dict[str, Any] = {"options": ORDERED, "h_q": 128} | changes
    chosen = planned(**numbers)
    assert chosen.packed is packed
    if numbers["h_q"] > 64:
        assert chosen.source("sum").entry == ("sparse_mla_bwd_cluster_sum" if packed else "sparse_mla_bwd_sum")
        partials = int(numbers["options"].deterministic)
        assert dict(chosen.source("attention").defines)["CUPYMLA_PARTIALS"] == (2 if packed else partials)
    assert not planned(target=BLACKWELL, **numbers).packed
    assert not planned(replace(PROBLEM, dkv_dtype="float32"), **numbers).packed


def test_packed_rows_take_half_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: dict[str, Any] = {"options": ORDERED, "s_q": 2000, "topk": 2048, "s_kv": 4096, "h_q": 128}
    packed = planned(**numbers)
    monkeypatch.setattr(fixed_order, "PACKS_ROWS", False)
    plain = planned(**numbers)
    assert (plain.packed, plain.chunk, packed.chunk) == (False, 264, 528)
    sizes = [p.workspace.row_ends - p.workspace.partials for p in (plain, packed)]  # type: ignore[operator]
    assert sizes == [264 * 2048 * 576 * 4, 528 * 2048 * 576 * 2]


def case_of(d_qk: int, topk: int, queries: int, tokens: int, **others: Any) -> MlaCase:
    """Every entry names one of few tokens, so each token has many."""
    return sized(HEADS, d_qk, topk, queries, tokens, "_x", "options", deterministic=True, **others)


def require_right(machine: Emulated, case: MlaCase) -> None:
    compare.require(machine.check("sparse_mla_bwd", case, seed=5))


@pytest.mark.compile
@pytest.mark.parametrize(
    ("chunks_listed", "d_qk", "dtype"), [(1, 576, "float16"), (2, 512, "bfloat16"), (3, 576, "float16")]
)
def test_chunks_of_queries_add_up(chunks_listed: int, d_qk: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks, whose entries are listed one, two and three at a time."""
    topk, tokens = 20, 9
    case = case_of(d_qk, topk, 5, tokens, selection="duplicates", dtype=dtype, sink="finite")
    monkeypatch.setattr(fixed_order, "PARTIAL_BYTES", 2 * topk * d_qk * 2)
    monkeypatch.setattr(sizes, "LIST_BYTES", 4 * (2 * topk + tokens) * chunks_listed)
    with emulated("sm_90a", 2) as machine:
        require_right(machine, case)


@pytest.mark.compile
def test_a_token_that_more_entries_name_than_are_sorted() -> None:
    with emulated("sm_90a", 2) as machine:
        require_right(machine, case_of(512, 1100, 1, 1, selection="duplicates", sink="finite"))


@pytest.mark.compile
@pytest.mark.parametrize("sign", [1, -1])
def test_a_column_that_overflows_leaves_its_neighbours_alone(sign: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only dKV's column does: that of the values is zero, so no score's gradient sees dout's. As with plain rows."""
    query, column = 1, 21
    given = dict(cases.inputs(case_of(512, 20, 2, 30, selection="full"), 3))
    for name in ("kv", "out"):
        given[name] = np.array(given[name])
        given[name][..., column] = 0
    given["dout"] = np.array(given["dout"])
    given["dout"][query, :, column] = sign * 3e38
    given["lse"] = np.array(given["lse"]) - 8  # so weights are large enough
    results = []
    for packs in (True, False):
        monkeypatch.setattr(fixed_order, "PACKS_ROWS", packs)
        with emulated("sm_90a", 2) as machine:
            _, dkv = machine.call(sparse_mla_bwd, **machine.arguments(given))
            results.append(dkv.get().astype(np.float32).reshape(30, 512))
    packed, plain = results
    others = np.arange(512) != column
    assert np.isinf(plain[np.unique(given["indices"][query]), column]).all()
    assert np.isfinite(plain[:, others]).all()
    np.testing.assert_array_equal(packed[:, column], plain[:, column])
    np.testing.assert_allclose(packed[:, others], plain[:, others], rtol=0, atol=np.abs(plain[:, others]).max() / 64)


PACKING = KernelSource("packed_columns.cu", "packed_columns", arch="sm_90a", root=str(Path(__file__).resolve().parent))
THREADS = 128
FIELDS = 1 << 14  # whole numbers from less this on


def packed_and_back(columns: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """What the device's functions leave of vectors of eight columns."""
    packed, sums = np.zeros((len(columns), 4), np.uint32), np.zeros_like(columns)
    memory = Arrays()
    arrays = {"dq_dkv": columns, "packed": packed, "sums": sums}
    for name, array in arrays.items():
        memory.add(name, array.ctypes.data, array.nbytes, writable=name != "dq_dkv")
    geometry = Geometry((len(columns) // THREADS, 1, 1), THREADS, 0, 1)
    places = [ctypes.c_uint64(array.ctypes.data) for array in arrays.values()]
    load(PACKING, on="host").launch(geometry, places, arrays=memory)
    return sums


def modelled(columns: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The format, told again: whole numbers of the largest column's unit, in float64."""
    largest = np.abs(columns).max(axis=-1, keepdims=True).astype(np.float64)
    unit = np.ldexp(1.0, np.frexp(largest)[1] - 14)
    # The largest itself rounds up to the next power of two: there is no field for that.
    unit = np.where(np.rint(largest / unit) == FIELDS, 2 * unit, unit)
    unit = np.maximum(unit, 2.0**-126)
    return np.asarray(np.rint(columns / unit) * unit)


def vectors(rng: np.random.Generator, count: int) -> npt.NDArray[np.float32]:
    """Columns of all magnitudes, of alike ones, and near where rounding reaches a power of two."""
    exponents = rng.integers(-120, 127, (count, 1))
    alike = np.ldexp(rng.uniform(-1, 1, (count, 8)), exponents)
    apart = np.ldexp(rng.uniform(-1, 1, (count, 8)), rng.integers(-126, 127, (count, 8)))
    nearly = alike.copy()
    steps = rng.integers(-3, 4, count) / 8
    nearly[:, 3] = np.ldexp((FIELDS - 0.5 + steps) / FIELDS, exponents[:, 0])
    zeros = np.where(rng.random((count, 8)) < 0.7, 0, alike)
    return np.concatenate((alike, apart, nearly, zeros)).astype(np.float32)


@pytest.mark.compile
def test_columns_are_whole_numbers_of_the_largest_ones_unit() -> None:
    columns = vectors(np.random.default_rng(0), 4 * THREADS)
    got, wanted = packed_and_back(columns), modelled(columns)
    np.testing.assert_array_equal(got, wanted.astype(np.float32))
    largest = np.abs(columns).max(axis=-1, keepdims=True).astype(np.float64)
    off = np.abs(got - columns.astype(np.float64))
    assert (off <= np.maximum(largest * 2.0**-14 * (1 + 2.0**-14), 2.0**-127)).all()


@pytest.mark.compile
def test_columns_that_are_not_finite_or_nearly_so_keep_their_neighbours() -> None:
    """Those have seven bits, the rest cut off."""
    rng = np.random.default_rng(1)
    columns = np.ldexp(rng.uniform(-1, 1, (THREADS, 8)), rng.integers(-100, 127, (THREADS, 8))).astype(np.float32)
    non_finite = np.array([np.inf, -np.inf, np.nan, np.finfo(np.float32).max, -np.finfo(np.float32).max], np.float32)
    rows = np.arange(THREADS)
    columns[rows, rows % 8] = non_finite[rows % len(non_finite)]
    got = packed_and_back(columns)
    cut = (columns.view(np.uint32) & np.uint32(0xFFFE0000)).view(np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(columns))
    np.testing.assert_array_equal(np.where(np.isnan(got), 0, got), np.where(np.isnan(cut), 0, cut))
