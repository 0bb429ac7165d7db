"""What the model is told of tensor maps, whose 128 bytes only the TMA can read."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, Protocol

from ..tensormap import BYTES, TileMap

ELEMENT_BYTES = {"uint8": 1, "int8": 1, "bool": 1, "float4_e2m1fn_x2": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}
ELEMENT_BYTES |= {"float8_e8m0fnu": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2, "uint32": 4, "int32": 4}
ELEMENT_BYTES |= {"float32": 4, "uint64": 8, "int64": 8, "float64": 8}


class KnownMap(Protocol):
    """An encoded tensor map that remembers its request, such as `cupymla.tensormap.EncodedMap`."""

    @property
    def address(self) -> int:
        """Host address of its 128 bytes."""

    @property
    def request(self) -> TileMap | None:
        """What it was encoded from."""


class TileInfo(ctypes.Structure):
    """`TileInfo` of cuda/emulate/state.cuh, 248 bytes."""

    _fields_ = (
        ("key", ctypes.c_ubyte * BYTES),
        ("pointer", ctypes.c_uint64),
        ("shape", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
        ("rank", ctypes.c_uint32),
        ("element_bytes", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32),
        ("nan", ctypes.c_uint32),
        ("box", ctypes.c_uint32 * 5),
        ("reserved", ctypes.c_uint32),
    )


def table(parameters: Iterable[Any], maps: Iterable[KnownMap]) -> ctypes.Array[TileInfo]:
    """The tensor maps among a kernel's parameters, and others that it reaches in other ways."""
    known = [each for each in (*parameters, *maps) if isinstance(getattr(each, "request", None), TileMap)]
    return (TileInfo * max(len(known), 1))(*map(_info, known))


def count(infos: ctypes.Array[TileInfo]) -> int:
    """How many maps a table holds."""
    return sum(info.rank != 0 for info in infos)


def _info(known: KnownMap) -> TileInfo:
    request = known.request
    assert request is not None
    rank = len(request.shape)
    info = TileInfo(pointer=request.ptr, rank=rank, swizzle=request.swizzle, nan=request.fill == "nan")
    info.element_bytes = ELEMENT_BYTES[request.dtype]
    info.key[:] = ctypes.string_at(known.address, BYTES)
    info.shape[:rank] = request.shape
    info.strides[: rank - 1] = request.strides_bytes
    info.box[:rank] = request.box
    return info
