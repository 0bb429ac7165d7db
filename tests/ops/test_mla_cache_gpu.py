"""The fp8 caches on a GPU: the bits of the CPU for large problems, every 16-bit float, graphs whose lengths change."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupymla
from cupymla import driver
from cupymla.testing.operators import arguments_on, as_tuple

pytestmark = pytest.mark.gpu

BF16 = ml_dtypes.bfloat16


@pytest.fixture(autouse=True)
def recent() -> None:
    if driver.compute_capability(0) < (8, 0):
        pytest.skip("the kernels are for sm_80 and later")


def bits(array: Any) -> bytes:
    """An array's bytes, every NaN of more than a byte the same."""
    made = np.array(array)
    if made.dtype.itemsize > 1 and made.dtype.kind not in "iu":
        made[np.isnan(made)] = np.nan
    return made.tobytes()


def on_host(cp: Any, array: Any, like: Any) -> Any:
    """A result, which in CuPy has no dtype of narrow floats, in that of `like`."""
    made = cp.asnumpy(array)
    return made if made.dtype == like.dtype else made.view(like.dtype)


def require_same(cp: Any, name: str, arguments: dict[str, Any]) -> None:
    """Results and what is written in place have the bits of the CPU's."""
    given = arguments_on(cp, arguments)
    results = as_tuple(getattr(cupymla, name)(**given))
    own = {n: v.copy() if n == "cache" else v for n, v in arguments.items()}
    for got, want in zip(results, as_tuple(getattr(cupymla, name)(**own)), strict=True):
        assert bits(on_host(cp, got, want)) == bits(want)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("rule", ["amax", "pow2"])
@pytest.mark.parametrize(("rows", "channels", "group"), [(100003, 128, 128), (4099, 576, 64), (300, 4096, 256)])
def test_quantised_rows(cp: Any, dtype: Any, rule: str, rows: int, channels: int, group: int) -> None:
    rng = np.random.default_rng(rows)
    with np.errstate(over="ignore"):
        x = (rng.standard_normal((rows, channels)) * np.exp(3 * rng.standard_normal((rows, 1)))).astype(dtype)
    require_same(cp, "quantize_fp8", {"x": x, "group": group, "scale_rule": rule})
    codes, scales = cupymla.quantize_fp8(x, group=group)
    require_same(cp, "dequantize_fp8", {"codes": codes.view(np.uint8), "scales": scales, "group": group})


@pytest.mark.parametrize("dtype", [np.float16, BF16])
def test_every_16_bit_float(cp: Any, dtype: Any) -> None:
    """Beside a 448, which makes the scale 1, and by itself."""
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    beside = np.repeat(every.reshape(-1, 1), 16, axis=1)
    beside[:, ::2] = 448
    require_same(cp, "quantize_fp8", {"x": beside, "group": 16})
    require_same(cp, "quantize_fp8", {"x": every.reshape(-1, 16), "group": 16, "scale_rule": "pow2"})


def test_floats_of_all_exponents(cp: Any) -> None:
    bits_of = np.random.default_rng(0).integers(0, 2**32, (1 << 16, 32), dtype=np.uint32)
    bits_of[: 1 << 15] &= np.uint32(0xFFF80000)  # ties
    x = bits_of.view(np.float32).copy()
    x[::2, 0] = 448
    require_same(cp, "quantize_fp8", {"x": x, "group": 16})


@pytest.mark.parametrize(("blocks", "page"), [(4000, 64), (70000, 1), (333, 30)])
def test_written_and_gathered_pages(cp: Any, blocks: int, page: int) -> None:
    rng = np.random.default_rng(page)
    cache = rng.integers(0, 256, (blocks, page, 132), np.uint8)
    tokens = min(blocks * page // 2, 100000)
    slots = rng.permutation(blocks * page)[:tokens]
    slots[rng.random(tokens) < 0.1] = rng.choice([-1, -(2**62), blocks * page, 2**40])
    k = rng.standard_normal((tokens, 128)).astype(BF16)
    require_same(cp, "indexer_k_quant_and_cache", {"k": k, "cache": cache, "slot_mapping": slots})
    require_same(cp, "gather_indexer_cache", {"cache": cache, "slots": slots})
    lens = np.concatenate([[0], np.cumsum(rng.integers(0, 500, 200))]).astype(np.int32)
    tables = rng.integers(-1, blocks + 1, (200, -(-400 // page))).astype(np.int32)
    requests = {"cache": cache, "block_tables": tables, "cu_lens": lens, "rows": 60000}
    require_same(cp, "gather_indexer_cache", requests)


def test_lengths_and_tables_of_any_value(cp: Any) -> None:
    """Nothing is read outside of the arrays; a row has zeros or what some slot holds."""
    rng = np.random.default_rng(4)
    cache = rng.integers(0, 256, (50, 16, 132), np.uint8)
    codes, _ = cupymla.gather_indexer_cache(cache, np.arange(800))
    there = {row.tobytes() for row in codes} | {bytes(128)}
    for bound in (60, 1000, 2**31 - 1):
        tables = rng.integers(-bound - 1, bound, (100, 9)).astype(np.int32)
        lens = rng.integers(-bound - 1, bound, 101).astype(np.int32)
        given = arguments_on(cp, {"cache": cache, "block_tables": tables, "cu_lens": lens})
        k, _ = cupymla.gather_indexer_cache(**given, rows=3000)
        assert {row.tobytes() for row in cp.asnumpy(k)} <= there


def test_a_graph_follows_slots_and_lengths(cp: Any) -> None:
    rng = np.random.default_rng(5)
    host = rng.integers(0, 256, (50, 16, 132), np.uint8)
    k = rng.standard_normal((30, 128)).astype(np.float32)
    tables = rng.integers(0, 50, (3, 4)).astype(np.int32)
    cache, keys, slots = cp.asarray(host), cp.asarray(k), cp.full(30, -1, cp.int64)
    lens = cp.zeros(4, cp.int32)
    write = cupymla.indexer_k_quant_and_cache.prepare(keys, cache, slots)
    read = cupymla.gather_indexer_cache.prepare(cache, block_tables=cp.asarray(tables), cu_lens=lens, rows=100)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        write()
        results = read()
        graph = stream.end_capture()
    cp.cuda.Device().synchronize()
    for seed in range(3):
        places = np.random.default_rng(seed).permutation(800)[:30]
        cumulated = np.array([0, 10 * seed, 40, 90], np.int32)
        slots[...], lens[...] = cp.asarray(places), cp.asarray(cumulated)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        cupymla.indexer_k_quant_and_cache(k, host, places)
        wanted = cupymla.gather_indexer_cache(host, block_tables=tables, cu_lens=cumulated, rows=100)
        for got, want in zip(results, wanted, strict=True):
            assert bits(on_host(cp, got, want)) == bits(want)


@pytest.mark.parametrize("channels", [8, 64, 128, 256, 512, 1024, 8192])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_rotated_rows(cp: Any, channels: int, dtype: Any) -> None:
    rng = np.random.default_rng(channels)
    for rows in (1, 4001):
        x = rng.standard_normal((rows, channels)).astype(dtype)
        require_same(cp, "hadamard", {"x": x})
