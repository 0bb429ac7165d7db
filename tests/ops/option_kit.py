"""Values to try the declared options with, by what each may be (`cupymla.ops.arguments`)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cupymla.ops import registry
from cupymla.ops.arguments import Arguments, Axis, Check, Choice, Dtype, Flag, Integer, Number

DECLARED: dict[str, Arguments[Any, Any]] = {
    entry.name: spec.ARGUMENTS for entry in registry.OPERATORS for spec in (import_module(f"{entry.module}.spec"),)
}
"""What the operators take, by name."""

MLA = {name: declared for name, declared in DECLARED.items() if "kv" in declared.inputs}
"""Those of the sparse MLA operators on contiguous keys."""


def another(check: Check, default: object) -> Any:
    """A good value that is not the default."""
    match check:
        case Flag():
            return not default
        case Integer(low, high):
            return next(value for value in (high, low) if value != default)
        case Number():
            return 0.5 if default != 0.5 else 0.25
        case Choice(words) | Dtype(words):
            return next(word for word in words if word != default)
        case Axis():
            return 0 if default else -1
    raise AssertionError(f"say here how {check} is tried")


def bad(check: Check) -> list[Any]:
    """What it must refuse; much of it equals something that it takes."""
    match check:
        case Flag():
            return [1, 0, None, "yes", np.ones(2, bool)]
        case Integer(low, high):
            return [0.5, 1.0, True, False, "0", None, high + 1, low - 1, 2**31, -(2**31) - 1]
        case Number(bits, optional):
            past = -float("inf") if bits is None else -(2.0 ** (bits + 1))
            numbers = [float("nan"), float("inf"), past, 10**400]
            return [*numbers, "1", True, object(), *(() if optional else (None,))]
        case Choice(words):
            others = ["10", "l2", "float16", 2, 1, True, np.e, b"e", np.float32, None]
            return [value for value in others if value not in words]
    raise AssertionError(f"say here what {check} refuses")


def anything(check: Check) -> st.SearchStrategy[Any]:
    """Good values and bad ones."""
    match check:
        case Flag():
            return st.sampled_from([True, False, 1, None, np.True_])
        case Integer(low, high):
            return st.one_of(st.integers(max(low, -10), min(high, 10)), st.integers(), st.floats(), st.none())
        case Number():
            return st.one_of(st.none(), st.floats(), st.integers(), st.booleans(), st.text(max_size=2))
        case Choice(words):
            return st.sampled_from([*words, "10", 2, None, np.float32])
    raise AssertionError(f"say here what {check} is tried with")
