"""sparse_mla_decode: sparse MLA attention over paged caches."""

from __future__ import annotations

from typing import Any, Literal

from ..operator import operator
from .run import CALLS

__all__ = ["sparse_mla_decode"]


@operator(CALLS)
def sparse_mla_decode(
    q: Any,
    k_cache: Any,
    indices: Any,
    *,
    cache_format: Literal["bf16", "v32_fp8", "v4_fp8"],
    topk_length: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices: Any = None,
    extra_topk_length: Any = None,
    sm_scale: float | None = None,
    lse_base: Literal["e", "2"] = "e",
    splits: int | None = None,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    check_indices: bool = False,
    stream: object = None,
) -> tuple[Any, Any]:
    """Attention of each query row to the slots of a paged cache that its row of `indices` names.

    Entry e of row (b, j) names slot s = indices[b, j, e]: token s % page of block s // page. It is valid when
    0 <= s < blocks * page and e < topk_length. Invalid entries may hold any int32 and are never followed. A slot named
    twice counts twice. A second source, `extra_k_cache` with `extra_indices`, joins the same softmax.

        score = sm_scale * q . key[s]
        lse   = log(sum exp(score))
        out   = sum exp(score - lse) * key[s, :512] * exp(lse) / (exp(lse) + exp(attn_sink))

    A row without a valid entry gets out 0 and lse +inf. Keys are code * scale with the scale in float32, rounded to q's
    dtype for the products; with float16 q a key past +-65504 is infinite. A NaN in a selected key reaches the out of
    its own row alone.

    Args:
        q: [B, n, h_q, d_qk] bfloat16 or float16, h_q 1 to 128, d_qk that of the cache: 576 for "v32_fp8", 512 for
            "v4_fp8", either for "bf16". The last axis is contiguous, other strides are any multiple of 16 bytes, the
            address is a multiple of 16 bytes.
        k_cache: [blocks, page, d_qk] bfloat16, or [blocks, page, 656] or [blocks, page, 584] bytes, uint8 or
            float8_e4m3fn; an axis of extent 1 may stand before the last one. page >= 1. A block is contiguous, the
            distance of blocks and the address are multiples of 16 bytes, of 8 for "v4_fp8".
        indices: [B, n, topk] int32; the last axis is contiguous.
        cache_format: "bf16", "v32_fp8" or "v4_fp8", of both caches. Bytes of "v32_fp8" are, per token, 512 e4m3, four
            float32 scales, each of 128 channels, and 64 bfloat16. Bytes of a block of "v4_fp8" are rows of 448 e4m3 and
            64 bfloat16, then eight bytes for each token: seven exponents, each of 64 channels, with bias 127 (255 is
            NaN), and one that is not read.
        topk_length: [B] or [B, n] int32, how many leading entries of each row of indices count; any values.
        attn_sink: [h_q] float32, a score per head that takes part in the softmax and has value 0; +-inf allowed. It
            changes out alone.
        extra_k_cache: a second cache of the same format, whose page may be another one.
        extra_indices: [B, n, extra_topk] int32, slots of it; the last axis is contiguous.
        extra_topk_length: [B] or [B, n] int32, as topk_length.
        sm_scale: factor of the scores, |sm_scale| <= 2**126; d_qk ** -0.5 by default.
        lse_base: "e" or "2": lse in natural units or as a base-2 logarithm.
        splits: in how many parts a GPU cuts the entries of a row, 1 to 16. With it the bits of a row depend on the row
            alone, not on the rest of its batch. By default what suits the GPU and the number of rows.
        out: array to write, [B, n, h_q, 512] in q's dtype, with strides as q's may have.
        lse: array to write, [B, n, h_q] float32, any strides.
        workspace: memory to work in, [m] uint8, contiguous, at an address that is a multiple of 16 bytes, m at least
            `sparse_mla_decode.workspace_bytes(...)` of the same arguments: at most 64 MiB, 0 with `splits`. Allocated
            by the framework otherwise.
        check_indices: raise InputError for a slot outside [-1, blocks * page) within topk_length, of either source.
            Reads the indices, so a call on a GPU waits for it and cannot be captured into a graph.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of q's framework by default. It means nothing on the CPU.

    Returns:
        (out, lse) in q's framework: out in q's dtype; lse, without the sink, float32.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: multi-head latent attention in its absorbed form, DeepSeek-V2 (arXiv:2405.04434) section 2.1; token
    selection, DeepSeek-V3.2; formats and interface follow FlashMLA's sparse decoding.
    """
    inputs = (q, k_cache, indices, topk_length, attn_sink, extra_k_cache, extra_indices, extra_topk_length)
    options = (cache_format, sm_scale, lse_base, splits)
    return CALLS(inputs, options, (out, lse, workspace), check_indices, stream)  # type: ignore[no-any-return]
