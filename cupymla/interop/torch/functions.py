"""Torch operators made from declarations: schemas, implementations, gradients, and the public face."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ...errors import InputError, UnsupportedError
from ...tensor import View, view
from ...tensor.types import BYTE_LABELS, strides_of
from ..bindings import has_kernel
from ..call import Runner, Runners, complete, plain
from ..declaration import Declaration, Facts, Gradient
from ..table import DECLARATIONS, declared

NAMESPACE = "cupymla"
"""Of the operators behind the functions."""

Tensors: TypeAlias = dict[str, Any]

_PLANS = 256
"""How many layouts each function remembers on GPUs."""

_TYPES = {
    "bool": "bool",
    "int": "int",
    "str": "str",
    "str | None": "str?",
    "float | None": "float?",
    "Any": "str?",
}
"""Schema types of options by the public signature's annotation; `Any` is a dtype, which passes as its label."""


# Schemas -------------------------------------------------------------------------------------------------------------


def _number(name: str) -> str:
    """The option that carries a number given in the place of an array."""
    return f"{name}_number"


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
    arguments += [f"float? {_number(name)}=None" for name in declaration.either]
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


def _label(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _facts(tensors: Mapping[str, Any]) -> dict[str, Facts]:
    return {name: Facts(tuple(tensor.shape), _label(tensor)) for name, tensor in tensors.items()}


def _made(facts: Facts, like: Any) -> Any:
    """An uninitialised tensor on the device of another."""
    dtype = getattr(torch, facts.dtype, torch.uint8) if facts.dtype in BYTE_LABELS else getattr(torch, facts.dtype)
    if facts.batch_last:
        *matrix, batches = facts.shape
        return like.new_empty((batches, *matrix), dtype=dtype).movedim(0, -1)
    return like.new_empty(facts.shape, dtype=dtype)


def _given(declaration: Declaration, arguments: Sequence[Any], options: Mapping[str, Any]) -> tuple[Tensors, Tensors]:
    """An operator's arguments as (tensors that are given, options of the public function)."""
    names = declaration.arrays
    tensors = {name: tensor for name, tensor in zip(names, arguments, strict=False) if tensor is not None}
    parameters = declaration.options
    chosen = {n: options.get(n, p.default) for n, p in parameters.items()}
    for name in declaration.either:
        number = options.get(_number(name))
        if number is not None:
            chosen[name] = number
    return tensors, chosen


def _outputs(declaration: Declaration, tensors: Tensors, options: Mapping[str, Any]) -> Tensors:
    """The results that a call asks for, uninitialised."""
    like = next(iter(tensors.values()))
    return {name: _made(facts, like) for name, facts in declaration.results(_facts(tensors), options).items()}


def _returned(declaration: Declaration, results: Mapping[str, Any]) -> Any:
    if declaration.updates:
        return None
    values = list(results.values())
    if declaration.varies:
        return values
    return values[0] if len(values) == 1 else tuple(values)


def _implementation(declaration: Declaration) -> Callable[..., Any]:
    function = declaration.function()
    on_gpu = _OnGpu(declaration)

    def run(*arguments: Any, **options: Any) -> Any:
        if on_gpu.serves and arguments[0].is_cuda:
            return on_gpu(arguments, options)
        tensors, chosen = _given(declaration, arguments, options)
        results = {} if declaration.updates else _outputs(declaration, tensors, chosen)
        function(**tensors, **declaration.passed(chosen), **results)
        return _returned(declaration, results)

    return run


class _OnGpu:
    """Calls of one function on GPUs whose layouts come again: a look-up, the results, the addresses, one launch.

    Not run on a GPU yet.

    Attributes:
        serves: whether there is a kernel, and one that needs no memory but what torch gives it here.
    """

    def __init__(self, declaration: Declaration) -> None:
        self.serves = has_kernel(declaration.name) and (declaration.replayable or declaration.has_workspace)
        self._declaration = declaration
        self._plans: dict[object, tuple[list[tuple[Any, Any]], int, Callable[[], Runner]]] = {}
        self._runners = Runners()

    def __call__(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        given = [tensor for tensor in arguments if tensor is not None]
        layouts = [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in arguments]
        key = (*layouts, *options.items())
        plan = self._plans.get(key)
        if plan is None:
            plan = self._planned(arguments, options)
            if len(self._plans) >= _PLANS:
                self._plans.clear()
                self._runners = Runners()
            self._plans[key] = plan
        wanted, count, make = plan
        device = given[0].device
        results = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in wanted]
        addresses = [tensor.data_ptr() for tensor in (*given, *results)]
        self._runners.run(key, make, addresses, torch._C._cuda_getCurrentRawStream(device.index))
        returned = results[:count]
        return returned if self._declaration.varies else returned[0] if count == 1 else tuple(returned)

    def _planned(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Shapes and dtypes of the results, how many of them are returned, and how a runner is made."""
        declaration = self._declaration
        tensors, chosen = _given(declaration, arguments, options)
        wanted = complete(declaration, _facts(tensors), chosen)
        # Without the tensors themselves: a plan outlives the call that it was made for.
        seen = {
            name: dataclasses.replace(view(tensor, name), framework="raw", owner=None, readonly=True)
            for name, tensor in tensors.items()
        }
        where = next(iter(seen.values())).device

        def make() -> Runner:
            arrays = [(name, dataclasses.replace(array)) for name, array in seen.items()]
            results = [
                (name, View(0, facts.shape, strides_of(facts.shape), facts.dtype, where, False, "raw", None))
                for name, facts in wanted.items()
            ]
            return Runner(declaration.name, [*arrays, *results], chosen)

        count = len(wanted) - ("workspace" in wanted)
        return [(facts.shape, getattr(torch, facts.dtype)) for facts in wanted.values()], count, make


def _fake(declaration: Declaration) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        tensors, chosen = _given(declaration, arguments, options)
        results = {} if declaration.updates else _outputs(declaration, tensors, chosen)
        return _returned(declaration, results)

    return run


# Gradients -----------------------------------------------------------------------------------------------------------


def _remember(declaration: Declaration) -> Callable[..., None]:
    """Save what the backward needs: all arrays, and the results that it takes as arguments."""
    gradient = declaration.gradient
    assert gradient is not None
    wanted = [name for name in declaration.outputs if name in declared(gradient.backward).arrays]

    def setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        results = dict(zip(declaration.outputs, output, strict=True))
        ctx.mark_non_differentiable(*(r for name, r in results.items() if name not in gradient.cotangents))
        arrays = dict(zip(declaration.arrays, inputs, strict=False))
        given = {name: tensor for name, tensor in arrays.items() if tensor is not None}
        given |= {name: results[name] for name in wanted}
        ctx.names = tuple(given)
        ctx.options = dict(keyword_only_inputs)
        ctx.save_for_backward(*given.values())

    return setup


def _backward(declaration: Declaration, gradient: Gradient) -> Callable[..., tuple[Any, ...]]:
    backward = declared(gradient.backward)
    defaults = {name: parameter.default for name, parameter in backward.options.items()}

    def run(ctx: Any, *slopes: Any) -> tuple[Any, ...]:
        live = {name: s for name, s in zip(declaration.outputs, slopes, strict=True) if s is not None}
        grads: dict[str, Any] = {}
        if live:
            known = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
            known |= {gradient.cotangents[name]: slope.contiguous() for name, slope in live.items()}
            given = {name: known[name] for name in backward.arrays if name in known}
            options = {name: ctx.options.get(name, default) for name, default in defaults.items()}
            made = _operator(backward)(*(given.get(name) for name in backward.arrays), **options)
            results = dict(zip(backward.results(_facts(given), options), made, strict=True))
            grads = {name: results[result] for name, result in gradient.results.items() if result in results}
        return tuple(grads.get(name) for name in declaration.arrays)

    return run


def _mark(ctx: Any, inputs: Any, keyword_only_inputs: Any = None, output: Any = None) -> None:
    """No result of a function without a gradient requires one."""
    ctx.mark_non_differentiable(*(output if isinstance(output, (tuple, list)) else (output,)))


def _unreached(ctx: Any, *slopes: Any) -> Any:
    """What autograd wants as a backward of results that require no gradient."""
    raise UnsupportedError("a gradient", "every device", "detached results")


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
            backward = _backward(declaration, declaration.gradient)
            torch.library.register_autograd(name, backward, setup_context=_remember(declaration), lib=library)
        elif not declaration.updates:
            torch.library.register_autograd(name, _unreached, setup_context=_mark, lib=library)
    return library


def _tags() -> tuple[Any, ...]:
    # Kernels read strides as they are: the compiler must not choose others than the program has.
    return torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides


@functools.cache
def _operator(declaration: Declaration) -> Any:
    register()
    return getattr(getattr(torch.ops, NAMESPACE), declaration.name).default


@functools.cache
def public(declaration: Declaration) -> Callable[..., Any]:
    """The declared function for tensors.

    It is written out and compiled, as dataclasses are: binding arguments by a signature object would cost each call
    more than the launch.
    """
    scope: dict[str, Any] = {
        "operator": _operator(declaration),
        "Tensor": torch.Tensor,
        "require": functools.partial(_require, declaration.name),
        "tensor_of": functools.partial(_tensor, declaration.name),
        "number_of": _number_of,
        "label_of": functools.partial(_label_of, declaration.name),
    }
    exec(_source(declaration), scope)
    made: Callable[..., Any] = scope[declaration.name]
    made.__doc__ = _documented(declaration)
    made.__module__ = __name__.rpartition(".")[0]
    return made


def _source(declaration: Declaration) -> str:
    """The function's text: the public signature, a look at the tensors' types, and the operator's call."""
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
    for name, parameter in declaration.options.items():
        is_dtype = parameter.annotation == "Any"
        passed.append(f"{name}=label_of({name}, {name!r})" if is_dtype else f"{name}={name}")
    passed += [f"{_number(name)}=number_of({name})" for name in declaration.either]
    call = f"operator({', '.join(passed)})"
    if declaration.updates:
        lines += [f"    {call}", f"    return {', '.join(declaration.updates)}"]
    elif declaration.varies:
        lines += [f"    results = {call}", "    return results[0] if len(results) == 1 else tuple(results)"]
    else:
        lines.append(f"    return {call}")
    return "\n".join(lines)


def _require(function: str, value: Any, name: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise InputError(name, "a torch tensor", type(value).__name__, operator=function)


def _tensor(function: str, value: Any, name: str) -> Any:
    """The value where it is a tensor, None where it is a number or left out."""
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return None
    if not isinstance(value, torch.Tensor):
        raise InputError(name, "a number or a tensor", type(value).__name__, operator=function)
    return value


def _number_of(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _label_of(function: str, value: Any, name: str) -> Any:
    return value if value is None or isinstance(value, str) else plain(function, name, value)


def _documented(declaration: Declaration) -> str:
    summary = (declaration.function().__doc__ or "").partition("\n")[0]
    lines = [summary, "", f"`cupymla.{declaration.name}` as a torch operator; see there for the arguments."]
    if declaration.gradient:
        lines += ["", f"Differentiable in {', '.join(declaration.gradient.results)}."]
    return "\n".join(lines)
