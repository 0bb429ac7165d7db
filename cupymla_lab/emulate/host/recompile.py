"""PTX for sm_90a to C++ for `runtime.hpp`, instruction by instruction.

Registers become local variables of their size, functions become functions whose parameters are addresses, labels stay
labels. Only what kernels here use is known; anything else is an error that names it.

Source: PTX ISA 9.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ...ptx import PtxError, Source, parse
from ...ptx.syntax import (
    Block,
    Directive,
    Function,
    Instruction,
    Label,
    Module,
    Name,
    Variable,
)
from . import operations, races
from .wgmma import Line, ProductRegisters, checked
from .writer import SIZES, Writer, mangled

SYSTEM_BYTES = 1024
REGISTER_FILE = 65536


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What a launch of a recompiled kernel has to know.

    Attributes:
        symbol: of its C++ function.
        parameters: offset and size in bytes of each parameter.
        static_bytes: shared memory that the module declares.
        cluster: extents that the kernel itself asks for, or None.
        smallest_store, smallest_global_store: bytes that it writes to shared and global memory at a time, at most 4.
        registers: per thread at launch by `.maxnreg` or launch bounds; 0 when there is neither.
    """

    symbol: str
    parameters: tuple[tuple[int, int], ...]
    static_bytes: int
    cluster: tuple[int, int, int] | None
    smallest_store: int = 4
    smallest_global_store: int = 4
    registers: int = 0


@dataclass
class Unit:
    """A module as C++.

    Attributes:
        text: the C++.
        kernels: its kernels by name.
    """

    text: str
    kernels: dict[str, KernelShape]


def recompile(ptx: str, name: str = "<ptx>", only: str | None = None) -> Unit:
    """A module as C++.

    Args:
        ptx: PTX for sm_90a.
        name: what errors call it.
        only: leave out all kernels but this one; None keeps all.

    Raises PtxError where the text is no PTX or holds what is not known here.
    """
    return _Unit(parse(ptx, name, debug=False), only).run()


def _round_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


@dataclass
class Declared:
    """A variable as its `.space .align N .type name[count]` tells it."""

    name: str
    size: int
    alignment: int
    open_ended: bool = False


def declarators(words: Sequence[str]) -> Iterator[Declared]:
    """The variables of a declaration or the parameters of a heading."""
    kind, alignment = "b8", 0
    at = 0
    while at < len(words):
        word = words[at]
        if word == ".align":
            alignment = int(words[at + 1])
            at += 1
        elif word.startswith(".") and word[1:].split(".")[-1] in SIZES:
            kind = word[1:].split(".")[-1]
        elif re.fullmatch(r"[A-Za-z_$%][\w$%.]*", word):
            count, open_ended = 1, False
            at += 1
            while at < len(words) and words[at] == "[":
                closing = words.index("]", at)
                open_ended |= closing == at + 1
                count *= int(words[at + 1], 0) if closing > at + 1 else 1
                at = closing + 1
            yield Declared(word, SIZES[kind] * count, alignment or SIZES[kind], open_ended)
            while at < len(words) and words[at] != ",":
                at += 1
        at += 1


class _Unit:
    def __init__(self, module: Module, only: str | None) -> None:
        self._module = module
        self._only = only
        self.source: Source = module.source
        self.shared: dict[str, int] = {}
        self.static_bytes = 0
        self.dynamic: set[str] = set()
        self.globals: set[str] = set()
        self._variables: list[Declared] = []
        own = [f for f in module.functions if f.body is not None and ".visible" not in f.heading]
        self.internal = {f.name for f in own if not f.kernel and ".weak" not in f.heading}

    def run(self) -> Unit:
        parts = ['#include "runtime.hpp"', "using namespace machine;"]
        for item in self._module.items:
            if isinstance(item, Variable):
                parts += self._variable(item)
        functions = [f for f in self._module.functions if not f.kernel or self._only in (None, f.name)]
        for function in functions:
            if function.body is not None:
                self._static_shared(function.body)
        shapes = {}
        for function in functions:
            parts.append(self._prototype(function) + ";")
        for function in functions:
            if function.body is not None:
                parts.append(_Body(self, function).text())
            if function.kernel and function.body is not None:
                shapes[function.name] = self._shape(function)
        parts.append(self._table())
        return Unit("\n".join(parts) + "\n", shapes)

    def _table(self) -> str:
        """The module's variables, for whoever looks at accesses to global memory."""
        listed = ", ".join(f"{{{mangled(each.name)}, {each.size}}}" for each in self._variables)
        head, count = "extern __attribute__((weak)) const", len(self._variables)
        table = f"{head} Variable cupymla_variables[] = {{{listed or '{nullptr, 0}'}}};"
        return f'extern "C" {{ {table} {head} uint32_t cupymla_variable_count = {count}; }}'

    def _variable(self, item: Variable) -> Iterator[str]:
        words = [word for word in item.words if word not in (".extern", ".visible", ".weak", ".common", ";")]
        equals = words.index("=") if "=" in words else len(words)
        for declared in declarators(words[1:equals]):
            if item.space == "shared":
                self.add_shared(declared, item.external)
                continue
            self.globals.add(declared.name)
            if not item.external:
                self._variables.append(declared)
            name = mangled(declared.name)
            if item.external:
                yield f'extern "C" unsigned char {name}[{declared.size}];'
                continue
            data = self._initial(words[equals + 1 :], declared, item.type)
            braces = "{" + ", ".join(map(str, data)) + "}"
            plain = f"alignas({declared.alignment}) unsigned char {name}[{declared.size}] = {braces};"
            yield f'extern "C" {{ {plain} }}' if ".visible" in item.words else f"namespace {{ {plain} }}"

    def _initial(self, words: Sequence[str], declared: Declared, kind: str) -> list[int]:
        data = bytearray()
        size = SIZES[kind]
        sign = ""
        for each in words:
            if each in ("{", "}", ",", "(", ")"):
                continue
            if each == "-":
                sign = each
                continue
            word, sign = sign + each, ""
            if not re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+|0[fF][0-9a-fA-F]{8})U?", word):
                raise PtxError(self.source.name, 0, f"an initial value that is not known here: {word}")
            value = int(word[2:], 16) if word[:2] in ("0f", "0F") else int(word.rstrip("U"), 0)
            data += (value & (1 << 8 * size) - 1).to_bytes(size, "little")
        return list(data[: declared.size])

    def add_shared(self, declared: Declared, external: bool) -> None:
        """Give a shared variable its place; one without a size is where dynamic shared memory begins."""
        if external or declared.open_ended:
            self.dynamic.add(declared.name)
            return
        start = _round_up(SYSTEM_BYTES + self.static_bytes, declared.alignment)
        self.shared[declared.name] = start
        self.static_bytes = start + declared.size - SYSTEM_BYTES

    def _static_shared(self, body: Block) -> None:
        for statement, _ in body.walk():
            if isinstance(statement, Variable) and statement.space == "shared":
                for declared in declarators(statement.words[1:-1]):
                    self.add_shared(declared, statement.external)

    def dynamic_start(self) -> int:
        """Offset of dynamic shared memory; its alignment is what every kernel here asks for at most."""
        return _round_up(SYSTEM_BYTES + self.static_bytes, 1024)

    def parameters(self, function: Function) -> list[Declared]:
        """The parameters of a function or kernel."""
        words = list(function.heading)
        at = words.index(function.name)
        if "(" not in words[at:]:
            return []
        first = words.index("(", at)
        return list(declarators(_clean(words[first + 1 : _closing(words, first)])))

    def result(self, function: Function) -> list[Declared]:
        """What a function returns: nothing or one parameter."""
        words = list(function.heading)
        at = words.index(function.name)
        if ".func" not in words or "(" not in words[:at]:
            return []
        first = words.index("(")
        return list(declarators(_clean(words[first + 1 : _closing(words, first)])))

    def _prototype(self, function: Function) -> str:
        if function.kernel:
            return f'extern "C" void {mangled(function.name)}(Thread& t)'
        names = [f"void* {mangled(p.name)}" for p in (*self.result(function), *self.parameters(function))]
        internal = function.name in self.internal
        linkage = "static" if internal else 'extern "C"'
        return f"{linkage} void {mangled(function.name)}({', '.join(('Thread& t', *names))})"

    def prototype(self, function: Function) -> str:
        """The C++ head of a function's definition."""
        return self._prototype(function)

    def _shape(self, function: Function) -> KernelShape:
        offset, places = 0, []
        for parameter in self.parameters(function):
            offset = _round_up(offset, parameter.alignment)
            places.append((offset, parameter.size))
            offset += parameter.size
        cluster = None
        words = list(function.heading)
        if ".reqnctapercluster" in words:
            at = words.index(".reqnctapercluster") + 1
            numbers = [int(word) for word in words[at : at + 5] if word.isdigit()]
            x, y, z = (*numbers, 1, 1)[:3]
            cluster = (x, y, z)
        bytes_ = self.dynamic_start() - SYSTEM_BYTES if self.dynamic else self.static_bytes
        smallest = races.smallest_stores(self._module)
        return KernelShape(
            mangled(function.name), tuple(places), bytes_, cluster, *smallest, registers_at_launch(function)
        )


def registers_at_launch(function: Function) -> int:
    """Registers per thread that ptxas gives a kernel by its bounds; 0 where it has none.

    Source: CUDA C++ Programming Guide, "Compute Capabilities": 65536 of a multiprocessor, at most 255 for a thread.
    """
    threads = _extent(function, ".reqntid") or _extent(function, ".maxntid")
    ctas = _extent(function, ".minnctapersm") or 1
    by_bounds = min(256, REGISTER_FILE // (threads * ctas) // 8 * 8) if threads else 0
    return _extent(function, ".maxnreg") or by_bounds


def _extent(function: Function, directive: str) -> int:
    """The product of the numbers behind a directive of a kernel's heading; 0 without it."""
    words = function.heading
    if directive not in words:
        return 0
    count, at = 1, words.index(directive) + 1
    while at < len(words) and not words[at].startswith("."):
        count *= int(words[at]) if words[at] != "," else 1
        at += 1
    return count


def _used_bytes(directive: Directive) -> int:
    """Up to which of its bytes the load behind a `used_bytes_mask` pragma is used; 0 for another directive.

    A compiler loads more than a struct has where that makes one vector of it.
    """
    found = re.search(r'"used_bytes_mask (\w+)"', " ".join(directive.words))
    return int(found[1], 0).bit_length() if found else 0


def _clean(words: Sequence[str]) -> list[str]:
    """A parameter list without what says where pointers point."""
    kept, skip = [], 0
    for index, word in enumerate(words):
        if skip:
            skip -= 1
        elif word in (".param", ".ptr", ".global", ".shared", ".const", ".local", ".reg"):
            continue
        elif word == ".align" and ".ptr" in words[max(0, index - 3) : index]:
            skip = 1
        else:
            kept.append(word)
    return kept


def _closing(words: Sequence[str], opening: int) -> int:
    depth = 0
    for at in range(opening, len(words)):
        depth += (words[at] == "(") - (words[at] == ")")
        if depth == 0:
            return at
    raise ValueError("unbalanced parentheses")


@dataclass
class _Scope:
    """What a block declares; of `registers` also what was asked for, None for what the block does not declare."""

    registers: dict[str, tuple[str, int] | None] = field(default_factory=dict)
    ranges: list[tuple[str, int, int, str]] = field(default_factory=list)
    arrays: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)


def _numbered(name: str, scope: _Scope) -> tuple[str, int] | None:
    """C++ name and size of a register that is one of a scope's ranges; None for another name."""
    stem = name.rstrip("0123456789")
    number = name[len(stem) :]
    for prefix, count, size, suffix in scope.ranges:
        if number and prefix == stem and int(number) < count:
            return mangled(name) + suffix, size
    return None


def _written_first(lines: Sequence[Line]) -> set[str]:
    """Registers that are used between two labels alone, where the first to use them writes them and has no guard: most
    of a kernel's. Nothing can read them unwritten."""
    block, blocks, found = 0, dict[str, int](), set[str]()
    for line in lines:
        block += line.text.endswith(":;")
        for name in line.names:
            if name not in blocks:
                blocks[name] = block
                if not line.guard and _only_writes(line.text, name):
                    found.add(name)
            elif blocks[name] != block:
                found.discard(name)
    return found


def _only_writes(text: str, name: str) -> bool:
    """Whether an instruction's C++ gives a register a value, whatever happens, and has no other use of it."""
    text = text[text.index(";") + 2 :] if text.startswith("t.line = ") else text
    if text.startswith(f"{name} = "):
        return name not in text[len(name) :]
    return f" {name} = loaded[" in text and "if (" not in text and text.count(name) == 1


class _Body:
    """One function's C++."""

    def __init__(self, unit: _Unit, function: Function) -> None:
        self.unit = unit
        self._function = function
        self.name = function.name
        self._declared: dict[str, int] = {}
        self._arrays: list[str] = []
        self._lines: list[Line] = []
        self.products = ProductRegisters()
        self._scopes: list[_Scope] = []
        self._count = 0
        self._parameters = {p.name: p for p in unit.parameters(function)}
        self._result = {p.name: p for p in unit.result(function)}

    def text(self) -> str:
        assert self._function.body is not None
        self._block(self._function.body)
        types = {0: "bool", 1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 8: "uint64_t", 16: "uint128_t"}
        ordinary = {name: size for name, size in self._declared.items() if name not in self.products.numbers}
        written = _written_first(self._lines)
        # What was never written reads as it would be least welcome: NaN in every format. Registers that cannot be read
        # so go without: for thousands of them it is most of what a thread does at first, and of its stack.
        initial = {name: "" if name in written else " = -1" if size else " = true" for name, size in ordinary.items()}
        registers = [f"{types[size]} {name}{initial[name]};" for name, size in ordinary.items()]
        registers += self.products.declarations()
        head = self.unit.prototype(self._function)
        lines = ["{", *self._offsets(), *registers, *self._arrays, *checked(self._lines, self.products), "}"]
        return head + "\n" + "\n".join(lines)

    def _offsets(self) -> list[str]:
        """A kernel's parameters by name, as a device function's are."""
        if not self._function.kernel:
            return []
        lines, offset = [], 0
        for parameter in self._parameters.values():
            offset = _round_up(offset, parameter.alignment)
            lines.append(f"[[maybe_unused]] const void* {mangled(parameter.name)} = t.parameters + {offset};")
            offset += parameter.size
        return lines

    # Scopes ----------------------------------------------------------------------------------------------------

    def _block(self, block: Block) -> None:
        self._count += 1
        suffix = f"_{self._count}"
        scope = _Scope()
        self._scopes.append(scope)
        for statement in block.statements:
            if isinstance(statement, Variable):
                self._declare(statement, scope, suffix)
            elif isinstance(statement, Label):
                scope.labels[statement.name] = mangled(statement.name) + suffix
            elif isinstance(statement, Directive) and ".branchtargets" in statement.words:
                words = statement.words
                targets = words[words.index(".branchtargets") + 1 :]
                scope.tables[words[0]] = tuple(word for word in targets if word not in (",", ";"))
        used_bytes = 0
        for statement in block.statements:
            if isinstance(statement, Directive):
                used_bytes = _used_bytes(statement)
                continue
            if isinstance(statement, Block):
                self._block(statement)
            elif isinstance(statement, Label):
                self._lines.append(Line(f"{scope.labels[statement.name]}:;"))
            elif isinstance(statement, Instruction):
                self._instruction(statement, used_bytes)
                used_bytes = 0
        self._scopes.pop()

    def _declare(self, variable: Variable, scope: _Scope, suffix: str) -> None:
        if variable.space == "reg":
            size = 0 if variable.type == "pred" else SIZES[variable.type]
            for name, count in variable.names:
                if count is None:
                    scope.registers[name] = (mangled(name) + suffix, size)
                else:
                    scope.ranges.append((name, count, size, suffix))
        elif variable.space in ("local", "param"):
            for declared in declarators(variable.words[1:-1]):
                place = mangled(declared.name) + suffix
                self._arrays.append(f"alignas({max(declared.alignment, 8)}) unsigned char {place}[{declared.size}];")
                if variable.space == "local":
                    self._arrays.append(f"std::memset({place}, 0xff, sizeof {place});")
                scope.arrays[declared.name] = place

    def register(self, name: str) -> tuple[str, int] | None:
        """C++ name and size in bytes of a register, 0 for a predicate; None when it is none."""
        for scope in reversed(self._scopes):
            if name not in scope.registers:
                scope.registers[name] = _numbered(name, scope)
            found = scope.registers[name]
            if found is not None:
                self._declared[found[0]] = found[1]
                return found
        return None

    def array(self, name: str) -> str | None:
        """The C++ name of a local array or parameter."""
        for scope in reversed(self._scopes):
            if name in scope.arrays:
                return scope.arrays[name]
        return mangled(name) if name in self._parameters or name in self._result else None

    def label(self, name: str) -> str:
        for scope in reversed(self._scopes):
            if name in scope.labels:
                return scope.labels[name]
        raise KeyError(name)

    def table(self, name: str) -> tuple[str, ...]:
        for scope in reversed(self._scopes):
            if name in scope.tables:
                return scope.tables[name]
        raise KeyError(name)

    # Instructions ------------------------------------------------------------------------------------------------

    def _instruction(self, instruction: Instruction, used_bytes: int) -> None:
        writer = Writer(self, instruction, used_bytes)
        try:
            lower: Callable[[Writer], str] | None = operations.find(instruction.parts)
            code = lower(writer) if lower is not None else ""
        except (KeyError, IndexError, ValueError) as error:
            raise self._error(instruction, f"cannot be recompiled ({error})") from error
        if lower is None:
            raise self._error(instruction, "an instruction that the host machine does not know")
        guard = instruction.guard
        condition = ""
        if guard:
            condition = ("!" if guard.negated else "") + writer.read(Name(guard.register), "pred")
        if instruction.parts[0] in races.WITH_LINES:
            code = f"t.line = {writer.line}; {code}"
        straight = instruction.parts[0] not in ("bra", "brx", "ret", "exit", "trap")
        products = instruction.parts[0] == "wgmma"
        self._lines.append(Line(code, condition, frozenset(writer.names), writer.line, straight, products))

    def _error(self, instruction: Instruction, what: str) -> PtxError:
        text = self.unit.source.text[instruction.start : instruction.end]
        return self.unit.source.error(instruction.start, what, text)


__all__ = ["KernelShape", "Unit", "mangled", "recompile"]
