"""Integer and floating-point arithmetic.

Results are correctly rounded, the approximate functions too, where hardware allows a few units in the last place, but
for ex2.approx.f32, which strays as the machine's layout says (`ptx.approximation`); fma rounds through float64, which
 can differ from one rounding where the sum is within 2**-29 units of a tie.
Source: PTX ISA 9.0, "Integer Arithmetic Instructions", "Floating Point Instructions", "Half Precision ...".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...ptx.approximation import strayed
from ..operands import Operands
from ..program import Step
from ..threads import Lanes
from ..traps import Unknown
from ..types import TYPES, Array, flushed, is_float
from .kit import Builder, Handler, elementwise, kind_of

_WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


def _modified(step: Step, function: Callable[..., Array]) -> Callable[..., Array]:
    """With the modifiers of a float operation: .ftz on sources and result, .sat, .relu."""
    parts = step.parts
    kind = parts[-1]
    if "ftz" in parts and kind == "f32":
        inner = function

        def flush(*values: Array) -> Array:
            return flushed(inner(*map(flushed, values)).astype(np.float32))

        function = flush
    if "sat" in parts and is_float(kind):
        plain = function
        return lambda *values: np.clip(np.nan_to_num(plain(*values), nan=0.0), 0, 1)
    if "relu" in parts:
        signed = function
        return lambda *values: np.maximum(signed(*values), 0)
    return function


def _two(function: Callable[..., Array]) -> Builder:
    def build(operands: Operands, step: Step) -> Handler:
        parts = step.parts
        if len(step.operands) != 3 or "cc" in parts:
            raise Unknown("carries")
        if any(mode in parts for mode in ("rz", "rm", "rp")) or ("sat" in parts and not is_float(parts[-1])):
            raise Unknown("a rounding mode or a saturation")
        return elementwise(operands, step, kind_of(step), _modified(step, function))

    return build


def _multiply(operands: Operands, step: Step) -> Handler:
    kind = kind_of(step)
    if is_float(kind):
        return _two(np.multiply)(operands, step)
    if "wide" in step.parts:
        return _wide(operands, step, kind, add=False)
    if "hi" in step.parts:
        return elementwise(operands, step, kind, lambda a, b: _high(a, b, kind))
    return elementwise(operands, step, kind, np.multiply)


def _high(a: Array, b: Array, kind: str) -> Array:
    dtype = TYPES[kind]
    if dtype.itemsize < 8:
        double = TYPES[_WIDE[kind]]
        shift = double.type(8 * dtype.itemsize)
        upper: Array = ((a.astype(double) * b.astype(double)) >> shift).astype(dtype)
        return upper
    products = [(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=True)]
    return np.array([p % 2**64 for p in products], np.uint64).view(dtype)


def _wide(operands: Operands, step: Step, kind: str, add: bool) -> Handler:
    double = _WIDE[kind]
    dtype = TYPES[double]
    first, second = operands.read(step.operands[1], kind), operands.read(step.operands[2], kind)
    put = operands.write(step.operands[0], double)
    if not add:
        return lambda lanes: put(lanes, first(lanes).astype(dtype) * second(lanes).astype(dtype))
    third = operands.read(step.operands[3], double)
    return lambda lanes: put(lanes, first(lanes).astype(dtype) * second(lanes).astype(dtype) + third(lanes))


def _multiply_add(operands: Operands, step: Step) -> Handler:
    kind = kind_of(step)
    if any(mode in step.parts for mode in ("rz", "rm", "rp", "cc")):
        raise Unknown("a rounding mode or carries")
    if kind == "f32":
        return elementwise(operands, step, kind, _modified(step, _fused))
    if is_float(kind):
        return elementwise(operands, step, kind, _modified(step, _fused_wide))
    if "wide" in step.parts:
        return _wide(operands, step, kind, add=True)
    if "hi" in step.parts:
        return elementwise(operands, step, kind, lambda a, b, c: _high(a, b, kind) + c)
    return elementwise(operands, step, kind, lambda a, b, c: a * b + c)


def _fused_wide(a: Array, b: Array, c: Array) -> Array:
    return a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)


def _fused(a: Array, b: Array, c: Array) -> Array:
    return _fused_wide(a, b, c).astype(np.float32)


def _divide(operands: Operands, step: Step) -> Handler:
    kind = kind_of(step)
    if is_float(kind):
        return _two(np.divide)(operands, step)
    want_rest = step.parts[0] == "rem"

    def divide(a: Array, b: Array) -> Array:
        # The quotient by zero is unspecified; it must only not stop the machine.
        divisor = np.where(b == 0, b.dtype.type(1), b)
        quotient = a // divisor
        rest = a - quotient * divisor
        # NumPy rounds down, PTX towards zero.
        away = (rest != 0) & ((a < 0) != (divisor < 0))
        quotient = quotient + away.astype(a.dtype)
        result: Array = a - quotient * divisor if want_rest else quotient
        return result

    return elementwise(operands, step, kind, divide)


def _extreme(plain: Callable[..., Array], numbers: Callable[..., Array]) -> Builder:
    def build(operands: Operands, step: Step) -> Handler:
        kind = kind_of(step)
        # Without .NaN, a NaN beside a number gives the number.
        two = plain if not is_float(kind) or "NaN" in step.parts else numbers
        function = two if len(step.operands) == 3 else lambda a, b, c: two(two(a, b), c)
        return elementwise(operands, step, kind, _modified(step, function))

    return build


def _one(function: Callable[[Array], Array]) -> Builder:
    return lambda operands, step: elementwise(operands, step, kind_of(step), _modified(step, function))


def _in_float64(function: Callable[[Array], Array]) -> Builder:
    """A function of a float32 or narrower number, rounded once."""

    def rounded(x: Array) -> Array:
        return function(x.astype(np.float64)).astype(x.dtype)

    return _one(rounded)


def _exponential(operands: Operands, step: Step) -> Handler:
    if kind_of(step) != "f32":
        return _in_float64(np.exp2)(operands, step)
    source, put = operands.read(step.operands[1], "f32"), operands.write(step.operands[0], "f32")
    exact = _modified(step, lambda x: np.exp2(x.astype(np.float64)).astype(np.float32))
    flushes = "ftz" in step.parts

    def run(lanes: Lanes) -> None:
        argument = flushed(source(lanes)) if flushes else source(lanes)
        put(lanes, strayed(argument, exact(argument), lanes.group.machine.layout.approximation))

    return run


def _sad(a: Array, b: Array, c: Array) -> Array:
    return c + np.where(a < b, b - a, a - b)


def _dot_of_bytes(operands: Operands, step: Step) -> Handler:
    kinds = [np.int8 if part.startswith("s") else np.uint8 for part in step.parts[1:3]]
    words = [operands.read(operand, "u32") for operand in step.operands[1:3]]
    third, put = operands.read(step.operands[3], "s32"), operands.write(step.operands[0], "s32")

    def run(lanes: Lanes) -> None:
        a, b = (
            np.ascontiguousarray(get(lanes)).view(kind).reshape(-1, 4).astype(np.int32)
            for get, kind in zip(words, kinds, strict=True)
        )
        put(lanes, third(lanes) + (a * b).sum(1, dtype=np.int32))

    return run


HANDLERS: dict[str, Builder] = {
    "add": _two(np.add),
    "sub": _two(np.subtract),
    "mul": _multiply,
    "mad": _multiply_add,
    "fma": _multiply_add,
    "div": _divide,
    "rem": _divide,
    "min": _extreme(np.minimum, np.fmin),
    "max": _extreme(np.maximum, np.fmax),
    "abs": _one(np.abs),
    "neg": _one(np.negative),
    "sqrt": _in_float64(np.sqrt),
    "rcp": _in_float64(lambda x: 1 / x),
    "rsqrt": _in_float64(lambda x: 1 / np.sqrt(x)),
    "ex2": _exponential,
    "lg2": _in_float64(np.log2),
    "sin": _in_float64(np.sin),
    "cos": _in_float64(np.cos),
    "tanh": _in_float64(np.tanh),
    "copysign": lambda operands, step: elementwise(operands, step, kind_of(step), lambda a, b: np.copysign(b, a)),
    "sad": lambda operands, step: elementwise(operands, step, kind_of(step), _sad),
    "dp4a": _dot_of_bytes,
}
