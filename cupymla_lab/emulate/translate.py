"""PTX to PTX for sm_90a, in which every instruction that Hopper lacks is a call into the model.

Of kernels for older targets what is told to the model stays: waits, arrivals, fences and copies, so that they run on
the host machine as Blackwell's do. Everything that is not translated stays byte for byte as it was, debug information
included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cupymla.build.cubin import facts_of

from ..ptx import Places, PtxError, Source, parse
from ..ptx.syntax import Block, Directive, Function, Instruction, Label, Module, Variable, names_in
from ..ptx.variables import initial_bytes
from .code import BUFFER, BUFFER_BYTES, Code, Registers, Thunks, body_of, prototypes
from .instructions import PLAIN, newer_qualifier, row_for
from .lower_sync import leave

TARGET = "sm_90a"
BLACKWELL = ("sm_100", "sm_103")
"""What is translated for a Hopper GPU: these, their "a" and their "f" variants. What sm_103 alone has is left out."""
OLDER = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90")
"""What the host machine runs besides: these and sm_90a."""

# PTX ISA 9.0, "Special Registers".
_SPECIAL_REGISTER = re.compile(
    r"""%(?:n?tid | n?ctaid | n?clusterid | cluster_n?ctaid)(?:\.[xyzw])?
      | %cluster_n?ctarank | %is_explicit_cluster | %gridid
      | %laneid | %n?warpid | %n?smid | %lanemask_(?:eq|le|lt|ge|gt)
      | %clock(?:_hi|64)? | %globaltimer(?:_lo|_hi)? | %pm\d(?:_64)? | %envreg\d+
      | %(?:total|aggr|dynamic)_smem_size | %reserved_smem_offset_\w+ | %current_graph_exec""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Site:
    """One translated instruction.

    Attributes:
        number: what the model knows it by, from 1.
        line: its line in the PTX that was translated.
        text: the instruction as it stands there.
        kernel: the function it is in.
        mutation: what a mutation test calls its removal, or "".
        place: where it comes from in CUDA sources, or ""; see `ptx.Places`.
    """

    number: int
    line: int
    text: str
    kernel: str
    mutation: str
    place: str = ""


@dataclass(frozen=True, slots=True)
class Translation:
    """A translated module.

    Attributes:
        name: what the PTX is called.
        source: the target that it was compiled for, such as sm_100a.
        text: PTX for sm_90a.
        sites: its translated instructions, number i at index i - 1.
        kernels: the names of its kernels.
        lines: for each line of `text`, the line it comes from, 0 for lines of ours.
        alignment: that the module asks for its dynamic shared memory, in bytes; 1 where it has none.
        facts: the launch facts that the module states.
    """

    name: str
    source: str
    text: str
    sites: tuple[Site, ...]
    kernels: tuple[str, ...]
    lines: tuple[int, ...]
    alignment: int
    facts: Mapping[str, int]

    def site(self, number: int) -> Site | None:
        """The instruction of that number."""
        return self.sites[number - 1] if 1 <= number <= len(self.sites) else None

    def origin(self, line: int) -> int:
        """The line that was translated of which `line` of `text` came; 0 where there is none."""
        return self.lines[line - 1] if 1 <= line <= len(self.lines) else 0


def translate(text: str, name: str = "<ptx>", padding: Mapping[str, int] | None = None) -> Translation:
    """Translate PTX for Blackwell (sm_100f, sm_100a, sm_103a), or for an older target, for the host machine.

    Args:
        text: the PTX.
        name: what errors call it, usually its file.
        padding: bytes of shared memory that kernels, by name, get beside their own.

    Raises:
        PtxError: it is no PTX, is for another target, or holds an instruction that is left out.
    """
    return _Translator(parse(text, name, debug=False), padding or {}).run()


@dataclass(frozen=True, slots=True)
class _Edit:
    start: int
    end: int
    text: str


class _Translator:
    def __init__(self, module: Module, padding: Mapping[str, int]) -> None:
        self._module = module
        self._padding = padding
        self._source: Source = module.source
        self._places = Places(module.source.text)
        self._sites: list[Site] = []
        self._thunks = Thunks()
        self._registers = Registers()
        self._names: dict[str, frozenset[str]] = {}

    def run(self) -> Translation:
        edits = [self._target()]
        for function in self._module.functions:
            if function.body is not None:
                edits += self._function(function)
        edits.append(self._head())
        text, lines = self._apply(sorted(edits, key=lambda edit: (edit.start, edit.end)))
        kernels = tuple(f.name for f in self._module.functions if f.kernel and f.body is not None)
        text += "\n" + self._thunks.functions() + "\n"
        sites, alignment = tuple(self._sites), self._alignment()
        return Translation(self._source.name, self._named(), text, sites, kernels, lines, alignment, self._facts())

    def _facts(self) -> dict[str, int]:
        held = {name: item for item in self._module.items if isinstance(item, Variable) for name, _ in item.names}
        return facts_of(lambda name: initial_bytes(held[name]) if name in held else None)

    def _alignment(self) -> int:
        variables = [item for item in self._module.items if isinstance(item, Variable)]
        for function in self._module.functions:
            if function.body is not None:
                variables += [found for found, _ in function.body.walk() if isinstance(found, Variable)]
        asked = (each.alignment for each in variables if each.space == "shared" and each.external)
        return max(asked, default=1) or 1

    def _named(self) -> str:
        target = self._module.directive(".target")
        return target.words[1] if target is not None and len(target.words) > 1 else "no name"

    def _target(self) -> _Edit:
        target = self._module.directive(".target")
        if target is None:
            raise self._source.error(0, "a PTX text has a .target")
        if not self._named().startswith(BLACKWELL) and self._named().rstrip("a") not in OLDER:
            expected = f"PTX for {', '.join((*OLDER, 'sm_90a', 'sm_100f', *(f'{name}a' for name in BLACKWELL)))}"
            raise self._source.error(target.start, f"expected {expected}, found {self._named()}")
        return _Edit(target.start, target.end, " ".join((".target", TARGET, *target.words[2:])))

    def _head(self) -> _Edit:
        """The model's prototypes, behind the module's own directives."""
        last = max(
            item.end
            for item in self._module.items
            if isinstance(item, Directive) and item.words[0] in (".version", ".target", ".address_size")
        )
        return _Edit(last, last, "\n" + prototypes() + "\n")

    # Functions -------------------------------------------------------------------------------------------------

    def _function(self, function: Function) -> Iterator[_Edit]:
        body = body_of(function)
        uses_buffer = False
        for statement, around in body.walk():
            if not isinstance(statement, Instruction):
                continue
            code = self._instruction(statement, around, function)
            if code is not None:
                uses_buffer |= code.uses_buffer
                yield _Edit(statement.start, statement.end, code.text())
        opening = f".local .align 16 .b8 {BUFFER}[{BUFFER_BYTES}];" if uses_buffer else ""
        if function.name in self._padding:
            opening += f".shared .b8 cupymla_emulate_padding[{self._padding[function.name]}];"
        if opening:
            yield _Edit(body.start + 1, body.start + 1, "\n" + opening)
        if function.kernel:
            at = self._first_statement(body)
            yield _Edit(at, at, "call cupymla_emulate_enter;\n")

    def _first_statement(self, body: Block) -> int:
        for statement in body.statements:
            if isinstance(statement, Instruction | Label | Block):
                return statement.start
        return body.end - 1

    def _instruction(self, instruction: Instruction, around: Sequence[Block], function: Function) -> Code | None:
        self._require_declared(instruction, around, function)
        stem = instruction.parts[0]
        row = row_for(instruction.opcode, len(instruction.operands))
        leaves = stem == "exit" or (stem == "ret" and function.kernel)
        if row is None and not leaves:
            self._require_plain(instruction)
            return None
        number = len(self._sites) + 1
        code = Code(instruction, number, self._source, self._registers, around, self._thunks)
        if row is not None and row.lower is None:
            raise code.error(f"{row.name} is left out ({row.note})")
        lower = row.lower if row is not None and row.lower is not None else leave
        mutation = row.mutation if row is not None else ""
        try:
            lower(code)
        except PtxError:
            raise  # it names the instruction already
        except ValueError as error:
            raise code.error(str(error)) from error
        except IndexError as error:
            raise code.error("expected more operands") from error
        self._sites.append(self._site(instruction, number, function, mutation))
        return code

    def _site(self, instruction: Instruction, number: int, function: Function, mutation: str) -> Site:
        text = " ".join(self._source.text[instruction.start : instruction.end].split())
        line = self._source.line(instruction.start)
        return Site(number, line, text, function.name, mutation, self._places.of(line))

    def _require_plain(self, instruction: Instruction) -> None:
        if instruction.parts[0] not in PLAIN:
            raise self._error(instruction, "an instruction that no translation is known for")
        newer = newer_qualifier(instruction.parts)
        if newer:
            raise self._error(instruction, f"no translation is known for {instruction.parts[0]} with .{newer}")

    def _require_declared(self, instruction: Instruction, around: Sequence[Block], function: Function) -> None:
        named = [name for operand in instruction.operands for name in names_in(operand)]
        if instruction.guard:
            named.append(instruction.guard.register)
        for name in named:
            if not name.startswith("%"):
                continue
            register = name.split(".", 1)[0]  # of %v.x, an element of a vector
            if self._registers.bits(register, around) is not None or _SPECIAL_REGISTER.fullmatch(name):
                continue
            if register not in self._names_in(function):
                raise self._error(instruction, f"the register {name} is declared nowhere")

    def _names_in(self, function: Function) -> frozenset[str]:
        """What a function's instructions may name beside the registers of its scopes: it begins with % but seldom."""
        if function.name not in self._names:
            found = {*function.heading, *declared(self._module), *(each.name for each in self._module.functions)}
            for statement, _ in body_of(function).walk():
                if isinstance(statement, Variable) and statement.space != "reg":
                    found.update(name for name, _ in statement.names)
                elif isinstance(statement, Label):
                    found.add(statement.name)
                elif isinstance(statement, Directive):
                    found.add(statement.words[0])
            self._names[function.name] = frozenset(found)
        return self._names[function.name]

    def _error(self, instruction: Instruction, what: str) -> PtxError:
        return self._source.error(instruction.start, what, self._source.text[instruction.start : instruction.end])

    # Text ------------------------------------------------------------------------------------------------------

    def _apply(self, edits: Sequence[_Edit]) -> tuple[str, tuple[int, ...]]:
        """The text with its edits, and the line that each of its lines comes from."""
        parts: list[str] = []
        lines: list[int] = [1]
        at = 0
        for edit in edits:
            kept = self._source.text[at : edit.start]
            first = self._source.line(at)
            parts.append(kept)
            lines += [first + 1 + i for i in range(kept.count("\n"))]
            parts.append(edit.text)
            lines += [self._source.line(edit.start)] * edit.text.count("\n")
            at = edit.end
        rest = self._source.text[at:]
        parts.append(rest)
        lines += [self._source.line(at) + 1 + i for i in range(rest.count("\n"))]
        return "".join(parts), tuple(lines)


def declared(module: Module) -> tuple[str, ...]:
    """The names of a module's global variables."""
    return tuple(name for item in module.items if isinstance(item, Variable) for name, _ in item.names)
