"""Torch operators made from declarations: schemas, implementations, registration, and the public face."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ...errors import InputError, shown
from ...ops.arguments import truth
from ..call import plain, results_of
from ..declaration import Declaration, integer
from ..table import DECLARATIONS
from . import gradients, mapped
from .arguments import NAMESPACE, Tensors, facts, given, number, operator, uninitialised
from .on_gpu import on_gpu

_TYPES = {
    "bool": "bool",
    "int": "int",
    "str": "str",
    "str | None": "str?",
    "float | None": "float?",
    "Any": "str?",
}
"""Schema types of options by the public signature's annotation; `Any` is a dtype, which passes as its label."""

_TAKEN_AS = {"int": ("int", "integer_of"), "bool": ("bool", "flag_of"), "float | None": ("float", "float_of")}
"""Options of which the schema would take values that the function refuses, such as True for 1 and 1 for True: by
annotation, the type that passes without a look, and what looks at all others."""


# Schemas -------------------------------------------------------------------------------------------------------------


def schema(declaration: Declaration) -> str:
    """The operator's schema: its arrays in order, then its options by name, numbers in the place of arrays last.

    Functions whose results depend on their options return a list.
    """
    arguments = []
    parameters = declaration.signature.parameters
    for name in declaration.arrays:
        optional = parameters[name].default is not parameters[name].empty or name in declaration.either
        alias = f"({'abcdef'[declaration.updates.index(name)]}!)" if name in declaration.updates else ""
        arguments.append(f"Tensor{alias}{'? ' + name + '=None' if optional else ' ' + name}")
    arguments.append("*")
    for name, parameter in declaration.options.items():
        default = "" if parameter.default is parameter.empty else f"={_literal(parameter.default)}"
        arguments.append(f"{_TYPES[parameter.annotation]} {name}{default}")
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


def _returned(declaration: Declaration, results: Mapping[str, Any]) -> Any:
    if declaration.updates:
        return None
    values = list(results.values())
    if declaration.varies:
        return values
    return values[0] if len(values) == 1 else tuple(values)


def _implementation(declaration: Declaration) -> Callable[..., Any]:
    function = declaration.function()
    gpu = on_gpu(declaration)

    def run(*arguments: Any, **options: Any) -> Any:
        if gpu.serves and arguments[0].is_cuda:
            return gpu(arguments, options)
        tensors, chosen = given(declaration, arguments, options)
        results = {} if declaration.updates else _outputs(declaration, tensors, chosen)
        function(**tensors, **declaration.passed(chosen), **results)
        for name in declaration.updates:
            if not tensors[name].is_inference():
                # What autograd goes by to refuse a gradient that needs what stood there before.
                torch.autograd.graph.increment_version(tensors[name])
        return _returned(declaration, results)

    return run


def _fake(declaration: Declaration) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        tensors, chosen = given(declaration, arguments, options)
        results = {} if declaration.updates else _outputs(declaration, tensors, chosen)
        return _returned(declaration, results)

    return run


# The operators -------------------------------------------------------------------------------------------------------


@functools.cache
def register() -> Any:
    """Define all operators, once. Calling a function does it; programs that name `torch.ops.cupymla` have to."""
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
        if not declaration.updates:
            torch.library.register_vmap(name, mapped.rule(declaration, gradients.dispatched), lib=library)
    return library


def _tags() -> tuple[Any, ...]:
    # Kernels read strides as they are: the compiler must not choose others than the program has.
    return torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides


@functools.cache
def public(declaration: Declaration) -> Callable[..., Any]:
    """The declared function for tensors.

    It is written out and compiled, as dataclasses are: binding arguments by a signature object would cost each call
    more than the launch.
    """
    register()
    scope: dict[str, Any] = {
        "operator": operator(declaration),
        "transformed": gradients.transformed,
        "functional": functools.partial(_functional, declaration),
        "again": on_gpu(declaration).again,
        "unheard": on_gpu(declaration).unheard,
        "function": declaration.function(),
        "is_compiling": torch.compiler.is_compiling,
        "Tensor": torch.Tensor,
        "require": functools.partial(_require, declaration.name),
        "tensor_of": functools.partial(_tensor, declaration.name),
        "number_of": _number_of,
        "label_of": functools.partial(_label_of, declaration.name),
        "integer_of": functools.partial(integer_of, declaration.name),
        "flag_of": functools.partial(flag_of, declaration.name),
        "float_of": functools.partial(_float_of, declaration.name),
    }
    exec(_source(declaration), scope)
    made: Callable[..., Any] = scope[declaration.name]
    made.__doc__ = _documented(declaration)
    made.__module__ = __name__.rpartition(".")[0]
    return made


def _source(declaration: Declaration) -> str:
    """The function's text: public signature, a look at the tensors' types, the short way, the operator's call."""
    parameters = declaration.signature.parameters
    head, passed = [], []
    starred = False
    for name, parameter in parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            head.append("*")
            starred = True
        head.append(name if parameter.default is parameter.empty else f"{name}={parameter.default!r}")
    lines = [f"def {declaration.name}({', '.join(head)}):"]
    for name in declaration.arrays:
        if name in declaration.either:
            passed.append(f"tensor_of({name}, {name!r})")
            continue
        optional = "" if parameters[name].default is parameters[name].empty else f"{name} is not None and "
        lines.append(f"    if {optional}type({name}) is not Tensor: require({name}, {name!r})")
        passed.append(name)
    looks = []
    for name, parameter in declaration.options.items():
        is_dtype = parameter.annotation == "Any"
        passed.append(f"{name}=label_of({name}, {name!r})" if is_dtype else f"{name}={name}")
        if parameter.annotation in _TAKEN_AS:
            known, look = _TAKEN_AS[parameter.annotation]
            looks.append(f"    if type({name}) is not {known}: {name} = {look}({name}, {name!r})")
    passed += [f"{number(name)}=number_of({name})" for name in declaration.either]
    if on_gpu(declaration).serves_again:
        arrays, options = ", ".join(declaration.arrays), ", ".join(declaration.options)
        lines += [f"    if {declaration.arrays[0]}.is_cuda and not is_compiling():"]
        lines += [f"        known = again(({arrays},), ({options},))", "        if known is not None:"]
        lines += [
            f"            return {'known[0] if len(known) == 1 else tuple(known)' if declaration.varies else 'known'}"
        ]
    # Plans of the short way are of options that have been looked at: their types are part of the key.
    lines += looks
    if on_gpu(declaration).passes:
        arrays = ", ".join(declaration.arrays)
        named = ", ".join(f"{name}={name}" for name in (*declaration.arrays, *declaration.options))
        lines += [f"    if {declaration.arrays[0]}.is_cuda and not is_compiling() and unheard({arrays}):"]
        lines += [f"        return function({named})"]
    if declaration.updates:
        call = f"operator({', '.join(passed)})"
    else:
        call = f"(operator if is_compiling() or not transformed() else functional)({', '.join(passed)})"
    if declaration.updates:
        lines += [f"    {call}", f"    return {', '.join(declaration.updates)}"]
    elif declaration.varies:
        lines += [f"    results = {call}", "    return results[0] if len(results) == 1 else tuple(results)"]
    else:
        lines.append(f"    return {call}")
    return "\n".join(lines)


def _functional(declaration: Declaration, *arguments: Any, **options: Any) -> Any:
    """The operator under a transform of `torch.func`."""
    return gradients.called(declaration, arguments, options)


def _require(function: str, value: Any, name: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise InputError(name, "a torch tensor", type(value).__name__, operator=function)


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


def integer_of(function: str, value: Any, name: str) -> Any:
    """An option as int. Raises InputError."""
    return value if isinstance(value, torch.SymInt) else integer(function, name, value)


def flag_of(function: str, value: Any, name: str) -> Any:
    """An option as bool. Raises InputError."""
    if isinstance(value, torch.SymBool):
        return value
    flag = truth(value)
    if flag is None:
        raise InputError(name, "True or False", shown(value), operator=function)
    return flag


def _float_of(function: str, value: Any, name: str) -> Any:
    """An option that the schema may take for a float. Raises InputError."""
    if isinstance(value, bool | np.bool_ | str | bytes):
        raise InputError(name, "a number", shown(value), operator=function)
    return value


def _label_of(function: str, value: Any, name: str) -> Any:
    return value if value is None or isinstance(value, str) else plain(function, name, value)


def _documented(declaration: Declaration) -> str:
    summary = (declaration.function().__doc__ or "").partition("\n")[0]
    lines = [summary, "", f"`cupymla.{declaration.name}` as a torch operator; see there for the arguments."]
    if declaration.gradient:
        lines += ["", f"Differentiable in {', '.join(declaration.gradient.results)}."]
    return "\n".join([*lines, *declaration.notes()])
