"""The one way to a kernel: a call that is bound once, and runs wherever its arrays lie (docs/how_a_call_flows.md).

All that is checked, planned and laid out for a call depends on its options, on the layouts of its arrays and on their
addresses' remainders by 16. A `BoundCall` is what comes of it. Each thread keeps those that it has made: a call that
comes again pays for a look-up, its outputs, and the launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from .. import tensor
from ..launch import Launcher
from ..tensor import View, fast
from .arguments import Arguments

_LIMIT = 1024

Results = Sequence[tuple[tuple[int, ...], str] | None]
"""Shape and dtype label of each result, in the order of their names; None for one that the call does not want."""


# What operators have -------------------------------------------------------------------------------------------------


class Binding(Protocol):
    """Loaded kernels with everything that one problem fixes. One thread at a time may use it.

    Where numbers may stand in the places of arrays, `scale(*numbers)` sets them.

    Attributes:
        launcher: the launch that computes the result; None when there is nothing to compute.
        workspace_bytes: what it needs beside its arrays.
    """

    @property
    def launcher(self) -> Launcher | None:
        """See above."""

    @property
    def workspace_bytes(self) -> int:
        """See above."""

    def point(self, views: Any, results: Sequence[int], workspace: int) -> None:
        """Set every address: those that the views have by now, of the results, and of the workspace."""

    def launch(self, stream: int) -> None:
        """Run on `stream`, with the device's context current. Raises DriverError."""


class Launches:
    """A `Binding` of launches that run one after the other; the rest is its operator's to add."""

    workspace_bytes = 0

    def __init__(self, *launchers: Launcher | None) -> None:
        self._launchers = [launcher for launcher in launchers if launcher is not None]
        self.launcher = self._launchers[-1] if self._launchers else None

    def launch(self, stream: int) -> None:
        """Run on `stream`, with the device's context current. Raises DriverError."""
        for launcher in self._launchers:
            launcher(stream)


class Captured:
    """Memory that launches work in which were captured into a graph, kept for good.

    A graph may be launched at any time, from any thread, and nobody says when it is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[object] = []

    def keep(self, memory: object) -> None:
        """Never let go of it."""
        with self._lock:
            self._kept.append(memory)


captured = Captured()


# Calls ---------------------------------------------------------------------------------------------------------------


class Checked(NamedTuple):
    """A call that has passed its checks.

    Attributes:
        arrays: views without owners, numbers and Nones, in the declared order.
        views: the same as the operator has them.
        problem: what its checks made of them.
    """

    arrays: list[Any]
    views: Any
    problem: Any


@dataclass(eq=False)
class Operation:
    """What an operator has: what it takes, its checks, its kernels, its reference.

    Attributes:
        arguments: what it takes.
        read: checks arguments, given by name, and makes views and a problem of them. Raises InputError.
        wanted: the results, of views and problem.
        bind: lays out kernels for views and problem. Gets views of the results, and whether XLA is to record the
            launches: then no kernel overlaps another one, and there is no memory but the arrays.
        on_cpu: the NumPy reference on arrays of the CPU, made ready.
        look: looks at index values where a call asks for it; gets views, problem and stream. Raises InputError.
        memory: gives a call its workspace where that is not freshly allocated: an address, and what is to be kept.
            Gets the binding, what gives a view of the caller's, a stream, and whether it is for one prepared call.
        handed: turns results as they were allocated into those that are returned; gets views and problem, too.
        size: how large a workspace a call needs, in bytes, where it has a parameter for it.
    """

    arguments: Arguments[Any, Any]
    read: Callable[..., tuple[Any, Any]]
    wanted: Callable[[Any, Any], Results]
    bind: Callable[[Any, Any, Sequence[View], bool], Binding]
    on_cpu: Callable[[Any, Any], Callable[[], Any]]
    look: Callable[[Any, Any, object], None] | None = None
    memory: Callable[[Any, Callable[[], View], int, bool], tuple[int, object]] | None = None
    handed: Callable[[Any, Any, Sequence[Any]], Sequence[Any]] | None = None
    size: Callable[[Any, Any], int] | None = None

    def checked(self, seen: Sequence[Any], options: Sequence[Any]) -> Checked:
        """Check a call, whose arrays are not kept. Raises what the operator's checks raise."""
        arrays = [replace(v, owner=None, capsule=None, stream=None) if isinstance(v, View) else v for v in seen]
        return Checked(arrays, *self.read(**self.arguments.named(arrays, options)))


class BoundCall:
    """A call without its addresses. One thread at a time may run it.

    Attributes:
        views, problem: what its checks made of it.
        binding: its kernels.
        results: shapes and dtypes of what it returns, and of nothing else.
        names: of its arrays, inputs and what is written beside the results, in the order of their addresses.
        places: theirs among all arrays, in the declared order.
        result_places: likewise of the results; None for those that the call makes, not all of which have a name.
        workspace_bytes: what a run needs beside its arrays.
        is_written: whether it writes an array that it is given.
        in_use: whether it runs, or was interrupted when it last ran. Its addresses are somebody's then.
        maker: makes the results in the framework that it was bound for; None where that is not fast.
        workspace_maker: likewise of the workspace, where there is one and the call is not given it.
    """

    __slots__ = (
        *("_addresses", "_count", "_numbers", "_operation", "_reaches", "_views", "binding"),
        *("in_use", "is_written", "maker", "names", "places", "problem", "result_places", "results"),
        *("views", "workspace_bytes", "workspace_maker"),
    )

    def __init__(self, operation: Operation, checked: Checked, recorded: bool = False) -> None:
        """Plan, compile and lay out, with the device's context current. Raises what the operator raises."""
        arguments = operation.arguments
        views, self.views, self.problem = checked
        given = {name: v for name, v in zip(arguments.names, views, strict=True) if v is not None}
        self._operation = operation
        wanted = operation.wanted(self.views, self.problem)
        self.results = tuple([result for result in wanted if result is not None])
        like = views[0]
        order = {name: number for number, name in enumerate(arguments.names) if name in given}
        named = (*arguments.results, *("",) * len(wanted))
        self.result_places = tuple([order.get(name) for name, result in zip(named, wanted) if result is not None])  # noqa: B905 - some have no name
        places = [
            tensor.contiguous(like, shape, dtype) if place is None else views[place]
            for place, (shape, dtype) in zip(self.result_places, self.results, strict=True)
        ]
        addressed = (*arguments.inputs, *arguments.written)
        self.names = tuple(n for n in addressed if isinstance(given.get(n), View))
        self.places = tuple([order[name] for name in self.names])
        self._views = [given[name] for name in self.names]
        self._count = len(self._views)
        self.binding = operation.bind(self.views, self.problem, places, recorded)
        self.workspace_bytes = self.binding.workspace_bytes
        self._addresses: list[int] | None = None
        self._numbers: list[float] | None = []
        written = (*arguments.outputs, *arguments.updates)
        self.is_written = any(name in given for name in written)
        self._reaches = [
            None if 0 in view.shape else (*tensor.reach(view), name in written)
            for name, view in given.items()
            if isinstance(view, View)
        ]
        self.in_use = False
        self.maker: fast.Maker | None = None
        self.workspace_maker: fast.Maker | None = None

    def lies_apart(self, addresses: Sequence[int]) -> bool:
        """Whether no array that is written may share memory with another one, by where they begin and end.

        Args:
            addresses: of all arrays that the call is given, in the declared order.
        """
        spans = [
            (address + reach[0], address + reach[1], reach[2])
            for address, reach in zip(addresses, self._reaches, strict=True)
            if reach is not None
        ]
        spans.sort()
        end, end_of_written = 0, 0
        for low, high, written in spans:
            if low < (end if written else end_of_written):
                return False
            end = max(end, high)
            end_of_written = max(end_of_written, high) if written else end_of_written
        return True

    def memory(
        self, like: Callable[[], View], own: int | None, stream: int, prepared: bool = False
    ) -> tuple[int, object]:
        """A workspace's address, and what holds it, where that has to be kept while a launch may use it.

        Its memory may be given back as soon as the launches are queued, unless a graph is to run them: allocators hand
        it out again in stream order.

        Args:
            like: gives a view of an array of the caller's.
            own: the stream that it is used on, where it is not the current one of `like`'s framework.
            stream: the same in any case.
            prepared: whether it is to serve this call alone, for as long as it lives.
        """
        if self._operation.memory is not None:
            return self._operation.memory(self.binding, like, stream, prepared)
        made = tensor.allocate(like(), (self.workspace_bytes,), "uint8", own)
        return made.ptr, made

    def run(self, addresses: list[int], numbers: list[float], stream: int) -> None:
        """Launch, with the device's context current, without waiting for the result. Raises DriverError.

        Args:
            addresses: of the arrays in `names`, the results, and the workspace, if there is one.
            numbers: those in the places of arrays.
            stream: to run on.
        """
        self.in_use = True
        if addresses != self._addresses or numbers != self._numbers:
            self.point(addresses, numbers)
        self.binding.launch(stream)
        self.in_use = False

    def point(self, addresses: list[int], numbers: list[float]) -> None:
        """Set the addresses and numbers; see `run`."""
        if addresses != self._addresses:
            self._addresses = None
            count = self._count
            for view, address in zip(self._views, addresses):  # noqa: B905 - the results' come after
                view.ptr = address
            after = count + len(self.results)
            workspace = addresses[after] if after < len(addresses) else 0
            self.binding.point(self.views, addresses[count:after], workspace)
            self._addresses = addresses
        if numbers:
            self._numbers = None
            self.binding.scale(*numbers)  # type: ignore[attr-defined]
            # Zeros are equal whatever their signs.
            self._numbers = None if 0.0 in numbers else numbers


class _Bound(threading.local):
    """This thread's bound calls. Emptied when full.

    Attributes:
        calls: by operator, options, layouts, devices and what addresses leave when divided by 16.
        latest: of them, each operator's last one of the fast path, with what it was found by.
    """

    def __init__(self) -> None:
        self.calls: dict[Hashable, BoundCall] = {}
        self.latest: dict[object, tuple[list[Any], BoundCall]] = {}

    def keep(self, key: Hashable, call: BoundCall) -> BoundCall:
        """Have it at hand for further calls of that key."""
        if len(self.calls) >= _LIMIT:
            self.forget()
        self.calls[key] = call
        return call

    def forget(self) -> None:
        """Have none at hand."""
        self.calls.clear()
        self.latest.clear()


bound = _Bound()


def taken(key: Hashable | None) -> BoundCall | None:
    """This thread's bound call of that key; None where there is none that is free.

    One that is found in use is the outer one's of a call within a call, as of a finalizer that Python runs wherever
    memory is asked for, or was interrupted: it is left alone, and a new one takes its place.
    """
    found = None if key is None else bound.calls.get(key)
    if found is None or found.in_use:
        return None
    found.in_use = True
    return found


def kept(key: Hashable | None, made: BoundCall) -> BoundCall:
    """A new one, for this call and for further ones of that key."""
    made.in_use = True
    return made if key is None else bound.keep(key, made)


def numbers_of(seen: Sequence[Any]) -> list[float]:
    """The numbers in the places of arrays."""
    return [float(value) for value in seen if not isinstance(value, View | str | None)]
