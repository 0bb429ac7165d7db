"""The cache companions: reshape_and_cache and copy_blocks, their doors, NumPy references and launches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import driver, tensor
from ...errors import InputError
from ...launch import Launcher
from ...tensor import View
from ..gpu import Launches
from ..operator import CpuCall, Prepared
from . import plan
from .checks import FLOATS, FP8, INDICES, Reader
from .launches import CopyParameters, ReshapeParameters, elementwise, in_place
from .paging import (
    FP8_DTYPES,
    HEAD_SIZES,
    LAYOUTS,
    cache_strides,
    elements_of_x,
    head_stride,
    read_caches,
    read_scale,
    tokens,
    typed,
)
from .reference import per_head
from .run import scale_value

Array = npt.NDArray[Any]

# The largest finite value, to which wider numbers saturate (OCP 8-bit floating point specification, 2023).
FP8_MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def write_slots(
    key: Array,
    value: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    *,
    kv_layout: str = "vllm",
    kv_dtype: str | None = None,
    k_scale: float | Array = 1.0,
    v_scale: float | Array = 1.0,
) -> None:
    """Write key and value [num_tokens, num_kv_heads, head_size] into the caches, in place.

    Token t goes to block slot // block_size, offset slot % block_size; slots outside the cache are skipped. For an
    fp8 cache the element is the fp32 quotient by the scale, saturated to the largest finite value and rounded to
    nearest even; NaN stays NaN.
    """
    for source, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        target = tokens(typed(cache, kv_dtype), kv_layout)
        num_blocks, block_size = target.shape[:2]
        slots = slot_mapping.astype(np.int64)
        kept = (slots >= 0) & (slots < num_blocks * block_size)
        slots = slots[kept]
        rows = source[kept]
        if target.dtype in FP8_DTYPES.values():
            rows = _to_fp8(rows, target.dtype, scale)
        target[slots // block_size, slots % block_size] = rows.reshape(-1, *target.shape[2:])


def _to_fp8(rows: Array, dtype: np.dtype[Any], scale: float | Array) -> Array:
    largest = np.float32(FP8_MAX[dtype.name])
    with np.errstate(all="ignore"):
        scaled = rows.astype(np.float32) / per_head(scale, rows.shape[1], np.float32)[:, None]
        return np.clip(scaled, -largest, largest).astype(dtype)


def copy_rows(k_cache: Array, v_cache: Array, mapping: Array) -> None:
    """For each pair (source, destination) in `mapping` [n, 2], copy that block in both caches, in place.

    Sources are read as they were before the call; pairs with a block outside the cache are skipped.
    """
    pairs = mapping[np.all((mapping >= 0) & (mapping < k_cache.shape[0]), axis=1)]
    for cache in (k_cache, v_cache):
        cache[pairs[:, 1]] = cache[pairs[:, 0]]


def read_reshape_and_cache(
    key: Any,
    value: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    *,
    kv_layout: object,
    kv_dtype: object,
    k_scale: Any,
    v_scale: Any,
    check_indices: object,
    stream: object = None,
) -> Prepared[Any]:
    """Check the arguments: a call that binds nothing yet; see the public function."""
    operator = "reshape_and_cache"
    reader = Reader(operator)
    keys = reader.array(key, "key", "num_tokens num_kv_heads head_size", FLOATS)
    if reader.sizes["head_size"] not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        reader.reject("key", f"head_size one of {sizes}", reader.sizes["head_size"])
    reader.check_rows(keys, "key", alignment=16)
    values = reader.array(value, "value", "num_tokens num_kv_heads head_size", (keys.dtype,))
    reader.check_rows(values, "value", alignment=16)
    layout = reader.choice(kv_layout, "kv_layout", LAYOUTS)
    k_blocks, v_blocks, label = read_caches(reader, k_cache, v_cache, keys.dtype, layout, kv_dtype, output=True)
    slots = reader.array(slot_mapping, "slot_mapping", "num_tokens", INDICES)
    scales = {
        "k_scale": _nonzero_scale(reader, read_scale(reader, k_scale, "k_scale", label), "k_scale"),
        "v_scale": _nonzero_scale(reader, read_scale(reader, v_scale, "v_scale", label), "v_scale"),
    }
    checked = reader.flag(check_indices, "check_indices")
    reader.check_outputs_apart()
    num_slots = reader.sizes["num_blocks"] * reader.sizes["block_size"]
    if keys.device.kind == "cuda":
        if checked:
            _check_slots(tensor.fetched(slots, stream), num_slots, operator)
        given = [keys, values, k_blocks, v_blocks, slots, *(s for s in scales.values() if isinstance(s, View))]

        def bind() -> Launches:
            return Launches(_reshape_launcher(keys, values, k_blocks, v_blocks, slots, layout, label, scales))

        return in_place(given, stream, bind, (k_cache, v_cache))
    arrays = [tensor.to_numpy(seen) for seen in (keys, values, k_blocks, v_blocks, slots)]

    def run() -> Any:
        if checked:
            _check_slots(arrays[4], num_slots, operator)
        write_slots(
            arrays[0],
            arrays[1],
            arrays[2],
            arrays[3],
            arrays[4],
            kv_layout=layout,
            kv_dtype=label if label in FP8 else None,
            k_scale=scale_value(scales["k_scale"]),
            v_scale=scale_value(scales["v_scale"]),
        )
        return k_cache, v_cache

    return CpuCall(run)


def _reshape_launcher(
    keys: View,
    values: View,
    k_blocks: View,
    v_blocks: View,
    slots: View,
    layout: str,
    label: str,
    scales: dict[str, float | View],
) -> Launcher | None:
    num_tokens, num_kv_heads, head_size = keys.shape
    strides = cache_strides(k_blocks.strides, v_blocks.strides, layout)
    block_size = v_blocks.shape[{"vllm": 3, "NHD": 1, "HND": 2}[layout]]
    factors: dict[str, Any] = {}
    for name, scale in scales.items():
        by_head = isinstance(scale, View)
        factors[name] = 1.0 if isinstance(scale, View) else scale
        factors[f"{name}s"] = scale.ptr if isinstance(scale, View) else None
        factors[f"{name}s_head"] = head_stride(scale) if by_head else 0
    parameters = ReshapeParameters(
        key=keys.ptr,
        value=values.ptr,
        k_cache=k_blocks.ptr,
        v_cache=v_blocks.ptr,
        slots=slots.ptr,
        key_token=keys.strides[0],
        key_head=keys.strides[1],
        value_token=values.strides[0],
        value_head=values.strides[1],
        **strides,
        slots_token=slots.strides[0],
        num_tokens=num_tokens,
        num_slots=k_blocks.shape[0] * block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        chunk=elements_of_x(label) if layout == "vllm" else head_size,
        slots_wide=int(slots.dtype == "int64"),
        **factors,
    )
    source = plan.companion(
        "reshape_and_cache",
        driver.arch_of(keys.device).name,
        query=plan.QUERY_CODE[keys.dtype],
        cache=plan.CACHE_CODE.get(label, 0),
    )
    vectors = keys.size * keys.itemsize // 16
    return elementwise(source, keys.device, parameters, vectors)


def _nonzero_scale(reader: Reader, scale: float | View, argument: str) -> float | View:
    if isinstance(scale, float) and scale == 0:
        reader.reject(argument, "a scale that can divide", scale)
    return scale


def _check_slots(slots: Array, num_slots: int, operator: str) -> None:
    wrong = np.flatnonzero((slots < -1) | (slots >= num_slots))
    if wrong.size:
        where = int(wrong[0])
        raise InputError("slot_mapping", f"-1 to {num_slots - 1}", f"{slots[where]} at [{where}]", operator)


def read_copy_blocks(
    k_cache: Any, v_cache: Any, mapping: Any, *, check_indices: object, stream: object = None
) -> Prepared[Any]:
    """Check the arguments: a call that binds nothing yet; see the public function."""
    operator = "copy_blocks"
    reader = Reader(operator)
    caches: list[View] = []
    for argument, cache, ranks in (("k_cache", k_cache, (4, 5)), ("v_cache", v_cache, (4,))):
        seen = reader.look(cache, argument, output=True)
        reader.check_dtype(seen, argument, (*FLOATS, *FP8, "uint8") if not caches else (caches[0].dtype,))
        if len(seen.shape) not in ranks:
            reader.reject(argument, f"rank {' or '.join(map(str, ranks))}", f"shape {list(seen.shape)}")
        inner = " ".join(map(str, seen.shape[1:]))
        reader.check_shape(seen, argument, f"num_blocks {inner}")
        reader.check_rows(seen, argument)
        caches.append(seen)
    pairs = reader.array(mapping, "mapping", "num_pairs 2", INDICES)
    checked = reader.flag(check_indices, "check_indices")
    reader.check_outputs_apart()
    if caches[0].device.kind == "cuda":
        if checked:
            _check_pairs(tensor.fetched(pairs, stream), reader.sizes["num_blocks"], operator)

        def bind() -> Launches:
            return Launches(*(_copy_launcher(cache, pairs) for cache in caches))

        return in_place([*caches, pairs], stream, bind, (k_cache, v_cache))
    arrays = [tensor.to_numpy(seen) for seen in (*caches, pairs)]

    def run() -> Any:
        if checked:
            _check_pairs(arrays[2], reader.sizes["num_blocks"], operator)
        copy_rows(*arrays)
        return k_cache, v_cache

    return CpuCall(run)


def _copy_launcher(cache: View, pairs: View) -> Launcher | None:
    """The launch that copies blocks of one cache, in the largest units that its layout allows."""
    item = cache.itemsize
    axes = [(size, step) for size, step in zip(cache.shape[1:], cache.strides_bytes[1:], strict=True) if size != 1]
    run = item
    while axes and axes[-1][1] == run:
        run *= axes.pop()[0]
    steps = [cache.ptr, cache.strides_bytes[0], run, *(step for _, step in axes)]
    unit = next(size for size in (16, 8, 4, 2, 1) if all(step % size == 0 for step in steps))
    axes = [(1, 0)] * (3 - len(axes)) + axes + [(run // unit, unit)]
    elements = math.prod(size for size, _ in axes) * pairs.shape[0]
    parameters = CopyParameters(
        cache=cache.ptr,
        mapping=pairs.ptr,
        block_bytes=cache.strides_bytes[0],
        extent=tuple(size for size, _ in axes),
        stride_bytes=tuple(step for _, step in axes),
        pair_stride=pairs.strides[0],
        side_stride=pairs.strides[1],
        num_pairs=pairs.shape[0],
        num_blocks=cache.shape[0],
        mapping_wide=int(pairs.dtype == "int64"),
    )
    source = plan.companion("copy_blocks", driver.arch_of(cache.device).name, unit=unit)
    return elementwise(source, cache.device, parameters, elements)


def _check_pairs(pairs: Array, num_blocks: int, operator: str) -> None:
    bad = np.argwhere((pairs < 0) | (pairs >= num_blocks))
    if bad.size:
        row, column = map(int, bad[0])
        raise InputError("mapping", f"0 to {num_blocks - 1}", f"{pairs[row, column]} at [{row}, {column}]", operator)
    destinations = pairs[:, 1]
    if len(np.unique(destinations)) < len(destinations):
        raise InputError("mapping", "each destination once", "a repeated destination", operator)
    if np.isin(destinations, pairs[:, 0]).any():
        raise InputError("mapping", "no block both source and destination", "such a block", operator)
