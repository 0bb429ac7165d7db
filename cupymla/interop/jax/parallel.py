"""Sparse MLA over several devices: each has a part of the queries and a part of the tokens.

For use inside `jax.shard_map`. Keys are all-gathered, as a query may select any token; every device attends with its
queries; in the backward pass the keys are gathered once more rather than kept, and their gradients, which every device
has a share of, are reduce-scattered in float32 and rounded once. Transport is XLA's.

Context parallelism with gathered keys: Llama 3 (arXiv:2407.21783), section 3.3.2. With selected tokens the work per
query is the same wherever it stands, so plain contiguous shards are balanced under a causal mask as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from ...errors import UnsupportedError
from ..declaration import integer
from ..table import declared
from .functions import made_varying, public, traceable, varying

__all__ = ["attn_dist", "over_mesh", "sparse_mla_fwd"]


def sparse_mla_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    *,
    axis_name: str,
    topk_length: Any = None,
    attn_sink: Any = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """`cupymla.sparse_mla_fwd` on this device's queries and everybody's tokens; inside `shard_map`.

    Args:
        q: [s_q, h_q, d_qk], this device's share of consecutive queries; a leading batch axis is not sharded.
        kv: [s_kv, d_qk], this device's share of consecutive tokens.
        indices: [s_q, topk], counted in tokens of all devices.
        axis_name: mesh axis along which queries and tokens are sharded.
        topk_length: of this device's queries.
        attn_sink: [h_q], the same on all devices.
        causal: mask keys past the query's own position.
        q_start: position of the first query of the first device.
        k_stride: positions per key.
        **options: sm_scale, lse_base, deterministic.

    Returns:
        (out, max_logits, lse) of this device's queries. Differentiable in q, kv and attn_sink.

    Raises:
        InputError: what the operator finds.
    """
    forward = declared("sparse_mla_fwd")
    given = {"q": q, "kv": kv, "indices": indices, "topk_length": topk_length, "attn_sink": attn_sink}
    masks = {"causal": causal, "q_start": first_position(forward.name, q, axis_name, q_start), "k_stride": k_stride}
    arrays, plain = traceable(forward, *forward.split((), {**given, **masks, **options}))
    types = tuple([type(value) for value in plain.values()])
    run = _attention(axis_name, tuple(arrays), tuple(plain.items()), types)
    # Outside of the gradient rule, so that JAX sums the gradients of what devices share, along every axis of the mesh.
    axes = varying(arrays.values()) | {axis_name}
    results: tuple[Any, Any, Any] = run(*(made_varying(array, axes) for array in arrays.values()))
    return results


def attn_dist(
    q: Any,
    kv: Any,
    indices: Any,
    lse: Any,
    *,
    axis_name: str,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    **options: Any,
) -> Any:
    """`cupymla.attn_dist` of this device's queries over everybody's tokens; inside `shard_map`.

    Args:
        q: as of `sparse_mla_fwd` here.
        kv: the same.
        indices: the same.
        lse: [s_q, h_q] float32, as `sparse_mla_fwd` returned it.
        axis_name: mesh axis along which queries and tokens are sharded.
        causal: mask keys past the query's own position.
        q_start: position of the first query of the first device.
        k_stride: positions per key.
        **options: topk_length, sm_scale, lse_base, normalize.

    Returns:
        [s_q, topk] float32 of this device's queries.

    Raises:
        InputError: what the operator finds.
    """
    masks = {"causal": causal, "q_start": first_position("attn_dist", q, axis_name, q_start), "k_stride": k_stride}
    whole = gathered(kv, axis_name)
    return public(declared("attn_dist"))(q, whole, indices, lse, **masks, **options)


def over_mesh(mesh: Any, axis_name: str, *, batched: bool = False) -> Callable[..., tuple[Any, Any, Any]]:
    """`sparse_mla_fwd` for whole arrays: a function that shards queries and tokens over an axis of a mesh.

    Args:
        mesh: of devices.
        axis_name: the axis; its extent divides s_q and s_kv.
        batched: whether the arrays have a leading batch axis.

    Returns:
        A function of q, kv, indices and the options of `sparse_mla_fwd` here, which returns (out, max_logits, lse).
    """
    lead = (None,) if batched else ()
    rows = jax.P(*lead, axis_name)

    def run(q: Any, kv: Any, indices: Any, *, topk_length: Any = None, attn_sink: Any = None, **options: Any) -> Any:
        arrays = {"q": q, "kv": kv, "indices": indices, "topk_length": topk_length, "attn_sink": attn_sink}
        given = {name: array for name, array in arrays.items() if array is not None}
        specs = {name: jax.P() if name == "attn_sink" else rows for name in given}

        def local(arrays: dict[str, Any]) -> Any:
            return sparse_mla_fwd(**arrays, axis_name=axis_name, **options)

        # Axes of type Explicit, which are what `jax.make_mesh` makes, are not resharded by themselves.
        if jax.sharding.AxisType.Explicit in mesh.axis_types:
            given = {n: jax.reshard(array, jax.sharding.NamedSharding(mesh, specs[n])) for n, array in given.items()}
        return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(rows, rows, rows))(given)

    return run


def gathered(rows: Any, axis_name: str) -> Any:
    """Everybody's rows [..., tokens, channels], of this device's."""
    return jax.lax.all_gather(rows, axis_name, axis=rows.ndim - 2, tiled=True)


def scattered(gradient: Any, axis_name: str, like: Any) -> Any:
    """This device's part of the sum of everybody's gradients of gathered rows, in the dtype of `like`."""
    axis = gradient.ndim - 2
    return jax.lax.psum_scatter(gradient, axis_name, scatter_dimension=axis, tiled=True).astype(like.dtype)


def first_position(operator: str, q: Any, axis_name: str, q_start: Any) -> Any:
    """The position of this device's first query, which is known only when the program runs. Raises InputError."""
    if not isinstance(q_start, jax.Array):
        q_start = integer(operator, "q_start", q_start)
    return q_start + jax.lax.axis_index(axis_name) * q.shape[-3]


@functools.lru_cache(maxsize=256)
def _attention(
    axis_name: str, names: tuple[str, ...], options: tuple[tuple[str, Any], ...], types: tuple[type, ...]
) -> Callable[..., Any]:
    """Attention over gathered keys, with the gradient that reduces in float32; `types` are those of the options."""
    forward_options = {name: value for name, value in options if name != "deterministic"}
    forward, backward = public(declared("sparse_mla_fwd")), public(declared("sparse_mla_bwd"))

    def attend(*arrays: Any) -> Any:
        given = dict(zip(names, arrays, strict=True))
        given["kv"] = gathered(given["kv"], axis_name)
        return forward(**given, **forward_options)

    def keep(*primals: Any) -> Any:
        arrays = tuple(primal.value for primal in primals)
        out, max_logits, lse = attend(*arrays)
        return (out, max_logits, lse), (arrays, out, lse)

    def pull(saved: Any, slopes: Any) -> Any:
        arrays, out, lse = saved
        given = dict(zip(names, arrays, strict=True))
        if not all(isinstance(slope, jax.custom_derivatives.SymbolicZero) for slope in slopes[1:]):
            raise UnsupportedError("a gradient through max_logits or lse", "every device", "jax.lax.stop_gradient")
        if isinstance(slopes[0], jax.custom_derivatives.SymbolicZero):
            return tuple(None for _ in names)
        kv = given["kv"]
        given["kv"] = gathered(kv, axis_name)
        dq, dkv, *d_sink = backward(**given, out=out, dout=slopes[0], lse=lse, dkv_dtype="float32", **dict(options))
        grads = {"q": dq, "kv": scattered(dkv, axis_name, kv), **({"attn_sink": d_sink[0]} if d_sink else {})}
        return tuple(grads.get(name) for name in names)

    attention = jax.custom_vjp(attend)
    attention.defvjp(keep, pull, symbolic_zeros=True)
    # Outside of `jit`, JAX has no shard_map rule for a gradient that asks which cotangents are zero.
    made: Callable[..., Any] = jax.jit(attention)
    return made
