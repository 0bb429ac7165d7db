"""Quotients of the caches' writers (e4m3.cuh and group.cuh of cuda/mla_cache/sm80), modelled in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupymla.ops.mla_cache import cuda
from cupymla.ops.mla_cache.formats import E4M3_MAX, LEAST_AMAX, encoded

Array = np.ndarray[Any, Any]
F32 = np.float32


def fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in float32, rounded once."""
    wide = np.longdouble
    made: Array = (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(F32)
    return made


def corrected(value: Array, quotient: Array, divisor: Array, reciprocal: Array) -> Array:
    return fused(-fused(quotient, divisor, -value), reciprocal, quotient)


@pytest.mark.parametrize("exponent", [-117, 0, 127])
def test_the_scale_of_every_significand(exponent: int) -> None:
    """A quotient by 448 below the least normal number, which some of 2^-117 have, is no scale."""
    value = (np.arange(1 << 23, dtype=np.uint32) | np.uint32(exponent + 127 << 23)).view(F32)
    divisor = np.full(1, 448, F32)
    reciprocal = 1 / divisor
    made = corrected(value, value * reciprocal, divisor, reciprocal)
    least = F32(2.0**-126)
    assert np.array_equal(np.maximum(made, least), np.maximum(value / divisor, least))


def near_ties(digits: int) -> tuple[Array, Array]:
    """The two numbers of so many digits next to each tie of two codes times a scale, and the scale's largest magnitude.

    It has every significand, and is the least one. Other numbers are farther from a tie by many errors of a quotient.
    """
    amax = np.append(np.arange(1 << digits - 1, 1 << digits), np.float64(F32(LEAST_AMAX)))
    normal = (np.arange(17, 32, 2)[:, None] * 2.0 ** np.arange(-10, 5)).reshape(-1)
    ties = np.concatenate([normal[normal < E4M3_MAX], (np.arange(8) + 0.5) * 2.0**-9])
    exact = amax[:, None] * ties / E4M3_MAX
    unit = 2.0 ** (np.floor(np.log2(exact)) - (digits - 1))
    values = np.stack([np.floor(exact / unit) * unit, np.ceil(exact / unit) * unit], axis=-1)
    return values.astype(F32), np.broadcast_to(amax[:, None, None], values.shape).astype(F32)


@pytest.mark.parametrize("digits", [8, 11])
@pytest.mark.parametrize("units", range(-2, 3))
def test_one_correction_gives_16_bit_numbers_their_codes(digits: int, units: int) -> None:
    """With reciprocals off by as many units in the last place as `rcp.approx` may be."""
    value, amax = near_ties(digits)
    scale = amax / F32(E4M3_MAX)
    reciprocal = ((F32(1) / scale).view(np.int32) + np.int32(units)).view(F32)
    made = corrected(value, value * reciprocal, scale, reciprocal)
    assert np.array_equal(encoded(made).view(np.uint8), encoded((value / scale).astype(F32)).view(np.uint8))


@given(st.integers(0, 2**31 - 2), st.integers(1, 2**31 - 1))
def test_the_block_of_a_slot_or_the_one_before(slot: int, page: int) -> None:
    assert slot // page - (slot * cuda.page_reciprocal(page) >> 32) in (0, 1)
