"""NumPy references of `nvfp4_gemv` and its related functions: the CPU back end, and what kernels are compared with.

Everything is vectorised, and walked in blocks of rows so that a large matrix is never decoded as a whole.

Three precisions of the product:

- "float32" is the CPU back end's. E2M1 products and their sum over a block are exact in float32 (a block's sum is
  a multiple of 1/4 below 1152), as is the product of two E4M3 scales; so only the sum over blocks, alpha, bias and the
  output dtype round. In weight-only mode the products are exact and every sum rounds; blocks of bfloat16 are summed at
  2^-8 of their value.
- "same" rounds where the kernels round: with one column as "float32", with several as tensor cores do that multiply
  codes with their scales in (`ops/tensor_cores.py`), in chains of 256 k whose sums float32 adds up.
- "float64" decodes everything to float64 and rounds nothing on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .. import tensor_cores
from . import formats, spec
from .formats import NVFP4, BlockFormat, Bytes, Float32

Precision = Literal["same", "float32", "float64"]

_DTYPES: dict[str, npt.DTypeLike] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}

_BLOCK_ELEMENTS = 1 << 22
_CHAIN = 16 * tensor_cores.STEP
"""k that kernels multiply before they begin another sum (cuda/nvfp4_gemv/README.md)."""


def numpy_dtype(label: str) -> np.dtype[Any]:
    """The NumPy dtype of a float label."""
    return np.dtype(_DTYPES[label])


def nvfp4_gemv(*args: Any, precision: Precision = "float64", **kwargs: Any) -> npt.NDArray[Any]:
    """The product of CPU arrays, given as `cupymla.nvfp4_gemv` takes them; `c` is not written.

    Returns:
        `[m, n]`, or with a batch axis `[m, n, l]` or `[l, m, n]`: float64 and not rounded to the output dtype, or with
        another precision in the output dtype.
    """
    views, problem = spec.read(*args, **kwargs)
    return _caller_order(gemv(views, problem, precision), views.batch_first)


def error_bound(*args: Any, **kwargs: Any) -> npt.NDArray[np.float64]:
    """How far float32 arithmetic may end from the float64 product, before the rounding to the output dtype.

    With T = |alpha| * sum_k |terms| + |bias|, the bound is (k/32 + 48) * 2^-24 * T + k * 2^-115 * max(1, |alpha|):
    a term goes through at most 32 additions inside its block, k/32 across blocks (a kernel keeps 32 partial sums or
    more), and a few roundings of scale, alpha, bias and reduction. The last part covers underflow: kernels sum at 2^-14
    of the value, and bring blocks of bfloat16 to a common magnitude, where elements below 2^-119 beside such near 2^127
    lose bits. It holds where sum_k |terms| and the scale products stay within float32's range.

    Arguments and the shape of the result are `nvfp4_gemv`'s.
    """
    views, problem = spec.read(*args, **kwargs)
    magnitude = gemv(views, problem, "float64", magnitude=True)
    alpha = np.maximum(np.abs(_alpha(views, problem, np.float64)), 1)[:, np.newaxis]
    bound = (problem.k / 32 + 48) * 2.0**-24 * magnitude + problem.k * 2.0**-115 * alpha
    return _caller_order(bound, views.batch_first)


def _caller_order(array: npt.NDArray[Any], batch_first: bool | None) -> npt.NDArray[Any]:
    if batch_first is None:
        return array[..., 0]
    return np.moveaxis(array, -1, 0) if batch_first else array


def _row_blocks(rows: int, k: int) -> Iterator[slice]:
    step = max(1, _BLOCK_ELEMENTS // max(1, k))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _blocked(values: npt.NDArray[Any], block: int) -> npt.NDArray[Any]:
    """`[rows, k]` as `[rows, ceil(k/block), block]`, zeros after a tail."""
    rows, k = values.shape
    tail = -k % block
    if tail:
        values = np.pad(values, ((0, 0), (0, tail)))
    return values.reshape(rows, (k + tail) // block, block)


def _scale_rows(scales: Bytes, layout: str, rows: slice, columns: int) -> Bytes:
    """Scale codes `[rows, columns]` of one batch."""
    if layout == "linear":
        return scales[rows]
    row = np.arange(rows.start, rows.stop, dtype=np.int64)[:, np.newaxis]
    column = np.arange(columns, dtype=np.int64)
    flat: Bytes = scales.reshape(-1)[formats.swizzle_offset(row, column, columns)]
    return flat


def _alpha(views: spec.Views, problem: spec.Problem, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """alpha `[m, l]`."""
    value = np.float32(views.alpha_value) if views.alpha is None else views.alpha.array()
    return np.broadcast_to(value, (problem.m, problem.batches)).astype(dtype)


def _bias(views: spec.Views, problem: spec.Problem, dtype: npt.DTypeLike) -> npt.NDArray[Any] | None:
    """bias `[m, l]`."""
    if views.bias is None:
        return None
    return np.broadcast_to(views.bias.array(), (problem.m, problem.batches)).astype(dtype)


def gemv(
    views: spec.Views,
    problem: spec.Problem,
    precision: Precision = "float32",
    *,
    magnitude: bool = False,
    out: npt.NDArray[Any] | None = None,
) -> npt.NDArray[Any]:
    """The product `[m, n, l]`, written to `out` if given.

    Args:
        views: arrays on the CPU.
        problem: their sizes and options.
        precision: "float64" gives float64, the others the output dtype; see the module's text.
        magnitude: sum absolute values instead, as the error bound needs them.
        out: `[m, n, l]` of the result's dtype, any strides.
    """
    m, n, batches = problem.m, problem.n, problem.batches
    compute = np.dtype(np.float64 if precision == "float64" else np.float32)
    result = compute if precision == "float64" else numpy_dtype(problem.out_dtype)
    in_chains = precision == "same" and n > 1
    if out is None:
        out = np.empty((m, n, batches), result)
    alpha, bias = _alpha(views, problem, compute), _bias(views, problem, compute)
    if magnitude:
        alpha, bias = np.abs(alpha), None if bias is None else np.abs(bias)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for batch in range(batches):
            columns = _Columns(views, problem, batch, compute, magnitude)
            for rows in _row_blocks(m, problem.k):
                product = columns.times(rows, in_chains) * alpha[rows, batch, np.newaxis]
                if bias is not None:
                    product = product + bias[rows, batch, np.newaxis]
                out[rows, :, batch] = product.astype(result)
    return out


class _Columns:
    """b of one batch, decoded, ready to be multiplied with rows of a."""

    def __init__(
        self, views: spec.Views, problem: spec.Problem, batch: int, compute: np.dtype[Any], magnitude: bool
    ) -> None:
        self.fmt, self.layout, self.k = problem.format, problem.scale_layout, problem.k
        self.compute = compute
        self.magnitude = magnitude
        self.scale_columns = self.fmt.scale_columns(self.k)
        self.a = views.a.bytes()[..., batch]
        self.sfa = views.sfa.bytes()[..., batch]
        if problem.weight_only:
            values = views.b.array()[..., batch].astype(np.float32)
        else:
            values = formats.decode_pairs(views.b.bytes()[..., batch])
        # A block of bfloat16 may sum to 32 * 6 times the largest number before its scale makes it small, which float32
        # does not hold. 2^-8 of bfloat16 values, subnormal ones too, are exact in float32.
        self.factor = np.float32(1)
        if problem.weight_only and views.b.view.dtype == "bfloat16" and compute == np.float32:
            self.factor = np.float32(2**-8)
        self.values = self._prepared(_blocked(values, self.fmt.block)) * self.factor
        self.scales: npt.NDArray[Any] | None = None
        if views.sfb is not None:
            self.scales = self._scales(views.sfb.bytes()[..., batch], slice(0, problem.n))

    def _prepared(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return (np.abs(values) if self.magnitude else values).astype(self.compute)

    def _scales(self, scales: Bytes, rows: slice) -> npt.NDArray[Any]:
        codes = _scale_rows(scales, self.layout, rows, self.scale_columns)
        return self._prepared(self.fmt.decode_scales(codes))

    def times(self, rows: slice, in_chains: bool) -> npt.NDArray[Any]:
        """`[rows, n]`: block sums first, then scaled, then added over the blocks; or chains of tensor cores' products.

        einsum's own loops are used rather than BLAS, because a BLAS may skip zeros and lose a NaN that they meet.
        """
        values = self._prepared(_blocked(formats.decode_pairs(self.a[rows]), self.fmt.block))
        scales = self._scales(self.sfa, rows)
        if in_chains and all(
            np.isfinite(part).all() for part in (scales, self.values, self.scales) if part is not None
        ):
            return self._chains(values, scales)
        sums = np.einsum("rjk,njk->rnj", values, self.values)
        scales = scales[:, np.newaxis]
        if self.scales is not None:
            scales = scales * self.scales
        total: npt.NDArray[Any] = (sums * scales).sum(axis=-1, dtype=self.compute) / self.factor
        return total

    def _chains(self, values: npt.NDArray[Any], scales: npt.NDArray[Any]) -> npt.NDArray[Any]:
        left = _chained(values, scales)
        right = _chained(self.values, self.scales)
        sums = tensor_cores.product(left, right.swapaxes(-1, -2))
        total: npt.NDArray[Any] = sums.sum(axis=0, dtype=self.compute) / self.factor
        return total


def _chained(blocks: npt.NDArray[Any], scales: npt.NDArray[Any] | None) -> npt.NDArray[np.float64]:
    """Blocks `[rows, j, block]` times their scales, exactly, as `[chains, rows, _CHAIN]`, zeros after a tail."""
    exact = blocks.astype(np.float64)
    if scales is not None:
        exact = exact * scales[..., np.newaxis]
    return _blocked(exact.reshape(len(blocks), -1), _CHAIN).swapaxes(0, 1)


def tensor_scale(x: npt.NDArray[Any]) -> float:
    """NVFP4's per-tensor scale 448 * 6 / amax, as float32 holds it.

    amax is over the finite elements. An amax of 0 gives 1, and one so small that the quotient overflows gives the
    largest float32.
    """
    amax = 0.0
    m, k, batches = x.shape
    for batch in range(batches):
        for rows in _row_blocks(m, k):
            values = np.abs(x[rows, :, batch].astype(np.float32))
            amax = max(amax, float(values.max(initial=0, where=np.isfinite(values))))
    if amax == 0:
        return 1.0
    with np.errstate(over="ignore"):
        scale = np.float32(formats.E4M3_MAX * formats.E2M1_MAX) / np.float32(amax)
    return float(min(scale, np.finfo(np.float32).max))


def quantize(x: npt.NDArray[Any], fmt: BlockFormat, factor: float | None, packed: Bytes, scales: Bytes) -> None:
    """Quantise `x [m, k, l]` into `packed [m, k/2, l]` and linear `scales [m, ceil(k/block), l]`.

    Args:
        x: float values.
        fmt: the format.
        factor: the per-tensor scale that x is multiplied with first, or None.
        packed: receives the codes.
        scales: receives the scale codes.
    """
    m, k, batches = x.shape
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for batch in range(batches):
            for rows in _row_blocks(m, k):
                values = x[rows, :, batch].astype(np.float32)
                if factor is not None:
                    values = values * np.float32(factor)
                codes, scale_codes = _quantize_blocks(_blocked(values, fmt.block), fmt)
                packed[rows, :, batch] = formats.pack_pairs(codes.reshape(codes.shape[0], -1)[:, :k])
                scales[rows, :, batch] = scale_codes


def _quantize_blocks(blocks: Float32, fmt: BlockFormat) -> tuple[Bytes, Bytes]:
    """E2M1 codes of the shape of `blocks [rows, columns, block]`, and scale codes `[rows, columns]`."""
    amax = np.abs(blocks).max(axis=-1)
    if fmt == NVFP4:
        scale_codes = formats.encode_e4m3(amax / np.float32(formats.E2M1_MAX))
    else:
        scale_codes = formats.encode_e8m0_amax(amax)
    scales = fmt.decode_scales(scale_codes)[..., np.newaxis]
    vanished = scales == 0
    quotients = np.where(vanished, np.copysign(np.float32(0), blocks), blocks / np.where(vanished, 1, scales))
    return formats.encode_e2m1(quotients), scale_codes


def dequantize(views: spec.DequantizeViews, out: npt.NDArray[Any]) -> None:
    """Write e2m1 * scale / global_scale, in float32, to `out [m, k, l]` in its dtype."""
    packed, scales, factor = views.packed.bytes(), views.scales.bytes(), global_scale(views.global_scale)
    m, half, batches = packed.shape
    columns = views.format.scale_columns(2 * half)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for batch in range(batches):
            for rows in _row_blocks(m, 2 * half):
                codes = _scale_rows(scales[..., batch], views.scale_layout, rows, columns)
                blocks = _blocked(formats.decode_pairs(packed[rows, :, batch]), views.format.block)
                values: Float32 = blocks * views.format.decode_scales(codes)[..., np.newaxis]
                if factor is not None:
                    values = values / np.float32(factor)
                out[rows, :, batch] = values.reshape(values.shape[0], -1)[:, : 2 * half].astype(out.dtype)


def global_scale(given: spec.GlobalScale) -> float | None:
    """The per-tensor scale that the caller gave, None when there is none."""
    if given.operand is not None:
        return float(given.operand.array().reshape(())[()])
    return given.value if given.kind == "host" else None
