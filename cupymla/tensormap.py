"""Tensor maps: what the Tensor Memory Accelerator needs to know of an array and of the tiles it copies from it.

The only caller of cuTensorMapEncodeTiled. A map is 128 opaque bytes; the type asks for an alignment of 64 bytes (128
since CUDA 13), which neither ctypes nor the bindings give, so the bytes lie in an aligned buffer of our own.

Source: CUDA Driver API reference, "Tensor Map Object Management", cuTensorMapEncodeTiled (CUDA 12.9); every limit
named there is checked here first, because the driver answers all of them with CUDA_ERROR_INVALID_VALUE.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from typing import NamedTuple

from . import driver
from .errors import InputError

BYTES = 128
"""Size of an encoded map, and the alignment it is given."""

_CACHED_MAPS = 256

# CUtensorMapDataType and bytes per element. Narrow floats travel as bytes: the copy does not look at them.
_TYPES: dict[str, tuple[int, int]] = {
    "uint8": (0, 1),
    "int8": (0, 1),
    "bool": (0, 1),
    "float8_e4m3fn": (0, 1),
    "float8_e5m2": (0, 1),
    "float8_e8m0fnu": (0, 1),
    "float4_e2m1fn_x2": (0, 1),
    "uint16": (1, 2),
    "int16": (1, 2),
    "uint32": (2, 4),
    "int32": (3, 4),
    "uint64": (4, 8),
    "int64": (5, 8),
    "float16": (6, 2),
    "float32": (7, 4),
    "float64": (8, 8),
    "bfloat16": (9, 2),
}
_NAN_FILLED = {"float16", "float32", "float64", "bfloat16"}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
_FILLS = {"zero": 0, "nan": 1}


def element_bytes(dtype: str) -> int:
    """Bytes that a map copies for one element of a dtype label."""
    return _TYPES[dtype][1]


class TileMap(NamedTuple):
    """A request for a tensor map. Innermost dimension first, as the hardware counts them.

    Attributes:
        ptr: device address of element 0, a multiple of 16.
        dtype: label of the element type. "float4_e2m1fn_x2" and the 8-bit floats are copied as bytes.
        shape: elements along each of 1 to 5 dimensions.
        strides_bytes: distance in bytes between neighbours along dimensions 1 and up; dimension 0 is contiguous.
        box: elements of one tile along each dimension, at most 256.
        swizzle: span in bytes of the shared-memory swizzle: 0 (none), 32, 64 or 128.
        l2_promotion: bytes that a miss brings into L2: 0 (no more than asked), 64, 128 or 256.
        fill: what elements outside the array read as: "zero", or "nan" (floating point only).
    """

    ptr: int
    dtype: str
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128
    l2_promotion: int = 256
    fill: str = "zero"


class EncodedMap:
    """An encoded tensor map.

    Attributes:
        address: host address of its 128 bytes, a multiple of 128; they are copied at each launch.
        request: what it was encoded from.
    """

    __slots__ = ("_buffer", "address", "request")

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(2 * BYTES - 1)
        self.address: int = -(-ctypes.addressof(self._buffer) // BYTES) * BYTES
        self.request: TileMap | None = None

    def _encode(self, request: TileMap) -> None:
        check(request)
        rank = len(request.shape)
        code = _encode_tiled()(
            self.address,
            _TYPES[request.dtype][0],
            rank,
            request.ptr,
            (ctypes.c_uint64 * rank)(*request.shape),
            (ctypes.c_uint64 * rank)(*request.strides_bytes),
            (ctypes.c_uint32 * rank)(*request.box),
            (ctypes.c_uint32 * rank)(*(1,) * rank),
            0,
            _SWIZZLES[request.swizzle],
            _L2_PROMOTIONS[request.l2_promotion],
            _FILLS[request.fill],
        )
        if code:
            raise driver.error(code, f"encoding {request}")
        self.request = request

    @property
    def data(self) -> bytes:
        """A copy of the 128 bytes."""
        return ctypes.string_at(self.address, BYTES)


def _encode_tiled() -> driver.RawFunction:
    pointer, word, enum = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int
    arguments = (pointer, enum, word, pointer, pointer, pointer, pointer, pointer, enum, enum, enum, enum)
    return driver.function("cuTensorMapEncodeTiled", *arguments)


def encode(request: TileMap) -> EncodedMap:
    """A new map. Needs a current context. Raises InputError and DriverError."""
    made = EncodedMap()
    made._encode(request)
    return made


class _Cache:
    """The last maps that were asked for. Memory pools hand out the same addresses again and again."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._maps: OrderedDict[TileMap, EncodedMap] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, request: TileMap) -> EncodedMap:
        with self._lock:
            found = self._maps.get(request)
            if found is not None:
                self._maps.move_to_end(request)
                return found
        made = encode(request)
        with self._lock:
            self._maps[request] = made
            if len(self._maps) > self._capacity:
                self._maps.popitem(last=False)
        return made

    def clear(self) -> None:
        with self._lock:
            self._maps.clear()


_cache = _Cache(_CACHED_MAPS)


def encoded(request: TileMap) -> EncodedMap:
    """The map of a request, from a small cache when it was asked for lately; shared by all who ask.

    A map says nothing about who owns the address: it stays right when the memory is freed and handed out again.
    Raises InputError and DriverError.
    """
    return _cache.get(request)


def check(request: TileMap) -> None:
    """Raise InputError for a request that cuTensorMapEncodeTiled would refuse."""
    rank = len(request.shape)
    if not 1 <= rank <= 5:
        _refuse("shape", "1 to 5 dimensions", request.shape)
    if len(request.strides_bytes) != rank - 1:
        _refuse("strides_bytes", f"{rank - 1} strides for {rank} dimensions", request.strides_bytes)
    if len(request.box) != rank:
        _refuse("box", f"{rank} extents for {rank} dimensions", request.box)
    if request.dtype not in _TYPES:
        _refuse("dtype", "one of " + ", ".join(_TYPES), request.dtype)
    if request.ptr % 16 or request.ptr <= 0:
        _refuse("ptr", "an address that is a multiple of 16 bytes", hex(request.ptr))
    if not all(1 <= extent <= 2**32 for extent in request.shape):
        _refuse("shape", "extents from 1 to 2**32", request.shape)
    if not all(0 <= stride < 2**40 and stride % 16 == 0 for stride in request.strides_bytes):
        _refuse("strides_bytes", "multiples of 16 bytes below 2**40", request.strides_bytes)
    if not all(1 <= extent <= 256 for extent in request.box):
        _refuse("box", "extents from 1 to 256", request.box)
    _check_modes(request)


def _check_modes(request: TileMap) -> None:
    if request.swizzle not in _SWIZZLES:
        _refuse("swizzle", "0, 32, 64 or 128 bytes", request.swizzle)
    if request.l2_promotion not in _L2_PROMOTIONS:
        _refuse("l2_promotion", "0, 64, 128 or 256 bytes", request.l2_promotion)
    if request.fill not in _FILLS:
        _refuse("fill", "'zero' or 'nan'", repr(request.fill))
    if request.fill == "nan" and request.dtype not in _NAN_FILLED:
        _refuse("fill", f"'zero' for {request.dtype}", "'nan'")
    inner_bytes = request.box[0] * _TYPES[request.dtype][1]
    if inner_bytes % 16:
        _refuse("box", "an innermost extent that is a multiple of 16 bytes", f"{request.box}, {inner_bytes} bytes")
    if request.swizzle and inner_bytes > request.swizzle:
        _refuse(
            "box",
            f"an innermost extent of at most {request.swizzle} bytes, the swizzle's span",
            f"{request.box}, {inner_bytes} bytes",
        )


def _refuse(field: str, expected: str, got: object) -> None:
    raise InputError(f"tensor map {field}", expected, got)
