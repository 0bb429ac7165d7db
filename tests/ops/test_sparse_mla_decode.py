"""sparse_mla_decode on the CPU: the bytes of the caches, the softmax over both sources, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupymla
from cupymla.errors import InputError
from cupymla.ops.mla_cache.latents import FORMATS, dequantized, exponent_scales
from cupymla.ops.sparse_mla_decode.cases import DecodeCase
from cupymla_lab.subjects import Subject

SUBJECT = Subject("sparse_mla_decode")
CASES: tuple[DecodeCase, ...] = SUBJECT.cases.CASES


def arguments(name: str, **traits: Any) -> dict[str, Any]:
    (case,) = SUBJECT.those(CASES, [name])
    made: dict[str, Any] = SUBJECT.cases.inputs(replace(case, **traits), 3)
    return made


def key(cache: Any, slot: int, cache_format: str) -> list[float]:
    """A key, byte by byte from the tables of the formats."""
    block, place = divmod(slot, cache.shape[1])
    if cache_format == "bf16":
        return [float(x) for x in cache[block, place].reshape(-1)]
    flat = cache[block].reshape(-1).tobytes()
    page = cache.shape[1]
    width, codes = (656, 512) if cache_format == "v32_fp8" else (576, 448)
    row = flat[place * width : (place + 1) * width]
    values = np.frombuffer(row[:codes], ml_dtypes.float8_e4m3fn).astype(np.float64)
    if cache_format == "v32_fp8":
        scales = np.frombuffer(row[512:528], np.float32).astype(np.float64)
        values = values * scales.repeat(128)
        rest = row[528:]
    else:
        exponents = flat[page * 576 + place * 8 : page * 576 + place * 8 + 7]
        values = values * np.array([2.0 ** (e - 127) for e in exponents]).repeat(64)
        rest = row[448:]
    return [*values, *np.frombuffer(rest, ml_dtypes.bfloat16).astype(np.float64)]


@pytest.mark.parametrize(
    "name",
    [
        "v32_d576_h64_b2_n2_k70+130_second_lengths",
        "v4_d512_h16_b2_n1_k40+90_second",
        "bf16_d576_h8_b3_n1_k60+70_second_requests",
        "v4_d512_h64_b2_n3_k150_rows",
    ],
)
def test_it_is_a_softmax_over_the_selected_keys(name: str) -> None:
    given = arguments(name)
    out, lse = SUBJECT.reference(given, "float64")
    q = given["q"].astype(np.float64)
    for b, j in np.ndindex(q.shape[:2]):
        keys = []
        for prefix, cache in (("", "k_cache"), ("extra_", "extra_k_cache")):
            if cache not in given:
                continue
            slots, length = given[f"{prefix}indices"][b, j], given.get(f"{prefix}topk_length")
            if length is not None:
                slots = slots[: max(0, int(length[b] if length.ndim == 1 else length[b, j]))]
            many = given[cache].shape[0] * given[cache].shape[1]
            keys += [key(given[cache], int(s), given["cache_format"]) for s in slots if 0 <= s < many]
        if not keys:
            assert np.isposinf(lse[b, j]).all() and not out[b, j].any()
            continue
        rows = np.array(keys)
        weights = np.exp(q[b, j] @ rows.T * q.shape[-1] ** -0.5)
        total = weights.sum(-1)
        np.testing.assert_allclose(lse[b, j], np.log(total), rtol=1e-12)
        if "attn_sink" in given:
            total = total + np.exp(given["attn_sink"].astype(np.float64))
        np.testing.assert_allclose(out[b, j], weights @ rows[:, :512] / total[:, None], rtol=1e-10, atol=1e-12)


def test_exponents_are_powers_of_two() -> None:
    scales = exponent_scales(np.array([0, 1, 127, 254, 255], np.uint8))
    np.testing.assert_array_equal(scales, np.array([2.0**-127, 2.0**-126, 1, 2.0**127, np.nan], np.float32))


def test_scales_are_not_rounded() -> None:
    """A scale that bf16 does not hold, such as amax / 448 gives."""
    cache = np.zeros((1, 1, 656), np.uint8)
    cache[0, 0, :512] = np.array([1.0], ml_dtypes.float8_e4m3fn).view(np.uint8)
    scale = np.float32(1 / 448)
    cache[0, 0, 512:528] = np.full(4, scale).view(np.uint8)
    assert dequantized(cache, np.array([0]), FORMATS["v32_fp8"], np.float32)[0, 0] == scale


def test_a_slot_named_twice_counts_twice() -> None:
    given = arguments("v32_d576_h16_b2_n1_k100")
    once = cupymla.sparse_mla_decode(**given)[1]
    twice = np.concatenate([given["indices"]] * 2, axis=-1)
    np.testing.assert_allclose(
        cupymla.sparse_mla_decode(**given | {"indices": twice})[1], once + np.log(2), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cache_format": "fp8"}, "'cache_format': expected 'bf16' or 'v32_fp8' or 'v4_fp8'"),
        ({"cache_format": "v4_fp8"}, "'q': expected shape .B, n, h_q, 512. with a cache of v4_fp8"),
        ({"k_cache": np.zeros((2, 3, 655), np.uint8)}, "'k_cache': expected shape .blocks, page, 656."),
        ({"k_cache": np.zeros((2, 0, 656), np.uint8)}, "'k_cache': expected shape .blocks, page, 656."),
        ({"k_cache": np.zeros((2, 3, 656), np.float32)}, "'k_cache': expected dtype float8_e4m3fn or uint8"),
        ({"k_cache": np.zeros((2, 6, 656), np.uint8)[:, ::2]}, "'k_cache': expected blocks of page . 656 contiguous"),
        ({"k_cache": np.zeros((2, 3, 659), np.uint8)[..., :656]}, "'k_cache': expected blocks of page"),
        ({"indices": np.zeros((2, 2, 100), np.int32)}, "'indices': expected shape .2, 1, topk."),
        ({"indices": np.zeros((2, 1, 100), np.int64)}, "'indices': expected dtype int32"),
        ({"topk_length": np.zeros((2, 2), np.int32)}, "'topk_length': expected shape .2. or .2, 1."),
        ({"attn_sink": np.zeros(3, np.float32)}, "'attn_sink': expected shape .16."),
        ({"extra_indices": np.zeros((2, 1, 4), np.int32)}, "'extra_indices': expected None without extra_k_cache"),
        ({"extra_topk_length": np.zeros(2, np.int32)}, "'extra_topk_length': expected None without extra_k_cache"),
        ({"extra_k_cache": np.zeros((1, 2, 656), np.uint8)}, "'extra_indices': expected an array of shape"),
        ({"splits": 0}, "'splits': expected an integer from 1 to 16"),
        ({"splits": 17}, "'splits': expected an integer from 1 to 16"),
        ({"lse_base": "10"}, "'lse_base'"),
        ({"sm_scale": np.inf}, "'sm_scale'"),
        ({"out": np.zeros((2, 1, 16, 576), ml_dtypes.bfloat16)}, "'out': expected shape .2, 1, 16, 512."),
    ],
)
def test_what_is_refused(wrong: dict[str, Any], message: str) -> None:
    given = arguments("v32_d576_h16_b2_n1_k100")
    with pytest.raises(InputError, match=f"sparse_mla_decode: argument {message}"):
        cupymla.sparse_mla_decode(**given | wrong)


def test_heads_are_at_most_128() -> None:
    given = arguments("v32_d576_h16_b2_n1_k100")
    with pytest.raises(InputError, match="1 to 128 heads"):
        cupymla.sparse_mla_decode(**given | {"q": np.zeros((2, 1, 129, 576), ml_dtypes.bfloat16)})


def test_slots_are_looked_at_where_that_is_asked_for() -> None:
    given = arguments("v32_d576_h16_b2_n1_k100")
    slots = given["k_cache"].shape[0] * given["k_cache"].shape[1]
    given["indices"][1, 0, 7] = -1
    cupymla.sparse_mla_decode(**given, check_indices=True)
    given["indices"][1, 0, 9] = slots
    with pytest.raises(
        InputError, match=rf"'indices': expected values from -1 to {slots - 1}, got {slots} at .1, 0, 9."
    ):
        cupymla.sparse_mla_decode(**given, check_indices=True)
    cupymla.sparse_mla_decode(**given, topk_length=np.array([100, 9], np.int32), check_indices=True)
    with pytest.raises(InputError, match="'extra_indices'"):
        cupymla.sparse_mla_decode(
            **given,
            topk_length=np.array([100, 9], np.int32),
            extra_k_cache=given["k_cache"],
            extra_indices=np.full((2, 1, 1), -5, np.int32),
            check_indices=True,
        )


def test_a_cache_may_have_no_block() -> None:
    given = arguments("v32_d576_h16_b2_n1_k100")
    out, lse = cupymla.sparse_mla_decode(**given | {"k_cache": np.zeros((0, 64, 656), np.uint8)})
    assert not out.any() and np.isposinf(lse).all()


def test_results_are_written_where_they_are_wanted() -> None:
    given = arguments("v32_d576_h16_b2_n1_k100")
    lse = np.zeros((2, 1, 16), np.float32)
    _, returned = cupymla.sparse_mla_decode(**given, lse=lse)
    assert returned is lse and lse.any()
    with pytest.raises(InputError, match="'lse': expected memory of its own"):
        cupymla.sparse_mla_decode(**given, topk_length=lse.view(np.int32)[:, 0, 0], lse=lse)
