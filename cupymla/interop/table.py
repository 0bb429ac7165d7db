"""The declarations of all public functions. A function that is to work in the frameworks needs its entry here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..errors import InputError
from ..ops.arguments import Arguments
from ..ops.attn_dist.spec import ARGUMENTS as ATTN_DIST
from ..ops.indexer_bwd.spec import ARGUMENTS as INDEXER_BWD
from ..ops.indexer_logits.spec import ARGUMENTS as INDEXER_LOGITS
from ..ops.indexer_loss.spec import ARGUMENTS as INDEXER_LOSS
from ..ops.indexer_loss_dense.spec import ARGUMENTS as INDEXER_LOSS_DENSE
from ..ops.indexer_topk.spec import ARGUMENTS as INDEXER_TOPK
from ..ops.invert_indices import spec as inversion
from ..ops.merge_attention.spec import ARGUMENTS as MERGE_ATTENTION
from ..ops.mla import D_V
from ..ops.mla_cache import latent_spec as latent_cache
from ..ops.mla_cache import paged_spec as paged_cache
from ..ops.mla_cache import spec as mla_cache
from ..ops.mla_cache.formats import INDEXER_FP8
from ..ops.nvfp4_gemv import spec as nvfp4_gemv
from ..ops.nvfp4_gemv.formats import named, padded
from ..ops.paged_indexer_topk import spec as paged_indexer
from ..ops.sparse_mla_bwd.spec import ARGUMENTS as SPARSE_MLA_BWD
from ..ops.sparse_mla_bwd_phase1.spec import ARGUMENTS as SPARSE_MLA_BWD_PHASE1
from ..ops.sparse_mla_decode.spec import ARGUMENTS as SPARSE_MLA_DECODE
from ..ops.sparse_mla_fwd.spec import ARGUMENTS as SPARSE_MLA_FWD
from ..ops.topk.spec import ARGUMENTS as TOPK
from ..ops.xl_paged_attention import spec as xl_paged_attention
from ..ops.xl_paged_attention.cache import COPY, RESHAPE
from ..ops.xl_paged_attention.relative import BIAS, SHIFT
from .declaration import Arrays, Batching, Declaration, Facts, Gradient, Options, Results

# Sparse MLA ----------------------------------------------------------------------------------------------------------


def _heads(arrays: Arrays) -> Facts:
    return Facts(arrays["q"].shape[:-1], "float32")


def _slots(arrays: Arrays) -> Facts:
    return Facts((*arrays["q"].shape[:-2], arrays["indices"].shape[-1]), "float32")


def _out(arrays: Arrays) -> Facts:
    return Facts((*arrays["q"].shape[:-1], D_V), arrays["q"].dtype)


def _forward(arrays: Arrays, options: Options) -> Results:
    return {"out": _out(arrays), "max_logits": _heads(arrays), "lse": _heads(arrays)}


def _backward(arrays: Arrays, options: Options) -> Results:
    q, kv = arrays["q"], arrays["kv"]
    results = {"dq": q, "dkv": Facts(kv.shape, options["dkv_dtype"] or kv.dtype)}
    if "attn_sink" in arrays:
        results["d_sink"] = Facts((q.shape[-2],), "float32")
    if options["return_attn_dist"]:
        results["attn_dist"] = _slots(arrays)
    return results


def _phase1(arrays: Arrays, options: Options) -> Results:
    q = arrays["q"]
    return {"p": Facts((*q.shape[:-1], arrays["indices"].shape[-1]), "float32"), "delta": _heads(arrays)}


def _distribution(arrays: Arrays, options: Options) -> Results:
    return {"dist": _slots(arrays)}


def _declaration(
    arguments: Arguments[Any, Any], results: Callable[[Arrays, Options], Results], **others: Any
) -> Declaration:
    """The declaration of an operator that says itself which arrays it has; `others` are what only a bridge asks."""
    return Declaration(
        arguments.operator,
        arrays=arguments.inputs,
        outputs=(*arguments.results, *arguments.written),
        results=results,
        requests=arguments.written,
        either=arguments.numbers,
        nullable=arguments.nullable,
        updates=arguments.updates,
        has_workspace=arguments.has_workspace,
        **others,
    )


def _decode(arrays: Arrays, options: Options) -> Results:
    return {"out": _out(arrays), "lse": _heads(arrays)}


def _merged(arrays: Arrays, options: Options) -> Results:
    outs = arrays["outs"]
    return {"out": Facts(outs.shape[1:], outs.dtype), "lse": Facts(outs.shape[1:-1], "float32")}


# NVFP4 ---------------------------------------------------------------------------------------------------------------


def _matrix(like: Facts, options: Options, rows: object, columns: object, dtype: str, contiguous: bool = True) -> Facts:
    """A matrix with the batch axis that `like` has, where `like` has it."""
    if len(like.shape) == 2:
        return Facts((rows, columns), dtype)
    if options["batch_axis"] == 0:
        return Facts((like.shape[0], rows, columns), dtype)
    return Facts((rows, columns, like.shape[-1]), dtype, batch_last=contiguous)


def _extents(like: Facts, options: Options) -> tuple[object, object]:
    """Rows and columns of a matrix, without its batch axis."""
    rows, columns, *_ = like.shape[1:] if len(like.shape) == 3 and options["batch_axis"] == 0 else like.shape
    return rows, columns


def _gemv(arrays: Arrays, options: Options) -> Results:
    a = arrays["a"]
    m, n = _extents(a, options)[0], _extents(arrays["b"], options)[0]
    return {"c": _matrix(a, options, m, n, options["out_dtype"] or "float16", contiguous=False)}


def _quantized(arrays: Arrays, options: Options) -> Results:
    x = arrays["x"]
    if options.get("global_scale") == "amax":
        # The function returns the factor that it finds beside its outputs, which no compiled program would see.
        expected = "a number or an array in a compiled program, such as 448 * 6 / max(abs(x))"
        raise InputError("global_scale", expected, "'amax'", operator="quantize_nvfp4")
    m, k = _extents(x, options)
    rows, columns = m, named(options["format"]).scale_columns(k)  # type: ignore[arg-type]
    if options["scale_layout"] == "128x4":
        rows, columns = padded(rows, columns)  # type: ignore[arg-type]
    return {
        "packed": _matrix(x, options, m, k // 2, "uint8"),  # type: ignore[operator]
        "scales": _matrix(x, options, rows, columns, "uint8"),
    }


def _dequantized(arrays: Arrays, options: Options) -> Results:
    packed = arrays["packed"]
    m, half = _extents(packed, options)
    return {"out": _matrix(packed, options, m, 2 * half, options["out_dtype"] or "float32")}  # type: ignore[operator]


def _swizzled(arrays: Arrays, options: Options) -> Results:
    scales = arrays["scales"]
    rows, columns = padded(*_extents(scales, options))  # type: ignore[arg-type]
    return {"out": _matrix(scales, options, rows, columns, scales.dtype)}


def _unswizzled(arrays: Arrays, options: Options) -> Results:
    swizzled = arrays["swizzled"]
    rows, columns = options["rows"], options["columns"]
    # Blocks may come flat, which leaves an axis less; [P, Q] itself is then the only matrix of rank 2.
    batched = len(swizzled.shape) == 3 or (len(swizzled.shape) == 2 and swizzled.shape != padded(rows, columns))
    like = swizzled if len(swizzled.shape) == 3 else Facts((swizzled.shape[0], 1, swizzled.shape[-1]), swizzled.dtype)
    return {"out": _matrix(like if batched else Facts((1, 1), ""), options, rows, columns, swizzled.dtype)}


# Paged attention -----------------------------------------------------------------------------------------------------


def _paged(arrays: Arrays, options: Options) -> Results:
    query = arrays["query"]
    results = {"out": query}
    if options["return_lse"]:
        results["lse"] = Facts(query.shape[:-1], "float32")
    return results


def _shifted(arrays: Arrays, options: Options) -> Results:
    return {"out": arrays["x"]}


def _dense_bias(arrays: Arrays, options: Options) -> Results:
    return {"out": Facts((*arrays["query"].shape[:2], options["max_context"]), options["out_dtype"])}


def _caches(arrays: Arrays, options: Options) -> Results:
    return {name: arrays[name] for name in ("k_cache", "v_cache")}


# Lightning indexer ---------------------------------------------------------------------------------------------------


def _index_scores(arrays: Arrays, options: Options) -> Results:
    return {"logits": Facts((*arrays["q"].shape[:-2], arrays["k"].shape[-2]), "float32")}


def _selected_keys(arrays: Arrays, options: Options) -> Results:
    rows = arrays["q"].shape[:-2]
    results = {"indices": Facts((*rows, options["topk"]), "int32"), "count": Facts(rows, "int32")}
    if options["return_values"]:
        results["values"] = Facts((*rows, options["topk"]), "float32")
    if options["return_lse"]:
        results["lse"] = Facts(rows, "float32")
    return results


def _index_loss(arrays: Arrays, options: Options) -> Results:
    target = arrays["target"]
    return {"loss": Facts(target.shape[:-1], "float32"), "grad_logits": Facts(target.shape, "float32")}


def _index_gradients(arrays: Arrays, options: Options) -> Results:
    k = arrays["k"]
    return {"dq": arrays["q"], "dk": Facts(k.shape, options["dk_dtype"] or k.dtype), "dweights": arrays["weights"]}


def _dense_loss(arrays: Arrays, options: Options) -> Results:
    return {"loss": Facts(arrays["q"].shape[:-2], "float32"), **_index_gradients(arrays, options)}


def _paged_scores(arrays: Arrays, options: Options) -> Results:
    room = arrays["block_tables"].shape[1] * arrays["k_cache"].shape[1]
    return {"logits": Facts((*arrays["q"].shape[:2], room), "float32")}


def _selection(arrays: Arrays, options: Options) -> Results:
    scores = arrays["scores"]
    row = (*scores.shape[:-1], options["topk"])
    results = {"indices": Facts(row, "int32"), "count": Facts(scores.shape[:-1], "int32")}
    if options["return_values"]:
        results["values"] = Facts(row, scores.dtype)
    return results


def _inverted(arrays: Arrays, options: Options) -> Results:
    indices, lengths = arrays["indices"].shape, arrays.get("topk_length")
    lead, queries = inversion.lead_and_queries(indices, None if lengths is None else len(lengths.shape))
    return {"lists": Facts((*lead, options["s_kv"] + 1 + queries * indices[-1]), "int32")}


def _has_an_axis_of_one(arrays: Arrays) -> bool:
    """Whether a batch axis in front of the indices could be taken for that of the queries."""
    return bool(arrays["indices"].shape[-2] == 1)


# fp8 caches ----------------------------------------------------------------------------------------------------------


def _codes(arrays: Arrays, options: Options) -> Results:
    *rows, channels = arrays["x"].shape
    codes = Facts((*rows, channels), "float8_e4m3fn")
    return {"codes": codes, "scales": Facts((*rows, channels // options["group"]), "float32")}


def _decoded(arrays: Arrays, options: Options) -> Results:
    return {"out": Facts(arrays["codes"].shape, "bfloat16")}


def _rotated(arrays: Arrays, options: Options) -> Results:
    return {"out": arrays["x"]}


def _cache(arrays: Arrays, options: Options) -> Results:
    return {"cache": arrays["cache"]}


def _gathered_keys(arrays: Arrays, options: Options) -> Results:
    rows = arrays["slots"].shape[0] if "slots" in arrays else options["rows"]
    return {"k": Facts((rows, INDEXER_FP8.channels), "float8_e4m3fn"), "k_scale": Facts((rows,), "float32")}


def _gathered_latents(arrays: Arrays, options: Options) -> Results:
    rows = arrays["slots"].shape[0] if "slots" in arrays else options["rows"]
    channels = latent_cache.channels_of(options["cache_format"], arrays["cache"].shape[-1])
    return {"kv": Facts((rows, channels), "bfloat16")}


DECLARATIONS: tuple[Declaration, ...] = (
    _declaration(
        SPARSE_MLA_FWD,
        _forward,
        batching=Batching("q", 3, ("kv",), never=("attn_sink",), foldable=("causal",)),
        gradient=Gradient(
            "sparse_mla_bwd",
            results={"q": "dq", "kv": "dkv", "attn_sink": "d_sink"},
            cotangents={"out": "dout"},
            options={"deterministic": False},
        ),
    ),
    _declaration(
        SPARSE_MLA_BWD,
        _backward,
        varies=True,
        replayable=False,
        batching=Batching("q", 3, ("kv",), never=("attn_sink",), never_results=("d_sink",)),
    ),
    _declaration(
        SPARSE_MLA_BWD_PHASE1,
        _phase1,
        batching=Batching("q", 3, ("kv",), foldable=("causal",)),
    ),
    _declaration(
        ATTN_DIST,
        _distribution,
        batching=Batching("q", 3, ("kv",), foldable=("causal",)),
    ),
    _declaration(SPARSE_MLA_DECODE, _decode),
    _declaration(MERGE_ATTENTION, _merged),
    _declaration(
        nvfp4_gemv.ARGUMENTS,
        _gemv,
        pairs=("a", "b"),
        batching=Batching("a", 2, ("a", "sfa"), never=("alpha", "bias"), options={"batch_axis": 0}),
    ),
    _declaration(
        nvfp4_gemv.QUANTIZE,
        _quantized,
        note='`global_scale` is a number or an array, not "amax": the factor that it finds would be lost.',
    ),
    _declaration(nvfp4_gemv.DEQUANTIZE, _dequantized, pairs=("packed",)),
    _declaration(nvfp4_gemv.SWIZZLE, _swizzled),
    _declaration(nvfp4_gemv.UNSWIZZLE, _unswizzled),
    _declaration(xl_paged_attention.ARGUMENTS, _paged, varies=True, replayable=False),
    _declaration(RESHAPE, _caches),
    _declaration(COPY, _caches),
    _declaration(SHIFT, _shifted),
    _declaration(BIAS, _dense_bias, replayable=False),
    _declaration(INDEXER_LOGITS, _index_scores, batching=Batching("q", 3, ("k",))),
    _declaration(INDEXER_TOPK, _selected_keys, varies=True, replayable=False, batching=Batching("q", 3, ("k",))),
    _declaration(
        INDEXER_LOSS,
        _index_loss,
        batching=Batching("q", 3, ("k",)),
        gradient=Gradient(
            "indexer_bwd",
            results={"q": "dq", "k": "dk", "weights": "dweights"},
            scaled={"grad_logits": "loss"},
            options={"deterministic": False},
        ),
    ),
    _declaration(INDEXER_BWD, _index_gradients, replayable=False, batching=Batching("q", 3, ("k",))),
    _declaration(
        INDEXER_LOSS_DENSE,
        _dense_loss,
        replayable=False,
        batching=Batching("q", 3, ("k", "mla_kv")),
        gradient=Gradient(
            "indexer_loss_dense",
            results={"q": "dq", "k": "dk", "weights": "dweights"},
            cotangents={"loss": "grad_loss"},
            own={"q": "dq", "k": "dk", "weights": "dweights"},
        ),
    ),
    _declaration(paged_indexer.LOGITS, _paged_scores),
    _declaration(paged_indexer.ARGUMENTS, _selected_keys, varies=True, replayable=False),
    _declaration(TOPK, _selection, varies=True, batching=Batching("scores", 2, ("scores",))),
    _declaration(
        inversion.ARGUMENTS,
        _inverted,
        batching=Batching("indices", 2, ("indices",), unless=_has_an_axis_of_one),
    ),
    _declaration(mla_cache.ARGUMENTS, _codes),
    _declaration(mla_cache.DEQUANTIZE, _decoded),
    _declaration(mla_cache.HADAMARD, _rotated),
    _declaration(paged_cache.WRITE, _cache),
    _declaration(paged_cache.GATHER, _gathered_keys),
    _declaration(latent_cache.CONCAT, _cache),
    _declaration(latent_cache.GATHER, _gathered_latents),
)


@functools.cache
def declared(name: str) -> Declaration:
    """The declaration of that name. Raises KeyError."""
    for declaration in DECLARATIONS:
        if declaration.name == name:
            return declaration
    raise KeyError(name)
