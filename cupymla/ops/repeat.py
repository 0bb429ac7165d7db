"""Ordinary calls whose layouts came before: the shortest way from an operator's arguments to its launch.

A loop calls an operator again and again with arrays of the same shapes, strides and dtypes at other addresses. All that
is checked, planned and bound depends on these and on the options, but for the addresses' alignment. So each thread
remembers what it has checked, and a call that comes again pays for one look-up, its addresses and the launch:

    arguments --> layouts, options --> a call made ready --> addresses, numbers --> launch

What qualifies are calls with CuPy arrays on the current device, on the current stream, that allocate their outputs.
Every other call goes through the operator's door each time (`spec.read`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from .. import driver, tensor
from ..errors import InputError
from ..tensor import View
from .arguments import is_plain
from .gpu import ThreadMemo

_ALIGNMENT = 16
"""Whether a kernel can do with an address that is no multiple of this only the door knows."""

_NUMBERS = frozenset({int, float, np.int32, np.int64, np.float32, np.float64})

_LARGEST = float(np.finfo(np.float32).max)
"""What larger numbers are to a kernel the door decides, as of those that are not finite."""


Run: TypeAlias = Callable[..., Any]
"""Runs a call that was made ready; see `Repeats`."""


class _Ready:
    """What is remembered.

    Attributes:
        views: of the arrays that were given, in order, without owners: memory of the caller's is not kept alive.
        addresses: those that the views have.
        run: the call with these addresses, given whether they are others than at the last call, and the numbers that
            stand in the place of arrays; returns its result. None while it runs.
    """

    __slots__ = ("addresses", "run", "views")

    def __init__(self, views: tuple[View, ...], run: Run) -> None:
        self.views = views
        self.addresses: list[int] | None = None
        self.run: Run | None = run


class Repeats(ThreadMemo[_Ready]):
    """The calls of one operator that this thread can make again."""

    def __init__(
        self,
        names: Sequence[str],
        options: Sequence[str],
        ready: Callable[..., Run],
    ) -> None:
        """Remember nothing yet.

        Args:
            names: the operator's input arrays, the one that must be given first. In the place of others there may be a
                number, which a kernel is only given: what it is counts for nothing else, but for whether it is 1.
            options: everything else that a call depends on.
            ready: checks a call and makes it ready. Gets arrays, as views, and options by name; returns a function that
                runs it, on the current stream, with the addresses that the views have by then, given whether they are
                others than when it last returned, and the numbers there are, in order. It may keep the views, which
                have no owner. Called with the device's context current; raises what the operator raises.
        """
        super().__init__()
        self._names = names
        self._options = options
        self._ready = ready

    def __call__(self, arrays: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
        """Run a call and return its result, or return None when it has to go through the door.

        Args:
            arrays: the arguments of `names`; None, or a number, where one was left out.
            options: those of `options`.

        Raises what the operator raises.
        """
        kind = type(arrays[0])
        if kind not in tensor.cupy_kinds:
            return None
        # Types are part of it: True equals 1 and 1.0, which no operator takes for each other.
        facts: list[object] = [options, *map(type, options)]
        addresses = []
        numbers: list[float] = []
        bits = 0
        for array in arrays:
            if type(array) is kind:
                memory = array.data
                address = memory.ptr
                addresses.append(address)
                bits |= address
                facts.append((array.dtype, array.shape, array.strides, memory.device_id))
            elif array is None:
                facts.append(None)
            elif type(array) in _NUMBERS:
                # Each layer of a model may have one of its own, so it is no part of what is remembered.
                if not -_LARGEST <= array <= _LARGEST:
                    return None
                facts.append(array == 1)
                numbers.append(float(array))
            else:
                return None
        if bits % _ALIGNMENT or 0 in addresses or not driver.is_current(arrays[0].data.device_id):
            return None
        key = tuple(facts)
        try:
            found = self.entries.get(key)
        except Exception:
            # Options of a caller's own kind may refuse to be hashed or compared in any way.
            return None
        if found is None:
            found = self._checked(arrays, options)
            if found is None:
                return None
            self.add(key, found)
        run = found.run
        if run is None:
            # A call within this one, of a finalizer or an allocator: the addresses are taken.
            return None
        try:
            found.run = None
            moved = addresses != found.addresses
            if moved:
                for number, view in enumerate(found.views):
                    view.ptr = addresses[number]
            result = run(moved, *numbers)
            found.addresses = addresses
            found.run = run
        except BaseException:
            # Where its addresses are by now nobody knows.
            self.entries.pop(key, None)
            raise
        return result

    def _checked(self, arrays: tuple[Any, ...], options: tuple[Any, ...]) -> _Ready | None:
        """The call made ready; None when it cannot be remembered. Raises what the operator raises."""
        if not all(map(is_plain, options)):
            return None
        given = dict(zip(self._names, arrays, strict=True))
        views = []
        for name, array in given.items():
            if type(array) in tensor.cupy_kinds:
                try:
                    view = tensor.view(array, name)
                except InputError:
                    # The door says it with the operator's name.
                    return None
                view.owner = None
                given[name] = view
                views.append(view)
        return _Ready(tuple(views), self._ready(**given, **dict(zip(self._options, options, strict=True))))
