"""Matrix products of one warp: mma.sync.m16n8k8 and m16n8k16 of 16-bit floats, m16n8k32 of signed bytes.

Of floats, products and sums are exact (float64) and rounded once; tensor cores round more often, and differently.
Source: PTX ISA 9.0, "mma", with the fragment layouts of "Matrix Fragments for mma.m16n8k16" and
"Matrix Fragments for mma.m16n8k32".
"""

from __future__ import annotations

import numpy as np

from ..operands import Getter, Operands, Setter, items
from ..outcomes import BLOCK
from ..program import Step
from ..threads import Lanes
from ..traps import Trap, Unknown
from ..types import F16, HALVES, Array, DType, halves, joined, wide
from .kit import Builder, Handler

_LANE = np.arange(32)
_GROUP = _LANE // 4
_COLUMN = 2 * (_LANE % 4)


def _pairs(get: Getter, lanes: Lanes, element: DType) -> Array:
    """A fragment register as `[warps, 32, 2]` float32 numbers."""
    return wide(halves(get(lanes), element)).reshape(-1, 32, 2)


def _operand_a(registers: list[Getter], lanes: Lanes, element: DType) -> Array:
    warps = lanes.count // 32
    a = np.empty((warps, 16, 4 * len(registers)), np.float32)
    for k, get in enumerate(registers):
        pair = _pairs(get, lanes, element)
        row, column = _GROUP + 8 * (k % 2), _COLUMN + 8 * (k // 2)
        a[:, row, column], a[:, row, column + 1] = pair[:, :, 0], pair[:, :, 1]
    return a


def _operand_b(registers: list[Getter], lanes: Lanes, element: DType) -> Array:
    warps = lanes.count // 32
    b = np.empty((warps, 8 * len(registers), 8), np.float32)
    for k, get in enumerate(registers):
        pair = _pairs(get, lanes, element)
        row = _COLUMN + 8 * k
        b[:, row, _GROUP], b[:, row + 1, _GROUP] = pair[:, :, 0], pair[:, :, 1]
    return b


def _accumulators(registers: list[Getter], lanes: Lanes, single: bool) -> Array:
    c = np.empty((lanes.count // 32, 16, 8), np.float64)
    for k, get in enumerate(registers):
        if single:
            c[:, _GROUP + 8 * (k // 2), _COLUMN + k % 2] = get(lanes).reshape(-1, 32)
        else:
            pair = _pairs(get, lanes, F16)
            row = _GROUP + 8 * k
            c[:, row, _COLUMN], c[:, row, _COLUMN + 1] = pair[:, :, 0], pair[:, :, 1]
    return c


def _write(registers: list[Setter], lanes: Lanes, d: Array, single: bool) -> None:
    for k, put in enumerate(registers):
        if single:
            put(lanes, d[:, _GROUP + 8 * (k // 2), _COLUMN + k % 2].reshape(-1).astype(np.float32))
        else:
            row = _GROUP + 8 * k
            pairs = np.stack([d[:, row, _COLUMN], d[:, row, _COLUMN + 1]], 2)
            put(lanes, joined(pairs.astype(np.float16).reshape(-1, 2)))


def _met(lanes: Lanes) -> bool:
    """Whether all threads of the warps have come. Raises Trap where a warp has lost some."""
    if not lanes.converged():
        return False
    if lanes.count % 32:
        raise Trap("mma in a warp that has lost threads")
    return True


def _bytes(registers: list[Getter], lanes: Lanes, index: Array, rows: int) -> Array:
    """Fragments of signed bytes as `[warps, rows, 32]`: four neighbours of k in a register."""
    whole = np.empty((lanes.count // 32, rows, 32), np.int64)
    for number, get in enumerate(registers):
        row, k = index + 8 * (number % (rows // 8)), 4 * (_LANE % 4) + 16 * (number // (rows // 8))
        four = np.ascontiguousarray(get(lanes)).view(np.int8).reshape(-1, 32, 4)
        for byte in range(4):
            whole[:, row, k + byte] = four[:, :, byte]
    return whole


def _multiply_integers(operands: Operands, step: Step) -> Handler:
    d, a, b, c = step.operands
    puts = operands.all_written(d, "b32")
    of_a, of_b, of_c = (operands.all(operand, "b32") for operand in (a, b, c))
    if (len(of_a), len(of_b), len(of_c)) != (4, 2, 4):
        raise Unknown("fragments of mma")

    def run(lanes: Lanes) -> int | None:
        if not _met(lanes):
            return BLOCK
        sums = _bytes(of_a, lanes, _GROUP, 16) @ _bytes(of_b, lanes, _GROUP, 8).transpose(0, 2, 1)
        before = [get(lanes).reshape(-1, 32) for get in of_c]
        for number, put in enumerate(puts):
            products = sums[:, _GROUP + 8 * (number // 2), _COLUMN + number % 2].astype(np.uint32)
            put(lanes, (products + before[number]).reshape(-1))
        return None

    return run


def _multiply(operands: Operands, step: Step) -> Handler:
    parts = step.parts
    if "m16n8k32" in parts and parts[-4:] == ("s32", "s8", "s8", "s32") and "satfinite" not in parts:
        return _multiply_integers(operands, step)
    kinds = [part for part in parts if part in ("f32", "f16", "bf16", "tf32", "s32", "s8", "u8", "e4m3", "e5m2", "f64")]
    if len(kinds) != 4 or kinds[1] not in HALVES or kinds[2] != kinds[1] or not {"m16n8k16", "m16n8k8"} & {*parts}:
        raise Unknown("a shape or a type of mma")
    element, into_single, from_single = HALVES[kinds[1]], kinds[0] == "f32", kinds[3] == "f32"
    d, a, b, c = step.operands
    puts = operands.all_written(d, "f32" if into_single else "b32")
    of_a, of_b = operands.all(a, "b32"), operands.all(b, "b32")
    of_c = operands.all(c, "f32" if from_single else "b32")
    if len(items(a)) != 2 * len(items(b)):
        raise Unknown("fragments of mma")

    def run(lanes: Lanes) -> int | None:
        if not _met(lanes):
            return BLOCK
        product = _operand_a(of_a, lanes, element).astype(np.float64) @ _operand_b(of_b, lanes, element)
        _write(puts, lanes, product + _accumulators(of_c, lanes, from_single), into_single)
        return None

    return run


HANDLERS: dict[str, Builder] = {"mma": _multiply}
