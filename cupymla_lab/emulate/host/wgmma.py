"""wgmma, as C++ text for wgmma.hpp.

Registers that products use, accumulators and fragments of A, are elements of an array that the machine fills when a
product is carried out. `checked` puts a look at their use into code that may run while one is unfinished.

Source: PTX ISA 9.0, "wgmma.mma_async", "Register Fragments for wgmma.mma_async".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...ptx.syntax import Constant, Operand, Vector
from .writer import Writer

_ELEMENTS = {"f16": "kHalf", "bf16": "kBfloat", "tf32": "kTf32", "e4m3": "kE4m3", "e5m2": "kE5m2"}
_ELEMENTS |= {"s8": "kSigned8", "u8": "kUnsigned8"}
_BYTES = {"f16": 2, "bf16": 2, "tf32": 4}
_SUMS = {"f32": "kSingle", "f16": "kHalves", "s32": "kIntegers"}


@dataclass
class ProductRegisters:
    """The registers of a function that products use, in the order of their numbers, and tables of such numbers."""

    numbers: dict[str, int] = field(default_factory=dict)
    tables: dict[tuple[int, ...], str] = field(default_factory=dict)

    def table(self, registers: Sequence[str]) -> str:
        """The name of an array of the registers' numbers."""
        found = tuple(self.numbers.setdefault(register, len(self.numbers)) for register in registers)
        return self.tables.setdefault(found, f"numbers_{len(self.tables)}")

    def declarations(self) -> Iterator[str]:
        """The registers, by their names, and the tables."""
        if not self.numbers:
            return
        count = len(self.numbers)
        yield f"uint32_t of_products[{count}] = {{}}; begin_products(t, of_products, {count});"
        for name, number in self.numbers.items():
            yield f"uint32_t& {name} = of_products[{number}];"
        for table, name in self.tables.items():
            yield f"static const uint16_t {name}[] = {{{', '.join(map(str, table))}}};"


@dataclass(frozen=True, slots=True)
class Line:
    """C++ of one instruction, and what the check of products has to know of it.

    Attributes:
        text: the code, its guard left off.
        guard: the condition under which it runs, "" where it always does.
        names: the registers that it uses, by their C++ names.
        line: its line in the PTX.
        straight: whether the next instruction follows, whatever it does.
        products: whether it is one of wgmma, which look for themselves.
    """

    text: str
    guard: str = ""
    names: frozenset[str] = frozenset()
    line: int = 0
    straight: bool = False
    products: bool = False

    def code(self, before: str = "") -> str:
        """The text with something before it."""
        return f"if ({self.guard}) {{ {before}{self.text} }}" if self.guard else before + self.text


def checked(lines: Sequence[Line], registers: ProductRegisters) -> Iterator[str]:
    """The text of a function's lines, with the uses of products' registers looked at where a product may be unfinished.

    Of straight code they are looked at together, where the first one is; an instruction with a guard looks for itself.
    """
    numbers = registers.numbers
    uses: dict[int, int] = {}  # of the straight code: registers and the line that uses each first
    held: list[str] = []

    def flush() -> Iterator[str]:
        if uses:
            yield _look(uses)
        yield from held
        uses.clear()
        held.clear()

    for line in lines:
        mine = {numbers[name]: line.line for name in line.names if name in numbers}
        if not line.straight or line.products:
            yield from flush()
            yield line.code(_look(mine) if mine and not line.products else "")
        elif not mine and not uses:
            yield line.code()
        elif line.guard:
            held.append(line.code(_look(mine) if mine else ""))
        else:
            uses = {**mine, **uses}
            held.append(line.code())
    yield from flush()


def _look(uses: dict[int, int]) -> str:
    listed = ", ".join(f"{{{number}, {line}}}" for number, line in sorted(uses.items()))
    return (
        f"if (__builtin_expect(t.watching, 0)) {{ static const RegisterUse uses[] = {{{listed}}}; "
        f"use_registers(t, uses, {len(uses)}); }}"
    )


def knows(parts: tuple[str, ...]) -> bool:
    """Whether `lower` writes this instruction, whose opcode is cut at the dots."""
    return parts[0] == "wgmma" and "sp" not in parts


def lower(w: Writer) -> str:
    """The C++ of an instruction that `knows` knows."""
    if w.parts[1] == "fence":
        return "products_fence(t);"
    if w.parts[1] == "commit_group":
        return "commit_products(t);"
    if w.parts[1] == "wait_group":
        return f"wait_products(t, {w.read(w.operands[0], 'u32')});"
    return _multiply(w)


def _number(operand: Operand) -> int:
    if not isinstance(operand, Constant):
        raise ValueError(f"{operand} is no constant")
    return int(operand.text, 0)


def _registers(w: Writer, operand: Operand) -> tuple[str, int]:
    """A table of an operand's registers, and how many they are."""
    assert isinstance(operand, Vector)
    return w.of_products([w.register(item, 4) for item in operand.items]), len(operand.items)


def _multiply(w: Writer) -> str:
    shape = next((found for part in w.parts if (found := re.fullmatch(r"m64n(\d+)k(\d+)", part))), None)
    kinds = [part for part in w.parts if part in (*_ELEMENTS, "f32", "s32")]
    if shape is None or len(kinds) != 3 or kinds[0] not in _SUMS:
        raise ValueError("a shape or a type of wgmma that is not known here")
    columns, k, per = int(shape[1]), int(shape[2]), _BYTES.get(kinds[1], 1)
    from_registers = isinstance(w.operands[1], Vector)
    rest = [_number(operand) for operand in w.operands[4:]]
    transposes = [bool(each) for each in rest[2:]] if per == 2 else []
    transposed_a, transposed_b = [False, False, *transposes][-2:]
    of_d, d_count = _registers(w, w.operands[0])
    of_a, a_count = _registers(w, w.operands[1]) if from_registers else ("nullptr", 0)
    per_register = 2 if kinds[0] == "f16" else 1
    if k * per != 32 or d_count * per_register != columns // 2 or a_count not in (0, 4):
        raise ValueError("a shape of wgmma that these types or registers do not have")
    negated = len(rest) >= 2 and (rest[0] < 0) != (rest[1] < 0)
    flags = ", ".join(str(int(flag)) for flag in (transposed_a, transposed_b, negated, "satfinite" in w.parts))
    site = (
        f"static const ProductSite site = {{{of_d}, {d_count}, {of_a}, {a_count}, {columns}, {k}, {w.line}, "
        f"{_ELEMENTS[kinds[1]]}, {_ELEMENTS[kinds[2]]}, {_SUMS[kinds[0]]}, {flags}}};"
    )
    a = "0" if from_registers else w.read(w.operands[1], "u64")
    keeps = w.operands[3]
    count = str(_number(keeps) != 0).lower() if isinstance(keeps, Constant) else w.read(keeps, "pred")
    return f"{{ {site} multiply(t, site, {a}, {w.read(w.operands[2], 'u64')}, {count}); }}"
