"""What the model is told of tensor maps, whose 128 bytes only the TMA can read."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from cupymla.tensormap import BYTES, TileMap

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


@dataclass(frozen=True, slots=True)
class ForeignMap:
    """A tensor map that somebody else has encoded, such as CUTLASS's host code.

    Attributes:
        address: host address of its 128 bytes.
        ptr: device address of the tensor's first element.
        shape, strides_bytes, box, swizzle, fill: as in `cupymla.tensormap.TileMap`.
        element_bits: of an element, in which `shape`, `box` and a copy's coordinates count.
    """

    address: int
    ptr: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    element_bits: int
    swizzle: int = 128
    fill: str = "zero"


class TileInfo(ctypes.Structure):
    """`TileInfo` of cupymla_lab/emulate/model/state.cuh, 248 bytes."""

    _fields_ = (
        ("key", ctypes.c_ubyte * BYTES),
        ("pointer", ctypes.c_uint64),
        ("shape", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
        ("rank", ctypes.c_uint32),
        ("element_bits", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32),
        ("nan", ctypes.c_uint32),
        ("box", ctypes.c_uint32 * 5),
        ("reserved", ctypes.c_uint32),
    )


def table(parameters: Iterable[Any], maps: Iterable[KnownMap | ForeignMap]) -> ctypes.Array[TileInfo]:
    """The tensor maps among a kernel's parameters, and others that it reaches in other ways."""
    known = [each for each in (*parameters, *maps) if _told(each)]
    return (TileInfo * max(len(known), 1))(*map(_info, known))


def _told(known: Any) -> bool:
    return isinstance(known, ForeignMap) or isinstance(getattr(known, "request", None), TileMap)


def count(infos: ctypes.Array[TileInfo]) -> int:
    """How many maps a table holds."""
    return sum(info.rank != 0 for info in infos)


def _info(known: KnownMap | ForeignMap) -> TileInfo:
    request = known if isinstance(known, ForeignMap) else known.request
    assert request is not None
    rank = len(request.shape)
    info = TileInfo(pointer=request.ptr, rank=rank, swizzle=request.swizzle, nan=request.fill == "nan")
    bits = request.element_bits if isinstance(request, ForeignMap) else 8 * ELEMENT_BYTES[request.dtype]
    info.element_bits = bits
    info.key[:] = ctypes.string_at(known.address, BYTES)
    info.shape[:rank] = request.shape
    info.strides[: rank - 1] = request.strides_bytes
    info.box[:rank] = request.box
    return info
