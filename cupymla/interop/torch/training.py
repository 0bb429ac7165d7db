"""A training step of DeepSeek sparse attention as one differentiable function."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import InputError, UnsupportedError, shown
from ..table import declared
from ..training import OPERATOR, index_arguments, index_errors, require_keys, require_owner
from .arguments import nothing_listens
from .functions import flag_of, integer_of, public, require_tensor
from .gradients import transformed

__all__ = ["dsa_attention"]

# Made here, for torch.compile does not trace how operators are registered.
_SPARSE_MLA_FWD, _SPARSE_MLA_BWD, _ATTN_DIST, _INDEXER_LOSS, _INDEXER_BWD = (
    public(declared(name)) for name in ("sparse_mla_fwd", "sparse_mla_bwd", "attn_dist", "indexer_loss", "indexer_bwd")
)

_ARRAYS = ("q", "kv", "attn_sink", "iq", "ik", "iw", "loss_weight")
"""What there are gradients of."""


def dsa_attention(
    q: Tensor,
    kv: Tensor,
    iq: Tensor,
    ik: Tensor,
    iw: Tensor,
    indices: Tensor,
    *,
    loss_weight: float | Tensor,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    sm_scale: float | None = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    lse_base: Literal["e", "2"] = "e",
    relu: bool = True,
    attn_dist_sink: bool = False,
    deterministic: bool = False,
    group: Any = None,
    check_ranks: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sparse MLA attention whose backward trains the lightning indexer on the way.

    The objective is a loss of `out` plus, for each query t, loss_weight[t] * KL(p[t] || softmax of index scores), over
    the valid entries of the query. p is the attention distribution summed over heads, a constant. It is known in the
    backward, where `sparse_mla_bwd` has it at hand: one pass each of `sparse_mla_bwd`, `indexer_loss` and `indexer_bwd`
    makes all gradients. So is the KL loss, which no forward result can hold. Two things stand for it:

    - `aux`, of zeros: add its sum to what you differentiate. Its gradient, 1 then, multiplies all that the KL loss
      gives. Without it the indexer learns nothing, and the backward is that of `sparse_mla_fwd`.
    - the gradient with respect to `loss_weight`, which is the KL loss itself:

          loss_weight = torch.full((rows,), 1 / rows, device="cuda", requires_grad=True)
          out, lse, aux = dsa_attention(q, kv, iq, ik, iw, indices, loss_weight=loss_weight)
          (main_loss(out) + aux.sum()).backward()
          kl = loss_weight.grad  # that of each query

    The attention's gradients do not see the KL loss, nor the indexer the loss of `out`. To train the indexer alone,
    take `out.detach()`, or q, kv and attn_sink that require no gradient: `attn_dist` then makes the distribution, and
    no backward of the attention runs.

    Args:
        q: [s_q, h_q, d_qk] bfloat16 or float16, as of `cupymla.sparse_mla_fwd`. Every tensor may have a leading batch
            axis, except attn_sink; then all have it.
        kv: [s_kv, d_qk], q's dtype.
        iq: [s_q, H, D] bfloat16 or float16, queries of the indexer, as `q` of `cupymla.indexer_loss`.
        ik: [s_kv, D], iq's dtype, keys of the indexer.
        iw: [s_q, H] float32 or bfloat16, weights of the indexer's heads.
        indices: [s_q, topk] int32, the selection; as `causal`, it holds for both.
        loss_weight: a number, or a tensor that broadcasts to [s_q]: how much the KL loss of each query counts.
        topk_length: [s_q] int32, how many leading entries of each row of indices count.
        attn_sink: [h_q] float32.
        sm_scale: factor of the attention's scores; d_qk ** -0.5 by default.
        causal: mask keys that are not complete at the query's position.
        q_start: position of query 0, for causal.
        k_stride: positions per key, for causal, >= 1.
        lse_base: "e" or "2": the base of lse.
        relu: of the index scores.
        attn_dist_sink: let the sink have its part of each head's softmax in the distribution, too, as it has in `out`.
            A head that gives much to its sink then counts less.
        deterministic: of the backward.
        group: the process group whose ranks have the other heads of q (and attn_sink); None where this one has all. The
            distributions of its ranks are added before the loss. Everything else is the same on all of them. Each then
            has the whole gradients of iq, ik, iw and loss_weight, and of kv what its heads give, to be summed.
        check_ranks: compare the selection over the group in the forward. It waits for the stream, and breaks the graph
            of a compiled program.

    Returns:
        (out [s_q, h_q, 512] in q's dtype, lse [s_q, h_q] float32, aux [s_q] float32). Differentiable in q, kv, iq, ik,
        iw, attn_sink and loss_weight. lse requires no gradient, and there is none of the gradient.

    Raises:
        InputError: an argument cannot be used as it is, or, with check_ranks, the selection is another one on some
            rank; then every rank raises it.
        UnsupportedError: a gradient that there is not, or no kernel for this on the tensors' device.

    Source: the sparse training stage of DeepSeek-V3.2, section 2.1.1.
    """
    for name, array in (("q", q), ("kv", kv), ("iq", iq), ("ik", ik), ("iw", iw), ("indices", indices)):
        require_tensor(OPERATOR, array, name)
    flags = {"causal": causal, "relu": relu, "attn_dist_sink": attn_dist_sink, "deterministic": deterministic}
    flags = {name: flag_of(OPERATOR, value, name) for name, value in (*flags.items(), ("check_ranks", check_ranks))}
    require_owner("attn_dist_sink", flags["attn_dist_sink"], "attn_sink", attn_sink)
    require_owner("check_ranks", flags["check_ranks"], "group", group)
    numbers = {"q_start": q_start, "k_stride": k_stride}
    masks = {name: integer_of(OPERATOR, value, name) for name, value in numbers.items()} | {"causal": flags["causal"]}
    options = {
        "attention": {**masks, "sm_scale": sm_scale, "lse_base": lse_base},
        "indexer": {**masks, "relu": flags["relu"]},
        "attn_dist_sink": flags["attn_dist_sink"],
        "deterministic": flags["deterministic"],
        "group": group,
    }
    weights = _weights(loss_weight, q)
    if not torch.compiler.is_compiling() and nothing_listens():
        _look_at_indexer(q, kv, iq, ik, iw, indices, topk_length, options["indexer"])
    if flags["check_ranks"]:
        _require_same(indices, topk_length, group)
    results: tuple[Any, Any, Any] = _Step.apply(q, kv, attn_sink, iq, ik, iw, weights, indices, topk_length, options)
    return results


def _weights(loss_weight: Any, q: Any) -> Any:
    """A weight for each query. Raises InputError."""
    rows = q.shape[:-2]
    expected = f"a number or a tensor of floats that broadcasts to {list(rows)}"
    if not isinstance(loss_weight, torch.Tensor):
        try:
            return torch.full(rows, float(loss_weight), device=q.device)
        except (TypeError, ValueError):
            raise InputError("loss_weight", expected, shown(loss_weight), OPERATOR) from None
    try:
        return loss_weight.to(torch.float32).expand(rows)
    except RuntimeError:
        raise InputError("loss_weight", expected, f"shape {list(loss_weight.shape)}", OPERATOR) from None


def _look_at_indexer(
    q: Any, kv: Any, iq: Any, ik: Any, iw: Any, indices: Any, topk_length: Any, options: dict[str, Any]
) -> None:
    """Raise InputError for what the backward's operators would find."""
    with index_errors():
        arrays = {name: array.detach() for name, array in index_arguments(iq, ik, iw).items()}
        # A target that lies like indices, without memory of its own.
        target = indices.view(torch.float32) if indices.dtype == torch.int32 else indices
        declared("indexer_loss").calls().read(
            **arrays, indices=indices, target=target, topk_length=topk_length, **options
        )
    require_keys(kv, ik)


class _Step(torch.autograd.Function):  # type: ignore[misc]
    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Any,
        kv: Any,
        attn_sink: Any,
        iq: Any,
        ik: Any,
        iw: Any,
        loss_weight: Any,
        indices: Any,
        topk_length: Any,
        options: dict[str, Any],
    ) -> Any:
        given = {"topk_length": topk_length, "attn_sink": attn_sink}
        out, _, lse = _SPARSE_MLA_FWD(q, kv, indices, **given, **options["attention"])
        aux = torch.zeros_like(loss_weight)
        if not torch.compiler.is_compiling() and transformed():
            # Made of all tensors: `vmap` adds up the gradients of a result that no mapped tensor has a part in.
            for tensor in (q, kv, attn_sink, iq, ik, iw, indices, topk_length):
                aux = aux if tensor is None else aux + torch.lt(tensor, tensor).any()
        return out, lse, aux

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        *arrays, ctx.options = inputs
        out, lse, _ = output
        ctx.save_for_backward(*arrays, out, lse)
        ctx.mark_non_differentiable(lse)

    @staticmethod
    def backward(ctx: Any, dout: Any, _: Any, daux: Any) -> Any:
        # Once: torch.utils.checkpoint recomputes them when they are asked for.
        saved = ctx.saved_tensors
        needed = dict(zip(_ARRAYS, ctx.needs_input_grad, strict=False))
        attention = dout is not None and any(needed[name] for name in _ARRAYS[:3])
        indexer = daux is not None and any(needed[name] for name in _ARRAYS[3:])
        grads: dict[str, Any] = {}
        if attention or indexer:
            dout = dout.contiguous() if attention else None
            made = _Gradients.apply(*saved, dout, daux if indexer else None, ctx.options)
            names = [*(_ARRAYS[:2] if attention else ()), *(_ARRAYS[3:] if indexer else ())]
            if attention and saved[2] is not None:
                names.insert(2, "attn_sink")
            grads = dict(zip(names, made, strict=True))
        return (*(grads.get(name) for name in _ARRAYS), *(None,) * 3)


class _Gradients(torch.autograd.Function):  # type: ignore[misc]
    """Gradients by `_ARRAYS`, as a function of its own: so they are known to depend on all these."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Any,
        kv: Any,
        attn_sink: Any,
        iq: Any,
        ik: Any,
        iw: Any,
        loss_weight: Any,
        indices: Any,
        topk_length: Any,
        out: Any,
        lse: Any,
        dout: Any,
        daux: Any,
        options: dict[str, Any],
    ) -> Any:
        attention, deterministic = {"topk_length": topk_length, **options["attention"]}, options["deterministic"]
        grads: list[Any] = []
        target, counts_sink = None, daux is not None and options["attn_dist_sink"]
        if dout is not None:
            given = {"attn_sink": attn_sink, "deterministic": deterministic, "return_attn_dist": daux is not None}
            given["attn_dist_sink"] = counts_sink
            grads = [*_SPARSE_MLA_BWD(q, kv, out, dout, lse, indices, **given, **attention)]
            target = grads.pop() if daux is not None else None
        if daux is None:
            return tuple(grads)
        if target is None:
            if counts_sink:
                unit = math.log(2) if attention["lse_base"] == "2" else 1.0
                lse = torch.logaddexp(lse * unit, attn_sink.expand(lse.shape)) / unit
            target = _ATTN_DIST(q, kv, indices, lse, **attention)
        if options["group"] is not None:
            dist.all_reduce(target, group=options["group"])
        given = {"topk_length": topk_length, **options["indexer"]}
        loss, slope = _INDEXER_LOSS(iq, ik, iw, indices, target, **given)
        slope = slope * (daux * loss_weight)[..., None]
        made = _INDEXER_BWD(iq, ik, iw, slope, indices, deterministic=deterministic, **given)
        return (*grads, *made, daux * loss)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """There is nothing to keep for a gradient that there is not."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(f"{OPERATOR}: a gradient of its gradient", "every device", "first gradients")


def _require_same(indices: Any, topk_length: Any, group: Any) -> None:
    """Raise InputError, on every rank, where selections differ between ranks: by a hash. Waits for the stream."""
    place = torch.arange(indices.shape[-1], device=indices.device)
    words = indices.long() + 1
    if topk_length is not None:
        words = torch.where(place < topk_length[..., None], words, 0)
    row = torch.arange(words[..., 0].numel(), device=indices.device).reshape(*words.shape[:-1], 1)
    # Products modulo 2^64, and sums of them.
    hashed = ((words * 0x9E3779B97F4A7C1 + place) * 0x5851F42D4C957F2D + row) * 0x14057B7EF767814F
    hashed = (hashed ^ (hashed >> 29)).sum() >> 1  # so that the negative one exists
    ends = torch.stack((hashed, -hashed))
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    largest, least = ends.tolist()
    if largest != -least:
        raise InputError("indices", "the same selection on every rank of the group", "different ones", OPERATOR)
