"""What the instruction modules share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ..operands import Operands
from ..program import Step
from ..threads import Lanes
from ..traps import Unknown
from ..types import HALVES, TYPES, Array, halves, joined, wide

Handler: TypeAlias = "Callable[[Lanes], int | None]"
Builder: TypeAlias = "Callable[[Operands, Step], Handler]"


def kind_of(step: Step, which: int = -1) -> str:
    """One of the types among an opcode's parts, by default the last. Raises Unknown when there is none."""
    found = [part for part in step.parts[1:] if part in TYPES]
    if not found:
        raise Unknown("no type")
    return found[which]


def elementwise(operands: Operands, step: Step, kind: str, function: Callable[..., Array]) -> Handler:
    """Result and sources of one type. 16-bit floats, alone or in pairs, are computed in float32 or wider."""
    if kind in ("f16x2", "bf16x2"):
        return _packed(operands, step, kind, function)
    sources = [operands.read(operand, kind) for operand in step.operands[1:]]
    put = operands.write(step.operands[0], kind)
    if kind in HALVES:
        element = HALVES[kind]

        def half(lanes: Lanes) -> None:
            put(lanes, function(*[wide(get(lanes)) for get in sources]).astype(element))

        return half
    if len(sources) == 1:
        (one,) = sources
        return lambda lanes: put(lanes, function(one(lanes)))
    if len(sources) == 2:
        first, second = sources
        return lambda lanes: put(lanes, function(first(lanes), second(lanes)))
    return lambda lanes: put(lanes, function(*[get(lanes) for get in sources]))


def _packed(operands: Operands, step: Step, kind: str, function: Callable[..., Array]) -> Handler:
    element = HALVES[kind]
    sources = [operands.read(operand, "b32") for operand in step.operands[1:]]
    put = operands.write(step.operands[0], "b32")

    def run(lanes: Lanes) -> None:
        values = [wide(halves(get(lanes), element)) for get in sources]
        put(lanes, joined(function(*values).astype(element)))

    return run


def nothing(operands: Operands, step: Step) -> Handler:
    """An instruction that means nothing here: hints, and orders that a sequential machine keeps anyway."""
    return lambda lanes: None
