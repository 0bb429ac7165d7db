"""Correctness cases of xl_paged_attention; see `cupymla.ops.case`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from cupymla.ops.xl_paged_attention.cases import _DTYPES, INT32_MAX, INT32_MIN, XlCase, make
from cupymla.ops.xl_paged_attention.checks import FP8
from cupymla.ops.xl_paged_attention.paging import HEAD_SIZES, LAYOUTS, elements_of_x

from .pairwise import pairwise

# Correctness ---------------------------------------------------------------------------------------------------

_BLOCK_SIZES = (1, 2, 3, 8, 16, 32, 64, 100, 128, 256)

_SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "context_lens": (37, 0, 1, 90)}

_FORMS: tuple[dict[str, Any], ...] = (
    {"bias": "none"},
    {"bias": "dense"},
    {"bias": "relative", "extent": 24},
    {"bias": "relative", "extent": 24, "rel_extend": "clamp"},
    {"bias": "fused", "extent": 24},
    {"bias": "fused", "extent": 128, "rel_extend": "clamp"},
    {"bias": "alibi"},
)


def _with(**changes: Any) -> dict[str, Any]:
    return {**_SMALL, **changes}


def _fits(layout: str, head_size: int, label: str) -> bool:
    """Whether a cache of these elements can have the layout: vLLM's has keys in pieces of sixteen bytes."""
    return layout != "vllm" or head_size % elements_of_x(label) == 0


def _shapes() -> Iterator[XlCase]:
    for head_size in HEAD_SIZES:
        yield make("shapes", **_with(head_size=head_size, bias="dense"))
        yield make("shapes", "NHD_fp16", **_with(head_size=head_size, dtype="float16", kv_layout="NHD", bias="alibi"))
        yield make("shapes", "fp32", **_with(head_size=head_size, dtype="float32", bias="dense"))
        for kv_dtype, layout in (("float8_e4m3fn", "vllm"), ("float8_e5m2", "HND")):
            if _fits(layout, head_size, kv_dtype):
                fields = _with(head_size=head_size, kv_dtype=kv_dtype, kv_layout=layout, scales="head", bias="alibi")
                yield make("shapes", kv_dtype[7:], **fields)
    for block_size in _BLOCK_SIZES:
        for layout in LAYOUTS:
            fields = _with(block_size=block_size, kv_layout=layout, bias="relative", extent=24)
            yield make("shapes", f"bs{block_size}_{layout}", **fields)
        if block_size % 16 == 0:
            fields = _with(block_size=block_size, kv_dtype="float8_e4m3fn", bias="relative", extent=200)
            yield make("shapes", f"bs{block_size}_fp8", **fields)
    for num_heads, num_kv_heads in ((1, 1), (16, 16), (4, 1), (32, 8), (7, 1), (12, 4), (24, 3), (20, 1), (35, 1)):
        yield make("shapes", "alibi", **_with(num_heads=num_heads, num_kv_heads=num_kv_heads, bias="alibi"))
    for lens in ((), (0,), (1,), (2,), (15, 16, 17), (1023, 1024, 1025), (3000,), (5, 700, 0, 64, 1, 333)):
        tag = "x".join(map(str, lens)) or "empty"
        yield make("shapes", tag, **_with(context_lens=lens, bias="dense"))


def _dtypes() -> Iterator[XlCase]:
    for dtype in _DTYPES:
        for layout in LAYOUTS:
            for form in _FORMS:
                tag = f"{dtype}_{layout}_{form.get('rel_extend', 'zero')}"
                yield make("dtypes", tag, **_with(dtype=dtype, kv_layout=layout, offsets=True, **form))
    for kv_dtype in FP8:
        for layout in LAYOUTS:
            for scales in ("none", "number", "head"):
                tag = f"fp8_{kv_dtype[7:]}_{layout}_{scales}"
                fields = _with(kv_dtype=kv_dtype, kv_layout=layout, scales=scales, bias="relative", extent=24)
                yield make("dtypes", tag, **fields)
            yield make("dtypes", f"fp32_fp8_{kv_dtype[7:]}_{layout}", **{**fields, "dtype": "float32"})
    # Of four rows of lse, which the reference gets right to a third of the last place: it shows what is rounded twice.
    fields = _with(dtype="float32", kv_dtype="float8_e5m2", kv_layout="NHD", scales="head", context_lens=(64,))
    yield make("dtypes", "fp32_fp8_four_rows", **fields)
    few = {"num_heads": 2, "num_kv_heads": 1, "head_size": 32, "context_lens": (37, 5)}
    for dtype, tag in (("float32", "fp32_fp8_few"), ("bfloat16", "fp8_few")):
        yield make("dtypes", tag, **_with(**few, dtype=dtype, kv_dtype="float8_e4m3fn", kv_layout="NHD", scales="head"))
    for layout in ("NHD", "HND"):
        yield make("dtypes", f"fp8_{layout}", **_with(head_size=120, kv_dtype="float8_e4m3fn", kv_layout=layout))
    for bias in ("dense", "relative"):
        yield make("dtypes", "bias_float32", **_with(bias=bias, extent=24, bias_dtype="float32"))


def _options() -> Iterator[XlCase]:
    for form in _FORMS[1:]:
        tag = f"unscaled_{form.get('rel_extend', 'zero')}"
        # q + v rounded to bf16 moves an unscaled fused bias, of size 11 here, by more than the criterion lets results
        # move.
        dtype = "float16" if form["bias"] == "fused" else "bfloat16"
        yield make("options", tag, **_with(bias_scaled=False, scale=0.3, offsets=True, dtype=dtype, **form))
    yield make("options", "lse2", **_with(lse_base="2"))
    yield make("options", "u", **_with(offsets=True))
    yield make("options", "scale0", **_with(scale=0.0))
    yield make("options", "negative_scale", **_with(scale=-0.2))


def _masks() -> Iterator[XlCase]:
    for layout in LAYOUTS:
        yield make("masks", f"broken_{layout}", **_with(kv_layout=layout, broken=True, bias="dense"))
        yield make("masks", f"shared_{layout}", **_with(kv_layout=layout, shared=True, bias="alibi"))
    yield make("masks", "masked_bias", **_with(bias="dense", masked_bias=True))
    for form in _FORMS:
        tag = f"held_{form.get('rel_extend', 'zero')}"
        fields = _with(context_lens=(INT32_MAX, INT32_MIN, -1, 64, 49), max_blocks=4, **form)
        yield make("masks", tag, **fields)


def _strides() -> Iterator[XlCase]:
    for layout in LAYOUTS:
        for kv_dtype in ("", "float8_e5m2"):
            tag = f"strided_{layout}{'_fp8' if kv_dtype else ''}"
            yield make("strides", tag, **_with(kv_layout=layout, kv_dtype=kv_dtype, strided=True, bias="dense"))


def _pairs() -> Iterator[XlCase]:
    """Every two of a head size, a block size, what query and cache are, a layout and a form of bias."""
    elements = [(dtype, kv_dtype) for dtype in _DTYPES for kv_dtype in ("", *FP8)]
    choices = (HEAD_SIZES, _BLOCK_SIZES, elements, LAYOUTS, _FORMS)

    def can_meet(row: tuple[Any, ...]) -> bool:
        head_size, _, (dtype, kv_dtype), layout, _ = row
        return _fits(layout, head_size, kv_dtype or dtype)

    for head_size, block_size, (dtype, kv_dtype), layout, form in pairwise(choices, can_meet):
        words = (f"bs{block_size}", layout, dtype, kv_dtype[7:], form.get("rel_extend", ""))
        sizes = {"head_size": head_size, "block_size": block_size, "kv_layout": layout}
        scales = "head" if kv_dtype else "none"
        tag = "_".join(filter(None, words))
        yield make("pairs", tag, **_with(**sizes, dtype=dtype, kv_dtype=kv_dtype, scales=scales, **form))


def _cluster() -> Iterator[XlCase]:
    """Few units, for the kernel whose clusters share them: 16-bit queries, and blocks that copies can follow."""
    elements = [(dtype, kv_dtype) for dtype in ("float16", "bfloat16") for kv_dtype in ("", *FP8)]
    pages = [*(("vllm", size) for size in (1, 16, 32, 48)), *product(LAYOUTS[1:], (7, 16))]
    # Worst errors are compared with the reference's worst, which of a handful of rows says little: sixteen at least.
    heads = ((16, 16), (32, 8), (27, 3), (36, 4), (35, 1))
    lengths = ((700,), (33,), (1, 0, 65), (INT32_MIN, 130), (INT32_MAX,))
    choices = (HEAD_SIZES, pages, elements, heads, lengths, _FORMS)

    def can_meet(row: tuple[Any, ...]) -> bool:
        head_size, (layout, _), (dtype, kv_dtype), *_ = row
        return _fits(layout, head_size, kv_dtype or dtype)

    for number, row in enumerate(pairwise(choices, can_meet)):
        head_size, (layout, block_size), (dtype, kv_dtype), (num_heads, num_kv_heads), lens, form = row
        words = (layout, f"bs{block_size}", dtype, kv_dtype[7:], form.get("rel_extend", ""))
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}
        paging = {"block_size": block_size, "kv_layout": layout, "max_blocks": -(-712 // block_size)}
        options = {"offsets": number % 3 == 0, "lse_base": "e2"[number % 2], "strided": number % 5 == 0}
        scales = "head" if kv_dtype else "none"
        tag = "_".join(filter(None, ("cluster", *words)))
        fields = {**sizes, **paging, **options, "dtype": dtype, "kv_dtype": kv_dtype, "scales": scales, **form}
        yield make("cluster", tag, context_lens=lens, **fields)
    # Enough tiles for several clusters to share a unit.
    for head_size, lens, form in ((64, (3000,), {"bias": "dense"}), (128, (2500, 40), {"bias": "alibi"})):
        sizes = {"head_size": head_size, "num_heads": 16, "num_kv_heads": 1}
        yield make("cluster", "clusters", **_with(**sizes, context_lens=lens, **form))
    yield make(
        "cluster", "broken", **_with(num_heads=32, num_kv_heads=2, context_lens=(900,), broken=True, bias="dense")
    )
    masked = _with(num_heads=32, num_kv_heads=2, context_lens=(1100,), bias="dense", masked_bias=True)
    yield make("cluster", "masked_bias", **masked)


CASES: tuple[XlCase, ...] = (*_shapes(), *_dtypes(), *_options(), *_masks(), *_strides(), *_pairs(), *_cluster())
