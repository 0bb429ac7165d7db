"""Binding the companions of nvfp4_gemv to their kernels: parameter records, outputs, launches."""

from __future__ import annotations

import ctypes
from typing import Any

from ... import build, driver, tensor
from ...build.source import KernelSource
from ...device import Device
from ...launch import Geometry, Launcher
from ...tensor import View
from ..gpu import check_record
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


class _Output:
    """A matrix that a call writes: the caller's, or a new one with contiguous rows.

    Attributes:
        ptr: address of element 0.
        row, batch: strides in elements.
    """

    def __init__(
        self,
        given: Operand | None,
        shape: tuple[int, ...],
        label: str,
        like: View,
        batch_first: bool | None,
        stream: int,
    ) -> None:
        rows, columns, batches = shape
        self._given, self._batch_first = given, batch_first
        if given is not None:
            self.ptr, self.row, self.batch = given.view.ptr, given.strides[0], given.strides[-1]
            return
        memory = (rows, columns) if batch_first is None else (batches, rows, columns)
        self._allocation = tensor.allocate(like, memory, label, stream)
        self.ptr, self.row, self.batch = self._allocation.ptr, columns, rows * columns

    def finish(self) -> Any:
        """The array in the caller's framework and axis order. To be called once, after the launch."""
        if self._given is not None:
            return self._given.view.owner
        array = self._allocation.finish()
        if self._batch_first is not False:
            return array
        return array.permute(1, 2, 0) if hasattr(array, "permute") else array.transpose(1, 2, 0)


def _ctas(units: int, threads: int, device: Device) -> int:
    """CTAs for that many independent units of work, at least one."""
    most = _CTAS_PER_MULTIPROCESSOR * driver.multiprocessor_count(device.index)
    return max(1, min(-(-units // threads), most))


def _run(
    source: KernelSource, record: ctypes.Structure, units: int, device: Device, stream: int, follows: bool = False
) -> None:
    """Launch a kernel; `follows`: right behind another one of the same call, which it may overlap with."""
    kernel = build.kernel(source, device.index)
    check_record(source, kernel.facts, type(record))
    threads = kernel.facts["threads"]
    pdl = follows and driver.has_dependent_launch(device.index)
    geometry = Geometry((_ctas(units, threads, device), 1, 1), threads, kernel.facts["smem_bytes"], pdl=pdl)
    Launcher(kernel, geometry, (record,))(stream)


def _factor(scale: GlobalScale) -> tuple[int | None, float]:
    """A per-tensor scale as an address and a number, of which the kernel takes the address where there is one."""
    return (None if scale.operand is None else scale.operand.view.ptr), scale.value


def _views(*operands: Operand | None) -> list[View]:
    return [operand.view for operand in operands if operand is not None]


def quantize(views: QuantizeViews, stream: object) -> tuple[Any, ...]:
    """`quantize_nvfp4` on a GPU. Raises UnsupportedError, DriverError."""
    given = _views(views.x, views.global_scale.operand, views.packed, views.scales)
    like, first = views.x.view, views.batch_first
    device = like.device
    pointer = tensor.launch_stream(given, stream)
    with driver.on_device(device.index):
        target = driver.arch_of(device)
        m, k, batches = views.x.shape
        columns = views.format.scale_columns(k)
        swizzled = views.scale_layout != "linear"
        scale_rows, scale_columns = padded(m, columns) if swizzled else (m, columns)
        packed = _Output(views.packed, (m, k // 2, batches), "uint8", like, first, pointer)
        scales = _Output(views.scales, (scale_rows, scale_columns, batches), "uint8", like, first, pointer)
        factor, value = _factor(views.global_scale)
        parameters = QuantizeParameters(
            x=like.ptr,
            packed=packed.ptr,
            scales=scales.ptr,
            factor=factor,
            x_batch=views.x.strides[-1],
            x_row=views.x.strides[0],
            packed_batch=packed.batch,
            packed_row=packed.row,
            scales_batch=scales.batch,
            scales_row=scales.row,
            m=m,
            k=k,
            batches=batches,
            factor_value=value,
            type=OUT_DTYPES.index(like.dtype),
            swizzled=int(swizzled),
        )
        made = None
        if views.global_scale.kind == "amax":
            made = tensor.allocate(like, (), "float32", pointer)
            partials = _Partials(views.x, like, pointer)
            parameters.made_factor = made.ptr
            parameters.partial, parameters.partials = partials.ptr, partials.count
        source = plan.companion("quantize", target, views.format)
        _run(source, parameters, scale_rows * scale_columns * batches, device, pointer, follows=made is not None)
    tensor.hold(given, pointer)
    results = packed.finish(), scales.finish()
    return results if made is None else (*results, made.finish())


class _Partials:
    """The largest finite magnitudes of parts of a matrix, being computed on a stream.

    Attributes:
        ptr, count: where they are, and how many.
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
        _run(source, parameters, units, device, stream)


def dequantize(views: DequantizeViews, stream: object) -> Any:
    """`dequantize_nvfp4` on a GPU. Raises UnsupportedError, DriverError."""
    given = _views(views.packed, views.scales, views.global_scale.operand, views.out)
    like = views.packed.view
    pointer = tensor.launch_stream(given, stream)
    with driver.on_device(like.device.index):
        m, half, batches = views.packed.shape
        out = _Output(views.out, (m, 2 * half, batches), views.out_dtype, like, views.batch_first, pointer)
        factor, value = _factor(views.global_scale)
        parameters = DequantizeParameters(
            packed=like.ptr,
            scales=views.scales.view.ptr,
            factor=factor,
            out=out.ptr,
            packed_batch=views.packed.strides[-1],
            packed_row=views.packed.strides[0],
            scales_batch=views.scales.strides[-1],
            scales_row=views.scales.strides[0],
            out_batch=out.batch,
            out_row=out.row,
            m=m,
            k=2 * half,
            batches=batches,
            factor_value=value,
            type=OUT_DTYPES.index(views.out_dtype),
            swizzled=int(views.scale_layout != "linear"),
        )
        source = plan.companion("dequantize", driver.arch_of(like.device), views.format)
        _run(source, parameters, m * views.format.scale_columns(2 * half) * batches, like.device, pointer)
    tensor.hold(given, pointer)
    return out.finish()


def swizzle(views: SwizzleViews, stream: object, *, backwards: bool) -> Any:
    """`swizzle_scales` on a GPU, or `unswizzle_scales`. Raises UnsupportedError, DriverError."""
    given = _views(views.scales, views.out)
    like = views.scales.view
    pointer = tensor.launch_stream(given, stream)
    with driver.on_device(like.device.index):
        out = _Output(views.out, views.out_shape, like.dtype, like, views.batch_first, pointer)
        batches = views.out_shape[-1]
        parameters = SwizzleParameters(
            source=like.ptr,
            target=out.ptr,
            source_batch=views.scales.strides[-1],
            source_row=views.scales.strides[0],
            target_batch=out.batch,
            target_row=out.row,
            rows=views.rows,
            columns=views.columns,
            batches=batches,
            backwards=int(backwards),
        )
        all_rows, all_columns = padded(views.rows, views.columns)
        units = all_rows * all_columns // 4 * batches
        _run(plan.companion("swizzle", driver.arch_of(like.device)), parameters, units, like.device, pointer)
    tensor.hold(given, pointer)
    return out.finish()
