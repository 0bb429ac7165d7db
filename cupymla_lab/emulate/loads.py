"""Registers that are used before `tcgen05.wait::ld`, found in the text.

The model fills the registers of a `tcgen05.ld` at once, hardware some time later: a wait that is missing, or that
stands behind the first use, changes nothing in the emulator. So the text is followed along every path instead.

A `mov` between registers is no use, but gives the value another name: compilers put those that turn bits into floats
in front of the wait, and ptxas makes no instructions of them.

Source: PTX ISA 9.0, "Tensorcore 5th Generation Instructions: tcgen05.wait".
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..ptx import Source, parse
from ..ptx.syntax import Block, Instruction, Label, Module, Operand, Variable, names_in

_Register = tuple[int, str]
"""The scope that declares it, by its place in the text, and its name."""


@dataclass(frozen=True, slots=True)
class EarlyUse:
    """A register that a load may not have filled yet.

    Attributes:
        line: where it is used.
        register: its name.
        instruction: what uses it.
    """

    line: int
    register: str
    instruction: str


def early_uses(text: str, name: str = "<ptx>", without: int = 0) -> list[EarlyUse]:
    """What is used between a `tcgen05.ld` and the next `tcgen05.wait::ld`, on any path.

    Args:
        text: PTX for sm_100f.
        name: what errors call it.
        without: a line whose wait counts as taken away; 0 for none.

    Raises PtxError where the text is no PTX.
    """
    module = _parsed(text, name)
    found: list[EarlyUse] = []
    for function in module.functions:
        if function.body is not None:
            found += _Paths(module.source, function.body, without).uses()
    return found


def waits(text: str, name: str = "<ptx>") -> list[int]:
    """The lines of a text's `tcgen05.wait::ld`."""
    module = _parsed(text, name)
    return [
        module.source.line(step.start)
        for function in module.functions
        for step, _ in (function.body.walk() if function.body is not None else ())
        if isinstance(step, Instruction) and step.opcode.startswith("tcgen05.wait::ld")
    ]


@functools.lru_cache(maxsize=1)
def _parsed(text: str, name: str) -> Module:
    """A text is asked about once for each of its waits."""
    return parse(text, name, debug=False)


class _Paths:
    """A function's instructions, which of them may follow which, and the registers that are being loaded at each."""

    def __init__(self, source: Source, body: Block, without: int) -> None:
        self._source = source
        self._without = without
        self._steps: list[Instruction] = []
        self._around: list[tuple[Block, ...]] = []
        self._labels: dict[tuple[int, str], int] = {}
        self._scopes: dict[int, frozenset[str]] = {}
        for statement, around in body.walk():
            if isinstance(statement, Instruction):
                self._steps.append(statement)
                self._around.append(around)
            elif isinstance(statement, Label):
                self._labels[around[-1].start, statement.name] = len(self._steps)

    def uses(self) -> list[EarlyUse]:
        loading: dict[int, frozenset[_Register]] = {0: frozenset()}
        waiting = [0] if self._steps else []
        while waiting:
            at = waiting.pop()
            after = self._after(at, loading[at])
            for following in self._following(at):
                known = loading.get(following)
                if known is None or not after <= known:
                    loading[following] = after | (known or frozenset())
                    waiting.append(following)
        return [use for at in sorted(loading) for use in self._used(at, loading[at])]

    def _after(self, at: int, loading: frozenset[_Register]) -> frozenset[_Register]:
        step = self._steps[at]
        if step.opcode.startswith("tcgen05.ld."):
            return loading | self._registers(at, step.operands[:1])
        if step.parts[0] == "mov":
            named = self._registers(at, step.operands[:1])
            return loading | named if self._registers(at, step.operands[1:]) & loading else loading - named
        ends = step.opcode.startswith("tcgen05.wait::ld") and step.guard is None
        return frozenset() if ends and self._source.line(step.start) != self._without else loading

    def _used(self, at: int, loading: frozenset[_Register]) -> Iterator[EarlyUse]:
        step = self._steps[at]
        if step.parts[0] == "mov":
            return
        operands = step.operands[1:] if step.opcode.startswith("tcgen05.ld.") else step.operands
        for _, register in sorted(self._registers(at, operands) & loading):
            yield EarlyUse(self._source.line(step.start), register, str(step))

    def _registers(self, at: int, operands: Sequence[Operand]) -> frozenset[_Register]:
        found = set()
        for operand in operands:
            for name in names_in(operand):
                scope = next((b.start for b in reversed(self._around[at]) if self._declares(b, name)), 0)
                found.add((scope, name))
        return frozenset(found)

    def _declares(self, block: Block, name: str) -> bool:
        """Whether a scope declares a register: by its name, or as one of `%r<100>`."""
        stems = self._scopes.get(block.start)
        if stems is None:
            declared = [s for s in block.statements if isinstance(s, Variable) and s.space == "reg"]
            stems = frozenset(n + "<" if count else n for s in declared for n, count in s.names)
            self._scopes[block.start] = stems
        return name in stems or name.rstrip("0123456789") + "<" in stems

    def _following(self, at: int) -> list[int]:
        step, next_ = self._steps[at], [at + 1] if at + 1 < len(self._steps) else []
        stem = step.parts[0]
        if stem == "brx":
            return [*sorted(self._labels.values()), *next_]  # whichever the table names
        if stem not in ("bra", "ret", "exit", "trap"):
            return next_
        rest = next_ if step.guard is not None else []
        if stem != "bra":
            return rest
        name = str(step.operands[0])
        targets = (self._labels.get((block.start, name)) for block in reversed(self._around[at]))
        target = next((place for place in targets if place is not None), None)
        if target is None:
            raise self._source.error(step.start, "a branch to a label that is not there", str(step))
        return [*rest, *([target] if target < len(self._steps) else [])]
