"""Torch operators made from declarations: schemas, implementations, registration, and the public face."""

from __future__ import annotations

import functools
import inspect
import numbers
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...errors import InputError
from ...ops.arguments import Check, Flag
from ...tensor import fast
from ..call import results_of
from ..declaration import Declaration, integer, kind_of
from ..table import DECLARATIONS
from . import gradients, mapped
from .arguments import NAMESPACE, Tensors, facts, given, nothing_listens, number, uninitialised

_TYPES = {
    "bool": "bool",
    "int": "int",
    "int | None": "int?",
    "str": "str",
    "str | None": "str?",
    "float | None": "float?",
    "Any": "str?",
}
"""Schema types of options by the public signature's annotation; `Any` is a dtype, which passes as its label."""

# Schemas -------------------------------------------------------------------------------------------------------------


def schema(declaration: Declaration) -> str:
    """The operator's schema: its arrays in order, then its options by name, numbers in the place of arrays last.

    Functions whose results depend on their options return a list.
    """
    arguments = []
    for name in declaration.arrays:
        optional = declaration.may_be_none(name) or name in declaration.either
        alias = f"({'abcdef'[declaration.updates.index(name)]}!)" if name in declaration.updates else ""
        default = "=None" if optional and name not in declaration.nullable else ""
        arguments.append(f"Tensor{alias}{'?' * optional} {name}{default}")
    arguments.append("*")
    for name, parameter in declaration.options.items():
        default = "" if parameter.default is parameter.empty else f"={_literal(parameter.default)}"
        arguments.append(f"{_TYPES[kind_of(parameter.annotation)]} {name}{default}")
    arguments += [f"float? {number(name)}=None" for name in declaration.either]
    if arguments[-1] == "*":
        del arguments[-1]
    return f"{declaration.name}({', '.join(arguments)}) -> {_returns(declaration)}"


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _returns(declaration: Declaration) -> str:
    if declaration.updates:
        return "()"
    if declaration.varies:
        return "Tensor[]"
    return "Tensor" if len(declaration.outputs) == 1 else f"({', '.join(['Tensor'] * len(declaration.outputs))})"


# Implementations -----------------------------------------------------------------------------------------------------


def _outputs(declaration: Declaration, tensors: Tensors, options: Mapping[str, Any]) -> Tensors:
    """The results that a call asks for, uninitialised."""
    like = next(iter(tensors.values()))
    wanted = results_of(declaration, facts(tensors), options)
    return {name: uninitialised(result, like) for name, result in wanted.items()}


def _returned(declaration: Declaration, values: list[Any]) -> Any:
    if declaration.updates:
        return None
    if declaration.varies:
        return values
    return values[0] if len(values) == 1 else tuple(values)


def _implementation(declaration: Declaration) -> Callable[..., Any]:
    function = declaration.function()

    def run(*arguments: Any, **options: Any) -> Any:
        tensors, chosen = given(declaration, arguments, options)
        if declaration.updates and torch.is_grad_enabled():
            _require_constants(declaration.name, tensors)
        asked = [name for name in declaration.requests if chosen[f"return_{name}"]]
        results: dict[str, Any] = {}
        if asked or not (declaration.updates or arguments[0].is_cuda):
            if not arguments[0].is_cuda:
                # Before memory of any size is asked for; on a GPU what is made here has the sizes of arguments.
                declaration.calls().read(**declaration.arguments(tensors, chosen))
            results = _outputs(declaration, tensors, chosen)
        if arguments[0].is_cuda:
            # On a GPU a call returns what torch's allocator gave; the CPU's arrays may have other strides than fakes.
            results = {name: results[name] for name in asked}
        made = function(**declaration.arguments(tensors, chosen), **results)
        for name in declaration.updates:
            if not tensors[name].is_inference():
                # What autograd goes by to refuse a gradient that needs what stood there before.
                torch.autograd.graph.increment_version(tensors[name])
        if not arguments[0].is_cuda:
            return _returned(declaration, list(results.values()))
        return _returned(declaration, [*(made if isinstance(made, tuple) else (made,)), *results.values()])

    return run


def _require_constants(function: str, tensors: Tensors) -> None:
    """Raise InputError for a tensor that autograd would want a gradient of, as what is written in place has none."""
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            expected = "a tensor outside autograd, as the function has no gradient (pass tensor.detach())"
            raise InputError(name, expected, "a tensor that requires grad", operator=function)


def _fake(declaration: Declaration) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        tensors, chosen = given(declaration, arguments, options)
        results = {} if declaration.updates else _outputs(declaration, tensors, chosen)
        return _returned(declaration, list(results.values()))

    return run


# The operators -------------------------------------------------------------------------------------------------------


_lock = threading.Lock()


def register() -> Any:
    """Define all operators, once. Calling a function does it; programs that name `torch.ops.cupymla` have to."""
    # torch takes a namespace once, and threads may ask for their first function at the same time.
    with _lock:
        return _library()


@functools.cache
def _library() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    for declaration in DECLARATIONS:
        library.define(schema(declaration), tags=_tags())
        library.impl(declaration.name, _implementation(declaration), "CompositeExplicitAutograd")
        name = f"{NAMESPACE}::{declaration.name}"
        torch.library.register_fake(name, _fake(declaration), lib=library)
        if declaration.gradient is not None:
            backward = gradients.backward_of(declaration, declaration.gradient)
            torch.library.register_autograd(name, backward, setup_context=gradients.remember(declaration), lib=library)
        elif not declaration.updates:
            torch.library.register_autograd(name, gradients.unreached, setup_context=gradients.mark, lib=library)
        rule = mapped.writing_rule if declaration.updates else mapped.rule
        torch.library.register_vmap(name, rule(declaration, gradients.dispatched), lib=library)
    return library


def _tags() -> tuple[Any, ...]:
    # Kernels read strides as they are: the compiler must not choose others than the program has.
    return torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides


@functools.cache
def public(declaration: Declaration) -> Callable[..., Any]:
    """The declared function for tensors: its arguments in their places, the fast path, checks, the operator's call."""
    register()
    name = declaration.name
    names = (*declaration.arrays, *declaration.options)
    places = {parameter: place for place, parameter in enumerate(names)}
    count = len(declaration.arrays)
    placed = _placed(declaration, names)
    numbered = [(places[array], array, number(array)) for array in declaration.either]
    tensors = [
        (places[array], array, declaration.may_be_none(array))
        for array in declaration.arrays
        if array not in declaration.either
    ]
    calls = declaration.calls()
    checks = dict(zip(calls.arguments.options, calls.arguments.checks, strict=True))
    looks = [
        (places[option], option, _TAKEN_AS[kind_of(parameter.annotation)], checks.get(option, Flag()))
        for option, parameter in declaration.options.items()
        if kind_of(parameter.annotation) in _TAKEN_AS
    ]
    labels = [(places[o], o, checks[o]) for o, p in declaration.options.items() if p.annotation == "Any"]
    updated = [places[array] for array in declaration.updates]
    chosen = _picked([places[option] for option in calls.arguments.options])
    own = [places[option] for option in declaration.own_options]
    varies, is_compiling = declaration.varies, torch.compiler.is_compiling
    tensor_type, parameter_type = torch.Tensor, torch.nn.Parameter
    # What is written in place is autograd's to know of.
    may_take_fast_path = not updated

    def call(*args: Any, **kwargs: Any) -> Any:
        values = placed(args, kwargs)
        first = values[0]
        for place, option, check in labels:
            value = values[place]
            if value is not None and not isinstance(value, str):
                values[place] = _checked(name, check, option, value)
        if (
            may_take_fast_path
            and (type(first) is tensor_type or type(first) is parameter_type)
            and first.is_cuda
            and not is_compiling()
            and nothing_listens()
        ):
            for place in own:
                if values[place] is not False:
                    break
            else:
                # What an operator's own arguments are not, its own checks refuse.
                known = calls.cached(fast.TORCH, tuple(values[:count]), chosen(values))
                if known is not None:
                    return known
        for place, array, may_be_none in tensors:
            value = values[place]
            if type(value) is not tensor_type and not (may_be_none and value is None):
                require_tensor(name, value, array)
        for place, option, taken_as, check in looks:
            kind = type(values[place])
            too_large = taken_as is kind is int and not is_compiling() and abs(values[place]) >= _TOO_LARGE
            if too_large or kind is not taken_as:
                values[place] = _checked(name, check, option, values[place])
        numbers_given: dict[str, float | None] = {}
        for place, array, carrier in numbered:
            value = values[place]
            values[place], numbers_given[carrier] = _tensor(name, value, array), _number_of(value)
        options = {**dict(zip(names[count:], values[count:], strict=True)), **numbers_given}
        results = gradients.called(declaration, values[:count], options)
        if updated:
            return _several([values[place] for place in updated])
        return _several(results) if varies else results

    call.__name__ = call.__qualname__ = name
    call.__module__ = __name__.rpartition(".")[0]
    call.__doc__ = _documented(declaration)
    setattr(call, "__signature__", declaration.signature)  # noqa: B010 - what inspect and help() read
    return call


def _placed(declaration: Declaration, names: Sequence[str]) -> Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]:
    """What puts the arguments of a call in the order of `names`, defaults among them. Raises TypeError.

    `inspect.Signature.bind` would cost each call more than the launch: it is asked where something is wrong.
    """
    parameters = declaration.signature.parameters
    empty = inspect.Parameter.empty
    defaults = [parameters[name].default for name in names]
    positional = [names.index(n) for n, parameter in parameters.items() if parameter.kind is not parameter.KEYWORD_ONLY]
    in_order = positional == list(range(len(positional)))
    places = {name: (position, names.index(name)) for position, name in enumerate(parameters)}
    unknown = (-1, 0)
    required = [names.index(name) for name, parameter in parameters.items() if parameter.default is empty]
    enough = 1 + max(position for position, parameter in enumerate(parameters.values()) if parameter.default is empty)

    def placed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        count = len(args)
        if in_order:
            values = [*args, *defaults[count:]]
        else:
            values = defaults.copy()
            for place, value in zip(positional, args):  # noqa: B905 - too many are refused below
                values[place] = value
        right = count <= len(positional)
        for name, value in kwargs.items():
            position, place = places.get(name, unknown)
            right = right and position >= count
            values[place] = value
        if right and (count >= enough or not any(values[place] is empty for place in required)):
            return values
        bound = declaration.bound(args, kwargs).arguments
        return [bound[name] for name in names]

    return placed


def _picked(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes these of the values."""
    return (
        operator.itemgetter(*places) if len(places) > 1 else lambda values: tuple([values[place] for place in places])
    )


def _several(results: Sequence[Any]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def require_tensor(function: str, value: Any, name: str) -> None:
    """Raise InputError for what is no tensor."""
    if not isinstance(value, torch.Tensor):
        got = "None" if value is None else type(value).__name__
        raise InputError(name, "a torch tensor", got, operator=function)


def _tensor(function: str, value: Any, name: str) -> Any:
    """The value where it is a tensor, None where it is a number or left out."""
    if value is None or _is_number(value):
        return None
    if not isinstance(value, torch.Tensor):
        # The one word that the public function takes here: it gives the factor back, which no operator's result does.
        hint = ", such as 448 * 6 / x.abs().max()" if name == "global_scale" and isinstance(value, str) else ""
        raise InputError(name, "a number or a tensor" + hint, type(value).__name__, operator=function)
    return value


def _is_number(value: Any) -> bool:
    """Whether this is a number of Python's or NumPy's."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _number_of(value: Any) -> float | None:
    return float(value) if _is_number(value) else None


_TOO_LARGE = 2**63
"""Of an integer in a schema."""

_TAKEN_AS: Mapping[str, type] = {
    "int": int,
    "int | None": int,
    "bool": bool,
    "float | None": float,
    "str": str,
    "str | None": str,
}
"""Types of options that pass without a look, by annotation. The operator's own check looks at all others, as the schema
would take some that the function refuses, such as True for 1, and refuse the rest in torch's words."""


def _checked(function: str, check: Check, name: str, value: Any) -> Any:
    """An option as its check returns it, or a symbol of a number. Raises InputError."""
    if isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat):
        return value
    try:
        return check(name, value)
    except InputError as refused:
        raise InputError(refused.argument, refused.expected, refused.got, operator=function) from None


def integer_of(function: str, value: Any, name: str) -> Any:
    """An option as int. Raises InputError."""
    return value if isinstance(value, torch.SymInt) else integer(function, name, value)


def flag_of(function: str, value: Any, name: str) -> Any:
    """An option as bool. Raises InputError."""
    return _checked(function, Flag(), name, value)


def _documented(declaration: Declaration) -> str:
    summary = (declaration.function().__doc__ or "").partition("\n")[0]
    lines = [summary, "", f"`cupymla.{declaration.name}` as a torch operator; see there for the arguments."]
    if declaration.gradient:
        lines += ["", f"Differentiable in {', '.join(declaration.gradient.results)}."]
    return "\n".join([*lines, *declaration.notes()])
