"""Names of benchmark cases written out, as plots and tables for readers show them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple


class _Spelling(NamedTuple):
    """How benchmark cases are spelled: a pattern of the sizes, a sentence of them, words of what may follow."""

    sizes: str
    text: Callable[[Mapping[str, str]], str]
    suffixes: Mapping[str, str]


def _count(number: str, word: str) -> str:
    return f"{number} {word}" if number == "1" else f"{number} {word}s"


def _mla(size: Mapping[str, str]) -> str:
    heads, queries = _count(size["h"], "head"), "1 query" if size["q"] == "1" else f"{size['q']} queries"
    return f"{heads}, d {size['d']}, top-k {size['k']}, {queries}, {size['kv']} keys"


def _gemv(size: Mapping[str, str]) -> str:
    matrix = f"{size['m']} x {size['k']}"
    matrix = matrix if size["l"] == "1" else f"{size['l']} x ({matrix})"
    return f"{matrix}, {_count(size['n'], 'vector')}"


def _paged(size: Mapping[str, str]) -> str:
    heads = f"{size['heads']} heads"
    if size["kind"] == "gqa":
        heads = f"{heads} on {_count(size['kv_heads'], 'KV head')}"
    tokens = size["tokens"].replace("-", " to ")
    return f"{heads} of {size['channels']}, {_count(size['seqs'], 'sequence')}, {tokens} tokens"


def _logits(size: Mapping[str, str]) -> str:
    return f"{size['dtype']}, {_count(size['h'], 'head')} of {size['d']}, {size['t']} queries, {size['l']} keys"


def _paged_keys(size: Mapping[str, str]) -> str:
    heads = f"{_count(size['h'], 'head')} of {size['d'] or '128'}"
    queries = "1 query" if size["n"] == "1" else f"{size['n']} queries"
    requests = f"{_count(size['b'], 'request')}, each {queries}, {size['l']} keys"
    return f"{size['dtype']}, {heads}, {requests}, top {size['k']}"


def _inverted(size: Mapping[str, str]) -> str:
    return f"{size['q']} queries, {_count(size['kv'], 'token')}, top {size['k']}"


def _topk(size: Mapping[str, str]) -> str:
    return f"{_count(size['t'], 'row')} of {size['l']}, top {size['k']}"


_CACHES = {"bf16": "bf16", "v32": "fp8 of V3.2", "v4": "fp8 of V4"}


def _decode(size: Mapping[str, str]) -> str:
    return (
        f"{_CACHES[size['form']]}, {_count(size['h'], 'head')}, d {size['d']}, top-k {size['k'].replace('+', ' + ')}, "
        f"{_count(size['b'], 'request')} of {_count(size['n'], 'row')}"
    )


def _cached(size: Mapping[str, str]) -> str:
    tokens = _count(size["t"], "token")
    return f"{_CACHES[size['form']]}, {tokens}" if size["form"] else tokens


def _quantized(size: Mapping[str, str]) -> str:
    return f"{_count(size['t'], 'row')} of {size['d']}"


_MLA = _Spelling(
    r"h(?P<h>\d+)_d(?P<d>\d+)_k(?P<k>\d+)_q(?P<q>\d+)_kv(?P<kv>\d+)",
    _mla,
    {
        "overlap90": "neighbours share 90%",
        "sorted": "sorted",
        "fp16": "fp16",
        "sink": "attention sink",
        "causal": "causal",
        "lengths": "random lengths",
        "few": "1 entry in 40 valid",
        "det": "deterministic",
        "lists": "lists given",
        "dist": "with distribution",
    },
)
_SPELLINGS: Mapping[str, _Spelling] = {
    **dict.fromkeys(("sparse_mla_fwd", "sparse_mla_bwd", "sparse_mla_bwd_phase1", "attn_dist"), _MLA),
    "nvfp4_gemv": _Spelling(
        r"m(?P<m>\d+)_k(?P<k>\d+)_l(?P<l>\d+)_n(?P<n>\d+)",
        _gemv,
        {"w4a16": "bf16 vectors", "mxfp4": "MXFP4"},
    ),
    "xl_paged_attention": _Spelling(
        r"(?P<kind>mha|gqa)(?P<heads>\d+)(-(?P<kv_heads>\d+))?x(?P<channels>\d+)_b(?P<seqs>\d+)_c(?P<tokens>\d+(-\d+)?)",
        _paged,
        {"dense": "dense bias", r"rel(\d+)": r"relative bias \1", "fp8": "fp8 cache"},
    ),
    "indexer_logits": _Spelling(
        r"(?P<dtype>fp8|bf16|fp16)_h(?P<h>\d+)_d(?P<d>\d+)_t(?P<t>\d+)_l(?P<l>\d+)", _logits, {"causal": "causal"}
    ),
    "indexer_topk": _Spelling(
        r"(?P<dtype>fp8|bf16|fp16)_h(?P<h>\d+)(_d(?P<d>\d+))?_t(?P<t>\d+)_l(?P<l>\d+)_k(?P<k>\d+)",
        lambda size: f"{_logits({**size, 'd': size['d'] or '128'})}, top {size['k']}",
        {"causal": "causal"},
    ),
    "indexer_loss": _Spelling(
        r"(?P<dtype>bf16|fp16)_h(?P<h>\d+)_d(?P<d>\d+)_t(?P<t>\d+)_l(?P<l>\d+)_k(?P<k>\d+)",
        lambda size: f"{_logits(size)}, top {size['k']}",
        {},
    ),
    "indexer_bwd": _Spelling(
        r"(?P<dtype>bf16|fp16)_h(?P<h>\d+)_d(?P<d>\d+)_t(?P<t>\d+)_l(?P<l>\d+)_k(?P<k>\d+)",
        lambda size: f"{_logits(size)}, top {size['k']}",
        {"det": "deterministic"},
    ),
    "indexer_loss_dense": _Spelling(
        r"(?P<dtype>bf16|fp16)_h(?P<h>\d+)_d(?P<d>\d+)_q(?P<q>\d+)_d(?P<d_qk>\d+)_t(?P<t>\d+)_l(?P<l>\d+)",
        lambda size: f"{_logits(size)}, {_count(size['q'], 'MLA head')} of {size['d_qk']}",
        {"lse": "MLA lse given", "causal": "causal"},
    ),
    "paged_indexer_topk": _Spelling(
        r"(?P<dtype>fp8|bf16|fp16)_h(?P<h>\d+)(_d(?P<d>\d+))?_b(?P<b>\d+)_n(?P<n>\d+)_l(?P<l>\d+)_k(?P<k>\d+)",
        _paged_keys,
        {"mixed": "all others 1024"},
    ),
    "sparse_mla_decode": _Spelling(
        r"(?P<form>bf16|v32|v4)_d(?P<d>\d+)_h(?P<h>\d+)_b(?P<b>\d+)_n(?P<n>\d+)_k(?P<k>\d+(\+\d+)?)",
        _decode,
        {"sink": "attention sink"},
    ),
    "merge_attention": _Spelling(
        r"p(?P<p>\d+)_t(?P<t>\d+)_h(?P<h>\d+)_d(?P<d>\d+)",
        lambda size: f"{_count(size['p'], 'part')}, {size['t']} queries, {_count(size['h'], 'head')} of {size['d']}",
        {"sink": "attention sink"},
    ),
    "topk": _Spelling(r"t(?P<t>\d+)_l(?P<l>\d+)_k(?P<k>\d+)", _topk, {}),
    "invert_indices": _Spelling(r"q(?P<q>\d+)_kv(?P<kv>\d+)_k(?P<k>\d+)", _inverted, {}),
    **dict.fromkeys(("dequantize_fp8", "hadamard"), _Spelling(r"t(?P<t>\d+)_d(?P<d>\d+)", _quantized, {})),
    **dict.fromkeys(
        ("indexer_k_quant_and_cache", "gather_indexer_cache", "concat_and_cache_mla", "gather_mla_cache"),
        _Spelling(r"((?P<form>bf16|v32|v4)_)?t(?P<t>\d+)", _cached, {"tables": "by block tables"}),
    ),
    "quantize_fp8": _Spelling(r"t(?P<t>\d+)_d(?P<d>\d+)", _quantized, {"pow2": "scales 2^n"}),
}


def written_out(operator: str, case: str) -> str:
    """A benchmark case's name in words, such as "128 heads, d 576, top-k 2048, 4096 queries, 8192 keys".

    Raises ValueError for a name that is not spelled as the operator's cases are.
    """
    spelling = _SPELLINGS.get(operator)
    found = spelling and re.match(rf"{spelling.sizes}(?=_|$)", case)
    if spelling is None or not found:
        raise ValueError(f"benchmark cases of {operator} are not spelled as {case}")
    words = [spelling.text(found.groupdict())]
    for suffix in case[found.end() :].split("_")[1:]:
        known = [
            re.sub(pattern, text, suffix)
            for pattern, text in spelling.suffixes.items()
            if re.fullmatch(pattern, suffix)
        ]
        if not known:
            raise ValueError(f"benchmark cases of {operator} have no {suffix} as {case} has")
        words += known
    return ", ".join(words)
