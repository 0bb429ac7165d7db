"""Caches of latents on the CPU, byte by byte from the tables of the formats; and what is refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupymla
from cupymla.errors import InputError

Array = np.ndarray[Any, Any]
BF16 = ml_dtypes.bfloat16
WIDTHS = {"v32_fp8": (512, 656), "v4_fp8": (448, 584)}


def written(cache_format: Any, latent: Array, rope: Array | None = None, **options: Any) -> Array:
    """The bytes of a cache of one block of one token."""
    channels, width = WIDTHS[cache_format]
    assert latent.shape == (channels,)
    cache = np.full((1, 1, width), 0xEE, np.uint8)
    k_pe = np.zeros((1, 64), latent.dtype) if rope is None else rope[None]
    slots = np.zeros(1, np.int64)
    made = cupymla.concat_and_cache_mla(latent[None], k_pe, cache, slots, cache_format=cache_format, **options)
    assert made is cache
    row: Array = cache[0, 0]
    return row


def spread(cache_format: str, value: float, dtype: Any = np.float32) -> Array:
    """A latent whose groups have this amax, 1/448 of it in the channel behind it, and zeros."""
    latent = np.zeros(WIDTHS[cache_format][0], np.float32)
    latent[::64], latent[1::64] = value, value / 448
    with np.errstate(over="ignore"):
        return latent.astype(dtype)


@pytest.mark.parametrize(
    ("amax", "rule", "scale"),
    [
        (448.0, None, 1.0),
        (896.0, "pow2", 2.0),
        (np.nextafter(np.float32(896), np.float32(1e9)), "pow2", 4.0),
        (300.0, None, float(np.float32(300) / np.float32(448))),
        (300.0, "pow2", 1.0),
        (0.0, None, 2.0**-126),
        (1e-30, None, float(np.float32(1e-30) / np.float32(448))),
        (1e-42, None, 2.0**-126),
        (1e-30, "pow2", 2.0**-22),
        (np.inf, None, float(np.finfo(np.float32).max / np.float32(448))),
        (np.nan, None, 2.0**-126),
    ],
)
def test_scales_of_656_bytes(amax: float, rule: Any, scale: float) -> None:
    row = written("v32_fp8", spread("v32_fp8", amax), scale_rule=rule)
    assert row[512:528].view(np.float32).tolist() == [scale] * 4


@pytest.mark.parametrize(
    ("amax", "exponent"), [(448.0, 127), (449.0, 128), (896.0, 128), (300.0, 127), (0.0, 105), (3e38, 247)]
)
def test_exponents_of_584_bytes(amax: float, exponent: int) -> None:
    row = written("v4_fp8", spread("v4_fp8", amax))
    assert row[576:].tolist() == [exponent] * 7 + [0]


def test_codes_saturate_and_keep_nan() -> None:
    latent = np.zeros(512, np.float16)
    latent[:6] = [np.inf, -np.inf, np.nan, 65504, -1, 0]
    row = written("v32_fp8", latent)
    assert row[512:516].view(np.float32)[0] == np.float32(65504) / np.float32(448)
    assert row[:4].tolist() == [0x7E, 0xFE, 0x7F, 0x7E]
    assert row[5] == 0


def test_rotary_parts_are_copied_bit_by_bit() -> None:
    rope = np.arange(64, dtype=np.uint16)
    rope[:4] = [0x7F81, 0xFFC1, 0x7F80, 0x8000]
    for cache_format, begin in (("v32_fp8", 528), ("v4_fp8", 448)):
        latent = spread(cache_format, 1.0, BF16)
        row = written(cache_format, latent, rope.view(BF16))
        assert row[begin : begin + 128].view(np.uint16).tolist() == rope.tolist()


def test_scales_of_a_page_are_behind_all_its_rows() -> None:
    """Tokens of a page of 584 bytes each lie 576 bytes apart."""
    cache = np.full((2, 3, 584), 0xEE, np.uint8)
    latents = np.stack([spread("v4_fp8", 448.0), spread("v4_fp8", 896.0)])
    k_pe = np.ones((2, 64), np.float32)
    cupymla.concat_and_cache_mla(latents, k_pe, cache, np.array([5, 3]), cache_format="v4_fp8")
    assert (cache[0] == 0xEE).all()
    block = cache[1].reshape(-1)
    assert block[[0, 1152]].tolist() == [0x7E, 0x7E] and (block[576:1152] == 0xEE).all()
    assert block[3 * 576 :].reshape(3, 8).tolist() == [[128] * 7 + [0], [0xEE] * 8, [127] * 7 + [0]]


def test_readers_take_any_scale() -> None:
    row = np.zeros((1, 6, 656), np.uint8)
    row[..., :512] = 0x38  # 1
    scales = np.array([1 / 3, 2.0**-140, np.inf, 3e38, -2, np.nan], np.float32)
    row[0, :, 512:528] = np.repeat(scales[:, None], 4, axis=1).view(np.uint8)
    kv = cupymla.gather_mla_cache(row, np.arange(6), cache_format="v32_fp8")
    assert kv.shape == (6, 576) and kv.dtype == BF16
    for got, scale in zip(kv[:, :512].astype(np.float32), scales.astype(BF16).astype(np.float32), strict=True):
        assert np.array_equal(got, np.full(512, scale), equal_nan=True)


def test_exponents_at_their_ends() -> None:
    row = np.zeros((1, 1, 584), np.uint8)
    row[0, 0, :448] = 0x40  # 2
    row[0, 0, 576:583] = [0, 1, 127, 254, 255, 126, 128]
    kv = cupymla.gather_mla_cache(row, np.zeros(1, np.int32), cache_format="v4_fp8")[0].astype(np.float64)
    assert kv[:448:64].tolist()[:4] == [2.0**-126, 2.0**-125, 2.0, np.inf]
    assert np.isnan(kv[256:320]).all() and kv[320] == 1 and kv[384] == 4 and (kv[448:] == 0).all()


def test_what_is_refused() -> None:
    kv_c, k_pe, slots = np.zeros((2, 512), np.float32), np.zeros((2, 64), np.float32), np.zeros(2, np.int32)
    cache, wide = np.zeros((2, 2, 656), np.uint8), np.zeros((2, 2, 512), BF16)
    write = cupymla.concat_and_cache_mla
    with pytest.raises(InputError, match="'k_pe': expected an array of shape"):
        write(kv_c, None, cache, slots, cache_format="v32_fp8")
    with pytest.raises(InputError, match="'cache': expected shape"):
        write(kv_c, k_pe, wide, slots, cache_format="bf16")
    with pytest.raises(InputError, match="'scale_rule': expected None"):
        write(kv_c, None, wide, slots, cache_format="bf16", scale_rule="amax")
    with pytest.raises(InputError, match="'scale_rule': expected 'pow2' or None"):
        v4 = np.zeros((2, 2, 584), np.uint8)
        write(kv_c[:, :448], k_pe, v4, slots, cache_format="v4_fp8", scale_rule="amax")
    with pytest.raises(InputError, match="'kv_c': expected shape"):
        write(kv_c[:, :448], k_pe, cache, slots, cache_format="v32_fp8")
    with pytest.raises(InputError, match="'k_pe': expected dtype float32"):
        write(kv_c, k_pe.astype(BF16), cache, slots, cache_format="v32_fp8")
    with pytest.raises(InputError, match="'slot_mapping': expected -1 to 3"):
        write(kv_c, k_pe, cache, slots + 4, cache_format="v32_fp8", check_indices=True)
    with pytest.raises(InputError, match="gather_mla_cache: argument 'slots': expected -1 to 3"):
        cupymla.gather_mla_cache(cache, slots - 2, cache_format="v32_fp8", check_indices=True)
    with pytest.raises(InputError, match="'rows'"):
        cupymla.gather_mla_cache(
            cache, cache_format="v32_fp8", block_tables=np.zeros((1, 1), np.int32), cu_lens=np.zeros(2, np.int32)
        )
