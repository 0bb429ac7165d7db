"""The indexer's loss differentiates in torch and in JAX by indexer_bwd; a target is a constant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupymla
from cupymla.errors import UnsupportedError

QUERIES, KEYS, TOPK = 5, 9, 7


def problem() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "q": rng.standard_normal((QUERIES, 3, 64)).astype(np.float16),
        "k": rng.standard_normal((KEYS, 64)).astype(np.float16),
        "weights": rng.standard_normal((QUERIES, 3)).astype(np.float32) / 8,
        "indices": rng.integers(-1, KEYS, (QUERIES, TOPK)).astype(np.int32),
        "target": rng.random((QUERIES, TOPK), np.float32),
    }


SLOPES = np.arange(1, QUERIES + 1, dtype=np.float32)
"""By which each row's loss counts."""


def expected(given: dict[str, Any]) -> tuple[Any, ...]:
    """The gradients, by torch in float64 of the loss written out, as the arguments' dtypes hold them."""
    torch = pytest.importorskip("torch")
    q, k, weights = (torch.from_numpy(given[n].astype(np.float64)).requires_grad_() for n in ("q", "k", "weights"))
    valid = torch.from_numpy(given["indices"] >= 0)
    selected = k[torch.from_numpy(given["indices"].clip(min=0)).long()]
    products = torch.einsum("thd,tsd->ths", q, selected).relu()
    scores = torch.einsum("th,ths->ts", weights, products).masked_fill(~valid, -torch.inf)
    p = torch.from_numpy(given["target"]).double() * valid
    p = p / p.sum(-1, keepdim=True)
    (torch.from_numpy(SLOPES) * -(p * scores.log_softmax(-1).masked_fill(~valid, 0)).sum(-1)).sum().backward()
    return tuple(array.grad.numpy() for array in (q, k, weights))


def require(gradients: tuple[Any, ...], given: dict[str, Any]) -> None:
    for got, wanted in zip(gradients, expected(given), strict=True):
        np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=2**-10, atol=2**-20)


@pytest.mark.parametrize("compiled", [False, True])
def test_torch(compiled: bool) -> None:
    torch = pytest.importorskip("torch")
    from cupymla.interop import torch as mla

    given = problem()
    indices, target = torch.from_numpy(given["indices"]), torch.from_numpy(given["target"])
    moving = [torch.from_numpy(given[name]).requires_grad_() for name in ("q", "k", "weights")]

    def total(q: Any, k: Any, weights: Any) -> Any:
        loss, _ = mla.indexer_loss(q, k, weights, indices, target, deterministic=True)
        return (loss * torch.from_numpy(SLOPES)).sum()

    (torch.compile(total, backend="aot_eager") if compiled else total)(*moving).backward()
    require(tuple(array.grad.numpy() for array in moving), given)
    with pytest.raises(UnsupportedError, match="with respect to 'target'"):
        mla.indexer_loss(moving[0], moving[1], moving[2], indices, target.clone().requires_grad_())


@pytest.mark.parametrize("mapped", [False, True])
def test_jax(mapped: bool) -> None:
    jax = pytest.importorskip("jax")
    from cupymla.interop import jax as mla

    given = problem()

    def total(q: Any, k: Any, weights: Any, target: Any) -> Any:
        return (mla.indexer_loss(q, k, weights, given["indices"], target)[0] * SLOPES).sum()

    gradient = jax.grad(total, (0, 1, 2))
    arrays = [given[name] for name in ("q", "k", "weights")]
    if mapped:
        both = [np.stack([array, array[::-1]]) for array in arrays]
        found = jax.jit(jax.vmap(gradient, in_axes=(0, 0, 0, None)))(*both, given["target"])
        reversed_problem = given | {name: given[name][::-1].copy() for name in ("q", "k", "weights")}
        require(tuple(np.asarray(array)[1] for array in found), reversed_problem)
        found = tuple(array[0] for array in found)
    else:
        found = jax.jit(gradient)(*arrays, given["target"])
    require(tuple(np.asarray(array) for array in found), given)
    with pytest.raises(UnsupportedError, match="with respect to 'target'"):
        jax.grad(total, 3)(*arrays, given["target"])


def test_the_gradient_is_that_of_the_function() -> None:
    """The same bits as two calls in NumPy."""
    torch = pytest.importorskip("torch")
    from cupymla.interop import torch as mla

    given = problem()
    moving = [torch.from_numpy(given[name]).requires_grad_() for name in ("q", "k", "weights")]
    q, k, weights = moving
    indices, target = (torch.from_numpy(given[name]) for name in ("indices", "target"))
    loss, grad_logits = mla.indexer_loss(q, k, weights, indices, target)
    assert not grad_logits.requires_grad
    (loss * torch.from_numpy(SLOPES)).sum().backward()
    slopes = cupymla.indexer_loss(**given)[1] * SLOPES[:, None]
    wanted = cupymla.indexer_bwd(given["q"], given["k"], given["weights"], slopes, given["indices"])
    for array, exact in zip(moving, wanted, strict=True):
        np.testing.assert_array_equal(array.grad.numpy(), exact)
