"""xl_paged_attention: one decode step over a paged KV cache with Transformer-XL relative positions; its related
functions."""

from __future__ import annotations

from typing import Any, Literal

from ..operator import operator
from .cache import COPY_BLOCKS, RESHAPE_AND_CACHE
from .relative import MATRIX_BD, REL_SHIFT
from .run import CALLS

__all__ = ["copy_blocks", "matrix_bd", "rel_shift", "reshape_and_cache", "xl_paged_attention"]


@operator(CALLS)
def xl_paged_attention(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    context_lens: Any,
    *,
    scale: float | None = None,
    pos_bias_u: Any = None,
    matrix_bd: Any = None,
    rel_bias: Any = None,
    rel_extend: Literal["zero", "clamp"] = "zero",
    pos_bias_v: Any = None,
    pos_emb: Any = None,
    alibi_slopes: Any = None,
    bias_scaled: bool = True,
    kv_layout: Literal["vllm", "NHD", "HND"] = "vllm",
    kv_dtype: Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"] | None = None,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    return_lse: bool = False,
    lse_base: Literal["e", "2"] = "e",
    check_indices: bool = False,
    out: Any = None,
    lse: Any = None,
    stream: object = None,
) -> Any:
    """Attention of one query token per sequence over its paged keys and values.

    For head h of sequence s with n keys, n = context_lens[s]:

        S_j = scale * ((q + u) . k_j + bias_j)          j = 0 .. n-1
        out = sum_j softmax(S)_j * v_j

    with bias_scaled=False, S_j = scale * (q + u) . k_j + bias_j. Query head h reads KV head
    h // (num_heads / num_kv_heads). At most one form of bias; d = n - 1 - j is the distance from the newest key:

    - `matrix_bd`: bias_j = matrix_bd[s, h, j];
    - `rel_bias`: bias_j = rel_bias[s, h, d];
    - `pos_emb`, with or without `pos_bias_v`: bias_j = (q + v) . pos_emb[d, h];
    - `alibi_slopes`: bias_j = alibi_slopes[h] * (j - (n - 1)), zero at the newest key. (The ALiBi paper adds it after
      the scale: bias_scaled=False.)

    Past the extent of `rel_bias` or `pos_emb`, rel_extend="zero" takes 0 and "clamp" the last entry.

    A key exists when j < n and its table entry names a block of the cache; other keys take no part and their memory,
    bias included, is never read into a result, so it may hold NaN. A length is held to 0 .. capacity, where capacity
    is max_blocks * block_size, or max_context when `matrix_bd` has fewer columns; distances count from the held
    length. A row without a key, or whose scores are all -inf, gives out 0 and lse +inf.

    Args:
        query: [num_seqs, num_heads, head_size], float32, float16 or bfloat16; head_size 32, 64, 80, 96, 112, 120, 128,
            192 or 256. Rows contiguous, other strides multiples of 16 bytes. num_seqs * num_heads up to
            2**31 - 64.
        k_cache: [num_blocks, num_kv_heads, head_size/x, block_size, x], x the elements in 16 bytes; NHD and HND caches
            as kv_layout says. The query's dtype, float8_e4m3fn or float8_e5m2, or uint8 with kv_dtype.
            block_size 1 to 256, num_blocks up to 2**31 - 1. The axes after num_kv_heads contiguous together ("vllm"),
            or the last axis contiguous.
        v_cache: [num_blocks, num_kv_heads, head_size, block_size], the k_cache's dtype.
        block_tables: int32 [num_seqs, max_blocks], one entry per block of the sequence, last axis contiguous. Entries
            past a sequence's last key may hold anything.
        context_lens: int32 [num_seqs].
        scale: default head_size ** -0.5.
        pos_bias_u: u, [num_heads, head_size], the query's dtype or float32.
        matrix_bd: [num_seqs, num_heads, max_context], the query's dtype or float32; last axis contiguous, other strides
            free.
        rel_bias: [num_seqs, num_heads, extent], the query's dtype or float32.
        rel_extend: "zero", or "clamp" beside `rel_bias` or `pos_emb`.
        pos_bias_v: v, [num_heads, head_size], the query's dtype or float32; needs pos_emb.
        pos_emb: [extent, num_heads, head_size], the query's dtype; row d is the projected relative position encoding
            W_kR R_d of distance d. A stride of zero shares it between heads.
        alibi_slopes: float32 [num_heads].
        bias_scaled: whether the scale multiplies the bias as well.
        kv_layout: "vllm", "NHD" [num_blocks, block_size, num_kv_heads, head_size] or "HND" [num_blocks, num_kv_heads,
            block_size, head_size], for both caches.
        kv_dtype: "float8_e4m3fn" or "float8_e5m2", what a uint8 cache holds.
        k_scale: a key is its cache element times this: a number, or float32 [], [1] or [num_kv_heads]; fp8 caches only.
        v_scale: the same for values.
        return_lse: also return log(sum_j exp(S_j)); implied by `lse`.
        lse_base: "e" for the natural logarithm, "2" for log2.
        check_indices: raise InputError for lengths and used table entries that are out of range.
        out: where to write [num_seqs, num_heads, head_size] in the query's dtype.
        lse: where to write float32 [num_seqs, num_heads].
        stream: the CUDA stream, as an address or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; by default
            the current one of the first array's framework. It means nothing on the CPU.

    Returns:
        out, or (out, lse). On the CPU both are computed in float64 and rounded once.

    Raises:
        InputError: an argument cannot be used as given; nothing has been computed.
        UnsupportedError: no kernel serves the arrays' device.

    Source: Dai et al. 2019, "Transformer-XL", arXiv:1901.02860, section 3.3, for the score; Kwon et al. 2023,
    arXiv:2309.06180, for the paged cache.
    """
    arrays = (
        *(query, k_cache, v_cache, block_tables, context_lens, pos_bias_u, matrix_bd, rel_bias),
        *(pos_bias_v, pos_emb, alibi_slopes, k_scale, v_scale),
    )
    options = (scale, rel_extend, bias_scaled, kv_layout, kv_dtype, return_lse, lse_base)
    return CALLS(arrays, options, (out, lse), check_indices, stream)


@operator(RESHAPE_AND_CACHE)
def reshape_and_cache(
    key: Any,
    value: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    *,
    kv_layout: Literal["vllm", "NHD", "HND"] = "vllm",
    kv_dtype: Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"] | None = None,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    check_indices: bool = False,
    stream: object = None,
) -> tuple[Any, Any]:
    """Write new keys and values into the paged cache, in place.

    Token t goes to block slot // block_size at offset slot % block_size, slot = slot_mapping[t]; a slot outside the
    cache, such as -1, skips the token. When two tokens name one slot, either may be the one that stays.

    Args:
        key: [num_tokens, num_kv_heads, head_size], float32, float16 or bfloat16; rows contiguous, other strides
            multiples of 16 bytes.
        value: the same shape and dtype.
        k_cache: as in xl_paged_attention, writable: key's dtype, or fp8.
        v_cache: the same.
        slot_mapping: int32 or int64 [num_tokens].
        kv_layout: as in xl_paged_attention.
        kv_dtype: as in xl_paged_attention.
        k_scale: for fp8 caches, the element written is key / k_scale in fp32, saturated to the largest finite value
            and rounded to nearest even (NaN stays NaN): a number other than 0, or float32 [], [1] or [num_kv_heads].
        v_scale: the same for values.
        check_indices: raise InputError for slots that are neither -1 nor in the cache.
        stream: the CUDA stream, as an address or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; by default
            the current one of the first array's framework. It means nothing on the CPU.

    Returns:
        (k_cache, v_cache), the arrays that were given.

    Raises:
        InputError: an argument cannot be used as given; nothing has been written.
        UnsupportedError: no kernel serves the arrays' device.
    """
    arrays = (key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return RESHAPE_AND_CACHE(arrays, (kv_layout, kv_dtype), (), check_indices, stream)  # type: ignore[no-any-return]


@operator(COPY_BLOCKS)
def copy_blocks(
    k_cache: Any, v_cache: Any, mapping: Any, *, check_indices: bool = False, stream: object = None
) -> tuple[Any, Any]:
    """Copy whole blocks inside both caches, in place: for each pair (source, destination) of `mapping`.

    Pairs that name a block outside the cache are skipped. A destination that appears twice, or that is also a source,
    ends with unspecified contents.

    Args:
        k_cache: rank 4 or 5, blocks first, in any layout of xl_paged_attention; writable, last axis contiguous.
        v_cache: rank 4, the same number of blocks and dtype.
        mapping: int32 or int64 [num_pairs, 2].
        check_indices: raise InputError for blocks out of range and for the unspecified pairs above.
        stream: the CUDA stream, as an address or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; by default
            the current one of the first array's framework. It means nothing on the CPU.

    Returns:
        (k_cache, v_cache), the arrays that were given.

    Raises:
        InputError: an argument cannot be used as given; nothing has been written.
        UnsupportedError: no kernel serves the arrays' device.
    """
    return COPY_BLOCKS((k_cache, v_cache, mapping), (), (), check_indices, stream)  # type: ignore[no-any-return]


@operator(REL_SHIFT)
def rel_shift(x: Any, *, out: Any = None, stream: object = None) -> Any:
    """Align scores against reversed relative positions with keys: Transformer-XL's shift.

    Row i of x [..., q_len, k_len] holds query i's score at column c for the distance k_len - 1 - c, the order in
    which (q + v) meets the encodings R_{k_len-1} .. R_0. The last query sits on the last key, so query i is at key
    i + k_len - q_len, and its distance to key j is i + k_len - q_len - j. Hence

        y[..., i, j] = x[..., i, j + q_len - 1 - i]     where that column is below k_len, else 0

    The zeros are the keys after query i. (The reshape trick of the paper's code leaves other rows' scores there, for
    its causal mask to hide.) With q_len 1, as in decoding, y = x.

    Args:
        x: rank 2 to 4, [..., q_len, k_len], float32, float16 or bfloat16, any strides.
        out: where to write the result, x's shape and dtype.
        stream: the CUDA stream, as an address or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; by default
            the current one of the first array's framework. It means nothing on the CPU.

    Returns:
        y, of x's shape and dtype.

    Raises:
        InputError: an argument cannot be used as given.
        UnsupportedError: no kernel serves the array's device.

    Source: Dai et al. 2019, "Transformer-XL", arXiv:1901.02860, appendix B.
    """
    return REL_SHIFT((x,), (), (out,), False, stream)


@operator(MATRIX_BD)
def matrix_bd(
    query: Any,
    pos_emb: Any,
    pos_bias_v: Any = None,
    *,
    context_lens: Any,
    max_context: int,
    rel_extend: Literal["zero", "clamp"] = "zero",
    out_dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    out: Any = None,
    stream: object = None,
) -> Any:
    """The dense relative bias of a decode step, as xl_paged_attention takes it: terms (b) + (d) of Transformer-XL.

    With n = context_lens[s] held to 0 .. max_context:

        matrix_bd[s, h, j] = (q[s, h] + v[h]) . pos_emb[n - 1 - j, h]      for j < n, else 0

    Args:
        query: [num_seqs, num_heads, head_size], float32, float16 or bfloat16; as in xl_paged_attention.
        pos_emb: [extent, num_heads, head_size], the query's dtype; row d is the projected encoding of distance d.
        pos_bias_v: v, [num_heads, head_size], the query's dtype or float32.
        context_lens: int32 [num_seqs].
        max_context: columns of the result, up to 2**31 - 64.
        rel_extend: past the extent of pos_emb, "zero" gives 0 and "clamp" takes its last row.
        out_dtype: "float32" or the query's dtype.
        out: where to write the result; its dtype is out_dtype.
        stream: the CUDA stream, as an address or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; by default
            the current one of the first array's framework. It means nothing on the CPU.

    Returns:
        [num_seqs, num_heads, max_context] in out_dtype.

    Raises:
        InputError: an argument cannot be used as given.
        UnsupportedError: no kernel serves the arrays' device.

    Source: Dai et al. 2019, "Transformer-XL", arXiv:1901.02860, section 3.3.
    """
    arrays = (query, pos_emb, context_lens, pos_bias_v)
    return MATRIX_BD(arrays, (max_context, rel_extend, out_dtype), (out,), False, stream)
