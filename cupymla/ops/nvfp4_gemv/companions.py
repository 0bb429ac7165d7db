"""Binding the companions of nvfp4_gemv to their kernels: parameter records, outputs, calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ... import build, driver, tensor
from ...build.source import KernelSource
from ...device import Device
from ...launch import Geometry, Launcher
from ...tensor import View
from ..gpu import KernelCall, Launches, OutputArrays, check_record
from . import plan
from .door import Operand
from .formats import padded
from .spec import OUT_DTYPES, DequantizeViews, GlobalScale, QuantizeViews, SwizzleViews

_CTAS_PER_MULTIPROCESSOR = 8


class AmaxParameters(ctypes.Structure):
    """Twin of `AmaxParameters` in cuda/nvfp4_gemv/sm80/companion_params.cuh, as the following are of theirs."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "partial")),
        *((name, ctypes.c_int64) for name in ("x_batch", "x_row", "m", "k", "batches")),
        ("type", ctypes.c_int32),
    )


class QuantizeParameters(ctypes.Structure):
    """Twin of `QuantizeParameters`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "packed", "scales", "factor", "partial", "made_factor")),
        *((name, ctypes.c_int64) for name in ("x_batch", "x_row", "packed_batch", "packed_row")),
        *((name, ctypes.c_int64) for name in ("scales_batch", "scales_row", "m", "k", "batches")),
        ("factor_value", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("partials", "type", "swizzled")),
    )


class DequantizeParameters(ctypes.Structure):
    """Twin of `DequantizeParameters`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "scales", "factor", "out")),
        *((name, ctypes.c_int64) for name in ("packed_batch", "packed_row", "scales_batch", "scales_row")),
        *((name, ctypes.c_int64) for name in ("out_batch", "out_row", "m", "k", "batches")),
        ("factor_value", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("type", "swizzled")),
    )


class SwizzleParameters(ctypes.Structure):
    """Twin of `SwizzleParameters`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "target")),
        *((name, ctypes.c_int64) for name in ("source_batch", "source_row", "target_batch", "target_row")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "batches")),
        ("backwards", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix that a call writes.

    Attributes:
        given: the caller's; None for a new one with contiguous rows.
        shape: (rows, columns, l), or () for one value.
        label: the dtype of a new one.
        batch_first: whether the caller keeps the batch axis in front; None without one.
    """

    given: Operand | None
    shape: tuple[int, ...]
    label: str
    batch_first: bool | None

    @property
    def memory(self) -> tuple[int, ...]:
        """The shape of a new one as it is allocated."""
        return self.shape[:-1] if self.batch_first is None else (self.shape[-1], *self.shape[:-1])

    @property
    def strides(self) -> tuple[int, int]:
        """(batch, row), in elements."""
        if self.given is not None:
            return self.given.strides[-1], self.given.strides[0]
        rows, columns, _ = self.shape
        return rows * columns, columns

    def handed_back(self, array: Any) -> Any:
        """The array in the caller's axis order."""
        if self.given is not None or self.batch_first is not False:
            return array
        return array.permute(1, 2, 0) if hasattr(array, "permute") else array.transpose(1, 2, 0)


def _ctas(units: int, threads: int, device: Device) -> int:
    """CTAs for that many independent units of work, at least one."""
    most = _CTAS_PER_MULTIPROCESSOR * driver.multiprocessor_count(device.index)
    return max(1, min(-(-units // threads), most))


def _launcher(
    source: KernelSource, record: ctypes.Structure, units: int, device: Device, follows: bool = False
) -> Launcher:
    """A launch of a kernel; `follows`: right behind another one of the same call, which it may overlap with."""
    kernel = build.kernel(source, device.index)
    check_record(source, kernel.facts, type(record))
    threads = kernel.facts["threads"]
    pdl = follows and driver.has_dependent_launch(device.index)
    geometry = Geometry((_ctas(units, threads, device), 1, 1), threads, kernel.facts["smem_bytes"], pdl=pdl)
    return Launcher(kernel, geometry, (record,))


def _call(
    given: Sequence[View],
    stream: object,
    outputs: Sequence[_Matrix],
    bind: Callable[[OutputArrays, int], tuple[Launches, object]],
) -> KernelCall[Any]:
    """A call that writes these outputs and returns them; where there is one, it alone."""

    def arrays(own: int | None) -> OutputArrays:
        wanted = [(output.memory, output.label) for output in outputs]
        provided = tuple(None if output.given is None else output.given.view for output in outputs)
        return OutputArrays(given[0], wanted, provided, own)

    def result(made: OutputArrays) -> Any:
        results = tuple(output.handed_back(one) for output, one in zip(outputs, made.finish(), strict=True))
        return results if len(results) > 1 else results[0]

    return KernelCall(given, stream, arrays, bind, result)


def _factor(scale: GlobalScale) -> tuple[int | None, float]:
    """A per-tensor scale as an address and a number, of which the kernel takes the address where there is one."""
    return (None if scale.operand is None else scale.operand.view.ptr), scale.value


def _views(*operands: Operand | None) -> list[View]:
    return [operand.view for operand in operands if operand is not None]


def quantize(views: QuantizeViews, stream: object) -> KernelCall[tuple[Any, ...]]:
    """`quantize_nvfp4` on a GPU. What runs or prepares it raises UnsupportedError and DriverError."""
    like, first = views.x.view, views.batch_first
    device = like.device
    m, k, batches = views.x.shape
    columns = views.format.scale_columns(k)
    swizzled = views.scale_layout != "linear"
    scale_rows, scale_columns = padded(m, columns) if swizzled else (m, columns)
    packed = _Matrix(views.packed, (m, k // 2, batches), "uint8", first)
    scales = _Matrix(views.scales, (scale_rows, scale_columns, batches), "uint8", first)
    finds_factor = views.global_scale.kind == "amax"
    outputs = [packed, scales, *([_Matrix(None, (), "float32", None)] if finds_factor else [])]

    def bind(arrays: OutputArrays, pointer: int) -> tuple[Launches, _Partials | None]:
        factor, value = _factor(views.global_scale)
        parameters = QuantizeParameters(
            x=like.ptr,
            packed=arrays.pointers[0],
            scales=arrays.pointers[1],
            factor=factor,
            x_batch=views.x.strides[-1],
            x_row=views.x.strides[0],
            packed_batch=packed.strides[0],
            packed_row=packed.strides[1],
            scales_batch=scales.strides[0],
            scales_row=scales.strides[1],
            m=m,
            k=k,
            batches=batches,
            factor_value=value,
            type=OUT_DTYPES.index(like.dtype),
            swizzled=int(swizzled),
        )
        found = _Partials(views.x, like, pointer) if finds_factor else None
        if found is not None:
            parameters.made_factor = arrays.pointers[2]
            parameters.partial, parameters.partials = found.ptr, found.count
        source = plan.companion("quantize", driver.arch_of(device), views.format)
        units = scale_rows * scale_columns * batches
        quantised = _launcher(source, parameters, units, device, follows=found is not None)
        return Launches(None if found is None else found.launcher, quantised), found

    given = _views(views.x, views.global_scale.operand, views.packed, views.scales)
    return _call(given, stream, outputs, bind)


class _Partials:
    """The largest finite magnitudes of parts of a matrix.

    Attributes:
        ptr, count: where they are, and how many.
        launcher: what computes them.
    """

    def __init__(self, x: Operand, like: View, stream: int) -> None:
        device = like.device
        m, k, batches = x.shape
        source = plan.companion("amax", driver.arch_of(device))
        facts = build.kernel(source, device.index).facts
        units = m * batches * -(-k // facts["span"])
        self.count = _ctas(units, facts["threads"], device)
        self._memory = tensor.allocate(like, (self.count,), "float32", stream)
        self.ptr = self._memory.ptr
        parameters = AmaxParameters(
            x=like.ptr,
            partial=self.ptr,
            x_batch=x.strides[-1],
            x_row=x.strides[0],
            m=m,
            k=k,
            batches=batches,
            type=OUT_DTYPES.index(like.dtype),
        )
        self.launcher = _launcher(source, parameters, units, device)


def dequantize(views: DequantizeViews, stream: object) -> KernelCall[Any]:
    """`dequantize_nvfp4` on a GPU. What runs or prepares it raises UnsupportedError and DriverError."""
    like = views.packed.view
    m, half, batches = views.packed.shape
    out = _Matrix(views.out, (m, 2 * half, batches), views.out_dtype, views.batch_first)

    def bind(arrays: OutputArrays, _: int) -> tuple[Launches, None]:
        factor, value = _factor(views.global_scale)
        parameters = DequantizeParameters(
            packed=like.ptr,
            scales=views.scales.view.ptr,
            factor=factor,
            out=arrays.pointers[0],
            packed_batch=views.packed.strides[-1],
            packed_row=views.packed.strides[0],
            scales_batch=views.scales.strides[-1],
            scales_row=views.scales.strides[0],
            out_batch=out.strides[0],
            out_row=out.strides[1],
            m=m,
            k=2 * half,
            batches=batches,
            factor_value=value,
            type=OUT_DTYPES.index(views.out_dtype),
            swizzled=int(views.scale_layout != "linear"),
        )
        source = plan.companion("dequantize", driver.arch_of(like.device), views.format)
        units = m * views.format.scale_columns(2 * half) * batches
        return Launches(_launcher(source, parameters, units, like.device)), None

    given = _views(views.packed, views.scales, views.global_scale.operand, views.out)
    return _call(given, stream, [out], bind)


def swizzle(views: SwizzleViews, stream: object, *, backwards: bool) -> KernelCall[Any]:
    """`swizzle_scales` on a GPU, or `unswizzle_scales`. What runs it raises UnsupportedError and DriverError."""
    like = views.scales.view
    out = _Matrix(views.out, views.out_shape, like.dtype, views.batch_first)
    batches = views.out_shape[-1]

    def bind(arrays: OutputArrays, _: int) -> tuple[Launches, None]:
        parameters = SwizzleParameters(
            source=like.ptr,
            target=arrays.pointers[0],
            source_batch=views.scales.strides[-1],
            source_row=views.scales.strides[0],
            target_batch=out.strides[0],
            target_row=out.strides[1],
            rows=views.rows,
            columns=views.columns,
            batches=batches,
            backwards=int(backwards),
        )
        all_rows, all_columns = padded(views.rows, views.columns)
        units = all_rows * all_columns // 4 * batches
        source = plan.companion("swizzle", driver.arch_of(like.device))
        return Launches(_launcher(source, parameters, units, like.device)), None

    return _call(_views(views.scales, views.out), stream, [out], bind)
