"""All calls of an operator (docs/how_a_call_flows.md).

All that is checked, planned and laid out for a call depends on its options, on the layouts of its arrays and on their
addresses' remainders by 16. A `BoundCall` is what comes of it; each thread keeps those that it has made. `Calls` has
the ways to it: the fast path, the slow path, prepared, and on the CPU, where there is none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from .. import driver, tensor
from ..errors import InputError, UnsupportedError, shown
from ..tensor import Allocation, View, fast
from .arguments import Arguments, all_plain, truth
from .gpu import Launches, Results
from .operator import Prepared
from .workspace import require

_LIMIT = 1024

captured: list[object] = []
"""Memory that captured launches work in, kept for good: nobody says when a graph will not run any more."""


class BoundCall:
    """A call without its addresses. One thread at a time may run it.

    Attributes:
        count: of the arrays whose addresses come before those of results: inputs, and what is written beside results.
        results: of each result the place among all arrays, None for one that the call makes, and its shape and dtype.
        written: of the arrays that it is given, which ones it writes.
        maker: makes the results, where it was bound for a fast framework.
        in_use: whether it runs, or was interrupted when it last ran. Its addresses are somebody's then.
    """

    def __init__(
        self, calls: Calls, given: Mapping[str, Any], framework: fast.Framework | None = None, recorded: bool = False
    ) -> None:
        """Check arguments by name, plan, compile, lay out. No array is kept alive. Raises what the operator raises."""
        arguments, self._memory, self._framework = calls.arguments, calls.memory, framework
        views = {name: given[name] for name in arguments.names if isinstance(given.get(name), View)}
        alone = {name: replace(view, owner=None, capsule=None, stream=None) for name, view in views.items()}
        self.views, self.problem = calls.read(**{**given, **alone})
        like = alone[arguments.names[0]]
        # Those behind the named ones are the call's own.
        wanted = zip_longest(arguments.results, calls.wanted(self.views, self.problem))
        results = [(name, result) for name, result in wanted if result is not None]
        laid_out = [alone.get(name) or tensor.contiguous(like, *result) for name, result in results]
        with driver.on_device(like.device.index):
            self.binding = calls.bind(self.views, self.problem, laid_out, recorded)
        if "workspace" in alone:
            require(alone["workspace"], self.binding.workspace_bytes, arguments.operator)
        if framework is not None:
            self.maker = framework.maker([result for _, result in results], like.device.index)
            # By itself: its memory is given back when the call returns, and handed out again in the stream's order.
            workspace = ((self.binding.workspace_bytes,), "uint8")
            self._workspace_maker = framework.maker([workspace], like.device.index)
        self._views = [alone[name] for name in (*arguments.inputs, *arguments.written) if name in alone]
        self.count = len(self._views)
        self.results = [(arguments.names.index(n) if n in alone else None, *result) for n, result in results]
        self._end = self.count + len(results)
        self._reaches = [tensor.reach(view) for view in alone.values()]
        written = {*arguments.outputs, *arguments.updates}
        self.written = [number for number, name in enumerate(alone) if name in written]
        self._addresses: list[int] = []
        self._numbers: list[float] = []
        self.in_use = False

    def lies_apart(self, addresses: Sequence[int]) -> bool:
        """Whether no array that is written may share memory with another one, by where they begin and end: at these
        addresses, of all arrays that the call is given, in the declared order."""
        spans = [(at + low, at + high) for at, (low, high) in zip(addresses, self._reaches, strict=True)]
        written = [spans[number] for number in self.written]
        # The array itself is one that meets it, unless it is empty.
        return all(sum(begin < high and low < end for begin, end in spans) < 2 for low, high in written)

    def run(self, addresses: list[int], numbers: list[float], stream: int, like: Any, prepared: bool = False) -> object:
        """Launch, with the device's context current, without waiting for the result. Raises DriverError.

        A workspace that is made here may be given back once the launches are queued, but for a graph's: allocators hand
        memory out again in the order of the stream.

        Args:
            addresses: of `count` arrays, of results, and of a workspace, where it is given.
            numbers: those in the places of arrays.
            stream: the current one of a fast framework that the call was bound for; else any.
            like: an array of the caller's; a view, where the call was bound for no fast framework.
            prepared: whether to get ready for launches of `binding` alone, and to return what they work in.
        """
        if self.in_use:  # a call within this one was interrupted, and may have set some addresses
            self._addresses, self._numbers = [], []
        self.in_use = True
        memory: Any = None
        framework, end = self._framework, self._end
        if (size := self.binding.workspace_bytes) and len(addresses) == end:
            if self._memory is not None:
                workspace, memory = self._memory(self.binding, like, stream, prepared)
            elif framework is not None:
                memory, (workspace,) = self._workspace_maker()
            else:
                own = None if stream == tensor.current_stream(like) else stream
                memory = tensor.allocate(like, (size,), "uint8", own)
                workspace = memory.ptr
            addresses = [*addresses, workspace]
        if addresses != self._addresses:
            for view, address in zip(self._views, addresses):  # noqa: B905 - the results' come after
                view.ptr = address
            workspace = addresses[-1] if len(addresses) > end else 0
            self.binding.point(self.views, addresses[self.count : end], workspace)
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


def numbers_of(seen: Iterable[Any]) -> list[float]:
    """The numbers in the places of arrays."""
    return [float(value) for value in seen if value is not None and not isinstance(value, (View, str))]


class _Bound(threading.local):
    """This thread's bound calls. Emptied when full.

    Attributes:
        calls: by operator, options, layouts, devices and what addresses leave when divided by 16.
        latest: of each operator's last call on the fast path the facts, and the bound call.
    """

    def __init__(self) -> None:
        self.calls: dict[Hashable, BoundCall] = {}
        self.latest: dict[object, tuple[list[Any] | None, BoundCall | None]] = {}

    def free(self, key: Hashable) -> BoundCall | None:
        """The one of that key; None for one in use, which is the outer one's of a call within a call, as of a finalizer
        that Python runs wherever memory is asked for, or was interrupted."""
        found = self.calls.get(key)
        return None if found is None or found.in_use else found

    def keep(self, key: Hashable | None, call: BoundCall) -> BoundCall:
        """The call itself, from now on at hand for further calls of that key; None is no key."""
        if key is not None:
            if len(self.calls) >= _LIMIT:
                self.forget()
            self.calls[key] = call
        return call

    def forget(self) -> None:
        """Have none at hand."""
        self.calls.clear()
        self.latest.clear()


bound = _Bound()


@dataclass(eq=False)
class Calls:
    """All calls of one operator, with arguments in the declared order. They raise what the operator raises.

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
    bind: Callable[[Any, Any, Sequence[View], bool], Launches]
    on_cpu: Callable[[Any, Any], Callable[[], Any]]
    look: Callable[[Any, Any, object], None] | None = None
    memory: Callable[[Any, Any, int, bool], tuple[int, object]] | None = None
    handed: Callable[[Any, Any, Sequence[Any]], Sequence[Any]] | None = None
    size: Callable[[Any, Any], int] | None = None

    # The fast path: arrays of one fast framework, on the current stream, no outputs given -----------------------------

    def __call__(
        self, inputs: Any, options: Any, outputs: Any = (), check_indices: object = False, stream: object = None
    ) -> Any:
        """Run once."""
        framework = fast.frameworks.get(type(inputs[0]))
        found = None
        if framework is not None and stream is None and check_indices is False:
            for output in outputs:
                if output is not None:
                    break
            else:
                found = self.cached(framework, inputs, options)
        return self._once(inputs, options, outputs, check_indices, stream) if found is None else found

    def cached(self, framework: fast.Framework, inputs: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
        """A call that allocates its results in a fast framework; None where it has to be looked at more closely."""
        # Types are part of it: True equals 1 and 1.0, which no option takes for each other.
        facts: list[Any] = [self, options, *map(type, options)]
        numbers: list[float] = []
        addresses = framework.look(inputs, facts, numbers)
        if addresses is None or not driver.is_current(index := addresses.pop()):
            return None
        latest, call = bound.latest.get(self, (None, None))
        try:
            # A loop comes with the same again, and to compare takes half the time of a look-up.
            if latest != facts:
                call = bound.calls.get(tuple(facts))
                bound.latest[self] = facts, call
        except Exception:
            # Options of a caller's own kind may refuse to be hashed or compared in any way.
            return None
        if call is None or call.in_use:
            seen = self._seen(inputs, ())
            if seen is None or not all_plain(options):
                return None
            call = bound.keep(tuple(facts), BoundCall(self, self.arguments.named(seen, options), framework))
            bound.latest[self] = facts, call
        if call.written and not call.lies_apart(addresses):
            return None
        arrays, pointers = call.maker()
        addresses += pointers
        stream = framework.stream(index)
        call.run(addresses, numbers, stream, inputs[0])
        tensor.release(index, stream)
        return self._returned(call, arrays, inputs)

    # The slow path: any arrays, any stream ----------------------------------------------------------------------------

    def _once(self, inputs: Any, options: Any, outputs: Any, check_indices: object, stream: object) -> Any:
        seen = self._seen(inputs, outputs)
        if seen is None:
            return self._on_cpu(inputs, options, outputs, check_indices, stream)()
        if fast.remember(inputs[0]):  # of a type that is new: the fast path may take it
            return self(inputs, options, outputs, check_indices, stream)
        key = self._key(seen, options)
        call = bound.free(key) or bound.keep(key, BoundCall(self, self.arguments.named(seen, options)))
        with driver.on_device(seen[0].device.index):
            return self.run(call, seen, inputs, options, check_indices, stream)[0]

    def _seen(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any] | None:
        """Views, numbers and Nones in the declared order; None on the CPU, and for what is wrong."""
        try:
            seen = self.arguments.viewed(inputs, outputs)
        except InputError:
            return None
        return None if seen[0].device.kind == "cpu" else seen

    def _key(self, seen: Sequence[Any], options: Sequence[Any]) -> Hashable | None:
        """What tells a call from all that its checks could find different; None where there is no telling."""
        facts: list[Any] = [self, seen[0].framework, options, *map(type, options)]
        for view in seen:
            if isinstance(view, View):
                where = view.device.kind, view.device.index, view.ptr % fast.ALIGNMENT
                facts.append((view.dtype, view.shape, view.strides, where))
            else:
                facts.append(view if view is None or isinstance(view, str) else fast.number_class(view))
        # A number of no class is for its checks to judge.
        return tuple(facts) if all_plain(options) and "" not in facts else None

    def run(
        self,
        call: BoundCall,
        seen: Sequence[Any],
        inputs: Any,
        options: Any,
        check_indices: object,
        stream: object,
        prepared: bool = False,
    ) -> tuple[Any, int, object]:
        """Run a call, with the device's context current: what it returns, its stream, what `BoundCall.run` returns.

        Each call is checked here: for arrays apart from each other, and for index values where that is asked for.
        """
        look = self._look(check_indices)
        given = [view for view in seen if isinstance(view, View)]
        if look is not None or (call.written and not call.lies_apart([view.ptr for view in given])):
            views, problem = self.read(**self.arguments.named(seen, options))
            if look is not None:
                look(views, problem, stream)
        pointer = tensor.launch_stream(given, stream)
        own = None if stream is None else pointer
        made = [
            tensor.allocate(given[0], shape, dtype, own) if at is None else Allocation(seen[at].ptr, seen[at].owner)
            for at, shape, dtype in call.results
        ]
        if prepared and not all(array.repeatable for array in made):
            wanted = f"a prepared call that allocates {given[0].framework} arrays"
            raise UnsupportedError(wanted, str(given[0].device), "a plain call")
        addresses = [view.ptr for view in given[: call.count]] + [array.ptr for array in made]
        if self.arguments.has_workspace and seen[-1] is not None:
            addresses.append(seen[-1].ptr)
        memory = call.run(addresses, numbers_of(seen), pointer, given[0], prepared)
        if not prepared:
            tensor.hold(given, pointer)
        return self._returned(call, [array.finish() for array in made], inputs), pointer, memory

    def _returned(self, call: BoundCall, arrays: Sequence[Any], inputs: Sequence[Any]) -> Any:
        if self.handed is not None:
            arrays = self.handed(call.views, call.problem, arrays)
        elif self.arguments.updates:
            arrays = [inputs[self.arguments.inputs.index(name)] for name in self.arguments.updates]
        return arrays[0] if len(arrays) == 1 else tuple(arrays)

    # Prepared, and on the CPU -----------------------------------------------------------------------------------------

    def _look(self, check_indices: object) -> Callable[[Any, Any, object], None] | None:
        """What looks at index values, where that is asked for. Raises InputError."""
        asked = truth(check_indices)
        if asked is None:
            raise InputError("check_indices", "True or False", shown(check_indices), self.arguments.operator)
        return self.look if asked else None

    def _on_cpu(self, inputs: Any, options: Any, outputs: Any, check_indices: object, where: object) -> Prepared[Any]:
        """A call of the NumPy reference. Raises what is wrong with arrays that `_seen` cannot see."""
        look = self._look(check_indices)
        views, problem = self.read(**self.arguments.named((*inputs, *outputs), options))
        run = self.on_cpu(views, problem)

        def call(*, stream: object = None) -> Any:
            if look is not None:
                look(views, problem, where)
            return run()

        return call

    def prepare(self, *, check_indices: object = False, stream: object = None, **arguments: Any) -> Prepared[Any]:
        """Do all of a call of `{name}` but the launch: checks, plan, compilation, allocation and binding.

        Takes the arguments of `{name}`, and raises what it raises.

        Returns:
            A prepared call: `prepared()` and `prepared(stream=...)` compute from the arrays given here, and write the
            same outputs each time. They allocate, check and synchronise nothing, so that a CUDA graph can capture them.
        """
        inputs, options, outputs = self.arguments.placed(arguments)
        seen = self._seen(inputs, outputs)
        if seen is None:
            return self._on_cpu(inputs, options, outputs, check_indices, stream)
        return PreparedCall(self, seen, inputs, options, check_indices, stream)

    def required_bytes(self, *, check_indices: object = False, stream: object = None, **arguments: Any) -> int:
        """How many bytes the `workspace` of a call of `{name}` with these arguments has to have at least; 0 where none
        is used.

        Nothing is computed or compiled, and the arrays are not read. Raises what `{name}` raises.
        """
        views, problem = self.read(**arguments)
        like = tensor.view(arguments[self.arguments.inputs[0]], "input")
        return 0 if like.device.kind == "cpu" or self.size is None else self.size(views, problem)


class PreparedCall:
    """A prepared call on a GPU; see `cupymla.ops.operator.Prepared`."""

    def __init__(
        self, calls: Calls, seen: Sequence[Any], inputs: Any, options: Any, check_indices: object, stream: object
    ) -> None:
        """Bind, and wait on the host for what was queued on the stream so far, where a run depends on it.

        Memory that is allocated here may be in use by work ahead of it on this stream, and what an input names is ready
        behind it, while a run may be on any stream. An event would not do: a run that is being captured must not wait
        for one from outside. There is no waiting for a stream that is itself being captured; the call may then run in
        that capture alone, in the order of this stream.
        """
        self._given = [view for view in seen if isinstance(view, View)]
        like = self._given[0]
        self._index = like.device.index
        # What one framework's current stream orders needs no ordering and no holding at each run; see `tensor.hold`.
        self._loose = any(view.stream is not None or view.framework != like.framework for view in self._given)
        arguments = calls.arguments.named(seen, options)
        calls.read(**arguments)  # what is wrong is said before anything touches the GPU
        # Memory that is allocated here is the call's own: no graph has to repeat that.
        with driver.beside_captures(), driver.on_device(self._index):
            call = BoundCall(calls, arguments)
            self._result, pointer, self._keep = calls.run(call, seen, inputs, options, check_indices, stream, True)
            fresh = any(place is None for place, *_ in call.results)
            if (fresh or self._loose or self._keep is not None) and not driver.capturing(pointer):
                driver.wait(pointer)
        self._stream, self._binding = None if stream is None else pointer, call.binding
        if self._loose:
            tensor.hold(self._given, pointer)

    def __call__(self, *, stream: object = None) -> Any:
        """Launch once more, without waiting for the result. Raises DriverError."""
        wanted = self._stream if stream is None else stream
        if self._loose:
            pointer = tensor.launch_stream(self._given, wanted)
        else:
            pointer = tensor.current_stream(self._given[0]) if wanted is None else tensor.stream_pointer(wanted)
        if driver.is_current(self._index):
            self._binding.launch(pointer)
        else:
            with driver.on_device(self._index):
                self._binding.launch(pointer)
        if self._loose:
            tensor.hold(self._given, pointer)
        return self._result
