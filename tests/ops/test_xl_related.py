"""reshape_and_cache, copy_blocks, rel_shift and matrix_bd on the CPU, against slow loops from their definitions."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupymla
from cupymla.errors import CupymlaError, InputError
from cupymla.ops.operator import Operator
from cupymla.ops.xl_paged_attention import (
    copy_blocks,
    matrix_bd,
    rel_shift,
    relative,
    reshape_and_cache,
    xl_paged_attention,
)
from cupymla.ops.xl_paged_attention.cases import INT32_MAX, INT32_MIN

torch = pytest.importorskip("torch")

LAYOUTS = ("vllm", "NHD", "HND")
FP8 = ("float8_e4m3fn", "float8_e5m2")
BF16 = ml_dtypes.bfloat16
FLOATS = (np.float32, np.float16, BF16)
Caches = tuple[Any, Any]


def empty_caches(
    layout: str, dtype: Any, blocks: int = 6, size: int = 8, heads: int = 2, head_size: int = 64
) -> Caches:
    """Two caches full of a recognisable value."""
    x = 16 // np.dtype(dtype).itemsize
    shapes = {
        "vllm": ((blocks, heads, head_size // x, size, x), (blocks, heads, head_size, size)),
        "NHD": ((blocks, size, heads, head_size),) * 2,
        "HND": ((blocks, heads, size, head_size),) * 2,
    }[layout]
    return np.full(shapes[0], 7, dtype), np.full(shapes[1], 7, dtype)


def element(cache: Any, layout: str, slot: int, head: int, channel: int, size: int = 8) -> tuple[int, ...]:
    """The index of one channel of one head in one slot."""
    block, offset = divmod(slot, size)
    if layout == "NHD":
        return block, offset, head, channel
    if layout == "HND":
        return block, head, offset, channel
    if cache.ndim == 4:
        return block, head, channel, offset
    x = cache.shape[-1]
    return block, head, channel // x, offset, channel % x


def normal(seed: int, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(dtype)


# reshape_and_cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_land_in_their_slots(layout: Any, dtype: Any, slot_dtype: Any) -> None:
    """Each valid slot holds its token, bit for bit; all other memory, and every out-of-range slot, is left alone."""
    key, value = normal(0, (7, 2, 64), dtype), normal(1, (7, 2, 64), dtype)
    slots = np.array([13, -1, 0, 40, 48, INT32_MIN, 22], slot_dtype)
    k_cache, v_cache = empty_caches(layout, dtype)
    expected = [cache.copy() for cache in (k_cache, v_cache)]
    for source, cache in zip((key, value), expected, strict=True):
        for token, slot in ((0, 13), (2, 0), (3, 40), (6, 22)):
            for head in range(2):
                for channel in range(64):
                    cache[element(cache, layout, slot, head, channel)] = source[token, head, channel]
    given_back = reshape_and_cache(key, value, k_cache, v_cache, slots, kv_layout=layout)
    assert given_back[0] is k_cache
    assert given_back[1] is v_cache
    np.testing.assert_array_equal(k_cache, expected[0])
    np.testing.assert_array_equal(v_cache, expected[1])


def decode(code: int, kv_dtype: str) -> float:
    """The number of one fp8 code, from the OCP 8-bit floating point specification."""
    exponent_bits, bias = (4, 7) if kv_dtype == "float8_e4m3fn" else (5, 15)
    mantissa_bits = 7 - exponent_bits
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & ((1 << mantissa_bits) - 1)
    if kv_dtype == "float8_e4m3fn" and code & 0x7F == 0x7F:
        return math.nan
    if kv_dtype == "float8_e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_dtype", FP8)
def test_fp8_is_the_nearest_code(kv_dtype: Any, layout: Any) -> None:
    """Each element is the code nearest to x / scale, ties to an even code, saturated; NaN stays NaN."""
    codes = np.array([code for code in range(256) if math.isfinite(decode(code, kv_dtype))])
    numbers = np.array([decode(int(code), kv_dtype) for code in codes])
    key = normal(2, (5, 2, 64)) * np.float32(2.0) ** np.arange(-20, 20, 40 / 64, dtype=np.float32)
    positive = np.sort(numbers[numbers > 0])
    key[0, 0] = ((positive[:-1] + positive[1:]) / 2)[:64]
    key[1, 0, :6] = [np.inf, -np.inf, 1e30, -1e30, 0.0, -0.0]
    key[1, 1, :2] = np.nan
    scale = np.array([1.0, 0.375], np.float32)
    k_cache, v_cache = empty_caches(layout, np.uint8)
    reshape_and_cache(
        key, key, k_cache, v_cache, np.arange(5), kv_layout=layout, kv_dtype=kv_dtype, k_scale=scale, v_scale=0.375
    )
    for cache, scales in ((k_cache, scale), (v_cache, np.array([0.375, 0.375], np.float32))):
        for token in range(5):
            for head in range(2):
                for channel in range(64):
                    wanted = float(key[token, head, channel] / scales[head])
                    code = int(cache[element(cache, layout, token, head, channel)])
                    got = decode(code, kv_dtype)
                    if math.isnan(wanted):
                        assert math.isnan(got)
                        continue
                    held = min(max(wanted, numbers.min()), numbers.max())
                    distance = np.abs(numbers - held)
                    assert abs(got - held) == distance.min()
                    ties = codes[distance == distance.min()]
                    assert len(set(numbers[distance == distance.min()])) == 1 or code % 2 == 0, ties


@pytest.mark.parametrize("kv_dtype", FP8)
def test_typed_fp8_cache_is_the_labelled_one(kv_dtype: Any) -> None:
    """A cache of an fp8 dtype receives the bytes that a labelled uint8 cache does."""
    key = normal(3, (5, 2, 64), BF16)
    plain, typed = empty_caches("NHD", np.uint8), empty_caches("NHD", getattr(ml_dtypes, kv_dtype))
    for cache in typed:
        cache.view(np.uint8)[...] = 7
    reshape_and_cache(key, key, *plain, np.arange(5), kv_layout="NHD", kv_dtype=kv_dtype, k_scale=np.float32(0.5))
    reshape_and_cache(key, key, *typed, np.arange(5), kv_layout="NHD", k_scale=np.array([0.5], np.float32))
    for one, other in zip(plain, typed, strict=True):
        np.testing.assert_array_equal(one, other.view(np.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_reads_what_was_cached(layout: Any) -> None:
    """Written token by token and attended to: the result of softmax(q k) v on the tokens themselves."""
    n, size = 19, 8
    key, value, query = normal(4, (n, 2, 64)), normal(5, (n, 2, 64)), normal(6, (1, 2, 64))
    k_cache, v_cache = empty_caches(layout, np.float32)
    k_cache[...], v_cache[...] = np.nan, np.nan
    table = np.array([[4, 0, 5]], np.int32)
    slots = np.array([table[0, j // size] * size + j % size for j in range(n)])
    reshape_and_cache(key, value, k_cache, v_cache, slots, kv_layout=layout)
    out = xl_paged_attention(query, k_cache, v_cache, table, np.array([n], np.int32), kv_layout=layout)
    q, k, v = (torch.from_numpy(array).double() for array in (query[0], key, value))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", q, k) / 8, dim=1)
    expected = torch.einsum("hn,nhd->hd", weights, v).numpy()
    # One fp32 rounding of values below 8.
    np.testing.assert_allclose(out[0], expected, rtol=0, atol=8 * 2.0**-24)


def test_interleaved_caches_are_no_aliases() -> None:
    """K and V as halves of one allocation are accepted, by block and by token; the same memory twice is not."""
    key, value = normal(7, (4, 2, 64)), normal(8, (4, 2, 64))
    by_block, by_token = np.zeros((6, 2, 8, 2, 64), np.float32), np.zeros((6, 8, 2, 2, 64), np.float32)
    for k_cache, v_cache in ((by_block[:, 0], by_block[:, 1]), (by_token[:, :, 0], by_token[:, :, 1])):
        reshape_and_cache(key, value, k_cache, v_cache, np.arange(4), kv_layout="NHD")
        np.testing.assert_array_equal(k_cache[0, :4], key)
        np.testing.assert_array_equal(v_cache[0, :4], value)
        with pytest.raises(InputError) as caught:
            reshape_and_cache(key, value, k_cache, k_cache[::1], np.arange(4), kv_layout="NHD")
        assert caught.value.argument == "v_cache"


def test_slot_checks_on_request() -> None:
    """check_indices=True takes -1 and refuses other slots outside the cache, before anything is written."""
    key = normal(9, (2, 2, 64))
    for slot in (48, -2, INT32_MAX):
        k_cache, v_cache = empty_caches("NHD", np.float32)
        with pytest.raises(InputError, match=str(slot)) as caught:
            reshape_and_cache(key, key, k_cache, v_cache, np.array([0, slot]), kv_layout="NHD", check_indices=True)
        assert caught.value.argument == "slot_mapping"
        assert (k_cache == 7).all()
    reshape_and_cache(key, key, k_cache, v_cache, np.array([-1, 47]), kv_layout="NHD", check_indices=True)


# copy_blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", [*FLOATS, np.uint8, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_copied(layout: str, dtype: Any, index_dtype: Any) -> None:
    """Destinations equal their sources bit for bit, NaN payloads included; other blocks and bad pairs do nothing."""
    caches = empty_caches(layout, dtype)
    for number, cache in enumerate(caches):
        noise = np.random.default_rng(number).integers(0, 256, cache.nbytes, dtype=np.uint8)
        cache.view(np.uint8)[...] = noise.reshape(cache.view(np.uint8).shape)
    before = [cache.copy().view(np.uint8) for cache in caches]
    pairs = [(0, 3), (0, 4), (2, 5), (6, 1), (-1, 1), (0, 6), (INT32_MIN, 1), (0, INT32_MAX)]
    given_back = copy_blocks(*caches, np.array(pairs, index_dtype))
    assert given_back[0] is caches[0]
    for cache, old in zip(caches, before, strict=True):
        for block, source in enumerate((0, 1, 2, 0, 0, 2)):
            np.testing.assert_array_equal(cache.view(np.uint8)[block], old[source])


def test_copy_checks_on_request() -> None:
    """check_indices=True refuses blocks out of range, repeated destinations and chains."""
    for pairs in ([(0, 6)], [(-1, 0)], [(0, 2), (1, 2)], [(0, 1), (1, 2)]):
        caches = empty_caches("NHD", np.float32)
        with pytest.raises(InputError) as caught:
            copy_blocks(*caches, np.array(pairs), check_indices=True)
        assert caught.value.argument == "mapping"
    copy_blocks(*caches, np.array([(0, 1), (0, 2)]), check_indices=True)
    copy_blocks(*caches, np.zeros((0, 2), np.int64), check_indices=True)


# rel_shift -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (5, 5), (4, 11), (7, 3), (0, 4), (3, 0), (2, 4, 6), (2, 3, 5, 8)])
def test_rel_shift_is_its_definition(shape: tuple[int, ...], dtype: Any) -> None:
    """A loop over (i, j): the column k_len - 1 - distance, zero for keys after the query."""
    x = normal(10, shape, dtype)
    q_len, k_len = shape[-2:]
    expected = np.zeros_like(x)
    for i in range(q_len):
        for j in range(k_len):
            distance = i + (k_len - q_len) - j
            if distance >= 0:
                expected[..., i, j] = x[..., i, k_len - 1 - distance]
    np.testing.assert_array_equal(rel_shift(x), expected)
    strided = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, -1, 0)), 0, -1)
    np.testing.assert_array_equal(rel_shift(strided), expected)


def test_rel_shift_is_the_papers_reshape_where_keys_are_seen() -> None:
    """Pad a column, reshape, drop a row: the trick gives the same numbers at and before each query's own key."""
    q_len, k_len = 5, 12
    x = normal(11, (q_len, k_len))
    padded = torch.nn.functional.pad(torch.from_numpy(x), (1, 0))
    trick = padded.reshape(k_len + 1, q_len)[1:].reshape(q_len, k_len).numpy()
    seen = np.arange(k_len)[None, :] <= np.arange(q_len)[:, None] + (k_len - q_len)
    shifted = rel_shift(x)
    np.testing.assert_array_equal(shifted[seen], trick[seen])
    assert (shifted[~seen] == 0).all()
    assert not np.array_equal(shifted, trick)


def test_rel_shift_writes_out() -> None:
    """out= is written, strides and all, and returned; a NaN in a column that shifts away reaches nothing."""
    x = normal(12, (3, 4, 6))
    x[:, 0, :3] = np.nan
    wide = np.zeros((3, 4, 12), np.float32)
    out = wide[:, :, ::2]
    assert rel_shift(x, out=out) is out
    assert np.isfinite(wide).all()
    np.testing.assert_array_equal(out, rel_shift(x))


# matrix_bd -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("extend", ["zero", "clamp"])
@pytest.mark.parametrize(("extent", "max_context"), [(1, 40), (13, 40), (40, 40), (90, 40), (13, 0)])
def test_matrix_bd_is_its_definition(extent: int, max_context: int, extend: Any, dtype: Any) -> None:
    """(q + v) . p[n - 1 - j], extended and held; columns past a length are zero even when unused rows are NaN."""
    lens = np.array([0, 1, 17, 40, 99, INT32_MIN], np.int32)
    query, v = normal(13, (6, 3, 32), dtype), normal(14, (3, 32))
    table = normal(15, (extent, 3, 32), dtype)
    table[max_context:] = np.nan
    result = matrix_bd(query, table, v, context_lens=lens, max_context=max_context, rel_extend=extend)
    assert result.dtype == np.float32
    moved, rows = query.astype(np.float64) + v, table.astype(np.float64)
    expected = np.zeros((6, 3, max_context))
    largest = 0.0
    for s, length in enumerate(lens):
        n = min(max(int(length), 0), max_context)
        for j in range(n):
            distance = n - 1 - j
            if distance >= extent and extend == "zero":
                continue
            for h in range(3):
                terms = moved[s, h] * rows[min(distance, extent - 1), h]
                expected[s, h, j] = math.fsum(terms)
                largest = max(largest, float(np.abs(terms).sum()))
    np.testing.assert_allclose(result, expected, rtol=2.0**-24, atol=40 * 2.0**-52 * largest + 1e-300)


def test_matrix_bd_in_the_query_dtype_and_same_precision() -> None:
    """out_dtype rounds the float64 result once; the same-precision mode rounds q + v to 16 bits and nothing else."""
    query, v, table = normal(16, (2, 3, 32), BF16), normal(17, (3, 32)), normal(18, (20, 3, 32), BF16)
    lens = np.array([20, 7], np.int32)
    exact = relative.dense_bias(query, table, v, lens, max_context=20)
    out = np.zeros((2, 3, 20), BF16)
    given_back = matrix_bd(query, table, v, context_lens=lens, max_context=20, out_dtype="bfloat16", out=out)
    assert given_back is out
    np.testing.assert_array_equal(out, exact.astype(BF16))
    same = relative.dense_bias(query, table, v, lens, max_context=20, precision="same")
    rounded = (query.astype(np.float32) + v).astype(BF16).astype(np.float64)
    expected = np.einsum("shd,ehd->she", rounded, table.astype(np.float64))[0, :, ::-1]
    np.testing.assert_allclose(same[0], expected, rtol=0, atol=40 * 2.0**-24 * 32 * 16)
    assert np.abs(same[0] - exact[0]).max() > 40 * 2.0**-24 * 32


def test_decode_step_is_the_last_row_of_transformer_xl() -> None:
    """The four terms of the paper's score over a whole segment, shifted, give the output of each decode step.

    A = Ex_i Wq . Ex_j WkE + Ex_i Wq . R_{i-j} WkR + u . Ex_j WkE + v . R_{i-j} WkR, softmax(A / sqrt(d)) over j <= i.
    """
    q_len, k_len, heads, size, width = 4, 21, 2, 32, 48
    rng = np.random.default_rng(19)
    embedded = rng.standard_normal((k_len, width))
    w_q, w_ke, w_kr, w_v = (rng.standard_normal((width, heads, size)) / math.sqrt(width) for _ in range(4))
    u, v = rng.standard_normal((2, heads, size))
    frequencies = 1 / 10000 ** (np.arange(0, width, 2) / width)
    angles = np.arange(k_len)[:, None] * frequencies
    encodings = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    def project(rows: Any, weights: Any) -> Any:
        return np.einsum("nw,whd->nhd", rows, weights)

    # Everything below starts from fp32 values, so that both sides see the same numbers.
    q = project(embedded[-q_len:], w_q).astype(np.float32)
    k, value, p = (
        project(rows, weights).astype(np.float32)
        for rows, weights in ((embedded, w_ke), (embedded, w_v), (encodings, w_kr))
    )
    u, v = u.astype(np.float32), v.astype(np.float32)
    content = np.einsum("ihd,jhd->hij", q.astype(np.float64) + u, k.astype(np.float64))
    reversed_scores = np.einsum("ihd,chd->hic", q.astype(np.float64) + v, p[::-1].astype(np.float64))
    position = rel_shift(reversed_scores.astype(np.float32)).astype(np.float64)
    scores = (content + position) / math.sqrt(size)
    scores[:, np.arange(k_len)[None, :] > np.arange(q_len)[:, None] + k_len - q_len] = -np.inf
    whole = torch.einsum(
        "hij,jhd->ihd", torch.softmax(torch.from_numpy(scores), dim=2), torch.from_numpy(value).double()
    )

    blocks = -(-k_len // 8)
    caches = empty_caches("HND", np.float32, blocks=blocks, heads=heads, head_size=size)
    reshape_and_cache(k, value, *caches, np.arange(k_len), kv_layout="HND")
    for i in range(q_len):
        n = np.array([k_len - q_len + 1 + i], np.int32)
        out = xl_paged_attention(
            q[i : i + 1],
            *caches,
            np.arange(blocks, dtype=np.int32)[None],
            n,
            kv_layout="HND",
            pos_bias_u=u,
            pos_bias_v=v,
            pos_emb=p,
        )
        # The shifted scores were rounded to fp32: below 64, so by 64 * 2**-24 at most, through softmax twice that.
        np.testing.assert_allclose(out[0], whole[i].numpy(), rtol=0, atol=4 * 64 * 2.0**-24)


# Bad input -----------------------------------------------------------------------------------------------------


def readonly(array: Any) -> Any:
    array.flags.writeable = False
    return array


def f32(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


def arguments(operator: str) -> dict[str, Any]:
    """A good call of a related function."""
    k_cache, v_cache = empty_caches("NHD", np.float32)
    return {
        "reshape_and_cache": {
            "key": f32(3, 2, 64),
            "value": f32(3, 2, 64),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "slot_mapping": np.arange(3),
            "kv_layout": "NHD",
        },
        "copy_blocks": {"k_cache": k_cache, "v_cache": v_cache, "mapping": np.array([[0, 1]])},
        "rel_shift": {"x": f32(2, 3, 4)},
        "matrix_bd": {
            "query": f32(2, 3, 32),
            "pos_emb": f32(9, 3, 32),
            "context_lens": np.array([1, 2], np.int32),
            "max_context": 12,
        },
    }[operator]


OPERATORS: dict[str, Operator[..., Any]] = {
    "reshape_and_cache": reshape_and_cache,
    "copy_blocks": copy_blocks,
    "rel_shift": rel_shift,
    "matrix_bd": matrix_bd,
}
SHARED = f32(6, 8, 2, 64)
BAD: list[tuple[str, str, dict[str, Any]]] = [
    ("reshape_and_cache", "key", {"key": f32(3, 128)}),
    ("reshape_and_cache", "key", {"key": f32(3, 2, 60)}),
    ("reshape_and_cache", "key", {"key": np.zeros((3, 2, 64))}),
    ("reshape_and_cache", "key", {"key": f32(3, 2, 128)[:, :, ::2]}),
    ("reshape_and_cache", "value", {"value": f32(2, 2, 64)}),
    ("reshape_and_cache", "value", {"value": np.zeros((3, 2, 64), np.float16)}),
    ("reshape_and_cache", "k_cache", {"k_cache": f32(6, 8, 3, 64)}),
    ("reshape_and_cache", "k_cache", {"k_cache": readonly(f32(6, 8, 2, 64))}),
    ("reshape_and_cache", "k_cache", {"k_cache": np.broadcast_to(f32(8, 2, 64), (6, 8, 2, 64))}),
    ("reshape_and_cache", "k_cache", {"k_cache": np.zeros((6, 8, 2, 64), np.float16)}),
    ("reshape_and_cache", "k_cache", {"k_cache": SHARED, "key": SHARED[0, :3]}),
    ("reshape_and_cache", "v_cache", {"v_cache": readonly(f32(6, 8, 2, 64))}),
    ("reshape_and_cache", "v_cache", {"k_cache": SHARED, "v_cache": SHARED}),
    ("reshape_and_cache", "slot_mapping", {"slot_mapping": np.arange(4)}),
    ("reshape_and_cache", "slot_mapping", {"slot_mapping": np.arange(3.0)}),
    ("reshape_and_cache", "kv_layout", {"kv_layout": "vLLM"}),
    ("reshape_and_cache", "kv_dtype", {"kv_dtype": "float8_e5m2"}),
    ("reshape_and_cache", "k_scale", {"k_scale": 2.0}),
    ("reshape_and_cache", "k_scale", {"k_scale": 0.0}),
    ("reshape_and_cache", "v_scale", {"v_scale": math.inf}),
    ("reshape_and_cache", "check_indices", {"check_indices": 1}),
    ("copy_blocks", "k_cache", {"k_cache": f32(6, 4)}),
    ("copy_blocks", "k_cache", {"k_cache": np.zeros((6, 8, 2, 64), np.int8)}),
    ("copy_blocks", "k_cache", {"k_cache": readonly(f32(6, 8, 2, 64))}),
    ("copy_blocks", "v_cache", {"v_cache": f32(5, 8, 2, 64)}),
    ("copy_blocks", "v_cache", {"v_cache": np.zeros((6, 8, 2, 64), np.float16)}),
    ("copy_blocks", "v_cache", {"k_cache": SHARED, "v_cache": SHARED}),
    ("copy_blocks", "mapping", {"mapping": np.zeros((3, 3), np.int64)}),
    ("copy_blocks", "mapping", {"mapping": np.zeros((3, 2))}),
    ("copy_blocks", "mapping", {"mapping": {0: [1]}}),
    ("rel_shift", "x", {"x": f32(4)}),
    ("rel_shift", "x", {"x": f32(1, 1, 1, 4, 4)}),
    ("rel_shift", "x", {"x": np.zeros((4, 4))}),
    ("rel_shift", "out", {"out": f32(2, 3, 5)}),
    ("rel_shift", "out", {"out": np.zeros((2, 3, 4), np.float16)}),
    ("rel_shift", "out", {"x": SHARED[0], "out": SHARED[0]}),
    ("matrix_bd", "query", {"query": f32(2, 3, 33)}),
    ("matrix_bd", "pos_emb", {"pos_emb": f32(0, 3, 32)}),
    ("matrix_bd", "pos_emb", {"pos_emb": f32(9, 1, 32)}),
    ("matrix_bd", "pos_bias_v", {"pos_bias_v": f32(2, 3, 32)}),
    ("matrix_bd", "context_lens", {"context_lens": np.zeros(2, np.int64)}),
    ("matrix_bd", "max_context", {"max_context": -1}),
    ("matrix_bd", "max_context", {"max_context": 2.5}),
    ("matrix_bd", "max_context", {"max_context": 2**31 - 63}),
    ("matrix_bd", "rel_extend", {"rel_extend": None}),
    ("matrix_bd", "out_dtype", {"out_dtype": "float16"}),
    ("matrix_bd", "out", {"out": f32(2, 3, 11)}),
    ("matrix_bd", "out", {"out": np.zeros((2, 3, 12), np.float16)}),
]


@pytest.mark.parametrize("number", range(len(BAD)), ids=lambda n: f"{n}-{BAD[n][0]}-{BAD[n][1]}")
def test_bad_input_names_its_argument(number: int) -> None:
    """Each wrong argument is an InputError that names it and its operator; the caches stay as they were."""
    operator, argument, changes = BAD[number]
    a = {**arguments(operator), **changes}
    before = {name: value.copy() for name, value in a.items() if isinstance(value, np.ndarray)}
    with pytest.raises(InputError) as caught:
        OPERATORS[operator](**a)
    assert caught.value.argument == argument
    assert caught.value.operator == operator
    for name, old in before.items():
        np.testing.assert_array_equal(a[name], old)


def as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_rows_past_what_kernels_count_are_refused() -> None:
    """In 32 bits they would come out negative. Neither array takes memory."""
    query, lens = np.broadcast_to(f32(1, 1, 32), (2**30, 2, 32)), np.broadcast_to(np.int32(1), (2**30,))
    with pytest.raises(InputError, match=f"up to {2**31 - 64}") as caught:
        matrix_bd(query, f32(9, 2, 32), context_lens=lens, max_context=0)
    assert (caught.value.argument, caught.value.operator) == ("query", "matrix_bd")


def test_related_functions_are_operators_of_the_package() -> None:
    """Each is an attribute of the package; its prepared form gives the call's result, in the same arrays each time."""
    for name, operator in OPERATORS.items():
        assert getattr(cupymla, name) is operator
        call, expected = operator.prepare(**arguments(name)), operator(**arguments(name))
        first, second = call(), call()
        for one, other, wanted in zip(*map(as_tuple, (first, second, expected)), strict=True):
            assert one is other
            np.testing.assert_array_equal(one, wanted)


ANYTHING = st.one_of(
    st.builds(
        np.zeros,
        st.lists(st.sampled_from([0, 1, 2, 3, 8, 64]), max_size=5).map(tuple),
        st.sampled_from(["float32", "bfloat16", "float64", "int32", "int64", "uint8", "bool"]),
    ),
    *(st.none(), st.integers(), st.floats(), st.text(max_size=3)),
)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(OPERATORS)))
def test_fuzzed_calls_raise_only_our_errors(data: st.DataObject, name: str) -> None:
    """One or two arguments replaced by anything: a result, or a CupymlaError."""
    a = arguments(name)
    for argument in data.draw(st.lists(st.sampled_from(sorted(a)), min_size=1, max_size=2, unique=True)):
        a[argument] = data.draw(ANYTHING)
    # A column count of billions is meaningful and would be allocated.
    if isinstance(a.get("max_context"), int):
        a["max_context"] = min(a["max_context"], 100)
    try:
        OPERATORS[name](**a)
    except CupymlaError as error:
        assert str(error)
