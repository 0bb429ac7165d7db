"""What a call through a framework costs the host: a torch operator, and a custom call inside a JAX program."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from ..ops.case import Case
from ..testing.operators import Subject
from . import timing

_CALLS = 32
_REPEATS = 30


def smallest(subject: Subject) -> Case:
    """The case with the least to do: its kernel is done before the host has enqueued the next."""
    cases: list[Case] = [subject.cases.DEMO, *subject.cases.BENCH]
    return min(cases, key=subject.cases.flops)


def overhead(subject: Subject) -> dict[str, float]:
    """Host microseconds per call, by framework; those that are missing here, or see no GPU, are left out."""
    found = {}
    for name, measure in (("torch", _torch_us), ("torch_grad", _torch_grad_us), ("jax", _jax_us)):
        try:
            us = measure(subject, subject.cases.inputs(smallest(subject), 0))
        except ImportError:
            continue
        if us is not None:
            found[name] = round(us, 2)
    return found


def to_torch(array: np.ndarray[Any, Any], device: str) -> Any:
    """A tensor with the array's elements, its axes in the same order in memory; narrow floats go by their bits."""
    import torch

    # `Tensor.to` keeps the order of axes where memory has no gaps; where it has some, elements come gapless.
    dense = array.copy(order="K")
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(dense).to(device)
    carrier = {1: np.uint8, 2: np.int16}[array.dtype.itemsize]
    return torch.from_numpy(dense.view(carrier)).to(device).view(getattr(torch, array.dtype.name))


def _torch_us(subject: Subject, inputs: dict[str, Any], differentiable: Collection[str] = ()) -> float | None:
    """A call with tensors, of which those named `differentiable` require a gradient."""
    import torch

    if not torch.cuda.is_available():
        return None
    from ..interop import torch as bridge

    function = getattr(bridge, subject.name)
    given = {
        name: to_torch(value, "cuda") if isinstance(value, np.ndarray) else value for name, value in inputs.items()
    }
    for name in differentiable:
        if name in given:
            given[name].requires_grad_()
    calls = {"torch": lambda: function(**given)}
    return timing.host_us_in_turns(calls, torch.cuda.synchronize, rounds=10, seconds=3.0)["torch"]


def _torch_grad_us(subject: Subject, inputs: dict[str, Any]) -> float | None:
    """The same, the way of autograd: the forward's part, without the backward; None where there is no gradient."""
    from ..interop.table import declared

    gradient = declared(subject.name).gradient
    return None if gradient is None else _torch_us(subject, inputs, gradient.results)


def _jax_us(subject: Subject, inputs: dict[str, Any]) -> float | None:
    """A further custom call's share of a program's time, which the host bounds as long as the kernel is shorter."""
    import jax

    if jax.default_backend() != "gpu":
        return None
    from ..interop import jax as bridge

    function = getattr(bridge, subject.name)
    arrays = {name: jax.numpy.asarray(value) for name, value in inputs.items() if isinstance(value, np.ndarray)}
    options = {name: value for name, value in inputs.items() if name not in arrays}

    first = next(iter(arrays))
    # XLA makes one call of equal ones, so each gets a first array of its own; as an argument, for taking it out of a
    # larger array would be a kernel more.
    one = arrays.pop(first)
    firsts = [jax.numpy.array(one, copy=True) for _ in range(1 + _CALLS)]

    def program(calls: int) -> Callable[[], Any]:
        def run(given: dict[str, Any], firsts: list[Any]) -> list[Any]:
            return [function(**{first: own}, **given, **options) for own in firsts[:calls]]

        # Inside a CUDA graph a call costs the host nothing: what is wanted is the cost outside of one.
        no_graphs = {"xla_gpu_graph_min_graph_size": 10**6}
        compiled = jax.jit(run).lower(arrays, firsts).compile(compiler_options=no_graphs)
        return lambda: jax.block_until_ready(compiled(arrays, firsts))

    few, many = (_median_us(program(calls)) for calls in (1, 1 + _CALLS))
    return (many - few) / _CALLS


def _median_us(run: Callable[[], Any]) -> float:
    samples = []
    for _ in range(_REPEATS + 3):
        start = time.perf_counter()
        run()
        samples.append((time.perf_counter() - start) * 1e6)
    return statistics.median(samples[3:])
