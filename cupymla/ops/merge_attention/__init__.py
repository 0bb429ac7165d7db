"""merge_attention: one attention output of those over parts of the keys."""

from __future__ import annotations

from typing import Any, Literal

from ..operator import operator
from .run import CALLS

__all__ = ["merge_attention"]


@operator(CALLS)
def merge_attention(
    outs: Any,
    lses: Any,
    *,
    attn_sink: Any = None,
    lse_base: Literal["e", "2"] = "e",
    out: Any = None,
    lse: Any = None,
    stream: object = None,
) -> tuple[Any, Any]:
    """Merge attention over parts of the keys into attention over all of them.

        lse = log sum exp(lses[p])
        out = sum exp(lses[p] - lse) * outs[p] * exp(lse) / (exp(lse) + exp(attn_sink))

    Part p is empty where lses[p] is +inf or -inf: its weight is 0, and outs[p] is not read there. Where all parts are
    empty, out is 0 and lse +inf. Parts are added in their order, in fp32, so that the same parts give the same bits.

    Args:
        outs: [P, ..., h, d_v] bfloat16, float16 or float32, P >= 1 parts, none, one or two axes between P and h, d_v a
            multiple of 8, the last axis contiguous.
        lses: [P, ..., h] float32, as attention without a sink returns it, of any strides.
        attn_sink: [h] float32, a score per head that takes part in the softmax and has value 0; +-inf allowed. It is
            applied here alone: ranks that hold parts of the keys call attention without it.
        lse_base: base of the logarithm in lses and lse. The sink is in natural units with either.
        out: array to write, [..., h, d_v] in the dtype of outs, the last axis contiguous.
        lse: array to write, [..., h] float32, of any strides.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of the framework of outs by default. It means nothing on the CPU.

    Returns:
        (out, lse), in the framework of outs; lse does not count the sink.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867: a softmax over
    parts from their maxima and sums.
    """
    return CALLS((outs, lses, attn_sink), (lse_base,), (out, lse), False, stream)  # type: ignore[no-any-return]
