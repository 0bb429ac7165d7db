"""Conversions. Source: PTX ISA 9.0, "cvt": rounding, saturation, packed formats of two numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..operands import Operands
from ..program import Step
from ..threads import Lanes
from ..traps import Unknown
from ..types import E4M3, E5M2, HALVES, TYPES, Array, DType, flushed, halves, is_float, joined, unsigned, wide
from .kit import Builder, Handler

_BYTE_PAIRS: dict[str, DType] = {"e4m3x2": E4M3, "e5m2x2": E5M2}
_LARGEST = {"e4m3x2": 448.0, "e5m2x2": 57344.0}
_TO_INTEGER: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


def _convert(operands: Operands, step: Step) -> Handler:
    known = {*TYPES, *_BYTE_PAIRS}
    kinds = [part for part in step.parts[1:] if part in known]
    if len(kinds) != 2 or [p for p in step.parts[1:] if p in ("tf32", "e2m1x2", "ue8m0x2", "pack")]:
        raise Unknown("a format of cvt")
    to, source = kinds
    if to in _BYTE_PAIRS:
        return _to_bytes(operands, step, to, source)
    if source in _BYTE_PAIRS:
        return _from_bytes(operands, step, to, source)
    if to in ("f16x2", "bf16x2"):
        return _to_pair(operands, step, to)
    return _scalar(operands, step, to, source)


def _relu(step: Step) -> Callable[[Array], Array]:
    return (lambda x: np.maximum(x, 0)) if "relu" in step.parts else lambda x: x


def _to_pair(operands: Operands, step: Step, to: str) -> Handler:
    """Two float32 numbers; the first operand becomes the upper half."""
    _require_nearest(step)
    upper, lower = operands.read(step.operands[1], "f32"), operands.read(step.operands[2], "f32")
    put, element, relu = operands.write(step.operands[0], "b32"), HALVES[to], _relu(step)
    return lambda lanes: put(lanes, joined(relu(np.stack([lower(lanes), upper(lanes)], 1)).astype(element)))


def _to_bytes(operands: Operands, step: Step, to: str, source: str) -> Handler:
    """Two numbers as 8-bit floats, the largest where they are larger (.satfinite, the only form there is)."""
    _require_nearest(step)
    put, element, largest, relu = operands.write(step.operands[0], "b16"), _BYTE_PAIRS[to], _LARGEST[to], _relu(step)
    if source == "f32":
        upper, lower = operands.read(step.operands[1], "f32"), operands.read(step.operands[2], "f32")

        def pairs(lanes: Lanes) -> Array:
            return np.stack([lower(lanes), upper(lanes)], 1)
    else:
        words = operands.read(step.operands[1], "b32")

        def pairs(lanes: Lanes) -> Array:
            return wide(halves(words(lanes), HALVES[source]))

    def run(lanes: Lanes) -> None:
        codes = np.ascontiguousarray(np.clip(relu(pairs(lanes)), -largest, largest).astype(element))
        put(lanes, codes.view(np.uint8).reshape(-1, 2).view(np.uint16).reshape(-1))

    return run


def _from_bytes(operands: Operands, step: Step, to: str, source: str) -> Handler:
    if to != "f16x2":
        raise Unknown("a format of cvt")
    codes, put, element = (
        operands.read(step.operands[1], "b16"),
        operands.write(step.operands[0], "b32"),
        _BYTE_PAIRS[source],
    )
    relu = _relu(step)

    def run(lanes: Lanes) -> None:
        numbers = np.ascontiguousarray(codes(lanes)).view(np.uint8).view(element).reshape(-1, 2)
        put(lanes, joined(relu(numbers.astype(np.float32)).astype(np.float16)))

    return run


def _require_nearest(step: Step) -> None:
    if "rz" in step.parts or "rs" in step.parts:
        raise Unknown("a rounding mode")


def _scalar(operands: Operands, step: Step, to: str, source: str) -> Handler:
    value, put = operands.read(step.operands[1], source), operands.write(step.operands[0], to)
    if is_float(source):
        function = _between_floats(step, to) if is_float(to) else _float_to_integer(step, to)
    elif is_float(to):
        function = _integer_to_float(step, to)
    else:
        function = _between_integers(step, to)
    return lambda lanes: put(lanes, function(value(lanes)))


def _between_integers(step: Step, to: str) -> Callable[[Array], Array]:
    dtype = TYPES[to]
    if "sat" not in step.parts:
        return lambda x: x.astype(dtype)
    limits = np.iinfo(dtype)

    def saturate(x: Array) -> Array:
        low = max(int(limits.min), int(np.iinfo(x.dtype).min))
        high = min(int(limits.max), int(np.iinfo(x.dtype).max))
        return np.clip(x, low, high).astype(dtype)

    return saturate


def _integer_to_float(step: Step, to: str) -> Callable[[Array], Array]:
    _require_nearest(step)
    dtype = TYPES[to]
    if to in HALVES:
        # Through float64, which holds 32-bit integers; longer ones would be rounded twice.
        return lambda x: x.astype(np.float64).astype(dtype)
    return lambda x: x.astype(dtype)


def _float_to_integer(step: Step, to: str) -> Callable[[Array], Array]:
    dtype = TYPES[to]
    limits = np.iinfo(dtype)
    mode = next(_TO_INTEGER[part] for part in step.parts if part in _TO_INTEGER)
    # The largest 64-bit integers are no float64 numbers: at and above the limit is told by comparison.
    low, high = float(limits.min), float(limits.max)

    def convert(x: Array) -> Array:
        y = mode((flushed(x) if "ftz" in step.parts else x).astype(np.float64))
        inside = np.where(np.isnan(y) | (y <= low) | (y >= high), 0.0, y).astype(dtype)
        out = np.where(y >= high, limits.max, np.where(y <= low, limits.min, inside)).astype(dtype)
        # NaN becomes 0, but for 64-bit results, where hardware gives the sign bit alone.
        return np.where(np.isnan(y), 0 if dtype.itemsize < 8 else np.array(2**63, np.uint64).view(dtype), out)

    return convert


def _between_floats(step: Step, to: str) -> Callable[[Array], Array]:
    dtype = TYPES[to]
    parts = step.parts
    integral = next((_TO_INTEGER[part] for part in parts if part in _TO_INTEGER), None)

    def convert(x: Array) -> Array:
        y: Array = x.astype(np.float64)
        if "ftz" in parts and x.dtype.itemsize == 4:
            y = flushed(x).astype(np.float64)
        if integral is not None:
            y = integral(y)
        if "sat" in parts:
            y = np.clip(np.nan_to_num(y, nan=0.0), 0, 1)
        if "relu" in parts:
            y = np.maximum(y, 0)
        if any(mode in parts for mode in ("rz", "rm", "rp")):
            return _directed(y, dtype, parts)
        # A float64 source is rounded to a half format once, not through float32.
        return y.astype(dtype) if x.dtype.itemsize == 8 or dtype.itemsize >= 4 else y.astype(np.float32).astype(dtype)

    return convert


def _directed(y: Array, dtype: DType, parts: tuple[str, ...]) -> Array:
    """Rounded towards zero, down or up."""
    z = y.astype(dtype)
    back = z.astype(np.float64)
    word = unsigned(dtype.itemsize)
    bits = z.view(word)
    larger = np.abs(back) > np.abs(y)
    if "rz" in parts:
        inward, outward = larger, np.zeros(len(y), np.bool_)
    else:
        up = "rp" in parts
        wrong = back < y if up else back > y
        inward, outward = wrong & larger, wrong & ~larger
        zero = outward & (back == 0)
        if zero.any():
            raise Unknown("a directed rounding of a number that underflows")
    moved: Array = (bits - inward.astype(word) + outward.astype(word)).view(dtype)
    return moved


HANDLERS: dict[str, Builder] = {"cvt": _convert}
