"""xl_paged_attention on the CPU, against a dense float64 computation in torch that gathers token by token."""

from __future__ import annotations

import inspect
import math
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupymla
from cupymla.ops.xl_paged_attention import cases, matrix_bd, reference, xl_paged_attention
from cupymla.ops.xl_paged_attention.cases import INT32_MAX, INT32_MIN, XlCase, inputs, make
from cupymla_lab.problems.xl_paged_attention import CASES

torch = pytest.importorskip("torch")

# Half the gap between neighbouring numbers near 1: the relative error of one rounding.
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "context_lens": (37, 0, 1, 90)}


def to_torch(array: Any, kv_dtype: str | None = None) -> Any:
    """A NumPy array as float64 in torch; 16-bit and 8-bit floats are decoded by torch."""
    array = np.ascontiguousarray(array)
    label = kv_dtype if array.dtype == np.uint8 else array.dtype.name
    if label in ("float32", "float64", "float16"):
        return torch.from_numpy(array).double()
    integers = np.int16 if array.itemsize == 2 else np.uint8
    return torch.from_numpy(array.view(integers)).view(getattr(torch, str(label))).double()


@dataclass
class Expected:
    """The dense result and what bounds its rounding errors: the sums of |products| behind the scores, and |v|."""

    out: Any
    lse: Any
    scores: float = 0.0
    values: float = 0.0


def expect(a: dict[str, Any]) -> Expected:
    """Dense attention in float64, written from the definition; arguments are those of the public function."""
    query = to_torch(a["query"])
    num_seqs, num_heads, head_size = query.shape
    layout, label = a.get("kv_layout", "vllm"), a.get("kv_dtype")
    k, v = to_torch(a["k_cache"], label), to_torch(a["v_cache"], label)
    token: Callable[[int, int], tuple[Any, Any]] = {
        "vllm": lambda b, o: (k[b, :, :, o, :].reshape(-1, head_size), v[b, :, :, o]),
        "NHD": lambda b, o: (k[b, o], v[b, o]),
        "HND": lambda b, o: (k[b, :, o], v[b, :, o]),
    }[layout]
    block_size = {"vllm": v.shape[-1], "NHD": v.shape[1], "HND": v.shape[2]}[layout]
    tables = np.asarray(a["block_tables"])
    capacity = tables.shape[1] * block_size
    if a.get("matrix_bd") is not None:
        capacity = min(capacity, a["matrix_bd"].shape[2])
    scale = head_size**-0.5 if a.get("scale") is None else a["scale"]
    u = 0 if a.get("pos_bias_u") is None else to_torch(a["pos_bias_u"])
    out, lse = torch.zeros_like(query), torch.full((num_seqs, num_heads), math.inf, dtype=torch.float64)
    found = Expected(out, lse)
    for s in range(num_seqs):
        n = min(max(int(a["context_lens"][s]), 0), capacity)
        where = [(j, int(tables[s, j // block_size])) for j in range(n)]
        where = [(j, block) for j, block in where if 0 <= block < k.shape[0]]
        if not where:
            continue
        pairs = [token(block, j % block_size) for j, block in where]
        keys, values = (torch.stack(part, dim=1) for part in zip(*pairs, strict=True))
        group = num_heads // keys.shape[0]
        keys = _scaled(keys, a.get("k_scale", 1.0)).repeat_interleave(group, dim=0)
        values = _scaled(values, a.get("v_scale", 1.0)).repeat_interleave(group, dim=0)
        dots = torch.einsum("hd,hnd->hn", query[s] + u, keys)
        bias = torch.stack([bias_at(a, query, s, j, n) for j, _ in where], dim=1)
        scores = scale * (dots + bias) if a.get("bias_scaled", True) else scale * dots + bias
        sizes = torch.einsum("hd,hnd->hn", (query[s] + u).abs(), keys.abs()) + bias.abs().nan_to_num(posinf=0)
        found.scores = max(found.scores, float(sizes.max()) * max(abs(scale), 1.0))
        found.values = max(found.values, float(values.abs().max()))
        kept = ~torch.isneginf(scores).all(dim=1)
        out[s, kept] = torch.einsum("hn,hnd->hd", torch.softmax(scores[kept], dim=1), values[kept])
        lse[s, kept] = torch.logsumexp(scores[kept], dim=1)
    found.out, found.lse = out.numpy(), lse.numpy() / (math.log(2) if a.get("lse_base") == "2" else 1)
    return found


def _scaled(rows: Any, scale: Any) -> Any:
    return rows * torch.as_tensor(np.asarray(scale, np.float64)).reshape(-1, 1, 1)


def bias_at(a: dict[str, Any], query: Any, s: int, j: int, n: int) -> Any:
    """The bias of sequence s at position j of n, [num_heads]."""
    distance = n - 1 - j
    if a.get("matrix_bd") is not None:
        return to_torch(a["matrix_bd"][s, :, j])
    if a.get("alibi_slopes") is not None:
        return to_torch(a["alibi_slopes"]) * -distance
    table: Any = a.get("rel_bias")
    fused: Any = a.get("pos_emb")
    if table is None and fused is None:
        return torch.zeros(query.shape[1], dtype=torch.float64)
    extent = fused.shape[0] if table is None else table.shape[2]
    if distance >= extent:
        if a["rel_extend"] == "zero":
            return torch.zeros(query.shape[1], dtype=torch.float64)
        distance = extent - 1
    if table is not None:
        return to_torch(table[s, :, distance])
    v = 0 if a.get("pos_bias_v") is None else to_torch(a["pos_bias_v"])
    return torch.einsum("hd,hd->h", query[s] + v, to_torch(fused[distance]))


def bound(expected: Expected, a: dict[str, Any], unit: float) -> float:
    """How far out may be when scores, weights and sums carry relative errors of `unit` per operation.

    A score of d products is off by at most (d + 4) * unit * sum |products|; softmax weights by twice that, relatively,
    plus one unit per term of the sums over n keys.
    """
    head_size, n = a["query"].shape[2], max(1, min(int(np.max(a["context_lens"], initial=1)), 1 << 16))
    relative = math.expm1(2 * (head_size + 4) * unit * expected.scores) + 2 * (n + 8) * unit
    return relative * expected.values + 1e-300


def finite_infinities(lse: Any) -> Any:
    """Lse with +inf as a number, so that differences are defined and a missing inf is a large one."""
    return np.where(np.isposinf(lse), 1e6, lse)


# What cases of the cluster kernel add is its own: how its CTAs share the pages. Their options are those of `pairs`.
OF_REFERENCES = [case for case in CASES if case.intent != "cluster"]


@pytest.mark.parametrize("case", OF_REFERENCES, ids=lambda case: case.name)
def test_references_are_dense_attention(case: XlCase) -> None:
    """Every layout, bias form, dtype and mask means what the definition says; poison reaches nothing.

    The same-precision mode differs from float64 by q + u, P and out rounded to 16 bits and fp32 sums, no more.
    """
    a = inputs(case, seed=1)
    exact, exact_lse = reference.xl_paged_attention(**a)
    expected = expect(a)
    assert exact.dtype == np.float64
    limit = bound(expected, a, UNIT["float64"])
    np.testing.assert_allclose(exact, expected.out, rtol=0, atol=limit)
    np.testing.assert_array_equal(np.isposinf(exact_lse), np.isposinf(expected.lse))
    slack = 4 * (case.head_size + len(case.context_lens) + 100) * UNIT["float64"] * (1 + expected.scores)
    np.testing.assert_allclose(finite_infinities(exact_lse), finite_infinities(expected.lse), rtol=1e-14, atol=slack)

    out, lse = reference.xl_paged_attention(**a, precision="same")
    assert out.dtype == a["query"].dtype
    assert lse.dtype == np.float32
    unit = UNIT[case.dtype]
    # Rounding q + u and q + v moves a score by one unit of its sum of |products|; the two roundings of P and out
    # cost a unit each, and a P below fp16's range is lost entirely.
    moved = 2 * unit * expected.scores if case.offsets else 0.0
    limit = bound(expected, a, UNIT["float32"]) + expected.values * (math.expm1(moved) + 2.1 * unit + 256 * 2.0**-25)
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=0, atol=limit)
    steps = moved + 2 * (case.head_size + 4) * UNIT["float32"] * expected.scores + 1e-3
    np.testing.assert_allclose(finite_infinities(lse), finite_infinities(exact_lse), rtol=1e-6, atol=steps)


def two_keys(bias: float) -> dict[str, Any]:
    """One bf16 head, scores [0, bias], values 0 and 1: out is P_1 / (1 + P_1)."""
    values = np.zeros((1, 2, 1, 32), ml_dtypes.bfloat16)
    values[0, 1] = 1
    return {
        "query": np.zeros((1, 1, 32), ml_dtypes.bfloat16),
        "k_cache": np.zeros((1, 2, 1, 32), ml_dtypes.bfloat16),
        "v_cache": values,
        "block_tables": np.zeros((1, 1), np.int32),
        "context_lens": np.array([2], np.int32),
        "matrix_bd": np.array([[[0, bias]]], np.float32),
        "bias_scaled": False,
        "kv_layout": "NHD",
    }


def test_same_precision_rounds_p_before_v() -> None:
    """P is rounded to bf16 in the numerator only; the test sees values where that changes the result's last bit."""
    visible = 0
    for bias in np.linspace(-3, -0.01, 60, dtype=np.float32):
        weight = np.exp(bias)
        expected = (weight.astype(ml_dtypes.bfloat16).astype(np.float32) / (1 + weight)).astype(ml_dtypes.bfloat16)
        out = reference.xl_paged_attention(**two_keys(float(bias)), precision="same")
        assert out[0, 0, 0] == expected
        visible += expected != (weight / (1 + weight)).astype(ml_dtypes.bfloat16)
    assert visible > 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_cpu_call_rounds_once(dtype: str) -> None:
    """The public call gives the float64 result within half a step of the output's dtype."""
    a = inputs(make("dtypes", **SMALL, dtype=dtype, bias="dense"), seed=3)
    exact, exact_lse = reference.xl_paged_attention(**a)
    out, lse = xl_paged_attention(**a)
    assert out.dtype == a["query"].dtype
    # The 1.001 covers a conversion that goes through fp32; 2**-25 is half of fp16's smallest step.
    assert np.all(np.abs(out.astype(np.float64) - exact) <= 1.001 * UNIT[dtype] * np.abs(exact) + 2.0**-25)
    np.testing.assert_array_equal(lse, exact_lse.astype(np.float32))


# Forms, layouts and groupings that must coincide -----------------------------------------------------------------


def float32_case(**changes: Any) -> dict[str, Any]:
    return inputs(make("options", **{**SMALL, "dtype": "float32", **changes}), seed=4)


def without_bias(a: dict[str, Any]) -> dict[str, Any]:
    dropped = ("matrix_bd", "rel_bias", "rel_extend", "pos_emb", "pos_bias_v", "alibi_slopes")
    return {name: value for name, value in a.items() if name not in dropped}


def agree(a: dict[str, Any], b: dict[str, Any], atol: float) -> None:
    out_a, lse_a = reference.xl_paged_attention(**a)
    out_b, lse_b = reference.xl_paged_attention(**b)
    np.testing.assert_allclose(out_a, out_b, rtol=0, atol=atol)
    np.testing.assert_allclose(finite_infinities(lse_a), finite_infinities(lse_b), rtol=0, atol=atol)


@pytest.mark.parametrize("bias_scaled", [True, False])
@pytest.mark.parametrize("extend", ["zero", "clamp"])
@pytest.mark.parametrize("extent", [1, 24, 90, 200])
def test_fused_dense_and_compact_coincide(extent: int, extend: Any, bias_scaled: bool) -> None:
    """(q + v).p fused, precomputed by position and precomputed by distance are one bias."""
    fused = float32_case(bias="fused", extent=extent, rel_extend=extend, offsets=True, bias_scaled=bias_scaled)
    columns = fused["block_tables"].shape[1] * 16
    dense = matrix_bd(
        fused["query"],
        fused["pos_emb"],
        fused["pos_bias_v"],
        context_lens=fused["context_lens"],
        max_context=columns,
        rel_extend=extend,
    )
    shifted = fused["query"].astype(np.float64) + fused["pos_bias_v"]
    compact = np.einsum("shd,ehd->she", shifted, fused["pos_emb"].astype(np.float64)).astype(np.float32)
    plain = without_bias(fused)
    # Both precomputed forms round the bias to fp32, values up to about 60: scores move by 2 * 60 * 2**-24.
    tolerance = 4 * 2 * 60 * 2.0**-24
    agree(fused, {**plain, "matrix_bd": dense}, tolerance)
    agree(fused, {**plain, "rel_bias": compact, "rel_extend": extend}, tolerance)


def test_alibi_is_a_linear_dense_bias() -> None:
    """slope * (j - (n - 1)): zero at the newest key, and lower for older ones."""
    alibi = float32_case(bias="alibi")
    n, slopes = alibi["context_lens"], alibi["alibi_slopes"]
    columns = alibi["block_tables"].shape[1] * 16
    steps = np.arange(columns)[None, None, :] - (n[:, None, None] - 1)
    dense = (slopes[None, :, None] * steps).astype(np.float32)
    agree(alibi, {**without_bias(alibi), "matrix_bd": dense}, 1e-12)
    distance = -np.arange(columns, dtype=np.float32)
    compact = np.broadcast_to(slopes[None, :, None] * distance, dense.shape).astype(np.float32)
    agree(alibi, {**without_bias(alibi), "rel_bias": compact}, 1e-12)


def test_grouped_heads_are_repeated_kv_heads() -> None:
    """Query head h reads KV head h // group, for group sizes 1, 2 and 4."""
    for num_kv_heads in (1, 2, 4):
        a = float32_case(num_kv_heads=num_kv_heads, kv_layout="NHD", bias="relative", extent=24)
        repeated = {name: np.repeat(a[name], 4 // num_kv_heads, axis=2) for name in ("k_cache", "v_cache")}
        agree(a, {**a, **repeated}, 1e-12)


def relaid(a: dict[str, Any], block_size: int, kv_layout: str) -> dict[str, Any]:
    """The same logical context of an NHD cache in other blocks and another layout."""
    lens = a["context_lens"]
    columns = -(-int(lens.max()) // block_size)
    old = a["k_cache"].shape[1]
    tables = np.arange(len(lens) * columns, dtype=np.int32).reshape(len(lens), columns)[:, ::-1].copy()
    moved: dict[str, Any] = {"block_tables": tables, "kv_layout": kv_layout}
    for name in ("k_cache", "v_cache"):
        cache = np.full((tables.size, block_size, *a[name].shape[2:]), np.nan, np.float32)
        for s, n in enumerate(lens):
            for j in range(n):
                row = a[name][a["block_tables"][s, j // old], j % old]
                cache[tables[s, j // block_size], j % block_size] = row
        laid = cases.lay_out(cache, kv_layout, "float32", name == "k_cache")
        moved[name] = np.ascontiguousarray(laid)
    return {**a, **moved}


@pytest.mark.parametrize("kv_layout", ["vllm", "NHD", "HND"])
def test_blocks_and_layouts_do_not_matter(kv_layout: str) -> None:
    """One logical context gives the same result in every block size and layout."""
    a = float32_case(kv_layout="NHD", bias="alibi")
    expected, _ = reference.xl_paged_attention(**a)
    for block_size in (1, 5, 16, 256):
        out, _ = reference.xl_paged_attention(**relaid(a, block_size, kv_layout))
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kv_layout", ["vllm", "NHD", "HND"])
def test_strided_arrays_are_their_contiguous_copies(kv_layout: str) -> None:
    """Strides are followed: parts of larger arrays give the result of copies of them."""
    a = inputs(make("strides", **SMALL, kv_layout=kv_layout, strided=True, bias="dense"), seed=5)
    assert not any(a[name].flags.c_contiguous for name in ("query", "k_cache", "v_cache", "matrix_bd", "block_tables"))
    copies = {name: np.ascontiguousarray(value) for name, value in a.items() if isinstance(value, np.ndarray)}
    agree(a, {**a, **copies}, 1e-12)


def test_broadcast_position_table() -> None:
    """One position table for all heads, by a stride of zero, is the table repeated."""
    a = float32_case(bias="fused", extent=100)
    shared = np.broadcast_to(a["pos_emb"][:, :1], a["pos_emb"].shape)
    agree({**a, "pos_emb": shared}, {**a, "pos_emb": shared.copy()}, 1e-12)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_labels_and_scales(kv_dtype: Any) -> None:
    """A typed fp8 cache is the labelled uint8 one, and scales per head are scales of the decoded cache."""
    a = inputs(make("dtypes", **SMALL, dtype="float32", kv_dtype=kv_dtype, scales="head", kv_layout="NHD"), seed=6)
    decoded = {}
    for name, scale in (("k_cache", a["k_scale"]), ("v_cache", a["v_scale"])):
        typed = a[name].view(getattr(ml_dtypes, kv_dtype))
        # Powers of two times small codes: the product with the scale is exact in fp32.
        decoded[name] = typed.astype(np.float32) * scale[:, None]
        a[name] = typed
    del a["kv_dtype"]
    labelled = {**a, "k_cache": a["k_cache"].view(np.uint8), "v_cache": a["v_cache"].view(np.uint8)}
    np.testing.assert_array_equal(xl_paged_attention(**a)[0], xl_paged_attention(**labelled, kv_dtype=kv_dtype)[0])
    plain = {name: value for name, value in a.items() if name not in ("k_scale", "v_scale")}
    agree(a, {**plain, **decoded}, 1e-12)


# Masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in CASES if case.intent == "masks"], ids=lambda case: case.name)
def test_what_no_key_uses_changes_no_bit(case: XlCase) -> None:
    """Poison of another kind in the same places leaves the output's bits alone."""
    a = inputs(case, seed=7)
    expected, _ = xl_paged_attention(**a)
    for poison in (np.inf, -np.inf, 3e38):
        other: dict[str, Any] = {}
        for name, value in a.items():
            floating = isinstance(value, np.ndarray) and value.dtype == ml_dtypes.bfloat16
            other[name] = np.where(np.isnan(value), np.asarray(poison, value.dtype), value) if floating else value
        np.testing.assert_array_equal(xl_paged_attention(**other)[0], expected)


def test_nan_in_a_used_slot_is_seen() -> None:
    """Masking hides unused slots and nothing else: a NaN key of the last position reaches that sequence's heads."""
    a = float32_case(kv_layout="NHD")
    n = int(a["context_lens"][3])
    block = a["block_tables"][3, (n - 1) // 16]
    a["k_cache"][block, (n - 1) % 16, 0, 5] = np.nan
    out, _ = xl_paged_attention(**a)
    assert np.isnan(out[3, :2]).all()
    assert np.isfinite(out[3, 2:]).all()
    assert np.isfinite(out[:3]).all()


def test_rows_without_keys() -> None:
    """Length 0, a table of broken entries and a bias of -inf everywhere all give out 0 and lse +inf."""
    a = float32_case(context_lens=(0, 20, 20, 20), bias="dense")
    a["block_tables"][1] = INT32_MIN
    a["matrix_bd"][2] = -np.inf
    out, lse = xl_paged_attention(**a)
    assert (out[:3] == 0).all()
    assert np.isposinf(lse[:3]).all()
    assert np.isfinite(lse[3]).all()


def test_empty_problems() -> None:
    """No sequences, no blocks in the cache, no columns in the table."""
    a = float32_case()
    none = {name: a[name][:0] for name in ("query", "block_tables", "context_lens")}
    assert xl_paged_attention(**{**a, **none})[0].shape == (0, 4, 64)
    for changes in (
        {"k_cache": a["k_cache"][:0], "v_cache": a["v_cache"][:0]},
        {"block_tables": a["block_tables"][:, :0]},
    ):
        out, lse = xl_paged_attention(**{**a, **changes})
        assert (out == 0).all()
        assert np.isposinf(lse).all()


@pytest.mark.parametrize("bias", ["none", "dense", "relative", "fused", "alibi"])
def test_lengths_are_held_to_the_table(bias: str) -> None:
    """A length past max_blocks * block_size is that capacity, distances included; a negative one is 0."""
    a = float32_case(context_lens=(64, 64, 0), bias=bias, extent=24, max_blocks=4)
    held = {**a, "context_lens": np.array([INT32_MAX, 65, INT32_MIN], np.int32)}
    agree(a, held, 0.0)


def test_narrow_dense_bias_holds_lengths() -> None:
    """Positions past matrix_bd's columns are not keys, and its memory past them is not read."""
    a = float32_case(context_lens=(64, 50, 10), bias="dense", max_blocks=4)
    narrow = {**a, "matrix_bd": a["matrix_bd"][:, :, :40]}
    agree({**a, "context_lens": np.array([40, 40, 10], np.int32)}, narrow, 0.0)


# Memory and splitting --------------------------------------------------------------------------------------------


def test_chunks_and_groups_merge_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walking the context in many small chunks, one sequence at a time, is the one-chunk result."""
    a = inputs(make("shapes", **{**SMALL, "context_lens": (300, 0, 7, 299, 50)}, bias="fused", extent=64), seed=8)
    whole, whole_lse = reference.xl_paged_attention(**a)
    monkeypatch.setattr(reference, "_CHUNK", 13)
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", 1)
    out, lse = reference.xl_paged_attention(**a)
    np.testing.assert_allclose(out, whole, rtol=0, atol=1e-12)
    np.testing.assert_allclose(finite_infinities(lse), finite_infinities(whole_lse), rtol=0, atol=1e-12)


def test_memory_does_not_grow_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is a multiple of one chunk's block, though the whole context in float64 is far larger."""
    case = make("shapes", num_heads=4, num_kv_heads=4, head_size=64, context_lens=(16000, 16000), block_size=64)
    a = inputs(case, seed=9)
    monkeypatch.setattr(reference, "_CHUNK", 256)
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", 1 << 16)
    tracemalloc.start()
    try:
        reference.xl_paged_attention(**a)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Keys, values and their masked and transposed temporaries: at most ten float64 blocks, plus small arrays.
    assert peak < 10 * 8 * (1 << 16) + (1 << 20)
    assert peak < 2 * 8 * 32000 * 4 * 64 / 10


# Outputs and prepared calls --------------------------------------------------------------------------------------


def test_outputs_are_written_and_returned() -> None:
    """out= and lse= receive the result, strided out included, and are what comes back; lse= implies return_lse."""
    a = float32_case(bias="dense")
    del a["return_lse"]
    expected = xl_paged_attention(**a)
    assert isinstance(expected, np.ndarray)
    wide, lse = np.zeros((4, 2, 4, 64), np.float32), np.zeros((4, 4), np.float32)
    out = wide[:, 1]
    given = xl_paged_attention(**a, out=out, lse=lse)
    assert given[0] is out
    assert given[1] is lse
    np.testing.assert_array_equal(out, expected)
    assert (wide[:, 0] == 0).all()
    assert np.isposinf(lse[1]).all()


def test_prepared_call_sees_new_contents() -> None:
    """A prepared call runs on the arrays as they are when it is called."""
    a = float32_case(kv_layout="NHD")
    call = xl_paged_attention.prepare(**a)
    assert call()[0] is call()[0]
    np.testing.assert_array_equal(call()[0], xl_paged_attention(**a)[0])
    a["query"] *= -1
    a["context_lens"][3] = 5
    np.testing.assert_array_equal(call(stream=None)[0], xl_paged_attention(**a)[0])


def test_package_offers_the_operator() -> None:
    """The package's attributes are this folder's operators, and each knows its name."""
    package: Any = cupymla
    assert package.xl_paged_attention is xl_paged_attention
    assert xl_paged_attention.name == "xl_paged_attention"
    assert package.matrix_bd is matrix_bd


def test_signature_is_documented() -> None:
    """Every parameter appears in the docstring's argument list."""
    documented = str(xl_paged_attention.__doc__)
    for name in inspect.signature(xl_paged_attention).parameters:
        assert f"        {name}: " in documented


# Cases -----------------------------------------------------------------------------------------------------------


def test_case_names() -> None:
    """Names are unique, and the benchmark spells the ones that published tables use."""
    names = [case.name for case in (*CASES, *cases.BENCH)]
    assert len(set(names)) == len(names)
    bench = {case.name for case in cases.BENCH}
    assert {"mha16x64_b32_c2048_dense", "gqa32-8x128_b32_c4096_rel1024", "gqa32-8x128_b32_c8192_fp8"} <= bench


def test_cases_hold_poison() -> None:
    """Each small bf16 case plants NaN in its caches, so that a leak would be seen."""
    for case in CASES:
        if case.cache_dtype == "bfloat16" and case.context_lens:
            a = inputs(case, seed=11)
            assert np.isnan(a["k_cache"]).any()
            assert np.isnan(a["v_cache"]).any()


def test_work_counts() -> None:
    """FLOPs and bytes of the smallest rows, counted by hand."""
    dense = next(case for case in cases.BENCH if case.name == "mha16x64_b1_c512_dense")
    assert cases.flops(dense) == 4 * 512 * 16 * 64
    assert cases.bytes_moved(dense) == 2 * 512 * 16 * 64 * 2 + 512 * 16 * 2 + 2 * 16 * 64 * 2
    relative = next(case for case in cases.BENCH if case.name == "gqa4-1x128_b1_c8192_rel1024")
    assert cases.bytes_moved(relative) == 2 * 8192 * 128 * 2 + 1024 * 4 * 2 + 2 * 4 * 128 * 2
    fp8 = next(case for case in cases.BENCH if case.name == "gqa32-8x128_b32_c8192_fp8")
    assert cases.bytes_moved(fp8) == 32 * (2 * 8192 * 8 * 128 + 2 * 32 * 128 * 2)
