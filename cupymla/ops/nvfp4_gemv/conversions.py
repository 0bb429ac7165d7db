"""Bindings of the quantization functions to their kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import build, driver
from ...build.source import KernelSource
from ...device import Device
from ...launch import Geometry, Launcher
from ...tensor import View
from ..gpu import Launches, Results, check_record
from . import plan
from .formats import padded
from .spec import OUT_DTYPES, DequantizeViews, GlobalScale, QuantizeViews, SwizzleViews
from .validation import Operand

_CTAS_PER_MULTIPROCESSOR = 8


class AmaxParameters(ctypes.Structure):
    """Mirrors `AmaxParameters` in cuda/nvfp4_gemv/sm80/conversion_params.cuh, as the following are of theirs."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "partial")),
        *((name, ctypes.c_int64) for name in ("x_batch", "x_row", "m", "k", "batches")),
        ("type", ctypes.c_int32),
    )


class QuantizeParameters(ctypes.Structure):
    """Mirrors `QuantizeParameters`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "packed", "scales", "factor", "partial", "made_factor")),
        *((name, ctypes.c_int64) for name in ("x_batch", "x_row", "packed_batch", "packed_row")),
        *((name, ctypes.c_int64) for name in ("scales_batch", "scales_row", "m", "k", "batches")),
        ("factor_value", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("partials", "type", "swizzled")),
    )


class DequantizeParameters(ctypes.Structure):
    """Mirrors `DequantizeParameters`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "scales", "factor", "out")),
        *((name, ctypes.c_int64) for name in ("packed_batch", "packed_row", "scales_batch", "scales_row")),
        *((name, ctypes.c_int64) for name in ("out_batch", "out_row", "m", "k", "batches")),
        ("factor_value", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("type", "swizzled")),
    )


class SwizzleParameters(ctypes.Structure):
    """Mirrors `SwizzleParameters`."""

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


def _wanted(*outputs: _Matrix) -> Results:
    return [(output.memory, output.label) for output in outputs]


def _handed(outputs: Sequence[_Matrix], arrays: Sequence[Any]) -> list[Any]:
    return [output.handed_back(array) for output, array in zip(outputs, arrays, strict=True)]


def _address(scale: GlobalScale) -> int | None:
    """Of a per-tensor scale, which the kernel takes in the place of a number where there is one."""
    return None if scale.operand is None else scale.operand.view.ptr


class Quantize(Launches):
    """`quantize_nvfp4` on a GPU: a binding; see `cupymla.ops.gpu`."""

    def __init__(self, views: QuantizeViews, problem: object, results: Sequence[View], recorded: bool) -> None:
        like, device = views.x.view, views.x.view.device
        m, k, batches = views.x.shape
        packed, scales, *_ = self._outputs(views)
        scale_rows, scale_columns, _ = scales.shape
        self._record = QuantizeParameters(
            x_batch=views.x.strides[-1],
            x_row=views.x.strides[0],
            packed_batch=packed.strides[0],
            packed_row=packed.strides[1],
            scales_batch=scales.strides[0],
            scales_row=scales.strides[1],
            m=m,
            k=k,
            batches=batches,
            factor_value=views.global_scale.value,
            type=OUT_DTYPES.index(like.dtype),
            swizzled=int(views.scale_layout != "linear"),
        )
        self._amax = _amax(views.x) if views.global_scale.kind == "amax" else None
        first = None
        if self._amax is not None:
            _, first, self._record.partials = self._amax
            self.workspace_bytes = 4 * self._record.partials
        source = plan.auxiliary("quantize", driver.arch_of(device), views.format)
        units = scale_rows * scale_columns * batches
        super().__init__(first, _launcher(source, self._record, units, device, follows=first is not None))

    @staticmethod
    def _outputs(views: QuantizeViews) -> list[_Matrix]:
        m, k, batches = views.x.shape
        columns = views.format.scale_columns(k)
        rows, columns = padded(m, columns) if views.scale_layout != "linear" else (m, columns)
        packed = _Matrix(views.packed, (m, k // 2, batches), "uint8", views.batch_first)
        scales = _Matrix(views.scales, (rows, columns, batches), "uint8", views.batch_first)
        factor = [_Matrix(None, (), "float32", None)] if views.global_scale.kind == "amax" else []
        return [packed, scales, *factor]

    @classmethod
    def wanted(cls, views: QuantizeViews, problem: object) -> Results:
        """Shapes and dtypes of the results, as they are allocated."""
        return _wanted(*cls._outputs(views))

    @classmethod
    def handed(cls, views: QuantizeViews, problem: object, arrays: Sequence[Any]) -> list[Any]:
        """The results in the caller's axis order."""
        return _handed(cls._outputs(views), arrays)

    def scale(self, *numbers: float) -> None:
        """Set a per-tensor scale that is a number."""
        (self._record.factor_value,) = numbers

    def point(self, views: QuantizeViews, results: Sequence[int], workspace: int) -> None:
        """Set every address."""
        record = self._record
        record.x = views.x.view.ptr
        record.packed, record.scales, *made = results
        record.factor = _address(views.global_scale)
        if self._amax is not None:
            self._amax[0].x, self._amax[0].partial = record.x, workspace
            (record.made_factor,), record.partial = made, workspace


def _amax(x: Operand) -> tuple[AmaxParameters, Launcher, int]:
    """The launch that finds the largest finite magnitudes of parts of a matrix: its record, itself, how many parts."""
    device = x.view.device
    m, k, batches = x.shape
    source = plan.auxiliary("amax", driver.arch_of(device))
    facts = build.kernel(source, device.index).facts
    units = m * batches * -(-k // facts["span"])
    parameters = AmaxParameters(
        x_batch=x.strides[-1],
        x_row=x.strides[0],
        m=m,
        k=k,
        batches=batches,
        type=OUT_DTYPES.index(x.view.dtype),
    )
    return parameters, _launcher(source, parameters, units, device), _ctas(units, facts["threads"], device)


class Dequantize(Launches):
    """`dequantize_nvfp4` on a GPU: a binding; see `cupymla.ops.gpu`."""

    def __init__(self, views: DequantizeViews, problem: object, results: Sequence[View], recorded: bool) -> None:
        device = views.packed.view.device
        m, half, batches = views.packed.shape
        (out,) = self._outputs(views)
        self._record = DequantizeParameters(
            packed_batch=views.packed.strides[-1],
            packed_row=views.packed.strides[0],
            scales_batch=views.scales.strides[-1],
            scales_row=views.scales.strides[0],
            out_batch=out.strides[0],
            out_row=out.strides[1],
            m=m,
            k=2 * half,
            batches=batches,
            factor_value=views.global_scale.value,
            type=OUT_DTYPES.index(views.out_dtype),
            swizzled=int(views.scale_layout != "linear"),
        )
        source = plan.auxiliary("dequantize", driver.arch_of(device), views.format)
        units = m * views.format.scale_columns(2 * half) * batches
        super().__init__(_launcher(source, self._record, units, device))

    @staticmethod
    def _outputs(views: DequantizeViews) -> list[_Matrix]:
        m, half, batches = views.packed.shape
        return [_Matrix(views.out, (m, 2 * half, batches), views.out_dtype, views.batch_first)]

    @classmethod
    def wanted(cls, views: DequantizeViews, problem: object) -> Results:
        """Shape and dtype of the result, as it is allocated."""
        return _wanted(*cls._outputs(views))

    @classmethod
    def handed(cls, views: DequantizeViews, problem: object, arrays: Sequence[Any]) -> list[Any]:
        """The result in the caller's axis order."""
        return _handed(cls._outputs(views), arrays)

    def scale(self, *numbers: float) -> None:
        """Set a per-tensor scale that is a number."""
        (self._record.factor_value,) = numbers

    def point(self, views: DequantizeViews, results: Sequence[int], workspace: int) -> None:
        """Set every address."""
        record = self._record
        record.packed, record.scales = views.packed.view.ptr, views.scales.view.ptr
        record.factor = _address(views.global_scale)
        (record.out,) = results


class Swizzle(Launches):
    """`swizzle_scales` on a GPU: a binding; see `cupymla.ops.gpu`."""

    _backwards = False

    def __init__(self, views: SwizzleViews, problem: object, results: Sequence[View], recorded: bool) -> None:
        device = views.scales.view.device
        (out,) = self._outputs(views)
        batches = views.out_shape[-1]
        self._record = SwizzleParameters(
            source_batch=views.scales.strides[-1],
            source_row=views.scales.strides[0],
            target_batch=out.strides[0],
            target_row=out.strides[1],
            rows=views.rows,
            columns=views.columns,
            batches=batches,
            backwards=int(self._backwards),
        )
        all_rows, all_columns = padded(views.rows, views.columns)
        source = plan.auxiliary("swizzle", driver.arch_of(device))
        super().__init__(_launcher(source, self._record, all_rows * all_columns // 4 * batches, device))

    @staticmethod
    def _outputs(views: SwizzleViews) -> list[_Matrix]:
        return [_Matrix(views.out, views.out_shape, views.scales.view.dtype, views.batch_first)]

    @classmethod
    def wanted(cls, views: SwizzleViews, problem: object) -> Results:
        """Shape and dtype of the result, as it is allocated."""
        return _wanted(*cls._outputs(views))

    @classmethod
    def handed(cls, views: SwizzleViews, problem: object, arrays: Sequence[Any]) -> list[Any]:
        """The result in the caller's axis order."""
        return _handed(cls._outputs(views), arrays)

    def point(self, views: SwizzleViews, results: Sequence[int], workspace: int) -> None:
        """Set every address."""
        self._record.source = views.scales.view.ptr
        (self._record.target,) = results


class Unswizzle(Swizzle):
    """`unswizzle_scales` on a GPU: a binding; see `cupymla.ops.gpu`."""

    _backwards = True
