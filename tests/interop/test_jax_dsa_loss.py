"""The DSA layer in JAX trains its indexer: gradients of the KL loss against plain autodiff of dense attention."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from dsa_kit import NOPE, error, random_layer
from interop_kit import placed

from cupymla.interop.jax import dsa

TOKENS = 12
INDEXER = "indexer."


@pytest.fixture(autouse=True)
def on_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """JAX computes here what is not for a GPU, by the references."""
    if request.node.get_closest_marker("gpu"):
        yield
    else:
        with jax.default_device(jax.devices("cpu")[0]):
            yield


def rotated(x: Any, angles: Any, *, neighbours: bool) -> Any:
    """x [B, S, heads, 64] turned by angles [S, 32], as complex numbers."""
    pairs = x.reshape(*x.shape[:-1], 32, 2) if neighbours else jnp.stack(jnp.split(x, 2, -1), -1)
    turned = jax.lax.complex(*(pairs[..., i].astype(jnp.float32) for i in (0, 1))) * jnp.exp(1j * angles)[:, None]
    return jnp.concatenate((turned.real, turned.imag), -1).astype(x.dtype)


def softmax(scores: Any, seen: Any) -> Any:
    return jax.nn.softmax(jnp.where(seen, scores.astype(jnp.float32), -jnp.inf), axis=-1)


def losses(indexer: Any, params: Any, hidden: Any, seen: Any, conventions: Any, dtype: Any) -> Any:
    """KL(attention summed over heads || softmax of index scores) over the seen keys: [B, S].

    indexer: the parameters that are trained. The family is deepseek_v32.
    """
    p = {name: array.astype(dtype) for name, array in {**params, **indexer}.items()}
    x, angles = hidden.astype(dtype), np.arange(TOKENS)[:, None] * 10000.0 ** -(np.arange(32) / 32)

    def normed(y: Any) -> Any:
        wide = y.astype(jnp.float32)
        return (wide / jnp.sqrt(jnp.square(wide).mean(-1, keepdims=True) + conventions.epsilon)).astype(dtype)

    def linear(name: str, y: Any, heads: int) -> Any:
        return (y @ p[f"{name}.weight"].T).reshape(*y.shape[:2], heads, -1)

    latent_q, row = normed(linear("q_a_proj", x, 1)[:, :, 0]), linear("kv_a_proj_with_mqa", x, 1)
    heads = params["sinks"].shape[0]
    q, k = linear("q_b_proj", latent_q, heads), linear("kv_b_proj", normed(row[:, :, 0, :512]), heads)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q[..., :NOPE], k[..., :NOPE])
    turned = [rotated(part, angles, neighbours=True) for part in (q[..., NOPE:], row[..., 512:])]
    scores = scores + jnp.einsum("bqhd,bkd->bhqk", turned[0], turned[1][:, :, 0])
    teacher = jax.lax.stop_gradient(softmax(scores * conventions.scale, seen[:, None]).mean(1))

    index_q = linear("indexer.wq_b", latent_q, p["indexer.weights_proj.weight"].shape[0])
    key = linear("indexer.wk", x, 1).astype(jnp.float32)
    key = (key - key.mean(-1, keepdims=True)) / jnp.sqrt(key.var(-1, keepdims=True) + conventions.index_epsilon)
    key = (key * p["indexer.k_norm.weight"] + p["indexer.k_norm.bias"]).astype(dtype)
    index_q, key = (
        jnp.concatenate((rotated(part[..., :64], angles, neighbours=False), part[..., 64:]), -1)
        for part in (index_q, key)
    )
    weights = linear("indexer.weights_proj", x, 1)[:, :, 0] * (index_q.shape[2] * 128) ** -0.5
    products = jax.nn.relu(jnp.einsum("bqhd,bkd->bqhk", index_q, key[:, :, 0]))
    learner = softmax(jnp.einsum("bqhk,bqh->bqk", products, weights), seen)
    return jnp.where(
        seen, teacher * (jnp.log(jnp.where(seen, teacher, 1)) - jnp.log(jnp.where(seen, learner, 1))), 0
    ).sum(-1)


@functools.cache
def trained(heads: int) -> Any:
    """The layer, its loss weights, and what a step with and without them gives: (output, gradients)."""
    given = random_layer(TOKENS, heads=heads)
    weights = placed(np.random.default_rng(9).random((2, TOKENS)), jnp.float32)

    def objective(params: Any, hidden: Any, loss_weight: Any) -> Any:
        found = dsa.layer(params, hidden, given.rotary, given.conventions, loss_weight=loss_weight)
        aux = 0.0 if found.aux is None else found.aux.sum()
        return (found.out.astype(jnp.float32) * given.slope).sum() + aux, found

    step = jax.jit(jax.value_and_grad(objective, (0, 1, 2), has_aux=True))
    plain = jax.jit(jax.value_and_grad(functools.partial(objective, loss_weight=None), (0, 1), has_aux=True))
    (_, found), grads = step(given.params, given.hidden, weights)
    (_, bare), bare_grads = plain(given.params, given.hidden)
    return given, weights, (found, grads), (bare, bare_grads)


def require_gradients_and_loss(heads: int) -> None:
    """The error against float32 is at most twice that of the dense formulation in bfloat16, both on the CPU."""
    given, weights, (found, (grads, _, kl)), _ = trained(heads)
    seen = (np.asarray(found.indices)[..., None] == np.arange(TOKENS)).any(2)
    assert seen.sum(-1).max() < TOKENS
    cpu = jax.devices("cpu")[0]
    params, hidden, weights = jax.device_put((given.params, given.hidden, weights), cpu)
    indexer = {name: array.astype(jnp.float32) for name, array in params.items() if name.startswith(INDEXER)}

    def dense(dtype: Any) -> Any:
        def total(moving: Any, params: Any, hidden: Any) -> Any:
            each = losses(moving, params, hidden, seen, given.conventions, dtype)
            return (each * weights).sum(), each

        return jax.jit(jax.grad(total, has_aux=True))(indexer, params, hidden)

    with jax.default_device(cpu):
        (exact, kl_exact), (coarse, kl_coarse) = dense(jnp.float32), dense(jnp.bfloat16)
    assert error(kl, kl_exact) <= 2 * error(kl_coarse, kl_exact)
    for name, gradient in exact.items():
        assert error(grads[name], gradient) <= 2 * error(coarse[name], gradient), name


def test_the_indexers_gradients_and_its_loss_are_those_of_dense_attention() -> None:
    require_gradients_and_loss(heads=2)


@pytest.mark.gpu
def test_the_same_on_a_gpu() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    require_gradients_and_loss(heads=64)


def test_the_loss_changes_nothing_else() -> None:
    """Outputs, and gradients of the attention and of the hidden states; without it the indexer learns nothing."""
    _, _, (found, (grads, d_hidden, _)), (bare, (bare_grads, bare_d_hidden)) = trained(2)
    assert bare.aux is None and not np.asarray(found.aux).any()
    np.testing.assert_array_equal(np.asarray(found.indices), np.asarray(bare.indices))
    np.testing.assert_array_equal(np.asarray(found.out, np.float32), np.asarray(bare.out, np.float32))
    np.testing.assert_array_equal(np.asarray(d_hidden, np.float32), np.asarray(bare_d_hidden, np.float32))
    for name, gradient in bare_grads.items():
        if name.startswith(INDEXER):
            assert not np.asarray(gradient).any(), name
        else:
            np.testing.assert_array_equal(np.asarray(grads[name], np.float32), np.asarray(gradient, np.float32), name)
