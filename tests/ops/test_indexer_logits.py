"""indexer_logits on the CPU: the formula, masks, the one order of operations, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupymla
from cupymla.errors import InputError
from cupymla.ops import indexer_score

FP8 = ml_dtypes.float8_e4m3fn


def problem(heads: int = 5, dtype: Any = np.float16, channels: int = 64) -> dict[str, Any]:
    rng = np.random.default_rng(heads)
    return {
        "q": rng.standard_normal((6, heads, channels)).astype(dtype),
        "k": rng.standard_normal((9, channels)).astype(dtype),
        "weights": rng.standard_normal((6, heads)).astype(np.float32),
    }


def plain(q: Any, k: Any, weights: Any, q_scale: Any = None, k_scale: Any = None, relu: bool = True) -> Any:
    """The formula, in float64, with loops."""
    q, k, weights = (a.astype(np.float32).astype(np.float64) for a in (q, k, weights))
    out = np.zeros((len(q), len(k)))
    for t in range(len(q)):
        for s in range(len(k)):
            for h in range(q.shape[1]):
                z = float(q[t, h] @ k[s])
                scale = 1.0 if q_scale is None else float(q_scale[t, h])
                out[t, s] += weights[t, h] * scale * (max(z, 0.0) if relu else z)
            out[t, s] *= 1.0 if k_scale is None else float(k_scale[s])
    return out


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, FP8])
def test_the_formula(dtype: Any, relu: bool) -> None:
    given = problem(dtype=dtype)
    if dtype is FP8:
        rng = np.random.default_rng(1)
        given |= {"q_scale": rng.random((6, 5), np.float32), "k_scale": rng.random(9, np.float32)}
    logits = cupymla.indexer_logits(**given, relu=relu)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, plain(**given, relu=relu), rtol=1e-5, atol=1e-5)


def test_bytes_are_fp8() -> None:
    given = problem(dtype=FP8)
    raw = given | {name: given[name].view(np.uint8) for name in ("q", "k")}
    np.testing.assert_array_equal(cupymla.indexer_logits(**raw), cupymla.indexer_logits(**given))


def test_masks() -> None:
    given = problem()
    full = cupymla.indexer_logits(**given)
    starts = np.array([-5, 0, 3, 9, 4, 2], np.int32)
    ends = np.array([4, 99, 5, 9, 2, -1], np.int32)
    logits = cupymla.indexer_logits(**given, starts=starts, ends=ends, causal=True, q_start=6, k_stride=2)
    for t in range(6):
        for s in range(9):
            seen = starts[t] <= s < ends[t] and s < (6 + t + 1) // 2
            assert logits[t, s] == (full[t, s] if seen else -np.inf)


def test_before_the_first_complete_key_a_query_sees_none() -> None:
    """The exception that the MLA operators make for the first key does not hold here."""
    logits = cupymla.indexer_logits(**problem(), causal=True, q_start=-2, k_stride=4)
    assert (logits[:5] == -np.inf).all() and np.isfinite(logits[5, 0]) and (logits[5, 1:] == -np.inf).all()


def test_nan_reaches_its_key_alone() -> None:
    given = problem()
    clean = cupymla.indexer_logits(**given)
    given["k"][4, 7] = np.nan
    logits = cupymla.indexer_logits(**given)
    assert np.isnan(logits[:, 4]).all()
    others = np.arange(9) != 4
    np.testing.assert_array_equal(logits[:, others], clean[:, others])


def test_a_score_has_the_same_bits_wherever_it_stands() -> None:
    given = problem(heads=20)
    whole = cupymla.indexer_logits(**given)
    part = given | {"q": given["q"][2:4], "k": given["k"][3:8], "weights": given["weights"][2:4]}
    np.testing.assert_array_equal(cupymla.indexer_logits(**part).view(np.int32), whole[2:4, 3:8].copy().view(np.int32))
    batched: dict[str, Any] = {name: np.stack([value, value]) for name, value in given.items()}
    np.testing.assert_array_equal(cupymla.indexer_logits(**batched)[1].view(np.int32), whole.view(np.int32))


def rounded(value: Fraction) -> np.float32:
    """A fraction as the nearest float32, ties to even."""
    near = np.float32(float(value))
    candidates = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(candidates, key=lambda c: (abs(Fraction(float(c)) - value), int(c.view(np.int32)) & 1))


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(3000).astype(np.float32) for _ in range(2))
    # Sums whose float64 rounding lies halfway between two float32 numbers, and cancellation.
    c = np.where(rng.random(3000) < 0.5, -(a * b), rng.standard_normal(3000) * 2.0 ** rng.integers(-40, 40, 3000))
    c = c.astype(np.float32)
    a[:1000] = 1 + np.float32(2**-23)
    b[:1000] = 1 + np.float32(2**-24 * 2)
    c[:1000] = (2.0 ** rng.integers(20, 32, 1000)).astype(np.float32)
    found = indexer_score.fma32(a, b, c)
    for x, y, z, got in zip(a, b, c, found, strict=True):
        assert got == rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))


def test_the_order_of_the_head_sum() -> None:
    """Spelled out once more, head by head, with fused multiply-adds."""
    rng = np.random.default_rng(3)
    products = rng.standard_normal((2, 21, 4)).astype(np.float32)
    weights, k_scale = rng.standard_normal((2, 21)).astype(np.float32), rng.random(4, np.float32)
    found = indexer_score.scores(products, weights, k_scale, relu=True)
    for t in range(2):
        for s in range(4):
            sums = [np.float32(0)] * 4
            for h in range(21):
                z = max(products[t, h, s], np.float32(0))
                sums[h % 8 // 2] = rounded(
                    Fraction(float(weights[t, h])) * Fraction(float(z)) + Fraction(float(sums[h % 8 // 2]))
                )
            assert found[t, s] == ((sums[0] + sums[1]) + (sums[2] + sums[3])) * k_scale[s]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"q": np.zeros((6, 5, 64), np.float32)}, "'q': expected dtype"),
    ({"q": np.zeros((6, 5, 96), np.float16)}, "'q': expected 64 or 128 channels"),
    ({"q": np.zeros((6, 0, 64), np.float16)}, "'q': expected 1 to 128 heads"),
    ({"q": np.zeros((6, 129, 64), np.float16)}, "'q': expected 1 to 128 heads"),
    ({"q": np.zeros((6, 5, 68), np.float16)[..., :64]}, "'q': expected strides of a multiple of 16 bytes"),
    ({"k": np.zeros((9, 64), ml_dtypes.bfloat16)}, "'k': expected dtype float16"),
    ({"k": np.zeros((9, 128), np.float16)}, "'k': expected shape"),
    ({"weights": np.zeros((6, 4), np.float32)}, r"'weights': expected shape \[6, 5\]"),
    ({"weights": np.zeros((6, 5), np.float16)}, "'weights': expected dtype float32 or bfloat16"),
    ({"weights": None}, "'weights': expected an array"),
    ({"k_scale": np.zeros(9, np.float32)}, "'k_scale': expected None with float16"),
    ({"starts": np.zeros(5, np.int32)}, r"'starts': expected shape \[6\]"),
    ({"causal": 1}, "'causal': expected True or False"),
    ({"k_stride": 0}, "'k_stride': expected an integer from 1"),
    ({"logits": np.zeros((6, 9), np.float16)}, "'logits': expected dtype float32"),
]


@pytest.mark.parametrize(("changed", "message"), BAD)
def test_what_cannot_be_used_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cupymla.indexer_logits(**(problem() | changed))
