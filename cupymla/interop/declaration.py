"""What a framework has to know of a public function before it runs: its arrays, its results, its gradient.

One `Declaration` per function is all that a bridge needs (see `table`); the rest is read off the public signature.
Shapes may hold a framework's symbols in the place of numbers, so results are worked out by arithmetic alone. Nothing is
checked here: every check is the operator's own.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..errors import InputError, UnsupportedError, shown
from ..ops.arguments import truth, whole
from ..ops.calls import Calls

_NEVER_PASSED = frozenset({"stream", "check_indices", "workspace"})
"""Parameters that no bridge offers: stream and workspace are the framework's, reading indices would wait."""


@dataclass(frozen=True, slots=True)
class Facts:
    """An array without its contents.

    Attributes:
        shape: extents, numbers or a framework's symbols.
        dtype: label.
        batch_last: for a result with a batch axis in last place whose rows are contiguous in memory all the same.
    """

    shape: tuple[Any, ...]
    dtype: str
    batch_last: bool = False


Arrays: TypeAlias = Mapping[str, Facts]
Options: TypeAlias = Mapping[str, Any]
Results: TypeAlias = dict[str, Facts]


@dataclass(frozen=True, slots=True, eq=False)
class Batching:
    """How a call of one problem becomes a call of many.

    Attributes:
        teller: the array whose rank tells whether a call has a batch axis already.
        rank: its rank without one.
        required: the arrays that must be mapped for the native batch axis to be used: copying them would cost too much.
        never: arrays that have no batch axis, so that mapping them takes one call after the other.
        never_results: results that have none.
        options: those that make the batch axis the leading one.
        foldable: None, or the options that must be off for a call whose `required` arrays are not mapped to take the
            mapped axis as further queries, axis 0 of all arrays but `required` and `never`.
        unless: None, or whether a batch axis in front of these arrays of one call would be taken for something else:
            then there is one call after the other.
    """

    teller: str
    rank: int
    required: tuple[str, ...]
    never: tuple[str, ...] = ()
    never_results: tuple[str, ...] = ()
    options: Options = field(default_factory=dict)
    foldable: tuple[str, ...] | None = None
    unless: Callable[[Arrays], bool] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """The function that computes a gradient. Its arrays are named as the forward's arguments and results are.

    Attributes:
        backward: its name.
        results: of it, by the forward's argument that they are the gradient of.
        cotangents: its arguments that are gradients of the forward's results, by the result's name.
        scaled: the forward's results that it takes, each row times the gradient of another result, by whose name.
        own: the forward's own results that are the gradients of the sum of its one result of `cotangents`, by argument:
            where the gradient of that result is the same number everywhere, these are scaled, and nothing is computed
            anew. Not where the forward is given an argument of `cotangents`, which they would be times.
        options: its options that the forward takes on its behalf, with their defaults.
    """

    backward: str
    results: Mapping[str, str]
    cotangents: Mapping[str, str] = field(default_factory=dict)
    options: Options = field(default_factory=dict)
    scaled: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, str] = field(default_factory=dict)

    def may_scale(self, given: Iterable[str]) -> bool:
        """Whether a call with these arguments, by name, has returned its gradients but for a factor."""
        return bool(self.own) and set(self.cotangents.values()).isdisjoint(given)

    @property
    def through(self) -> tuple[str, ...]:
        """The forward's results through which there is a gradient."""
        return (*self.cotangents, *self.scaled.values())

    def require_known(self, operator: str, arguments: Iterable[str]) -> None:
        """Raise UnsupportedError for an argument that a gradient is wanted of and that there is none of."""
        for name in arguments:
            if name not in self.results:
                wanted = f"{operator}: a gradient with respect to '{name}'"
                instead = f"gradients with respect to {', '.join(self.results)} (pass '{name}' as a constant)"
                raise UnsupportedError(wanted, "every device", instead)


@dataclass(frozen=True, slots=True, eq=False)
class Declaration:
    """A public function, as bridges see it.

    Attributes:
        name: of the function, in `cupymla`.
        arrays: its input arrays, those that must be given first.
        outputs: its output parameters.
        results: the facts of what it returns, by output parameter, from the facts of the arrays that are given and from
            all options. Those not in it are not asked for.
        varies: whether how many results there are depends on the arguments.
        requests: outputs that are made on request, by an option `return_<name>` that the function itself has not.
        either: those of `arrays` that may be numbers instead.
        nullable: those of `arrays` that must be named, though None is good.
        pairs: those of `arrays` that hold 4-bit codes, two per byte.
        updates: those of `arrays` that are written in place; what a bridge without writable arrays returns instead.
        replayable: whether a call on a GPU uses no memory but its arrays and results, so that recordings of it may be
            replayed at any time. One with a workspace of its own may not: it is gone by then, or shared by two replays.
        has_workspace: whether the function has a parameter `workspace`, and its `plan` says how much is enough.
        batching: None where mapped calls are made one after the other.
        gradient: None where there is none.
        note: what bridges do not take of an argument that they share with the function; a sentence.
    """

    name: str
    arrays: tuple[str, ...]
    outputs: tuple[str, ...]
    results: Callable[[Arrays, Options], Results]
    varies: bool = False
    requests: tuple[str, ...] = ()
    either: tuple[str, ...] = ()
    nullable: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    replayable: bool = True
    has_workspace: bool = False
    batching: Batching | None = None
    gradient: Gradient | None = None
    note: str = ""
    signature: inspect.Signature = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "signature", self._signature())

    def function(self) -> Any:
        """The public function."""
        import cupymla

        return getattr(cupymla, self.name)

    def calls(self) -> Calls:
        """What is behind it."""
        calls: Calls = self.function().calls
        return calls

    @property
    def required(self) -> tuple[str, ...]:
        """The arrays that must be given."""
        return tuple(name for name in self.arrays if not self.may_be_none(name))

    def may_be_none(self, name: str) -> bool:
        """Whether one of `arrays` may be left out, or may be None where it has to be named."""
        return name in self.nullable or self.signature.parameters[name].default is not inspect.Parameter.empty

    def _signature(self) -> inspect.Signature:
        """The public signature as bridges offer it: without outputs and streams, with requests."""
        keyword = inspect.Parameter.KEYWORD_ONLY
        hidden = _NEVER_PASSED | set(self.outputs)
        kept = [p for p in _public_signature(self.name).parameters.values() if p.name not in hidden]
        kept += [inspect.Parameter(f"return_{n}", keyword, default=False, annotation="bool") for n in self.requests]
        if self.gradient is not None:
            kept += [
                inspect.Parameter(name, keyword, default=default, annotation=type(default).__name__)
                for name, default in self.gradient.options.items()
            ]
        return inspect.Signature([p.replace(annotation=_text(p.annotation)) for p in kept])

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """Everything that is no array, by name."""
        return {name: p for name, p in self.signature.parameters.items() if name not in self.arrays}

    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """All arguments of a call, defaults among them. Raises TypeError as a call of the function would."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as refused:
            raise TypeError(f"{self.name}(): {refused}") from None
        bound.apply_defaults()
        return bound

    def split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of a call as (arrays that are given, all options). A number for an array is an option.

        Raises TypeError as a call of the function would, and InputError for an option of the bridges' own that is no
        flag: the function's checks do not see those.
        """
        arrays, options = {}, {}
        for name, value in self.bound(args, kwargs).arguments.items():
            is_number = name in self.either and isinstance(value, (bool, int, float, str))
            if name not in self.arrays or is_number:
                options[name] = value
            elif value is not None:
                arrays[name] = value
        for name in self.own_options:
            flag = truth(options[name])
            if flag is None:
                raise InputError(name, "True or False", shown(options[name]), operator=self.name)
            options[name] = flag
        return arrays, options

    def for_backward(self, backward: Declaration, options: Options) -> dict[str, Any]:
        """The options of the gradient's function, from those of a call of this one.

        Raises UnsupportedError where the call has an option that the gradient knows nothing of: it would be another
        function's.
        """
        for name, parameter in self.options.items():
            if name not in backward.options and options.get(name, parameter.default) != parameter.default:
                wanted = f"{self.name}: a gradient with {name}={options[name]!r}"
                raise UnsupportedError(wanted, "every device", f"gradients with {name}={parameter.default!r}")
        return {name: options.get(name, parameter.default) for name, parameter in backward.options.items()}

    def notes(self) -> list[str]:
        """Paragraphs for the docstrings of bridges: what their function has that the public one has not."""
        lines = []
        for name in self.requests:
            lines.append(f"`return_{name}=True` returns, last, what the public function writes to its `{name}`.")
        if self.gradient is not None:
            for name in self.gradient.options:
                lines.append(f"`{name}` is that of `{self.gradient.backward}`, by which the gradient is computed.")
        if self.note:
            lines.append(self.note)
        return [text for line in lines for text in ("", line)]

    def passed(self, options: Options) -> dict[str, Any]:
        """The options that the function itself takes."""
        return {name: value for name, value in options.items() if name not in self.own_options}

    def arguments(self, arrays: Mapping[str, Any], options: Options) -> dict[str, Any]:
        """Arguments of the function itself, from the arrays that are given and the options of a bridge."""
        return {**dict.fromkeys(self.nullable), **arrays, **self.passed(options)}

    @property
    def own_options(self) -> tuple[str, ...]:
        """The options that bridges add, all of them flags."""
        return (*(() if self.gradient is None else self.gradient.options), *(f"return_{n}" for n in self.requests))


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def kind_of(annotation: str) -> str:
    """The type of an option's values by its annotation: one that lists words, `Literal["e", "2"]`, says "str"."""
    return re.sub(r"Literal\[[^]]*\]", "str", annotation)


@functools.cache
def _public_signature(name: str) -> inspect.Signature:
    import cupymla

    return inspect.signature(getattr(cupymla, name))


def integer(operator: str, name: str, value: object) -> int:
    """An option as int, of any size. Raises InputError for what is no integer; a bool is none."""
    number = whole(value)
    if number is None:
        raise InputError(name, "an integer", shown(value), operator=operator)
    return number
