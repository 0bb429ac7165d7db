"""The paged KV cache: its three layouts, how validation reads them, and one logical view of all of them.

| kv_layout | k_cache | v_cache |
| --- | --- | --- |
| "vllm" | [num_blocks, num_kv_heads, head_size/x, block_size, x] | [num_blocks, num_kv_heads, head_size, block_size] |
| "NHD" | [num_blocks, block_size, num_kv_heads, head_size] | the same |
| "HND" | [num_blocks, num_kv_heads, block_size, head_size] | the same |

x is the number of elements in 16 bytes. The first layout is the one of PagedAttention (Kwon et al. 2023,
arXiv:2309.06180, as vLLM's cache kernels define it); the other two are FlashInfer's.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...errors import kind
from ...tensor import View
from ..arguments import Choice, Number
from .checks import FP8, ITEMSIZE, Reader

LAYOUTS = ("vllm", "NHD", "HND")
HEAD_SIZES = (32, 64, 80, 96, 112, 120, 128, 192, 256)
MAX_BLOCK_SIZE = 256

FP8_DTYPES: dict[str, Any] = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}

Array = npt.NDArray[Any]


def elements_of_x(kv_dtype: str) -> int:
    """How many cache elements 16 bytes hold."""
    return 16 // ITEMSIZE[kv_dtype]


def read_kv_dtype(reader: Reader, cache: View, kv_dtype: object) -> str:
    """What the cache's elements are: its own dtype, or the label given for uint8."""
    if cache.dtype == "uint8":
        label: str = reader.option(Choice(FP8), "kv_dtype", kv_dtype)
        return label
    if kv_dtype is not None:
        reader.option(Choice((cache.dtype,)), "kv_dtype", kv_dtype)
    return cache.dtype


def read_caches(
    reader: Reader, k_cache: Any, v_cache: Any, dtype: str, kv_layout: str, kv_dtype: object, *, output: bool = False
) -> tuple[View, View, str]:
    """Both caches and their element label. `reader` knows head_size; num_blocks, num_kv_heads, block_size come out."""
    keys = reader.look(k_cache, "k_cache", (dtype, *FP8, "uint8"), output=output)
    label = read_kv_dtype(reader, keys, kv_dtype)
    values = reader.look(v_cache, "v_cache", (keys.dtype,), output=output)
    if kv_layout == "vllm":
        _read_vllm(reader, keys, values, label)
    else:
        _read_rows(reader, keys, values, label, kv_layout)
    if not 1 <= reader.sizes["block_size"] <= MAX_BLOCK_SIZE:
        reader.reject("k_cache", f"block_size from 1 to {MAX_BLOCK_SIZE}", reader.sizes["block_size"])
    if reader.sizes["num_kv_heads"] < 1:
        reader.reject("k_cache", "at least one KV head", reader.sizes["num_kv_heads"])
    return keys, values, label


def _read_vllm(reader: Reader, keys: View, values: View, label: str) -> None:
    x, head_size = elements_of_x(label), reader.sizes["head_size"]
    if head_size % x:
        reader.reject("kv_layout", f"'NHD' or 'HND' for head_size {head_size} in {label}", "'vllm'")
    why = " for kv_layout='vllm'"
    reader.sizes.update({"x": x, "head_size/x": head_size // x})
    reader.check_shape(keys, "k_cache", "num_blocks num_kv_heads head_size/x block_size x", why)
    reader.check_shape(values, "v_cache", "num_blocks num_kv_heads head_size block_size", why)
    reader.check_dense(keys, "k_cache", axes=3, alignment=16)
    reader.check_dense(values, "v_cache", axes=2, alignment=16)


def _read_rows(reader: Reader, keys: View, values: View, label: str, kv_layout: str) -> None:
    inner = "block_size num_kv_heads" if kv_layout == "NHD" else "num_kv_heads block_size"
    # Rows of 120 one-byte elements are the only ones that dense packing aligns to 8 bytes and no more.
    alignment = 16 if reader.sizes["head_size"] * ITEMSIZE[label] % 16 == 0 else 8
    for argument, cache in (("k_cache", keys), ("v_cache", values)):
        reader.check_shape(cache, argument, f"num_blocks {inner} head_size", f" for kv_layout='{kv_layout}'")
        reader.check_rows(cache, argument, alignment)


def read_scale(reader: Reader, value: Any, argument: str, kv_dtype: str) -> float | View:
    """The factor that turns cache elements into keys or values: a number, or fp32 [], [1] or [num_kv_heads]."""
    scale: float | View
    if isinstance(value, numbers.Real):
        scale = reader.option(Number(), argument, value)
        plain = scale == 1.0
    else:
        if value is None or isinstance(value, (str, list, tuple)):
            reader.reject(argument, "a number or a float32 array", kind(value))
        scale = reader.look(value, argument, ("float32",))
        if scale.shape not in ((), (1,)):
            reader.check_shape(scale, argument, "num_kv_heads")
        plain = False
    if kv_dtype not in FP8 and not plain:
        reader.reject(argument, f"1.0 for a cache of {kv_dtype}; scales belong to fp8 caches", "another scale")
    return scale


def head_stride(scale: float | View) -> int:
    """The step from head to head of a scale, in elements; 0 where one number serves all heads."""
    return scale.strides[0] if isinstance(scale, View) and scale.shape not in ((), (1,)) else 0


def cache_strides(k: Sequence[int], v: Sequence[int], kv_layout: str) -> dict[str, int]:
    """Strides of both caches by what they lead to, in the unit they come in; channels within a chunk are neighbours.

    The keys are `k_block`, `k_head`, `k_token`, `k_chunk`, `v_block`, `v_head`, `v_token` and `v_channel`.
    """
    if kv_layout == "vllm":
        found = {"k_head": k[1], "k_chunk": k[2], "k_token": k[3], "v_head": v[1], "v_channel": v[2], "v_token": v[3]}
    else:
        head, token = (2, 1) if kv_layout == "NHD" else (1, 2)
        found = {"k_head": k[head], "k_token": k[token], "k_chunk": 0}
        found |= {"v_head": v[head], "v_token": v[token], "v_channel": v[3]}
    return {"k_block": k[0], "v_block": v[0], **found}


def typed(cache: Array, kv_dtype: str | None) -> Array:
    """The cache as an array of its element dtype; uint8 is seen as the fp8 dtype that `kv_dtype` names."""
    if cache.dtype == np.uint8:
        assert kv_dtype is not None
        return cache.view(FP8_DTYPES[kv_dtype])
    return cache


def tokens(cache: Any, kv_layout: str) -> Any:
    """The cache by token: [num_blocks, block_size, num_kv_heads, ...], a view; works for NumPy and CuPy arrays.

    The trailing axes are [head_size], or [head_size/x, x] for a "vllm" k_cache.
    """
    if kv_layout == "NHD":
        return cache
    if kv_layout == "HND":
        return cache.transpose(0, 2, 1, 3)
    return cache.transpose(0, 3, 1, 2, 4) if cache.ndim == 5 else cache.transpose(0, 3, 1, 2)


def key_counts(context_lens: Array, max_blocks: int, block_size: int, columns: int | None) -> Array:
    """How many keys each sequence has: its length, held to what the table and a dense bias can name. int64 [n]."""
    capacity = max_blocks * block_size
    if columns is not None:
        capacity = min(capacity, columns)
    counts: Array = np.clip(context_lens.astype(np.int64), 0, capacity)
    return counts
