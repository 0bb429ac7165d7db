"""Matrix products of a warpgroup.

A product is computed when it is issued. Until a wgmma.wait_group that covers it, its registers may not be used and the
shared memory it reads may not be written: both are traps. Operands in shared memory have the swizzle of 128 or 64
bytes. Products and sums are exact (float64) and rounded once.
Source: PTX ISA 9.0, "wgmma.mma_async", "Matrix Descriptor Format", "Strides" and "Register Fragments".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ...ptx.syntax import Vector
from ..memory import SHARED_START
from ..operands import Getter, Operands, integer, items, number
from ..outcomes import BLOCK
from ..program import Step
from ..shadow import Shadow
from ..threads import Group, Lanes
from ..traps import Trap, Unknown
from ..types import F32, HALVES, Array, DType, halves, wide
from .kit import Builder, Handler

_THREADS = 128
_THREAD = np.arange(_THREADS)
_ROW = _THREAD // 32 * 16 + _THREAD % 32 // 4
_COLUMN = 2 * (_THREAD % 4)

_Register = tuple[DType, int]

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_ELEMENTS = {**HALVES, "e4m3": E4M3}
_HELD_IN = {E4M3: np.dtype(np.uint16)}
"""Numbers of 8 bits lie as pairs where numbers of 16 bits would."""

_STEP_BYTES = 32
"""Of K of one product."""

_SPANS = {1: 128, 2: 64}  # bytes of a row by swizzle mode; the pattern repeats after eight rows
_UNUSED = 0x3FF1_C000_C000_C000  # bits of a descriptor that no field has


@dataclass(slots=True)
class Batch:
    """Products that one wgmma.commit_group closes: the registers they use and the shared memory they read."""

    registers: set[_Register] = field(default_factory=set)
    granules: list[Array] = field(default_factory=list)


@dataclass(slots=True)
class Products:
    """The unfinished products of a warpgroup, oldest batch first; the last one is still open."""

    batches: list[Batch] = field(default_factory=lambda: [Batch()])
    fenced: bool = False
    tiles: dict[tuple[int, int, int, bool], Array] = field(default_factory=dict)

    @property
    def registers(self) -> frozenset[_Register]:
        """All registers that unfinished products use."""
        return frozenset().union(*(batch.registers for batch in self.batches))


def products_of(group: Group) -> Products:
    """A warpgroup's products."""
    if group.products is None:
        group.products = Products()
    found: Products = group.products
    return found


class Descriptor(NamedTuple):
    """A matrix in shared memory: byte address of its start, byte distances of tiles, bytes of a swizzled row."""

    start: int
    leading: int
    stride: int
    span: int


def decode(word: int) -> Descriptor:
    """A matrix descriptor.

    Raises Unknown for another layout than the swizzles of 128 and 64 bytes, Trap for one whose pattern of eight rows
    does not begin at a multiple of their bytes: then its base offset may not be 0.
    """
    span = _SPANS.get(word >> 62)
    if span is None:
        raise Unknown("a matrix in shared memory without a swizzle of 128 or 64 bytes")
    if word >> 49 & 7:
        raise Unknown("a matrix in shared memory with a base offset")
    if word & _UNUSED:
        raise Trap(f"matrix descriptor {word:#x} has bits that mean nothing")
    found = Descriptor((word & 0x3FFF) << 4, (word >> 16 & 0x3FFF) << 4, (word >> 32 & 0x3FFF) << 4, span)
    if found.start & (8 * span - 1) >= span:
        raise Trap(f"a matrix at {found.start:#x} of shared memory, in a later row of the swizzle's {8 * span} bytes")
    return found


def element_addresses(matrix: Descriptor, rows: int, transposed: bool) -> Array:
    """Byte address of each element of a `[rows, 16]` operand of 16-bit elements.

    K-major, as many elements of K as a row of the swizzle has lie side by side, 8 rows in a tile, tiles `stride` apart.
    MN-major (transposed), as many rows lie side by side, 8 of K in a tile, tiles along K `stride` apart, along the rows
    `leading`. Of the 16-byte pieces of a row the numbers are exclusive-ored with bits 7 and up of the address.

    Raises Trap for tiles that do not begin where the pattern does, and for a row that goes on past the swizzle's.
    """
    r, c = np.arange(rows)[:, None], np.arange(16)[None, :]
    span, repeat, wide_rows = matrix.span, 8 * matrix.span, matrix.span // 2
    if matrix.stride % repeat or (transposed and rows > wide_rows and matrix.leading % repeat):
        raise Trap(f"tiles of a matrix are {matrix.leading} and {matrix.stride} bytes apart, not multiples of {repeat}")
    side_by_side = 2 * (min(rows, wide_rows) if transposed else 16)
    if matrix.start % span + side_by_side > span:
        raise Trap(f"a matrix at {matrix.start:#x} of shared memory goes on past the {span} bytes of the swizzle's row")
    if transposed:
        offset = r // wide_rows * matrix.leading + c // 8 * matrix.stride + c % 8 * span + r % wide_rows * 2
    else:
        offset = r // 8 * matrix.stride + r % 8 * span + c * 2
    address = matrix.start + offset
    return address ^ ((address >> 7 & (span // 16 - 1)) << 4)


def _operand(group: Group, word: int, rows: int, transposed: bool, element: DType) -> tuple[Array, Array]:
    """The values of an operand in shared memory, and the 16-byte granules they lie in."""
    shared, known = group.cta.shared, products_of(group).tiles
    key = (word, rows, 16, transposed)
    index = known.get(key)
    if index is None:
        index = known[key] = (element_addresses(decode(word), rows, transposed) - SHARED_START) >> 1
    if int(index.min()) < 0 or 2 * int(index.max()) + 2 > shared.size:
        raise Trap(f"wgmma reads outside of shared memory: offsets {2 * index.min()} to {2 * index.max() + 1}")
    granules = np.unique(index >> 3)
    shared.require_fenced(granules)
    shared.require_landed(index >> 1)
    if shared.shadow is not None:
        shared.shadow.require_written_for_all(
            _units(shared.shadow, granules), np.arange(group.base, group.base + group.size)
        )
    return _numbers(shared.typed(_HELD_IN.get(element, element))[index], element), granules


def _numbers(held: Array, element: DType) -> Array:
    """What `[rows, 16]` elements of 16 bits hold, one number each, or two of 8 bits."""
    return wide(held) if held.dtype == element else held.view(element).astype(np.float32)


def _units(shadow: Shadow, granules: Array) -> Array:
    """What granules of 16 bytes are in a shadow's units."""
    return shadow.units(granules << 4, 16).reshape(-1)


def _fence(operands: Operands, step: Step) -> Handler:
    def run(lanes: Lanes) -> int | None:
        if lanes.count != lanes.group.size:
            return BLOCK
        products_of(lanes.group).fenced = True
        lanes.group.watch_products()
        return None

    return run


def _commit(operands: Operands, step: Step) -> Handler:
    def run(lanes: Lanes) -> int | None:
        if lanes.count != lanes.group.size:
            return BLOCK
        products_of(lanes.group).batches.append(Batch())
        return None

    return run


def _wait(operands: Operands, step: Step) -> Handler:
    pending = number(step.operands[0])

    def run(lanes: Lanes) -> int | None:
        if lanes.count != lanes.group.size:
            return BLOCK
        group = lanes.group
        products = products_of(group)
        while len(products.batches) - 1 > pending:
            # Registers that ordinary code may use again need a fence before the next product uses them.
            products.fenced = False
            for granules in products.batches.pop(0).granules:
                group.cta.shared.end_reading(granules)
                shadow = group.cta.shared.shadow
                if shadow is not None:
                    first = group.base // 32
                    shadow.note_reads_by_warps(_units(shadow, granules), np.arange(first, first + group.warps))
        group.unlock(products.registers)
        group.machine.events += 1
        return None

    return run


class Shape(NamedTuple):
    """What an opcode says of a product."""

    columns: int
    element: DType
    from_registers: bool
    transposed: tuple[bool, bool]
    negated: tuple[bool, bool]


def shape_of(step: Step) -> Shape:
    """What the opcode and the operands of a product say. Raises Unknown for one that is not executed here."""
    found = re.fullmatch(r"m64n(\d+)k(\d+)", next(part for part in step.parts if part.startswith("m64n")))
    kinds = [part for part in step.parts if part in ("f32", "f16", "bf16", "tf32", "e4m3", "e5m2", "s32")]
    element = _ELEMENTS.get(kinds[1])
    if found is None or kinds[0] != "f32" or element is None or kinds[1] != kinds[2] or "sp" in step.parts:
        raise Unknown("a shape or a type of wgmma")
    if int(found[2]) * element.itemsize != _STEP_BYTES:
        raise Unknown("a shape or a type of wgmma")
    from_registers = isinstance(step.operands[1], Vector)
    if element == E4M3:
        # Both operands are K-major, and there is no operand that says so.
        rest = [number(operand) for operand in step.operands[4:]]
        return Shape(int(found[1]), element, from_registers, (False, False), (rest[0] < 0, rest[1] < 0))
    rest = [number(operand) for operand in step.operands[4:]]
    transposed = (False, bool(rest[2])) if from_registers else (bool(rest[2]), bool(rest[3]))
    return Shape(int(found[1]), element, from_registers, transposed, (rest[0] < 0, rest[1] < 0))


def _scale(operands: Operands, step: Step) -> Callable[[Lanes], bool]:
    """Whether the accumulators' old values count."""
    given = integer(str(step.operands[3]))
    if given is not None:
        return lambda lanes: given != 0
    keep = operands.read(step.operands[3], "pred")
    return lambda lanes: bool(_uniform(keep(lanes), "scale-d"))


def _uniform(values: Array, what: str = "matrix descriptors") -> int:
    if (values != values[0]).any():
        raise Trap(f"the threads of a warpgroup give different {what}")
    return int(values[0])


def _fragment(rows: Array, element: DType) -> Array:
    """Operand A from registers: `[4, 128]` words as `[64, 16]` numbers of 16 bits, or `[64, 32]` of 8."""
    held = _HELD_IN.get(element, element)
    a = np.empty((64, 16), held)
    for k in range(4):
        pair = halves(rows[k], held)
        row, column = _ROW + 8 * (k % 2), _COLUMN + 8 * (k // 2)
        a[row, column], a[row, column + 1] = pair[:, 0], pair[:, 1]
    return _numbers(a, element)


def _multiply(operands: Operands, step: Step) -> Handler:
    shape, keeps = shape_of(step), _scale(operands, step)
    places = [operands.place(item) for item in items(step.operands[0])]
    of_a = [operands.place(item) for item in items(step.operands[1])] if shape.from_registers else []
    first = None if shape.from_registers else operands.read(step.operands[1], "u64")
    second = operands.read(step.operands[2], "u64")
    if len(places) != shape.columns // 2:
        raise Unknown("accumulators of wgmma")
    rows = np.array([row for _, row in places])
    used = frozenset([*places, *of_a])
    operands.program.product_registers |= used
    k = np.arange(len(places))[:, None]
    from_row, from_column = _ROW + 8 * (k // 2 % 2), _COLUMN + 8 * (k // 4) + k % 2
    file = places[0][0]

    def run(lanes: Lanes) -> int | None:
        group = lanes.group
        if lanes.count != group.size:
            return BLOCK
        if group.size != _THREADS:
            raise Trap(f"wgmma needs groups of {_THREADS} threads, not {group.size}")
        products = products_of(group)
        if not products.fenced:
            raise Trap("wgmma.mma_async without a wgmma.fence before it")
        if not group.touched.isdisjoint(used):
            raise Trap("wgmma.mma_async with registers that other instructions use behind the wgmma.fence")
        batch = products.batches[-1]
        a = _left(lanes, batch, first, of_a, shape)
        b, granules = _operand(group, _uniform(second(lanes)), shape.columns, shape.transposed[1], shape.element)
        _read(group, batch, granules)
        product = (a.astype(np.float64) @ b.T.astype(np.float64))[from_row, from_column]
        if shape.negated[0] != shape.negated[1]:
            product = -product
        registers = group.file(file).view(F32)
        if keeps(lanes):
            product += registers[rows]
        registers[rows] = product
        if not used <= batch.registers:
            batch.registers |= used
            group.lock(used)
        return None

    return run


def _read(group: Group, batch: Batch, granules: Array) -> None:
    group.cta.shared.start_reading(granules)
    batch.granules.append(granules)


def _left(lanes: Lanes, batch: Batch, descriptor: Getter | None, registers: list[_Register], shape: Shape) -> Array:
    group = lanes.group
    if descriptor is None:
        words = np.stack([group.file(kind)[row] for kind, row in registers])
        return _fragment(words, shape.element)
    a, granules = _operand(group, _uniform(descriptor(lanes)), 64, shape.transposed[0], shape.element)
    _read(group, batch, granules)
    return a


_FORMS: dict[str, Builder] = {"fence": _fence, "commit_group": _commit, "wait_group": _wait, "mma_async": _multiply}


def _wgmma(operands: Operands, step: Step) -> Handler:
    return _FORMS[step.parts[1]](operands, step)


HANDLERS: dict[str, Builder] = {"wgmma": _wgmma}
