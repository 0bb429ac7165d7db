"""What the operators are called with, in the terms of declarations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd import forward_ad

from ...tensor.types import BYTE_LABELS
from ..declaration import Declaration, Facts

NAMESPACE = "cupymla"
"""Of the operators behind the functions."""

Tensors: TypeAlias = dict[str, Any]


def operator(declaration: Declaration) -> Any:
    """The operator of a function, which must be registered."""
    return getattr(getattr(torch.ops, NAMESPACE), declaration.name).default


def nothing_listens() -> bool:
    """Whether torch would do nothing with a call but run it: no mode, no transform, no tracing, no dual level."""
    c: Any = torch._C
    return (
        not c._len_torch_dispatch_stack()
        and not c._len_torch_function_stack()
        and c._functorch.peek_interpreter_stack() is None
        and c._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


def number(name: str) -> str:
    """The option that carries a number given in the place of an array."""
    return f"{name}_number"


def facts(tensors: Mapping[str, Any]) -> dict[str, Facts]:
    """Tensors without their contents."""
    return {
        name: Facts(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()
    }


def given(declaration: Declaration, arguments: Sequence[Any], options: Mapping[str, Any]) -> tuple[Tensors, Tensors]:
    """An operator's arguments as (tensors that are given, options of the public function)."""
    names = declaration.arrays
    tensors = {name: tensor for name, tensor in zip(names, arguments, strict=False) if tensor is not None}
    parameters = declaration.options
    chosen = {n: options.get(n, p.default) for n, p in parameters.items()}
    for name in declaration.either:
        value = options.get(number(name))
        if value is not None:
            chosen[name] = value
    return tensors, chosen


def uninitialised(facts: Facts, like: Any) -> Any:
    """An uninitialised tensor on the device of another."""
    dtype = getattr(torch, facts.dtype, torch.uint8) if facts.dtype in BYTE_LABELS else getattr(torch, facts.dtype)
    if facts.batch_last:
        *matrix, batches = facts.shape
        return like.new_empty((batches, *matrix), dtype=dtype).movedim(0, -1)
    return like.new_empty(facts.shape, dtype=dtype)
