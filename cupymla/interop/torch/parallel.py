"""Sparse MLA over the ranks of a process group: each has a part of the queries and a part of the tokens.

Keys are all-gathered, as a query may select any token; every rank attends with its queries; in the backward pass they
are gathered once more rather than kept, and their gradients are reduce-scattered in float32 and rounded once. Transport
is torch.distributed's: NCCL on GPUs, gloo on CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...errors import UnsupportedError
from ..table import declared
from .functions import flag_of, integer_of, public

__all__ = ["attn_dist", "sparse_mla_fwd"]


def sparse_mla_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    *,
    group: Any = None,
    topk_length: Any = None,
    attn_sink: Any = None,
    causal: bool = False,
    q_start: int = 0,
    deterministic: bool = False,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """`cupymla.sparse_mla_fwd` on this rank's queries and everybody's tokens.

    Args:
        q: [s_q, h_q, d_qk], this rank's share of consecutive queries, as many on every rank; a leading batch axis is
            not sharded.
        kv: [s_kv, d_qk], this rank's share of consecutive tokens, as many on every rank.
        indices: [s_q, topk], counted in tokens of all ranks.
        group: the process group, the default one by default.
        topk_length: of this rank's queries.
        attn_sink: [h_q], the same on all ranks.
        causal: mask keys past the query's own position.
        q_start: position of the first query of the first rank.
        deterministic: of the backward.
        **options: sm_scale, k_stride, lse_base.

    Returns:
        (out, max_logits, lse) of this rank's queries. Differentiable in q, kv and attn_sink; the gradient of attn_sink
        is this rank's share, to be summed over ranks as that of every parameter which all of them hold.

    Raises:
        InputError: what the operator finds.
    """
    start = integer_of("sparse_mla_fwd", q_start, "q_start") + dist.get_rank(group) * q.shape[_token_axis(q)]
    deterministic = flag_of("sparse_mla_fwd", deterministic, "deterministic")
    plain = {**options, "causal": causal, "q_start": start if causal else 0}
    results: tuple[Any, Any, Any] = _Attention.apply(
        q, kv, attn_sink, indices, topk_length, group, plain, deterministic
    )
    return results


def attn_dist(q: Any, kv: Any, indices: Any, lse: Any, *, group: Any = None, **options: Any) -> Any:
    """`cupymla.attn_dist` of this rank's queries over everybody's tokens.

    Args:
        q: as of `sparse_mla_fwd` here.
        kv: the same.
        indices: the same.
        lse: [s_q, h_q] float32, as `sparse_mla_fwd` returned it.
        group: the process group, the default one by default.
        **options: those of `cupymla.attn_dist`; `q_start` is the position of the first query of the first rank.

    Returns:
        [s_q, topk] float32 of this rank's queries.

    Raises:
        InputError: what the operator finds.
    """
    if options.get("causal"):
        start = integer_of("attn_dist", options.get("q_start", 0), "q_start")
        options["q_start"] = start + dist.get_rank(group) * q.shape[_token_axis(q)]
    return public(declared("attn_dist"))(q, _gathered(kv, group, _token_axis(q)), indices, lse, **options)


def _token_axis(q: Any) -> int:
    return 0 if q.ndim == 3 else 1


def _gathered(kv: Any, group: Any, token_axis: int) -> Any:
    """Every rank's tokens in order, seen with the axes of `kv`."""
    share = kv.movedim(token_axis, 0).contiguous()
    whole = share.new_empty((share.shape[0] * dist.get_world_size(group), *share.shape[1:]))
    dist.all_gather_into_tensor(whole, share, group=group)
    return whole.movedim(0, token_axis)


def _scattered(dkv: Any, group: Any, token_axis: int) -> Any:
    """The sum over ranks of this rank's tokens."""
    whole = dkv.movedim(token_axis, 0).contiguous()
    share = whole.new_empty((whole.shape[0] // dist.get_world_size(group), *whole.shape[1:]))
    dist.reduce_scatter_tensor(share, whole, group=group)
    return share.movedim(0, token_axis)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        q: Any,
        kv: Any,
        attn_sink: Any,
        indices: Any,
        topk_length: Any,
        group: Any,
        options: dict[str, Any],
        deterministic: bool,
    ) -> Any:
        optional = {"topk_length": topk_length, "attn_sink": attn_sink}
        whole = _gathered(kv, group, _token_axis(q))
        return public(declared("sparse_mla_fwd"))(q, whole, indices, **optional, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, kv, attn_sink, indices, topk_length, ctx.group, ctx.options, ctx.deterministic = inputs
        out, max_logits, lse = output
        ctx.save_for_backward(q, kv, attn_sink, indices, topk_length, out, lse)
        ctx.mark_non_differentiable(max_logits, lse)

    @staticmethod
    def backward(ctx: Any, dout: Any, *_: Any) -> Any:
        # Once: torch.utils.checkpoint recomputes them when they are asked for.
        saved = ctx.saved_tensors
        grads = _Gradients.apply(*saved, dout, ctx.group, ctx.options, ctx.deterministic)
        return (*grads, *(None,) * (8 - len(grads)))


class _Gradients(torch.autograd.Function):  # type: ignore[misc]
    """(dq, dkv, d_sink where there is a sink), as a function of its own: so they are known to depend on all these."""

    @staticmethod
    def forward(
        q: Any,
        kv: Any,
        attn_sink: Any,
        indices: Any,
        topk_length: Any,
        out: Any,
        lse: Any,
        dout: Any,
        group: Any,
        options: dict[str, Any],
        deterministic: bool,
    ) -> Any:
        axis = _token_axis(q)
        optional = {"topk_length": topk_length, "attn_sink": attn_sink, "deterministic": deterministic}
        dq, dkv, *d_sink = public(declared("sparse_mla_bwd"))(
            q,
            _gathered(kv, group, axis),
            out,
            dout.contiguous(),
            lse,
            indices,
            dkv_dtype="float32",
            **optional,
            **options,
        )
        return (dq, _scattered(dkv, group, axis).to(kv.dtype), *d_sink)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """There is nothing to keep for a gradient that there is not."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError("sparse_mla_fwd: a gradient of its gradient", "every device", "first gradients")
