"""xl_paged_attention and its related functions on a GPU beyond the cases: prepared calls, graphs, frameworks, large
sizes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupymla
from cupymla import driver
from cupymla.ops.xl_paged_attention import cache, relative
from cupymla.ops.xl_paged_attention.cases import inputs, make
from cupymla.ops.xl_paged_attention.paging import FP8_DTYPES
from cupymla.ops.xl_paged_attention.reference import xl_paged_attention as reference
from cupymla.testing import compare, operators
from cupymla_lab.problems.xl_paged_attention import CASES

pytestmark = pytest.mark.gpu

GQA: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "context_lens": (70, 0, 1, 333)}
BF16 = ml_dtypes.bfloat16


@pytest.fixture(autouse=True)
def recent() -> None:
    if driver.compute_capability(0) < (8, 0):
        pytest.skip("the kernel is for sm_80 and later")


def problem(cp: Any, seed: int = 0, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments on the host and on the GPU."""
    host = inputs(make("options", **{**GQA, **changes}), seed)
    return host, operators.arguments_on(cp, host)


def require_right(host: dict[str, Any], results: tuple[Any, ...]) -> None:
    rows = zip(("out", "lse"), results, reference(**host, precision="same"), reference(**host), strict=True)
    compare.require([compare.compare(name, got.get(), same, exact) for name, got, same, exact in rows])


def require_close(name: str, got: Any, same: Any, exact: Any) -> None:
    compare.require([compare.compare(name, got.get(), same, exact)])


# The operator ----------------------------------------------------------------------------------------------------


def test_prepared_call_follows_its_inputs(cp: Any) -> None:
    """A prepared call reads arrays, lengths and tables anew each time, and writes the same outputs."""
    host, arguments = problem(cp, bias="dense")
    plan = cupymla.xl_paged_attention.prepare(**arguments)
    first = plan()
    require_right(host, first)
    other = {**host, "context_lens": np.array([3, 70, 0, 100], np.int32), "query": -host["query"]}
    other["matrix_bd"] = np.nan_to_num(host["matrix_bd"].astype(np.float32)).astype(BF16)
    tables = host["block_tables"]
    usable = (tables >= 0) & (tables < host["k_cache"].shape[0])
    other["block_tables"] = np.where(usable, tables, 0).astype(np.int32)
    other["k_cache"] = np.nan_to_num(host["k_cache"].astype(np.float32)).astype(BF16)
    other["v_cache"] = np.nan_to_num(host["v_cache"].astype(np.float32)).astype(BF16)
    for name in ("context_lens", "query", "matrix_bd", "block_tables", "k_cache", "v_cache"):
        arguments[name][...] = cp.asarray(other[name])
    second = plan()
    assert all(a is b for a, b in zip(first, second, strict=True))
    require_right(other, second)


def test_graph_replays_a_prepared_call(cp: Any) -> None:
    """Counters of arrived CTAs are zero again after each launch, so a graph can be replayed."""
    host, arguments = problem(cp, context_lens=(3000,), bias="alibi")
    plan = cupymla.xl_paged_attention.prepare(**arguments)
    stream = cp.cuda.Stream(non_blocking=True)
    results = plan(stream=stream)
    with stream:
        stream.begin_capture()
        plan(stream=stream)
        graph = stream.end_capture()
    for _ in range(5):
        for result in results:
            result.fill(np.nan)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        require_right(host, results)


def test_calls_on_several_streams_do_not_share_a_workspace(cp: Any) -> None:
    """What CTAs leave for each other belongs to one launch: two at the same time must not meet in it."""
    host, arguments = problem(cp, context_lens=(5000,))
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(4)]
    cupymla.xl_paged_attention(**arguments)
    cp.cuda.Device().synchronize()
    results = [cupymla.xl_paged_attention(**arguments, stream=stream) for _ in range(8) for stream in streams]
    cp.cuda.Device().synchronize()
    for result in results:
        require_right(host, result)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_other_frameworks_get_their_own_arrays(cp: Any, framework: str) -> None:
    module = pytest.importorskip(framework)
    host, arguments = problem(cp, bias="relative", extent=24)
    if framework == "torch":
        if not module.cuda.is_available():
            pytest.skip("this torch sees no GPU")
        theirs = {
            name: module.from_dlpack(value) if isinstance(value, cp.ndarray) else value
            for name, value in arguments.items()
        }
        got = cupymla.xl_paged_attention(**theirs)
        module.cuda.synchronize()
        got = tuple(cp.from_dlpack(array) for array in got)
    else:
        if module.default_backend() != "gpu":
            pytest.skip("this JAX sees no GPU")
        theirs = {
            name: module.numpy.asarray(host[name]) if isinstance(value, cp.ndarray) else value
            for name, value in arguments.items()
        }
        got = tuple(cp.asarray(np.asarray(array)) for array in cupymla.xl_paged_attention(**theirs))
    require_right(host, got)


def test_check_indices_reads_the_device(cp: Any) -> None:
    _, arguments = problem(cp)
    cupymla.xl_paged_attention(**arguments, check_indices=True)
    arguments["context_lens"][0] = 100_000
    with pytest.raises(cupymla.InputError, match="context_lens"):
        cupymla.xl_paged_attention(**arguments, check_indices=True)


def test_more_than_2_to_the_31_elements_of_cache(cp: Any) -> None:
    """Blocks at both ends of a cache past 2**31 elements, in each layout: offsets are 64-bit."""
    heads, size, block = 2, 128, 16
    num_blocks = 2**31 // (heads * size * block) + 64
    if cp.cuda.Device().mem_info[0] < 5 * num_blocks * heads * size * block:
        pytest.skip("needs 10 GB of GPU memory")
    for layout in ("vllm", "NHD", "HND"):
        shape = {
            "vllm": (num_blocks, heads, size // 8, block, 8),
            "NHD": (num_blocks, block, heads, size),
            "HND": (num_blocks, heads, block, size),
        }[layout]
        v_shape = (num_blocks, heads, size, block) if layout == "vllm" else shape
        k_cache, v_cache = cp.full(shape, np.nan, np.float16), cp.full(v_shape, np.nan, np.float16)
        used = [num_blocks - 1, 0, num_blocks - 2, 1]
        rng = np.random.default_rng(0)
        k_small = rng.standard_normal((4, *shape[1:])).astype(np.float16)
        v_small = rng.standard_normal((4, *v_shape[1:])).astype(np.float16)
        k_cache[cp.asarray(used)], v_cache[cp.asarray(used)] = cp.asarray(k_small), cp.asarray(v_small)
        query = rng.standard_normal((1, 4, size)).astype(np.float16)
        lens = np.array([64], np.int32)
        got = cupymla.xl_paged_attention(
            cp.asarray(query), k_cache, v_cache, cp.asarray(np.array([used], np.int32)), cp.asarray(lens),
            kv_layout=layout, return_lse=True,
        )  # fmt: skip
        small = (query, k_small, v_small, np.arange(4, dtype=np.int32)[None], lens)
        exact = reference(*small, kv_layout=layout, return_lse=True)
        same = reference(*small, kv_layout=layout, return_lse=True, precision="same")
        for name, array, one, other in zip(("out", "lse"), got, same, exact, strict=True):
            require_close(name, array, one, other)
        del k_cache, v_cache
        cp.get_default_memory_pool().free_all_blocks()


def test_a_context_of_a_million_tokens(cp: Any) -> None:
    """Every key is the same, so the result is known: out is the mean of the values, lse is score + log n."""
    count, block = 1_048_583, 16
    blocks = -(-count // block)
    k_cache = cp.ones((64, 1, 8, block, 8), np.float16)
    v_cache = cp.broadcast_to(cp.arange(64, dtype=np.float16)[:, None, None, None] / 64, (64, 1, 64, block))
    tables = (cp.arange(blocks, dtype=np.int32) % 64)[None]
    query = cp.ones((1, 2, 64), np.float16)
    out, lse = cupymla.xl_paged_attention(
        query, k_cache, cp.ascontiguousarray(v_cache), tables, cp.array([count], np.int32), return_lse=True
    )
    held = np.bincount(np.arange(count) // block % 64, minlength=64)
    mean = float(held @ (np.arange(64) / 64)) / count
    # Sums of a million equal fp32 terms, in parts: far below half a unit of fp16 near 1/2.
    np.testing.assert_allclose(out.get().astype(np.float64), mean, rtol=0, atol=2.0**-12 + 2.0**-16)
    np.testing.assert_allclose(lse.get(), 8.0 + np.log(count), rtol=2.0**-21)


def test_tables_far_wider_than_lengths(cp: Any) -> None:
    """The host sees the tables' width alone; the work is shared out by the lengths on the device."""
    host, arguments = problem(cp, context_lens=(5, 0, 700, 33), max_blocks=4096, bias="alibi")
    require_right(host, cupymla.xl_paged_attention(**arguments))


# The related functions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["vllm", "NHD", "HND"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", ""), ("float16", ""), ("bfloat16", ""), ("bfloat16", "float8_e4m3fn"), ("float32", "float8_e5m2")],
)
def test_reshape_and_cache_writes_what_the_reference_writes(cp: Any, layout: str, dtype: str, kv_dtype: str) -> None:
    """Bit for bit: rounding, saturation, NaN, skipped slots, and nothing beside them."""
    rng = np.random.default_rng(1)
    heads, size, block, blocks, tokens = 3, 64, 16, 5, 40
    source = BF16 if dtype == "bfloat16" else np.dtype(dtype)
    stored = FP8_DTYPES[kv_dtype] if kv_dtype else source
    x = 16 // np.dtype(stored).itemsize
    k_shape = {
        "vllm": (blocks, heads, size // x, block, x),
        "NHD": (blocks, block, heads, size),
        "HND": (blocks, heads, block, size),
    }[layout]
    v_shape = (blocks, heads, size, block) if layout == "vllm" else k_shape
    carrier = np.uint8 if kv_dtype else stored
    k_host = (rng.standard_normal(k_shape) * 4).astype(np.float32).astype(stored).view(carrier)
    v_host = (rng.standard_normal(v_shape) * 4).astype(np.float32).astype(stored).view(carrier)
    key = (rng.standard_normal((tokens, heads, size)) * 300).astype(np.float32).astype(source)
    value = rng.standard_normal((tokens, heads, size)).astype(np.float32).astype(source)
    key[0, 0, :3] = (np.inf, -np.inf, 1e-9)
    slots = rng.permutation(blocks * block)[:tokens].astype(np.int64)
    slots[3:7] = (-1, blocks * block, 2**40, -(2**40))
    options: dict[str, Any] = {"kv_layout": layout}
    if kv_dtype:
        options |= {"kv_dtype": kv_dtype, "k_scale": 0.37, "v_scale": 1.7}
    k_gpu, v_gpu = cp.asarray(k_host), cp.asarray(v_host)
    got = cupymla.reshape_and_cache(cp.asarray(key), cp.asarray(value), k_gpu, v_gpu, cp.asarray(slots), **options)
    assert got[0] is k_gpu and got[1] is v_gpu
    cache.write_slots(key, value, k_host, v_host, slots, **options)
    np.testing.assert_array_equal(k_gpu.get().view(np.uint8), k_host.view(np.uint8))
    np.testing.assert_array_equal(v_gpu.get().view(np.uint8), v_host.view(np.uint8))


@pytest.mark.parametrize("shape", [(7, 2, 8, 16, 8), (7, 16, 3, 80), (7, 3, 5)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("strided", [False, True])
def test_copy_blocks_copies_blocks(cp: Any, shape: tuple[int, ...], dtype: str, strided: bool) -> None:
    shape = shape if len(shape) > 3 else (*shape, 3)
    whole = np.arange(2 * np.prod(shape)).astype(dtype).reshape(shape[0], 2, *shape[1:])
    v_whole = whole[:, :, ..., 0, :, :].copy() if len(shape) == 5 else -whole
    k_gpu, v_gpu = cp.asarray(whole), cp.asarray(v_whole)
    mapping = np.array([[0, 3], [6, 1], [2, 99], [-1, 4], [0, 5]], np.int64)
    pick = (slice(None), 1) if strided else (slice(None), slice(None), 0)[:1]
    k_host, v_host = whole[pick], v_whole[pick]
    if not strided:
        k_host, v_host = whole[:, 0].copy(), v_whole[:, 0].copy()
        k_gpu, v_gpu = cp.asarray(k_host), cp.asarray(v_host)
        cupymla.copy_blocks(k_gpu, v_gpu, cp.asarray(mapping))
    else:
        cupymla.copy_blocks(k_gpu[:, 1], v_gpu[:, 1], cp.asarray(mapping))
        k_gpu, v_gpu = k_gpu[:, 1], v_gpu[:, 1]
    cache.copy_rows(k_host, v_host, mapping)
    np.testing.assert_array_equal(k_gpu.get(), k_host)
    np.testing.assert_array_equal(v_gpu.get(), v_host)


@pytest.mark.parametrize("shape", [(5, 9), (2, 7, 7), (2, 3, 4, 130), (1, 1, 1, 1), (3, 0, 4)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rel_shift_moves_rows(cp: Any, shape: tuple[int, ...], dtype: str) -> None:
    x = np.random.default_rng(2).standard_normal(shape).astype(dtype)
    np.testing.assert_array_equal(cupymla.rel_shift(cp.asarray(x)).get(), relative.shift(x))
    turned = cp.asarray(x).swapaxes(-1, -2)
    np.testing.assert_array_equal(cupymla.rel_shift(turned).get(), relative.shift(x.swapaxes(-1, -2)))


@pytest.mark.parametrize("head_size", [32, 80, 120, 256])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("extent", "rel_extend"), [(50, "zero"), (50, "clamp"), (400, "zero")])
def test_matrix_bd_is_the_product_by_distance(
    cp: Any, head_size: int, dtype: str, extent: int, rel_extend: Any
) -> None:
    rng = np.random.default_rng(3)
    kind = BF16 if dtype == "bfloat16" else np.dtype(dtype)
    query = rng.standard_normal((19, 3, head_size)).astype(np.float32).astype(kind)
    table = rng.standard_normal((extent, 3, head_size)).astype(np.float32).astype(kind)
    offset = rng.standard_normal((3, head_size)).astype(np.float32)
    lens = np.array([*range(0, 170, 10), -3, 1000], np.int32)
    got = cupymla.matrix_bd(
        cp.asarray(query), cp.asarray(table), cp.asarray(offset), context_lens=cp.asarray(lens), max_context=170,
        rel_extend=rel_extend,
    )  # fmt: skip
    options: dict[str, Any] = {"max_context": 170, "rel_extend": rel_extend}
    exact = relative.dense_bias(query, table, offset, lens, **options)
    same = relative.dense_bias(query, table, offset, lens, **options, precision="same")
    require_close("matrix_bd", got, same, exact)


def test_forms_of_bias_that_mean_the_same_agree(cp: Any) -> None:
    """Fused, dense by `matrix_bd`, and relative from its row: one result, within the rounding of each."""
    host, arguments = problem(cp, bias="fused", extent=400, offsets=True)
    fused = cupymla.xl_paged_attention(**arguments)
    table = {name: arguments.pop(name) for name in ("pos_emb", "pos_bias_v", "rel_extend")}
    dense = cupymla.matrix_bd(
        arguments["query"], table["pos_emb"], table["pos_bias_v"], context_lens=arguments["context_lens"],
        max_context=400,
    )  # fmt: skip
    through_dense = cupymla.xl_paged_attention(**arguments, matrix_bd=dense)
    require_right(host, fused)
    require_right(host, through_dense)


def test_cases_cover_every_engine() -> None:
    """The cases that evidence rests on reach each way of reading a cache."""
    from cupymla.ops.xl_paged_attention.plan import ENGINES, engine

    assert {engine(case.dtype, case.kv_layout, case.block_size) for case in CASES} == set(ENGINES)
