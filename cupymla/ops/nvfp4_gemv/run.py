"""The public calls: from the validation to the NumPy reference on the CPU, or to the kernels on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ... import tensor
from ...arch import Gpu
from ...build import KernelSource
from ...tensor import View
from ..calls import Calls
from ..operator import operator
from . import conversions, cuda, formats, plan, reference, spec, tiles
from .validation import Operand

V = TypeVar("V")

_ONE_BYTE_DTYPES: dict[str, npt.DTypeLike] = {
    "uint8": np.uint8,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
}


def _fresh(shape: tuple[int, ...], dtype: npt.DTypeLike, batch_first: bool | None, *, rows: bool) -> npt.NDArray[Any]:
    """A new array seen as `shape [rows, columns, l]`; the caller will see it in its own axis order.

    In that order it is C-contiguous, except that `rows=True` asks for contiguous columns whatever the order.
    """
    *matrix, batches = shape
    if batch_first or rows:
        return np.moveaxis(np.empty((batches, *matrix), dtype), 0, -1)
    return np.empty(shape, dtype)


def _handed_back(array: npt.NDArray[Any], batch_first: bool | None, like: View) -> Any:
    """An array seen as `[rows, columns, l]`, in the caller's axis order and framework."""
    if batch_first is None:
        array = array[..., 0]
    elif batch_first:
        array = np.moveaxis(array, -1, 0)
    return tensor.from_numpy(array, like=like)


class _Target:
    """An output of a CPU call: the caller's array, or one that the first run makes and later runs write again.

    What JAX was given once must not change, so each run makes a new one there.
    """

    def __init__(
        self,
        given: Operand | None,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        batch_first: bool | None,
        like: View,
        rows: bool = True,
    ) -> None:
        """Set up; the arguments are those of `_fresh` and `_handed_back`."""
        self._fresh = functools.partial(_fresh, shape, dtype, batch_first, rows=rows)
        self._given, self._batch_first, self._like = given, batch_first, like
        self._array = None if given is None else given.array()
        self._result: Any = None

    def array(self) -> npt.NDArray[Any]:
        """Where to write, as `[rows, columns, l]`."""
        if self._array is None or (self._given is None and self._like.framework == "jax"):
            self._array, self._result = self._fresh(), None
        return self._array

    def result(self) -> Any:
        """What was written, in the caller's framework and axis order."""
        if self._given is not None:
            return self._given.view.owner
        if self._result is None:
            assert self._array is not None
            self._result = _handed_back(self._array, self._batch_first, self._like)
        return self._result


def sources(gpu: Gpu, **arguments: Any) -> tuple[KernelSource, ...]:
    """The kernels that a call of `nvfp4_gemv` on such a GPU compiles, of arrays that begin at multiples of 16 bytes.

    Raises InputError, UnsupportedError.
    """
    views, problem = spec.read(**arguments)
    if tiles.fits(views, problem):
        chosen = plan.plan_tiles(problem, gpu.arch, gpu.multiprocessors)
        if chosen is not None:
            return (chosen[0],)
    steps = cuda.Steps(views, problem, gpu.arch, gpu.multiprocessors)
    return (plan.plan(problem, gpu.arch, steps.whole),)


def _on_cpu(views: spec.Views, problem: spec.Problem) -> Callable[[], Any]:
    shape = (problem.m, problem.n, problem.batches)
    dtype = reference.numpy_dtype(problem.out_dtype)
    target = _Target(views.c, shape, dtype, views.batch_first, views.a.view, rows=False)

    def compute() -> Any:
        reference.gemv(views, problem, "float32", out=target.array())
        return target.result()

    return compute


def _quantize_on_cpu(views: spec.QuantizeViews, problem: object) -> Callable[[], tuple[Any, ...]]:
    like, first = views.x.view, views.batch_first
    m, k, batches = views.x.shape
    columns = views.format.scale_columns(k)
    swizzled = views.scale_layout == "128x4"
    scales_shape = (*(formats.padded(m, columns) if swizzled else (m, columns)), batches)
    packed = _Target(views.packed, (m, k // 2, batches), np.uint8, first, like)
    scales = _Target(views.scales, scales_shape, np.uint8, first, like)
    made_factor = _Target(None, (1,), np.float32, None, like) if views.global_scale.kind == "amax" else None

    def compute() -> tuple[Any, ...]:
        values = views.x.array()
        target = scales.array().view(np.uint8)
        linear = np.empty((m, columns, batches), np.uint8) if swizzled else target
        factor = reference.global_scale(views.global_scale) if made_factor is None else reference.tensor_scale(values)
        reference.quantize(values, views.format, factor, packed.array().view(np.uint8), linear)
        if swizzled:
            _map_batches(formats.swizzle, linear, target)
        results = packed.result(), scales.result()
        if made_factor is None:
            return results
        made_factor.array()[...] = factor
        return (*results, made_factor.result())

    return compute


def _dequantize_on_cpu(views: spec.DequantizeViews, problem: object) -> Callable[[], Any]:
    like = views.packed.view
    m, half, batches = views.packed.shape
    dtype = reference.numpy_dtype(views.out_dtype)
    target = _Target(views.out, (m, 2 * half, batches), dtype, views.batch_first, like)

    def compute() -> Any:
        reference.dequantize(views, target.array())
        return target.result()

    return compute


def _swizzle_on_cpu(views: spec.SwizzleViews, problem: object, *, backwards: bool = False) -> Callable[[], Any]:
    like = views.scales.view
    target = _Target(views.out, views.out_shape, _ONE_BYTE_DTYPES[like.dtype], views.batch_first, like)

    def linear(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return formats.unswizzle(blocks, views.rows, views.columns)

    def compute() -> Any:
        change = linear if backwards else formats.swizzle
        _map_batches(change, views.scales.bytes(), target.array().view(np.uint8))
        return target.result()

    return compute


def _map_batches(
    function: Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]],
    source: npt.NDArray[np.uint8],
    target: npt.NDArray[np.uint8],
) -> None:
    """Apply `function` to each batch; a flat target is filled in the result's order."""
    for batch in range(source.shape[-1]):
        one = target[..., batch]
        one[...] = function(source[..., batch]).reshape(one.shape)


def _alone(read: Callable[..., V]) -> Callable[..., tuple[V, V]]:
    """Checks whose views say all about a problem."""

    def both(**arguments: Any) -> tuple[V, V]:
        views = read(**arguments)
        return views, views

    return both


GEMV = Calls(spec.ARGUMENTS, spec.read, cuda.wanted, cuda.bind, _on_cpu)
QUANTIZE = Calls(
    spec.QUANTIZE,
    _alone(spec.read_quantize),
    conversions.Quantize.wanted,
    conversions.Quantize,
    _quantize_on_cpu,
    handed=conversions.Quantize.handed,
)
DEQUANTIZE = Calls(
    spec.DEQUANTIZE,
    _alone(spec.read_dequantize),
    conversions.Dequantize.wanted,
    conversions.Dequantize,
    _dequantize_on_cpu,
    handed=conversions.Dequantize.handed,
)
SWIZZLE = Calls(
    spec.SWIZZLE,
    _alone(spec.read_swizzle),
    conversions.Swizzle.wanted,
    conversions.Swizzle,
    _swizzle_on_cpu,
    handed=conversions.Swizzle.handed,
)
UNSWIZZLE = Calls(
    spec.UNSWIZZLE,
    _alone(spec.read_unswizzle),
    conversions.Swizzle.wanted,
    conversions.Unswizzle,
    functools.partial(_swizzle_on_cpu, backwards=True),
    handed=conversions.Swizzle.handed,
)


@operator(GEMV)
def nvfp4_gemv(
    a: Any,
    b: Any,
    sfa: Any,
    sfb: Any = None,
    *,
    alpha: Any = None,
    bias: Any = None,
    out_dtype: Any = None,
    format: Literal["nvfp4", "mxfp4"] = "nvfp4",
    scale_layout: Literal["linear", "128x4"] = "linear",
    batch_axis: int = -1,
    c: Any = None,
    stream: object = None,
) -> Any:
    """Multiply a block-scaled 4-bit matrix with 1 to 16 vectors.

        c[m, n, l] = alpha * sum_k a[m, k, l] * sfa[m, k // 16, l] * b[n, k, l] * sfb[n, k // 16, l]  (+ bias)

    Any array that speaks DLPack; all on one device; nothing is copied, cast or moved. Strides are free, negative and
    zero ones included, but the axis of k is contiguous. A batch axis l is on all of a, b, sfa, sfb and c or on none.

    Args:
        a: `[m, k/2]` or `[m, k/2, l]`, E2M1 pairs in uint8 or float4_e2m1fn_x2, even k in the low nibble. k is any even
            number.
        b: `[n, k/2(, l)]` E2M1 pairs, or in weight-only mode `[n, k(, l)]` bfloat16 or float16. n is 1 to 16.
        sfa: scales of a, uint8 or the format's dtype: `[m, ceil(k/16)(, l)]`, or in the 128x4 layout
            `[P, Q(, l)]` or `[P * Q(, l)]`, contiguous but for l, P and Q being rows and columns rounded up to
            multiples of 128 and 4. Padding bytes may hold anything. When 16 does not divide k, the last scale is for
            the rest.
        sfb: scales of b, likewise; None in weight-only mode.
        alpha: None, a number, or a float32 array: one value (`[]` or `[1]`) or one per row (`[m]`, `[m, l]`). Taken in
            float32.
        bias: None, or `[m]` or `[m, l]` in c's dtype; added after alpha, to all n columns.
        out_dtype: "float16", "bfloat16" or "float32", or the framework's object for it; c's dtype, or else float16.
        format: "nvfp4" (one E4M3 scale per 16 elements) or "mxfp4" (one E8M0 scale per 32: read 32 for 16 above).
        scale_layout: "linear" or "128x4", of sfa and sfb.
        batch_axis: -1 when l is the last axis of every batched array as written here, 0 when it is the first
            (`a [l, m, k/2]`, `c [l, m, n]`, `alpha [l, m]`, ...), which frameworks without strides need.
        c: the output, `[m, n(, l)]`, any strides, sharing memory with no input; allocated C-contiguous when None.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of the arrays' framework by default. It means nothing on the CPU.

    Returns:
        c.

    Every E2M1 and scale code counts as what it stands for, negative E4M3 scales and NaN included: a NaN scale makes NaN
    of the rows that use it. Products of two E8M0 scales past float32's range are inf, 0 or what the terms make of them.
    Sums are float32, in no promised order, but the same bits every run. With
    T = |alpha| * sum_k |terms| + |bias|, the result is within (k/32 + 48) * 2^-24 * T of the exact one, before it is
    rounded to c's dtype (float16 overflows to inf), as long as sum_k |terms| stays within float32.

    Raises:
        InputError: an argument of the wrong rank, shape, dtype, stride or device, or an output that is read-only or
            overlaps; before anything is computed.
        UnsupportedError: there is no kernel for the arrays' device.
    """
    options = (format, scale_layout, batch_axis, out_dtype)
    return GEMV((a, b, sfa, sfb, alpha, bias), options, (c,), False, stream)


@operator(QUANTIZE)
def quantize_nvfp4(
    x: Any,
    *,
    global_scale: Any = None,
    format: Literal["nvfp4", "mxfp4"] = "nvfp4",
    scale_layout: Literal["linear", "128x4"] = "linear",
    batch_axis: int = -1,
    packed: Any = None,
    scales: Any = None,
    stream: object = None,
) -> tuple[Any, ...]:
    """Quantise a matrix to block-scaled 4-bit codes as `nvfp4_gemv` reads them.

    NVFP4: with y = x * global_scale (float32), a block's scale is its amax / 6 rounded to E4M3 and its codes are
    y / scale rounded to E2M1. MXFP4: the scale is 2^(floor(log2 amax) - 2), as in OCP MX v1.0, section 6.3. All
    roundings are to nearest, ties to even, and saturate. A block whose scale rounds to zero gets (signed) zeros. A NaN
    gives its block a NaN scale and codes 7; an infinity counts as a number past every other, so its block gets the
    largest scale.

    Args:
        x: `[m, k]` or `[m, k, l]`, float32, float16 or bfloat16; k even and contiguous, other strides free.
        global_scale: None; a number above 0 or a one-element float32 array, to be multiplied in; or "amax", which
            computes 448 * 6 / amax(|x|) over the finite elements (1 when that is 0), NVIDIA's choice. x is about
            `e2m1 * scale / global_scale`, so that the `alpha` of a product is 1 / (global_scale_a * global_scale_b).
            NVFP4 only.
        format: "nvfp4" or "mxfp4".
        scale_layout: "linear" or "128x4".
        batch_axis: -1 or 0: where l is, in inputs and outputs.
        packed: output for the codes, `[m, k/2(, l)]`.
        scales: output for the scales, shaped as `nvfp4_gemv` takes them.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of the arrays' framework by default. It means nothing on the CPU.

    Returns:
        `(packed, scales)`, both uint8 when allocated here, or with `global_scale="amax"`
        `(packed, scales, global_scale)`, the last one float32 of shape `[]`. 128x4 scales are `[P, Q(, l)]` with
        zero padding. With a batch axis in last place, rows stay contiguous in memory.

    Raises:
        InputError: an argument that cannot be used.
        UnsupportedError: there is no kernel for the arrays' device.
    """
    options = (format, scale_layout, batch_axis)
    return QUANTIZE((x, global_scale), options, (packed, scales), False, stream)  # type: ignore[no-any-return]


@operator(DEQUANTIZE)
def dequantize_nvfp4(
    packed: Any,
    scales: Any,
    *,
    global_scale: Any = None,
    format: Literal["nvfp4", "mxfp4"] = "nvfp4",
    scale_layout: Literal["linear", "128x4"] = "linear",
    batch_axis: int = -1,
    out_dtype: Any = None,
    out: Any = None,
    stream: object = None,
) -> Any:
    """The values that block-scaled 4-bit codes stand for: `e2m1 * scale / global_scale`, in float32, then rounded.

    Args:
        packed: `[m, k/2]` or `[m, k/2, l]` E2M1 pairs, as `nvfp4_gemv` takes them.
        scales: their scales, linear or 128x4.
        global_scale: None (1), a number above 0, or a one-element float32 array, as `quantize_nvfp4` took or gave it.
        format: "nvfp4" or "mxfp4".
        scale_layout: "linear" or "128x4".
        batch_axis: -1 or 0: where l is.
        out_dtype: "float32", "float16" or "bfloat16"; out's dtype, or else float32.
        out: the output, `[m, k(, l)]`, contiguous along k; allocated when None, with contiguous rows.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of the arrays' framework by default. It means nothing on the CPU.

    Returns:
        `[m, k(, l)]`. NaN scales give NaN; without a global scale and in float32, every value is exact, but 6 * 2^127
        (MXFP4) is inf.

    Raises:
        InputError: an argument that cannot be used.
        UnsupportedError: there is no kernel for the arrays' device.
    """
    options = (format, scale_layout, batch_axis, out_dtype)
    return DEQUANTIZE((packed, scales, global_scale), options, (out,), False, stream)


@operator(SWIZZLE)
def swizzle_scales(scales: Any, *, batch_axis: int = -1, out: Any = None, stream: object = None) -> Any:
    """Scales in cuBLASLt's 128x4 layout.

    Scale (i, j) of a matrix with C columns goes to byte
    `((i // 128) * ceil(C / 4) + j // 4) * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4`.

    Args:
        scales: `[rows, columns]` or `[rows, columns, l]`, uint8, float8_e4m3fn or float8_e8m0fnu, columns contiguous.
        batch_axis: -1 or 0: where l is.
        out: the output, `[P, Q(, l)]` or `[P * Q(, l)]` in the dtype of `scales`, contiguous but for l.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of the arrays' framework by default. It means nothing on the CPU.

    Returns:
        `[P, Q(, l)]`, P and Q being rows and columns rounded up to multiples of 128 and 4; padding is zero bytes.

    Raises:
        InputError: an argument that cannot be used.
        UnsupportedError: there is no kernel for the arrays' device.
    """
    return SWIZZLE((scales,), (batch_axis,), (out,), False, stream)


@operator(UNSWIZZLE)
def unswizzle_scales(
    swizzled: Any, rows: int, columns: int, *, batch_axis: int = -1, out: Any = None, stream: object = None
) -> Any:
    """Linear scales out of cuBLASLt's 128x4 layout: the inverse of `swizzle_scales`; padding is ignored.

    Args:
        swizzled: `[P, Q(, l)]` or `[P * Q(, l)]`, uint8, float8_e4m3fn or float8_e8m0fnu, contiguous but for l.
        rows: rows of the linear matrix.
        columns: its columns, ceil(k / 16) for NVFP4.
        batch_axis: -1 or 0: where l is.
        out: the output, `[rows, columns(, l)]` in the dtype of `swizzled`, contiguous along columns.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of the arrays' framework by default. It means nothing on the CPU.

    Returns:
        `[rows, columns(, l)]`.

    Raises:
        InputError: an argument that cannot be used.
        UnsupportedError: there is no kernel for the arrays' device.
    """
    return UNSWIZZLE((swizzled,), (rows, columns, batch_axis), (out,), False, stream)
