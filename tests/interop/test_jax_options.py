"""Options that equal each other and are not the same, in calls of JAX functions, traced or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupymla

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

from cupymla.interop import jax as mla  # noqa: E402 - only where there is JAX
from cupymla.interop.jax import functions  # noqa: E402


def matrices() -> tuple[np.ndarray[Any, Any], ...]:
    rng = np.random.default_rng(5)
    a, b = (rng.integers(0, 256, (rows, 32)).astype(np.uint8) for rows in (8, 2))
    return a, b, *(np.full((rows, 4), 56, np.uint8) for rows in (8, 2))


@pytest.mark.parametrize("first", [0.0, -0.0])
def test_a_zero_is_not_taken_for_the_other(first: float) -> None:
    """What both make differs in the sign of zeros."""
    given = matrices()
    arrays = tuple(map(jnp.asarray, given))
    for alpha in (first, -first):
        wanted = cupymla.nvfp4_gemv(*given, alpha=alpha)
        assert np.signbit(wanted).any() and not np.signbit(wanted).all()
        plain = mla.nvfp4_gemv(*arrays, alpha=alpha)
        traced = jax.jit(lambda *arrays, alpha=alpha: mla.nvfp4_gemv(*arrays, alpha=alpha))(*arrays)
        for made in (plain, traced):
            np.testing.assert_array_equal(np.signbit(np.asarray(made)), np.signbit(wanted))


def test_nan_is_remembered_as_any_other_number() -> None:
    """Each NaN is another object, none of which equals any: each was compiled for anew."""
    arrays = tuple(map(jnp.asarray, matrices()))
    for _ in range(2):
        assert np.isnan(np.asarray(mla.nvfp4_gemv(*arrays, alpha=float("nan")))).all()
    before = functions._compiled.cache_info().misses
    mla.nvfp4_gemv(*arrays, alpha=float("nan"))
    mla.nvfp4_gemv(*arrays, alpha=np.float64("nan"))
    assert functions._compiled.cache_info().misses == before
