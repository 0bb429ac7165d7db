"""A kernel made ready to run: scopes flattened, registers numbered, variables laid out, labels resolved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cupymla.build.cubin import facts_of

from .. import ptx
from ..ptx.syntax import (
    Address,
    Block,
    Constant,
    Function,
    Guard,
    Instruction,
    Label,
    Module,
    Name,
    Negated,
    Offset,
    Operand,
    Pair,
    Variable,
    names_in,
)
from ..ptx.variables import initial_bytes, size_bytes
from .memory import PARAMETER_STRIDE, PARAMETER_WINDOW
from .registers import at_launch
from .traps import Trap, Unknown
from .types import TYPES, Array, DType, register_dtype

if TYPE_CHECKING:
    from .operands import Operands

ORDINARY, BRANCH, EXIT = range(3)


@dataclass(slots=True)
class Step:
    """One instruction.

    Attributes:
        kind: ORDINARY, BRANCH or EXIT.
        parts: its opcode, cut at the dots.
        operands: with the names of inner scopes made unique.
        guard: the predicate it runs under.
        line: its line in the PTX text.
        text: as it stands there.
        location: where it comes from in CUDA sources, or ""; see `ptx.Places`.
        run: what executes it; set when the program is bound.
        test: reads the guard; set likewise.
        target: where a branch goes.
    """

    kind: int
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Guard | None
    line: int
    text: str
    location: str
    run: Callable[[Any], Any] = field(default=lambda lanes: None)
    test: Callable[[Any], Array] | None = None
    target: int = 0


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter: its name, its size in bytes, and the address it is given."""

    name: str
    size: int
    address: int = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """A variable in shared or local memory: where it begins, and its size (0: as much as the launch gives)."""

    offset: int
    size: int


class Program:
    """One kernel of a PTX module.

    Attributes:
        name: of the kernel.
        steps: its instructions.
        labels: index of the step behind each label.
        registers: for each register the kind of file it lies in and its row there.
        rows: how many registers each file has.
        parameters: in order.
        shared: shared variables by name; dynamic shared memory begins at `shared_bytes`, rounded up to its alignment.
        shared_bytes: size of the static ones.
        local: local variables by name.
        local_bytes: their size per thread.
        constants: initialised global and constant variables by name, as bytes.
        facts: launch facts that the module states.
        ports: for each port of a register the file, the row and the type it shows, see `threads.Group.ports`.
        ports_of: the ports of each register.
        operands: what bound the steps to what executes them; None before.
        product_registers: of accumulators and fragments of wgmma, once it is bound.
        threads: the most threads per CTA by `.reqntid` or `.maxntid`; 0 when there is neither.
        smallest_store: bytes of the smallest element that is stored, at most 4.
        fences_global: whether any of its proxy fences is for global memory.
        launch_registers: registers per thread at launch by `.maxnreg` or launch bounds; 0 when there is neither.
    """

    def __init__(self, module: Module, name: str) -> None:
        found = module.kernel(name)
        if found is None or found.body is None:
            there = ", ".join(f.name for f in module.functions if f.kernel) or "none"
            raise Trap(f"the PTX has no kernel '{name}'; its kernels: {there}")
        self.name = name
        self.steps: list[Step] = []
        self.labels: dict[str, int] = {}
        self.registers: dict[str, tuple[DType, int]] = {}
        self.rows: dict[DType, int] = {}
        self.shared: dict[str, Placed] = {}
        self.shared_bytes = 0
        self.local: dict[str, Placed] = {}
        self.local_bytes = 0
        self.constants: dict[str, Array] = {}
        self.parameters = tuple(
            replace(parameter, address=PARAMETER_WINDOW + number * PARAMETER_STRIDE)
            for number, parameter in enumerate(_parameters(found))
        )
        self.ports: list[tuple[DType, int, DType]] = []
        self.ports_of: dict[tuple[DType, int], list[int]] = {}
        self.operands: Operands | None = None
        self.product_registers: set[tuple[DType, int]] = set()
        self.threads = _extent(found, ".reqntid") or _extent(found, ".maxntid")
        ctas = _extent(found, ".minnctapersm") or 1
        self.launch_registers = _extent(found, ".maxnreg") or (self.threads and at_launch(self.threads, ctas))
        self._module = module
        self._dynamic: list[tuple[str, int]] = []
        for item in module.items:
            if isinstance(item, Variable):
                self._variable(item)
        held = self.constants
        self.facts = facts_of(lambda name: held[name].tobytes() if name in held else None)
        self._flatten(found.body)
        for dynamic, alignment in self._dynamic:
            self.shared[dynamic] = Placed(-(-self.shared_bytes // alignment) * alignment, 0)
        self._resolve()
        self.smallest_store = min([4, *map(_stored_bytes, self.steps)])
        self.fences_global = any(step.parts == ("fence", "proxy", "async") for step in self.steps)

    # Declarations ----------------------------------------------------------------------------------------------

    def _variable(self, item: Variable) -> None:
        size = size_bytes(item)
        name = item.names[0][0]
        alignment = item.alignment or TYPES[item.type].itemsize
        if item.space == "shared":
            if item.external or not size:
                self._dynamic.append((name, alignment))
            else:
                self.shared_bytes = -(-self.shared_bytes // alignment) * alignment
                self.shared[name] = Placed(self.shared_bytes, size)
                self.shared_bytes += size
        elif item.space == "local":
            self.local_bytes = -(-self.local_bytes // alignment) * alignment
            self.local[name] = Placed(self.local_bytes, size)
            self.local_bytes += size
        elif item.space in ("global", "const"):
            self.constants[name] = np.frombuffer(initial_bytes(item), np.uint8).copy()

    def _declare(self, item: Variable, scope: dict[str, str], depth: int, unique: int) -> None:
        if item.space != "reg":
            self._variable(item)
            return
        dtype = register_dtype(item.type)
        for name, count in item.names:
            if count is not None:
                for number in range(count):
                    self._register(f"{name}{number}", dtype)
            elif depth > 1:
                scope[name] = f"{name}@{unique}"
                self._register(scope[name], dtype)
            else:
                self._register(name, dtype)

    def _register(self, name: str, dtype: DType) -> None:
        self.registers[name] = dtype, -1

    def _use(self, name: str) -> None:
        """Give a register a row when it is first seen in an instruction; most of those declared are not used."""
        place = self.registers.get(name)
        if place is not None and place[1] < 0:
            row = self.rows.get(place[0], 0)
            self.registers[name] = place[0], row
            self.rows[place[0]] = row + 1

    # Statements ------------------------------------------------------------------------------------------------

    def _flatten(self, body: Block) -> None:
        source = self._module.source
        scopes: dict[int, dict[str, str]] = {}
        places = ptx.Places(source.text)
        for statement, around in body.walk():
            for block in around[1:]:
                if id(block) not in scopes:
                    scopes[id(block)] = _inner_labels(block, len(scopes) + 1)
            names = [scopes[id(block)] for block in reversed(around[1:])]
            scope = names[0] if names else {}
            if isinstance(statement, Variable):
                self._declare(statement, scope, len(around), len(scopes))
            elif isinstance(statement, Label):
                self.labels[scope.get(statement.name, statement.name)] = len(self.steps)
            elif isinstance(statement, Instruction):
                line = source.line(statement.start)
                self._step(statement, names, line, places.of(line))

    def _step(self, instruction: Instruction, scopes: list[dict[str, str]], line: int, location: str) -> None:
        operands = tuple(_renamed(operand, scopes) for operand in instruction.operands)
        guard = instruction.guard
        if guard is not None:
            guard = Guard(_lookup(guard.register, scopes), guard.negated)
            self._use(guard.register)
        for operand in operands:
            for name in names_in(operand):
                self._use(name)
        parts = instruction.parts
        kind = BRANCH if parts[0] == "bra" else EXIT if parts[0] in ("ret", "exit") else ORDINARY
        self.steps.append(Step(kind, parts, operands, guard, line, str(instruction), location))

    def _resolve(self) -> None:
        for step in self.steps:
            if step.kind == BRANCH:
                label = str(step.operands[0])
                if label not in self.labels:
                    raise Unknown(f"no label {label}", self.name, step.line, step.text, step.location)
                step.target = self.labels[label]


def parse(text: str, entry: str) -> Program:
    """The kernel of that name in a PTX text. Raises PtxError where it is no PTX, Trap when it lacks the kernel."""
    return Program(ptx.parse(text, entry), entry)


def _inner_labels(block: Block, unique: int) -> dict[str, str]:
    labels = [s.name for s in block.statements if isinstance(s, Label)]
    return {name: f"{name}@{unique}" for name in labels}


def _lookup(name: str, scopes: list[dict[str, str]]) -> str:
    return next((scope[name] for scope in scopes if name in scope), name)


def _renamed(operand: Operand, scopes: list[dict[str, str]]) -> Operand:
    if not scopes or isinstance(operand, Constant):
        return operand
    if isinstance(operand, Name):
        return Name(_lookup(operand.text, scopes))
    if isinstance(operand, Negated):
        return Negated(_renamed(operand.operand, scopes))
    if isinstance(operand, Pair):
        return Pair(_renamed(operand.first, scopes), _renamed(operand.second, scopes))
    if isinstance(operand, Offset):
        return Offset(_renamed(operand.base, scopes), operand.constant)
    items = tuple(_renamed(item, scopes) for item in operand.items)
    if isinstance(operand, Address):
        return Address(items, operand.prefix)
    return type(operand)(items)


def _parameters(function: Function) -> Iterator[Parameter]:
    words = list(function.heading)
    if "(" not in words:
        return
    inside = words[words.index("(") + 1 : words.index(")")]
    declaration: list[str] = []
    for word in [*inside, ","]:
        if word != ",":
            declaration.append(word)
            continue
        if declaration:
            yield _parameter(declaration)
        declaration = []


def _parameter(words: list[str]) -> Parameter:
    """`.param .align 8 .b8 name[248]` or `.param .u64 .ptr .align 1 name`."""
    element = next(TYPES[w[1:]] for w in words if w[1:] in TYPES)
    if "[" in words:
        at = words.index("[")
        return Parameter(words[at - 1], int(words[at + 1]) * element.itemsize)
    return Parameter(words[-1], element.itemsize)


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


def _stored_bytes(step: Step) -> int:
    """Bytes of the elements that an instruction stores; 4 where it stores none, or larger ones."""
    if step.parts[0] not in ("st", "atom", "red") or "local" in step.parts or "param" in step.parts:
        return 4
    return min([4, *(TYPES[part].itemsize for part in step.parts[1:] if part in TYPES)])
