"""Argument validation of `nvfp4_gemv` and its related functions: every check a caller can fail, and what comes of
passing them."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any, Literal

from ...errors import kind, shown
from ...tensor import Device, View
from ..arguments import Arguments, Axis, Choice, Dtype, Integer, option
from .formats import FORMATS, MXFP4, BlockFormat, named, padded
from .validation import E2M1_DTYPES, FLOAT_DTYPES, SCALE_LAYOUTS, Operand, Validation, is_number

OPERATOR = "nvfp4_gemv"
MAX_N = 16
OUT_DTYPES = ("float16", "bfloat16", "float32")
ACTIVATION_DTYPES = ("bfloat16", "float16")

MAX_SIZE = 2**63 - 1
"""Bound of a number of rows or columns: the extents that an array can have."""

_FORMAT = Choice(tuple(known.name for known in FORMATS))


# What the operators take ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class GemvArrays:
    """The arrays of `nvfp4_gemv`."""

    a: View
    b: View
    sfa: View
    sfb: View | None = None
    alpha: View | float | None = None
    bias: View | None = None
    c: View | None = None


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """What all that reads or writes block-scaled matrices has, but the layouts of scales.

    Attributes:
        format: "nvfp4" or "mxfp4".
        scale_layout: "linear" or "128x4".
        batch_axis: -1 or 0.
    """

    format: Literal["nvfp4", "mxfp4"] = option("nvfp4", _FORMAT)
    scale_layout: Literal["linear", "128x4"] = option("linear", Choice(SCALE_LAYOUTS))
    batch_axis: int = option(-1, Axis())


@dataclass(frozen=True, slots=True)
class GemvOptions(BlockOptions):
    """The options of `nvfp4_gemv`.

    Attributes:
        out_dtype: of c; None for its own, or float16.
    """

    out_dtype: Any = option(None, Dtype(OUT_DTYPES, optional=True))  # noqa: RUF009 - a field, as all


@dataclass(slots=True)
class QuantizeArrays:
    """The arrays of `quantize_nvfp4`."""

    x: View
    global_scale: View | float | str | None = None
    packed: View | None = None
    scales: View | None = None


@dataclass(slots=True)
class DequantizeArrays:
    """The arrays of `dequantize_nvfp4`."""

    packed: View
    scales: View
    global_scale: View | float | None = None
    out: View | None = None


@dataclass(frozen=True, slots=True)
class DequantizeOptions(BlockOptions):
    """The options of `dequantize_nvfp4`.

    Attributes:
        out_dtype: of out; None for its own, or float32.
    """

    out_dtype: Any = option(None, Dtype(FLOAT_DTYPES, optional=True))  # noqa: RUF009 - a field, as all


@dataclass(slots=True)
class SwizzleArrays:
    """The arrays of `swizzle_scales`."""

    scales: View
    out: View | None = None


@dataclass(frozen=True, slots=True)
class SwizzleOptions:
    """The option of `swizzle_scales`.

    Attributes:
        batch_axis: -1 or 0.
    """

    batch_axis: int = option(-1, Axis())


@dataclass(slots=True)
class UnswizzleArrays:
    """The arrays of `unswizzle_scales`."""

    swizzled: View
    out: View | None = None


@dataclass(frozen=True, slots=True)
class UnswizzleOptions:
    """The options of `unswizzle_scales`.

    Attributes:
        rows, columns: of the linear matrix.
        batch_axis: -1 or 0.
    """

    rows: int = option(MISSING, Integer(0, MAX_SIZE))
    columns: int = option(MISSING, Integer(0, MAX_SIZE))
    batch_axis: int = option(-1, Axis())


ARGUMENTS = Arguments(OPERATOR, GemvArrays, GemvOptions, results=("c",), numbers=("alpha",))
QUANTIZE = Arguments(
    "quantize_nvfp4", QuantizeArrays, BlockOptions, results=("packed", "scales"), numbers=("global_scale",)
)
DEQUANTIZE = Arguments(
    "dequantize_nvfp4", DequantizeArrays, DequantizeOptions, results=("out",), numbers=("global_scale",)
)
SWIZZLE = Arguments("swizzle_scales", SwizzleArrays, SwizzleOptions, results=("out",))
UNSWIZZLE = Arguments("unswizzle_scales", UnswizzleArrays, UnswizzleOptions, results=("out",))


# What comes of them --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a plan may depend on: sizes and options, no addresses.

    Attributes:
        m, n, k: rows of a, rows of b, elements of a row (not bytes); k is even.
        batches: l, 1 without a batch axis.
        format: the 4-bit format of a, and of b unless weight-only.
        b_dtype: "e2m1", or "bfloat16" or "float16" in weight-only mode.
        scale_layout: "linear" or "128x4", for sfa and sfb alike.
        alpha: where the factor comes from: none given, a host number, one device value, one per row.
        bias: whether there is one.
        out_dtype: c's dtype label.
        device: where every array is.
    """

    m: int
    n: int
    k: int
    batches: int
    format: BlockFormat
    b_dtype: str
    scale_layout: str
    alpha: Literal["one", "host", "device", "rows"]
    bias: bool
    out_dtype: str
    device: Device

    @property
    def weight_only(self) -> bool:
        """Whether b is a plain float array without scales."""
        return self.b_dtype != "e2m1"


@dataclass(frozen=True, slots=True)
class Views:
    """The call's arrays, batch axis last.

    `a [m, k/2, l]`, `b [n, k/2, l]` (weight-only `[n, k, l]`), `sfa [m, ceil(k/block), l]` or 128x4 blocks, `sfb`
    likewise, `alpha` one value or `[m, l]`, `bias [m, l]`, `c [m, n, l]`. A value per row that has no batch axis
    shows one of stride 0.

    Attributes:
        alpha_value: a host alpha, rounded to float32; 1 when there is none.
        c: None when the call is to allocate it.
        batch_first: whether the caller keeps the batch axis in front; None without a batch axis.
    """

    a: Operand
    b: Operand
    sfa: Operand
    sfb: Operand | None
    alpha: Operand | None
    alpha_value: float
    bias: Operand | None
    c: Operand | None
    batch_first: bool | None


def read(
    a: object,
    b: object,
    sfa: object,
    sfb: object = None,
    *,
    alpha: object = None,
    bias: object = None,
    out_dtype: object = None,
    format: object = "nvfp4",
    scale_layout: object = "linear",
    batch_axis: object = -1,
    c: object = None,
) -> tuple[Views, Problem]:
    """Check a call of `nvfp4_gemv`. Raises InputError."""
    validation = Validation(ARGUMENTS.operator)
    options = validation.taken(ARGUMENTS, format, scale_layout, batch_axis, out_dtype)
    fmt, layout = named(options.format), options.scale_layout
    a_operand = validation.first(validation.view(a, "a", E2M1_DTYPES), "a", [("m", None), ("k/2", None)])
    m, k = a_operand.shape[0], 2 * a_operand.shape[1]
    b_operand, b_dtype = _read_b(validation, b, k)
    n = b_operand.shape[0]
    sfa_operand = validation.scales(sfa, "sfa", fmt, layout, ("m", m, k))
    sfb_operand = _read_sfb(validation, sfb, b_dtype, fmt, layout, (n, k))
    alpha_kind, alpha_value, alpha_operand = _read_alpha(validation, alpha, m)
    label: str | None = options.out_dtype
    c_operand = None
    if c is not None:
        seen = validation.view(c, "c", OUT_DTYPES if label is None else (label,), output=True)
        c_operand = validation.matrix(seen, "c", [("m", m), ("n", n)], contiguous=False)
        label = seen.dtype
    label = label or "float16"
    bias_operand = None
    if bias is not None:
        bias_operand = validation.per_row(validation.view(bias, "bias", (label,), ", like c"), "bias", m)
    validation.separate()
    views = Views(
        a=a_operand,
        b=b_operand,
        sfa=sfa_operand,
        sfb=sfb_operand,
        alpha=alpha_operand,
        alpha_value=alpha_value,
        bias=bias_operand,
        c=c_operand,
        batch_first=validation.batch_first if validation.batched else None,
    )
    problem = Problem(
        m=m,
        n=n,
        k=k,
        batches=a_operand.shape[-1],
        format=fmt,
        b_dtype=b_dtype,
        scale_layout=layout,
        alpha=alpha_kind,
        bias=bias is not None,
        out_dtype=label,
        device=a_operand.view.device,
    )
    return views, problem


def _read_b(validation: Validation, b: object, k: int) -> tuple[Operand, str]:
    seen = validation.view(b, "b", (*E2M1_DTYPES, *ACTIVATION_DTYPES))
    if seen.dtype in E2M1_DTYPES:
        operand, dtype = validation.matrix(seen, "b", [("n", None), ("k/2", k // 2)]), "e2m1"
    else:
        operand, dtype = validation.matrix(seen, "b", [("n", None), ("k", k)]), seen.dtype
    if not 1 <= operand.shape[0] <= MAX_N:
        raise validation.error(
            "b", f"n from 1 to {MAX_N} rows (of a padded b, pass a view such as b[:1])", operand.shape[0]
        )
    return operand, dtype


def _read_sfb(
    validation: Validation, sfb: object, b_dtype: str, fmt: BlockFormat, layout: str, extent: tuple[int, int]
) -> Operand | None:
    if b_dtype != "e2m1":
        if sfb is not None:
            raise validation.error("sfb", f"None with a {b_dtype} b", kind(sfb))
        return None
    if sfb is None:
        raise validation.error("sfb", "the scales of a 4-bit b (only a bfloat16 or float16 b has none)", None)
    n, k = extent
    return validation.scales(sfb, "sfb", fmt, layout, ("n", n, k))


def _read_alpha(
    validation: Validation, alpha: object, m: int
) -> tuple[Literal["one", "host", "device", "rows"], float, Operand | None]:
    if alpha is None:
        return "one", 1.0, None
    if is_number(alpha):
        return "host", validation.host_float(alpha, "alpha"), None
    if isinstance(alpha, (str, list, tuple)):
        raise validation.error("alpha", "None, a number or a float32 array", kind(alpha))
    operand = validation.per_row(validation.view(alpha, "alpha", ("float32",)), "alpha", m, scalar=True)
    return ("device" if operand.view.shape in ((), (1,)) else "rows"), 1.0, operand


@dataclass(frozen=True, slots=True)
class GlobalScale:
    """The per-tensor scale of a related function call.

    Attributes:
        kind: none; the caller's number; a device value; or to be computed from the tensor.
        value: the number, rounded to float32.
        operand: the device value.
    """

    kind: Literal["one", "host", "device", "amax"]
    value: float = 1.0
    operand: Operand | None = None


def _read_global_scale(validation: Validation, value: object, fmt: BlockFormat, *, amax: bool) -> GlobalScale:
    if value is None:
        return GlobalScale("one")
    if fmt == MXFP4:
        raise validation.error("global_scale", "None with format='mxfp4', which has no per-tensor scale", kind(value))
    if isinstance(value, str):
        if amax and str.__str__(value) == "amax":
            return GlobalScale("amax")
        words = "'amax', " if amax else ""
        raise validation.error("global_scale", f"None, {words}a number or a float32 array", kind(value))
    if is_number(value):
        number = validation.host_float(value, "global_scale")
        if not 0 < number < float("inf"):
            raise validation.error("global_scale", "a finite number above 0", shown(value))
        return GlobalScale("host", value=number)
    seen = validation.view(value, "global_scale", ("float32",))
    if seen.shape not in ((), (1,)):
        raise validation.error("global_scale", "one value, shape [] or [1]", f"shape {list(seen.shape)}")
    return GlobalScale("device", operand=validation.per_row(seen, "global_scale", 1, scalar=True))


@dataclass(frozen=True, slots=True)
class QuantizeViews:
    """A call of `quantize_nvfp4`: `x [m, k, l]`, `packed [m, k/2, l]`, `scales` in `scale_layout`."""

    x: Operand
    packed: Operand | None
    scales: Operand | None
    global_scale: GlobalScale
    format: BlockFormat
    scale_layout: str
    batch_first: bool | None


def read_quantize(
    x: object,
    *,
    global_scale: object = None,
    format: object = "nvfp4",
    scale_layout: object = "linear",
    batch_axis: object = -1,
    packed: object = None,
    scales: object = None,
) -> QuantizeViews:
    """Check a call of `quantize_nvfp4`. Raises InputError."""
    validation = Validation(QUANTIZE.operator)
    options = validation.taken(QUANTIZE, format, scale_layout, batch_axis)
    fmt, layout = named(options.format), options.scale_layout
    x_operand = validation.first(validation.view(x, "x", FLOAT_DTYPES), "x", [("m", None), ("k", None)])
    m, k = x_operand.shape[:2]
    if k % 2:
        raise validation.error("x", "an even k, for two codes share a byte", f"k = {k}")
    factor = _read_global_scale(validation, global_scale, fmt, amax=True)
    packed_operand = scales_operand = None
    if packed is not None:
        seen = validation.view(packed, "packed", E2M1_DTYPES, output=True)
        packed_operand = validation.matrix(seen, "packed", [("m", m), ("k/2", k // 2)])
    if scales is not None:
        scales_operand = validation.scales(scales, "scales", fmt, layout, ("m", m, k), output=True)
    validation.separate()
    batch_first = validation.batch_first if validation.batched else None
    return QuantizeViews(x_operand, packed_operand, scales_operand, factor, fmt, layout, batch_first)


@dataclass(frozen=True, slots=True)
class DequantizeViews:
    """A call of `dequantize_nvfp4`: `packed [m, k/2, l]`, `scales` in `scale_layout`, `out [m, k, l]`."""

    packed: Operand
    scales: Operand
    global_scale: GlobalScale
    format: BlockFormat
    scale_layout: str
    out_dtype: str
    out: Operand | None
    batch_first: bool | None


def read_dequantize(
    packed: object,
    scales: object,
    *,
    global_scale: object = None,
    format: object = "nvfp4",
    scale_layout: object = "linear",
    batch_axis: object = -1,
    out_dtype: object = None,
    out: object = None,
) -> DequantizeViews:
    """Check a call of `dequantize_nvfp4`. Raises InputError."""
    validation = Validation(DEQUANTIZE.operator)
    options = validation.taken(DEQUANTIZE, format, scale_layout, batch_axis, out_dtype)
    fmt, layout = named(options.format), options.scale_layout
    packed_operand = validation.first(
        validation.view(packed, "packed", E2M1_DTYPES), "packed", [("m", None), ("k/2", None)]
    )
    m, k = packed_operand.shape[0], 2 * packed_operand.shape[1]
    scales_operand = validation.scales(scales, "scales", fmt, layout, ("m", m, k))
    factor = _read_global_scale(validation, global_scale, fmt, amax=False)
    label: str | None = options.out_dtype
    out_operand = None
    if out is not None:
        seen = validation.view(out, "out", FLOAT_DTYPES if label is None else (label,), output=True)
        out_operand = validation.matrix(seen, "out", [("m", m), ("k", k)])
        label = seen.dtype
    validation.separate()
    batch_first = validation.batch_first if validation.batched else None
    return DequantizeViews(
        packed_operand, scales_operand, factor, fmt, layout, label or "float32", out_operand, batch_first
    )


@dataclass(frozen=True, slots=True)
class SwizzleViews:
    """A call of `swizzle_scales` or `unswizzle_scales`; `rows` and `columns` are those of the linear matrix.

    Attributes:
        out_shape: of the result, batch axis last.
    """

    scales: Operand
    rows: int
    columns: int
    out_shape: tuple[int, int, int]
    out: Operand | None
    batch_first: bool | None


_SCALE_DTYPES = ("uint8", "float8_e4m3fn", "float8_e8m0fnu")


def read_swizzle(scales: object, *, batch_axis: object = -1, out: object = None) -> SwizzleViews:
    """Check a call of `swizzle_scales`. Raises InputError."""
    validation = Validation(SWIZZLE.operator)
    validation.taken(SWIZZLE, batch_axis)
    operand = validation.first(
        validation.view(scales, "scales", _SCALE_DTYPES), "scales", [("rows", None), ("columns", None)]
    )
    rows, columns, batches = operand.shape
    out_operand = None
    if out is not None:
        seen = validation.view(out, "out", (operand.view.dtype,), ", like scales", output=True)
        out_operand = validation.swizzled(seen, "out", rows, columns)
    validation.separate()
    batch_first = validation.batch_first if validation.batched else None
    return SwizzleViews(operand, rows, columns, (*padded(rows, columns), batches), out_operand, batch_first)


def read_unswizzle(
    swizzled: object, rows: object, columns: object, *, batch_axis: object = -1, out: object = None
) -> SwizzleViews:
    """Check a call of `unswizzle_scales`. Raises InputError."""
    validation = Validation(UNSWIZZLE.operator)
    options = validation.taken(UNSWIZZLE, rows, columns, batch_axis)
    row_count, column_count = options.rows, options.columns
    seen = validation.view(swizzled, "swizzled", _SCALE_DTYPES)
    all_rows, all_columns = padded(row_count, column_count)
    unbatched = seen.shape in ((all_rows, all_columns), (all_rows * all_columns,))
    if not unbatched:
        validation.take_batches(seen)
        size = all_rows * all_columns
        if len(seen.shape) == 2 and seen.shape[1 if validation.batch_first else 0] != size:
            flat = f"[l, bytes = {size}]" if validation.batch_first else f"[bytes = {size}, l]"
            expected = f"128x4 scales of shape [rows = {all_rows}, columns = {all_columns}] or {flat}"
            raise validation.error("swizzled", expected, f"shape {list(seen.shape)}")
    operand = validation.swizzled(seen, "swizzled", row_count, column_count)
    out_operand = None
    if out is not None:
        target = validation.view(out, "out", (operand.view.dtype,), ", like swizzled", output=True)
        out_operand = validation.matrix(target, "out", [("rows", row_count), ("columns", column_count)])
    validation.separate()
    batch_first = validation.batch_first if validation.batched else None
    out_shape = (row_count, column_count, operand.shape[-1])
    return SwizzleViews(operand, row_count, column_count, out_shape, out_operand, batch_first)
