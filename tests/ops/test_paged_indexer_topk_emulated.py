"""The decode indexer's kernels without a GPU: scores with the bits of `indexer_logits`' kernel, rings that come round
in every mode, chunks, more requests than threads. Compiles, needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupymla
from cupymla import driver
from cupymla.ops.paged_indexer_topk import plan
from cupymla.ops.paged_indexer_topk.cases import PagedCase
from cupymla.ops.topk import plan as selection
from cupymla.testing import compare
from cupymla_lab.emulate import MODES, Settings
from cupymla_lab.emulate.settings import Mode
from cupymla_lab.emulated import DeviceArray, emulated
from cupymla_lab.subjects import Subject

pytestmark = pytest.mark.compile

SUBJECT = Subject("paged_indexer_topk")
CASES: tuple[PagedCase, ...] = SUBJECT.cases.CASES


def named(ending: str) -> PagedCase:
    return next(case for case in CASES if case.name.endswith(ending))


def bits(array: Any) -> Any:
    """Of float32; every NaN the same."""
    made = np.array(array, np.float32)
    made[np.isnan(made)] = np.nan
    return made.view(np.int32)


@pytest.mark.parametrize(
    "ending", ["fp8_h16_b9_n2_l320_k30_page16_hostile", "k30_page16_strided", "n9_l144_k20_page16", "_bound"]
)
def test_scores_are_those_of_the_reference(ending: str) -> None:
    """Of all keys, with -inf where a query sees none."""
    arguments = SUBJECT.cases.scored_arguments(SUBJECT.cases.inputs(named(ending), 2))
    with emulated("sm_90a", 3) as machine:
        logits = machine.call(cupymla.paged_indexer_logits, **machine.arguments(arguments, ())).get()
    np.testing.assert_array_equal(bits(logits), bits(cupymla.paged_indexer_logits(**arguments)))


def laid_out(cache: Any, block_bytes: int, row_bytes: int) -> Any:
    """The same keys, or the last ones, at such distances."""
    strides = (block_bytes, row_bytes, cache.itemsize)
    span = sum((extent - 1) * stride for extent, stride in zip(cache.shape, strides, strict=True)) + cache.itemsize
    made: Any = np.ndarray(cache.shape, cache.dtype, np.full(span, 0xFF, np.uint8), 0, strides)
    made[...] = cache
    return made


@pytest.mark.parametrize(("block_bytes", "row_bytes"), [(6144, 384), (16384, 1024), (256, 8192), (0, 256), (4096, 0)])
def test_rows_and_blocks_at_any_distance(block_bytes: int, row_bytes: int) -> None:
    """Gaps between rows as wide as they are, blocks between rows, one block or one row for all."""
    case = named("bf16_h64_b2_n2_l144_k20_page16")
    arguments = SUBJECT.cases.scored_arguments(SUBJECT.cases.inputs(case, 2))
    arguments["k_cache"] = laid_out(arguments["k_cache"], block_bytes, row_bytes)
    with emulated("sm_90a", 3) as machine:
        logits = machine.call(cupymla.paged_indexer_logits, **machine.arguments(arguments, ())).get()
    np.testing.assert_array_equal(bits(logits), bits(cupymla.paged_indexer_logits(**arguments)))


def test_one_block_for_all_of_an_fp8_cache() -> None:
    arguments = SUBJECT.cases.scored_arguments(SUBJECT.cases.inputs(named("fp8_h64_b2_n2_l256_k20"), 2))
    cache = arguments["k_cache"]
    arguments["k_cache"] = np.lib.stride_tricks.as_strided(cache, cache.shape, (0, *cache.strides[1:]))
    with emulated("sm_90a", 3) as machine:
        logits = machine.call(cupymla.paged_indexer_logits, **machine.arguments(arguments, ())).get()
    np.testing.assert_array_equal(bits(logits), bits(cupymla.paged_indexer_logits(**arguments)))


def test_a_call_follows_an_address_to_words_and_back() -> None:
    """Its map of keys is one of that address, where there is one."""
    arguments = SUBJECT.cases.scored_arguments(SUBJECT.cases.inputs(named("fp8_h64_b2_n2_l256_k20"), 2))
    cache = arguments["k_cache"]
    want = bits(cupymla.paged_indexer_logits(**arguments))
    with emulated("sm_90a", 3) as machine:
        given = machine.arguments(arguments, ())
        room = machine.array(np.zeros(cache.nbytes + 32, np.uint8)).host

        def scores_at(offset: int) -> Any:
            host = np.ndarray(cache.shape, cache.dtype, room, offset, cache.strides)
            host[...] = cache
            return cupymla.paged_indexer_logits(**given | {"k_cache": DeviceArray(host)}).get()

        offsets = (0, 4, 0, 16, 12, 32)
        for scores in machine.call(lambda: [scores_at(offset) for offset in offsets]):
            np.testing.assert_array_equal(bits(scores), want)


@pytest.mark.parametrize("ending", ["fp8_h64_b2_n2_l256_k20", "bf16_h64_b2_n2_l144_k20_page16"])
def test_scores_have_the_bits_of_the_dense_kernel(ending: str) -> None:
    """Of numbers whose sums no reference has to the bit."""
    case = named(ending)
    arguments = SUBJECT.cases.inputs(case, 3)
    rng = np.random.default_rng(0)
    arguments["weights"] = rng.standard_normal(arguments["weights"].shape).astype(np.float32)
    if case.dtype == "fp8":
        arguments["q"] = rng.integers(0, 256, arguments["q"].shape, np.uint8) & np.uint8(0xBF)
        arguments["k_cache"][...] = rng.integers(0, 256, arguments["k_cache"].shape, np.uint8) & np.uint8(0xBF)
    else:
        for name in ("q", "k_cache"):
            arguments[name] = rng.standard_normal(arguments[name].shape).astype(arguments[name].dtype)
    request = 1
    slots = arguments["block_tables"][request].repeat(case.page) * case.page + np.arange(case.keys) % case.page
    dense = {name: arguments[name][request] for name in ("q", "weights", "q_scale") if name in arguments}
    if case.dtype == "fp8":
        k, scale = cupymla.gather_indexer_cache(arguments["k_cache"], slots.astype(np.int32))
        dense |= {"k": k.view(np.uint8), "k_scale": scale}
    else:
        dense["k"] = np.ascontiguousarray(arguments["k_cache"].reshape(-1, case.channels)[slots])
    with emulated("sm_90a", 3) as machine:
        scored = SUBJECT.cases.scored_arguments(arguments)
        paged = machine.call(cupymla.paged_indexer_logits, **machine.arguments(scored, ())).get()
        (wanted,) = machine.run(Subject("indexer_logits"), dense)
    for query in range(case.queries):
        seen = case.keys - case.queries + 1 + query
        np.testing.assert_array_equal(bits(paged[request, query, :seen]), bits(wanted[query, :seen]))
        assert np.isneginf(paged[request, query, seen:]).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ending", ["one_long", "fp16_h128_b2_n6_l144_k20_page16"])
def test_rings_come_round(ending: str, mode: Mode) -> None:
    """A CTA alone has more key tiles than stages three times over, or query tiles of which some find no consumer."""
    with emulated("sm_90a", 1, Settings(mode, seed=4)) as machine:
        compare.require(machine.check("paged_indexer_topk", named(ending)))


@pytest.mark.parametrize("ending", ["_hostile", "by_query"])
def test_chunks_change_nothing(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own part of every array."""
    case = named(ending)
    monkeypatch.setattr(plan, "CHUNK_BYTES", 2 * case.queries * case.keys * 4)
    with emulated("sm_90a", 3) as machine:
        compare.require(machine.check("paged_indexer_topk", case))
        assert len(machine.launches) > 2


@pytest.mark.parametrize("cluster", [8, 4, 2])
def test_rows_of_clusters(cluster: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several CTAs read a row together, and the first one names its slots."""
    monkeypatch.setattr(selection, "CLUSTER_ROW", 1)
    monkeypatch.setattr(selection, "short_plan", lambda *_: None)
    case = replace(named("_registers"), name="cluster", keys=2000, topk=64, requests=2)
    with emulated("sm_90a", 2 * cluster) as machine:
        compare.require(machine.check("paged_indexer_topk", case))
        assert machine.launches[-1].cluster == cluster


@pytest.mark.parametrize(("page", "mode"), [(16, "eager"), (5, "lazy"), (16, "random")])
def test_rows_that_clusters_keep(page: int, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight CTAs keep a row together, and each names the slots of its keys: of those side by side, or each alone."""
    monkeypatch.setattr(selection, "_ALONE_COLUMNS", 1000)
    monkeypatch.setattr(selection, "_LEAST_SHARE", 1)
    case = replace(named("_registers"), name="kept", keys=2000, topk=64, page=page, requests=2, queries=2)
    with emulated("sm_90a", 32, Settings(mode, seed=2, races="hardware")) as machine:
        compare.require(machine.check("paged_indexer_topk", case))
        assert machine.launches[-1].cluster == 8


@pytest.mark.parametrize(("ending", "threads"), [("_registers", 1024), ("_shared", 288)])
def test_rows_at_the_limit_of_registers(ending: str, threads: int) -> None:
    """8192 keys, and one block more, which shared memory keeps; blocks that are not in the cache."""
    with emulated("sm_90a", 3) as machine:
        compare.require(machine.check("paged_indexer_topk", named(ending)))
        assert machine.launches[-1].block == threads


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_selection_is_launched_early_where_drivers_can(overlaps: bool) -> None:
    """It may begin before the scores are ready, and waits for them."""
    with emulated("sm_90a", 3) as machine, mock.patch.object(driver, "has_dependent_launch", lambda index: overlaps):
        compare.require(machine.check("paged_indexer_topk", named("_l1280_k40_page16_one_long")))
        assert [geometry.pdl for geometry in machine.launches] == [False, overlaps]


def test_more_requests_than_threads() -> None:
    """CTAs find their first request among many, most of which have nothing."""
    rng = np.random.default_rng(1)
    requests = 600
    case = replace(CASES[0], requests=requests, keys=4, page=2, heads=8, channels=64, scales=False, lens="hostile")
    arguments = SUBJECT.cases.scored_arguments(SUBJECT.cases.inputs(case, 5))
    arguments["context_lens"] = np.where(rng.random(requests) < 0.1, rng.integers(1, 5, requests), 0).astype(np.int32)
    with emulated("sm_90a", 7) as machine:
        logits = machine.call(cupymla.paged_indexer_logits, **machine.arguments(arguments, ())).get()
        assert machine.launches[0].block < requests
    np.testing.assert_array_equal(bits(logits), bits(cupymla.paged_indexer_logits(**arguments)))


def test_a_second_launch_follows_other_lengths() -> None:
    """What a graph replays: a prepared call whose lengths and tables change in place."""
    case = named("_hostile")
    arguments = SUBJECT.cases.inputs(case, 1)
    with emulated("sm_90a", 3) as machine:
        given = machine.arguments(arguments)
        prepared = machine.call(cupymla.paged_indexer_topk.prepare, **given)
        for seed in (2, 3):
            other = SUBJECT.cases.inputs(case, seed)
            tables = np.random.default_rng(seed).permuted(arguments["block_tables"], axis=1)
            arguments |= {"context_lens": other["context_lens"], "block_tables": tables}
            given["context_lens"].host[...] = arguments["context_lens"]
            given["block_tables"].host[...] = tables
            results = machine.call(prepared)
            for got, want in zip(results, cupymla.paged_indexer_topk(**arguments), strict=True):
                np.testing.assert_allclose(got.get(), want, rtol=1e-5)
                assert want.dtype != np.int32 or (got.get() == want).all()
