"""A training step of DeepSeek sparse attention as one differentiable function."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from numpy.typing import NDArray

from ...errors import InputError, UnsupportedError, shown
from ...ops.arguments import truth
from ..call import Call
from ..declaration import Declaration
from ..table import declared
from ..training import OPERATOR, index_arguments, index_errors, require_keys, require_owner
from .functions import (
    constant,
    exactly,
    facts_of,
    made_varying,
    on_every_device,
    public,
    traceable,
    varying,
)
from .parallel import first_position, gathered, scattered

__all__ = ["dsa_attention"]

_ATTENTION = ("q", "kv", "attn_sink")
_INDEXER = ("iq", "ik", "iw")
_Zero = jax.custom_derivatives.SymbolicZero
_Options = tuple[tuple[str, Any], ...]


def dsa_attention(
    q: Array | NDArray[Any],
    kv: Array | NDArray[Any],
    iq: Array | NDArray[Any],
    ik: Array | NDArray[Any],
    iw: Array | NDArray[Any],
    indices: Array | NDArray[Any],
    *,
    loss_weight: float | Array | NDArray[Any],
    topk_length: Array | NDArray[Any] | None = None,
    attn_sink: Array | NDArray[Any] | None = None,
    sm_scale: float | None = None,
    causal: bool = False,
    q_start: int | Array = 0,
    k_stride: int = 1,
    lse_base: Literal["e", "2"] = "e",
    relu: bool = True,
    attn_dist_sink: bool = False,
    deterministic: bool = False,
    axis_name: str | None = None,
    context_axis: str | None = None,
    check_ranks: bool = False,
) -> tuple[Array, Array, Array]:
    """Sparse MLA attention whose backward trains the lightning indexer on the way.

    The objective is a loss of `out` plus, for each query t, loss_weight[t] * KL(p[t] || softmax of index scores), over
    the valid entries of the query. p is the attention distribution summed over heads, a constant. It is known in the
    backward, where `sparse_mla_bwd` has it at hand: one pass each of `sparse_mla_bwd`, `indexer_loss` and `indexer_bwd`
    makes all gradients. So is the KL loss, which no forward result can hold. Two things stand for it:

    - `aux`, of zeros: add its sum to what you differentiate. Its gradient, 1 then, multiplies all that the KL loss
      gives. Without it the indexer learns nothing, and the backward is that of `sparse_mla_fwd`.
    - the gradient with respect to `loss_weight`, which is the KL loss itself:

          def objective(params, loss_weight):
              ...
              out, lse, aux = dsa_attention(q, kv, iq, ik, iw, indices, loss_weight=loss_weight)
              return main_loss(out) + aux.sum()

          grads, kl = jax.grad(objective, (0, 1))(params, jnp.full(rows, 1 / rows))

    The attention's gradients do not see the KL loss, nor the indexer the loss of `out`. To train the indexer alone,
    take `jax.lax.stop_gradient(out)`: `attn_dist` then makes the distribution, and no backward of the attention runs.

    Args:
        q: [s_q, h_q, d_qk] bfloat16 or float16, as of `cupymla.sparse_mla_fwd`. Every array may have a leading batch
            axis, except attn_sink; then all have it.
        kv: [s_kv, d_qk], q's dtype.
        iq: [s_q, H, D] bfloat16 or float16, queries of the indexer, as `q` of `cupymla.indexer_loss`.
        ik: [s_kv, D], iq's dtype, keys of the indexer.
        iw: [s_q, H] float32 or bfloat16, weights of the indexer's heads.
        indices: [s_q, topk] int32, the selection; as `causal`, it holds for both.
        loss_weight: a number, or float32 that broadcasts to [s_q]: how much the KL loss of each query counts.
        topk_length: [s_q] int32, how many leading entries of each row of indices count.
        attn_sink: [h_q] float32.
        sm_scale: factor of the attention's scores; d_qk ** -0.5 by default.
        causal: mask keys that are not complete at the query's position.
        q_start: position of query 0, for causal; it may be traced.
        k_stride: positions per key, for causal, >= 1.
        lse_base: "e" or "2": the base of lse.
        relu: of the index scores.
        attn_dist_sink: let the sink have its part of each head's softmax in the distribution, too, as it has in `out`.
            A head that gives much to its sink then counts less.
        deterministic: of the backward.
        axis_name: mesh axis inside `shard_map` along which heads of q (and attn_sink) are split. The distributions of
            its devices are added before the loss. Everything else is the same on all of them, as P() makes it.
        context_axis: mesh axis inside `shard_map` along which queries and tokens are split, in order: all arrays but
            attn_sink are this device's, indices are counted in tokens of all devices, q_start is the position of the
            first device's query 0. kv and ik are all-gathered, their gradients reduce-scattered in float32.
        check_ranks: with axis_name, make KL loss and gradients NaN in rows whose selection differs between devices.

    Returns:
        (out [s_q, h_q, 512] in q's dtype, lse [s_q, h_q] float32, aux [s_q] float32). Differentiable in q, kv, iq, ik,
        iw, attn_sink and loss_weight. There is no gradient through lse, and none of the gradient.

    Raises:
        InputError: an argument cannot be used as it is.
        UnsupportedError: a gradient that there is not, or no kernel for this on the arrays' device.

    Source: the sparse training stage of DeepSeek-V3.2, section 2.1.1.
    """
    flags = {
        "attn_dist_sink": _flag(attn_dist_sink, "attn_dist_sink"),
        "check_ranks": _flag(check_ranks, "check_ranks"),
    }
    require_owner("attn_dist_sink", flags["attn_dist_sink"], "attn_sink", attn_sink)
    require_owner("check_ranks", flags["check_ranks"], "axis_name", axis_name)
    attention, indexer = declared("sparse_mla_fwd"), declared("indexer_loss")
    if context_axis is not None:
        q_start = first_position(OPERATOR, q, context_axis, q_start)
    masks: dict[str, Any] = {"causal": causal, "q_start": q_start, "k_stride": k_stride}
    given = {"q": q, "kv": kv, "indices": indices, "topk_length": topk_length, "attn_sink": attn_sink}
    own = {"sm_scale": sm_scale, "lse_base": lse_base, "deterministic": deterministic}
    arrays, plain = traceable(attention, *attention.split((), {**given, **masks, **own}))
    attention_options = _options(attention, arrays, plain)
    shared = {name: arrays[name] for name in ("indices", "topk_length") if name in arrays}
    masks = {name: plain[name] for name in masks}
    with index_errors():
        target = jnp.zeros(arrays["indices"].shape, jnp.float32)
        scored = index_arguments(iq, ik, iw) | shared | {"target": target}
        scored, plain = traceable(indexer, *indexer.split((), {**scored, **masks, "relu": relu}))
        index_options = _options(indexer, scored, plain)
    require_keys(arrays["kv"], scored["k"])
    arrays |= {"iq": scored["q"], "ik": scored["k"], "iw": scored["weights"]}
    arrays["loss_weight"] = _weights(loss_weight, arrays["q"].shape[:-2])
    setting = _Setting(tuple(arrays), attention_options, index_options, axis_name, context_axis, **flags)
    values = tuple([exactly(value) for _, value in (*attention_options, *index_options)])
    results: tuple[Any, Any, Any] = _step(setting, values)(*_placed(arrays, axis_name).values())
    return results


def _options(declaration: Declaration, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> _Options:
    """The options as plain values, once the operator has found nothing wrong with a call. Raises InputError."""
    call = Call.of(declaration, {n: facts_of(declaration, n, array) for n, array in arrays.items()}, options)
    call.check()
    return tuple(call.options.items())


def _weights(loss_weight: Any, rows: tuple[Any, ...]) -> Any:
    """A weight for each query. Raises InputError."""
    try:
        weights = jnp.asarray(loss_weight, jnp.float32)
        return jnp.broadcast_to(weights, rows)
    except (TypeError, ValueError):
        got = f"shape {list(loss_weight.shape)}" if hasattr(loss_weight, "shape") else shown(loss_weight)
        raise InputError("loss_weight", f"a number or float32 that broadcasts to {list(rows)}", got, OPERATOR) from None


def _flag(value: Any, name: str) -> bool:
    flag = truth(value)
    if flag is None:
        raise InputError(name, "True or False", shown(value), OPERATOR)
    return flag


def _placed(arrays: Mapping[str, Any], axis_name: str | None) -> dict[str, Any]:
    """The arrays, typed as the gradient rule takes them. Raises InputError.

    JAX sums the gradients of what devices share where an array is made to vary, so that is done outside of the rule.
    What the indexer has does not vary along the axis of heads, so no sum is made of it there.
    """
    whole = {name: on_every_device(array) for name, array in arrays.items()}
    axes = varying(whole.values())
    heads: frozenset[Any] = frozenset() if axis_name is None else frozenset((axis_name,))
    if not heads <= varying((whole["q"],)):
        expected = "a mesh axis along which heads of q are split, inside shard_map with check_vma"
        raise InputError("axis_name", expected, shown(axis_name), OPERATOR)
    common = (axes - heads) | varying(array for name, array in whole.items() if name not in _ATTENTION)
    return {name: made_varying(array, axes if name in _ATTENTION else common) for name, array in whole.items()}


@dataclass(frozen=True, slots=True)
class _Setting:
    """All of a call but its arrays.

    Attributes:
        names: of the arrays, in order.
        attention: options of `sparse_mla_fwd`.
        indexer: options of `indexer_loss`.
        axis_name: mesh axis of heads.
        context_axis: mesh axis of queries and tokens.
        attn_dist_sink: whether the sink is in the distribution.
        check_ranks: whether selections are compared along the axis.
    """

    names: tuple[str, ...]
    attention: _Options
    indexer: _Options
    axis_name: str | None
    context_axis: str | None
    attn_dist_sink: bool
    check_ranks: bool


@functools.lru_cache(maxsize=256)
def _step(setting: _Setting, values: tuple[object, ...]) -> Callable[..., Any]:
    """The function with its gradient. `values` tell options apart that are equal, as True and 1 are."""

    def attend(*arrays: Any) -> Any:
        given = dict(zip(setting.names, arrays, strict=True))
        selected = {name: given[name] for name in (*_ATTENTION, "indices", "topk_length") if name in given}
        selected["kv"] = _whole(selected["kv"], setting.context_axis)
        out, _, lse = public(declared("sparse_mla_fwd"))(**selected, **dict(setting.attention))
        return out, lse, _aux(given, setting.axis_name)

    def keep(*primals: Any) -> Any:
        # Not which of them move: JAX may call `pull` with what another call of `keep` has found.
        arrays = tuple(primal.value for primal in primals)
        out, lse, aux = attend(*arrays)
        return (out, lse, aux), (arrays, out, lse)

    def pull(saved: Any, slopes: Any) -> Any:
        arrays, out, lse = saved
        live = {n: s for n, s in zip(("dout", "dlse", "daux"), slopes, strict=True) if not isinstance(s, _Zero)}
        if "dlse" in live:
            raise UnsupportedError(f"{OPERATOR}: a gradient through 'lse'", "every device", "jax.lax.stop_gradient")
        if not live:
            return tuple(None for _ in setting.names)
        known = {**dict(zip(setting.names, arrays, strict=True)), "out": out, "lse": lse, **live}
        names: list[str] = []

        def flat(*arrays: Any) -> tuple[Any, ...]:
            made = _gradients(setting, dict(zip(known, arrays, strict=True)))
            names[:] = made
            return tuple(made.values())

        first = constant(flat, f"{OPERATOR}: a gradient of its gradient", "first gradients")
        made = first(*known.values())
        grads = dict(zip(names, made, strict=True))
        return tuple(grads.get(name) for name in setting.names)

    step = jax.custom_vjp(attend)
    step.defvjp(keep, pull, symbolic_zeros=True)
    # Outside of `jit`, JAX has no shard_map rule for a gradient that asks which cotangents are zero.
    made: Callable[..., Any] = jax.jit(step)
    return made


def _aux(given: dict[str, Any], axis_name: str | None) -> Any:
    """Zeros that are made of all arrays: `vmap` adds up the cotangents of a result that no mapped array is part of."""

    def nothing(names: Iterable[str]) -> Any:
        some = [given[name].reshape(-1)[:1] for name in names]
        return sum(jnp.less(each, each).any().astype(jnp.float32) for each in some)

    own = nothing(name for name in given if name in _ATTENTION)
    # Typed as the same on all devices, as what the indexer has is.
    own = own if axis_name is None else jax.lax.psum(own, axis_name)
    return own + nothing(name for name in given if name not in _ATTENTION) + jnp.zeros_like(given["loss_weight"])


def _whole(rows: Any, context_axis: str | None) -> Any:
    """Rows of all tokens."""
    return rows if context_axis is None else gathered(rows, context_axis)


def _gradients(setting: _Setting, known: dict[str, Any]) -> dict[str, Any]:
    """Gradients of the attention's arrays where `dout` is known, of the indexer's where `daux` is, by name."""
    selection = {name: known[name] for name in ("indices", "topk_length") if name in known}
    options, indexer, axis = dict(setting.attention), "daux" in known, setting.context_axis
    # In float32 where devices' shares are added, and in the arrays' own dtype otherwise.
    of_rows = None if axis is None else "float32"
    own = {name: known[name] for name in ("kv", "ik")}
    known = {**known, **{name: _whole(rows, axis) for name, rows in own.items() if name == "kv" or indexer}}
    grads: dict[str, Any] = {}
    counts_sink = indexer and setting.attn_dist_sink
    if "dout" in known:
        arrays = {n: known[n] for n in (*_ATTENTION, "out", "dout", "lse") if n in known}
        names = ["q", "kv", *(["attn_sink"] if "attn_sink" in known else []), *(["target"] if indexer else [])]
        asked = {"return_attn_dist": indexer, "attn_dist_sink": counts_sink}
        made = public(declared("sparse_mla_bwd"))(**arrays, **selection, **options, **asked, dkv_dtype=of_rows)
        grads |= dict(zip(names, made, strict=True))
    if axis is not None and "kv" in grads:
        grads["kv"] = scattered(grads["kv"], axis, own["kv"])
    if not indexer:
        return grads
    target = grads.pop("target", None)
    if target is None:
        arrays = {name: known[name] for name in ("q", "kv", "lse")}
        if counts_sink:
            unit = math.log(2) if options["lse_base"] == "2" else 1.0
            arrays["lse"] = jnp.logaddexp(arrays["lse"] * unit, known["attn_sink"]) / unit
        chosen = {name: value for name, value in options.items() if name != "deterministic"}
        target = public(declared("attn_dist"))(**arrays, **selection, **chosen)
    scale = known["daux"] * known["loss_weight"]
    differs: Any = False
    if setting.axis_name is not None:
        target = jax.lax.psum(target, setting.axis_name)
        if setting.check_ranks:
            differs = _differs(known["indices"], known.get("topk_length"), setting.axis_name)
            scale = jnp.where(differs, jnp.nan, scale)
    index = index_arguments(known["iq"], known["ik"], known["iw"]) | selection
    masks = {name: value for name, value in setting.indexer if name != "deterministic"}
    loss, slope = public(declared("indexer_loss"))(**index, target=target, **masks)
    slope = slope * scale[..., None]
    chosen = {"deterministic": options["deterministic"], "dk_dtype": of_rows}
    made = public(declared("indexer_bwd"))(**index, grad_logits=slope, **masks, **chosen)
    grads |= dict(zip(_INDEXER, made, strict=True))
    if axis is not None:
        grads["ik"] = scattered(grads["ik"], axis, own["ik"])
    grads["loss_weight"] = known["daux"] * jnp.where(differs, jnp.nan, loss)
    return grads


def _differs(indices: Any, topk_length: Any, axis_name: str) -> Any:
    """Whether the entries that count of a row, or their number, are not the same along a mesh axis: by a hash."""
    place = jnp.arange(indices.shape[-1], dtype=jnp.uint32)
    words = indices.astype(jnp.uint32) + 1
    if topk_length is not None:
        words = jnp.where(place < jnp.clip(topk_length, 0)[..., None].astype(jnp.uint32), words, 0)
    words = (words ^ (place * jnp.uint32(0x9E3779B9))) * jnp.uint32(0x85EBCA6B)
    hashed = ((words ^ (words >> 15)) * jnp.uint32(0xC2B2AE35)).sum(-1, dtype=jnp.uint32)
    hashed = made_varying(hashed, varying((hashed,)) | {axis_name})
    return jax.lax.pmax(hashed, axis_name) != jax.lax.pmin(hashed, axis_name)
