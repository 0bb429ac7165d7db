"""Logic, shifts and bit fields.

Source: PTX ISA 9.0, "Logic and Shift Instructions", "Integer Arithmetic Instructions" (bfe, bfi, popc, clz, bfind,
brev), "Data Movement" (prmt).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...ptx.syntax import Constant
from ..operands import Operands, integer, number
from ..program import Step
from ..threads import Lanes
from ..traps import Unknown
from ..types import TYPES, Array, unsigned
from .kit import Builder, Handler, elementwise, kind_of


def _logic(function: Callable[..., Array]) -> Builder:
    return lambda operands, step: elementwise(operands, step, kind_of(step), function)


def _shift(operands: Operands, step: Step) -> Handler:
    kind = kind_of(step)
    dtype = TYPES[kind]
    bits = 8 * dtype.itemsize
    value, by = operands.read(step.operands[1], kind), operands.read(step.operands[2], "u32")
    put = operands.write(step.operands[0], kind)
    left, signed = step.parts[0] == "shl", kind.startswith("s")
    fixed = integer(step.operands[2].text) if isinstance(step.operands[2], Constant) else None
    if fixed is not None and 0 <= fixed < bits:
        distance = dtype.type(fixed)
        if left:
            return lambda lanes: put(lanes, value(lanes) << distance)
        return lambda lanes: put(lanes, value(lanes) >> distance)

    def run(lanes: Lanes) -> None:
        x, k = value(lanes), by(lanes)
        # Shifts of the whole width and more are defined in PTX, but not in NumPy.
        capped = np.minimum(k, bits - 1).astype(dtype)
        shifted = x << capped if left else x >> capped
        if left or not signed:
            shifted = np.where(k < bits, shifted, dtype.type(0))
        put(lanes, shifted)

    return run


def _funnel(operands: Operands, step: Step) -> Handler:
    low, high, by = (operands.read(operand, "u32") for operand in step.operands[1:4])
    put = operands.write(step.operands[0], "u32")
    left, clamp = "l" in step.parts, "clamp" in step.parts

    def run(lanes: Lanes) -> None:
        k = by(lanes).astype(np.uint64)
        k = np.minimum(k, np.uint64(32)) if clamp else k & np.uint64(31)
        both = low(lanes).astype(np.uint64) | (high(lanes).astype(np.uint64) << np.uint64(32))
        put(lanes, ((both << k) >> np.uint64(32) if left else both >> k).astype(np.uint32))

    return run


def _permute(operands: Operands, step: Step) -> Handler:
    if step.parts[-1] != "b32" or len(step.parts) != 2:
        raise Unknown("a mode of prmt")
    first, second, selector = (operands.read(operand, "u32") for operand in step.operands[1:4])
    put = operands.write(step.operands[0], "u32")

    def run(lanes: Lanes) -> None:
        bytes_ = np.stack([first(lanes), second(lanes)], 1).view(np.uint8).reshape(lanes.count, 8)
        select = selector(lanes)
        rows, out = np.arange(lanes.count), np.empty((lanes.count, 4), np.uint8)
        for k in range(4):
            nibble = (select >> np.uint32(4 * k)) & np.uint32(15)
            chosen = bytes_[rows, nibble & 7]
            out[:, k] = np.where(nibble & 8, np.where(chosen & 0x80, 255, 0), chosen)
        put(lanes, out.view(np.uint32).reshape(-1))

    return run


def _three_inputs(operands: Operands, step: Step) -> Handler:
    table = number(step.operands[4])

    def lookup(a: Array, b: Array, c: Array) -> Array:
        out = np.zeros(len(a), np.uint32)
        for k in range(8):
            if table >> k & 1:
                out |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
        return out

    sources = [operands.read(operand, "u32") for operand in step.operands[1:4]]
    put = operands.write(step.operands[0], "u32")
    return lambda lanes: put(lanes, lookup(*[get(lanes) for get in sources]))


def _mask(length: Array) -> Array:
    """As many ones as `length` says, in uint64."""
    short = np.minimum(length, np.uint64(63))
    full: Array = np.where(length >= 64, np.uint64(2**64 - 1), (np.uint64(1) << short) - np.uint64(1))
    return full


def _extract(operands: Operands, step: Step) -> Handler:
    kind = kind_of(step)
    dtype, bits = TYPES[kind], 8 * TYPES[kind].itemsize
    value = operands.read(step.operands[1], f"u{bits}")
    start, length = operands.read(step.operands[2], "u32"), operands.read(step.operands[3], "u32")
    put = operands.write(step.operands[0], kind)

    def run(lanes: Lanes) -> None:
        x = value(lanes).astype(np.uint64)
        at, size = (start(lanes) & 255).astype(np.uint64), (length(lanes) & 255).astype(np.uint64)
        field = np.where(at < bits, x >> np.minimum(at, np.uint64(63)), np.uint64(0)) & _mask(size)
        if kind.startswith("s"):
            # The sign is the field's last bit, or the value's where the field reaches past it.
            last = np.minimum(at + size - np.uint64(1), np.uint64(bits - 1))
            negative = (size > 0) & ((x >> last) & np.uint64(1)).astype(np.bool_)
            inside = np.where(at + size > bits, np.maximum(np.int64(bits) - at.astype(np.int64), 0), size)
            field = np.where(negative, field | ~_mask(inside.astype(np.uint64)), field)
        put(lanes, field.astype(unsigned(dtype.itemsize)).view(dtype))

    return run


def _insert(operands: Operands, step: Step) -> Handler:
    kind = kind_of(step)
    bits, word = 8 * TYPES[kind].itemsize, unsigned(TYPES[kind].itemsize)
    field, base = operands.read(step.operands[1], kind), operands.read(step.operands[2], kind)
    start, length = operands.read(step.operands[3], "u32"), operands.read(step.operands[4], "u32")
    put = operands.write(step.operands[0], kind)

    def run(lanes: Lanes) -> None:
        at, size = (start(lanes) & 255).astype(np.uint64), (length(lanes) & 255).astype(np.uint64)
        shift = np.minimum(at, np.uint64(63))
        mask = np.where(at < bits, _mask(size) << shift, np.uint64(0))
        x, y = field(lanes).astype(np.uint64), base(lanes).astype(np.uint64)
        put(lanes, ((y & ~mask) | ((x << shift) & mask)).astype(word))

    return run


def _length(x: Array, bits: int) -> Array:
    """The number of bits up to the highest one set, 0 for 0."""
    out = np.zeros(len(x), np.int64)
    for k in range(bits):
        out = np.where((x >> np.uint64(k)) & np.uint64(1), k + 1, out)
    return out


def _count(operands: Operands, step: Step) -> Handler:
    """popc, clz, bfind and brev."""
    kind, name = kind_of(step), step.parts[0]
    bits, shift = 8 * TYPES[kind].itemsize, "shiftamt" in step.parts
    value = operands.read(step.operands[1], f"u{bits}")
    put = operands.write(step.operands[0], kind if name == "brev" else "u32")

    def run(lanes: Lanes) -> None:
        x = value(lanes).astype(np.uint64)
        if name == "bfind" and kind.startswith("s"):
            negative = (x >> np.uint64(bits - 1)) & np.uint64(1)
            x = np.where(negative, ~x & _mask(np.full(len(x), bits, np.uint64)), x)
        if name in ("popc", "brev"):
            ones = [(x >> np.uint64(k)) & np.uint64(1) for k in range(bits)]
        if name == "popc":
            result = np.add.reduce(ones).astype(np.uint32)
        elif name == "brev":
            reverse = np.zeros(len(x), np.uint64)
            for k, one in enumerate(ones):
                reverse |= one << np.uint64(bits - 1 - k)
            result = reverse.astype(unsigned(bits // 8))
        else:
            length = _length(x, bits)
            found = bits - length if name == "clz" or shift else length - 1
            result = np.where((length == 0) & (name == "bfind"), -1, found).astype(np.uint32)
        put(lanes, result)

    return run


def _not(operands: Operands, step: Step) -> Handler:
    return elementwise(operands, step, kind_of(step), np.invert)


def _conditional_not(operands: Operands, step: Step) -> Handler:
    kind = kind_of(step)
    return elementwise(operands, step, kind, lambda x: (x == 0).astype(TYPES[kind]))


HANDLERS: dict[str, Builder] = {
    "and": _logic(np.bitwise_and),
    "or": _logic(np.bitwise_or),
    "xor": _logic(np.bitwise_xor),
    "not": _not,
    "cnot": _conditional_not,
    "shl": _shift,
    "shr": _shift,
    "shf": _funnel,
    "prmt": _permute,
    "lop3": _three_inputs,
    "bfe": _extract,
    "bfi": _insert,
    "popc": _count,
    "clz": _count,
    "bfind": _count,
    "brev": _count,
}
