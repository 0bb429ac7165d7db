"""Writing the PTX that stands in for an instruction: temporaries, addresses, calls into the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..ptx import PtxError, Source
from ..ptx.syntax import (
    Address,
    Block,
    Constant,
    Function,
    Instruction,
    Name,
    Negated,
    Offset,
    Operand,
    Variable,
    Vector,
)

BUFFER = "cupymla_emulate_buffer"
BUFFER_BYTES = 512
"""Local memory that operands lists and the registers of tcgen05.ld and .st pass through."""

LAUNCH = "cupymla_emulate_launch"
LAUNCH_BYTES = 80
REMOVED_OFFSET = 32
"""Where `Launch::removed` lies; cupymla_lab/emulate/model/state.cuh."""

# Functions of the model, cupymla_lab/emulate/model/model.cu: result and parameters, in bits.
MODEL: dict[str, tuple[int, tuple[int, ...]]] = {
    "enter": (0, ()),
    "leave": (0, (32,)),
    "alloc": (0, (32, 32, 32, 32)),
    "dealloc": (0, (32, 32, 32, 32)),
    "relinquish": (0, (32, 32)),
    "ld": (0, (64, 32, 32, 32)),
    "st": (0, (64, 32, 32, 32)),
    "wait_ld": (0, (32,)),
    "wait_st": (0, (32,)),
    "fence_before": (0, (32,)),
    "fence_after": (0, (32,)),
    "mma": (0, (64, 32)),
    "cp": (0, (64, 32)),
    "shift": (0, (32, 32, 32)),
    "commit": (0, (32, 32, 32, 32)),
    "load": (0, (64, 32, 32)),
    "store": (0, (64, 32, 32)),
    "tile": (0, (64, 32)),
    "scatter": (0, (64, 32)),
    "grid_ahead": (0, (32,)),
    "try_cancel": (0, (64, 32)),
    "query_cancel": (0, (32, 32)),
    "group_end": (0, (32,)),
    "group_wait": (0, (32, 32)),
    "barrier_init": (0, (32,)),
    "barrier_end": (0, (32,)),
    "poll": (0, (32, 32)),
    "begin_wait": (0, (32,)),
    "arrived": (0, ()),
    "polled": (0, (32,)),
    "named_barrier": (32, (32, 32, 32, 32, 32)),
    "cluster_arrive": (0, (32,)),
    "cluster_wait": (0, (32,)),
    "proxy_fence": (0, (32,)),
    "init_fence": (0, (32,)),
    "shared_store": (0, (32, 32)),
    "load_bytes": (0, (64, 32, 32)),
    "store_bytes": (0, (64, 32, 32)),
    "convert": (32, (32, 32, 32, 32, 32, 32)),
    "reduce": (32, (32, 32, 32)),
    "clear": (0, (32, 32)),
    "registers": (0, (32, 32, 32)),
}


def prototypes() -> str:
    """Declarations of the model's functions and of the state the host fills."""
    lines = [f".extern .global .align 8 .b8 {LAUNCH}[{LAUNCH_BYTES}];"]
    for name, (result, parameters) in MODEL.items():
        returned = f" (.param .b{result} result)" if result else ""
        listed = ", ".join(f".param .b{bits} p{i}" for i, bits in enumerate(parameters))
        lines.append(f".extern .func{returned} cupymla_emulate_{name} ({listed});")
    return "\n".join(lines)


def _bits_of(type_name: str) -> int:
    """Size of a type such as b32 or f16x2; 0 for what has no number."""
    found = re.fullmatch(r"[a-z]+(\d+)(?:x(\d+))?", type_name)
    return int(found[1]) * int(found[2] or 1) if found else 0


_BITS = {"pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16}


class Registers:
    """Sizes of the registers a function declares, scope by scope."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[dict[str, int | None], list[tuple[str, int, int]]]] = {}

    def _of(self, block: Block) -> tuple[dict[str, int | None], list[tuple[str, int, int]]]:
        """Sizes by name, of what a block declares and of what was asked for; and its ranges of numbered registers."""
        found = self._known.get(id(block))
        if found is None:
            found = ({}, [])
            for statement in block.statements:
                if isinstance(statement, Variable) and statement.space == "reg":
                    bits = _BITS.get(statement.type) or _bits_of(statement.type)
                    for name, count in statement.names:
                        if count is None:
                            found[0][name] = bits
                        else:
                            found[1].append((name, count, bits))
            self._known[id(block)] = found
        return found

    def bits(self, name: str, around: Sequence[Block]) -> int | None:
        """Size of a register in bits, 1 for a predicate; None when the name is no register of these scopes."""
        for block in reversed(around):
            names, ranges = self._of(block)
            if name not in names:
                names[name] = _numbered(name, ranges)
            if names[name] is not None:
                return names[name]
        return None


def _numbered(name: str, ranges: Sequence[tuple[str, int, int]]) -> int | None:
    """Size of a register that is one of some ranges; None for another name."""
    stem = name.rstrip("0123456789")
    number = name[len(stem) :]
    return next((bits for prefix, count, bits in ranges if number and prefix == stem and int(number) < count), None)


@dataclass
class Thunks:
    """Copy instructions that are executed later, one function for each form; the model calls them by number."""

    bodies: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, lines: Iterable[str]) -> int:
        """The number of the form whose body reads its operands from `%ops` and executes them."""
        body = "\n".join(lines)
        if body not in self.numbers:
            self.numbers[body] = len(self.bodies)
            self.bodies.append(body)
        return self.numbers[body]

    def functions(self) -> str:
        """The functions and the dispatcher that the model calls."""
        parts = []
        for number, body in enumerate(self.bodies):
            parts.append(
                f".func cupymla_emulate_thunk_{number} (.param .b64 operands)\n{{\n"
                ".reg .b64 %ops;\nld.param.b64 %ops, [operands];\n"
                f"{body}\nret;\n}}"
            )
        dispatch = [".visible .func cupymla_emulate_dispatch (.param .b32 number, .param .b64 operands)", "{"]
        dispatch += [".reg .b32 %n;", ".reg .b64 %o;", ".reg .pred %p;"]
        dispatch += ["ld.param.b32 %n, [number];", "ld.param.b64 %o, [operands];"]
        for number in range(len(self.bodies)):
            dispatch += [
                f"setp.ne.b32 %p, %n, {number};",
                f"@%p bra L{number};",
                "{ .param .b64 q; st.param.b64 [q], %o;",
                f"call cupymla_emulate_thunk_{number}, (q); }}",
                f"L{number}:",
            ]
        return "\n".join([*parts, *dispatch, "ret;", "}"])


class Code:
    """The replacement of one instruction, line by line, in a scope of its own.

    Attributes:
        instruction: what is replaced.
        site: its number; the model reports it and a launch may remove it.
        thunks: where forms of copies are kept.
    """

    def __init__(
        self,
        instruction: Instruction,
        site: int,
        source: Source,
        registers: Registers,
        around: Sequence[Block],
        thunks: Thunks,
    ) -> None:
        self.instruction = instruction
        self.site = site
        self.thunks = thunks
        self.uses_buffer = False
        self._source = source
        self._registers = registers
        self._around = around
        self._lines: list[str] = []
        self._temporaries = 0
        self._labels = 0

    # Reading operands ------------------------------------------------------------------------------------------

    def error(self, what: str) -> PtxError:
        """An error that names the instruction and its line."""
        text = self._source.text[self.instruction.start : self.instruction.end]
        return self._source.error(self.instruction.start, what, text)

    def operand(self, index: int) -> Operand:
        """An operand, counted from 0. Raises PtxError when there are fewer."""
        if index >= len(self.instruction.operands):
            raise self.error(f"expected at least {index + 1} operands")
        return self.instruction.operands[index]

    def bits(self, operand: Operand) -> int | None:
        """The size of a register operand; None for anything else."""
        return self._registers.bits(operand.text, self._around) if isinstance(operand, Name) else None

    def inner(self, operand: Operand) -> Operand:
        """What stands in an address's brackets."""
        if not isinstance(operand, Address) or len(operand.items) != 1:
            raise self.error(f"expected one address in brackets, found {operand}")
        return operand.items[0]

    def items(self, operand: Operand) -> tuple[Operand, ...]:
        """The elements of a vector; a lone operand is a vector of one."""
        return operand.items if isinstance(operand, Vector) else (operand,)

    # Writing -----------------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        """Add a line."""
        self._lines.append(text)

    def temporary(self, bits: int) -> str:
        """A new register of 1 (a predicate), 8, 16, 32 or 64 bits."""
        name = f"%emu{self._temporaries}"
        self._temporaries += 1
        self.line(f".reg .{'pred' if bits == 1 else f'b{bits}'} {name};")
        return name

    def label(self) -> str:
        """A new label of this scope."""
        self._labels += 1
        return f"EMU_{self._labels}"

    def value(self, operand: Operand | str, bits: int = 32) -> str:
        """A register of `bits` with an operand's value: register, constant, predicate or variable's address."""
        if isinstance(operand, Negated) or self.bits_of(operand) == 1:
            return self._predicate_value(operand)
        name = self.temporary(bits)
        if isinstance(operand, Offset):
            base = self.value(operand.base, bits)
            self.line(f"add.s{bits} {name}, {base}, {operand.constant};")
            return name
        have = self.bits_of(operand)
        if have is not None and have != bits:
            self.line(f"cvt.u{bits}.u{have} {name}, {operand};")
        else:
            self.line(f"mov.b{bits} {name}, {operand};")
        return name

    def bits_of(self, operand: Operand | str) -> int | None:
        """Like `bits`, for text as well."""
        if isinstance(operand, str):
            return self._registers.bits(operand, self._around)
        return self.bits(operand)

    def _predicate_value(self, operand: Operand | str) -> str:
        name = self.temporary(32)
        yes, no = ("0", "1") if isinstance(operand, Negated) else ("1", "0")
        inner = operand.operand if isinstance(operand, Negated) else operand
        self.line(f"selp.b32 {name}, {yes}, {no}, {inner};")
        return name

    def shared(self, operand: Operand, named: bool) -> str:
        """A 32-bit register with a shared-memory address. `named`: the opcode names the state space."""
        inner = self.inner(operand)
        base = inner.base if isinstance(inner, Offset) else inner
        if self.bits(base) == 64 and not named:
            wide, narrow = self.value(inner, 64), self.temporary(32)
            self.line(f"cvta.to.shared.u64 {wide}, {wide};")
            self.line(f"cvt.u32.u64 {narrow}, {wide};")
            return narrow
        if self.bits(base) == 64:
            wide, narrow = self.value(inner, 64), self.temporary(32)
            self.line(f"cvt.u32.u64 {narrow}, {wide};")
            return narrow
        return self.value(inner, 32)

    def call(self, function: str, *arguments: str | int) -> str | None:
        """Call a function of the model with registers and numbers; returns the register of its result."""
        result, parameters = MODEL[function]
        if len(arguments) != len(parameters):
            raise ValueError(f"{function} takes {len(parameters)} arguments, not {len(arguments)}")
        registers = []
        for argument, bits in zip(arguments, parameters, strict=True):
            if isinstance(argument, int):
                name = self.temporary(bits)
                self.line(f"mov.b{bits} {name}, {argument};")
                registers.append(name)
            else:
                registers.append(argument)
        returned = self.temporary(result) if result else None
        self.line("{")
        for index, (register, bits) in enumerate(zip(registers, parameters, strict=True)):
            self.line(f".param .b{bits} q{index}; st.param.b{bits} [q{index}], {register};")
        listed = ", ".join(f"q{i}" for i in range(len(parameters)))
        if result:
            self.line(f".param .b{result} r; call (r), cupymla_emulate_{function}, ({listed});")
            self.line(f"ld.param.b{result} {returned}, [r];")
        elif parameters:
            self.line(f"call cupymla_emulate_{function}, ({listed});")
        else:
            self.line(f"call cupymla_emulate_{function};")
        self.line("}")
        return returned

    def buffer(self, values: Sequence[tuple[str, int]]) -> str:
        """Put registers of 32 or 64 bits into local memory, 8 bytes each; returns a register with its address."""
        address = self.buffer_address()
        for index, (register, bits) in enumerate(values):
            wide = register
            if bits != 64:
                wide = self.temporary(64)
                self.line(f"cvt.u64.u{bits} {wide}, {register};")
            self.line(f"st.local.b64 [{BUFFER}+{8 * index}], {wide};")
        return address

    def buffer_address(self) -> str:
        """A register with the generic address of the function's local buffer."""
        self.uses_buffer = True
        address = self.temporary(64)
        self.line(f"mov.u64 {address}, {BUFFER};")
        self.line(f"cvta.local.u64 {address}, {address};")
        return address

    def unless_removed(self, text: str, instead: str = "") -> None:
        """An instruction that a launch can take away, and what then runs in its place."""
        predicate = self.removed()
        if instead:
            self.line(f"@{predicate} {instead}")
        self.line(f"@!{predicate} {text}")

    def removed(self) -> str:
        """A predicate: whether this launch has taken this instruction away."""
        word, predicate = self.temporary(32), self.temporary(1)
        self.line(f"ld.volatile.global.b32 {word}, [{LAUNCH}+{REMOVED_OFFSET}];")
        self.line(f"setp.eq.b32 {predicate}, {word}, {self.site};")
        return predicate

    def original(self, **changes: object) -> str:
        """The instruction as it stands, without its guard; `opcode` and `operands` may be changed."""
        opcode = changes.get("opcode", self.instruction.opcode)
        operands = changes.get("operands", self.instruction.operands)
        assert isinstance(operands, tuple)
        return f"{opcode} {', '.join(map(str, operands))};"

    def text(self) -> str:
        """The replacement: a scope that is skipped where the instruction's guard does not hold."""
        guard = self.instruction.guard
        lines = ["{", *self._lines, "}"]
        if guard:
            opposite = f"@{'' if guard.negated else '!'}{guard.register}"
            lines = ["{", f"{opposite} bra EMU_END;", *lines, "EMU_END:", "}"]
        return "\n".join(lines)


def constant(operand: Operand) -> int:
    """The value of a decimal or hexadecimal constant. Raises ValueError for anything else."""
    if not isinstance(operand, Constant):
        raise ValueError(f"{operand} is no constant")
    return int(operand.text.rstrip("U"), 0)


def body_of(function: Function) -> Block:
    """A defined function's body."""
    assert function.body is not None
    return function.body
