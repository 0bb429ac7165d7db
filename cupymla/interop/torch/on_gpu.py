"""The short way of torch operators on GPUs: calls whose layouts come again.

Torch's dispatcher, with Python behind both its autograd and its implementation, takes several times as long as the
launch. So the public functions ask here first: `again` serves what nothing listens to, and everything else, every first
call of a layout among it, goes through the dispatcher.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ...tensor import contiguous, view
from ..bindings import has_kernel
from ..call import Runner, complete
from ..declaration import Declaration
from .arguments import facts, given

_PLANS = 256
"""How many layouts each function remembers."""


class _Plan(NamedTuple):
    """A call without its addresses.

    Attributes:
        wanted: shape, strides and dtype of each result, a workspace that is none last.
        returned: how many of them the caller gets.
        free: runners that no thread uses. Lists hand out and take back in one step each, so no lock is needed.
        make: makes one more.
    """

    wanted: list[tuple[tuple[int, ...], tuple[int, ...], Any]]
    returned: int
    free: list[Runner]
    make: Callable[[], Runner]


def _nothing_listens() -> bool:
    """Whether torch would do nothing with a call but run it: no mode, no transform, no tracing, no dual level."""
    c: Any = torch._C
    return (
        not c._len_torch_dispatch_stack()
        and not c._len_torch_function_stack()
        and c._functorch.peek_interpreter_stack() is None
        and c._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


class OnGpu:
    """Calls of one function on GPUs: a look-up, the results, the addresses, one launch.

    Attributes:
        serves: whether there is a kernel, and one that needs no memory but what torch gives it here.
        serves_again: whether `again` does.
        passes: whether a call that nothing listens to may go to the public function itself: it has a kernel, and
            writes to nothing that it is given.
    """

    def __init__(self, declaration: Declaration) -> None:
        self.serves = has_kernel(declaration.name) and (declaration.replayable or declaration.has_workspace)
        # A number in the place of a tensor is an option of the operator's own.
        self.serves_again = self.serves and not declaration.either
        self.passes = not self.serves_again and has_kernel(declaration.name) and not declaration.updates
        self._declaration = declaration
        self._single = len(declaration.outputs) == 1 and not declaration.varies
        self._plans: dict[object, _Plan] = {}

    def again(self, arguments: tuple[Any, ...], values: tuple[Any, ...]) -> Any:
        """The result of a call on tensors of torch's own class; None when it has to go through the dispatcher.

        Args:
            arguments: all arrays of the declaration, None where one was left out.
            values: all its options, in order.
        """
        if not _nothing_listens():
            return None
        differentiable = torch.is_grad_enabled()
        layouts: list[object] = []
        addresses = []
        try:
            for tensor in arguments:
                if tensor is None:
                    layouts.append(None)
                    continue
                # Another class may have a dispatch of its own, and a lazy negation is for the dispatcher to carry out.
                if type(tensor) is not torch.Tensor or (differentiable and tensor.requires_grad) or tensor.is_neg():
                    return None
                layouts.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()))
                addresses.append(tensor.data_ptr())
            # Types are part of it: True equals 1 and 1.0.
            plan = self._plans.get((values, *map(type, values), *layouts))
        except Exception:
            # Tensors without strides, options that cannot be hashed: the dispatcher says what is wrong.
            return None
        return None if plan is None else self._run(plan, addresses, arguments[0].device)

    @staticmethod
    def unheard(*arguments: Any) -> bool:
        """Whether torch would do nothing with a call of these arrays, or numbers in their place, but run it."""
        if not _nothing_listens():
            return False
        differentiable = torch.is_grad_enabled()
        for tensor in arguments:
            if tensor is None or type(tensor) in (int, float):
                continue
            if type(tensor) is not torch.Tensor or (differentiable and tensor.requires_grad) or tensor.is_neg():
                return False
        return True

    def __call__(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """The operator's implementation: its arguments as the dispatcher gives them."""
        declaration = self._declaration
        every = (*arguments, *(None for _ in declaration.arrays[len(arguments) :]))
        if declaration.either:
            # Zeros are told apart by their signs.
            values = tuple([(name, value or repr(value)) for name, value in options.items()])
        else:
            values = tuple([options.get(n, p.default) for n, p in declaration.options.items()])
        layouts = [None if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in every]
        key = (values, *map(type, values), *layouts)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._planned(arguments, options)
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[key] = plan
        addresses = [tensor.data_ptr() for tensor in arguments if tensor is not None]
        return self._run(plan, addresses, arguments[0].device)

    def _run(self, plan: _Plan, addresses: list[int], device: Any) -> Any:
        results = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in plan.wanted
        ]
        addresses += [tensor.data_ptr() for tensor in results]
        try:
            runner = plan.free.pop()
        except IndexError:
            runner = plan.make()
        runner(addresses, torch._C._cuda_getCurrentRawStream(device.index))
        plan.free.append(runner)
        if self._single:
            return results[0]
        returned = results[: plan.returned]
        return returned if self._declaration.varies else tuple(returned)

    def _planned(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> _Plan:
        declaration = self._declaration
        tensors, chosen = given(declaration, arguments, options)
        wanted = complete(declaration, facts(tensors), chosen)
        # Without the tensors themselves: a plan outlives the call that it was made for.
        seen = {
            name: dataclasses.replace(view(tensor, name), framework="raw", owner=None, readonly=True)
            for name, tensor in tensors.items()
        }
        like = next(iter(seen.values()))
        results = {name: contiguous(like, result.shape, result.dtype) for name, result in wanted.items()}

        def make() -> Runner:
            views = [(name, dataclasses.replace(array)) for name, array in (*seen.items(), *results.items())]
            return Runner(declaration.name, views, chosen)

        layouts = [(array.shape, array.strides, getattr(torch, array.dtype)) for array in results.values()]
        return _Plan(layouts, len(wanted) - ("workspace" in wanted), [], make)


@functools.cache
def on_gpu(declaration: Declaration) -> OnGpu:
    """The short way of a function: one for its implementation and its public face."""
    return OnGpu(declaration)
