"""Companions of xl_paged_attention without a GPU: their kernels on the host machine give the CPU's bits.

Numbers are small integers where sums are formed, so that every order of adding gives the same. Compiles, needs
no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupymla.ops.xl_paged_attention import copy_blocks, matrix_bd, rel_shift, reshape_and_cache
from cupymla.ops.xl_paged_attention.cases import INT32_MAX, INT32_MIN, lay_out
from cupymla.testing.operators import as_tuple
from cupymla_lab.emulated import emulated

pytestmark = pytest.mark.compile

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def normal(rng: Any, shape: tuple[int, ...], dtype: str) -> Any:
    return rng.standard_normal(shape, dtype=np.float32).astype(DTYPES[dtype])


def require_same(function: Any, arguments: dict[str, Any], written: tuple[str, ...] = ()) -> None:
    """The kernel's results, and what it writes in place, have the bits of the CPU's."""
    on_host = {n: v.copy() if n in written else v for n, v in arguments.items()}
    expected = as_tuple(function(**on_host))
    with emulated("sm_90a", 3) as machine:
        results = as_tuple(machine.call(function, **machine.arguments(arguments, written)))
    assert len(results) == len(expected)
    for got, want in zip(results, expected, strict=True):
        assert got.get().tobytes() == want.tobytes()


# dtype, cache dtype, layout, head size, block size
STORED = [
    ("float32", "", "vllm", 32, 3),
    ("float32", "float8_e5m2", "vllm", 64, 16),
    ("float32", "float8_e4m3fn", "HND", 120, 2),
    ("float16", "", "vllm", 120, 1),
    ("float16", "", "NHD", 80, 5),
    ("bfloat16", "", "vllm", 128, 16),
    ("bfloat16", "", "HND", 96, 1),
    ("bfloat16", "float8_e4m3fn", "vllm", 64, 16),
    ("bfloat16", "float8_e5m2", "NHD", 120, 3),
]


@pytest.mark.parametrize(("dtype", "kv_dtype", "layout", "head_size", "block_size"), STORED)
@pytest.mark.parametrize("indices", [np.int32, np.int64])
def test_reshape_and_cache(
    dtype: str, kv_dtype: str, layout: str, head_size: int, block_size: int, indices: Any
) -> None:
    rng = np.random.default_rng(head_size + block_size)
    num_blocks, heads = 4, 3
    shape = (num_blocks, block_size, heads, head_size)
    label = kv_dtype or dtype
    caches = [lay_out(normal(rng, shape, label), layout, label, is_key).copy() for is_key in (True, False)]
    slots = [2, -1, num_blocks * block_size - 1, num_blocks * block_size, 0, -(2**31)]
    if indices is np.int64:
        slots[3] = 2**32 + 1
    wide = normal(rng, (len(slots), 3, heads, head_size), dtype)
    arguments = {
        "key": wide[:, 1], "value": wide[:, 0] * DTYPES[dtype](30), "k_cache": caches[0], "v_cache": caches[1],
        "slot_mapping": np.array(slots, indices), "kv_layout": layout,
    }  # fmt: skip
    if kv_dtype:
        arguments |= {"k_scale": 0.37, "v_scale": 0.5 + np.arange(heads, dtype=np.float32)}
    require_same(reshape_and_cache, arguments, ("k_cache", "v_cache"))


def copied() -> Iterator[Any]:
    """Caches of dense blocks, of blocks with gaps, and of units from one byte to sixteen."""
    rng = np.random.default_rng(3)
    dense = normal(rng, (6, 2, 4, 5, 8), "bfloat16"), normal(rng, (6, 2, 32, 5), "bfloat16")
    yield pytest.param(*dense, id="dense")
    both = normal(rng, (6, 2, 3, 5, 64), "float16")
    yield pytest.param(both[:, 0], both[:, 1], id="interleaved")
    yield pytest.param(both[:, 0, :, :, :40], both[:, 1, :, :3], id="rows")
    odd = rng.integers(0, 256, (6, 3, 7, 11), dtype=np.uint8)
    yield pytest.param(odd[:, :, :, :5], odd[:, :, :, 6:], id="bytes")
    large = rng.integers(0, 256, (6, 5, 40, 64), dtype=np.uint8)
    yield pytest.param(large, large.copy(), id="many")


@pytest.mark.parametrize(("k_cache", "v_cache"), list(copied()))
@pytest.mark.parametrize("indices", [np.int32, np.int64])
def test_copy_blocks(k_cache: Any, v_cache: Any, indices: Any) -> None:
    mapping = np.array([[0, 3], [5, 1], [-1, 2], [0, 6], [4, 2], [2**31 - 1, 0]], indices)
    arguments = {"k_cache": k_cache.copy(), "v_cache": v_cache.copy(), "mapping": mapping}
    require_same(copy_blocks, arguments, ("k_cache", "v_cache"))


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (3, 4, 7), (2, 3, 1, 8), (2, 3, 6, 11)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rel_shift(shape: tuple[int, ...], dtype: str) -> None:
    wide = normal(np.random.default_rng(5), (*shape[:-1], 2 * shape[-1]), dtype)
    require_same(rel_shift, {"x": wide[..., ::2]})


@pytest.mark.parametrize("extent", [1, 9, 70])
@pytest.mark.parametrize("rel_extend", ["zero", "clamp"])
@pytest.mark.parametrize(
    ("dtype", "offset", "out_dtype", "head_size"),
    [
        ("float32", "float32", "float32", 32),
        ("bfloat16", "bfloat16", "float32", 80),
        ("bfloat16", "float32", "bfloat16", 64),
        ("float16", "", "float16", 120),
    ],
)
def test_matrix_bd(extent: int, rel_extend: str, dtype: str, offset: str, out_dtype: str, head_size: int) -> None:
    rng = np.random.default_rng(extent + head_size)

    def integers(*shape: int, label: str = dtype) -> Any:
        return rng.integers(-1, 2, shape).astype(DTYPES[label])

    lens = np.array([37, 0, INT32_MIN, 5, INT32_MAX], np.int32)
    arguments = {
        "query": integers(len(lens), 3, head_size), "pos_emb": integers(extent, 3, head_size), "context_lens": lens,
        "pos_bias_v": integers(3, head_size, label=offset) if offset else None, "max_context": 41,
        "rel_extend": rel_extend, "out_dtype": out_dtype,
    }  # fmt: skip
    require_same(matrix_bd, arguments)
