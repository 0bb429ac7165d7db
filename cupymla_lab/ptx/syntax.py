"""What PTX text is made of: modules, functions, blocks, statements and operands, each with its place in the text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from .lexer import Source


@dataclass(frozen=True, slots=True)
class Name:
    """A register, variable, label, parameter or special register; `_` where a result is not wanted."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Constant:
    """A number or a constant expression, as written."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Negated:
    """A predicate used upside down, `!p`."""

    operand: Operand

    def __str__(self) -> str:
        return f"!{self.operand}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two destinations, `p|q`."""

    first: Operand
    second: Operand

    def __str__(self) -> str:
        return f"{self.first}|{self.second}"


@dataclass(frozen=True, slots=True)
class Offset:
    """A register or variable with a constant added, `%rd1+16`; the constant keeps its sign."""

    base: Operand
    constant: str

    def __str__(self) -> str:
        # A plus before a minus as well: ptxas reads `%rd1+-16`, and not `%rd1-16`.
        return f"{self.base}+{self.constant}"


@dataclass(frozen=True, slots=True)
class Vector:
    """Operands in braces."""

    items: tuple[Operand, ...]

    def __str__(self) -> str:
        return "{" + ", ".join(map(str, self.items)) + "}"


@dataclass(frozen=True, slots=True)
class Address:
    """Operands in brackets: one, or a tensor map with its coordinates. `prefix` is the name before `name[3]`."""

    items: tuple[Operand, ...]
    prefix: str = ""

    def __str__(self) -> str:
        return f"{self.prefix}[" + ", ".join(map(str, self.items)) + "]"


@dataclass(frozen=True, slots=True)
class Group:
    """Operands in parentheses: the results and arguments of a call."""

    items: tuple[Operand, ...]

    def __str__(self) -> str:
        return "(" + ", ".join(map(str, self.items)) + ")"


Operand: TypeAlias = "Name | Constant | Negated | Pair | Offset | Vector | Address | Group"


def names_in(operand: Operand) -> Iterator[str]:
    """Every name in an operand."""
    if isinstance(operand, Name):
        yield operand.text
    elif isinstance(operand, Negated):
        yield from names_in(operand.operand)
    elif isinstance(operand, Pair):
        yield from names_in(operand.first)
        yield from names_in(operand.second)
    elif isinstance(operand, Offset):
        yield from names_in(operand.base)
    elif isinstance(operand, Vector | Address | Group):
        for item in operand.items:
            yield from names_in(item)


@dataclass(frozen=True, slots=True)
class Guard:
    """The predicate an instruction runs under, `@p` or `@!p`."""

    register: str
    negated: bool

    def __str__(self) -> str:
        return f"@{'!' if self.negated else ''}{self.register}"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `start` and `end` are offsets into the text, guard and semicolon included."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Guard | None
    start: int
    end: int

    @property
    def parts(self) -> tuple[str, ...]:
        """The opcode cut at its dots: ("tcgen05", "mma", "cta_group::1", "kind::f16")."""
        return tuple(self.opcode.split("."))

    def __str__(self) -> str:
        guard = f"{self.guard} " if self.guard else ""
        operands = ", ".join(map(str, self.operands))
        return f"{guard}{self.opcode}{' ' if operands else ''}{operands};"


@dataclass(frozen=True, slots=True)
class Label:
    """A label with its colon."""

    name: str
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.name}:"


@dataclass(frozen=True, slots=True)
class Directive:
    """A directive that no translation looks into, token by token: `.version 9.0`, `.pragma "nounroll";`, `.loc`."""

    words: tuple[str, ...]
    start: int
    end: int

    def __str__(self) -> str:
        return " ".join(self.words) + ("\n" if self.words[-1] not in (";", "}") else "")


@dataclass(frozen=True, slots=True)
class Variable:
    """A declaration of registers or variables.

    Attributes:
        words: its tokens up to the semicolon.
        space: "reg", "local", "shared", "global", "const" or "param".
        type: such as "b32" or "pred".
        names: each name with the number of registers that `%r<100>` declares, or None for a plain name.
        external: whether it is declared `.extern`.
        alignment: in bytes; 0 where none is written.
    """

    words: tuple[str, ...]
    space: str
    type: str
    names: tuple[tuple[str, int | None], ...]
    external: bool
    alignment: int
    start: int
    end: int

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True, slots=True)
class Block:
    """Statements in braces: a function's body or a scope within it, as inline assembly makes them."""

    statements: tuple[Statement, ...]
    start: int
    end: int

    def __str__(self) -> str:
        return "{\n" + "\n".join(map(str, self.statements)) + "\n}"

    def walk(self) -> Iterator[tuple[Statement, tuple[Block, ...]]]:
        """Each statement that is no block, with the blocks around it, outermost first."""
        waiting: list[tuple[Iterator[Statement], tuple[Block, ...]]] = [(iter(self.statements), (self,))]
        while waiting:
            statements, around = waiting[-1]
            for statement in statements:
                if isinstance(statement, Block):
                    waiting.append((iter(statement.statements), (*around, statement)))
                    break
                yield statement, around
            else:
                waiting.pop()


Statement: TypeAlias = "Instruction | Label | Directive | Variable | Block"


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel or device function.

    Attributes:
        kernel: whether it is an `.entry`.
        name: its name.
        heading: its tokens before the body, linkage and performance directives included.
        body: None for a declaration.
    """

    kernel: bool
    name: str
    heading: tuple[str, ...]
    body: Block | None
    start: int
    end: int

    def __str__(self) -> str:
        return " ".join(self.heading) + (f"\n{self.body}" if self.body else " ;")


@dataclass(frozen=True, slots=True)
class Module:
    """A whole PTX text."""

    source: Source = field(repr=False, compare=False)
    items: tuple[Directive | Variable | Function, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.items)) + "\n"

    @property
    def functions(self) -> tuple[Function, ...]:
        """Its functions, declarations included."""
        return tuple(item for item in self.items if isinstance(item, Function))

    def kernel(self, name: str) -> Function | None:
        """The kernel of that name."""
        return next((f for f in self.functions if f.kernel and f.name == name), None)

    def directive(self, name: str) -> Directive | None:
        """The first directive of that name, such as ".target"."""
        return next((d for d in self.items if isinstance(d, Directive) and d.words[0] == name), None)


def shape(node: object) -> object:
    """A node without its places in the text, for comparing what two texts mean."""
    if isinstance(node, Instruction):
        return ("instruction", str(node))
    if isinstance(node, Label):
        return ("label", node.name)
    if isinstance(node, Directive | Variable):
        return ("declaration", node.words)
    if isinstance(node, Block):
        return ("block", tuple(map(shape, node.statements)))
    if isinstance(node, Function):
        return ("function", node.heading, shape(node.body))
    if isinstance(node, Module):
        return tuple(map(shape, node.items))
    return node
