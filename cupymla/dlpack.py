"""DLPack from ctypes: reading capsules, calling the C exchange API, and exporting memory of our own.

No framework is imported, and no array is copied. Source of all layouts, codes and rules: dlpack.h 1.3
(https://github.com/dmlc/dlpack) and the Python specification of the protocol
(https://dmlc.github.io/dlpack/latest/python_spec.html).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

MAX_VERSION = (1, 3)
"""The newest DLPack version whose meaning is known here."""

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
DEVICE_NAMES = {4: "OpenCL", 7: "Vulkan", 8: "Metal", 9: "VPI", 10: "ROCm", 11: "ROCm host", 12: "an extension device"}
DEVICE_NAMES |= {14: "oneAPI", 15: "WebGPU", 16: "Hexagon", 17: "MAIA", 18: "Trainium"}

READ_ONLY, IS_COPIED, SUBBYTE_PADDED = 1, 2, 4
"""Bits of a versioned capsule's flags. SUBBYTE_PADDED: each 4- or 6-bit number has a byte of its own."""


class DLDevice(ctypes.Structure):
    """DLDevice: kind of device and its ordinal."""

    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class DLDataType(ctypes.Structure):
    """DLDataType: type code, bits per lane, lanes per element."""

    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    """DLTensor: strides count elements, and NULL strides mean a C-contiguous array (before version 1.2)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    """What a "dltensor" capsule points at."""

    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class DLManagedTensorVersioned(ctypes.Structure):
    """What a "dltensor_versioned" capsule points at."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


# (code, bits, lanes) of each label. Narrow floats have a code of their own, which implies the bits.
CODES: dict[str, tuple[int, int, int]] = {
    **{f"int{bits}": (0, bits, 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (1, bits, 1) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (2, bits, 1) for bits in (16, 32, 64)},
    "bfloat16": (4, 16, 1),
    "complex64": (5, 64, 1),
    "complex128": (5, 128, 1),
    "bool": (6, 8, 1),
    "float8_e3m4": (7, 8, 1),
    "float8_e4m3": (8, 8, 1),
    "float8_e4m3b11fnuz": (9, 8, 1),
    "float8_e4m3fn": (10, 8, 1),
    "float8_e4m3fnuz": (11, 8, 1),
    "float8_e5m2": (12, 8, 1),
    "float8_e5m2fnuz": (13, 8, 1),
    "float8_e8m0fnu": (14, 8, 1),
    "float4_e2m1fn_x2": (17, 4, 2),
}
_LABELS = {code: label for label, code in CODES.items()}
_PADDED_LABELS = {(15, 6, 1): "float6_e2m3fn", (16, 6, 1): "float6_e3m2fn", (17, 4, 1): "float4_e2m1fn"}
_PACKED_FP4 = (17, 4, 1)


class FormatError(ValueError):
    """A DLPack tensor that this package cannot describe; says what it has."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a DLTensor says, with every default filled in.

    Attributes:
        ptr: address of element 0.
        shape, strides: per axis, strides in elements.
        dtype: label; two packed 4-bit numbers count as one element "float4_e2m1fn_x2".
        kind, index: DLPack device type and ordinal.
        flags: those of a versioned capsule, else 0.
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    kind: int
    index: int
    flags: int


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of a C-contiguous array. An empty axis counts as one element."""
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def describe(tensor: DLTensor, flags: int = 0) -> Seen:
    """What a DLTensor says. Raises FormatError for an element type without a label."""
    ndim = tensor.ndim
    shape = tuple(tensor.shape[:ndim])
    strides = tuple(tensor.strides[:ndim]) if tensor.strides else contiguous_strides(shape)
    code = (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
    if flags & SUBBYTE_PADDED and code in _PADDED_LABELS:
        label = _PADDED_LABELS[code]
    elif code == _PACKED_FP4:
        label = "float4_e2m1fn_x2"
        shape, strides = _pairs(shape, strides)
    elif code in _LABELS:
        label = _LABELS[code]
    else:
        raise FormatError("DLPack type code {}, {} bits, {} lanes".format(*code))
    ptr = (tensor.data or 0) + tensor.byte_offset
    return Seen(ptr, shape, strides, label, tensor.device.kind, tensor.device.index, flags)


def _pairs(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of packed 4-bit numbers, counted in pairs along the last axis."""
    if not shape or shape[-1] % 2 or strides[-1] != 1 or any(stride % 2 for stride in strides[:-1]):
        raise FormatError(f"4-bit numbers that do not pair up along the last axis: shape {shape}, strides {strides}")
    return (*shape[:-1], shape[-1] // 2), (*(stride // 2 for stride in strides[:-1]), 1)


_api = ctypes.PyDLL(None)


def _python(name: str, result: Any, *arguments: Any) -> Any:
    prototype = ctypes.PYFUNCTYPE(result, *arguments)
    return prototype((name, _api))


_get_pointer = _python("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_is_valid = _python("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_new_capsule = _python("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
# A dying capsule must not be given a new reference, so the destructor handles it by address.
_dying_is_valid = _python("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_dying_pointer = _python("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
_incref = _python("Py_IncRef", None, ctypes.py_object)
_decref = _python("Py_DecRef", None, ctypes.py_object)


def read_capsule(capsule: object) -> Seen:
    """What an unconsumed DLPack capsule says. The capsule stays the caller's, and keeps the memory alive.

    Raises FormatError.
    """
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = DLManagedTensorVersioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != MAX_VERSION[0]:
            raise FormatError(f"DLPack version {versioned.major}.{versioned.minor}")
        return describe(versioned.tensor, versioned.flags)
    if _is_valid(capsule, b"dltensor"):
        return describe(DLManagedTensor.from_address(_get_pointer(capsule, b"dltensor")).tensor)
    raise FormatError("an object that is no fresh DLPack capsule")


def request(array: Any) -> tuple[Seen, object]:
    """Ask an array for a capsule and read it: what it says, and the capsule, to be kept as long as the memory is used.

    On a CUDA device the producer makes the legacy default stream wait for the array's pending writes (`stream=1`).
    Raises FormatError, and whatever the producer raises.
    """
    kind, _ = array.__dlpack_device__()
    arguments = {"stream": 1} if int(kind) in (CUDA, CUDA_MANAGED) else {}
    try:
        capsule = array.__dlpack__(**arguments, max_version=MAX_VERSION)
    except TypeError:
        # Producers older than version 1.0 do not know max_version.
        capsule = array.__dlpack__(**arguments)
    return read_capsule(capsule), capsule


class _ExchangeApi(ctypes.Structure):
    """DLPackExchangeAPI of major version 1: header, then five functions."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("export_managed", ctypes.c_void_p),
        ("import_managed", ctypes.c_void_p),
        ("export_tensor", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    )


class Exchange:
    """The C exchange API of one array type: a view without a capsule, and the framework's current stream."""

    def __init__(self, table: _ExchangeApi) -> None:
        # PYFUNCTYPE keeps the GIL and raises the exception that the function sets.
        export = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
        stream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
        self._export = export(table.export_tensor)
        self._stream = stream(table.current_stream)

    def see(self, array: object) -> Seen:
        """What the array says, without synchronisation. Raises FormatError, and whatever the framework raises."""
        tensor = DLTensor()
        if self._export(array, tensor):
            raise FormatError("an array that the DLPack C exchange API refuses")
        return describe(tensor)

    def current_stream(self, kind: int, index: int) -> int:
        """The framework's current stream on a DLPack device, as an address; 0 is the default stream."""
        stream = ctypes.c_void_p()
        if self._stream(kind, index, stream):
            raise FormatError(f"no current stream on DLPack device {kind}:{index}")
        return stream.value or 0


def exchange(array_type: type) -> Exchange | None:
    """The exchange API of an array type, or None when it offers none that is understood here."""
    capsule = getattr(array_type, "__dlpack_c_exchange_api__", None)
    if capsule is None or not _is_valid(capsule, b"dlpack_exchange_api"):
        return None
    address: int | None = _get_pointer(capsule, b"dlpack_exchange_api")
    while address:
        table = _ExchangeApi.from_address(address)
        if table.major == MAX_VERSION[0]:
            return Exchange(table) if table.export_tensor and table.current_stream else None
        address = table.previous
    return None


class _Export:
    """One exported capsule: the C structures, and the owner of the memory they describe.

    A consumer holds it alive through one counted reference, whose address is the managed tensor's context.
    """

    def __init__(self, seen: Seen, owner: object, versioned: bool) -> None:
        ndim = len(seen.shape)
        extents = ctypes.c_int64 * ndim
        self._owner = owner
        self._shape = extents(*seen.shape)
        self._strides = extents(*seen.strides)
        tensor = DLTensor(
            seen.ptr,
            DLDevice(seen.kind, seen.index),
            ndim,
            DLDataType(*CODES[seen.dtype]),
            ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64)),
            ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64)),
            0,
        )
        self._managed: DLManagedTensor | DLManagedTensorVersioned
        if versioned:
            self._managed = DLManagedTensorVersioned(
                *MAX_VERSION, id(self), ctypes.cast(_DELETE_VERSIONED, ctypes.c_void_p), seen.flags, tensor
            )
        else:
            self._managed = DLManagedTensor(tensor, id(self), ctypes.cast(_DELETE, ctypes.c_void_p))

    def capsule(self, name: bytes) -> object:
        made = _new_capsule(ctypes.addressof(self._managed), name, ctypes.cast(_DESTROY, ctypes.c_void_p))
        _incref(self)
        return made


def _release(context: int) -> None:
    export = ctypes.cast(context, ctypes.py_object).value
    _decref(export)


def _delete(managed: int) -> None:
    _release(DLManagedTensor.from_address(managed).context)


def _delete_versioned(managed: int) -> None:
    _release(DLManagedTensorVersioned.from_address(managed).context)


def _destroy(capsule: int) -> None:
    """Run the deleter of a capsule that nobody consumed; a consumer renames the capsule it takes."""
    if _dying_is_valid(capsule, b"dltensor"):
        _release(DLManagedTensor.from_address(_dying_pointer(capsule, b"dltensor")).context)
    elif _dying_is_valid(capsule, b"dltensor_versioned"):
        address = _dying_pointer(capsule, b"dltensor_versioned")
        _release(DLManagedTensorVersioned.from_address(address).context)


_DELETE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete)
_DELETE_VERSIONED = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete_versioned)
_DESTROY = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_destroy)


def export(seen: Seen, owner: object, versioned: bool) -> object:
    """A fresh capsule for memory that lives as long as `owner` does; `owner` is held until the consumer is done."""
    name = b"dltensor_versioned" if versioned else b"dltensor"
    return _Export(seen, owner, versioned).capsule(name)
