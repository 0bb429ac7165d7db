"""The cache functions: reshape_and_cache and copy_blocks, their argument validation, NumPy references and launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ... import driver, tensor
from ...errors import InputError
from ...launch import Launcher
from ...tensor import View
from ..arguments import Arguments, Choice, NoOptions, option
from ..calls import Calls
from ..gpu import Launches, Results
from . import plan
from .checks import FLOATS, FP8, INDICES, Reader
from .launches import CopyParameters, ReshapeParameters, elementwise
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


# reshape_and_cache ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ReshapeViews:
    """The arrays of `reshape_and_cache`."""

    key: View
    value: View
    k_cache: View
    v_cache: View
    slot_mapping: View
    k_scale: float | View = 1.0
    v_scale: float | View = 1.0


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The options of `reshape_and_cache`.

    Attributes:
        kv_layout: "vllm", "NHD" or "HND".
        kv_dtype: what a uint8 cache holds.
    """

    kv_layout: Literal["vllm", "NHD", "HND"] = option("vllm", Choice(LAYOUTS))
    kv_dtype: Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"] | None = option(
        None, Choice((None, *FLOATS, *FP8))
    )


@dataclass(frozen=True, slots=True)
class ReshapeProblem:
    """What a call of `reshape_and_cache` is.

    Attributes:
        layout: of the caches.
        label: of their elements.
        num_slots: of the caches.
    """

    layout: str
    label: str
    num_slots: int


RESHAPE = Arguments(
    "reshape_and_cache",
    ReshapeViews,
    CacheOptions,
    results=(),
    updates=("k_cache", "v_cache"),
    numbers=("k_scale", "v_scale"),
)


def read_reshape_and_cache(**given: Any) -> tuple[ReshapeViews, ReshapeProblem]:
    """Check arguments by name. Raises InputError."""
    (key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale), values, _ = RESHAPE.placed(given)
    reader = Reader(RESHAPE.operator)
    options = reader.chosen(RESHAPE, *values)
    keys = reader.array(key, "key", "num_tokens num_kv_heads head_size", FLOATS)
    if reader.sizes["head_size"] not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        reader.reject("key", f"head_size one of {sizes}", reader.sizes["head_size"])
    reader.check_rows(keys, "key", alignment=16)
    seen = reader.array(value, "value", "num_tokens num_kv_heads head_size", (keys.dtype,))
    reader.check_rows(seen, "value", alignment=16)
    k_blocks, v_blocks, label = read_caches(
        reader, k_cache, v_cache, keys.dtype, options.kv_layout, options.kv_dtype, output=True
    )
    slots = reader.array(slot_mapping, "slot_mapping", "num_tokens", INDICES)
    factors = [
        _nonzero_scale(reader, read_scale(reader, scale, name, label), name)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
    ]
    reader.separate()
    num_slots = reader.sizes["num_blocks"] * reader.sizes["block_size"]
    views = ReshapeViews(keys, seen, k_blocks, v_blocks, slots, *factors)
    return views, ReshapeProblem(options.kv_layout, label, num_slots)


def _look_at_slots(views: ReshapeViews, problem: ReshapeProblem, stream: object) -> None:
    _check_slots(tensor.fetched(views.slot_mapping, stream), problem.num_slots, RESHAPE.operator)


def _reshape_on_cpu(views: ReshapeViews, problem: ReshapeProblem) -> Callable[[], Any]:
    key, value, k_cache, v_cache, slots = map(
        tensor.to_numpy, (views.key, views.value, views.k_cache, views.v_cache, views.slot_mapping)
    )

    def run() -> Any:
        write_slots(
            key,
            value,
            k_cache,
            v_cache,
            slots,
            kv_layout=problem.layout,
            kv_dtype=problem.label if problem.label in FP8 else None,
            k_scale=scale_value(views.k_scale),
            v_scale=scale_value(views.v_scale),
        )
        return views.k_cache.owner, views.v_cache.owner

    return run


def _no_results(views: object, problem: object) -> Results:
    return ()


class Reshape(Launches):
    """`reshape_and_cache` on a GPU: a binding; see `cupymla.ops.gpu`."""

    def __init__(self, views: ReshapeViews, problem: ReshapeProblem, results: Sequence[View], recorded: bool) -> None:
        keys = views.key
        num_tokens, num_kv_heads, head_size = keys.shape
        block_size = views.v_cache.shape[{"vllm": 3, "NHD": 1, "HND": 2}[problem.layout]]
        self._record = ReshapeParameters(
            key_token=keys.strides[0],
            key_head=keys.strides[1],
            value_token=views.value.strides[0],
            value_head=views.value.strides[1],
            **cache_strides(views.k_cache.strides, views.v_cache.strides, problem.layout),
            slots_token=views.slot_mapping.strides[0],
            num_tokens=num_tokens,
            num_slots=views.k_cache.shape[0] * block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            block_size=block_size,
            chunk=elements_of_x(problem.label) if problem.layout == "vllm" else head_size,
            slots_wide=int(views.slot_mapping.dtype == "int64"),
            k_scales_head=head_stride(views.k_scale),
            v_scales_head=head_stride(views.v_scale),
        )
        self._scales = []
        for name in RESHAPE.numbers:
            scale: float | View = getattr(views, name)
            setattr(self._record, name, 1.0 if isinstance(scale, View) else scale)
            self._scales += [] if isinstance(scale, View) else [name]
        source = plan.auxiliary(
            "reshape_and_cache",
            driver.arch_of(keys.device).name,
            query=plan.QUERY_CODE[keys.dtype],
            cache=plan.CACHE_CODE.get(problem.label, 0),
        )
        super().__init__(elementwise(source, keys.device, self._record, keys.size * keys.itemsize // 16))

    def scale(self, *numbers: float) -> None:
        """Set those scales that are numbers for all heads."""
        for name, number in zip(self._scales, numbers, strict=True):
            setattr(self._record, name, number)

    def point(self, views: ReshapeViews, results: Sequence[int], workspace: int) -> None:
        """Set every address."""
        record = self._record
        record.key, record.value = views.key.ptr, views.value.ptr
        record.k_cache, record.v_cache = views.k_cache.ptr, views.v_cache.ptr
        record.slots = views.slot_mapping.ptr
        for name in RESHAPE.numbers:
            scale: float | View = getattr(views, name)
            setattr(record, f"{name}s", scale.ptr if isinstance(scale, View) else None)


RESHAPE_AND_CACHE = Calls(RESHAPE, read_reshape_and_cache, _no_results, Reshape, _reshape_on_cpu, look=_look_at_slots)


def _nonzero_scale(reader: Reader, scale: float | View, argument: str) -> float | View:
    if isinstance(scale, float) and scale == 0:
        reader.reject(argument, "a scale that can divide", scale)
    return scale


def _check_slots(slots: Array, num_slots: int, operator: str) -> None:
    wrong = np.flatnonzero((slots < -1) | (slots >= num_slots))
    if wrong.size:
        where = int(wrong[0])
        raise InputError("slot_mapping", f"-1 to {num_slots - 1}", f"{slots[where]} at [{where}]", operator)


# copy_blocks ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class CopyViews:
    """The arrays of `copy_blocks`."""

    k_cache: View
    v_cache: View
    mapping: View


COPY = Arguments("copy_blocks", CopyViews, NoOptions, results=(), updates=("k_cache", "v_cache"))


def read_copy_blocks(**given: Any) -> tuple[CopyViews, None]:
    """Check arguments by name. Raises InputError."""
    (k_cache, v_cache, mapping), _, _ = COPY.placed(given)
    reader = Reader(COPY.operator)
    caches: list[View] = []
    for argument, cache, ranks in (("k_cache", k_cache, (4, 5)), ("v_cache", v_cache, (4,))):
        dtypes = (*FLOATS, *FP8, "uint8") if not caches else (caches[0].dtype,)
        seen = reader.look(cache, argument, dtypes, output=True)
        if len(seen.shape) not in ranks:
            reader.reject(argument, f"rank {' or '.join(map(str, ranks))}", f"shape {list(seen.shape)}")
        inner = " ".join(map(str, seen.shape[1:]))
        reader.check_shape(seen, argument, f"num_blocks {inner}")
        reader.check_rows(seen, argument)
        caches.append(seen)
    pairs = reader.array(mapping, "mapping", "num_pairs 2", INDICES)
    reader.separate()
    k_seen, v_seen = caches
    return CopyViews(k_seen, v_seen, pairs), None


def _look_at_pairs(views: CopyViews, problem: None, stream: object) -> None:
    _check_pairs(tensor.fetched(views.mapping, stream), views.k_cache.shape[0], COPY.operator)


def _copy_on_cpu(views: CopyViews, problem: None) -> Callable[[], Any]:
    arrays = [tensor.to_numpy(seen) for seen in (views.k_cache, views.v_cache, views.mapping)]

    def run() -> Any:
        copy_rows(*arrays)
        return views.k_cache.owner, views.v_cache.owner

    return run


class Copy(Launches):
    """`copy_blocks` on a GPU, a launch for each cache: a binding; see `cupymla.ops.gpu`."""

    def __init__(self, views: CopyViews, problem: None, results: Sequence[View], recorded: bool) -> None:
        self._records: list[CopyParameters] = []
        super().__init__(*(self._laid_out(cache, views.mapping) for cache in (views.k_cache, views.v_cache)))

    def _laid_out(self, cache: View, pairs: View) -> Launcher | None:
        """The launch that copies blocks of one cache, in the largest units that layout and address allow."""
        item = cache.itemsize
        axes = [(size, step) for size, step in zip(cache.shape[1:], cache.strides_bytes[1:], strict=True) if size != 1]
        run = item
        while axes and axes[-1][1] == run:
            run *= axes.pop()[0]
        steps = [cache.ptr, cache.strides_bytes[0], run, *(step for _, step in axes)]
        unit = next(size for size in (16, 8, 4, 2, 1) if all(step % size == 0 for step in steps))
        axes = [(1, 0)] * (3 - len(axes)) + axes + [(run // unit, unit)]
        elements = math.prod(size for size, _ in axes) * pairs.shape[0]
        record = CopyParameters(
            block_bytes=cache.strides_bytes[0],
            extent=tuple(size for size, _ in axes),
            stride_bytes=tuple(step for _, step in axes),
            pair_stride=pairs.strides[0],
            side_stride=pairs.strides[1],
            num_pairs=pairs.shape[0],
            num_blocks=cache.shape[0],
            mapping_wide=int(pairs.dtype == "int64"),
        )
        self._records.append(record)
        source = plan.auxiliary("copy_blocks", driver.arch_of(cache.device).name, unit=unit)
        return elementwise(source, cache.device, record, elements)

    def point(self, views: CopyViews, results: Sequence[int], workspace: int) -> None:
        """Set every address."""
        for record, cache in zip(self._records, (views.k_cache, views.v_cache), strict=True):
            record.cache, record.mapping = cache.ptr, views.mapping.ptr


COPY_BLOCKS = Calls(COPY, read_copy_blocks, _no_results, Copy, _copy_on_cpu, look=_look_at_pairs)


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
