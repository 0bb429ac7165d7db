"""Comparison and selection. Source: PTX ISA 9.0, "Comparison and Selection Instructions"."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..operands import Operands, pair
from ..program import Step
from ..threads import Lanes
from ..traps import Unknown
from ..types import HALVES, TYPES, Array, flushed, is_float, wide
from .kit import Builder, Handler, kind_of

_COMBINE: dict[str, Callable[..., Array]] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}

# Ordered comparisons are false when an operand is NaN; those that end in u are true then.
_ORDERED: dict[str, Callable[..., Array]] = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_OPPOSITE = {"equ": "eq", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}


def _has_nan(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


def _comparison(name: str, kind: str) -> Callable[[Array, Array], Array]:
    if name == "ne":
        return np.not_equal if not is_float(kind) else lambda a, b: (a != b) & ~_has_nan(a, b)
    if name == "equ":
        return lambda a, b: (a == b) | _has_nan(a, b)
    if name in _OPPOSITE:
        opposite = _ORDERED[_OPPOSITE[name]]
        return lambda a, b: ~opposite(a, b)
    if name == "num":
        return lambda a, b: ~_has_nan(a, b)
    return _has_nan if name == "nan" else _ORDERED[name]


def _compared(operands: Operands, step: Step, kind: str) -> Callable[[Lanes], Array]:
    if kind in ("f16x2", "bf16x2"):
        raise Unknown("comparison of pairs")
    first, second = operands.read(step.operands[1], kind), operands.read(step.operands[2], kind)
    compare = _comparison(step.parts[1], kind)
    if kind in HALVES:
        return lambda lanes: compare(wide(first(lanes)), wide(second(lanes)))
    if "ftz" in step.parts:
        return lambda lanes: compare(flushed(first(lanes)), flushed(second(lanes)))
    return lambda lanes: compare(first(lanes), second(lanes))


def _set_predicate(operands: Operands, step: Step) -> Handler:
    kind = kind_of(step)
    holds = _compared(operands, step, kind)
    first, second = pair(step.operands[0])
    put = operands.write(first, "pred")
    opposite = None if second is None else operands.write(second, "pred")
    combined = next((_COMBINE[p] for p in step.parts[2:-1] if p in _COMBINE), None)
    if combined is None and opposite is None:
        return lambda lanes: put(lanes, holds(lanes))
    with_ = operands.read(step.operands[3], "pred") if combined else None

    def run(lanes: Lanes) -> None:
        value = holds(lanes)
        other = ~value
        if combined is not None and with_ is not None:
            also = with_(lanes)
            value, other = combined(value, also), combined(other, also)
        put(lanes, value)
        if opposite is not None:
            opposite(lanes, other)

    return run


def _set(operands: Operands, step: Step) -> Handler:
    result, kind = kind_of(step, -2), kind_of(step)
    holds = _compared(operands, step, kind)
    put = operands.write(step.operands[0], result)
    true = TYPES[result].type(1) if is_float(result) else np.array(-1).astype(TYPES[result])[()]
    return lambda lanes: put(lanes, np.where(holds(lanes), true, TYPES[result].type(0)))


def _select(operands: Operands, step: Step) -> Handler:
    kind = kind_of(step)
    first, second = operands.read(step.operands[1], kind), operands.read(step.operands[2], kind)
    chooses, put = operands.read(step.operands[3], "pred"), operands.write(step.operands[0], kind)
    return lambda lanes: put(lanes, np.where(chooses(lanes), first(lanes), second(lanes)))


def _select_by_sign(operands: Operands, step: Step) -> Handler:
    kind = step.parts[-2]
    first, second = operands.read(step.operands[1], kind), operands.read(step.operands[2], kind)
    sign, put = operands.read(step.operands[3], step.parts[-1]), operands.write(step.operands[0], kind)
    return lambda lanes: put(lanes, np.where(sign(lanes) >= 0, first(lanes), second(lanes)))


_PROPERTIES: dict[str, Callable[[Array], Array]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: ~np.isnan(x),
    "notanumber": np.isnan,
    "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny),
    "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny),
}


def _test_property(operands: Operands, step: Step) -> Handler:
    has = _PROPERTIES[step.parts[1]]
    value, put = operands.read(step.operands[1], kind_of(step)), operands.write(step.operands[0], "pred")
    return lambda lanes: put(lanes, has(value(lanes)))


HANDLERS: dict[str, Builder] = {
    "setp": _set_predicate,
    "set": _set,
    "selp": _select,
    "slct": _select_by_sign,
    "testp": _test_property,
}
