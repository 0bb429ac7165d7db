"""What an operator takes, said once: its arrays and its options.

An operator's `spec` declares a class `Views`, an array per field, a class `Options`, an option per field with its
default and its check, and joins them:

    ARGUMENTS = Arguments("attn_dist", Views, Options, results=("dist",))

The names and the order of everything that goes from layer to layer (what is remembered of a call, what the reference is
given, what may not overlap, what bridges to frameworks declare) are read off it. The public signature is written out
all the same, for those who read it; tests/ops/test_options.py holds the two together.

`check_indices`, `stream` and `workspace` are about how a call runs. They are neither.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from operator import attrgetter, index
from types import NoneType
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from .. import tensor
from ..errors import InputError, shown
from ..tensor import View
from ..tensor.types import NUMPY_DTYPES

ViewsT = TypeVar("ViewsT")
OptionsT = TypeVar("OptionsT")

# Options -------------------------------------------------------------------------------------------------------------


def whole(value: object) -> int | None:
    """The int that a value stands for by `operator.index`, as NumPy's do; None for all else, bools included."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return index(value)  # type: ignore[arg-type]
    except Exception:
        # Whether a caller's own kind is an integer is the caller's code, too.
        return None


def truth(value: object) -> bool | None:
    """The bool that a value is, NumPy's included; None for all else."""
    return bool(value) if isinstance(value, bool | np.bool_) else None


def dtype_label(value: object) -> str | None:
    """The label of NumPy's, JAX's, CuPy's or torch's own object for a dtype; None for all else."""
    label: str = shown(value, str).removeprefix("torch.")
    if label not in NUMPY_DTYPES:
        try:
            label = np.dtype(value).name  # type: ignore[call-overload]
        except Exception:
            # NumPy asks the object for its dtype, which may fail in any way.
            return None
    return label


class Check(Protocol):
    """What an option may be."""

    def __call__(self, argument: str, value: object) -> Any:
        """The value as its field's type. Raises InputError, without an operator's name."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A bool, NumPy's included."""

    def __call__(self, argument: str, value: object) -> bool:
        """The value as bool. Raises InputError."""
        flag = truth(value)
        if flag is None:
            raise InputError(argument, "True or False", shown(value))
        return flag


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer of these bounds, both included; a bool is none.

    Attributes:
        low, high: the bounds.
        optional: whether None is good, too.
    """

    low: int
    high: int
    optional: bool = False

    def __call__(self, argument: str, value: object) -> int | None:
        """The value as int. Raises InputError."""
        if value is None and self.optional:
            return None
        expected = f"an integer from {self.low} to {self.high}"
        number = whole(value)
        if number is None:
            raise InputError(argument, expected, shown(value))
        if not self.low <= number <= self.high:
            raise InputError(argument, expected, number)
        return number


@dataclass(frozen=True, slots=True)
class Axis:
    """Where the batch axis is: -1 for the last place, 0 for the first."""

    def __call__(self, argument: str, value: object) -> int:
        """The axis. Raises InputError."""
        axis = whole(value)
        if axis not in (-1, 0):
            raise InputError(argument, "-1 (last) or 0 (first)", shown(value))
        return axis


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number of at most 2**bits, sign aside; a bool or a text is none.

    Attributes:
        bits: of the bound; None for none.
        optional: whether None is good, too.
    """

    bits: int | None = None
    optional: bool = False

    def __call__(self, argument: str, value: object) -> float | None:
        """The value as float. Raises InputError."""
        if value is None and self.optional:
            return None
        expected = "a finite number" + ("" if self.bits is None else f", |{argument}| <= 2**{self.bits}")
        if isinstance(value, bool | np.bool_ | str | bytes):
            raise InputError(argument, expected, shown(value))
        try:
            number = float(value)  # type: ignore[arg-type]
        except Exception:
            raise InputError(argument, expected, shown(value)) from None
        if not (math.isfinite(number) if self.bits is None else abs(number) <= 2.0**self.bits):
            raise InputError(argument, expected, number)
        return number


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words, None among them where it is listed."""

    words: tuple[str | None, ...]

    def __call__(self, argument: str, value: object) -> str | None:
        """The word. Raises InputError."""
        # A subclass of str may compare as it likes; its characters are what counts.
        wanted = str.__str__(value) if isinstance(value, str) else value
        if wanted is None or isinstance(wanted, str):
            for word in self.words:
                if wanted == word:
                    return word
        raise InputError(argument, " or ".join(repr(word) for word in self.words), shown(value))


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype as its label, or as NumPy's, JAX's, CuPy's or torch's own object.

    Attributes:
        labels: those that are good.
        optional: whether None is good, too.
    """

    labels: tuple[str, ...]
    optional: bool = False

    def __call__(self, argument: str, value: object) -> str | None:
        """The label. Raises InputError."""
        if value is None and self.optional:
            return None
        label = value if isinstance(value, str) else dtype_label(value) or type(value).__name__
        return Choice(self.labels)(argument, label)


def option(default: Any, check: Check) -> Any:
    """A field of an operator's `Options`: its default in the public signature, MISSING for none, and what it may be."""
    return field(default=default, metadata={"check": check})


_PLAIN = frozenset({int, float, np.int32, np.int64, np.float32, np.float64, NoneType, bool, np.bool_, str})
_DTYPES = frozenset({("torch", "dtype"), ("jax", "_ScalarMeta")})
"""Types of other frameworks' dtypes, by the root of their module and their name; JAX's are such as `jnp.float32`."""


def is_plain(value: object) -> bool:
    """Whether a value of an option is what it is equal to. What else a caller comes with may change behind its hash."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, np.dtype) or (kind is type and issubclass(value, np.generic)):  # type: ignore[arg-type]
        return True
    return (kind.__module__.partition(".")[0], kind.__name__) in _DTYPES


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Of operators that have none."""


def all_plain(values: Sequence[object]) -> bool:
    """Whether all values of options are what they are equal to; see `is_plain`."""
    return _PLAIN.issuperset(map(type, values)) or all(map(is_plain, values))


# Arguments -----------------------------------------------------------------------------------------------------------


class Arguments(Generic[ViewsT, OptionsT]):
    """The arguments of one operator.

    Attributes:
        operator: its name.
        inputs: its input arrays, those that must be given first.
        required: how many must be.
        results: the output parameters, in the order in which the call returns them.
        written: arrays that a call writes beside its results when it is given them.
        updates: inputs that are written in place, and returned.
        nullable: inputs that must be named, though None is good.
        numbers: inputs in whose place there may be a number, which a kernel is only given: it counts for nothing else,
            but for its `tensor.fast.number_class`.
        has_workspace: whether it can be given memory to work in.
        outputs: `written`, `results`, and the workspace, if there is one.
        names: of all arrays, `inputs` and `outputs`.
        roles: the same, each with whether it is an output.
        arrays: them, of a `Views`, in the same order.
        options: everything else that a call depends on.
        options_type: the dataclass of them.
        defaults: of the options, in order.
        checks: of the options, in order.
    """

    def __init__(
        self,
        operator: str,
        views: type[ViewsT],
        options: type[OptionsT],
        results: tuple[str, ...],
        written: tuple[str, ...] = (),
        has_workspace: bool = False,
        updates: tuple[str, ...] = (),
        numbers: tuple[str, ...] = (),
        nullable: tuple[str, ...] = (),
    ) -> None:
        """Join the declarations.

        Args:
            operator: its name.
            views: a dataclass, a field per array: the inputs that must be given; with a default those that may be left
                out, and the outputs.
            options: a frozen dataclass, whose fields `option` made.
            results: see above, as for the others.
        """
        self.operator = operator
        self.results, self.written, self.updates, self.numbers = results, written, updates, numbers
        self.has_workspace, self.nullable = has_workspace, nullable
        arrays: tuple[Any, ...] = fields(views)  # type: ignore[arg-type]
        self.names = names = tuple(entry.name for entry in arrays)
        self.outputs = (*written, *results, *(("workspace",) if has_workspace else ()))
        self.inputs = names[: len(names) - len(self.outputs)]
        if names != (*self.inputs, *self.outputs):
            raise TypeError(f"{operator}: views end in {', '.join(self.outputs)}")
        self.roles = tuple((name, name in self.outputs) for name in names)
        self.arrays: Callable[[ViewsT], tuple[View | None, ...]] = _getter(names)
        self.required = sum(entry.default is MISSING for entry in arrays)
        self._array_defaults = {e.name: None if e.default is MISSING else e.default for e in arrays}
        chosen: tuple[Any, ...] = fields(options)  # type: ignore[arg-type]
        self.options = tuple(entry.name for entry in chosen)
        self.defaults = tuple(None if entry.default is MISSING else entry.default for entry in chosen)
        self.checks: tuple[Check, ...] = tuple(entry.metadata["check"] for entry in chosen)
        self._optional = frozenset((*self.inputs[self.required :], *nullable))
        self._views = views
        self.options_type = options

    # On the way in ---------------------------------------------------------------------------------------------------

    def placed(self, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Arguments by name as (inputs, options, outputs), in order, with what was left out.

        Raises TypeError for a name that is none of these.
        """
        unknown = given.keys() - {*self.names, *self.options}
        if unknown:
            raise TypeError(f"{self.operator}() has no argument {', '.join(sorted(unknown))}")
        left_out = map(self._array_defaults.get, self.inputs)
        return (
            tuple(map(given.get, self.inputs, left_out)),
            tuple(map(given.get, self.options, self.defaults)),
            tuple(map(given.get, self.outputs)),
        )

    def named(self, arrays: Sequence[Any], options: Sequence[Any]) -> dict[str, Any]:
        """Arguments by name, from arrays in the order of `names` and options in theirs; without outputs that are None.

        Arrays that come last may be missing.
        """
        given = zip(self.names, arrays)  # noqa: B905
        named = {name: array for name, array in given if array is not None or name in self.inputs}
        return named | dict(zip(self.options, options, strict=True))

    def viewed(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Views, numbers and Nones in the order of `names`; outputs that come last may be missing.

        Raises InputError, without an operator's name.
        """
        views: list[Any] = []
        for name, array in zip(self.inputs, inputs, strict=True):
            if (array is None and name in self._optional) or (name in self.numbers and _is_no_array(array)):
                views.append(array)
            else:
                look = tensor.view_output if name in self.updates else tensor.view
                views.append(look(array, name))
        for name, array in zip(self.outputs, outputs):  # noqa: B905
            views.append(None if array is None else tensor.view_output(array, name))
        return [*views, *(None,) * (len(self.names) - len(views))]

    def seen(self, inputs: Sequence[Any]) -> ViewsT:
        """Views of the inputs, in order, and no outputs. Raises InputError, without an operator's name."""
        return self._views(*self.viewed(inputs, ())[: len(self.inputs)])

    def chosen(self, values: Sequence[object]) -> OptionsT:
        """The options, checked in order. Raises InputError, without an operator's name."""
        checked = (check(name, value) for name, check, value in zip(self.options, self.checks, values, strict=True))
        return self.options_type(*checked)

    # On the way out --------------------------------------------------------------------------------------------------

    def by_name(self, views: ViewsT, options: object) -> dict[str, Any]:
        """What the operator's reference takes: arrays in NumPy, those that are written among them, and all options."""
        # `written` come first among the outputs.
        arrays = zip((*self.inputs, *self.written), self.arrays(views))  # noqa: B905
        taken = {n: tensor.to_numpy(v) if isinstance(v, View) else v for n, v in arrays if v is not None}
        return taken | {name: getattr(options, name) for name in self.options}


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*names) if len(names) > 1 else lambda views: (getattr(views, names[0]),)


def _is_no_array(value: object) -> bool:
    """Whether this is a number, or what nobody takes for an array."""
    return value is None or isinstance(value, numbers.Real | str | list | tuple)
