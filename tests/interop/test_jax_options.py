"""Options that equal each other and are not the same, in calls of JAX functions, traced or not."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from interop_kit import placed

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
    arrays = tuple(map(placed, given))
    for alpha in (first, -first):
        wanted = cupymla.nvfp4_gemv(*given, alpha=alpha)
        assert np.signbit(wanted).any() and not np.signbit(wanted).all()
        plain = mla.nvfp4_gemv(*arrays, alpha=alpha)
        traced = jax.jit(lambda *arrays, alpha=alpha: mla.nvfp4_gemv(*arrays, alpha=alpha))(*arrays)
        for made in (plain, traced):
            np.testing.assert_array_equal(np.signbit(np.asarray(made)), np.signbit(wanted))


def test_nan_is_remembered_as_any_other_number() -> None:
    """Each NaN is another object, none of which equals any: each was compiled for anew."""
    arrays = tuple(map(placed, matrices()))
    for _ in range(2):
        assert np.isnan(np.asarray(mla.nvfp4_gemv(*arrays, alpha=float("nan")))).all()
    before = functions._compiled.cache_info().misses
    mla.nvfp4_gemv(*arrays, alpha=float("nan"))
    mla.nvfp4_gemv(*arrays, alpha=np.float64("nan"))
    assert functions._compiled.cache_info().misses == before


@pytest.mark.parametrize(("q_start", "k_stride"), [(0, 1), (20, 1), (-5, 1), (3, 4), (-9, 4)])
@pytest.mark.parametrize("limits", [False, True])
def test_a_traced_start_masks_keys_as_a_number_does(q_start: int, k_stride: int, limits: bool) -> None:
    """An index operator's mask becomes `ends`."""
    rng = np.random.default_rng(7)
    q, k = (placed(rng.standard_normal(shape), jnp.bfloat16) for shape in ((30, 8, 64), (40, 64)))
    weights = placed(rng.standard_normal((30, 8)), jnp.float32)
    given = {"ends": placed(rng.integers(-3, 50, 30), jnp.int32)} if limits else {}

    def run(start: Any, lead: tuple[Any, ...] = (...,)) -> Any:
        limited = {name: array[lead] for name, array in given.items()}
        arrays: Any = [array[lead] for array in (q, k, weights)]
        return cast(Any, mla).indexer_topk(*arrays, 5, causal=True, q_start=start, k_stride=k_stride, **limited)

    wanted = run(q_start)
    for made in (jax.jit(run)(q_start), jax.jit(lambda start: run(start, (None,)))(q_start)):
        for got, array in zip(made, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(got).reshape(array.shape), np.asarray(array))
