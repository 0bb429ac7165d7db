"""Made by `python -m cupymla_lab stubs` from the functions themselves; not to be edited."""
from typing import Any, Literal, overload

from torch import Tensor

from .training import dsa_attention as dsa_attention
from .functions import register as register

__all__ = [
    "dsa_attention",
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
    q: Tensor, kv: Tensor, indices: Tensor, *, sm_scale: float | None = None, topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
    lse_base: Literal['e', '2'] = "e", deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each query to the keys that its row of `indices` names.

    `cupymla.sparse_mla_fwd` as a torch operator; see there for the arguments.

    Differentiable in q, kv, attn_sink.

    `deterministic` is that of `sparse_mla_bwd`, by which the gradient is computed.
    """


@overload
def sparse_mla_bwd(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, lse: Tensor, indices: Tensor, *,
    sm_scale: float | None = None, topk_length: Tensor | None = None, attn_sink: None = None,
    causal: bool = False, q_start: int = 0, k_stride: int = 1, lse_base: Literal['e', '2'] = "e",
    deterministic: bool = False, lists: Tensor | None = None, dkv_dtype: Literal['float32'] | None = None,
    attn_dist_sink: bool = False, return_attn_dist: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...


@overload
def sparse_mla_bwd(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, lse: Tensor, indices: Tensor, *,
    sm_scale: float | None = None, topk_length: Tensor | None = None, attn_sink: None = None,
    causal: bool = False, q_start: int = 0, k_stride: int = 1, lse_base: Literal['e', '2'] = "e",
    deterministic: bool = False, lists: Tensor | None = None, dkv_dtype: Literal['float32'] | None = None,
    attn_dist_sink: bool = False, return_attn_dist: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def sparse_mla_bwd(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, lse: Tensor, indices: Tensor, *,
    sm_scale: float | None = None, topk_length: Tensor | None = None, attn_sink: None = None,
    causal: bool = False, q_start: int = 0, k_stride: int = 1, lse_base: Literal['e', '2'] = "e",
    deterministic: bool = False, lists: Tensor | None = None, dkv_dtype: Literal['float32'] | None = None,
    attn_dist_sink: bool = False, return_attn_dist: bool,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]: ...


@overload
def sparse_mla_bwd(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, lse: Tensor, indices: Tensor, *,
    sm_scale: float | None = None, topk_length: Tensor | None = None, attn_sink: Tensor, causal: bool = False,
    q_start: int = 0, k_stride: int = 1, lse_base: Literal['e', '2'] = "e", deterministic: bool = False,
    lists: Tensor | None = None, dkv_dtype: Literal['float32'] | None = None, attn_dist_sink: bool = False,
    return_attn_dist: Literal[False] = False,
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def sparse_mla_bwd(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, lse: Tensor, indices: Tensor, *,
    sm_scale: float | None = None, topk_length: Tensor | None = None, attn_sink: Tensor, causal: bool = False,
    q_start: int = 0, k_stride: int = 1, lse_base: Literal['e', '2'] = "e", deterministic: bool = False,
    lists: Tensor | None = None, dkv_dtype: Literal['float32'] | None = None, attn_dist_sink: bool = False,
    return_attn_dist: Literal[True],
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


@overload
def sparse_mla_bwd(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, lse: Tensor, indices: Tensor, *,
    sm_scale: float | None = None, topk_length: Tensor | None = None, attn_sink: Tensor, causal: bool = False,
    q_start: int = 0, k_stride: int = 1, lse_base: Literal['e', '2'] = "e", deterministic: bool = False,
    lists: Tensor | None = None, dkv_dtype: Literal['float32'] | None = None, attn_dist_sink: bool = False,
    return_attn_dist: bool,
) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `sparse_mla_fwd` with respect to q, kv and attn_sink.

    `cupymla.sparse_mla_bwd` as a torch operator; see there for the arguments.

    `return_attn_dist=True` returns, last, what the public function writes to its `attn_dist`.
    """


def sparse_mla_bwd_phase1(
    q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, indices: Tensor, *, topk_length: Tensor | None = None,
    causal: bool = False, q_start: int = 0, k_stride: int = 1,
) -> tuple[Tensor, Tensor]:
    """The score of every top-k entry and the row sums of out * dout: the first step of the backward.

    `cupymla.sparse_mla_bwd_phase1` as a torch operator; see there for the arguments.
    """


def attn_dist(
    q: Tensor, kv: Tensor, indices: Tensor, lse: Tensor, *, sm_scale: float | None = None,
    topk_length: Tensor | None = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
    lse_base: Literal['e', '2'] = "e", normalize: Literal['l1'] | None = None,
) -> Tensor:
    """The attention weight of each top-k entry, summed over heads: the target of a lightning indexer's KL loss.

    `cupymla.attn_dist` as a torch operator; see there for the arguments.
    """


def sparse_mla_decode(
    q: Tensor, k_cache: Tensor, indices: Tensor, *, cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'],
    topk_length: Tensor | None = None, attn_sink: Tensor | None = None, extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None, extra_topk_length: Tensor | None = None, sm_scale: float | None = None,
    lse_base: Literal['e', '2'] = "e", splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query row to the slots of a paged cache that its row of `indices` names.

    `cupymla.sparse_mla_decode` as a torch operator; see there for the arguments.
    """


def merge_attention(
    outs: Tensor, lses: Tensor, *, attn_sink: Tensor | None = None, lse_base: Literal['e', '2'] = "e",
) -> tuple[Tensor, Tensor]:
    """Merge attention over parts of the keys into attention over all of them.

    `cupymla.merge_attention` as a torch operator; see there for the arguments.
    """


def nvfp4_gemv(
    a: Tensor, b: Tensor, sfa: Tensor, sfb: Tensor | None = None, *, alpha: float | Tensor | None = None,
    bias: Tensor | None = None, out_dtype: Any = None, format: Literal['nvfp4', 'mxfp4'] = "nvfp4",
    scale_layout: Literal['linear', '128x4'] = "linear", batch_axis: int = -1,
) -> Tensor:
    """Multiply a block-scaled 4-bit matrix with 1 to 16 vectors.

    `cupymla.nvfp4_gemv` as a torch operator; see there for the arguments.
    """


def quantize_nvfp4(
    x: Tensor, *, global_scale: float | Tensor | None = None, format: Literal['nvfp4', 'mxfp4'] = "nvfp4",
    scale_layout: Literal['linear', '128x4'] = "linear", batch_axis: int = -1,
) -> tuple[Tensor, Tensor]:
    """Quantise a matrix to block-scaled 4-bit codes as `nvfp4_gemv` reads them.

    `cupymla.quantize_nvfp4` as a torch operator; see there for the arguments.

    `global_scale` is a number or an array, not "amax": the factor that it finds would be lost.
    """


def dequantize_nvfp4(
    packed: Tensor, scales: Tensor, *, global_scale: float | Tensor | None = None,
    format: Literal['nvfp4', 'mxfp4'] = "nvfp4", scale_layout: Literal['linear', '128x4'] = "linear",
    batch_axis: int = -1, out_dtype: Any = None,
) -> Tensor:
    """The values that block-scaled 4-bit codes stand for: `e2m1 * scale / global_scale`, in float32, then rounded.

    `cupymla.dequantize_nvfp4` as a torch operator; see there for the arguments.
    """


def swizzle_scales(scales: Tensor, *, batch_axis: int = -1) -> Tensor:
    """Scales in cuBLASLt's 128x4 layout.

    `cupymla.swizzle_scales` as a torch operator; see there for the arguments.
    """


def unswizzle_scales(swizzled: Tensor, rows: int, columns: int, *, batch_axis: int = -1) -> Tensor:
    """Linear scales out of cuBLASLt's 128x4 layout: the inverse of `swizzle_scales`; padding is ignored.

    `cupymla.unswizzle_scales` as a torch operator; see there for the arguments.
    """


@overload
def xl_paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, *,
    scale: float | None = None, pos_bias_u: Tensor | None = None, matrix_bd: Tensor | None = None,
    rel_bias: Tensor | None = None, rel_extend: Literal['zero', 'clamp'] = "zero",
    pos_bias_v: Tensor | None = None, pos_emb: Tensor | None = None, alibi_slopes: Tensor | None = None,
    bias_scaled: bool = True, kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
    kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
    k_scale: float | Tensor = 1.0, v_scale: float | Tensor = 1.0, return_lse: Literal[False] = False,
    lse_base: Literal['e', '2'] = "e",
) -> Tensor: ...


@overload
def xl_paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, *,
    scale: float | None = None, pos_bias_u: Tensor | None = None, matrix_bd: Tensor | None = None,
    rel_bias: Tensor | None = None, rel_extend: Literal['zero', 'clamp'] = "zero",
    pos_bias_v: Tensor | None = None, pos_emb: Tensor | None = None, alibi_slopes: Tensor | None = None,
    bias_scaled: bool = True, kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
    kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
    k_scale: float | Tensor = 1.0, v_scale: float | Tensor = 1.0, return_lse: Literal[True],
    lse_base: Literal['e', '2'] = "e",
) -> tuple[Tensor, Tensor]: ...


@overload
def xl_paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, *,
    scale: float | None = None, pos_bias_u: Tensor | None = None, matrix_bd: Tensor | None = None,
    rel_bias: Tensor | None = None, rel_extend: Literal['zero', 'clamp'] = "zero",
    pos_bias_v: Tensor | None = None, pos_emb: Tensor | None = None, alibi_slopes: Tensor | None = None,
    bias_scaled: bool = True, kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
    kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
    k_scale: float | Tensor = 1.0, v_scale: float | Tensor = 1.0, return_lse: bool,
    lse_base: Literal['e', '2'] = "e",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of one query token per sequence over its paged keys and values.

    `cupymla.xl_paged_attention` as a torch operator; see there for the arguments.
    """


def reshape_and_cache(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *,
    kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
    kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
    k_scale: float | Tensor = 1.0, v_scale: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """Write new keys and values into the paged cache, in place.

    `cupymla.reshape_and_cache` as a torch operator; see there for the arguments.
    """


def copy_blocks(k_cache: Tensor, v_cache: Tensor, mapping: Tensor) -> tuple[Tensor, Tensor]:
    """Copy whole blocks inside both caches, in place: for each pair (source, destination) of `mapping`.

    `cupymla.copy_blocks` as a torch operator; see there for the arguments.
    """


def rel_shift(x: Tensor) -> Tensor:
    """Align scores against reversed relative positions with keys: Transformer-XL's shift.

    `cupymla.rel_shift` as a torch operator; see there for the arguments.
    """


def matrix_bd(
    query: Tensor, pos_emb: Tensor, pos_bias_v: Tensor | None = None, *, context_lens: Tensor, max_context: int,
    rel_extend: Literal['zero', 'clamp'] = "zero",
    out_dtype: Literal['float32', 'float16', 'bfloat16'] = "float32",
) -> Tensor:
    """The dense relative bias of a decode step, as xl_paged_attention takes it: terms (b) + (d) of Transformer-XL.

    `cupymla.matrix_bd` as a torch operator; see there for the arguments.
    """


def indexer_logits(
    q: Tensor, k: Tensor, weights: Tensor, *, q_scale: Tensor | None = None, k_scale: Tensor | None = None,
    starts: Tensor | None = None, ends: Tensor | None = None, causal: bool = False, q_start: int = 0,
    k_stride: int = 1, relu: bool = True,
) -> Tensor:
    """Score every key for each query with the lightning indexer's heads.

    `cupymla.indexer_logits` as a torch operator; see there for the arguments.
    """


@overload
def indexer_topk(
    q: Tensor, k: Tensor, weights: Tensor, topk: int, *, q_scale: Tensor | None = None,
    k_scale: Tensor | None = None, starts: Tensor | None = None, ends: Tensor | None = None, causal: bool = False,
    q_start: int = 0, k_stride: int = 1, relu: bool = True, return_values: Literal[False] = False,
    return_lse: Literal[False] = False, lse_base: Literal['e', '2'] = "e",
) -> tuple[Tensor, Tensor]: ...


@overload
def indexer_topk(
    q: Tensor, k: Tensor, weights: Tensor, topk: int, *, q_scale: Tensor | None = None,
    k_scale: Tensor | None = None, starts: Tensor | None = None, ends: Tensor | None = None, causal: bool = False,
    q_start: int = 0, k_stride: int = 1, relu: bool = True, return_values: Literal[True],
    return_lse: Literal[False] = False, lse_base: Literal['e', '2'] = "e",
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def indexer_topk(
    q: Tensor, k: Tensor, weights: Tensor, topk: int, *, q_scale: Tensor | None = None,
    k_scale: Tensor | None = None, starts: Tensor | None = None, ends: Tensor | None = None, causal: bool = False,
    q_start: int = 0, k_stride: int = 1, relu: bool = True, return_values: Literal[False] = False,
    return_lse: Literal[True], lse_base: Literal['e', '2'] = "e",
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def indexer_topk(
    q: Tensor, k: Tensor, weights: Tensor, topk: int, *, q_scale: Tensor | None = None,
    k_scale: Tensor | None = None, starts: Tensor | None = None, ends: Tensor | None = None, causal: bool = False,
    q_start: int = 0, k_stride: int = 1, relu: bool = True, return_values: Literal[True],
    return_lse: Literal[True], lse_base: Literal['e', '2'] = "e",
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


@overload
def indexer_topk(
    q: Tensor, k: Tensor, weights: Tensor, topk: int, *, q_scale: Tensor | None = None,
    k_scale: Tensor | None = None, starts: Tensor | None = None, ends: Tensor | None = None, causal: bool = False,
    q_start: int = 0, k_stride: int = 1, relu: bool = True, return_values: bool, return_lse: bool,
    lse_base: Literal['e', '2'] = "e",
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Select each query's keys with the lightning indexer, without holding all scores.

    `cupymla.indexer_topk` as a torch operator; see there for the arguments.
    """


def indexer_loss(
    q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, target: Tensor, *, topk_length: Tensor | None = None,
    lse: Tensor | None = None, causal: bool = False, q_start: int = 0, k_stride: int = 1, relu: bool = True,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """The KL divergence of the indexer's softmax over selected keys from a target, and its gradient.

    `cupymla.indexer_loss` as a torch operator; see there for the arguments.

    Differentiable in q, k, weights.

    `deterministic` is that of `indexer_bwd`, by which the gradient is computed.
    """


def indexer_bwd(
    q: Tensor, k: Tensor, weights: Tensor, grad_logits: Tensor, indices: Tensor, *,
    topk_length: Tensor | None = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
    relu: bool = True, deterministic: bool = False, lists: Tensor | None = None,
    dk_dtype: Literal['float32'] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a loss with respect to q, k and weights, from its gradient with respect to scores at selected keys.

    `cupymla.indexer_bwd` as a torch operator; see there for the arguments.
    """


def indexer_loss_dense(
    q: Tensor, k: Tensor, weights: Tensor, mla_q: Tensor, mla_kv: Tensor, *, mla_lse: Tensor | None = None,
    starts: Tensor | None = None, ends: Tensor | None = None, grad_loss: Tensor | None = None,
    causal: bool = False, q_start: int = 0, k_stride: int = 1, sm_scale: float | None = None,
    lse_base: Literal['e', '2'] = "e", relu: bool = True, dk_dtype: Literal['float32'] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The KL divergence of the indexer's softmax over all visible keys from dense MLA attention, with its gradients.

    `cupymla.indexer_loss_dense` as a torch operator; see there for the arguments.

    Differentiable in q, k, weights.
    """


def paged_indexer_logits(
    q: Tensor, k_cache: Tensor, weights: Tensor, block_tables: Tensor, context_lens: Tensor, *,
    q_scale: Tensor | None = None, relu: bool = True, max_context: int | None = None,
) -> Tensor:
    """Score the keys of each request, which lie in pages, for its queries.

    `cupymla.paged_indexer_logits` as a torch operator; see there for the arguments.
    """


@overload
def paged_indexer_topk(
    q: Tensor, k_cache: Tensor, weights: Tensor, block_tables: Tensor, context_lens: Tensor, topk: int, *,
    q_scale: Tensor | None = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
    max_context: int | None = None, return_values: Literal[False] = False, return_lse: Literal[False] = False,
    lse_base: Literal['e', '2'] = "e",
) -> tuple[Tensor, Tensor]: ...


@overload
def paged_indexer_topk(
    q: Tensor, k_cache: Tensor, weights: Tensor, block_tables: Tensor, context_lens: Tensor, topk: int, *,
    q_scale: Tensor | None = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
    max_context: int | None = None, return_values: Literal[True], return_lse: Literal[False] = False,
    lse_base: Literal['e', '2'] = "e",
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def paged_indexer_topk(
    q: Tensor, k_cache: Tensor, weights: Tensor, block_tables: Tensor, context_lens: Tensor, topk: int, *,
    q_scale: Tensor | None = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
    max_context: int | None = None, return_values: Literal[False] = False, return_lse: Literal[True],
    lse_base: Literal['e', '2'] = "e",
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def paged_indexer_topk(
    q: Tensor, k_cache: Tensor, weights: Tensor, block_tables: Tensor, context_lens: Tensor, topk: int, *,
    q_scale: Tensor | None = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
    max_context: int | None = None, return_values: Literal[True], return_lse: Literal[True],
    lse_base: Literal['e', '2'] = "e",
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


@overload
def paged_indexer_topk(
    q: Tensor, k_cache: Tensor, weights: Tensor, block_tables: Tensor, context_lens: Tensor, topk: int, *,
    q_scale: Tensor | None = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
    max_context: int | None = None, return_values: bool, return_lse: bool, lse_base: Literal['e', '2'] = "e",
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Select each query's keys, which lie in pages, with the lightning indexer.

    `cupymla.paged_indexer_topk` as a torch operator; see there for the arguments.
    """


@overload
def topk(
    scores: Tensor, topk: int, *, starts: Tensor | None = None, ends: Tensor | None = None,
    order: Literal['index', 'score'] = "index", return_values: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...


@overload
def topk(
    scores: Tensor, topk: int, *, starts: Tensor | None = None, ends: Tensor | None = None,
    order: Literal['index', 'score'] = "index", return_values: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def topk(
    scores: Tensor, topk: int, *, starts: Tensor | None = None, ends: Tensor | None = None,
    order: Literal['index', 'score'] = "index", return_values: bool,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Select the largest scores of each row, exactly.

    `cupymla.topk` as a torch operator; see there for the arguments.
    """


def invert_indices(indices: Tensor, s_kv: int, *, topk_length: Tensor | None = None) -> Tensor:
    """List by token which top-k entries of the queries name it.

    `cupymla.invert_indices` as a torch operator; see there for the arguments.
    """


def quantize_fp8(x: Tensor, *, group: int = 128, scale_rule: Literal['amax', 'pow2'] = "amax") -> tuple[Tensor, Tensor]:
    """Quantise floats to fp8 e4m3 with a scale for each group of neighbouring channels.

    `cupymla.quantize_fp8` as a torch operator; see there for the arguments.
    """


def dequantize_fp8(codes: Tensor, scales: Tensor, *, group: int = 128) -> Tensor:
    """Turn fp8 e4m3 codes and their scales into bfloat16: one fp32 product each, rounded to nearest even.

    `cupymla.dequantize_fp8` as a torch operator; see there for the arguments.
    """


def hadamard(x: Tensor) -> Tensor:
    """Rotate rows by the Hadamard matrix: out[i] = D^-1/2 sum over j of (-1)^popcount(i & j) x[j].

    `cupymla.hadamard` as a torch operator; see there for the arguments.
    """


def indexer_k_quant_and_cache(
    k: Tensor, cache: Tensor, slot_mapping: Tensor, *, scale_rule: Literal['amax', 'pow2'] = "amax",
) -> Tensor:
    """Quantise keys of the lightning indexer and write them into their slots of a paged cache, in place.

    `cupymla.indexer_k_quant_and_cache` as a torch operator; see there for the arguments.
    """


def gather_indexer_cache(
    cache: Tensor, slots: Tensor | None = None, *, block_tables: Tensor | None = None,
    cu_lens: Tensor | None = None, rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Read keys of the lightning indexer and their scales out of a paged cache, as `indexer_logits` takes them.

    `cupymla.gather_indexer_cache` as a torch operator; see there for the arguments.
    """


def concat_and_cache_mla(
    kv_c: Tensor, k_pe: Tensor | None, cache: Tensor, slot_mapping: Tensor, *,
    cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'], scale_rule: Literal['amax', 'pow2'] | None = None,
) -> Tensor:
    """Write latents and rotary parts of keys into their slots of a paged cache, in place.

    `cupymla.concat_and_cache_mla` as a torch operator; see there for the arguments.
    """


def gather_mla_cache(
    cache: Tensor, slots: Tensor | None = None, *, cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'],
    block_tables: Tensor | None = None, cu_lens: Tensor | None = None, rows: int | None = None,
) -> Tensor:
    """Read rows of latents and rotary parts out of a paged cache, as bfloat16.

    `cupymla.gather_mla_cache` as a torch operator; see there for the arguments.
    """
