"""The short way to a kernel: a call whose arguments are fixed but for their addresses.

The arguments, all given and all raw views, go through the operator's door once. What comes back is a function of the
stream that launches with the addresses the views have by then.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeAlias

from ..ops import registry
from ..tensor import View

Bound: TypeAlias = Callable[[int], object]


def _sparse_mla_fwd(arguments: Mapping[str, View], options: Mapping[str, Any], overlaps: bool) -> Bound:
    from ..ops import workspace
    from ..ops.sparse_mla_fwd import cuda, spec

    views, problem = spec.read(**arguments, **options)
    out, max_logits, lse = (arguments[name] for name in ("out", "max_logits", "lse"))
    sink_stride = 0 if views.attn_sink is None else views.attn_sink.strides[0]
    memory = views.workspace
    binding = cuda.bind(problem, views.q.device, (out, max_logits, lse), sink_stride, may_order=memory is not None)
    if memory is not None:
        workspace.require(memory, binding.workspace_bytes, spec.OPERATOR)

    def run(stream: int) -> None:
        binding.point(views, (out.ptr, max_logits.ptr, lse.ptr), 0 if memory is None else memory.ptr)
        binding.launch(stream)

    return run


def _sparse_mla_bwd(arguments: Mapping[str, View], options: Mapping[str, Any], overlaps: bool) -> Bound:
    from ..ops.sparse_mla_bwd import cuda, spec

    views, problem = spec.read(**arguments, **options)
    return lambda stream: cuda.call(views, problem, stream, overlaps)


BINDINGS: Mapping[str, Callable[[Mapping[str, View], Mapping[str, Any], bool], Bound]] = {
    "sparse_mla_fwd": _sparse_mla_fwd,
    "sparse_mla_bwd": _sparse_mla_bwd,
}
"""Functions with a way of their own: the kernel's binding is held, or its kernels may overlap or not."""


@functools.cache
def has_kernel(name: str) -> bool:
    """Whether a function is an operator that is bound to a kernel in a module of its own."""
    is_operator = any(entry.name == name for entry in registry.OPERATORS)
    return is_operator and importlib.util.find_spec(f"cupymla.ops.{name}.cuda") is not None


def bind(name: str, arguments: Mapping[str, View], options: Mapping[str, Any], overlaps: bool = True) -> Bound:
    """A call on a GPU, made ready; `overlaps`: whether its kernels may overlap. Raises what the operator raises."""
    held = BINDINGS.get(name)
    if held is not None:
        return held(arguments, options, overlaps)
    if not has_kernel(name):
        import cupymla

        function = getattr(cupymla, name)
        return lambda stream: function(**arguments, **options, stream=stream)
    spec: Any = import_module(f"cupymla.ops.{name}.spec")
    cuda: Any = import_module(f"cupymla.ops.{name}.cuda")
    views, problem = spec.read(**arguments, **options)
    return lambda stream: cuda.call(views, problem, stream)
