"""Made by `python -m cupymla_lab stubs` from the functions themselves; not to be edited."""
from typing import Any, Literal, overload

from jax import Array
from numpy.typing import NDArray

from .functions import causal_indices as causal_indices
from .training import dsa_attention as dsa_attention
from .functions import export_checks as export_checks
from .functions import register as register

__all__ = [
    "causal_indices",
    "dsa_attention",
    "export_checks",
    "register",
    "sparse_mla_fwd",
    "sparse_mla_bwd",
    "sparse_mla_bwd_phase1",
    "attn_dist",
    "sparse_mla_decode",
    "merge_attention",
    "nvfp4_gemv",
    "quantize_nvfp4",
    "dequantize_nvfp4",
    "swizzle_scales",
    "unswizzle_scales",
    "xl_paged_attention",
    "reshape_and_cache",
    "copy_blocks",
    "rel_shift",
    "matrix_bd",
    "indexer_logits",
    "indexer_topk",
    "indexer_loss",
    "indexer_bwd",
    "indexer_loss_dense",
    "paged_indexer_logits",
    "paged_indexer_topk",
    "topk",
    "invert_indices",
    "quantize_fp8",
    "dequantize_fp8",
    "hadamard",
    "indexer_k_quant_and_cache",
    "gather_indexer_cache",
    "concat_and_cache_mla",
    "gather_mla_cache",
]


def sparse_mla_fwd(
    q: Array | NDArray[Any], kv: Array | NDArray[Any], indices: Array | NDArray[Any], *,
    sm_scale: float | None = None, topk_length: Array | NDArray[Any] | None = None,
    attn_sink: Array | NDArray[Any] | None = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
    lse_base: Literal['e', '2'] = "e", deterministic: bool = False,
) -> tuple[Array, Array, Array]:
    """Attention of each query to the keys that its row of `indices` names.

    `cupymla.sparse_mla_fwd` for JAX arrays, traced or not; see there for the arguments.

    Differentiable in q, kv, attn_sink.

    `deterministic` is that of `sparse_mla_bwd`, by which the gradient is computed.
    """


@overload
def sparse_mla_bwd(
    q: Array | NDArray[Any], kv: Array | NDArray[Any], out: Array | NDArray[Any], dout: Array | NDArray[Any],
    lse: Array | NDArray[Any], indices: Array | NDArray[Any], *, sm_scale: float | None = None,
    topk_length: Array | NDArray[Any] | None = None, attn_sink: None = None, causal: bool = False,
    q_start: int = 0, k_stride: int = 1, lse_base: Literal['e', '2'] = "e", deterministic: bool = False,
    lists: Array | NDArray[Any] | None = None, dkv_dtype: Literal['float32'] | None = None,
    attn_dist_sink: bool = False, return_attn_dist: Literal[False] = False,
) -> tuple[Array, Array]: ...


@overload
def sparse_mla_bwd(
    q: Array | NDArray[Any], kv: Array | NDArray[Any], out: Array | NDArray[Any], dout: Array | NDArray[Any],
    lse: Array | NDArray[Any], indices: Array | NDArray[Any], *, sm_scale: float | None = None,
    topk_length: Array | NDArray[Any] | None = None, attn_sink: None = None, causal: bool = False,
    q_start: int = 0, k_stride: int = 1, lse_base: Literal['e', '2'] = "e", deterministic: bool = False,
    lists: Array | NDArray[Any] | None = None, dkv_dtype: Literal['float32'] | None = None,
    attn_dist_sink: bool = False, return_attn_dist: Literal[True],
) -> tuple[Array, Array, Array]: ...


@overload
def sparse_mla_bwd(
    q: Array | NDArray[Any], kv: Array | NDArray[Any], out: Array | NDArray[Any], dout: Array | NDArray[Any],
    lse: Array | NDArray[Any], indices: Array | NDArray[Any], *, sm_scale: float | None = None,
    topk_length: Array | NDArray[Any] | None = None, attn_sink: None = None, causal: bool = False,
    q_start: int = 0, k_stride: int = 1, lse_base: Literal['e', '2'] = "e", deterministic: bool = False,
    lists: Array | NDArray[Any] | None = None, dkv_dtype: Literal['float32'] | None = None,
    attn_dist_sink: bool = False, return_attn_dist: bool,
) -> tuple[Array, Array] | tuple[Array, Array, Array]: ...


@overload
def sparse_mla_bwd(
    q: Array | NDArray[Any], kv: Array | NDArray[Any], out: Array | NDArray[Any], dout: Array | NDArray[Any],
    lse: Array | NDArray[Any], indices: Array | NDArray[Any], *, sm_scale: float | None = None,
    topk_length: Array | NDArray[Any] | None = None, attn_sink: Array | NDArray[Any], causal: bool = False,
    q_start: int = 0, k_stride: int = 1, lse_base: Literal['e', '2'] = "e", deterministic: bool = False,
    lists: Array | NDArray[Any] | None = None, dkv_dtype: Literal['float32'] | None = None,
    attn_dist_sink: bool = False, return_attn_dist: Literal[False] = False,
) -> tuple[Array, Array, Array]: ...


@overload
def sparse_mla_bwd(
    q: Array | NDArray[Any], kv: Array | NDArray[Any], out: Array | NDArray[Any], dout: Array | NDArray[Any],
    lse: Array | NDArray[Any], indices: Array | NDArray[Any], *, sm_scale: float | None = None,
    topk_length: Array | NDArray[Any] | None = None, attn_sink: Array | NDArray[Any], causal: bool = False,
    q_start: int = 0, k_stride: int = 1, lse_base: Literal['e', '2'] = "e", deterministic: bool = False,
    lists: Array | NDArray[Any] | None = None, dkv_dtype: Literal['float32'] | None = None,
    attn_dist_sink: bool = False, return_attn_dist: Literal[True],
) -> tuple[Array, Array, Array, Array]: ...


@overload
def sparse_mla_bwd(
    q: Array | NDArray[Any], kv: Array | NDArray[Any], out: Array | NDArray[Any], dout: Array | NDArray[Any],
    lse: Array | NDArray[Any], indices: Array | NDArray[Any], *, sm_scale: float | None = None,
    topk_length: Array | NDArray[Any] | None = None, attn_sink: Array | NDArray[Any], causal: bool = False,
    q_start: int = 0, k_stride: int = 1, lse_base: Literal['e', '2'] = "e", deterministic: bool = False,
    lists: Array | NDArray[Any] | None = None, dkv_dtype: Literal['float32'] | None = None,
    attn_dist_sink: bool = False, return_attn_dist: bool,
) -> tuple[Array, Array, Array] | tuple[Array, Array, Array, Array]:
    """Gradients of `sparse_mla_fwd` with respect to q, kv and attn_sink.

    `cupymla.sparse_mla_bwd` for JAX arrays, traced or not; see there for the arguments.

    `return_attn_dist=True` returns, last, what the public function writes to its `attn_dist`.
    """


def sparse_mla_bwd_phase1(
    q: Array | NDArray[Any], kv: Array | NDArray[Any], out: Array | NDArray[Any], dout: Array | NDArray[Any],
    indices: Array | NDArray[Any], *, topk_length: Array | NDArray[Any] | None = None, causal: bool = False,
    q_start: int = 0, k_stride: int = 1,
) -> tuple[Array, Array]:
    """The score of every top-k entry and the row sums of out * dout: the first step of the backward.

    `cupymla.sparse_mla_bwd_phase1` for JAX arrays, traced or not; see there for the arguments.
    """


def attn_dist(
    q: Array | NDArray[Any], kv: Array | NDArray[Any], indices: Array | NDArray[Any], lse: Array | NDArray[Any],
    *, sm_scale: float | None = None, topk_length: Array | NDArray[Any] | None = None, causal: bool = False,
    q_start: int = 0, k_stride: int = 1, lse_base: Literal['e', '2'] = "e",
    normalize: Literal['l1'] | None = None,
) -> Array:
    """The attention weight of each top-k entry, summed over heads: the target of a lightning indexer's KL loss.

    `cupymla.attn_dist` for JAX arrays, traced or not; see there for the arguments.
    """


def sparse_mla_decode(
    q: Array | NDArray[Any], k_cache: Array | NDArray[Any], indices: Array | NDArray[Any], *,
    cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'], topk_length: Array | NDArray[Any] | None = None,
    attn_sink: Array | NDArray[Any] | None = None, extra_k_cache: Array | NDArray[Any] | None = None,
    extra_indices: Array | NDArray[Any] | None = None, extra_topk_length: Array | NDArray[Any] | None = None,
    sm_scale: float | None = None, lse_base: Literal['e', '2'] = "e", splits: int | None = None,
) -> tuple[Array, Array]:
    """Attention of each query row to the slots of a paged cache that its row of `indices` names.

    `cupymla.sparse_mla_decode` for JAX arrays, traced or not; see there for the arguments.
    """


def merge_attention(
    outs: Array | NDArray[Any], lses: Array | NDArray[Any], *, attn_sink: Array | NDArray[Any] | None = None,
    lse_base: Literal['e', '2'] = "e",
) -> tuple[Array, Array]:
    """Merge attention over parts of the keys into attention over all of them.

    `cupymla.merge_attention` for JAX arrays, traced or not; see there for the arguments.
    """


def nvfp4_gemv(
    a: Array | NDArray[Any], b: Array | NDArray[Any], sfa: Array | NDArray[Any],
    sfb: Array | NDArray[Any] | None = None, *, alpha: float | Array | NDArray[Any] | None = None,
    bias: Array | NDArray[Any] | None = None, out_dtype: Any = None, format: Literal['nvfp4', 'mxfp4'] = "nvfp4",
    scale_layout: Literal['linear', '128x4'] = "linear", batch_axis: int = -1,
) -> Array:
    """Multiply a block-scaled 4-bit matrix with 1 to 16 vectors.

    `cupymla.nvfp4_gemv` for JAX arrays, traced or not; see there for the arguments.
    """


def quantize_nvfp4(
    x: Array | NDArray[Any], *, global_scale: float | Array | NDArray[Any] | None = None,
    format: Literal['nvfp4', 'mxfp4'] = "nvfp4", scale_layout: Literal['linear', '128x4'] = "linear",
    batch_axis: int = -1,
) -> tuple[Array, Array]:
    """Quantise a matrix to block-scaled 4-bit codes as `nvfp4_gemv` reads them.

    `cupymla.quantize_nvfp4` for JAX arrays, traced or not; see there for the arguments.

    `global_scale` is a number or an array, not "amax": the factor that it finds would be lost.
    """


def dequantize_nvfp4(
    packed: Array | NDArray[Any], scales: Array | NDArray[Any], *,
    global_scale: float | Array | NDArray[Any] | None = None, format: Literal['nvfp4', 'mxfp4'] = "nvfp4",
    scale_layout: Literal['linear', '128x4'] = "linear", batch_axis: int = -1, out_dtype: Any = None,
) -> Array:
    """The values that block-scaled 4-bit codes stand for: `e2m1 * scale / global_scale`, in float32, then rounded.

    `cupymla.dequantize_nvfp4` for JAX arrays, traced or not; see there for the arguments.
    """


def swizzle_scales(scales: Array | NDArray[Any], *, batch_axis: int = -1) -> Array:
    """Scales in cuBLASLt's 128x4 layout.

    `cupymla.swizzle_scales` for JAX arrays, traced or not; see there for the arguments.
    """


def unswizzle_scales(swizzled: Array | NDArray[Any], rows: int, columns: int, *, batch_axis: int = -1) -> Array:
    """Linear scales out of cuBLASLt's 128x4 layout: the inverse of `swizzle_scales`; padding is ignored.

    `cupymla.unswizzle_scales` for JAX arrays, traced or not; see there for the arguments.
    """


@overload
def xl_paged_attention(
    query: Array | NDArray[Any], k_cache: Array | NDArray[Any], v_cache: Array | NDArray[Any],
    block_tables: Array | NDArray[Any], context_lens: Array | NDArray[Any], *, scale: float | None = None,
    pos_bias_u: Array | NDArray[Any] | None = None, matrix_bd: Array | NDArray[Any] | None = None,
    rel_bias: Array | NDArray[Any] | None = None, rel_extend: Literal['zero', 'clamp'] = "zero",
    pos_bias_v: Array | NDArray[Any] | None = None, pos_emb: Array | NDArray[Any] | None = None,
    alibi_slopes: Array | NDArray[Any] | None = None, bias_scaled: bool = True,
    kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
    kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
    k_scale: float | Array | NDArray[Any] = 1.0, v_scale: float | Array | NDArray[Any] = 1.0,
    return_lse: Literal[False] = False, lse_base: Literal['e', '2'] = "e",
) -> Array: ...


@overload
def xl_paged_attention(
    query: Array | NDArray[Any], k_cache: Array | NDArray[Any], v_cache: Array | NDArray[Any],
    block_tables: Array | NDArray[Any], context_lens: Array | NDArray[Any], *, scale: float | None = None,
    pos_bias_u: Array | NDArray[Any] | None = None, matrix_bd: Array | NDArray[Any] | None = None,
    rel_bias: Array | NDArray[Any] | None = None, rel_extend: Literal['zero', 'clamp'] = "zero",
    pos_bias_v: Array | NDArray[Any] | None = None, pos_emb: Array | NDArray[Any] | None = None,
    alibi_slopes: Array | NDArray[Any] | None = None, bias_scaled: bool = True,
    kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
    kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
    k_scale: float | Array | NDArray[Any] = 1.0, v_scale: float | Array | NDArray[Any] = 1.0,
    return_lse: Literal[True], lse_base: Literal['e', '2'] = "e",
) -> tuple[Array, Array]: ...


@overload
def xl_paged_attention(
    query: Array | NDArray[Any], k_cache: Array | NDArray[Any], v_cache: Array | NDArray[Any],
    block_tables: Array | NDArray[Any], context_lens: Array | NDArray[Any], *, scale: float | None = None,
    pos_bias_u: Array | NDArray[Any] | None = None, matrix_bd: Array | NDArray[Any] | None = None,
    rel_bias: Array | NDArray[Any] | None = None, rel_extend: Literal['zero', 'clamp'] = "zero",
    pos_bias_v: Array | NDArray[Any] | None = None, pos_emb: Array | NDArray[Any] | None = None,
    alibi_slopes: Array | NDArray[Any] | None = None, bias_scaled: bool = True,
    kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
    kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
    k_scale: float | Array | NDArray[Any] = 1.0, v_scale: float | Array | NDArray[Any] = 1.0, return_lse: bool,
    lse_base: Literal['e', '2'] = "e",
) -> Array | tuple[Array, Array]:
    """Attention of one query token per sequence over its paged keys and values.

    `cupymla.xl_paged_attention` for JAX arrays, traced or not; see there for the arguments.
    """


def reshape_and_cache(
    key: Array | NDArray[Any], value: Array | NDArray[Any], k_cache: Array | NDArray[Any],
    v_cache: Array | NDArray[Any], slot_mapping: Array | NDArray[Any], *,
    kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
    kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
    k_scale: float | Array | NDArray[Any] = 1.0, v_scale: float | Array | NDArray[Any] = 1.0,
) -> tuple[Array, Array]:
    """Write new keys and values into the paged cache, in place.

    `cupymla.reshape_and_cache` for JAX arrays, traced or not; see there for the arguments.

    Returns new k_cache and v_cache; the old ones are not changed.
    """


def copy_blocks(
    k_cache: Array | NDArray[Any], v_cache: Array | NDArray[Any], mapping: Array | NDArray[Any],
) -> tuple[Array, Array]:
    """Copy whole blocks inside both caches, in place: for each pair (source, destination) of `mapping`.

    `cupymla.copy_blocks` for JAX arrays, traced or not; see there for the arguments.

    Returns new k_cache and v_cache; the old ones are not changed.
    """


def rel_shift(x: Array | NDArray[Any]) -> Array:
    """Align scores against reversed relative positions with keys: Transformer-XL's shift.

    `cupymla.rel_shift` for JAX arrays, traced or not; see there for the arguments.
    """


def matrix_bd(
    query: Array | NDArray[Any], pos_emb: Array | NDArray[Any], pos_bias_v: Array | NDArray[Any] | None = None, *,
    context_lens: Array | NDArray[Any], max_context: int, rel_extend: Literal['zero', 'clamp'] = "zero",
    out_dtype: Literal['float32', 'float16', 'bfloat16'] = "float32",
) -> Array:
    """The dense relative bias of a decode step, as xl_paged_attention takes it: terms (b) + (d) of Transformer-XL.

    `cupymla.matrix_bd` for JAX arrays, traced or not; see there for the arguments.
    """


def indexer_logits(
    q: Array | NDArray[Any], k: Array | NDArray[Any], weights: Array | NDArray[Any], *,
    q_scale: Array | NDArray[Any] | None = None, k_scale: Array | NDArray[Any] | None = None,
    starts: Array | NDArray[Any] | None = None, ends: Array | NDArray[Any] | None = None, causal: bool = False,
    q_start: int = 0, k_stride: int = 1, relu: bool = True,
) -> Array:
    """Score every key for each query with the lightning indexer's heads.

    `cupymla.indexer_logits` for JAX arrays, traced or not; see there for the arguments.
    """


@overload
def indexer_topk(
    q: Array | NDArray[Any], k: Array | NDArray[Any], weights: Array | NDArray[Any], topk: int, *,
    q_scale: Array | NDArray[Any] | None = None, k_scale: Array | NDArray[Any] | None = None,
    starts: Array | NDArray[Any] | None = None, ends: Array | NDArray[Any] | None = None, causal: bool = False,
    q_start: int = 0, k_stride: int = 1, relu: bool = True, return_values: Literal[False] = False,
    return_lse: Literal[False] = False, lse_base: Literal['e', '2'] = "e",
) -> tuple[Array, Array]: ...


@overload
def indexer_topk(
    q: Array | NDArray[Any], k: Array | NDArray[Any], weights: Array | NDArray[Any], topk: int, *,
    q_scale: Array | NDArray[Any] | None = None, k_scale: Array | NDArray[Any] | None = None,
    starts: Array | NDArray[Any] | None = None, ends: Array | NDArray[Any] | None = None, causal: bool = False,
    q_start: int = 0, k_stride: int = 1, relu: bool = True, return_values: Literal[True],
    return_lse: Literal[False] = False, lse_base: Literal['e', '2'] = "e",
) -> tuple[Array, Array, Array]: ...


@overload
def indexer_topk(
    q: Array | NDArray[Any], k: Array | NDArray[Any], weights: Array | NDArray[Any], topk: int, *,
    q_scale: Array | NDArray[Any] | None = None, k_scale: Array | NDArray[Any] | None = None,
    starts: Array | NDArray[Any] | None = None, ends: Array | NDArray[Any] | None = None, causal: bool = False,
    q_start: int = 0, k_stride: int = 1, relu: bool = True, return_values: Literal[False] = False,
    return_lse: Literal[True], lse_base: Literal['e', '2'] = "e",
) -> tuple[Array, Array, Array]: ...


@overload
def indexer_topk(
    q: Array | NDArray[Any], k: Array | NDArray[Any], weights: Array | NDArray[Any], topk: int, *,
    q_scale: Array | NDArray[Any] | None = None, k_scale: Array | NDArray[Any] | None = None,
    starts: Array | NDArray[Any] | None = None, ends: Array | NDArray[Any] | None = None, causal: bool = False,
    q_start: int = 0, k_stride: int = 1, relu: bool = True, return_values: Literal[True],
    return_lse: Literal[True], lse_base: Literal['e', '2'] = "e",
) -> tuple[Array, Array, Array, Array]: ...


@overload
def indexer_topk(
    q: Array | NDArray[Any], k: Array | NDArray[Any], weights: Array | NDArray[Any], topk: int, *,
    q_scale: Array | NDArray[Any] | None = None, k_scale: Array | NDArray[Any] | None = None,
    starts: Array | NDArray[Any] | None = None, ends: Array | NDArray[Any] | None = None, causal: bool = False,
    q_start: int = 0, k_stride: int = 1, relu: bool = True, return_values: bool, return_lse: bool,
    lse_base: Literal['e', '2'] = "e",
) -> tuple[Array, Array] | tuple[Array, Array, Array] | tuple[Array, Array, Array, Array]:
    """Select each query's keys with the lightning indexer, without holding all scores.

    `cupymla.indexer_topk` for JAX arrays, traced or not; see there for the arguments.
    """


def indexer_loss(
    q: Array | NDArray[Any], k: Array | NDArray[Any], weights: Array | NDArray[Any],
    indices: Array | NDArray[Any], target: Array | NDArray[Any], *,
    topk_length: Array | NDArray[Any] | None = None, lse: Array | NDArray[Any] | None = None,
    causal: bool = False, q_start: int = 0, k_stride: int = 1, relu: bool = True, deterministic: bool = False,
) -> tuple[Array, Array]:
    """The KL divergence of the indexer's softmax over selected keys from a target, and its gradient.

    `cupymla.indexer_loss` for JAX arrays, traced or not; see there for the arguments.

    Differentiable in q, k, weights.

    `deterministic` is that of `indexer_bwd`, by which the gradient is computed.
    """


def indexer_bwd(
    q: Array | NDArray[Any], k: Array | NDArray[Any], weights: Array | NDArray[Any],
    grad_logits: Array | NDArray[Any], indices: Array | NDArray[Any], *,
    topk_length: Array | NDArray[Any] | None = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
    relu: bool = True, deterministic: bool = False, lists: Array | NDArray[Any] | None = None,
    dk_dtype: Literal['float32'] | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of a loss with respect to q, k and weights, from its gradient with respect to scores at selected keys.

    `cupymla.indexer_bwd` for JAX arrays, traced or not; see there for the arguments.
    """


def indexer_loss_dense(
    q: Array | NDArray[Any], k: Array | NDArray[Any], weights: Array | NDArray[Any], mla_q: Array | NDArray[Any],
    mla_kv: Array | NDArray[Any], *, mla_lse: Array | NDArray[Any] | None = None,
    starts: Array | NDArray[Any] | None = None, ends: Array | NDArray[Any] | None = None,
    grad_loss: Array | NDArray[Any] | None = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
    sm_scale: float | None = None, lse_base: Literal['e', '2'] = "e", relu: bool = True,
    dk_dtype: Literal['float32'] | None = None,
) -> tuple[Array, Array, Array, Array]:
    """The KL divergence of the indexer's softmax over all visible keys from dense MLA attention, with its gradients.

    `cupymla.indexer_loss_dense` for JAX arrays, traced or not; see there for the arguments.

    Differentiable in q, k, weights.
    """


def paged_indexer_logits(
    q: Array | NDArray[Any], k_cache: Array | NDArray[Any], weights: Array | NDArray[Any],
    block_tables: Array | NDArray[Any], context_lens: Array | NDArray[Any], *,
    q_scale: Array | NDArray[Any] | None = None, relu: bool = True, max_context: int | None = None,
) -> Array:
    """Score the keys of each request, which lie in pages, for its queries.

    `cupymla.paged_indexer_logits` for JAX arrays, traced or not; see there for the arguments.
    """


@overload
def paged_indexer_topk(
    q: Array | NDArray[Any], k_cache: Array | NDArray[Any], weights: Array | NDArray[Any],
    block_tables: Array | NDArray[Any], context_lens: Array | NDArray[Any], topk: int, *,
    q_scale: Array | NDArray[Any] | None = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
    max_context: int | None = None, return_values: Literal[False] = False, return_lse: Literal[False] = False,
    lse_base: Literal['e', '2'] = "e",
) -> tuple[Array, Array]: ...


@overload
def paged_indexer_topk(
    q: Array | NDArray[Any], k_cache: Array | NDArray[Any], weights: Array | NDArray[Any],
    block_tables: Array | NDArray[Any], context_lens: Array | NDArray[Any], topk: int, *,
    q_scale: Array | NDArray[Any] | None = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
    max_context: int | None = None, return_values: Literal[True], return_lse: Literal[False] = False,
    lse_base: Literal['e', '2'] = "e",
) -> tuple[Array, Array, Array]: ...


@overload
def paged_indexer_topk(
    q: Array | NDArray[Any], k_cache: Array | NDArray[Any], weights: Array | NDArray[Any],
    block_tables: Array | NDArray[Any], context_lens: Array | NDArray[Any], topk: int, *,
    q_scale: Array | NDArray[Any] | None = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
    max_context: int | None = None, return_values: Literal[False] = False, return_lse: Literal[True],
    lse_base: Literal['e', '2'] = "e",
) -> tuple[Array, Array, Array]: ...


@overload
def paged_indexer_topk(
    q: Array | NDArray[Any], k_cache: Array | NDArray[Any], weights: Array | NDArray[Any],
    block_tables: Array | NDArray[Any], context_lens: Array | NDArray[Any], topk: int, *,
    q_scale: Array | NDArray[Any] | None = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
    max_context: int | None = None, return_values: Literal[True], return_lse: Literal[True],
    lse_base: Literal['e', '2'] = "e",
) -> tuple[Array, Array, Array, Array]: ...


@overload
def paged_indexer_topk(
    q: Array | NDArray[Any], k_cache: Array | NDArray[Any], weights: Array | NDArray[Any],
    block_tables: Array | NDArray[Any], context_lens: Array | NDArray[Any], topk: int, *,
    q_scale: Array | NDArray[Any] | None = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
    max_context: int | None = None, return_values: bool, return_lse: bool, lse_base: Literal['e', '2'] = "e",
) -> tuple[Array, Array] | tuple[Array, Array, Array] | tuple[Array, Array, Array, Array]:
    """Select each query's keys, which lie in pages, with the lightning indexer.

    `cupymla.paged_indexer_topk` for JAX arrays, traced or not; see there for the arguments.
    """


@overload
def topk(
    scores: Array | NDArray[Any], topk: int, *, starts: Array | NDArray[Any] | None = None,
    ends: Array | NDArray[Any] | None = None, order: Literal['index', 'score'] = "index",
    return_values: Literal[False] = False,
) -> tuple[Array, Array]: ...


@overload
def topk(
    scores: Array | NDArray[Any], topk: int, *, starts: Array | NDArray[Any] | None = None,
    ends: Array | NDArray[Any] | None = None, order: Literal['index', 'score'] = "index",
    return_values: Literal[True],
) -> tuple[Array, Array, Array]: ...


@overload
def topk(
    scores: Array | NDArray[Any], topk: int, *, starts: Array | NDArray[Any] | None = None,
    ends: Array | NDArray[Any] | None = None, order: Literal['index', 'score'] = "index", return_values: bool,
) -> tuple[Array, Array] | tuple[Array, Array, Array]:
    """Select the largest scores of each row, exactly.

    `cupymla.topk` for JAX arrays, traced or not; see there for the arguments.
    """


def invert_indices(
    indices: Array | NDArray[Any], s_kv: int, *, topk_length: Array | NDArray[Any] | None = None,
) -> Array:
    """List by token which top-k entries of the queries name it.

    `cupymla.invert_indices` for JAX arrays, traced or not; see there for the arguments.
    """


def quantize_fp8(
    x: Array | NDArray[Any], *, group: int = 128, scale_rule: Literal['amax', 'pow2'] = "amax",
) -> tuple[Array, Array]:
    """Quantise floats to fp8 e4m3 with a scale for each group of neighbouring channels.

    `cupymla.quantize_fp8` for JAX arrays, traced or not; see there for the arguments.
    """


def dequantize_fp8(codes: Array | NDArray[Any], scales: Array | NDArray[Any], *, group: int = 128) -> Array:
    """Turn fp8 e4m3 codes and their scales into bfloat16: one fp32 product each, rounded to nearest even.

    `cupymla.dequantize_fp8` for JAX arrays, traced or not; see there for the arguments.
    """


def hadamard(x: Array | NDArray[Any]) -> Array:
    """Rotate rows by the Hadamard matrix: out[i] = D^-1/2 sum over j of (-1)^popcount(i & j) x[j].

    `cupymla.hadamard` for JAX arrays, traced or not; see there for the arguments.
    """


def indexer_k_quant_and_cache(
    k: Array | NDArray[Any], cache: Array | NDArray[Any], slot_mapping: Array | NDArray[Any], *,
    scale_rule: Literal['amax', 'pow2'] = "amax",
) -> Array:
    """Quantise keys of the lightning indexer and write them into their slots of a paged cache, in place.

    `cupymla.indexer_k_quant_and_cache` for JAX arrays, traced or not; see there for the arguments.

    Returns new cache; the old ones are not changed.
    """


def gather_indexer_cache(
    cache: Array | NDArray[Any], slots: Array | NDArray[Any] | None = None, *,
    block_tables: Array | NDArray[Any] | None = None, cu_lens: Array | NDArray[Any] | None = None,
    rows: int | None = None,
) -> tuple[Array, Array]:
    """Read keys of the lightning indexer and their scales out of a paged cache, as `indexer_logits` takes them.

    `cupymla.gather_indexer_cache` for JAX arrays, traced or not; see there for the arguments.
    """


def concat_and_cache_mla(
    kv_c: Array | NDArray[Any], k_pe: Array | NDArray[Any] | None, cache: Array | NDArray[Any],
    slot_mapping: Array | NDArray[Any], *, cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'],
    scale_rule: Literal['amax', 'pow2'] | None = None,
) -> Array:
    """Write latents and rotary parts of keys into their slots of a paged cache, in place.

    `cupymla.concat_and_cache_mla` for JAX arrays, traced or not; see there for the arguments.

    Returns new cache; the old ones are not changed.
    """


def gather_mla_cache(
    cache: Array | NDArray[Any], slots: Array | NDArray[Any] | None = None, *,
    cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'], block_tables: Array | NDArray[Any] | None = None,
    cu_lens: Array | NDArray[Any] | None = None, rows: int | None = None,
) -> Array:
    """Read rows of latents and rotary parts out of a paged cache, as bfloat16.

    `cupymla.gather_mla_cache` for JAX arrays, traced or not; see there for the arguments.
    """
