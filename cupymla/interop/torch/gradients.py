"""Gradients of torch operators, and how they run under the transforms of `torch.func`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ...errors import UnsupportedError
from ..declaration import Declaration, Gradient
from ..table import declared
from . import mapped
from .arguments import facts, operator


def remember(declaration: Declaration) -> Callable[..., None]:
    """Save what the backward needs: all arrays, and the results that it takes as arguments."""
    gradient = declaration.gradient
    assert gradient is not None
    wanted = [name for name in declaration.outputs if name in declared(gradient.backward).arrays]

    def setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        results = dict(zip(declaration.outputs, output, strict=True))
        ctx.mark_non_differentiable(*(r for name, r in results.items() if name not in gradient.through))
        arrays = dict(zip(declaration.arrays, inputs, strict=False))
        given = {name: tensor for name, tensor in arrays.items() if tensor is not None}
        gradient.require_known(declaration.name, (name for name, tensor in given.items() if tensor.requires_grad))
        own = gradient.own.values() if gradient.may_scale(given) else ()
        given |= {name: results[name] for name in (*wanted, *own)}
        ctx.names = tuple(given)
        ctx.options = dict(keyword_only_inputs)
        ctx.save_for_backward(*given.values())

    return setup


def backward_of(declaration: Declaration, gradient: Gradient) -> Callable[..., tuple[Any, ...]]:
    """What autograd calls with the cotangents of all results; gradients of all arrays."""
    backward = declared(gradient.backward)

    def run(ctx: Any, *slopes: Any) -> tuple[Any, ...]:
        live = {name: s for name, s in zip(declaration.outputs, slopes, strict=True) if s is not None}
        grads: dict[str, Any] = {}
        if live:
            known = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
            scaled = _scaled(declaration.name, gradient, known, live)
            if scaled is not None:
                return tuple(scaled.get(name) for name in declaration.arrays)
            known |= {
                argument: live[name].contiguous() for name, argument in gradient.cotangents.items() if name in live
            }
            known |= {name: known[name] * live[by][..., None] for name, by in gradient.scaled.items()}
            given = {name: known[name] for name in backward.arrays if name in known}
            options = declaration.for_backward(backward, ctx.options)
            made = called(backward, [given.get(name) for name in backward.arrays], options)
            made = _once(declaration.name, made, known.values())
            results = dict(zip(backward.results(facts(given), options), made, strict=True))
            grads = {name: results[result] for name, result in gradient.results.items() if result in results}
        return tuple(grads.get(name) for name in declaration.arrays)

    return run


def _scaled(
    name: str, gradient: Gradient, known: Mapping[str, Any], live: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """The gradients that the forward has returned, times the number that the cotangent is everywhere; None where it is
    not the same, or where there is no telling."""
    if not gradient.may_scale(known):
        return None
    (slope,) = live.values()
    if not slope.numel():
        return None
    factor = slope[(0,) * slope.dim()]
    if not _is_everywhere(factor, slope):
        return None
    made = _once(name, [known[result] * factor for result in gradient.own.values()], known.values())
    return dict(zip(gradient.own, made, strict=True))


def _is_everywhere(number: Any, tensor: Any) -> bool:
    """Whether all elements are this one of them: by their strides, as behind a sum, else by their values. For these the
    host waits, which costs less than what is not computed; nobody can wait in a trace, a transform or a capture."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    if not any(stride for extent, stride in strides if extent > 1):
        return True
    if type(tensor) is not torch.Tensor or torch.compiler.is_compiling() or transformed():
        return False
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return bool((tensor == number).all())


class _Once(torch.autograd.Function):  # type: ignore[misc]
    """Hands its tensors on, bound to those that they depend on, so that a gradient of them is refused, not left out."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, *tensors: Any) -> Any:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        raise UnsupportedError(f"{ctx.name}: a gradient of its gradient", "every device", "first gradients")


def _once(name: str, gradients: Sequence[Any], arrays: Iterable[Any]) -> Sequence[Any]:
    """Gradients of the function of that name, of which no gradient can be taken without an UnsupportedError.

    Args:
        name: of the function.
        gradients: tensors.
        arrays: what they depend on, None where there is none.
    """
    if not torch.is_grad_enabled():
        return gradients
    inputs = [tensor for tensor in arrays if tensor is not None and tensor.requires_grad]
    made: Sequence[Any] = _Once.apply(name, *gradients, *inputs)[: len(gradients)]
    return made


def mark(ctx: Any, inputs: Any, keyword_only_inputs: Any = None, output: Any = None) -> None:
    """No result of a function without a gradient requires one."""
    ctx.mark_non_differentiable(*(output if isinstance(output, (tuple, list)) else (output,)))


def unreached(ctx: Any, *slopes: Any) -> Any:
    """What autograd wants as a backward of results that require no gradient."""
    raise UnsupportedError("a gradient", "every device", "detached results")


class _Functional(torch.autograd.Function):  # type: ignore[misc]
    """An operator with its gradient for `torch.func`, whose transforms refuse those that `torch.library` registers."""

    @staticmethod
    def forward(declaration: Declaration, options: Mapping[str, Any], *arguments: Any) -> Any:
        # Of dual tensors this is the innermost: there is nothing else that listens.
        listening = torch._C._functorch.peek_interpreter_stack() is not None
        made = (called if listening else dispatched)(declaration, arguments, options)
        return tuple(made) if declaration.varies else made

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        declaration, options, *arguments = inputs
        ctx.declaration = declaration
        how = mark if declaration.gradient is None else remember(declaration)
        how(ctx, arguments, options, output)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        gradient = ctx.declaration.gradient
        if gradient is None:
            return unreached(ctx, *slopes)
        return (None, None, *backward_of(ctx.declaration, gradient)(ctx, *slopes))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        declaration = ctx.declaration
        raise UnsupportedError(f"{declaration.name}: forward-mode differentiation", "every device", "reverse mode")

    @staticmethod
    def vmap(info: Any, dims: Any, declaration: Declaration, options: Mapping[str, Any], *arguments: Any) -> Any:
        made, axes = mapped.rule(declaration, called)(info, dims[2:], *arguments, **options)
        return (tuple(made), tuple(axes)) if declaration.varies else (made, axes)


def transformed() -> bool:
    """Whether `_Functional` has to stand in for the operator, as under most transforms of `torch.func`."""
    c: Any = torch._C._functorch
    if c.peek_interpreter_stack() is None:
        # Dual tensors may be about, whose tangents an operator of `torch.library` would lose without a word.
        return bool(forward_ad._current_level >= 0)
    # Torch takes operators through `functionalize`, and no `torch.autograd.Function`.
    return not any(interpreter.key() == c.TransformType.Functionalize for interpreter in c.get_interpreter_stack())


def dispatched(declaration: Declaration, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """What an operator returns, whatever listens; arguments as `called` takes them.

    The rule for `vmap` that the dispatcher knows goes on by this: it runs with torch's own rules for `vmap` switched
    off and the transform still there, which a `torch.autograd.Function` would ask for its rule once more.
    """
    return operator(declaration)(*arguments, **options)


def called(declaration: Declaration, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """What an operator returns, also under transforms of `torch.func`.

    Args:
        declaration: of the function.
        arguments: all its arrays, None where one is left out.
        options: of the operator.
    """
    if declaration.updates or torch.compiler.is_compiling() or not transformed():
        return dispatched(declaration, arguments, options)
    return _Functional.apply(declaration, dict(options), *arguments)
