"""Kernels of the fp8 caches without a GPU: on the host machine they give the CPU's bits. Compiles, needs no GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupymla
from cupymla.ops import registry
from cupymla.testing import compare
from cupymla.testing.operators import as_tuple
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject

pytestmark = pytest.mark.compile

Array = np.ndarray[Any, Any]
ARCHS = ("sm_80", "sm_90")
"""Before and from sm_89 on, which has an instruction for what the other does by integer arithmetic."""


def bits(array: Array) -> bytes:
    """An array's bytes, every NaN of more than a byte the same: which NaN a product gives is not promised."""
    made = np.array(array)
    if made.dtype.itemsize > 1 and made.dtype.kind not in "iu":
        made[np.isnan(made)] = np.nan
    return made.tobytes()


def require_same(name: str, arguments: dict[str, Any], written: tuple[str, ...] = (), arch: str = "sm_90") -> None:
    """The kernel's results, and what it writes in place, have the bits of the CPU's."""
    function = getattr(cupymla, name)
    on_host = {n: v.copy() if n in written else v for n, v in arguments.items()}
    expected = as_tuple(function(**on_host))
    with emulated(arch, 3) as machine:
        results = as_tuple(machine.call(function, **machine.arguments(arguments, written)))
    assert len(results) == len(expected)
    for got, want in zip(results, expected, strict=True):
        assert got.shape == want.shape
        assert bits(got.get()) == bits(want)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", Subject("quantize_fp8").cases.CASES, ids=lambda case: case.name)
def test_quantised_bits(arch: str, case: Any) -> None:
    require_same("quantize_fp8", Subject("quantize_fp8").cases.inputs(case, 5), arch=arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kind_of_float(arch: str) -> None:
    """With a scale of 1: all exponents, ties of every code, subnormal numbers; and random bits."""
    rng = np.random.default_rng(0)
    bits_of = rng.integers(0, 2**32, (64, 32), dtype=np.uint32)
    bits_of[:32] = (bits_of[:32] & 0x80FFFFFF) | np.uint32(0x3A000000)  # 2^-11 to 2^-7
    bits_of[16:] &= np.uint32(0xFFF80000)  # ties
    x = bits_of.view(np.float32).copy()
    x[:48, 0] = 448
    require_same("quantize_fp8", {"x": x, "group": 32}, arch=arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("padding", [0, 1, 8])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_dequantised_bits(arch: str, padding: int, as_bytes: bool) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 256).repeat(6, 1).repeat(2, 0)
    wide = np.concatenate([codes, np.zeros((2, 6, padding), np.uint8)], axis=-1)[..., :256]
    scales = np.random.default_rng(0).standard_normal((4, 6, 2)).astype(np.float32).transpose(2, 1, 0)
    scales[0, :, 0] = [1, 0, 2.0**-140, 3e38, np.inf, np.nan]
    given = wide if as_bytes else wide.view(ml_dtypes.float8_e4m3fn)
    require_same("dequantize_fp8", {"codes": given, "scales": scales, "group": 64}, arch=arch)


@pytest.mark.parametrize("gap", [1, 4, 16])
def test_given_outputs_of_any_strides(gap: int) -> None:
    """Rows at addresses that take bytes, words or whole vectors."""
    x = np.random.default_rng(2).standard_normal((3, 2, 64)).astype(ml_dtypes.bfloat16)
    want = cupymla.quantize_fp8(x, group=16)
    back = cupymla.dequantize_fp8(*want, group=16)
    with emulated("sm_90", 1) as machine:
        codes = machine.array(np.zeros((3, 2, 64 + gap), np.uint8)[..., :64], writable=True)
        scales = machine.array(np.zeros((4, 2, 3), np.float32).transpose(2, 1, 0), writable=True)
        out = machine.array(np.zeros((3, 2, 64 + gap), ml_dtypes.bfloat16)[..., :64], writable=True)
        made = machine.call(cupymla.quantize_fp8, machine.array(x), group=16, codes=codes, scales=scales)
        assert made[0] is codes and made[1] is scales
        machine.call(cupymla.dequantize_fp8, codes, scales, group=16, out=out)
        assert bits(codes.get()) == bits(want[0]) and bits(scales.get()) == bits(want[1])
        assert bits(out.get()) == bits(back)


# Caches of indexer keys ----------------------------------------------------------------------------------------------


def cache_of(blocks: int, page: int, gap: int, rank: int = 3) -> Array:
    """Random bytes of a cache whose blocks lie `gap` bytes apart."""
    memory = np.random.default_rng(page).integers(0, 256, (blocks, page * 132 + gap), np.uint8)
    shape = (blocks, page, 132) if rank == 3 else (blocks, page, 1, 132)
    strides = (memory.strides[0], 132, 1) if rank == 3 else (memory.strides[0], 132, 132, 1)
    return np.lib.stride_tricks.as_strided(memory, shape, strides)


PLACES = np.array([2, -1, 11, 12, 0, -(2**31), 2**31 - 1, 5, 7], np.int64)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("page", "gap", "rank"), [(4, 0, 3), (3, 4, 4), (1, 12, 3), (2, 16, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_written_bits(arch: str, page: int, gap: int, rank: int, dtype: Any) -> None:
    """Of rows at odd addresses, and of rows that take vectors."""
    wide = np.random.default_rng(1).standard_normal((len(PLACES), 131)).astype(dtype)
    slots = np.stack([PLACES, PLACES], axis=-1)[:, 0]
    slots[3] = 2**32 + 1  # what is a slot in its lower half
    k = wide[:, 3:] if dtype == np.float16 else wide[:, :128]
    arguments: dict[str, Any] = {"k": k, "cache": cache_of(12 // page, page, gap, rank), "slot_mapping": slots}
    require_same("indexer_k_quant_and_cache", arguments, ("cache",), arch)
    arguments |= {"k": k.copy(), "slot_mapping": PLACES.astype(np.int32), "scale_rule": "pow2"}
    require_same("indexer_k_quant_and_cache", arguments, ("cache",), arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("page", "gap", "rank"), [(4, 0, 3), (3, 4, 4), (1, 12, 3), (2, 16, 3)])
@pytest.mark.parametrize("indices", [np.int32, np.int64])
def test_gathered_bits(arch: str, page: int, gap: int, rank: int, indices: Any) -> None:
    cache = cache_of(12 // page, page, gap, rank)
    require_same("gather_indexer_cache", {"cache": cache, "slots": PLACES.astype(indices)}, arch=arch)
    tables = np.random.default_rng(2).integers(-2, 12 // page + 2, (4, 3)).astype(np.int32)
    lens = np.array([-3, 2, 2, 12, 40], np.int32)
    for rows in (0, 1, 15, 50):
        arguments = {"cache": cache, "block_tables": tables.T.copy().T, "cu_lens": lens, "rows": rows}
        require_same("gather_indexer_cache", arguments, arch=arch)


def test_gathered_into_given_arrays() -> None:
    """Rows at addresses that take words or bytes."""
    cache = cache_of(3, 4, 0)
    want = cupymla.gather_indexer_cache(cache, PLACES)
    for gap in (1, 4, 8):
        with emulated("sm_90", 1) as machine:
            k = machine.array(np.zeros((len(PLACES), 128 + gap), np.uint8)[:, :128], writable=True)
            k_scale = machine.array(np.zeros((len(PLACES), 2), np.float32)[:, 0], writable=True)
            arguments = machine.arguments({"cache": cache, "slots": PLACES})
            made = machine.call(cupymla.gather_indexer_cache, **arguments, k=k, k_scale=k_scale)
            assert made[0] is k and made[1] is k_scale
            assert bits(k.get()) == bits(want[0]) and k_scale.get().tobytes() == want[1].tobytes()


@pytest.mark.parametrize("requests", [0, 1, 5])
def test_no_lengths_and_tables_lead_out_of_the_arrays(requests: int) -> None:
    """The machine stops at an access past an array; a row has zeros or what some slot holds."""
    cache, rng = cache_of(3, 4, 0), np.random.default_rng(3)
    everything, factors = cupymla.gather_indexer_cache(cache, np.arange(12))
    there = {(row.tobytes(), scale.tobytes()) for row, scale in zip(everything, factors, strict=True)}
    there |= {(bytes(128), bytes(4))}
    for bound in (12, 2**31 - 1):
        with emulated("sm_90", 2) as machine:
            for _ in range(4):
                tables = rng.integers(-bound - 1, bound, (requests, 2)).astype(np.int32)
                lens = rng.integers(-bound - 1, bound, requests + 1).astype(np.int32)
                given = machine.arguments({"cache": cache, "block_tables": tables, "cu_lens": lens})
                k, k_scale = machine.call(cupymla.gather_indexer_cache, **given, rows=20)
                rows = zip(k.get(), k_scale.get(), strict=True)
                assert {(row.tobytes(), scale.tobytes()) for row, scale in rows} <= there


def test_an_empty_cache_takes_and_gives_nothing() -> None:
    cache = np.zeros((0, 4, 132), np.uint8)
    slots = np.array([0, -1, 5], np.int32)
    k = np.ones((3, 128), np.float32)
    require_same("indexer_k_quant_and_cache", {"k": k, "cache": cache, "slot_mapping": slots}, ("cache",))
    require_same("gather_indexer_cache", {"cache": cache, "slots": slots})


# hadamard ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [8, 32, 128, 256, 512, 2048, 8192])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_rotated_bits(channels: int, dtype: Any) -> None:
    """Rows within a warp, and rows of several; numbers of rows that fill no CTA; strides of any kind."""
    x = np.random.default_rng(channels).standard_normal((3, 3, channels + 1)).astype(dtype)
    x[1, 1, 2], x[2, 2, 3], x[2, 2, 4] = np.nan, np.inf, -np.inf
    require_same("hadamard", {"x": x[..., :channels]})
    require_same("hadamard", {"x": x[:, 0, :channels].copy()}, arch="sm_80")


def test_many_rows_are_rotated_in_rounds() -> None:
    """More than a grid of 16 CTAs has at a time: a second round of CTAs of 128 rows, three of one row and of four."""
    for rows, channels in ((16 * 128 + 5, 16), (2 * 16 + 5, 2048), (2 * 16 * 4 + 5, 512)):
        x = np.random.default_rng(rows).standard_normal((rows, channels)).astype(ml_dtypes.bfloat16)
        want = cupymla.hadamard(x)
        with emulated("sm_90", 1) as machine:
            assert bits(machine.call(cupymla.hadamard, machine.array(x)).get()) == bits(want)


# In place, prepared --------------------------------------------------------------------------------------------------


def test_a_prepared_writer_writes_again_and_returns_the_cache() -> None:
    cache = cache_of(3, 4, 0).copy()
    k = np.random.default_rng(0).standard_normal((2, 128)).astype(np.float32)
    slots = np.array([1, 7], np.int32)
    with emulated("sm_90", 1) as machine:
        given = machine.arguments({"k": k, "cache": cache, "slot_mapping": slots}, ("cache",))
        assert machine.call(cupymla.indexer_k_quant_and_cache, **given) is given["cache"]
        prepared = machine.call(cupymla.indexer_k_quant_and_cache.prepare, **given)
        given["k"].host[...] = k + 1
        given["slot_mapping"].host[...] = [7, 2]
        assert machine.call(prepared) is given["cache"]
        for keys, places in ((k, slots), (k + 1, np.array([7, 2]))):
            cupymla.indexer_k_quant_and_cache(keys, cache, places)
        assert given["cache"].get().tobytes() == cache.tobytes()


@pytest.mark.parametrize("name", [entry.name for entry in registry.MEMBERS])
def test_the_cases_of_a_function_run_its_kernel(name: str) -> None:
    """Its strides, through what the GPU's check uses: all its cases run in `python -m cupymla_lab without-gpu`."""
    subject = Subject(name)
    case = next(case for case in subject.cases.CASES if case.intent == "strides")
    with emulated("sm_90", 3) as machine:
        compare.require(machine.check(name, case))
        assert set(machine.launched) == {kernel.name for kernel in subject.entry.kernels}
