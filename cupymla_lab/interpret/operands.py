"""Operands as functions: what an instruction reads and writes, bound once and called with the threads that execute.

A getter returns one element per thread. It may be a view of a register, so a handler reads all it needs before it
writes anything.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..ptx.syntax import Address, Constant, Name, Negated, Offset, Operand, Pair, Vector
from .memory import SHARED_START
from .traps import Unknown
from .types import BOOL, TYPES, Array, DType, is_float, unsigned

if TYPE_CHECKING:
    from .program import Program
    from .threads import Group, Lanes

Getter: TypeAlias = "Callable[[Lanes], Array]"
Setter: TypeAlias = "Callable[[Lanes, Array], None]"

_MAX_THREADS = 1024


def _uniform(value: Callable[[Group], int]) -> Callable[[Group], Array]:
    return lambda group: np.full(group.size, value(group), np.uint32)


def _cta(axis: int) -> Callable[[Group], int]:
    def number(group: Group) -> int:
        x, y, _ = group.machine.layout.grid
        return (group.cta.number % x, group.cta.number // x % y, group.cta.number // x // y)[axis]

    return number


def _lane_bit(group: Group) -> Array:
    bit: Array = np.uint32(1) << (group.thread & np.uint32(31))
    return bit


_zero = _uniform(lambda group: 0)
_one = _uniform(lambda group: 1)
_SPECIAL: dict[str, Callable[[Group], Array]] = {
    "%tid.x": lambda group: group.thread,
    "%tid.y": _zero,
    "%tid.z": _zero,
    "%ntid.x": _uniform(lambda group: group.machine.layout.threads),
    "%ntid.y": _one,
    "%ntid.z": _one,
    "%laneid": lambda group: group.thread & np.uint32(31),
    "%warpid": lambda group: group.thread >> np.uint32(5),
    "%ctaid.x": _uniform(_cta(0)),
    "%ctaid.y": _uniform(_cta(1)),
    "%ctaid.z": _uniform(_cta(2)),
    "%nctaid.x": _uniform(lambda group: group.machine.layout.grid[0]),
    "%nctaid.y": _uniform(lambda group: group.machine.layout.grid[1]),
    "%nctaid.z": _uniform(lambda group: group.machine.layout.grid[2]),
    "%cluster_ctarank": _uniform(lambda group: group.cta.rank),
    "%cluster_nctarank": _uniform(lambda group: group.machine.layout.cluster),
    "%cluster_ctaid.x": _uniform(lambda group: group.cta.rank),
    "%cluster_nctaid.x": _uniform(lambda group: group.machine.layout.cluster),
    "%clusterid.x": _uniform(lambda group: group.cta.number // group.machine.layout.cluster),
    "%nclusterid.x": _uniform(lambda group: group.machine.layout.grid[0] // group.machine.layout.cluster),
    "%smid": _zero,
    "%clock": _zero,
    "%clock64": _zero,
    "%globaltimer": _zero,
    "%lanemask_eq": _lane_bit,
    "%lanemask_lt": lambda group: _lane_bit(group) - np.uint32(1),
    "%lanemask_le": lambda group: (_lane_bit(group) - np.uint32(1)) | _lane_bit(group),
    "%lanemask_gt": lambda group: ~((_lane_bit(group) - np.uint32(1)) | _lane_bit(group)),
    "%lanemask_ge": lambda group: ~(_lane_bit(group) - np.uint32(1)),
}


def integer(text: str) -> int | None:
    """The value of an integer constant; None when the text is none."""
    digits = text.lstrip("+-").rstrip("U")
    try:
        value = int(digits, 0) if not digits.isdigit() or digits == "0" else int(digits.lstrip("0") or "0")
    except ValueError:
        return None
    return -value if text.startswith("-") else value


def constant(text: str, kind: str) -> Array:
    """A constant as one element of a type. Raises Unknown for expressions."""
    dtype = TYPES[kind]
    low = text.lower()
    negative, digits = low.startswith("-"), low.lstrip("+-")
    if digits.startswith(("0f", "0d")) and len(digits) in (10, 18):
        form = (">f", np.float32) if digits[1] == "f" else (">d", np.float64)
        number = form[1](struct.unpack(form[0], bytes.fromhex(digits[2:]))[0])
        number = -number if negative else number
        # A float's bits where a register of its size is meant.
        same = not is_float(kind) and dtype.itemsize == number.itemsize
        return np.array([number]).view(dtype) if same else np.array([number]).astype(dtype)
    value = integer(text)
    if value is not None:
        if kind == "pred":
            return np.array([value != 0])
        if is_float(kind) and not kind.endswith("x2"):
            return np.array([value]).astype(dtype)
        return np.array([value % 2 ** (8 * dtype.itemsize)], np.uint64).astype(unsigned(dtype.itemsize)).view(dtype)
    try:
        return np.array([float(text)]).astype(dtype)
    except ValueError:
        raise Unknown(f"constant {text}") from None


class Operands:
    """Binds the operands of a program's instructions."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._numbers: dict[tuple[DType, int, DType], int] = {}

    # Registers -------------------------------------------------------------------------------------------------

    def place(self, operand: Operand) -> tuple[DType, int]:
        """The file and the row of a register. Raises Unknown for anything else."""
        found = self.program.registers.get(str(operand))
        if found is None:
            raise Unknown(f"operand {operand}")
        return found

    def port(self, operand: Operand, dtype: DType) -> int:
        """The number of a register's port as a type of the register's size."""
        kind, row = self.place(operand)
        key = kind, row, dtype
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.program.ports)
            self.program.ports.append(key)
            self.program.ports_of.setdefault((kind, row), []).append(number)
        return number

    def is_register(self, operand: Operand) -> bool:
        """Whether an operand is a declared register."""
        return isinstance(operand, Name) and operand.text in self.program.registers

    # Reading ---------------------------------------------------------------------------------------------------

    def read(self, operand: Operand, kind: str) -> Getter:
        """What an operand holds, as a type: a register, a constant, or the address of a variable."""
        dtype = TYPES[kind]
        if isinstance(operand, Constant):
            return _filled(np.repeat(constant(operand.text, kind), _MAX_THREADS))
        if isinstance(operand, Negated):
            inner = self.read(operand.operand, "pred")
            return lambda lanes: ~inner(lanes)
        if isinstance(operand, Offset):
            base, by = self.read(operand.base, kind), constant(operand.constant, kind)[0]
            return lambda lanes: base(lanes) + by
        if not isinstance(operand, Name):
            raise Unknown(f"operand {operand}")
        if operand.text in self.program.registers:
            return self._register(operand, dtype)
        if operand.text in _SPECIAL:
            return _special(operand.text, dtype)
        return _filled(np.full(_MAX_THREADS, self._symbol(operand.text)).astype(np.uint64).astype(dtype))

    def _register(self, operand: Operand, dtype: DType) -> Getter:
        kind = self.place(operand)[0]
        if kind != BOOL and kind.itemsize != dtype.itemsize:
            # A wider register than the instruction's type: its low bits.
            narrow, word = self._direct(self.port(operand, kind)), unsigned(dtype.itemsize)
            return lambda lanes: narrow(lanes).astype(word).view(dtype)
        if (kind == BOOL) != (dtype == BOOL):
            raise Unknown(f"register {operand} as {dtype}")
        return self._direct(self.port(operand, dtype))

    @staticmethod
    def _direct(number: int) -> Getter:
        def get(lanes: Lanes) -> Array:
            port = lanes.group.ports[number]
            if port is None:
                port = lanes.group.open(number)
            return port[lanes.select]  # type: ignore[no-any-return]

        return get

    def _symbol(self, name: str) -> int:
        """The address of a variable or parameter."""
        program = self.program
        if name in program.shared:
            return program.shared[name].offset + SHARED_START
        if name in program.local:
            return program.local[name].offset
        if name in program.constants:
            return int(program.constants[name].ctypes.data)
        for parameter in program.parameters:
            if parameter.name == name:
                return parameter.address
        raise Unknown(f"name {name}")

    def all(self, operand: Operand, kind: str) -> list[Getter]:
        """The elements of a vector, or the one operand."""
        return [self.read(item, kind) for item in items(operand)]

    def truth(self, register: str, negated: bool) -> Getter:
        """A guard."""
        name = Name(register)
        return self.read(Negated(name) if negated else name, "pred")

    # Writing ---------------------------------------------------------------------------------------------------

    def write(self, operand: Operand, kind: str) -> Setter:
        """Where a result of a type goes: a register, or nowhere (`_`). Narrow results are extended by their sign."""
        if isinstance(operand, Name) and operand.text == "_":
            return lambda lanes, value: None
        file = self.place(operand)[0]
        dtype = TYPES[kind]
        if (file == BOOL) != (dtype == BOOL):
            raise Unknown(f"register {operand} for a result of type {kind}")
        if file.itemsize > dtype.itemsize and dtype.kind in "iu":
            dtype = np.dtype(f"{dtype.kind}{file.itemsize}")
        elif file.itemsize != dtype.itemsize:
            return self._bits(operand, dtype, file)
        number = self.port(operand, dtype)

        def put(lanes: Lanes, value: Array) -> None:
            port = lanes.group.ports[number]
            if port is None:
                port = lanes.group.open(number)
            port[lanes.select] = value

        return put

    def _bits(self, operand: Operand, dtype: DType, file: DType) -> Setter:
        """A float result in a register of another size: its bits."""
        inner, word = self.write(operand, f"b{8 * file.itemsize}"), unsigned(dtype.itemsize)
        return lambda lanes, value: inner(lanes, np.asarray(value, dtype).view(word).astype(file))

    def all_written(self, operand: Operand, kind: str) -> list[Setter]:
        """The places of a vector's elements, or the one place."""
        return [self.write(item, kind) for item in items(operand)]

    # Addresses -------------------------------------------------------------------------------------------------

    def address(self, operand: Operand) -> Getter:
        """The address in brackets, as int64; one in a 32-bit register is a shared address."""
        if not isinstance(operand, Address) or len(operand.items) != 1:
            raise Unknown(f"address {operand}")
        inner, by = operand.items[0], 0
        if isinstance(inner, Offset):
            found = integer(inner.constant)
            if found is None:
                raise Unknown(f"address {operand}")
            by = found
            inner = inner.base
        if self.is_register(inner) and self.place(inner)[0].itemsize == 4:
            short = self.read(inner, "u32")
            return lambda lanes: (short(lanes).astype(np.int64) + by) & 0xFFFFFFFF
        long = self.read(inner, "s64")
        return lambda lanes: long(lanes) + by

    def parameter(self, operand: Operand) -> tuple[int, int] | None:
        """The parameter that `[name+offset]` names, by its address, and the offset; None for other addresses."""
        if not isinstance(operand, Address) or len(operand.items) != 1:
            return None
        inner, by = operand.items[0], 0
        if isinstance(inner, Offset):
            by = integer(inner.constant) or 0
            inner = inner.base
        for parameter in self.program.parameters:
            if str(inner) == parameter.name:
                return parameter.address, by
        return None


def items(operand: Operand) -> tuple[Operand, ...]:
    """The elements of a vector, or the one operand."""
    return operand.items if isinstance(operand, Vector) else (operand,)


def pair(operand: Operand) -> tuple[Operand, Operand | None]:
    """The two destinations `p|q`, or the one."""
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)


def number(operand: Operand) -> int:
    """The value of an integer constant. Raises Unknown for anything else."""
    value = integer(str(operand))
    if value is None:
        raise Unknown(f"{operand} where a constant is expected")
    return value


def _filled(values: Array) -> Getter:
    return lambda lanes: values[: lanes.count]


def _special(name: str, dtype: DType) -> Getter:
    make = _SPECIAL[name]

    def get(lanes: Lanes) -> Array:
        known = lanes.group.specials.get(name)
        if known is None:
            known = lanes.group.specials[name] = make(lanes.group)
        chosen: Array = known[lanes.select].astype(dtype)
        return chosen

    return get
