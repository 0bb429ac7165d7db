"""Made by `python -m cupymla_lab stubs` from the functions themselves; not to be edited."""
from typing import Any, Literal, TypeVar, overload

from numpy.typing import NDArray

from .errors import CompileError as CompileError
from .errors import CupymlaError as CupymlaError
from .errors import DriverError as DriverError
from .errors import InputError as InputError
from .errors import UnsupportedError as UnsupportedError
from .ops.operator import Prepared
from .raw import raw_module as raw_module

__all__ = [
    "CompileError",
    "CupymlaError",
    "DriverError",
    "InputError",
    "UnsupportedError",
    "attn_dist",
    "concat_and_cache_mla",
    "copy_blocks",
    "dequantize_fp8",
    "dequantize_nvfp4",
    "gather_indexer_cache",
    "gather_mla_cache",
    "hadamard",
    "indexer_bwd",
    "indexer_k_quant_and_cache",
    "indexer_logits",
    "indexer_loss",
    "indexer_loss_dense",
    "indexer_topk",
    "invert_indices",
    "matrix_bd",
    "merge_attention",
    "nvfp4_gemv",
    "paged_indexer_logits",
    "paged_indexer_topk",
    "quantize_fp8",
    "quantize_nvfp4",
    "raw_module",
    "rel_shift",
    "reshape_and_cache",
    "sparse_mla_bwd",
    "sparse_mla_bwd_phase1",
    "sparse_mla_decode",
    "sparse_mla_fwd",
    "swizzle_scales",
    "topk",
    "unswizzle_scales",
    "xl_paged_attention",
]

_Array = TypeVar("_Array")
"""Results are arrays of the framework whose arrays are given."""

__version__: str


class _SparseMlaFwd:
    """Attention of each query to the keys that its row of `indices` names."""

    name: str

    @overload
    def __call__(
        self, q: NDArray[Any], kv: Any, indices: Any, *, sm_scale: float | None = None, topk_length: Any = None,
        attn_sink: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        lse_base: Literal['e', '2'] = "e", out: Any = None, max_logits: Any = None, lse: Any = None,
        workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, q: _Array, kv: Any, indices: Any, *, sm_scale: float | None = None, topk_length: Any = None,
        attn_sink: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        lse_base: Literal['e', '2'] = "e", out: Any = None, max_logits: Any = None, lse: Any = None,
        workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> tuple[_Array, _Array, _Array]:
        """Attention of each query to the keys that its row of `indices` names.

        Entry j of query s names token t = indices[s, j]. It is valid when 0 <= t < s_kv, j < topk_length[s], and, if
        causal, t <= trunc((q_start + s + 1 - k_stride) / k_stride). Invalid entries may hold any int32 and are never
        followed. A token named twice counts twice.

            score = sm_scale * q . kv[t]
            lse   = log(sum exp(score))
            out   = sum exp(score - lse) * kv[t, :512] * exp(lse) / (exp(lse) + exp(attn_sink))

        A query without a valid entry gets out 0, max_logits -inf and lse +inf.

        Args:
            q: [s_q, h_q, d_qk] bfloat16 or float16, d_qk 576 or 512. Every array may have a leading batch axis, except
                attn_sink; then all have it, and indices count within their batch entry.
            kv: [s_kv, d_qk] or [s_kv, 1, d_qk], q's dtype. The last axis of q and kv is contiguous, other strides are any
                multiple of 16 bytes, the address is a multiple of 16 bytes.
            indices: [s_q, topk] or [s_q, 1, topk] int32, topk >= 1; the last axis is contiguous.
            sm_scale: factor of the scores, |sm_scale| <= 2**126; d_qk ** -0.5 by default.
            topk_length: [s_q] int32, how many leading entries of each row of indices count; any values.
            attn_sink: [h_q] float32, a score per head that takes part in the softmax and has value 0; +-inf allowed. It
                changes out alone.
            causal: mask keys past the query's own position.
            q_start: position of query 0, for causal.
            k_stride: positions per key, for causal, >= 1.
            lse_base: "e" or "2": lse in natural units or as a base-2 logarithm.
            out: array to write, [s_q, h_q, 512] in q's dtype, with strides as q's may have.
            max_logits: array to write, [s_q, h_q] float32, any strides.
            lse: array to write, [s_q, h_q] float32, any strides.
            workspace: memory to work in, [n] uint8, contiguous, at an address that is a multiple of 16 bytes, n at least
                `sparse_mla_fwd.workspace_bytes(...)` of the same arguments, which is 0 for most; what it holds means
                nothing, before and after. Calls that may run at the same time need one each. By default it comes from the
                allocator of q's framework.
            check_indices: raise InputError for an index outside [-1, s_kv) within topk_length. Reads the
                indices, so a call on a GPU waits for it and cannot be captured into a graph.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of q's framework by default. It means nothing on the CPU.

        Returns:
            (out, max_logits, lse) in q's framework: out in q's dtype; max_logits, the largest score of each head in
            natural units, and lse, without the sink, float32.

        Raises:
            InputError: an argument cannot be used as it is; nothing was computed or written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: multi-head latent attention in its absorbed form, DeepSeek-V2 (arXiv:2405.04434) section 2.1; token
        selection, DeepSeek-V3.2; the interface follows FlashMLA's sparse prefill.
        """

    @overload
    def prepare(
        self, q: NDArray[Any], kv: Any, indices: Any, *, sm_scale: float | None = None, topk_length: Any = None,
        attn_sink: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        lse_base: Literal['e', '2'] = "e", out: Any = None, max_logits: Any = None, lse: Any = None,
        workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, q: _Array, kv: Any, indices: Any, *, sm_scale: float | None = None, topk_length: Any = None,
        attn_sink: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        lse_base: Literal['e', '2'] = "e", out: Any = None, max_logits: Any = None, lse: Any = None,
        workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array, _Array]]:
        """Do all of a call of `sparse_mla_fwd` but the launch: checks, plan, compilation, allocation and binding."""

    def workspace_bytes(
        self, q: Any, kv: Any, indices: Any, *, sm_scale: float | None = None, topk_length: Any = None,
        attn_sink: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        lse_base: Literal['e', '2'] = "e", out: Any = None, max_logits: Any = None, lse: Any = None,
        workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> int:
        """How many bytes the `workspace` of a call of `sparse_mla_fwd` with these arguments has to have at least; 0 where none"""


sparse_mla_fwd: _SparseMlaFwd


class _SparseMlaBwd:
    """Gradients of `sparse_mla_fwd` with respect to q, kv and attn_sink."""

    name: str

    @overload
    def __call__(
        self, q: NDArray[Any], kv: Any, out: Any, dout: Any, lse: Any, indices: Any, *, sm_scale: float | None = None,
        topk_length: Any = None, attn_sink: None = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        lse_base: Literal['e', '2'] = "e", deterministic: bool = False, lists: Any = None, attn_dist: Any = None,
        dq: Any = None, dkv: Any = None, dkv_dtype: Literal['float32'] | None = None, attn_dist_sink: bool = False,
        d_sink: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, q: _Array, kv: Any, out: Any, dout: Any, lse: Any, indices: Any, *, sm_scale: float | None = None,
        topk_length: Any = None, attn_sink: None = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        lse_base: Literal['e', '2'] = "e", deterministic: bool = False, lists: Any = None, attn_dist: Any = None,
        dq: Any = None, dkv: Any = None, dkv_dtype: Literal['float32'] | None = None, attn_dist_sink: bool = False,
        d_sink: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> tuple[_Array, _Array]: ...

    @overload
    def __call__(
        self, q: NDArray[Any], kv: Any, out: Any, dout: Any, lse: Any, indices: Any, *, sm_scale: float | None = None,
        topk_length: Any = None, attn_sink: Any, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        lse_base: Literal['e', '2'] = "e", deterministic: bool = False, lists: Any = None, attn_dist: Any = None,
        dq: Any = None, dkv: Any = None, dkv_dtype: Literal['float32'] | None = None, attn_dist_sink: bool = False,
        d_sink: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, q: _Array, kv: Any, out: Any, dout: Any, lse: Any, indices: Any, *, sm_scale: float | None = None,
        topk_length: Any = None, attn_sink: Any, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        lse_base: Literal['e', '2'] = "e", deterministic: bool = False, lists: Any = None, attn_dist: Any = None,
        dq: Any = None, dkv: Any = None, dkv_dtype: Literal['float32'] | None = None, attn_dist_sink: bool = False,
        d_sink: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> tuple[_Array, _Array, _Array]:
        """Gradients of `sparse_mla_fwd` with respect to q, kv and attn_sink.

        With L = lse, or log(exp(lse) + exp(attn_sink)) when there is a sink, and t the token of a valid entry:

            P             = exp(sm_scale * q . kv[t] - L), 0 on invalid entries
            delta         = sum_d out * dout
            dS            = P * (dout . kv[t, :512] - delta) * sm_scale
            dq            = sum over entries of dS * kv[t]
            dkv[t]       += sum over heads of dS * q
            dkv[t, :512] += sum over heads of P * dout
            d_sink        = -(sum over queries of exp(attn_sink - L) * delta)

        `sparse_mla_fwd` says which entries are valid. A query without one contributes nothing, whatever its out, dout and
        lse hold. A token that no valid entry names gets a gradient of 0, whatever kv holds there.

        Args:
            q: [s_q, h_q, d_qk] bfloat16 or float16, d_qk 576 or 512. Every array may have a leading batch axis, except
                attn_sink and d_sink; then all have it, and indices count within their batch entry.
            kv: [s_kv, d_qk] or [s_kv, 1, d_qk], q's dtype.
            out: [s_q, h_q, 512], q's dtype: the forward's result, the sink's effect included.
            dout: [s_q, h_q, 512], q's dtype: the gradient with respect to out. The last axis of q, kv, out and dout is
                contiguous, other strides are any multiple of 16 bytes, addresses are multiples of 16 bytes.
            lse: [s_q, h_q] float32, any strides: the forward's, without the sink.
            indices: [s_q, topk] or [s_q, 1, topk] int32, topk >= 1; the last axis is contiguous.
            sm_scale: factor of the scores, |sm_scale| <= 2**126; d_qk ** -0.5 by default.
            topk_length: [s_q] int32, how many leading entries of each row of indices count; any values.
            attn_sink: [h_q] float32, the forward's; +-inf allowed.
            causal: mask keys past the query's own position.
            q_start: position of query 0, for causal.
            k_stride: positions per key, for causal, >= 1.
            lse_base: "e" or "2": the base lse is in.
            deterministic: give the same bits on every run.
            lists: what `invert_indices(indices, s_kv, topk_length=topk_length)` returns, of these very indices and lengths:
                saves a deterministic call on a GPU from finding by itself which entries name a token. Other lists give
                other sums. Not read by calls that do without: others, and those that pack neighbouring queries.
            attn_dist: array to write, [s_q, topk] float32, the last axis contiguous: receives what `attn_dist(q, kv,
                indices, lse)` returns, which is at hand here.
            dq: array to write, q's shape and dtype, with strides as q's may have.
            dkv: array to write, kv's shape, with strides as kv's may have. It is overwritten, not added to.
            dkv_dtype: dtype of dkv: None for kv's, or "float32", which spares the last rounding and, but for more than 64
                heads on Hopper, the workspace for sums.
            attn_dist_sink: let the sink have its part of each head's softmax in attn_dist, as it has in out; False without
                attn_sink. attn_dist is then that of the lse log(exp(lse) + exp(attn_sink)).
            d_sink: array to write, [h_q] float32; only with attn_sink.
            workspace: memory to work in, [n] uint8, contiguous, at an address that is a multiple of 16 bytes, n at least
                `sparse_mla_bwd.workspace_bytes(...)` of the same arguments; what it holds means nothing, before and after.
                Calls that may run at the same time need one each. By default it comes from the allocator of q's framework.
            check_indices: raise InputError for an index outside [-1, s_kv) within topk_length, and for lists of other
                indices. Reads them, so a call on a GPU waits for it and cannot be captured into a graph.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of q's framework by default. It means nothing on the CPU.

        Returns:
            (dq, dkv), or (dq, dkv, d_sink) when attn_sink is given, in q's framework.

        Raises:
            InputError: an argument cannot be used as it is; nothing was computed or written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: FlashAttention-2's backward (arXiv:2307.08691, algorithm 2), with one array for keys and values.
        """

    @overload
    def prepare(
        self, q: NDArray[Any], kv: Any, out: Any, dout: Any, lse: Any, indices: Any, *, sm_scale: float | None = None,
        topk_length: Any = None, attn_sink: None = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        lse_base: Literal['e', '2'] = "e", deterministic: bool = False, lists: Any = None, attn_dist: Any = None,
        dq: Any = None, dkv: Any = None, dkv_dtype: Literal['float32'] | None = None, attn_dist_sink: bool = False,
        d_sink: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, q: _Array, kv: Any, out: Any, dout: Any, lse: Any, indices: Any, *, sm_scale: float | None = None,
        topk_length: Any = None, attn_sink: None = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        lse_base: Literal['e', '2'] = "e", deterministic: bool = False, lists: Any = None, attn_dist: Any = None,
        dq: Any = None, dkv: Any = None, dkv_dtype: Literal['float32'] | None = None, attn_dist_sink: bool = False,
        d_sink: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array]]: ...

    @overload
    def prepare(
        self, q: NDArray[Any], kv: Any, out: Any, dout: Any, lse: Any, indices: Any, *, sm_scale: float | None = None,
        topk_length: Any = None, attn_sink: Any, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        lse_base: Literal['e', '2'] = "e", deterministic: bool = False, lists: Any = None, attn_dist: Any = None,
        dq: Any = None, dkv: Any = None, dkv_dtype: Literal['float32'] | None = None, attn_dist_sink: bool = False,
        d_sink: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, q: _Array, kv: Any, out: Any, dout: Any, lse: Any, indices: Any, *, sm_scale: float | None = None,
        topk_length: Any = None, attn_sink: Any, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        lse_base: Literal['e', '2'] = "e", deterministic: bool = False, lists: Any = None, attn_dist: Any = None,
        dq: Any = None, dkv: Any = None, dkv_dtype: Literal['float32'] | None = None, attn_dist_sink: bool = False,
        d_sink: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array, _Array]]:
        """Do all of a call of `sparse_mla_bwd` but the launch: checks, plan, compilation, allocation and binding."""

    def workspace_bytes(
        self, q: Any, kv: Any, out: Any, dout: Any, lse: Any, indices: Any, *, sm_scale: float | None = None,
        topk_length: Any = None, attn_sink: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        lse_base: Literal['e', '2'] = "e", deterministic: bool = False, lists: Any = None, attn_dist: Any = None,
        dq: Any = None, dkv: Any = None, dkv_dtype: Literal['float32'] | None = None, attn_dist_sink: bool = False,
        d_sink: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> int:
        """How many bytes the `workspace` of a call of `sparse_mla_bwd` with these arguments has to have at least; 0 where none"""


sparse_mla_bwd: _SparseMlaBwd


class _SparseMlaBwdPhase1:
    """The score of every top-k entry and the row sums of out * dout: the first step of the backward."""

    name: str

    @overload
    def __call__(
        self, q: NDArray[Any], kv: Any, out: Any, dout: Any, indices: Any, *, topk_length: Any = None,
        causal: bool = False, q_start: int = 0, k_stride: int = 1, p: Any = None, delta: Any = None,
        check_indices: bool = False, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, q: _Array, kv: Any, out: Any, dout: Any, indices: Any, *, topk_length: Any = None, causal: bool = False,
        q_start: int = 0, k_stride: int = 1, p: Any = None, delta: Any = None, check_indices: bool = False,
        stream: object = None,
    ) -> tuple[_Array, _Array]:
        """The score of every top-k entry and the row sums of out * dout: the first step of the backward.

            p     = q . kv[t], without a scale; -inf on invalid entries
            delta = sum_d out * dout, of every query, also without a valid entry

        `sparse_mla_fwd` says which entries are valid.

        Args:
            q: [s_q, h_q, d_qk] bfloat16 or float16, d_qk 576 or 512. Every array may have a leading batch axis; then all
                have it, and indices count within their batch entry.
            kv: [s_kv, d_qk] or [s_kv, 1, d_qk], q's dtype.
            out: [s_q, h_q, 512], q's dtype: the forward's result.
            dout: [s_q, h_q, 512], q's dtype: the gradient with respect to out. The last axis of q, kv, out and dout is
                contiguous, other strides are any multiple of 16 bytes, addresses are multiples of 16 bytes.
            indices: [s_q, topk] or [s_q, 1, topk] int32, topk >= 1; the last axis is contiguous.
            topk_length: [s_q] int32, how many leading entries of each row of indices count; any values.
            causal: mask keys past the query's own position.
            q_start: position of query 0, for causal.
            k_stride: positions per key, for causal, >= 1.
            p: array to write, [s_q, h_q, topk] float32, the last axis contiguous.
            delta: array to write, [s_q, h_q] float32, any strides.
            check_indices: raise InputError for an index outside [-1, s_kv) within topk_length. Reads the
                indices, so a call on a GPU waits for it and cannot be captured into a graph.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of q's framework by default. It means nothing on the CPU.

        Returns:
            (p, delta) in q's framework, float32.

        Raises:
            InputError: an argument cannot be used as it is; nothing was computed or written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: FlashAttention-2's backward (arXiv:2307.08691, algorithm 2), its lines up to the scores.
        """

    @overload
    def prepare(
        self, q: NDArray[Any], kv: Any, out: Any, dout: Any, indices: Any, *, topk_length: Any = None,
        causal: bool = False, q_start: int = 0, k_stride: int = 1, p: Any = None, delta: Any = None,
        check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, q: _Array, kv: Any, out: Any, dout: Any, indices: Any, *, topk_length: Any = None, causal: bool = False,
        q_start: int = 0, k_stride: int = 1, p: Any = None, delta: Any = None, check_indices: bool = False,
        stream: object = None,
    ) -> Prepared[tuple[_Array, _Array]]:
        """Do all of a call of `sparse_mla_bwd_phase1` but the launch: checks, plan, compilation, allocation and binding."""


sparse_mla_bwd_phase1: _SparseMlaBwdPhase1


class _AttnDist:
    """The attention weight of each top-k entry, summed over heads: the target of a lightning indexer's KL loss."""

    name: str

    @overload
    def __call__(
        self, q: NDArray[Any], kv: Any, indices: Any, lse: Any, *, sm_scale: float | None = None,
        topk_length: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        lse_base: Literal['e', '2'] = "e", normalize: Literal['l1'] | None = None, dist: Any = None,
        check_indices: bool = False, stream: object = None,
    ) -> NDArray[Any]: ...

    @overload
    def __call__(
        self, q: _Array, kv: Any, indices: Any, lse: Any, *, sm_scale: float | None = None, topk_length: Any = None,
        causal: bool = False, q_start: int = 0, k_stride: int = 1, lse_base: Literal['e', '2'] = "e",
        normalize: Literal['l1'] | None = None, dist: Any = None, check_indices: bool = False, stream: object = None,
    ) -> _Array:
        """The attention weight of each top-k entry, summed over heads: the target of a lightning indexer's KL loss.

            dist = sum over heads of exp(sm_scale * q . kv[t] - lse), 0 on invalid entries

        `sparse_mla_fwd` says which entries are valid. With the lse that sparse_mla_fwd returns, a row sums to h_q, or to 0
        without a valid entry. Raw sums are the default because tensor-parallel ranks add theirs first.

        Args:
            q: [s_q, h_q, d_qk] bfloat16 or float16, d_qk 576 or 512. Every array may have a leading batch axis; then all
                have it, and indices count within their batch entry.
            kv: [s_kv, d_qk] or [s_kv, 1, d_qk], q's dtype. The last axis of q and kv is contiguous, other strides are any
                multiple of 16 bytes, the address is a multiple of 16 bytes.
            indices: [s_q, topk] or [s_q, 1, topk] int32, topk >= 1; the last axis is contiguous.
            lse: [s_q, h_q] float32, any strides: the forward's, or one that counts further keys or a sink: dist is then
                the entries' part of that softmax.
            sm_scale: factor of the scores, |sm_scale| <= 2**126; d_qk ** -0.5 by default.
            topk_length: [s_q] int32, how many leading entries of each row of indices count; any values.
            causal: mask keys past the query's own position.
            q_start: position of query 0, for causal.
            k_stride: positions per key, for causal, >= 1.
            lse_base: "e" or "2": the base lse is in.
            normalize: None, or "l1": divide each row by max(its sum, 1e-10).
            dist: array to write, [s_q, topk] float32, the last axis contiguous.
            check_indices: raise InputError for an index outside [-1, s_kv) within topk_length. Reads the
                indices, so a call on a GPU waits for it and cannot be captured into a graph.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of q's framework by default. It means nothing on the CPU.

        Returns:
            dist in q's framework, [s_q, topk] float32.

        Raises:
            InputError: an argument cannot be used as it is; nothing was computed or written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: the indexer's training objective, DeepSeek-V3.2 section 2.1 (main attention summed over heads, then
        L1-normalised along the sequence).
        """

    @overload
    def prepare(
        self, q: NDArray[Any], kv: Any, indices: Any, lse: Any, *, sm_scale: float | None = None,
        topk_length: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        lse_base: Literal['e', '2'] = "e", normalize: Literal['l1'] | None = None, dist: Any = None,
        check_indices: bool = False, stream: object = None,
    ) -> Prepared[NDArray[Any]]: ...

    @overload
    def prepare(
        self, q: _Array, kv: Any, indices: Any, lse: Any, *, sm_scale: float | None = None, topk_length: Any = None,
        causal: bool = False, q_start: int = 0, k_stride: int = 1, lse_base: Literal['e', '2'] = "e",
        normalize: Literal['l1'] | None = None, dist: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[_Array]:
        """Do all of a call of `attn_dist` but the launch: checks, plan, compilation, allocation and binding."""


attn_dist: _AttnDist


class _Nvfp4Gemv:
    """Multiply a block-scaled 4-bit matrix with 1 to 16 vectors."""

    name: str

    @overload
    def __call__(
        self, a: NDArray[Any], b: Any, sfa: Any, sfb: Any = None, *, alpha: Any = None, bias: Any = None,
        out_dtype: Any = None, format: Literal['nvfp4', 'mxfp4'] = "nvfp4",
        scale_layout: Literal['linear', '128x4'] = "linear", batch_axis: int = -1, c: Any = None,
        stream: object = None,
    ) -> NDArray[Any]: ...

    @overload
    def __call__(
        self, a: _Array, b: Any, sfa: Any, sfb: Any = None, *, alpha: Any = None, bias: Any = None,
        out_dtype: Any = None, format: Literal['nvfp4', 'mxfp4'] = "nvfp4",
        scale_layout: Literal['linear', '128x4'] = "linear", batch_axis: int = -1, c: Any = None,
        stream: object = None,
    ) -> _Array:
        """Multiply a block-scaled 4-bit matrix with 1 to 16 vectors.

            c[m, n, l] = alpha * sum_k a[m, k, l] * sfa[m, k // 16, l] * b[n, k, l] * sfb[n, k // 16, l]  (+ bias)

        Any array that speaks DLPack; all on one device; nothing is copied, cast or moved. Strides are free, negative and
        zero ones included, but the axis of k is contiguous. A batch axis l is on all of a, b, sfa, sfb and c or on none.

        Args:
            a: `[m, k/2]` or `[m, k/2, l]`, E2M1 pairs in uint8 or float4_e2m1fn_x2, even k in the low nibble. k is any even
                number.
            b: `[n, k/2(, l)]` E2M1 pairs, or in weight-only mode `[n, k(, l)]` bfloat16 or float16. n is 1 to 16.
            sfa: scales of a, uint8 or the format's dtype: `[m, ceil(k/16)(, l)]`, or in the 128x4 layout
                `[P, Q(, l)]` or `[P * Q(, l)]`, contiguous but for l, P and Q being rows and columns rounded up to
                multiples of 128 and 4. Padding bytes may hold anything. When 16 does not divide k, the last scale is for
                the rest.
            sfb: scales of b, likewise; None in weight-only mode.
            alpha: None, a number, or a float32 array: one value (`[]` or `[1]`) or one per row (`[m]`, `[m, l]`). Taken in
                float32.
            bias: None, or `[m]` or `[m, l]` in c's dtype; added after alpha, to all n columns.
            out_dtype: "float16", "bfloat16" or "float32", or the framework's object for it; c's dtype, or else float16.
            format: "nvfp4" (one E4M3 scale per 16 elements) or "mxfp4" (one E8M0 scale per 32: read 32 for 16 above).
            scale_layout: "linear" or "128x4", of sfa and sfb.
            batch_axis: -1 when l is the last axis of every batched array as written here, 0 when it is the first
                (`a [l, m, k/2]`, `c [l, m, n]`, `alpha [l, m]`, ...), which frameworks without strides need.
            c: the output, `[m, n(, l)]`, any strides, sharing memory with no input; allocated C-contiguous when None.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of the arrays' framework by default. It means nothing on the CPU.

        Returns:
            c.

        Every E2M1 and scale code counts as what it stands for, negative E4M3 scales and NaN included: a NaN scale makes NaN
        of the rows that use it. Products of two E8M0 scales past float32's range are inf, 0 or what the terms make of them.
        Sums are float32, in no promised order, but the same bits every run. With
        T = |alpha| * sum_k |terms| + |bias|, the result is within (k/32 + 48) * 2^-24 * T of the exact one, before it is
        rounded to c's dtype (float16 overflows to inf), as long as sum_k |terms| stays within float32.

        Raises:
            InputError: an argument of the wrong rank, shape, dtype, stride or device, or an output that is read-only or
                overlaps; before anything is computed.
            UnsupportedError: there is no kernel for the arrays' device.
        """

    @overload
    def prepare(
        self, a: NDArray[Any], b: Any, sfa: Any, sfb: Any = None, *, alpha: Any = None, bias: Any = None,
        out_dtype: Any = None, format: Literal['nvfp4', 'mxfp4'] = "nvfp4",
        scale_layout: Literal['linear', '128x4'] = "linear", batch_axis: int = -1, c: Any = None,
        stream: object = None,
    ) -> Prepared[NDArray[Any]]: ...

    @overload
    def prepare(
        self, a: _Array, b: Any, sfa: Any, sfb: Any = None, *, alpha: Any = None, bias: Any = None,
        out_dtype: Any = None, format: Literal['nvfp4', 'mxfp4'] = "nvfp4",
        scale_layout: Literal['linear', '128x4'] = "linear", batch_axis: int = -1, c: Any = None,
        stream: object = None,
    ) -> Prepared[_Array]:
        """Do all of a call of `nvfp4_gemv` but the launch: checks, plan, compilation, allocation and binding."""


nvfp4_gemv: _Nvfp4Gemv


class _QuantizeNvfp4:
    """Quantise a matrix to block-scaled 4-bit codes as `nvfp4_gemv` reads them."""

    name: str

    @overload
    def __call__(
        self, x: NDArray[Any], *, global_scale: Literal["amax"], format: Literal['nvfp4', 'mxfp4'] = "nvfp4",
        scale_layout: Literal['linear', '128x4'] = "linear", batch_axis: int = -1, packed: Any = None,
        scales: Any = None, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, x: _Array, *, global_scale: Literal["amax"], format: Literal['nvfp4', 'mxfp4'] = "nvfp4",
        scale_layout: Literal['linear', '128x4'] = "linear", batch_axis: int = -1, packed: Any = None,
        scales: Any = None, stream: object = None,
    ) -> tuple[_Array, _Array, _Array]: ...

    @overload
    def __call__(
        self, x: NDArray[Any], *, global_scale: float | Any | None = None,
        format: Literal['nvfp4', 'mxfp4'] = "nvfp4", scale_layout: Literal['linear', '128x4'] = "linear",
        batch_axis: int = -1, packed: Any = None, scales: Any = None, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, x: _Array, *, global_scale: float | Any | None = None, format: Literal['nvfp4', 'mxfp4'] = "nvfp4",
        scale_layout: Literal['linear', '128x4'] = "linear", batch_axis: int = -1, packed: Any = None,
        scales: Any = None, stream: object = None,
    ) -> tuple[_Array, _Array]:
        """Quantise a matrix to block-scaled 4-bit codes as `nvfp4_gemv` reads them.

        NVFP4: with y = x * global_scale (float32), a block's scale is its amax / 6 rounded to E4M3 and its codes are
        y / scale rounded to E2M1. MXFP4: the scale is 2^(floor(log2 amax) - 2), as in OCP MX v1.0, section 6.3. All
        roundings are to nearest, ties to even, and saturate. A block whose scale rounds to zero gets (signed) zeros. A NaN
        gives its block a NaN scale and codes 7; an infinity counts as a number past every other, so its block gets the
        largest scale.

        Args:
            x: `[m, k]` or `[m, k, l]`, float32, float16 or bfloat16; k even and contiguous, other strides free.
            global_scale: None; a number above 0 or a one-element float32 array, to be multiplied in; or "amax", which
                computes 448 * 6 / amax(|x|) over the finite elements (1 when that is 0), NVIDIA's choice. x is about
                `e2m1 * scale / global_scale`, so that the `alpha` of a product is 1 / (global_scale_a * global_scale_b).
                NVFP4 only.
            format: "nvfp4" or "mxfp4".
            scale_layout: "linear" or "128x4".
            batch_axis: -1 or 0: where l is, in inputs and outputs.
            packed: output for the codes, `[m, k/2(, l)]`.
            scales: output for the scales, shaped as `nvfp4_gemv` takes them.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of the arrays' framework by default. It means nothing on the CPU.

        Returns:
            `(packed, scales)`, both uint8 when allocated here, or with `global_scale="amax"`
            `(packed, scales, global_scale)`, the last one float32 of shape `[]`. 128x4 scales are `[P, Q(, l)]` with
            zero padding. With a batch axis in last place, rows stay contiguous in memory.

        Raises:
            InputError: an argument that cannot be used.
            UnsupportedError: there is no kernel for the arrays' device.
        """

    @overload
    def prepare(
        self, x: NDArray[Any], *, global_scale: Literal["amax"], format: Literal['nvfp4', 'mxfp4'] = "nvfp4",
        scale_layout: Literal['linear', '128x4'] = "linear", batch_axis: int = -1, packed: Any = None,
        scales: Any = None, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, x: _Array, *, global_scale: Literal["amax"], format: Literal['nvfp4', 'mxfp4'] = "nvfp4",
        scale_layout: Literal['linear', '128x4'] = "linear", batch_axis: int = -1, packed: Any = None,
        scales: Any = None, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array, _Array]]: ...

    @overload
    def prepare(
        self, x: NDArray[Any], *, global_scale: float | Any | None = None,
        format: Literal['nvfp4', 'mxfp4'] = "nvfp4", scale_layout: Literal['linear', '128x4'] = "linear",
        batch_axis: int = -1, packed: Any = None, scales: Any = None, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, x: _Array, *, global_scale: float | Any | None = None, format: Literal['nvfp4', 'mxfp4'] = "nvfp4",
        scale_layout: Literal['linear', '128x4'] = "linear", batch_axis: int = -1, packed: Any = None,
        scales: Any = None, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array]]:
        """Do all of a call of `quantize_nvfp4` but the launch: checks, plan, compilation, allocation and binding."""


quantize_nvfp4: _QuantizeNvfp4


class _DequantizeNvfp4:
    """The values that block-scaled 4-bit codes stand for: `e2m1 * scale / global_scale`, in float32, then rounded."""

    name: str

    @overload
    def __call__(
        self, packed: NDArray[Any], scales: Any, *, global_scale: Any = None,
        format: Literal['nvfp4', 'mxfp4'] = "nvfp4", scale_layout: Literal['linear', '128x4'] = "linear",
        batch_axis: int = -1, out_dtype: Any = None, out: Any = None, stream: object = None,
    ) -> NDArray[Any]: ...

    @overload
    def __call__(
        self, packed: _Array, scales: Any, *, global_scale: Any = None, format: Literal['nvfp4', 'mxfp4'] = "nvfp4",
        scale_layout: Literal['linear', '128x4'] = "linear", batch_axis: int = -1, out_dtype: Any = None,
        out: Any = None, stream: object = None,
    ) -> _Array:
        """The values that block-scaled 4-bit codes stand for: `e2m1 * scale / global_scale`, in float32, then rounded.

        Args:
            packed: `[m, k/2]` or `[m, k/2, l]` E2M1 pairs, as `nvfp4_gemv` takes them.
            scales: their scales, linear or 128x4.
            global_scale: None (1), a number above 0, or a one-element float32 array, as `quantize_nvfp4` took or gave it.
            format: "nvfp4" or "mxfp4".
            scale_layout: "linear" or "128x4".
            batch_axis: -1 or 0: where l is.
            out_dtype: "float32", "float16" or "bfloat16"; out's dtype, or else float32.
            out: the output, `[m, k(, l)]`, contiguous along k; allocated when None, with contiguous rows.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of the arrays' framework by default. It means nothing on the CPU.

        Returns:
            `[m, k(, l)]`. NaN scales give NaN; without a global scale and in float32, every value is exact, but 6 * 2^127
            (MXFP4) is inf.

        Raises:
            InputError: an argument that cannot be used.
            UnsupportedError: there is no kernel for the arrays' device.
        """

    @overload
    def prepare(
        self, packed: NDArray[Any], scales: Any, *, global_scale: Any = None,
        format: Literal['nvfp4', 'mxfp4'] = "nvfp4", scale_layout: Literal['linear', '128x4'] = "linear",
        batch_axis: int = -1, out_dtype: Any = None, out: Any = None, stream: object = None,
    ) -> Prepared[NDArray[Any]]: ...

    @overload
    def prepare(
        self, packed: _Array, scales: Any, *, global_scale: Any = None, format: Literal['nvfp4', 'mxfp4'] = "nvfp4",
        scale_layout: Literal['linear', '128x4'] = "linear", batch_axis: int = -1, out_dtype: Any = None,
        out: Any = None, stream: object = None,
    ) -> Prepared[_Array]:
        """Do all of a call of `dequantize_nvfp4` but the launch: checks, plan, compilation, allocation and binding."""


dequantize_nvfp4: _DequantizeNvfp4


class _SwizzleScales:
    """Scales in cuBLASLt's 128x4 layout."""

    name: str

    @overload
    def __call__(
        self, scales: NDArray[Any], *, batch_axis: int = -1, out: Any = None, stream: object = None,
    ) -> NDArray[Any]: ...

    @overload
    def __call__(self, scales: _Array, *, batch_axis: int = -1, out: Any = None, stream: object = None) -> _Array:
        """Scales in cuBLASLt's 128x4 layout.

        Scale (i, j) of a matrix with C columns goes to byte
        `((i // 128) * ceil(C / 4) + j // 4) * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4`.

        Args:
            scales: `[rows, columns]` or `[rows, columns, l]`, uint8, float8_e4m3fn or float8_e8m0fnu, columns contiguous.
            batch_axis: -1 or 0: where l is.
            out: the output, `[P, Q(, l)]` or `[P * Q(, l)]` in the dtype of `scales`, contiguous but for l.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of the arrays' framework by default. It means nothing on the CPU.

        Returns:
            `[P, Q(, l)]`, P and Q being rows and columns rounded up to multiples of 128 and 4; padding is zero bytes.

        Raises:
            InputError: an argument that cannot be used.
            UnsupportedError: there is no kernel for the arrays' device.
        """

    @overload
    def prepare(
        self, scales: NDArray[Any], *, batch_axis: int = -1, out: Any = None, stream: object = None,
    ) -> Prepared[NDArray[Any]]: ...

    @overload
    def prepare(
        self, scales: _Array, *, batch_axis: int = -1, out: Any = None, stream: object = None,
    ) -> Prepared[_Array]:
        """Do all of a call of `swizzle_scales` but the launch: checks, plan, compilation, allocation and binding."""


swizzle_scales: _SwizzleScales


class _UnswizzleScales:
    """Linear scales out of cuBLASLt's 128x4 layout: the inverse of `swizzle_scales`; padding is ignored."""

    name: str

    @overload
    def __call__(
        self, swizzled: NDArray[Any], rows: int, columns: int, *, batch_axis: int = -1, out: Any = None,
        stream: object = None,
    ) -> NDArray[Any]: ...

    @overload
    def __call__(
        self, swizzled: _Array, rows: int, columns: int, *, batch_axis: int = -1, out: Any = None,
        stream: object = None,
    ) -> _Array:
        """Linear scales out of cuBLASLt's 128x4 layout: the inverse of `swizzle_scales`; padding is ignored.

        Args:
            swizzled: `[P, Q(, l)]` or `[P * Q(, l)]`, uint8, float8_e4m3fn or float8_e8m0fnu, contiguous but for l.
            rows: rows of the linear matrix.
            columns: its columns, ceil(k / 16) for NVFP4.
            batch_axis: -1 or 0: where l is.
            out: the output, `[rows, columns(, l)]` in the dtype of `swizzled`, contiguous along columns.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of the arrays' framework by default. It means nothing on the CPU.

        Returns:
            `[rows, columns(, l)]`.

        Raises:
            InputError: an argument that cannot be used.
            UnsupportedError: there is no kernel for the arrays' device.
        """

    @overload
    def prepare(
        self, swizzled: NDArray[Any], rows: int, columns: int, *, batch_axis: int = -1, out: Any = None,
        stream: object = None,
    ) -> Prepared[NDArray[Any]]: ...

    @overload
    def prepare(
        self, swizzled: _Array, rows: int, columns: int, *, batch_axis: int = -1, out: Any = None,
        stream: object = None,
    ) -> Prepared[_Array]:
        """Do all of a call of `unswizzle_scales` but the launch: checks, plan, compilation, allocation and binding."""


unswizzle_scales: _UnswizzleScales


class _XlPagedAttention:
    """Attention of one query token per sequence over its paged keys and values."""

    name: str

    @overload
    def __call__(
        self, query: NDArray[Any], k_cache: Any, v_cache: Any, block_tables: Any, context_lens: Any, *,
        scale: float | None = None, pos_bias_u: Any = None, matrix_bd: Any = None, rel_bias: Any = None,
        rel_extend: Literal['zero', 'clamp'] = "zero", pos_bias_v: Any = None, pos_emb: Any = None,
        alibi_slopes: Any = None, bias_scaled: bool = True, kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
        kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
        k_scale: Any = 1.0, v_scale: Any = 1.0, return_lse: Literal[False] = False, lse_base: Literal['e', '2'] = "e",
        check_indices: bool = False, out: Any = None, lse: Any = None, stream: object = None,
    ) -> NDArray[Any]: ...

    @overload
    def __call__(
        self, query: _Array, k_cache: Any, v_cache: Any, block_tables: Any, context_lens: Any, *,
        scale: float | None = None, pos_bias_u: Any = None, matrix_bd: Any = None, rel_bias: Any = None,
        rel_extend: Literal['zero', 'clamp'] = "zero", pos_bias_v: Any = None, pos_emb: Any = None,
        alibi_slopes: Any = None, bias_scaled: bool = True, kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
        kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
        k_scale: Any = 1.0, v_scale: Any = 1.0, return_lse: Literal[False] = False, lse_base: Literal['e', '2'] = "e",
        check_indices: bool = False, out: Any = None, lse: Any = None, stream: object = None,
    ) -> _Array: ...

    @overload
    def __call__(
        self, query: NDArray[Any], k_cache: Any, v_cache: Any, block_tables: Any, context_lens: Any, *,
        scale: float | None = None, pos_bias_u: Any = None, matrix_bd: Any = None, rel_bias: Any = None,
        rel_extend: Literal['zero', 'clamp'] = "zero", pos_bias_v: Any = None, pos_emb: Any = None,
        alibi_slopes: Any = None, bias_scaled: bool = True, kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
        kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
        k_scale: Any = 1.0, v_scale: Any = 1.0, return_lse: Literal[True], lse_base: Literal['e', '2'] = "e",
        check_indices: bool = False, out: Any = None, lse: Any = None, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, query: _Array, k_cache: Any, v_cache: Any, block_tables: Any, context_lens: Any, *,
        scale: float | None = None, pos_bias_u: Any = None, matrix_bd: Any = None, rel_bias: Any = None,
        rel_extend: Literal['zero', 'clamp'] = "zero", pos_bias_v: Any = None, pos_emb: Any = None,
        alibi_slopes: Any = None, bias_scaled: bool = True, kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
        kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
        k_scale: Any = 1.0, v_scale: Any = 1.0, return_lse: Literal[True], lse_base: Literal['e', '2'] = "e",
        check_indices: bool = False, out: Any = None, lse: Any = None, stream: object = None,
    ) -> tuple[_Array, _Array]: ...

    @overload
    def __call__(
        self, query: Any, k_cache: Any, v_cache: Any, block_tables: Any, context_lens: Any, *,
        scale: float | None = None, pos_bias_u: Any = None, matrix_bd: Any = None, rel_bias: Any = None,
        rel_extend: Literal['zero', 'clamp'] = "zero", pos_bias_v: Any = None, pos_emb: Any = None,
        alibi_slopes: Any = None, bias_scaled: bool = True, kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
        kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
        k_scale: Any = 1.0, v_scale: Any = 1.0, return_lse: bool, lse_base: Literal['e', '2'] = "e",
        check_indices: bool = False, out: Any = None, lse: Any = None, stream: object = None,
    ) -> Any | tuple[Any, Any]:
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

    @overload
    def prepare(
        self, query: NDArray[Any], k_cache: Any, v_cache: Any, block_tables: Any, context_lens: Any, *,
        scale: float | None = None, pos_bias_u: Any = None, matrix_bd: Any = None, rel_bias: Any = None,
        rel_extend: Literal['zero', 'clamp'] = "zero", pos_bias_v: Any = None, pos_emb: Any = None,
        alibi_slopes: Any = None, bias_scaled: bool = True, kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
        kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
        k_scale: Any = 1.0, v_scale: Any = 1.0, return_lse: Literal[False] = False, lse_base: Literal['e', '2'] = "e",
        check_indices: bool = False, out: Any = None, lse: Any = None, stream: object = None,
    ) -> Prepared[NDArray[Any]]: ...

    @overload
    def prepare(
        self, query: _Array, k_cache: Any, v_cache: Any, block_tables: Any, context_lens: Any, *,
        scale: float | None = None, pos_bias_u: Any = None, matrix_bd: Any = None, rel_bias: Any = None,
        rel_extend: Literal['zero', 'clamp'] = "zero", pos_bias_v: Any = None, pos_emb: Any = None,
        alibi_slopes: Any = None, bias_scaled: bool = True, kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
        kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
        k_scale: Any = 1.0, v_scale: Any = 1.0, return_lse: Literal[False] = False, lse_base: Literal['e', '2'] = "e",
        check_indices: bool = False, out: Any = None, lse: Any = None, stream: object = None,
    ) -> Prepared[_Array]: ...

    @overload
    def prepare(
        self, query: NDArray[Any], k_cache: Any, v_cache: Any, block_tables: Any, context_lens: Any, *,
        scale: float | None = None, pos_bias_u: Any = None, matrix_bd: Any = None, rel_bias: Any = None,
        rel_extend: Literal['zero', 'clamp'] = "zero", pos_bias_v: Any = None, pos_emb: Any = None,
        alibi_slopes: Any = None, bias_scaled: bool = True, kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
        kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
        k_scale: Any = 1.0, v_scale: Any = 1.0, return_lse: Literal[True], lse_base: Literal['e', '2'] = "e",
        check_indices: bool = False, out: Any = None, lse: Any = None, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, query: _Array, k_cache: Any, v_cache: Any, block_tables: Any, context_lens: Any, *,
        scale: float | None = None, pos_bias_u: Any = None, matrix_bd: Any = None, rel_bias: Any = None,
        rel_extend: Literal['zero', 'clamp'] = "zero", pos_bias_v: Any = None, pos_emb: Any = None,
        alibi_slopes: Any = None, bias_scaled: bool = True, kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
        kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
        k_scale: Any = 1.0, v_scale: Any = 1.0, return_lse: Literal[True], lse_base: Literal['e', '2'] = "e",
        check_indices: bool = False, out: Any = None, lse: Any = None, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array]]: ...

    @overload
    def prepare(
        self, query: Any, k_cache: Any, v_cache: Any, block_tables: Any, context_lens: Any, *,
        scale: float | None = None, pos_bias_u: Any = None, matrix_bd: Any = None, rel_bias: Any = None,
        rel_extend: Literal['zero', 'clamp'] = "zero", pos_bias_v: Any = None, pos_emb: Any = None,
        alibi_slopes: Any = None, bias_scaled: bool = True, kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
        kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
        k_scale: Any = 1.0, v_scale: Any = 1.0, return_lse: bool, lse_base: Literal['e', '2'] = "e",
        check_indices: bool = False, out: Any = None, lse: Any = None, stream: object = None,
    ) -> Prepared[Any | tuple[Any, Any]]:
        """Do all of a call of `xl_paged_attention` but the launch: checks, plan, compilation, allocation and binding."""


xl_paged_attention: _XlPagedAttention


class _ReshapeAndCache:
    """Write new keys and values into the paged cache, in place."""

    name: str

    @overload
    def __call__(
        self, key: NDArray[Any], value: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, *,
        kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
        kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
        k_scale: Any = 1.0, v_scale: Any = 1.0, check_indices: bool = False, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, key: _Array, value: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, *,
        kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
        kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
        k_scale: Any = 1.0, v_scale: Any = 1.0, check_indices: bool = False, stream: object = None,
    ) -> tuple[_Array, _Array]:
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

    @overload
    def prepare(
        self, key: NDArray[Any], value: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, *,
        kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
        kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
        k_scale: Any = 1.0, v_scale: Any = 1.0, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, key: _Array, value: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, *,
        kv_layout: Literal['vllm', 'NHD', 'HND'] = "vllm",
        kv_dtype: Literal['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'] | None = None,
        k_scale: Any = 1.0, v_scale: Any = 1.0, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array]]:
        """Do all of a call of `reshape_and_cache` but the launch: checks, plan, compilation, allocation and binding."""


reshape_and_cache: _ReshapeAndCache


class _CopyBlocks:
    """Copy whole blocks inside both caches, in place: for each pair (source, destination) of `mapping`."""

    name: str

    @overload
    def __call__(
        self, k_cache: NDArray[Any], v_cache: Any, mapping: Any, *, check_indices: bool = False,
        stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, k_cache: _Array, v_cache: Any, mapping: Any, *, check_indices: bool = False, stream: object = None,
    ) -> tuple[_Array, _Array]:
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

    @overload
    def prepare(
        self, k_cache: NDArray[Any], v_cache: Any, mapping: Any, *, check_indices: bool = False,
        stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, k_cache: _Array, v_cache: Any, mapping: Any, *, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array]]:
        """Do all of a call of `copy_blocks` but the launch: checks, plan, compilation, allocation and binding."""


copy_blocks: _CopyBlocks


class _RelShift:
    """Align scores against reversed relative positions with keys: Transformer-XL's shift."""

    name: str

    @overload
    def __call__(self, x: NDArray[Any], *, out: Any = None, stream: object = None) -> NDArray[Any]: ...

    @overload
    def __call__(self, x: _Array, *, out: Any = None, stream: object = None) -> _Array:
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

    @overload
    def prepare(self, x: NDArray[Any], *, out: Any = None, stream: object = None) -> Prepared[NDArray[Any]]: ...

    @overload
    def prepare(self, x: _Array, *, out: Any = None, stream: object = None) -> Prepared[_Array]:
        """Do all of a call of `rel_shift` but the launch: checks, plan, compilation, allocation and binding."""


rel_shift: _RelShift


class _MatrixBd:
    """The dense relative bias of a decode step, as xl_paged_attention takes it: terms (b) + (d) of Transformer-XL."""

    name: str

    @overload
    def __call__(
        self, query: NDArray[Any], pos_emb: Any, pos_bias_v: Any = None, *, context_lens: Any, max_context: int,
        rel_extend: Literal['zero', 'clamp'] = "zero",
        out_dtype: Literal['float32', 'float16', 'bfloat16'] = "float32", out: Any = None, stream: object = None,
    ) -> NDArray[Any]: ...

    @overload
    def __call__(
        self, query: _Array, pos_emb: Any, pos_bias_v: Any = None, *, context_lens: Any, max_context: int,
        rel_extend: Literal['zero', 'clamp'] = "zero",
        out_dtype: Literal['float32', 'float16', 'bfloat16'] = "float32", out: Any = None, stream: object = None,
    ) -> _Array:
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

    @overload
    def prepare(
        self, query: NDArray[Any], pos_emb: Any, pos_bias_v: Any = None, *, context_lens: Any, max_context: int,
        rel_extend: Literal['zero', 'clamp'] = "zero",
        out_dtype: Literal['float32', 'float16', 'bfloat16'] = "float32", out: Any = None, stream: object = None,
    ) -> Prepared[NDArray[Any]]: ...

    @overload
    def prepare(
        self, query: _Array, pos_emb: Any, pos_bias_v: Any = None, *, context_lens: Any, max_context: int,
        rel_extend: Literal['zero', 'clamp'] = "zero",
        out_dtype: Literal['float32', 'float16', 'bfloat16'] = "float32", out: Any = None, stream: object = None,
    ) -> Prepared[_Array]:
        """Do all of a call of `matrix_bd` but the launch: checks, plan, compilation, allocation and binding."""


matrix_bd: _MatrixBd


class _SparseMlaDecode:
    """Attention of each query row to the slots of a paged cache that its row of `indices` names."""

    name: str

    @overload
    def __call__(
        self, q: NDArray[Any], k_cache: Any, indices: Any, *, cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'],
        topk_length: Any = None, attn_sink: Any = None, extra_k_cache: Any = None, extra_indices: Any = None,
        extra_topk_length: Any = None, sm_scale: float | None = None, lse_base: Literal['e', '2'] = "e",
        splits: int | None = None, out: Any = None, lse: Any = None, workspace: Any = None,
        check_indices: bool = False, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, q: _Array, k_cache: Any, indices: Any, *, cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'],
        topk_length: Any = None, attn_sink: Any = None, extra_k_cache: Any = None, extra_indices: Any = None,
        extra_topk_length: Any = None, sm_scale: float | None = None, lse_base: Literal['e', '2'] = "e",
        splits: int | None = None, out: Any = None, lse: Any = None, workspace: Any = None,
        check_indices: bool = False, stream: object = None,
    ) -> tuple[_Array, _Array]:
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

    @overload
    def prepare(
        self, q: NDArray[Any], k_cache: Any, indices: Any, *, cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'],
        topk_length: Any = None, attn_sink: Any = None, extra_k_cache: Any = None, extra_indices: Any = None,
        extra_topk_length: Any = None, sm_scale: float | None = None, lse_base: Literal['e', '2'] = "e",
        splits: int | None = None, out: Any = None, lse: Any = None, workspace: Any = None,
        check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, q: _Array, k_cache: Any, indices: Any, *, cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'],
        topk_length: Any = None, attn_sink: Any = None, extra_k_cache: Any = None, extra_indices: Any = None,
        extra_topk_length: Any = None, sm_scale: float | None = None, lse_base: Literal['e', '2'] = "e",
        splits: int | None = None, out: Any = None, lse: Any = None, workspace: Any = None,
        check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array]]:
        """Do all of a call of `sparse_mla_decode` but the launch: checks, plan, compilation, allocation and binding."""

    def workspace_bytes(
        self, q: Any, k_cache: Any, indices: Any, *, cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'],
        topk_length: Any = None, attn_sink: Any = None, extra_k_cache: Any = None, extra_indices: Any = None,
        extra_topk_length: Any = None, sm_scale: float | None = None, lse_base: Literal['e', '2'] = "e",
        splits: int | None = None, out: Any = None, lse: Any = None, workspace: Any = None,
        check_indices: bool = False, stream: object = None,
    ) -> int:
        """How many bytes the `workspace` of a call of `sparse_mla_decode` with these arguments has to have at least; 0 where none"""


sparse_mla_decode: _SparseMlaDecode


class _MergeAttention:
    """Merge attention over parts of the keys into attention over all of them."""

    name: str

    @overload
    def __call__(
        self, outs: NDArray[Any], lses: Any, *, attn_sink: Any = None, lse_base: Literal['e', '2'] = "e",
        out: Any = None, lse: Any = None, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, outs: _Array, lses: Any, *, attn_sink: Any = None, lse_base: Literal['e', '2'] = "e", out: Any = None,
        lse: Any = None, stream: object = None,
    ) -> tuple[_Array, _Array]:
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

    @overload
    def prepare(
        self, outs: NDArray[Any], lses: Any, *, attn_sink: Any = None, lse_base: Literal['e', '2'] = "e",
        out: Any = None, lse: Any = None, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, outs: _Array, lses: Any, *, attn_sink: Any = None, lse_base: Literal['e', '2'] = "e", out: Any = None,
        lse: Any = None, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array]]:
        """Do all of a call of `merge_attention` but the launch: checks, plan, compilation, allocation and binding."""


merge_attention: _MergeAttention


class _IndexerLogits:
    """Score every key for each query with the lightning indexer's heads."""

    name: str

    @overload
    def __call__(
        self, q: NDArray[Any], k: Any, weights: Any, *, q_scale: Any = None, k_scale: Any = None, starts: Any = None,
        ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1, relu: bool = True,
        logits: Any = None, stream: object = None,
    ) -> NDArray[Any]: ...

    @overload
    def __call__(
        self, q: _Array, k: Any, weights: Any, *, q_scale: Any = None, k_scale: Any = None, starts: Any = None,
        ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1, relu: bool = True,
        logits: Any = None, stream: object = None,
    ) -> _Array:
        """Score every key for each query with the lightning indexer's heads.

            logits[t, s] = k_scale[s] * sum over h of weights[t, h] * q_scale[t, h] * relu(q[t, h] . k[s])

        Keys that a query does not see get -inf. A score has the same bits whatever T, L and the batch are, on one kind of
        GPU. The CPU gives the same bits wherever the tensor cores' sums q . k are exact.

        Args:
            q: [T, H, D] fp8 e4m3fn, bfloat16 or float16, H 1 to 128, D 64 or 128. uint8 is taken as the bytes of fp8. Every
                array may have a leading batch axis; then all have it.
            k: [L, D], q's dtype. The last axis of q and k is contiguous, other strides are any multiple of 16 bytes, the
                address is a multiple of 16 bytes.
            weights: [T, H] float32 or bfloat16, any strides. What the model multiplies them with is in them.
            q_scale: [T, H] float32, any strides, with fp8 only; ones by default.
            k_scale: [L] float32, any strides, with fp8 only; ones by default.
            starts: [T] int32, the first visible key of each query, clamped to [0, L]; 0 by default.
            ends: [T] int32, the key after the last visible one, clamped to [0, L]; L by default.
            causal: mask keys that are not complete at the query's position: query t sees keys
                s < (q_start + t + 1) // k_stride.
            q_start: position of query 0, for causal.
            k_stride: positions per key, for causal, >= 1.
            relu: products below zero count as zero; a NaN stays.
            logits: array to write, [T, L] float32, the last axis contiguous.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of q's framework by default. It means nothing on the CPU.

        Returns:
            logits in q's framework, [T, L] float32. With fp8 the error is at most 2**-11 of the sum of |w qs ks q k|, the
            tensor cores' own; else 2**-14 of it.

        Raises:
            InputError: an argument cannot be used as it is; nothing was computed or written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: the lightning indexer of DeepSeek-V3.2, section 2.1.
        """

    @overload
    def prepare(
        self, q: NDArray[Any], k: Any, weights: Any, *, q_scale: Any = None, k_scale: Any = None, starts: Any = None,
        ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1, relu: bool = True,
        logits: Any = None, stream: object = None,
    ) -> Prepared[NDArray[Any]]: ...

    @overload
    def prepare(
        self, q: _Array, k: Any, weights: Any, *, q_scale: Any = None, k_scale: Any = None, starts: Any = None,
        ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1, relu: bool = True,
        logits: Any = None, stream: object = None,
    ) -> Prepared[_Array]:
        """Do all of a call of `indexer_logits` but the launch: checks, plan, compilation, allocation and binding."""


indexer_logits: _IndexerLogits


class _IndexerTopk:
    """Select each query's keys with the lightning indexer, without holding all scores."""

    name: str

    @overload
    def __call__(
        self, q: NDArray[Any], k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: Literal[False] = False, return_lse: Literal[False] = False,
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, q: _Array, k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: Literal[False] = False, return_lse: Literal[False] = False,
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, stream: object = None,
    ) -> tuple[_Array, _Array]: ...

    @overload
    def __call__(
        self, q: NDArray[Any], k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: Literal[True], return_lse: Literal[False] = False,
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, q: _Array, k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: Literal[True], return_lse: Literal[False] = False,
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, stream: object = None,
    ) -> tuple[_Array, _Array, _Array]: ...

    @overload
    def __call__(
        self, q: NDArray[Any], k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: Literal[False] = False, return_lse: Literal[True],
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, q: _Array, k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: Literal[False] = False, return_lse: Literal[True],
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, stream: object = None,
    ) -> tuple[_Array, _Array, _Array]: ...

    @overload
    def __call__(
        self, q: NDArray[Any], k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: Literal[True], return_lse: Literal[True], lse_base: Literal['e', '2'] = "e",
        indices: Any = None, count: Any = None, values: Any = None, lse: Any = None, workspace: Any = None,
        stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, q: _Array, k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: Literal[True], return_lse: Literal[True], lse_base: Literal['e', '2'] = "e",
        indices: Any = None, count: Any = None, values: Any = None, lse: Any = None, workspace: Any = None,
        stream: object = None,
    ) -> tuple[_Array, _Array, _Array, _Array]: ...

    @overload
    def __call__(
        self, q: Any, k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: bool, return_lse: bool, lse_base: Literal['e', '2'] = "e",
        indices: Any = None, count: Any = None, values: Any = None, lse: Any = None, workspace: Any = None,
        stream: object = None,
    ) -> tuple[Any, Any] | tuple[Any, Any, Any] | tuple[Any, Any, Any, Any]:
        """Select each query's keys with the lightning indexer, without holding all scores.

        The selection is that of `topk(indexer_logits(...), topk)`, bit for bit: the larger score first, of equal ones the
        smaller key; a NaN is never selected. Scores are made and selected from for some rows at a time.

        Args:
            q: [T, H, D] fp8 e4m3fn, bfloat16 or float16, H 1 to 128, D 64 or 128. uint8 is taken as the bytes of fp8. Every
                array may have a leading batch axis; then all have it.
            k: [L, D], q's dtype. The last axis of q and k is contiguous, other strides are any multiple of 16 bytes, the
                address is a multiple of 16 bytes.
            weights: [T, H] float32 or bfloat16, any strides. What the model multiplies them with is in them.
            topk: how many keys of each query, at least 1; it may be more than L.
            q_scale: [T, H] float32, any strides, with fp8 only; ones by default.
            k_scale: [L] float32, any strides, with fp8 only; ones by default.
            starts: [T] int32, the first visible key of each query, clamped to [0, L]; 0 by default.
            ends: [T] int32, the key after the last visible one, clamped to [0, L]; L by default.
            causal: mask keys that are not complete at the query's position: query t sees keys
                s < (q_start + t + 1) // k_stride.
            q_start: position of query 0, for causal.
            k_stride: positions per key, for causal, >= 1.
            relu: products below zero count as zero; a NaN stays.
            return_values: return the selected scores, too.
            return_lse: return the logarithm of the sum of the selected scores' exponentials, too.
            lse_base: "e" or "2", the base of that logarithm.
            indices: array to write, [T, topk] int32, the last axis contiguous.
            count: array to write, [T] int32.
            values: array to write, [T, topk] float32, the last axis contiguous; with return_values only.
            lse: array to write, [T] float32; with return_lse only.
            workspace: memory to work in, [n] uint8, contiguous, at an address that is a multiple of 16 bytes, n at least
                `indexer_topk.workspace_bytes(...)` of the same arguments: at most 192 MiB, or what one row of scores takes.
                What it holds means nothing, before and after. Allocated by default.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of q's framework by default. It means nothing on the CPU.

        Returns:
            (indices, count), and values and lse behind them where asked for, in q's framework. Ids of keys ascend; entries
            left over come last and hold -1, their values -inf. count says how many ids there are, which is what
            `topk_length` of sparse attention wants. lse is +inf where nothing is selected.

        Raises:
            InputError: an argument cannot be used as it is; nothing was computed or written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: the lightning indexer of DeepSeek-V3.2, section 2.1.
        """

    @overload
    def prepare(
        self, q: NDArray[Any], k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: Literal[False] = False, return_lse: Literal[False] = False,
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, q: _Array, k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: Literal[False] = False, return_lse: Literal[False] = False,
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array]]: ...

    @overload
    def prepare(
        self, q: NDArray[Any], k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: Literal[True], return_lse: Literal[False] = False,
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, q: _Array, k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: Literal[True], return_lse: Literal[False] = False,
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array, _Array]]: ...

    @overload
    def prepare(
        self, q: NDArray[Any], k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: Literal[False] = False, return_lse: Literal[True],
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, q: _Array, k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: Literal[False] = False, return_lse: Literal[True],
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array, _Array]]: ...

    @overload
    def prepare(
        self, q: NDArray[Any], k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: Literal[True], return_lse: Literal[True], lse_base: Literal['e', '2'] = "e",
        indices: Any = None, count: Any = None, values: Any = None, lse: Any = None, workspace: Any = None,
        stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, q: _Array, k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: Literal[True], return_lse: Literal[True], lse_base: Literal['e', '2'] = "e",
        indices: Any = None, count: Any = None, values: Any = None, lse: Any = None, workspace: Any = None,
        stream: object = None,
    ) -> Prepared[tuple[_Array, _Array, _Array, _Array]]: ...

    @overload
    def prepare(
        self, q: Any, k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: bool, return_lse: bool, lse_base: Literal['e', '2'] = "e",
        indices: Any = None, count: Any = None, values: Any = None, lse: Any = None, workspace: Any = None,
        stream: object = None,
    ) -> Prepared[tuple[Any, Any] | tuple[Any, Any, Any] | tuple[Any, Any, Any, Any]]:
        """Do all of a call of `indexer_topk` but the launch: checks, plan, compilation, allocation and binding."""

    def workspace_bytes(
        self, q: Any, k: Any, weights: Any, topk: int, *, q_scale: Any = None, k_scale: Any = None,
        starts: Any = None, ends: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        relu: bool = True, return_values: bool = False, return_lse: bool = False, lse_base: Literal['e', '2'] = "e",
        indices: Any = None, count: Any = None, values: Any = None, lse: Any = None, workspace: Any = None,
        stream: object = None,
    ) -> int:
        """How many bytes the `workspace` of a call of `indexer_topk` with these arguments has to have at least; 0 where none"""


indexer_topk: _IndexerTopk


class _PagedIndexerTopk:
    """Select each query's keys, which lie in pages, with the lightning indexer."""

    name: str

    @overload
    def __call__(
        self, q: NDArray[Any], k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: Literal[False] = False, return_lse: Literal[False] = False,
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, q: _Array, k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: Literal[False] = False, return_lse: Literal[False] = False,
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> tuple[_Array, _Array]: ...

    @overload
    def __call__(
        self, q: NDArray[Any], k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: Literal[True], return_lse: Literal[False] = False,
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, q: _Array, k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: Literal[True], return_lse: Literal[False] = False,
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> tuple[_Array, _Array, _Array]: ...

    @overload
    def __call__(
        self, q: NDArray[Any], k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: Literal[False] = False, return_lse: Literal[True],
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, q: _Array, k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: Literal[False] = False, return_lse: Literal[True],
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> tuple[_Array, _Array, _Array]: ...

    @overload
    def __call__(
        self, q: NDArray[Any], k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: Literal[True], return_lse: Literal[True],
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, q: _Array, k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: Literal[True], return_lse: Literal[True],
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> tuple[_Array, _Array, _Array, _Array]: ...

    @overload
    def __call__(
        self, q: Any, k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: bool, return_lse: bool, lse_base: Literal['e', '2'] = "e",
        indices: Any = None, count: Any = None, values: Any = None, lse: Any = None, workspace: Any = None,
        check_indices: bool = False, stream: object = None,
    ) -> tuple[Any, Any] | tuple[Any, Any, Any] | tuple[Any, Any, Any, Any]:
        """Select each query's keys, which lie in pages, with the lightning indexer.

        The selection is that of `topk` from the scores of `paged_indexer_logits`, bit for bit: the larger score first, of
        equal ones the earlier token; a NaN is never selected. Lengths and tables are read on the GPU: one CUDA graph serves
        all of them, and time follows the lengths.

        Args:
            q: [B, n, H, D] fp8 e4m3fn, bfloat16 or float16, n queries of each of B requests, H 1 to 128, D 64 or 128. uint8
                is taken as the bytes of fp8. The last axis is contiguous, other strides are any multiple of 16 bytes, the
                address is a multiple of 16 bytes.
            k_cache: keys, as of `paged_indexer_logits`: [blocks, page, D + 4] in fp8, else [blocks, page, D] in q's dtype.
            weights: [B, n, H] float32 or bfloat16, any strides. What the model multiplies them with is in them.
            block_tables: [B, width] int32, any strides. Position p of request b is in block block_tables[b, p // page]. A
                block that is not in the cache hides its keys.
            context_lens: int32, any strides. [B]: query j sees the first context_lens[b] - n + 1 + j keys. [B, n]: it sees
                context_lens[b, j] keys. Clamped to [0, width * page], and to max_context.
            topk: how many keys of each query, at least 1; it may be more than it sees.
            q_scale: [B, n, H] float32, any strides, with fp8 only; ones by default.
            relu: products below zero count as zero; a NaN stays.
            positions: what ids are: "slot", block * page + offset, or "token", the position in the request.
            max_context: a bound of the lengths, which the caller knows: it decides how much work and memory is laid out.
            return_values: return the selected scores, too.
            return_lse: return the logarithm of the sum of the selected scores' exponentials, too.
            lse_base: "e" or "2", the base of that logarithm.
            indices: array to write, [B, n, topk] int32, the last axis contiguous.
            count: array to write, [B, n] int32.
            values: array to write, [B, n, topk] float32, the last axis contiguous; with return_values only.
            lse: array to write, [B, n] float32; with return_lse only.
            workspace: memory to work in, [m] uint8, contiguous, at an address that is a multiple of 16 bytes, m at least
                `paged_indexer_topk.workspace_bytes(...)` of the same arguments: at most 192 MiB, or what the scores of one
                request take. What it holds means nothing, before and after. Allocated by default.
            check_indices: raise InputError for blocks of seen keys that are neither -1 nor in the cache; that waits for the
                GPU.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of q's framework by default. It means nothing on the CPU.

        Returns:
            (indices, count), and values and lse behind them where asked for, in q's framework. Token positions ascend, so
            slots need not; entries left over come last and hold -1, their values -inf. count says how many ids there are.
            lse is +inf where nothing is selected.

        Raises:
            InputError: an argument cannot be used as it is; nothing was computed or written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: the lightning indexer of DeepSeek-V3.2, section 2.1; the pages are DeepGEMM's (`kv_cache_cast_to_fp8` of its
        tests).
        """

    @overload
    def prepare(
        self, q: NDArray[Any], k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: Literal[False] = False, return_lse: Literal[False] = False,
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, q: _Array, k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: Literal[False] = False, return_lse: Literal[False] = False,
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array]]: ...

    @overload
    def prepare(
        self, q: NDArray[Any], k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: Literal[True], return_lse: Literal[False] = False,
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, q: _Array, k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: Literal[True], return_lse: Literal[False] = False,
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array, _Array]]: ...

    @overload
    def prepare(
        self, q: NDArray[Any], k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: Literal[False] = False, return_lse: Literal[True],
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, q: _Array, k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: Literal[False] = False, return_lse: Literal[True],
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array, _Array]]: ...

    @overload
    def prepare(
        self, q: NDArray[Any], k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: Literal[True], return_lse: Literal[True],
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, q: _Array, k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: Literal[True], return_lse: Literal[True],
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array, _Array, _Array]]: ...

    @overload
    def prepare(
        self, q: Any, k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: bool, return_lse: bool, lse_base: Literal['e', '2'] = "e",
        indices: Any = None, count: Any = None, values: Any = None, lse: Any = None, workspace: Any = None,
        check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[Any, Any] | tuple[Any, Any, Any] | tuple[Any, Any, Any, Any]]:
        """Do all of a call of `paged_indexer_topk` but the launch: checks, plan, compilation, allocation and binding."""

    def workspace_bytes(
        self, q: Any, k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, topk: int, *,
        q_scale: Any = None, relu: bool = True, positions: Literal['slot', 'token'] = "slot",
        max_context: int | None = None, return_values: bool = False, return_lse: bool = False,
        lse_base: Literal['e', '2'] = "e", indices: Any = None, count: Any = None, values: Any = None,
        lse: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> int:
        """How many bytes the `workspace` of a call of `paged_indexer_topk` with these arguments has to have at least; 0 where none"""


paged_indexer_topk: _PagedIndexerTopk


class _PagedIndexerLogits:
    """Score the keys of each request, which lie in pages, for its queries."""

    name: str

    @overload
    def __call__(
        self, q: NDArray[Any], k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, *,
        q_scale: Any = None, relu: bool = True, max_context: int | None = None, logits: Any = None,
        check_indices: bool = False, stream: object = None,
    ) -> NDArray[Any]: ...

    @overload
    def __call__(
        self, q: _Array, k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, *, q_scale: Any = None,
        relu: bool = True, max_context: int | None = None, logits: Any = None, check_indices: bool = False,
        stream: object = None,
    ) -> _Array:
        """Score the keys of each request, which lie in pages, for its queries.

        The score of a query and a key has the same bits as in `indexer_logits`. Keys that a query does not see, and those
        of a block that is not in the cache, get -inf. Lengths and tables are read on the GPU: one CUDA graph serves all of
        them, and the time of scoring follows the lengths.

        Args:
            q: [B, n, H, D] fp8 e4m3fn, bfloat16 or float16, n queries of each of B requests, H 1 to 128, D 64 or 128. uint8
                is taken as the bytes of fp8. The last axis is contiguous, other strides are any multiple of 16 bytes, the
                address is a multiple of 16 bytes.
            k_cache: keys. With fp8 [blocks, page, D + 4] or [blocks, page, 1, D + 4], fp8 or uint8: a block's bytes are
                contiguous, page rows of D codes, then page fp32 scales ("indexer_fp8"); the distance of blocks and the
                address are multiples of 4 bytes, and of 16 bytes for speed. Else [blocks, page, D] or [blocks, page, 1, D]
                in q's dtype, with strides as q's.
            weights: [B, n, H] float32 or bfloat16, any strides. What the model multiplies them with is in them.
            block_tables: [B, width] int32, any strides. Position p of request b is in block block_tables[b, p // page].
            context_lens: int32, any strides. [B]: query j sees the first context_lens[b] - n + 1 + j keys. [B, n]: it sees
                context_lens[b, j] keys. Clamped to [0, width * page], and to max_context.
            q_scale: [B, n, H] float32, any strides, with fp8 only; ones by default.
            relu: products below zero count as zero; a NaN stays.
            max_context: a bound of the lengths, which the caller knows: it decides how much work is laid out.
            logits: array to write, [B, n, width * page] float32, the last axis contiguous.
            check_indices: raise InputError for blocks of seen keys that are neither -1 nor in the cache; that waits for the
                GPU.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of q's framework by default. It means nothing on the CPU.

        Returns:
            logits in q's framework, [B, n, width * page] float32, with the errors of `indexer_logits`.

        Raises:
            InputError: an argument cannot be used as it is; nothing was computed or written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: the lightning indexer of DeepSeek-V3.2, section 2.1; the pages are DeepGEMM's (`kv_cache_cast_to_fp8` of its
        tests).
        """

    @overload
    def prepare(
        self, q: NDArray[Any], k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, *,
        q_scale: Any = None, relu: bool = True, max_context: int | None = None, logits: Any = None,
        check_indices: bool = False, stream: object = None,
    ) -> Prepared[NDArray[Any]]: ...

    @overload
    def prepare(
        self, q: _Array, k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, *, q_scale: Any = None,
        relu: bool = True, max_context: int | None = None, logits: Any = None, check_indices: bool = False,
        stream: object = None,
    ) -> Prepared[_Array]:
        """Do all of a call of `paged_indexer_logits` but the launch: checks, plan, compilation, allocation and binding."""


paged_indexer_logits: _PagedIndexerLogits


class _IndexerLoss:
    """The KL divergence of the indexer's softmax over selected keys from a target, and its gradient."""

    name: str

    @overload
    def __call__(
        self, q: NDArray[Any], k: Any, weights: Any, indices: Any, target: Any, *, topk_length: Any = None,
        lse: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1, relu: bool = True,
        loss: Any = None, grad_logits: Any = None, check_indices: bool = False, stream: object = None,
    ) -> NDArray[Any]: ...

    @overload
    def __call__(
        self, q: _Array, k: Any, weights: Any, indices: Any, target: Any, *, topk_length: Any = None, lse: Any = None,
        causal: bool = False, q_start: int = 0, k_stride: int = 1, relu: bool = True, loss: Any = None,
        grad_logits: Any = None, check_indices: bool = False, stream: object = None,
    ) -> _Array:
        """The KL divergence of the indexer's softmax over selected keys from a target, and its gradient.

        Over the valid entries s of a row, with score[s] = sum over h of weights[t, h] * relu(q[t, h] . k[indices[t, s]]):

            p           = target / max(sum of target, 1e-10)
            loss[t]     = sum of p * (log p - log softmax(score))        terms with p = 0 add 0
            grad_logits = (sum of p) * softmax(score) - p                the gradient with respect to the scores

        A row without valid entries, or without target, has loss and gradient 0. Nothing of T x L is held.

        Args:
            q: [T, H, D] bfloat16 or float16, H 1 to 128, D 64 or 128. Every array may have a leading batch axis; then all
                have it.
            k: [L, D], q's dtype. The last axis of q and k is contiguous, other strides are any multiple of 16 bytes, the
                address is a multiple of 16 bytes.
            weights: [T, H] float32 or bfloat16, any strides. What the model multiplies them with is in them.
            indices: [T, topk] int32, the selected keys, the last axis contiguous. An entry is valid when it is in [0, L)
                and the causal mask shows it; a key that is named twice counts twice.
            target: [T, topk] float32, not negative, the last axis contiguous: what `attn_dist` returns, normalised or not,
                or sums of it over ranks. Values at invalid entries are not looked at.
            topk_length: [T] int32, entries of each row that count, clamped to [0, topk]; all by default.
            lse: [T] float32, the natural log-sum-exp of each row's valid scores, where it is known.
            causal: mask keys that are not complete at the query's position: query t sees keys
                s < (q_start + t + 1) // k_stride.
            q_start: position of query 0, for causal.
            k_stride: positions per key, for causal, >= 1.
            relu: products below zero count as zero; a NaN stays.
            loss: array to write, [T] float32.
            grad_logits: array to write, [T, topk] float32, the last axis contiguous.
            check_indices: look at the entries that count and raise InputError for one that is neither -1 nor in [0, L).
                Waits for the stream.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of q's framework by default. It means nothing on the CPU.

        Returns:
            loss [T] and grad_logits [T, topk], float32, in q's framework. Invalid entries have gradient 0. The same bits in
            every run.

        Raises:
            InputError: an argument cannot be used as it is; nothing was computed or written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: the sparse training stage of DeepSeek-V3.2, section 2.1.1.
        """

    @overload
    def prepare(
        self, q: NDArray[Any], k: Any, weights: Any, indices: Any, target: Any, *, topk_length: Any = None,
        lse: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1, relu: bool = True,
        loss: Any = None, grad_logits: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[NDArray[Any]]: ...

    @overload
    def prepare(
        self, q: _Array, k: Any, weights: Any, indices: Any, target: Any, *, topk_length: Any = None, lse: Any = None,
        causal: bool = False, q_start: int = 0, k_stride: int = 1, relu: bool = True, loss: Any = None,
        grad_logits: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[_Array]:
        """Do all of a call of `indexer_loss` but the launch: checks, plan, compilation, allocation and binding."""


indexer_loss: _IndexerLoss


class _IndexerBwd:
    """Gradients of a loss with respect to q, k and weights, from its gradient with respect to scores at selected keys."""

    name: str

    @overload
    def __call__(
        self, q: NDArray[Any], k: Any, weights: Any, grad_logits: Any, indices: Any, *, topk_length: Any = None,
        causal: bool = False, q_start: int = 0, k_stride: int = 1, relu: bool = True, deterministic: bool = False,
        lists: Any = None, dk_dtype: Literal['float32'] | None = None, dq: Any = None, dk: Any = None,
        dweights: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, q: _Array, k: Any, weights: Any, grad_logits: Any, indices: Any, *, topk_length: Any = None,
        causal: bool = False, q_start: int = 0, k_stride: int = 1, relu: bool = True, deterministic: bool = False,
        lists: Any = None, dk_dtype: Literal['float32'] | None = None, dq: Any = None, dk: Any = None,
        dweights: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> tuple[_Array, _Array, _Array]:
        """Gradients of a loss with respect to q, k and weights, from its gradient with respect to scores at selected keys.

        A score is the sum over h of weights[t, h] * relu(z), z = q[t, h] . k[s]. With g = grad_logits, over valid entries:

            dweights[t, h] = sum over s of g * relu(z)
            dq[t, h]       = weights[t, h] * sum over s of g * [z > 0] * k[s]
            dk[s]          = sum over t, h of g * weights[t, h] * [z > 0] * q[t, h]

        The derivative of relu at 0, and at NaN, is 0. A row without a valid entry gives zeros, and so does a key that no
        valid entry names. Nothing of T x L is held.

        Args:
            q: [T, H, D] bfloat16 or float16, H 1 to 128, D 64 or 128. Every array may have a leading batch axis; then all
                have it, and indices count within their batch entry.
            k: [L, D], q's dtype. The last axis of q and k is contiguous, other strides are any multiple of 16 bytes, the
                address is a multiple of 16 bytes.
            weights: [T, H] float32 or bfloat16, any strides. What the model multiplies them with is in them.
            grad_logits: [T, topk] float32, the last axis contiguous: what `indexer_loss` returns, times the loss's own
                gradient. Values at invalid entries are not looked at.
            indices: [T, topk] int32, the selected keys, the last axis contiguous. An entry is valid when it is in [0, L)
                and the causal mask shows it; a key that is named twice counts twice.
            topk_length: [T] int32, entries of each row that count, clamped to [0, topk]; all by default.
            causal: mask keys that are not complete at the query's position: query t sees keys
                s < (q_start + t + 1) // k_stride.
            q_start: position of query 0, for causal.
            k_stride: positions per key, for causal, >= 1.
            relu: products below zero count as zero; without it [z > 0] is 1.
            deterministic: give the same bits on every run. A call on a GPU then sums dk in 32-bit integers, whose unit is
                2^-30 of what all entries may add to the key, in a channel. Up to 2^29 entries in a batch entry.
            lists: what `invert_indices(indices, L, topk_length=topk_length)` returns, so that a call can be given what
                `sparse_mla_bwd` is. Only `check_indices` reads it: integers have one sum in every order.
            dk_dtype: dtype of dk: None for k's, or "float32".
            dq: array to write, [T, H, D] of q's dtype, with strides as q's may have.
            dk: array to write, [L, D], with strides as k's may have. It is overwritten, not added to.
            dweights: array to write, [T, H] of weights' dtype, any strides.
            workspace: memory to work in, [n] uint8, contiguous, at an address that is a multiple of 16 bytes, n at least
                `indexer_bwd.workspace_bytes(...)` of the same arguments; what it holds means nothing, before and after.
                Calls that may run at the same time need one each. By default it comes from the allocator of q's framework.
            check_indices: look at the entries that count and raise InputError for one that is neither -1 nor in [0, L), and
                for lists of other indices. Waits for the stream.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of q's framework by default. It means nothing on the CPU.

        Returns:
            (dq, dk, dweights) in q's framework. Sums are float32, or those integers.

        Raises:
            InputError: an argument cannot be used as it is; nothing was computed or written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: derivatives of the index score of DeepSeek-V3.2, section 2.1, for its sparse training stage.
        """

    @overload
    def prepare(
        self, q: NDArray[Any], k: Any, weights: Any, grad_logits: Any, indices: Any, *, topk_length: Any = None,
        causal: bool = False, q_start: int = 0, k_stride: int = 1, relu: bool = True, deterministic: bool = False,
        lists: Any = None, dk_dtype: Literal['float32'] | None = None, dq: Any = None, dk: Any = None,
        dweights: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, q: _Array, k: Any, weights: Any, grad_logits: Any, indices: Any, *, topk_length: Any = None,
        causal: bool = False, q_start: int = 0, k_stride: int = 1, relu: bool = True, deterministic: bool = False,
        lists: Any = None, dk_dtype: Literal['float32'] | None = None, dq: Any = None, dk: Any = None,
        dweights: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array, _Array]]:
        """Do all of a call of `indexer_bwd` but the launch: checks, plan, compilation, allocation and binding."""

    def workspace_bytes(
        self, q: Any, k: Any, weights: Any, grad_logits: Any, indices: Any, *, topk_length: Any = None,
        causal: bool = False, q_start: int = 0, k_stride: int = 1, relu: bool = True, deterministic: bool = False,
        lists: Any = None, dk_dtype: Literal['float32'] | None = None, dq: Any = None, dk: Any = None,
        dweights: Any = None, workspace: Any = None, check_indices: bool = False, stream: object = None,
    ) -> int:
        """How many bytes the `workspace` of a call of `indexer_bwd` with these arguments has to have at least; 0 where none"""


indexer_bwd: _IndexerBwd


class _IndexerLossDense:
    """The KL divergence of the indexer's softmax over all visible keys from dense MLA attention, with its gradients."""

    name: str

    @overload
    def __call__(
        self, q: NDArray[Any], k: Any, weights: Any, mla_q: Any, mla_kv: Any, *, mla_lse: Any = None,
        starts: Any = None, ends: Any = None, grad_loss: Any = None, causal: bool = False, q_start: int = 0,
        k_stride: int = 1, sm_scale: float | None = None, lse_base: Literal['e', '2'] = "e", relu: bool = True,
        dk_dtype: Literal['float32'] | None = None, loss: Any = None, dq: Any = None, dk: Any = None,
        dweights: Any = None, workspace: Any = None, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, q: _Array, k: Any, weights: Any, mla_q: Any, mla_kv: Any, *, mla_lse: Any = None, starts: Any = None,
        ends: Any = None, grad_loss: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        sm_scale: float | None = None, lse_base: Literal['e', '2'] = "e", relu: bool = True,
        dk_dtype: Literal['float32'] | None = None, loss: Any = None, dq: Any = None, dk: Any = None,
        dweights: Any = None, workspace: Any = None, stream: object = None,
    ) -> tuple[_Array, _Array, _Array, _Array]:
        """The KL divergence of the indexer's softmax over all visible keys from dense MLA attention, with its gradients.

        Of query t, over the keys s that it sees:

            target[s] = sum over MLA heads of exp(sm_scale * mla_q[t, h] . mla_kv[s] - mla_lse[t, h])
            p         = target / max(sum of target, 1e-10)
            score[s]  = sum over h of weights[t, h] * relu(q[t, h] . k[s])
            loss[t]   = sum of p * (log p - log softmax(score))          terms with p = 0 add 0

        dq, dk and dweights are the gradients of the sum over t of grad_loss[t] * loss[t]. The target is a constant. It is
        computed anew, for some queries at a time: memory does not grow with T x L. A query that sees no key has loss and
        gradient 0.

        A query is spoilt when its target's sum, its scores' log-sum-exp or its grad_loss is not finite, or when it has a
        number that is not finite in q or in weights, or sees one in k. Its dq and dweights are NaN, and so is dk of every
        key that it sees; no other query is touched.

        Args:
            q: [T, H, D] bfloat16 or float16, H 1 to 128, D 64 or 128: the indexer's. Every array may have a leading batch
                axis; then all have it.
            k: [L, D], q's dtype. The last axis of q, k, mla_q and mla_kv is contiguous, other strides are any multiple of
                16 bytes, the address is a multiple of 16 bytes.
            weights: [T, H] float32 or bfloat16, any strides. What the model multiplies them with is in them.
            mla_q: [T, Hq, d] in q's dtype, d 576 or 512, Hq at least 1: the queries of the main attention, absorbed.
            mla_kv: [L, d], q's dtype: the latents that they attend to.
            mla_lse: [T, Hq] float32, any strides: the log-sum-exp of each MLA head, as a forward returns it. It may count
                more than the visible keys, such as a sink or a window. By default it is computed, of the visible keys.
            starts: [T] int32, the first visible key of each query, clamped to [0, L]; 0 by default.
            ends: [T] int32, the key after the last visible one, clamped to [0, L]; L by default.
            grad_loss: [T] float32, any strides: the gradient of each row's loss; ones by default.
            causal: mask keys that are not complete at the query's position: query t sees keys
                s < (q_start + t + 1) // k_stride.
            q_start: position of query 0, for causal.
            k_stride: positions per key, for causal, >= 1.
            sm_scale: factor of the main attention's scores, |sm_scale| <= 2**126; d ** -0.5 by default.
            lse_base: "e" or "2": the base that mla_lse is in.
            relu: products below zero count as zero; a NaN stays.
            dk_dtype: dtype of dk: None for k's, or "float32".
            loss: array to write, [T] float32.
            dq: array to write, [T, H, D] of q's dtype, with strides as q's may have.
            dk: array to write, [L, D], with strides as k's may have. It is overwritten, not added to.
            dweights: array to write, [T, H] of weights' dtype, any strides.
            workspace: memory to work in, [n] uint8, contiguous, at an address that is a multiple of 16 bytes, n at least
                `indexer_loss_dense.workspace_bytes(...)` of the same arguments; what it holds means nothing, before and
                after. Calls that may run at the same time need one each. By default it comes from the allocator of q's
                framework.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of q's framework by default. It means nothing on the CPU.

        Returns:
            (loss, dq, dk, dweights) in q's framework: loss [T] float32, the gradients as described above. All sums are
            float32 or wider. The same bits in every run.

        Raises:
            InputError: an argument cannot be used as it is; nothing was computed or written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: the dense warm-up stage of DeepSeek-V3.2, section 2.1.1.
        """

    @overload
    def prepare(
        self, q: NDArray[Any], k: Any, weights: Any, mla_q: Any, mla_kv: Any, *, mla_lse: Any = None,
        starts: Any = None, ends: Any = None, grad_loss: Any = None, causal: bool = False, q_start: int = 0,
        k_stride: int = 1, sm_scale: float | None = None, lse_base: Literal['e', '2'] = "e", relu: bool = True,
        dk_dtype: Literal['float32'] | None = None, loss: Any = None, dq: Any = None, dk: Any = None,
        dweights: Any = None, workspace: Any = None, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, q: _Array, k: Any, weights: Any, mla_q: Any, mla_kv: Any, *, mla_lse: Any = None, starts: Any = None,
        ends: Any = None, grad_loss: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        sm_scale: float | None = None, lse_base: Literal['e', '2'] = "e", relu: bool = True,
        dk_dtype: Literal['float32'] | None = None, loss: Any = None, dq: Any = None, dk: Any = None,
        dweights: Any = None, workspace: Any = None, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array, _Array, _Array]]:
        """Do all of a call of `indexer_loss_dense` but the launch: checks, plan, compilation, allocation and binding."""

    def workspace_bytes(
        self, q: Any, k: Any, weights: Any, mla_q: Any, mla_kv: Any, *, mla_lse: Any = None, starts: Any = None,
        ends: Any = None, grad_loss: Any = None, causal: bool = False, q_start: int = 0, k_stride: int = 1,
        sm_scale: float | None = None, lse_base: Literal['e', '2'] = "e", relu: bool = True,
        dk_dtype: Literal['float32'] | None = None, loss: Any = None, dq: Any = None, dk: Any = None,
        dweights: Any = None, workspace: Any = None, stream: object = None,
    ) -> int:
        """How many bytes the `workspace` of a call of `indexer_loss_dense` with these arguments has to have at least; 0 where none"""


indexer_loss_dense: _IndexerLossDense


class _Topk:
    """Select the largest scores of each row, exactly."""

    name: str

    @overload
    def __call__(
        self, scores: NDArray[Any], topk: int, *, starts: Any = None, ends: Any = None,
        order: Literal['index', 'score'] = "index", return_values: Literal[False] = False, indices: Any = None,
        count: Any = None, values: Any = None, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, scores: _Array, topk: int, *, starts: Any = None, ends: Any = None,
        order: Literal['index', 'score'] = "index", return_values: Literal[False] = False, indices: Any = None,
        count: Any = None, values: Any = None, stream: object = None,
    ) -> tuple[_Array, _Array]: ...

    @overload
    def __call__(
        self, scores: NDArray[Any], topk: int, *, starts: Any = None, ends: Any = None,
        order: Literal['index', 'score'] = "index", return_values: Literal[True], indices: Any = None,
        count: Any = None, values: Any = None, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, scores: _Array, topk: int, *, starts: Any = None, ends: Any = None,
        order: Literal['index', 'score'] = "index", return_values: Literal[True], indices: Any = None,
        count: Any = None, values: Any = None, stream: object = None,
    ) -> tuple[_Array, _Array, _Array]: ...

    @overload
    def __call__(
        self, scores: Any, topk: int, *, starts: Any = None, ends: Any = None,
        order: Literal['index', 'score'] = "index", return_values: bool, indices: Any = None, count: Any = None,
        values: Any = None, stream: object = None,
    ) -> tuple[Any, Any] | tuple[Any, Any, Any]:
        """Select the largest scores of each row, exactly.

        The order is total: the larger score first, of equal ones the smaller index. -0.0 equals +0.0. NaN and -inf are
        never selected. So the result is one set, the same in every run.

        Args:
            scores: [T, L] float32, bfloat16 or float16, the last axis contiguous. Every array may have a leading batch
                axis; then all have it.
            topk: how many of each row, at least 1; it may be more than L.
            starts: [T] int32, the first visible column of each row, clamped to [0, L]; 0 by default.
            ends: [T] int32, the column after the last visible one, clamped to [0, L]; L by default. A row with
                starts >= ends is empty.
            order: "index": ids ascend. "score": scores descend, equal ones by ascending id.
            return_values: return the selected scores, too.
            indices: array to write, [T, topk] int32, the last axis contiguous.
            count: array to write, [T] int32.
            values: array to write, [T, topk] in the scores' dtype, the last axis contiguous; with return_values only.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of the scores' framework by default. It means nothing on the CPU.

        Returns:
            (indices, count), or (indices, count, values), in the scores' framework. Ids are columns, 0 to L - 1; entries
            left over come last and hold -1, their values -inf. count says how many ids there are.

        Raises:
            InputError: an argument cannot be used as it is; nothing was computed or written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: the selection of DeepSeek-V3.2's lightning indexer (section 2.1); a threshold from a sample as in Floyd and
        Rivest, "Expected time bounds for selection", Communications of the ACM 18 (1975).
        """

    @overload
    def prepare(
        self, scores: NDArray[Any], topk: int, *, starts: Any = None, ends: Any = None,
        order: Literal['index', 'score'] = "index", return_values: Literal[False] = False, indices: Any = None,
        count: Any = None, values: Any = None, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, scores: _Array, topk: int, *, starts: Any = None, ends: Any = None,
        order: Literal['index', 'score'] = "index", return_values: Literal[False] = False, indices: Any = None,
        count: Any = None, values: Any = None, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array]]: ...

    @overload
    def prepare(
        self, scores: NDArray[Any], topk: int, *, starts: Any = None, ends: Any = None,
        order: Literal['index', 'score'] = "index", return_values: Literal[True], indices: Any = None,
        count: Any = None, values: Any = None, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, scores: _Array, topk: int, *, starts: Any = None, ends: Any = None,
        order: Literal['index', 'score'] = "index", return_values: Literal[True], indices: Any = None,
        count: Any = None, values: Any = None, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array, _Array]]: ...

    @overload
    def prepare(
        self, scores: Any, topk: int, *, starts: Any = None, ends: Any = None,
        order: Literal['index', 'score'] = "index", return_values: bool, indices: Any = None, count: Any = None,
        values: Any = None, stream: object = None,
    ) -> Prepared[tuple[Any, Any] | tuple[Any, Any, Any]]:
        """Do all of a call of `topk` but the launch: checks, plan, compilation, allocation and binding."""


topk: _Topk


class _InvertIndices:
    """List by token which top-k entries of the queries name it."""

    name: str

    @overload
    def __call__(
        self, indices: NDArray[Any], s_kv: int, *, topk_length: Any = None, lists: Any = None, workspace: Any = None,
        stream: object = None,
    ) -> NDArray[Any]: ...

    @overload
    def __call__(
        self, indices: _Array, s_kv: int, *, topk_length: Any = None, lists: Any = None, workspace: Any = None,
        stream: object = None,
    ) -> _Array:
        """List by token which top-k entries of the queries name it.

        Entry number query * topk + place names token t where indices[query, place] = t, 0 <= t < s_kv and
        place < topk_length[query]. With offsets = lists[: s_kv + 1] and entries = lists[s_kv + 1 :], the entries of token t
        are entries[offsets[t] : offsets[t + 1]], in ascending order, so that results have the same bits every run.

        Args:
            indices: [s_q, topk] or [s_q, 1, topk] int32, topk >= 1, the last axis contiguous; what is outside [0, s_kv)
                names no token. A leading batch axis is allowed: every array then has it, and batch entries have lists of
                their own. [n, 1, topk] is n queries, unless topk_length is [n, 1].
            s_kv: how many tokens there are. Together with the entries there are up to 2^31 - 1025.
            topk_length: [s_q] int32, entries of each query that count, clamped to [0, topk]; topk by default.
            lists: array to write, [s_kv + 1 + s_q * topk] int32, the last axis contiguous.
            workspace: memory to work in, [n] uint8, contiguous, at an address that is a multiple of 16 bytes, n at least
                `invert_indices.workspace_bytes(...)` of the same arguments; what it holds means nothing, before and after.
                Calls that may run at the same time need one each. By default it comes from the allocator of the framework
                of indices.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of the framework of indices by default. It means nothing on the CPU.

        Returns:
            lists, in the framework of indices. offsets[0] is 0, offsets[s_kv] the number of valid entries, behind which
            entries are -1.

        Raises:
            InputError: an argument cannot be used as it is; nothing was computed or written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: D. E. Knuth, "The Art of Computer Programming", volume 3, section 5.2: sorting by counting.
        """

    @overload
    def prepare(
        self, indices: NDArray[Any], s_kv: int, *, topk_length: Any = None, lists: Any = None, workspace: Any = None,
        stream: object = None,
    ) -> Prepared[NDArray[Any]]: ...

    @overload
    def prepare(
        self, indices: _Array, s_kv: int, *, topk_length: Any = None, lists: Any = None, workspace: Any = None,
        stream: object = None,
    ) -> Prepared[_Array]:
        """Do all of a call of `invert_indices` but the launch: checks, plan, compilation, allocation and binding."""

    def workspace_bytes(
        self, indices: Any, s_kv: int, *, topk_length: Any = None, lists: Any = None, workspace: Any = None,
        stream: object = None,
    ) -> int:
        """How many bytes the `workspace` of a call of `invert_indices` with these arguments has to have at least; 0 where none"""


invert_indices: _InvertIndices


class _QuantizeFp8:
    """Quantise floats to fp8 e4m3 with a scale for each group of neighbouring channels."""

    name: str

    @overload
    def __call__(
        self, x: NDArray[Any], *, group: int = 128, scale_rule: Literal['amax', 'pow2'] = "amax", codes: Any = None,
        scales: Any = None, stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, x: _Array, *, group: int = 128, scale_rule: Literal['amax', 'pow2'] = "amax", codes: Any = None,
        scales: Any = None, stream: object = None,
    ) -> tuple[_Array, _Array]:
        """Quantise floats to fp8 e4m3 with a scale for each group of neighbouring channels.

        A scale is max(amax, 1e-4) / 448 in fp32, amax the largest magnitude of its group. A code is x / scale, rounded to
        fp32 by IEEE division, then to e4m3 to nearest even, saturated to 448. NaN is left out of amax and has code 0x7F. An
        infinity counts as the largest finite number of x's dtype.

        Args:
            x: [..., D] float32, bfloat16 or float16, of one to four axes, D a multiple of `group`. The last axis is
                contiguous; other strides are free.
            group: channels that share a scale, a power of two from 16 to 256.
            scale_rule: "amax": as above. "pow2": that scale rounded up to a power of two.
            codes: array to write, [..., D] fp8 e4m3fn or uint8 for its bytes, the last axis contiguous.
            scales: array to write, [..., D / group] float32, of any strides.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of x's framework by default. It means nothing on the CPU.

        Returns:
            (codes, scales) in x's framework: codes as fp8 e4m3fn, as uint8 in CuPy, which has no fp8; scales as float32.

        Raises:
            InputError: an argument cannot be used as it is; nothing was computed or written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: E4M3 is that of the OCP 8-bit Floating Point Specification v1.0; the scale rule is that of DeepSeek-V3.2's
        indexer keys, as DeepGEMM's tests cast them.
        """

    @overload
    def prepare(
        self, x: NDArray[Any], *, group: int = 128, scale_rule: Literal['amax', 'pow2'] = "amax", codes: Any = None,
        scales: Any = None, stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, x: _Array, *, group: int = 128, scale_rule: Literal['amax', 'pow2'] = "amax", codes: Any = None,
        scales: Any = None, stream: object = None,
    ) -> Prepared[tuple[_Array, _Array]]:
        """Do all of a call of `quantize_fp8` but the launch: checks, plan, compilation, allocation and binding."""


quantize_fp8: _QuantizeFp8


class _DequantizeFp8:
    """Turn fp8 e4m3 codes and their scales into bfloat16: one fp32 product each, rounded to nearest even."""

    name: str

    @overload
    def __call__(
        self, codes: NDArray[Any], scales: Any, *, group: int = 128, out: Any = None, stream: object = None,
    ) -> NDArray[Any]: ...

    @overload
    def __call__(
        self, codes: _Array, scales: Any, *, group: int = 128, out: Any = None, stream: object = None,
    ) -> _Array:
        """Turn fp8 e4m3 codes and their scales into bfloat16: one fp32 product each, rounded to nearest even.

        Args:
            codes: [..., D] fp8 e4m3fn or uint8 for its bytes, of one to four axes, D a multiple of `group`. The last axis
                is contiguous; other strides are free.
            scales: [..., D / group] float32, of any values and strides.
            group: channels that share a scale, a power of two from 16 to 256.
            out: array to write, [..., D] bfloat16, the last axis contiguous.
            stream: as for `quantize_fp8`.

        Returns:
            [..., D] bfloat16 in the framework of the codes. NaN stays NaN; which NaN is not promised.

        Raises:
            InputError: an argument cannot be used as it is; nothing was computed or written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: as for `quantize_fp8`.
        """

    @overload
    def prepare(
        self, codes: NDArray[Any], scales: Any, *, group: int = 128, out: Any = None, stream: object = None,
    ) -> Prepared[NDArray[Any]]: ...

    @overload
    def prepare(
        self, codes: _Array, scales: Any, *, group: int = 128, out: Any = None, stream: object = None,
    ) -> Prepared[_Array]:
        """Do all of a call of `dequantize_fp8` but the launch: checks, plan, compilation, allocation and binding."""


dequantize_fp8: _DequantizeFp8


class _IndexerKQuantAndCache:
    """Quantise keys of the lightning indexer and write them into their slots of a paged cache, in place."""

    name: str

    @overload
    def __call__(
        self, k: NDArray[Any], cache: Any, slot_mapping: Any, *, scale_rule: Literal['amax', 'pow2'] = "amax",
        check_indices: bool = False, stream: object = None,
    ) -> NDArray[Any]: ...

    @overload
    def __call__(
        self, k: _Array, cache: Any, slot_mapping: Any, *, scale_rule: Literal['amax', 'pow2'] = "amax",
        check_indices: bool = False, stream: object = None,
    ) -> _Array:
        """Quantise keys of the lightning indexer and write them into their slots of a paged cache, in place.

        Codes and scales are those of `quantize_fp8(k, group=128)`. A block of `page` tokens holds page rows of 128 codes,
        then page fp32 scales: 132 bytes a token. Token t goes to block slot // page, place slot % page, slot =
        slot_mapping[t]; a slot outside the cache, such as -1, skips the token. Where two tokens name one slot, parts of
        either may be what stays there.

        Args:
            k: [T, 128] float32, bfloat16 or float16, the last axis contiguous.
            cache: [blocks, page, 132] or [blocks, page, 1, 132] fp8 e4m3fn or uint8, writable. A block's bytes are
                contiguous; the distance of blocks and the address are multiples of 4 bytes.
            slot_mapping: [T] int32 or int64, of any strides.
            scale_rule: as for `quantize_fp8`.
            check_indices: raise InputError for slots that are neither -1 nor in the cache; that waits for the GPU.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of k's framework by default. It means nothing on the CPU.

        Returns:
            cache, the array that was given.

        Raises:
            InputError: an argument cannot be used as it is; nothing was written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: the layout is DeepGEMM's (`kv_cache_cast_to_fp8` of its tests); the function is vLLM's of that name.
        """

    @overload
    def prepare(
        self, k: NDArray[Any], cache: Any, slot_mapping: Any, *, scale_rule: Literal['amax', 'pow2'] = "amax",
        check_indices: bool = False, stream: object = None,
    ) -> Prepared[NDArray[Any]]: ...

    @overload
    def prepare(
        self, k: _Array, cache: Any, slot_mapping: Any, *, scale_rule: Literal['amax', 'pow2'] = "amax",
        check_indices: bool = False, stream: object = None,
    ) -> Prepared[_Array]:
        """Do all of a call of `indexer_k_quant_and_cache` but the launch: checks, plan, compilation, allocation and binding."""


indexer_k_quant_and_cache: _IndexerKQuantAndCache


class _GatherIndexerCache:
    """Read keys of the lightning indexer and their scales out of a paged cache, as `indexer_logits` takes them."""

    name: str

    @overload
    def __call__(
        self, cache: NDArray[Any], slots: Any = None, *, block_tables: Any = None, cu_lens: Any = None,
        rows: int | None = None, k: Any = None, k_scale: Any = None, check_indices: bool = False,
        stream: object = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]: ...

    @overload
    def __call__(
        self, cache: _Array, slots: Any = None, *, block_tables: Any = None, cu_lens: Any = None,
        rows: int | None = None, k: Any = None, k_scale: Any = None, check_indices: bool = False,
        stream: object = None,
    ) -> tuple[_Array, _Array]:
        """Read keys of the lightning indexer and their scales out of a paged cache, as `indexer_logits` takes them.

        Either `slots` names the places, or `block_tables` and `cu_lens` do, and `rows` says how many there are. Then
        request b has the rows from cu_lens[b] to cu_lens[b + 1], both clamped to [0, rows], and its position p is in block
        block_tables[b, p // page]. Rows of no request, positions past the table, and slots or blocks outside the cache give
        zeros, keys and scales. Nothing waits for the GPU.

        Args:
            cache: [blocks, page, 132] or [blocks, page, 1, 132], as for `indexer_k_quant_and_cache`.
            slots: [N] int32 or int64, of any strides.
            block_tables: [B, width] int32, of any strides.
            cu_lens: [B + 1] int32, which must not fall; where it does, rows may be those of any request.
            rows: N, where block tables are given; it may be more than cu_lens[B].
            k: array to write, [N, 128] fp8 e4m3fn or uint8, the last axis contiguous.
            k_scale: array to write, [N] float32, of any stride.
            check_indices: raise InputError for slots and used blocks that are neither -1 nor in the cache, and for lengths
                that fall or exceed rows; that waits for the GPU.
            stream: as for `indexer_k_quant_and_cache`.

        Returns:
            (k, k_scale): [N, 128] as fp8 e4m3fn, as uint8 in CuPy, which has no fp8, and [N] float32.

        Raises:
            InputError: an argument cannot be used as it is; nothing was computed or written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: as for `indexer_k_quant_and_cache`; with block tables it is vLLM's `cp_gather_indexer_k_quant_cache`.
        """

    @overload
    def prepare(
        self, cache: NDArray[Any], slots: Any = None, *, block_tables: Any = None, cu_lens: Any = None,
        rows: int | None = None, k: Any = None, k_scale: Any = None, check_indices: bool = False,
        stream: object = None,
    ) -> Prepared[tuple[NDArray[Any], NDArray[Any]]]: ...

    @overload
    def prepare(
        self, cache: _Array, slots: Any = None, *, block_tables: Any = None, cu_lens: Any = None,
        rows: int | None = None, k: Any = None, k_scale: Any = None, check_indices: bool = False,
        stream: object = None,
    ) -> Prepared[tuple[_Array, _Array]]:
        """Do all of a call of `gather_indexer_cache` but the launch: checks, plan, compilation, allocation and binding."""


gather_indexer_cache: _GatherIndexerCache


class _Hadamard:
    """Rotate rows by the Hadamard matrix: out[i] = D^-1/2 sum over j of (-1)^popcount(i & j) x[j]."""

    name: str

    @overload
    def __call__(self, x: NDArray[Any], *, out: Any = None, stream: object = None) -> NDArray[Any]: ...

    @overload
    def __call__(self, x: _Array, *, out: Any = None, stream: object = None) -> _Array:
        """Rotate rows by the Hadamard matrix: out[i] = D^-1/2 sum over j of (-1)^popcount(i & j) x[j].

        The matrix is orthogonal and its own inverse. It spreads an outlier over all channels, so that fp8 loses less. Who
        rotates the indexer's queries rotates its keys, too: their products stay what they were. Sums are in fp32, always in
        the same order; the result is rounded once.

        Args:
            x: [..., D] float32, bfloat16 or float16, of one to four axes, D a power of two from 8 to 8192. The last axis is
                contiguous; other strides are free.
            out: array to write, [..., D] in x's dtype, the last axis contiguous.
            stream: as for `quantize_fp8`.

        Returns:
            [..., D] in x's dtype and framework.

        Raises:
            InputError: an argument cannot be used as it is; nothing was computed or written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: J. J. Sylvester's construction (1867), in its fast form by sums and differences of pairs; its use is that of
        DeepSeek-V3.2's indexer.
        """

    @overload
    def prepare(self, x: NDArray[Any], *, out: Any = None, stream: object = None) -> Prepared[NDArray[Any]]: ...

    @overload
    def prepare(self, x: _Array, *, out: Any = None, stream: object = None) -> Prepared[_Array]:
        """Do all of a call of `hadamard` but the launch: checks, plan, compilation, allocation and binding."""


hadamard: _Hadamard


class _ConcatAndCacheMla:
    """Write latents and rotary parts of keys into their slots of a paged cache, in place."""

    name: str

    @overload
    def __call__(
        self, kv_c: NDArray[Any], k_pe: Any, cache: Any, slot_mapping: Any, *,
        cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'], scale_rule: Literal['amax', 'pow2'] | None = None,
        check_indices: bool = False, stream: object = None,
    ) -> NDArray[Any]: ...

    @overload
    def __call__(
        self, kv_c: _Array, k_pe: Any, cache: Any, slot_mapping: Any, *,
        cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'], scale_rule: Literal['amax', 'pow2'] | None = None,
        check_indices: bool = False, stream: object = None,
    ) -> _Array:
        """Write latents and rotary parts of keys into their slots of a paged cache, in place.

        Token t goes to block slot // page, place slot % page, slot = slot_mapping[t]; a slot outside the cache, such as -1,
        skips the token. Where two tokens name one slot, parts of either may be what stays there. A fp8 format holds kv_c as
        codes with a scale for each group of channels; codes, NaN and infinities are those of `quantize_fp8`. All that is
        bf16 is rounded to nearest even, and bf16 is copied.

        Args:
            kv_c: [T, 512], with "v4_fp8" [T, 448], float32, bfloat16 or float16, the last axis contiguous.
            k_pe: [T, 64] in the same dtype, the last axis contiguous; None for a bf16 cache with rows of 512.
            cache: [blocks, page, n] or [blocks, page, 1, n], writable, as `sparse_mla_decode` takes it: bfloat16 with n 576
                or 512, fp8 e4m3fn or uint8 with n 656 ("v32_fp8") or 584 ("v4_fp8"). A block's bytes are contiguous; the
                distance of blocks and the address are multiples of 16 bytes, with "v4_fp8" of 8.
            slot_mapping: [T] int32 or int64, of any strides.
            cache_format: "bf16"; "v32_fp8", groups of 128 channels and fp32 scales; "v4_fp8", groups of 64 channels and
                scales that are bytes of exponents.
            scale_rule: "amax", which only "v32_fp8" has: max(amax / 448, 2^-126), amax the largest magnitude of a group.
                "pow2": max(amax, 1e-4) / 448 rounded up to a power of two. None: "amax" for "v32_fp8", else "pow2".
            check_indices: raise InputError for slots that are neither -1 nor in the cache; that waits for the GPU.
            stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
                of kv_c's framework by default. It means nothing on the CPU.

        Returns:
            cache, the array that was given.

        Raises:
            InputError: an argument cannot be used as it is; nothing was written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: the function is vLLM's of that name, with its `fp8_ds_mla` and its cache of DeepSeek-V4; the layouts are
        FlashMLA's.
        """

    @overload
    def prepare(
        self, kv_c: NDArray[Any], k_pe: Any, cache: Any, slot_mapping: Any, *,
        cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'], scale_rule: Literal['amax', 'pow2'] | None = None,
        check_indices: bool = False, stream: object = None,
    ) -> Prepared[NDArray[Any]]: ...

    @overload
    def prepare(
        self, kv_c: _Array, k_pe: Any, cache: Any, slot_mapping: Any, *,
        cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'], scale_rule: Literal['amax', 'pow2'] | None = None,
        check_indices: bool = False, stream: object = None,
    ) -> Prepared[_Array]:
        """Do all of a call of `concat_and_cache_mla` but the launch: checks, plan, compilation, allocation and binding."""


concat_and_cache_mla: _ConcatAndCacheMla


class _GatherMlaCache:
    """Read rows of latents and rotary parts out of a paged cache, as bfloat16."""

    name: str

    @overload
    def __call__(
        self, cache: NDArray[Any], slots: Any = None, *, cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'],
        block_tables: Any = None, cu_lens: Any = None, rows: int | None = None, kv: Any = None,
        check_indices: bool = False, stream: object = None,
    ) -> NDArray[Any]: ...

    @overload
    def __call__(
        self, cache: _Array, slots: Any = None, *, cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'],
        block_tables: Any = None, cu_lens: Any = None, rows: int | None = None, kv: Any = None,
        check_indices: bool = False, stream: object = None,
    ) -> _Array:
        """Read rows of latents and rotary parts out of a paged cache, as bfloat16.

        A code times its scale is one fp32 product, rounded to nearest even; a scale may be any fp32 number. A byte of
        exponents that is 255 reads NaN, 0 reads 2^-127. Places are named as for `gather_indexer_cache`: by `slots`, or by
        `block_tables`, `cu_lens` and `rows`. Rows without a place in the cache are 0. Nothing waits for the GPU.

        Args:
            cache: as for `concat_and_cache_mla`.
            slots: [N] int32 or int64, of any strides.
            cache_format: as for `concat_and_cache_mla`.
            block_tables: [B, width] int32, of any strides.
            cu_lens: [B + 1] int32, which must not fall; where it does, rows may be those of any request.
            rows: N, where block tables are given; it may be more than cu_lens[B].
            kv: array to write, [N, d] bfloat16, the last axis contiguous.
            check_indices: raise InputError for slots and used blocks that are neither -1 nor in the cache, and for lengths
                that fall or exceed rows; that waits for the GPU.
            stream: as for `quantize_fp8`.

        Returns:
            [N, d] bfloat16: d is 576, with "v4_fp8" 512, with "bf16" that of the cache. NaN stays NaN; which NaN is not
            promised.

        Raises:
            InputError: an argument cannot be used as it is; nothing was computed or written.
            UnsupportedError: there is no kernel for this on the arrays' device.

        Source: as for `concat_and_cache_mla`.
        """

    @overload
    def prepare(
        self, cache: NDArray[Any], slots: Any = None, *, cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'],
        block_tables: Any = None, cu_lens: Any = None, rows: int | None = None, kv: Any = None,
        check_indices: bool = False, stream: object = None,
    ) -> Prepared[NDArray[Any]]: ...

    @overload
    def prepare(
        self, cache: _Array, slots: Any = None, *, cache_format: Literal['bf16', 'v32_fp8', 'v4_fp8'],
        block_tables: Any = None, cu_lens: Any = None, rows: int | None = None, kv: Any = None,
        check_indices: bool = False, stream: object = None,
    ) -> Prepared[_Array]:
        """Do all of a call of `gather_mla_cache` but the launch: checks, plan, compilation, allocation and binding."""


gather_mla_cache: _GatherMlaCache
