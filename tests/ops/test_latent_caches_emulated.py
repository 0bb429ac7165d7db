"""Kernels of the caches of latents without a GPU: on the host machine they give the CPU's bits. Needs no GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupymla
from cupymla_lab.emulated import emulated

pytestmark = pytest.mark.compile

Array = np.ndarray[Any, Any]
BF16 = ml_dtypes.bfloat16
WIDTHS = {"v32_fp8": (512, 656), "v4_fp8": (448, 584), "bf16": (512, 576)}
PLACES = np.array([2, -1, 11, 12, 0, -(2**31), 2**31 - 1, 5, 7], np.int64)


def cache_of(cache_format: str, page: int, gap: int, rank: int, width: int = 0) -> Array:
    """Random bytes of a cache of 12 slots whose blocks lie `gap` bytes apart."""
    item = 2 if cache_format == "bf16" else 1
    row = (width or WIDTHS[cache_format][1]) * item
    blocks = 12 // page
    memory = np.random.default_rng(page).integers(0, 256, (blocks, page * row + gap), np.uint8)
    shape = (blocks, page, row) if rank == 3 else (blocks, page, 1, row)
    strides = (memory.strides[0], row, 1) if rank == 3 else (memory.strides[0], row, row, 1)
    cache = np.lib.stride_tricks.as_strided(memory, shape, strides)
    return cache.view(BF16) if item == 2 else cache


def values(channels: int, dtype: Any, seed: int = 0) -> Array:
    """Rows of many magnitudes, with NaN, infinities, a group of zeros, one of NaN and exact powers of two."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((len(PLACES), channels), dtype=np.float32) * np.exp(
        3 * rng.standard_normal((len(PLACES), 1), dtype=np.float32)
    )
    kind = rng.random(x.shape)
    x[kind < 0.02], x[kind > 0.99], x[(kind > 0.5) & (kind < 0.51)] = np.nan, np.inf, -np.inf
    x[4, :128], x[4, 128:256] = 0, np.nan
    x[7, :128] = 448 * 2.0 ** rng.integers(-4, 1, 128)
    x[8] *= np.float32(1e-6)
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype)


def require_written(cache: Array, arguments: dict[str, Any], arch: str = "sm_90") -> Array:
    """The kernel writes what the CPU does, and nothing else; returns the cache."""
    host = cache.copy()
    cupymla.concat_and_cache_mla(cache=host, **arguments)
    with emulated(arch, 2) as machine:
        given = machine.arguments({"cache": cache, **arguments}, ("cache",))
        assert machine.call(cupymla.concat_and_cache_mla, **given) is given["cache"]
        assert given["cache"].get().tobytes() == host.tobytes()
    return host


def require_gathered(arguments: dict[str, Any], arch: str = "sm_90") -> None:
    want = cupymla.gather_mla_cache(**arguments)
    with emulated(arch, 2) as machine:
        got = machine.call(cupymla.gather_mla_cache, **machine.arguments(arguments)).get()
    assert got.shape == want.shape
    numbers = [np.nan_to_num(array.astype(np.float32), nan=-1.5).tobytes() for array in (got, want)]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize(
    ("cache_format", "rule", "dtype", "page", "gap", "rank", "arch"),
    [
        ("v32_fp8", None, BF16, 4, 0, 3, "sm_90"),
        ("v32_fp8", "pow2", np.float16, 3, 16, 4, "sm_80"),
        ("v32_fp8", None, np.float32, 1, 48, 3, "sm_80"),
        ("v4_fp8", None, BF16, 4, 0, 3, "sm_90"),
        ("v4_fp8", "pow2", np.float32, 3, 8, 4, "sm_80"),
        ("v4_fp8", None, np.float16, 1, 24, 3, "sm_90"),
        ("bf16", None, BF16, 4, 0, 3, "sm_90"),
        ("bf16", None, np.float16, 3, 32, 4, "sm_80"),
    ],
)
def test_written_and_gathered_bits(
    cache_format: str, rule: Any, dtype: Any, page: int, gap: int, rank: int, arch: str
) -> None:
    """A row's address is a multiple of its dtype's size alone in every other row; then all rows take vectors."""
    channels, _ = WIDTHS[cache_format]
    odd = values(channels + 65, dtype)
    slots = PLACES.copy()
    slots[3] = 2**32 + 1  # what is a slot in its lower half
    arguments = {
        **{"kv_c": odd[:, :channels], "k_pe": odd[:, channels + 1 :], "slot_mapping": slots},
        **{"cache_format": cache_format, "scale_rule": rule},
    }
    require_written(cache_of(cache_format, page, gap, rank), arguments, arch)
    arguments |= {name: arguments[name].copy() for name in ("kv_c", "k_pe")}
    cache = require_written(cache_of(cache_format, page, gap, rank), arguments, arch)
    require_gathered({"cache": cache, "slots": slots, "cache_format": cache_format}, arch)


@pytest.mark.parametrize("cache_format", WIDTHS)
def test_gathered_by_tables_of_any_values(cache_format: str) -> None:
    """Random bytes: scales and exponents of any value, among them NaN."""
    cache = cache_of(cache_format, 3, 48, 3)
    tables = np.random.default_rng(2).integers(-2, 6, (4, 3)).astype(np.int32)
    lens = np.array([-3, 2, 2, 12, 40], np.int32)
    named = {"block_tables": tables.T.copy().T, "cu_lens": lens, "rows": 50}
    require_gathered({"cache": cache, "cache_format": cache_format, **named})


def test_rows_of_512_have_no_rotary_part() -> None:
    slots = PLACES.astype(np.int32)
    arguments = {"kv_c": values(512, BF16), "k_pe": None, "slot_mapping": slots, "cache_format": "bf16"}
    cache = require_written(cache_of("bf16", 4, 0, 3, 512), arguments)
    require_gathered({"cache": cache, "slots": slots, "cache_format": "bf16"})


def test_gathered_into_a_given_array_of_odd_rows() -> None:
    cache = cache_of("v4_fp8", 4, 0, 3)
    want = cupymla.gather_mla_cache(cache, PLACES, cache_format="v4_fp8")
    with emulated("sm_90", 1) as machine:
        kv = machine.array(np.zeros((len(PLACES), 513), BF16)[:, :512], writable=True)
        given = machine.arguments({"cache": cache, "slots": PLACES})
        assert machine.call(cupymla.gather_mla_cache, **given, cache_format="v4_fp8", kv=kv) is kv
        assert np.array_equal(kv.get().astype(np.float32), want.astype(np.float32), equal_nan=True)


def test_an_empty_cache_takes_and_gives_nothing() -> None:
    cache, slots = np.zeros((0, 4, 656), np.uint8), np.array([0, -1, 5], np.int32)
    kv_c, k_pe = np.ones((3, 512), np.float32), np.ones((3, 64), np.float32)
    arguments = {"kv_c": kv_c, "k_pe": k_pe, "slot_mapping": slots, "cache_format": "v32_fp8"}
    require_written(cache, arguments)
    require_gathered({"cache": cache, "slots": slots, "cache_format": "v32_fp8"})
