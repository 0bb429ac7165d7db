"""The one way to a kernel: a call that is bound once, and runs wherever its arrays lie (docs/how_a_call_flows.md).

All that is checked, planned and laid out for a call depends on its options, on the layouts of its arrays and on their
addresses' remainders by 16. A `BoundCall` is what comes of it; each thread keeps those that it has made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Protocol

from .. import driver, tensor
from ..launch import Launcher
from ..tensor import View, fast
from .arguments import Arguments
from .workspace import require

_LIMIT = 1024

Results = Sequence[tuple[tuple[int, ...], str] | None]
"""Shape and dtype label of each result, in the order of their names; None for one that the call does not want."""


class Binding(Protocol):
    """Loaded kernels with everything that one problem fixes. One thread at a time may use it.

    Where numbers may stand in the places of arrays, `scale(*numbers)` sets them.

    Attributes:
        workspace_bytes: what it needs beside its arrays.
    """

    workspace_bytes: int

    def point(self, views: Any, results: Sequence[int], workspace: int) -> None:
        """Set every address: those that the views have by now, of the results, and of the workspace."""

    def launch(self, stream: int) -> None:
        """Run on `stream`, with the device's context current. Raises DriverError."""


class Launches:
    """Part of a `Binding`: launches that run one after the other."""

    workspace_bytes = 0

    def __init__(self, *launchers: Launcher | None) -> None:
        self._launchers = [launcher for launcher in launchers if launcher is not None]
        self.launcher = self._launchers[-1] if self._launchers else None

    def launch(self, stream: int) -> None:
        """See `Binding`."""
        for launcher in self._launchers:
            launcher(stream)


captured: list[object] = []
"""Memory that captured launches work in, kept for good: nobody says when a graph will not run any more."""


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
            Gets the binding, an array of the caller's, a stream, and whether it is for one prepared call.
        handed: turns results as they were allocated into those that are returned; gets views and problem, too.
        size: how large a workspace a call needs, in bytes, where it has a parameter for it.
    """

    arguments: Arguments[Any, Any]
    read: Callable[..., tuple[Any, Any]]
    wanted: Callable[[Any, Any], Results]
    bind: Callable[[Any, Any, Sequence[View], bool], Binding]
    on_cpu: Callable[[Any, Any], Callable[[], Any]]
    look: Callable[[Any, Any, object], None] | None = None
    memory: Callable[[Any, Any, int, bool], tuple[int, object]] | None = None
    handed: Callable[[Any, Any, Sequence[Any]], Sequence[Any]] | None = None
    size: Callable[[Any, Any], int] | None = None


class BoundCall:
    """A call without its addresses. One thread at a time may run it.

    Attributes:
        views, problem: what its checks made of it.
        binding: its kernels.
        places: of its inputs and of what is written beside the results, among all arrays, as declared.
        results: of each result the place, None for one that the call makes, and its shape and dtype.
        written: of the arrays that it is given, which ones it writes.
        in_use: whether it runs, or was interrupted when it last ran. Its addresses are somebody's then.
        maker, workspace_maker: make results and workspace in a fast framework that it was bound for.
    """

    maker: fast.Maker
    workspace_maker: fast.Maker

    def __init__(self, operation: Operation, given: Mapping[str, Any], recorded: bool = False) -> None:
        """Check arguments by name, plan, compile, lay out. No array is kept alive. Raises what the operator raises."""
        arguments, self._memory = operation.arguments, operation.memory
        alone = {n: replace(v, owner=None, capsule=None, stream=None) for n, v in given.items() if isinstance(v, View)}
        self.views, self.problem = operation.read(**{**given, **alone})
        places = {name: place for place, name in enumerate(arguments.names) if name in alone}
        wanted = zip_longest(arguments.results, operation.wanted(self.views, self.problem))
        results = [(name, result) for name, result in wanted if result is not None]
        self.results = [(places.get(name), *result) for name, result in results]
        like = alone[arguments.names[0]]
        laid_out = [alone.get(name) or tensor.contiguous(like, *result) for name, result in results]
        with driver.on_device(like.device.index):
            self.binding = operation.bind(self.views, self.problem, laid_out, recorded)
        if "workspace" in alone:
            require(alone["workspace"], self.binding.workspace_bytes, arguments.operator)
        names = [name for name in (*arguments.inputs, *arguments.written) if name in alone]
        self.places = [places[name] for name in names]
        self._views = [alone[name] for name in names]
        self._count = len(names) + len(results)
        written = {*arguments.outputs, *arguments.updates}
        self._reaches = [tensor.reach(alone[name]) for name in places]
        self.written = [number for number, name in enumerate(places) if name in written]
        self._addresses: list[int] = []
        self._numbers: list[float] = []
        self.in_use = False

    def lies_apart(self, addresses: Sequence[int]) -> bool:
        """Whether no array that is written may share memory with another one, by where they begin and end: at these
        addresses, of all arrays that the call is given, in the declared order."""
        spans = [(at + low, at + high) for at, (low, high) in zip(addresses, self._reaches, strict=True)]
        for number in self.written:
            low, high = spans[number]
            # The array itself is one that meets it, unless it is empty.
            if sum(begin < high and low < end for begin, end in spans) > 1:
                return False
        return True

    def run(
        self,
        addresses: list[int],
        numbers: list[float],
        stream: int,
        like: Any,
        framework: fast.Framework | None = None,
        prepared: bool = False,
    ) -> object:
        """Launch, with the device's context current, without waiting for the result. Raises DriverError.

        A workspace that is made here may be given back once the launches are queued, but for a graph's: allocators hand
        memory out again in the order of the stream.

        Args:
            addresses: of the arrays in `places`, of the results, and of the workspace, where it is given.
            numbers: those in the places of arrays.
            stream: where to launch.
            like: an array of the caller's.
            framework: whose maker makes the workspace, where `stream` is its current one.
            prepared: whether to get ready for launches of `binding` alone, and to return what they work in.
        """
        memory: Any = None
        size = self.binding.workspace_bytes
        if size and len(addresses) == self._count:
            if self._memory is not None:
                workspace, memory = self._memory(self.binding, like, stream, prepared)
            elif framework is not None:
                memory, (workspace,) = self.workspace_maker()
            else:
                seen = tensor.view(like, "input")
                own = None if stream == tensor.current_stream(seen) else stream
                memory = tensor.allocate(seen, (size,), "uint8", own)
                workspace = memory.ptr
            addresses = [*addresses, workspace]
        if addresses != self._addresses:
            for view, address in zip(self._views, addresses):  # noqa: B905 - the results' come after
                view.ptr = address
            results = addresses[len(self._views) : self._count]
            self.binding.point(self.views, results, addresses[-1] if len(addresses) > self._count else 0)
            self._addresses = addresses
        if numbers != self._numbers:
            self.binding.scale(*numbers)  # type: ignore[attr-defined]
            # Zeros are equal whatever their signs.
            self._numbers = [] if 0.0 in numbers else numbers
        if prepared:
            return memory
        if memory is not None and (framework is None or not framework.graphs_keep_memory) and driver.capturing(stream):
            captured.append(memory)
        self.binding.launch(stream)
        self.in_use = False
        return None


class _Bound(threading.local):
    """This thread's bound calls. Emptied when full.

    Attributes:
        calls: by operator, options, layouts, devices and what addresses leave when divided by 16.
        latest: of each operator's last call on the fast path the facts, and the bound call.
    """

    def __init__(self) -> None:
        self.calls: dict[Hashable, BoundCall] = {}
        self.latest: dict[object, tuple[list[Any] | None, BoundCall | None]] = {}

    def take(self, key: Hashable | None, make: Callable[[], BoundCall]) -> BoundCall:
        """The one of that key, from now on in use; a new one where there is none that is free.

        One in use is the outer one's of a call within a call, as of a finalizer that Python runs wherever memory is
        asked for, or was interrupted: it is left alone.
        """
        found = None if key is None else self.calls.get(key)
        if found is None or found.in_use:
            found = make()
            if key is not None:
                self.keep(key, found)
        found.in_use = True
        return found

    def keep(self, key: Hashable, call: BoundCall) -> None:
        """Have it at hand for further calls of that key."""
        if len(self.calls) >= _LIMIT:
            self.forget()
        self.calls[key] = call

    def forget(self) -> None:
        """Have none at hand."""
        self.calls.clear()
        self.latest.clear()


bound = _Bound()


def numbers_of(seen: Sequence[Any]) -> list[float]:
    """The numbers in the places of arrays."""
    return [float(value) for value in seen if not isinstance(value, View | str | None)]
