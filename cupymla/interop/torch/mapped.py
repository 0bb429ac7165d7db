"""Torch operators under `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...errors import InputError
from ..batching import Mapped
from ..call import results_of
from ..declaration import Declaration, Facts
from .arguments import facts, given, uninitialised


def rule(declaration: Declaration, call: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.func.vmap` makes of an operator: one call where there is a way, else one after the other.

    Args:
        declaration: of the function.
        call: runs it, on all its arrays and the options of its operator; under another transform again.
    """

    def run(info: Any, dims: Any, *arguments: Any, **options: Any) -> Any:
        fronted = [
            tensor if dim is None else _fronted(tensor, dim) for tensor, dim in zip(arguments, dims, strict=True)
        ]
        tensors, chosen = given(declaration, fronted, options)
        is_mapped = dict(zip(declaration.arrays, [dim is not None for dim in dims], strict=False))

        def once(arrays: Mapping[str, Any], changed: Mapping[str, Any]) -> Sequence[Any]:
            others = {name: value for name, value in changed.items() if value is not chosen.get(name)}
            made = call(declaration, [arrays.get(name) for name in declaration.arrays], {**options, **others})
            return made if isinstance(made, list | tuple) else (made,)

        mapped = Mapped(
            declaration,
            chosen,
            info.batch_size,
            tensors,
            {name: is_mapped[name] for name in tensors},
            label=lambda name, tensor: facts({name: tensor})[name].dtype,
            # Contiguous: not every kernel reads an axis without a stride.
            spread=lambda tensor, extent: tensor.expand(extent, *tensor.shape).contiguous(),
            run=once,
        )
        results = mapped.as_one()
        if results is None:
            results = _one_by_one(mapped)
        if declaration.varies:
            return list(results), [0] * len(results)
        return (results[0], 0) if len(results) == 1 else (results, (0,) * len(results))

    return run


def writing_rule(declaration: Declaration, call: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.func.vmap` makes of an operator that writes in place: one call after the other, each in its own part.

    Args:
        declaration: of the function.
        call: as for `rule`.
    """

    def run(info: Any, dims: Any, *arguments: Any, **options: Any) -> tuple[None, None]:
        places = zip(declaration.arrays, arguments, dims, strict=True)
        for name, tensor, dim in places:
            if name in declaration.updates and tensor is not None and dim is None:
                expected = "a mapped tensor, as each mapped call writes its own"
                raise InputError(name, expected, "one that all calls share", operator=declaration.name)
        for place in range(info.batch_size):
            taken = [t if dim is None else t.select(dim, place) for t, dim in zip(arguments, dims, strict=True)]
            call(declaration, taken, options)
        return None, None

    return run


def _fronted(tensor: Any, dim: int) -> Any:
    """The tensor with that axis in front; where it was last, its last axis is a row again, as kernels read them."""
    moved = tensor.movedim(dim, 0)
    return moved.contiguous() if dim == tensor.ndim - 1 else moved


def _one_by_one(mapped: Mapped) -> tuple[Any, ...]:
    """The results of one call after the other, stacked."""
    rows = []
    for place in range(mapped.size):
        arrays = {name: tensor[place] if mapped.axes[name] else tensor for name, tensor in mapped.arrays.items()}
        rows.append(mapped.run(arrays, mapped.options))
    if rows:
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))
    like = next(iter(mapped.arrays.values()))
    wanted = results_of(mapped.declaration, mapped.facts(), mapped.options)
    return tuple(uninitialised(Facts((0, *one.shape), one.dtype), like) for one in wanted.values())
