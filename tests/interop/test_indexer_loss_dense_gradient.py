"""The warm-up's loss differentiates in torch and in JAX, by the gradients that it returns or by itself once more."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from cupymla.errors import UnsupportedError
from cupymla.ops.calls import Calls
from cupymla_lab.subjects import Subject

QUERIES, KEYS = 5, 9
NAMES = ("q", "k", "weights")

SLOPES = {
    "sum": np.ones(QUERIES, np.float32),
    "mean": np.full(QUERIES, 1 / QUERIES, np.float32),
    "rows": np.arange(QUERIES, dtype=np.float32) - 2,
}
"""By which each row's loss counts."""


def problem() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"q": (QUERIES, 3, 64), "k": (KEYS, 64), "mla_q": (QUERIES, 2, 512), "mla_kv": (KEYS, 512)}
    given: dict[str, Any] = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    return given | {"weights": rng.standard_normal((QUERIES, 3)).astype(np.float32) / 8}


def require(gradients: Any, given: dict[str, Any], slopes: Any) -> None:
    """They are those of the reference with these slopes, which its own tests compare with autograd's."""
    exact = Subject("indexer_loss_dense").reference(
        given | {"causal": True, "q_start": 4, "grad_loss": slopes}, "float64"
    )
    for got, wanted in zip(gradients, exact[1:], strict=True):
        np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=2**-9, atol=2**-20)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("counts", SLOPES)
def test_torch(counts: str, compiled: bool) -> None:
    torch = pytest.importorskip("torch")
    from cupymla.interop import torch as mla

    given = problem()
    constants = [torch.from_numpy(given[name]) for name in ("mla_q", "mla_kv")]
    moving = [torch.from_numpy(given[name]).requires_grad_() for name in NAMES]

    def total(q: Any, k: Any, weights: Any) -> Any:
        loss = mla.indexer_loss_dense(q, k, weights, constants[0], constants[1], causal=True, q_start=4)[0]
        return (loss * torch.from_numpy(SLOPES["rows"])).sum() if counts == "rows" else getattr(loss, counts)()

    with mock.patch.object(Calls, "_once", autospec=True, side_effect=Calls._once) as ran:
        (torch.compile(total, backend="aot_eager") if compiled else total)(*moving).backward()
    require([array.grad.numpy() for array in moving], given, SLOPES[counts])
    if not compiled:
        assert ran.call_count == (2 if counts == "rows" else 1)


def test_torch_with_given_slopes_and_targets_that_are_constants() -> None:
    torch = pytest.importorskip("torch")
    from cupymla.interop import torch as mla

    given = problem()
    arrays = [torch.from_numpy(given[name]) for name in (*NAMES, "mla_q", "mla_kv")]
    moving = [array.requires_grad_() for array in arrays[:3]]
    # What the results are times is not what the gradient is times.
    slopes = torch.from_numpy(SLOPES["rows"])
    q, k, weights, mla_q, mla_kv = arrays
    results = mla.indexer_loss_dense(q, k, weights, mla_q, mla_kv, grad_loss=slopes, causal=True, q_start=4)
    require([array.numpy() for array in results[1:]], given, SLOPES["rows"])
    results[0].mean().backward()
    require([array.grad.numpy() for array in moving], given, SLOPES["mean"])
    with pytest.raises(UnsupportedError, match="with respect to 'mla_kv'"):
        mla.indexer_loss_dense(q, k, weights, mla_q, mla_kv.clone().requires_grad_())


@pytest.mark.parametrize("counts", SLOPES)
@pytest.mark.parametrize("dk_dtype", [None, "float32"])
def test_jax(counts: str, dk_dtype: Any) -> None:
    jax = pytest.importorskip("jax")
    from cupymla.interop import jax as mla

    given = problem()

    def total(q: Any, k: Any, weights: Any, latents: Any) -> Any:
        arrays = (q, k, weights, given["mla_q"], latents)
        loss = mla.indexer_loss_dense(*arrays, causal=True, q_start=4, dk_dtype=dk_dtype)[0]
        return (loss * SLOPES["rows"]).sum() if counts == "rows" else getattr(loss, counts)()

    arrays = [given[name] for name in NAMES]
    with mock.patch.object(Calls, "_once", autospec=True, side_effect=Calls._once) as ran:
        step = jax.jit(jax.value_and_grad(total, (0, 1, 2)))
        _, found = jax.block_until_ready(step(*arrays, given["mla_kv"]))
    assert ran.call_count == (2 if counts == "rows" else 1)
    require([np.asarray(array) for array in found], given, SLOPES[counts])
    with pytest.raises(UnsupportedError, match="with respect to 'mla_kv'"):
        jax.grad(total, 3)(*arrays, given["mla_kv"])


def test_jax_mapped() -> None:
    """Slopes that are equal within each problem, or in one of them alone."""
    jax = pytest.importorskip("jax")
    from cupymla.interop import jax as mla

    given = problem()
    slopes = np.stack([SLOPES["mean"], SLOPES["rows"]])

    def total(q: Any, k: Any, weights: Any, mla_q: Any, mla_kv: Any, slope: Any) -> Any:
        return (mla.indexer_loss_dense(q, k, weights, mla_q, mla_kv, causal=True, q_start=4)[0] * slope).sum()

    both = [np.stack([given[name], given[name]]) for name in (*NAMES, "mla_q", "mla_kv")]
    found = jax.jit(jax.vmap(jax.grad(total, (0, 1, 2))))(*both, slopes)
    for number, slope in enumerate(slopes):
        require([np.asarray(array[number]) for array in found], given, slope)
