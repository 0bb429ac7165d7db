"""fp8 codes and scales on the CPU, against the formats' definitions worked out by hand; and what is refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupymla
from cupymla.errors import InputError
from cupymla.ops.mla_cache import formats

# E4M3 by its definition: four exponent bits with a bias of 7, three mantissa bits, no infinity.
MAGNITUDES = np.array(
    [
        (code % 8) * 2.0**-9 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7)
        for code in range(0x7F)
    ]
)  # fmt: skip


def nearest(value: float) -> int:
    """The E4M3 code of a float: to nearest, ties to the even code, saturated."""
    if np.isnan(value):
        return 0x7F
    distance = np.abs(MAGNITUDES - min(abs(value), 448.0))
    near = np.flatnonzero(distance == distance.min())
    code = int(near[0] if len(near) == 1 or near[0] % 2 == 0 else near[1])
    return code | (0x80 if np.signbit(value) else 0)


def floats(bits: int) -> np.ndarray[Any, Any]:
    return np.array([bits], np.uint32).view(np.float32)


@given(st.integers(0, 2**32 - 1))
def test_any_float_has_the_nearest_code(bits: int) -> None:
    value = floats(bits)
    assert formats.encoded(value).view(np.uint8)[0] == nearest(float(value[0]))


def test_codes_midpoints_and_their_neighbours() -> None:
    """Every code, every tie, and what lies just beside each."""
    exact = MAGNITUDES.astype(np.float32)
    values = np.concatenate([exact, (exact[1:] + exact[:-1]) / np.float32(2)])
    values = np.concatenate([np.nextafter(values, np.float32(-1)), values, np.nextafter(values, np.float32(1e9))])
    for signed in (values, -values):
        wanted = [nearest(float(value)) for value in signed]
        assert formats.encoded(signed).view(np.uint8).tolist() == wanted


@given(st.integers(0, 2**32 - 1))
def test_scales_follow_the_table(bits: int) -> None:
    """max(amax, 1e-4) / 448, or the least power of two that is not below it."""
    value = floats(bits)
    x = np.zeros((1, 16), np.float32)
    x[0, 5] = value[0]
    _, (plain,) = cupymla.quantize_fp8(x, group=16)
    _, (power,) = cupymla.quantize_fp8(x, group=16, scale_rule="pow2")
    amax = np.float32(0) if np.isnan(value[0]) else min(np.abs(value[0]), np.finfo(np.float32).max)
    assert plain[0] == np.float32(max(amax, np.float32(1e-4))) / np.float32(448)
    mantissa, _ = np.frexp(power[0])
    assert mantissa == 0.5 and power[0] / 2 < plain[0] <= power[0]


ROWS = st.lists(st.floats(width=16, allow_nan=True, allow_infinity=True), min_size=32, max_size=32)


@given(ROWS, st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]), st.sampled_from(["amax", "pow2"]))
def test_quantising_is_a_division_and_a_rounding(row: list[float], dtype: Any, rule: Any) -> None:
    x = np.array(row, np.float32).astype(dtype).reshape(1, 32)
    codes, scales = cupymla.quantize_fp8(x, group=16, scale_rule=rule)
    largest = float(ml_dtypes.finfo(dtype).max)
    for channel, value in enumerate(x[0].astype(np.float32)):
        finite = value if np.isnan(value) else np.float32(np.clip(value, -largest, largest))
        quotient = np.float32(finite) / scales[0, channel // 16]
        assert codes.view(np.uint8)[0, channel] == nearest(float(quotient))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_an_infinity_is_the_largest_number(dtype: Any) -> None:
    x = np.zeros((1, 16), dtype)
    x[0, :3] = [np.inf, -np.inf, np.nan]
    codes, scales = cupymla.quantize_fp8(x, group=16)
    assert codes.view(np.uint8)[0].tolist() == [0x7E, 0xFE, 0x7F] + [0] * 13
    assert scales[0, 0] == np.float32(float(ml_dtypes.finfo(dtype).max)) / np.float32(448)


def test_dequantised_codes_are_products() -> None:
    """All codes with scales of every kind; a product is rounded to fp32, then to bfloat16."""
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256).repeat(6, 0)
    scales = np.array([1, 0.3, 2.0**-140, 3e38, np.inf, np.nan], np.float32)[:, None]
    made = cupymla.dequantize_fp8(codes, scales, group=256)
    signed = np.concatenate([MAGNITUDES, [np.nan], -MAGNITUDES, [np.nan]]).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = (signed * scales).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(made.astype(np.float32), wanted.astype(np.float32))
    assert (np.signbit(made) == np.signbit(wanted))[~np.isnan(wanted)].all()


@pytest.mark.parametrize("rule", ["amax", "pow2"])
def test_there_and_back_is_close(rule: Any) -> None:
    """Half a unit of three mantissa bits, or of the least normal code; one more rounding to bfloat16."""
    x = np.random.default_rng(0).standard_normal((2, 5, 256)).astype(np.float32)
    codes, scales = cupymla.quantize_fp8(x, scale_rule=rule)
    back = cupymla.dequantize_fp8(codes, scales).astype(np.float32)
    bound = np.maximum(np.abs(x) * 2.0**-4, np.repeat(scales, 128, axis=-1) * 2.0**-10) * (1 + 2.0**-3)
    assert (np.abs(back - x) <= bound).all()


def test_arrays_that_are_given_are_written_and_returned() -> None:
    x = np.random.default_rng(1).standard_normal((3, 4, 64)).astype(np.float32)
    want = cupymla.quantize_fp8(x, group=32)
    wide = np.zeros((3, 4, 70), np.uint8)
    columns = np.zeros((2, 4, 3), np.float32).transpose(2, 1, 0)
    codes, scales = cupymla.quantize_fp8(x, group=32, codes=wide[..., :64], scales=columns)
    assert np.shares_memory(codes, wide) and codes.dtype == np.uint8 and scales is columns
    np.testing.assert_array_equal(codes, want[0].view(np.uint8))
    np.testing.assert_array_equal(scales, want[1])
    out = np.zeros((3, 4, 64), ml_dtypes.bfloat16)
    assert cupymla.dequantize_fp8(codes, scales, group=32, out=out) is out
    np.testing.assert_array_equal(out, cupymla.dequantize_fp8(*want, group=32))


X, CODES, SCALES = np.zeros((4, 128), np.float32), np.zeros((4, 128), np.uint8), np.zeros((4, 1), np.float32)
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("quantize_fp8", {"x": X.astype(np.float64)}, "'x': expected dtype float32"),
    ("quantize_fp8", {"x": X[:, ::2]}, "'x': expected a contiguous last axis"),
    ("quantize_fp8", {"x": np.zeros((1, 1, 1, 1, 128), np.float32)}, "'x': expected shape"),
    ("quantize_fp8", {"x": np.float32(1)}, "'x'"),
    ("quantize_fp8", {"x": X[:, :96]}, "'x': expected D a multiple of group 128"),
    ("quantize_fp8", {"x": X, "group": 48}, "'group': expected a power of two from 16 to 256"),
    ("quantize_fp8", {"x": X, "group": 8}, "'group'"),
    ("quantize_fp8", {"x": X, "group": 512}, "'group'"),
    ("quantize_fp8", {"x": X, "group": 64.0}, "'group'"),
    ("quantize_fp8", {"x": X, "scale_rule": "max"}, "'scale_rule': expected 'amax' or 'pow2'"),
    ("quantize_fp8", {"x": X, "codes": CODES[:2]}, "'codes': expected shape"),
    ("quantize_fp8", {"x": X, "codes": CODES.view(np.int8)}, "'codes': expected dtype float8_e4m3fn or uint8"),
    ("quantize_fp8", {"x": X, "scales": np.zeros((4, 2), np.float32)}, "'scales': expected shape"),
    ("quantize_fp8", {"x": X, "codes": X.view(np.uint8)[:, :128]}, "'codes': expected memory of its own"),
    ("dequantize_fp8", {"codes": CODES, "scales": None}, "'scales': expected an array"),
    ("dequantize_fp8", {"codes": CODES, "scales": SCALES[:3]}, "'scales': expected shape"),
    ("dequantize_fp8", {"codes": CODES, "scales": SCALES.astype(np.float16)}, "'scales': expected dtype float32"),
    ("dequantize_fp8", {"codes": X, "scales": SCALES}, "'codes': expected dtype float8_e4m3fn or uint8"),
    ("dequantize_fp8", {"codes": CODES, "scales": SCALES, "group": 0}, "'group'"),
    ("dequantize_fp8", {"codes": CODES, "scales": SCALES, "out": X}, "'out': expected dtype bfloat16"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), BAD)
def test_what_cannot_be_used_is_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"{name}: argument {message}"):
        getattr(cupymla, name)(**arguments)
