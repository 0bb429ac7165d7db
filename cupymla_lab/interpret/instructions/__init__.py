"""What executes each instruction: a table from the first part of an opcode to what binds it.

A binder gets the operands' binder and the step, and returns a handler; the handler gets the threads that execute the
instruction. Modifiers that say how fast, how cached or how ordered something is mean nothing here and are ignored.
Source: PTX ISA 9.0, "Instruction Set"; each module names its sections.
"""

from __future__ import annotations

from ..operands import Operands
from ..program import ORDINARY, Program, Step
from ..traps import Trap, Unknown
from . import arithmetic, barriers, bits, compare, convert, copies, matrix, memory, mma, moves, warp, wgmma
from .kit import Builder

HANDLERS: dict[str, Builder] = {
    **arithmetic.HANDLERS,
    **bits.HANDLERS,
    **compare.HANDLERS,
    **convert.HANDLERS,
    **moves.HANDLERS,
    **memory.HANDLERS,
    **warp.HANDLERS,
    **barriers.HANDLERS,
    **copies.HANDLERS,
    **matrix.HANDLERS,
    **mma.HANDLERS,
    **wgmma.HANDLERS,
}


def bind(program: Program) -> None:
    """Bind every step of a program, once. Raises Unknown naming the instruction that is not known and its line."""
    if program.operands is not None:
        return
    operands = Operands(program)
    for step in program.steps:
        try:
            if step.guard is not None:
                step.test = operands.truth(step.guard.register, step.guard.negated)
            if step.kind == ORDINARY:
                step.run = _builder(step)(operands, step)
        except (Trap, KeyError, IndexError, ValueError, TypeError, StopIteration) as refused:
            why = refused.what if isinstance(refused, Trap) else f"a form of it that is not known ({refused!r})"
            raise Unknown(why, program.name, step.line, step.text, step.location) from refused
    program.operands = operands


def _builder(step: Step) -> Builder:
    found = HANDLERS.get(step.parts[0])
    if found is None:
        raise Unknown(f"instruction {step.parts[0]} is not known to the interpreter")
    return found
