"""The one way to a kernel: a call that is bound once, and runs wherever its arrays lie (docs/how_a_call_flows.md).

All that is checked, planned and laid out for a call depends on its options, on the layouts of its arrays and on their
addresses' remainders by 16. A `BoundCall` is what comes of it. Each thread keeps those that it has made: a call that
comes again pays for a look-up, its outputs, and the launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from .. import driver, tensor
from ..errors import InputError, UnsupportedError
from ..launch import Launcher
from ..tensor import Allocation, View, fast
from .arguments import Arguments, Flag, is_plain
from .operator import CpuCall, Prepared
from .workspace import require

T = TypeVar("T")
ViewsT = TypeVar("ViewsT")
ProblemT = TypeVar("ProblemT")

_LIMIT = 1024
_ALIGNMENT = 16

Results = Sequence[tuple[tuple[int, ...], str]]
"""Shape and dtype label of each result."""


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


class Shared(Generic[T]):
    """What never changes once it is made, such as plans, for all threads of the process. Emptied when full."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[Hashable, T] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made for a key."""
        with self._lock:
            found = self._made.get(key)
        if found is None:
            found = make()
            with self._lock:
                if len(self._made) >= _LIMIT:
                    self._made.clear()
                self._made[key] = found
        return found

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._made.clear()


plans: Shared[Any] = Shared()


def planned(plan: Callable[..., T], *facts: Any) -> T:
    """`plan(*facts)`, worked out once. Raises what it raises."""
    made: T = plans.get((plan, *facts), lambda: plan(*facts))
    return made


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


class BoundCall:
    """A call without its addresses. One thread at a time may run it.

    Attributes:
        problem: what its checks made of it.
        results: shapes and dtypes of what it returns, and of nothing else.
        names: of its arrays, inputs and what is written beside the results, in the order of their addresses.
        launcher: the launch that computes the result, by the first addresses; None when there is nothing to compute.
        workspace_bytes: what a run needs beside its arrays.
        is_written: whether it writes an array that it is given.
        in_use: whether it runs, or was interrupted when it last ran. Its addresses are somebody's then.
        maker: makes the results in the framework that it was bound for; None where that is not fast.
        workspace_maker: likewise of the workspace, where there is one and the call is not given it.
    """

    __slots__ = (
        *("_addresses", "_binding", "_calls", "_count", "_reaches", "_struct", "_views"),
        *("in_use", "is_written", "launcher", "maker", "names", "problem", "results", "workspace_bytes"),
        "workspace_maker",
    )

    def __init__(self, calls: Calls, checked: Checked, recorded: bool = False) -> None:
        """Plan, compile and lay out, with the device's context current. Raises what the operator raises."""
        arguments = calls.arguments
        views, self._struct, self.problem = checked
        given = {name: v for name, v in zip(arguments.names, views, strict=True) if v is not None}
        self._calls = calls
        self.results = tuple(calls.wanted(self._struct, self.problem))
        like = views[0]
        places = []
        for number, (shape, dtype) in enumerate(self.results):
            own = given.get(arguments.results[number]) if number < len(arguments.results) else None
            places.append(own or tensor.contiguous(like, shape, dtype))
        addressed = (*arguments.inputs, *arguments.written)
        self.names = tuple(n for n in addressed if isinstance(given.get(n), View))
        self._views = [given[name] for name in self.names]
        self._count = len(self._views)
        self._binding = calls.bind(self._struct, self.problem, places, recorded)
        self.launcher, self.workspace_bytes = self._binding.launcher, self._binding.workspace_bytes
        self._addresses: list[int] | None = None
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

        Args:
            like: gives a view of an array of the caller's.
            own: the stream that it is used on, where it is not the current one of `like`'s framework.
            stream: the same in any case.
            prepared: whether it is to serve this call alone, for as long as it lives.
        """
        return self._calls.memory(self._binding, like, own, stream, prepared)

    def run(self, addresses: list[int], numbers: list[float], stream: int) -> None:
        """Launch, with the device's context current, without waiting for the result. Raises DriverError.

        Args:
            addresses: of the arrays in `names`, the results, and the workspace, if there is one.
            numbers: those in the places of arrays.
            stream: to run on.
        """
        self.in_use = True
        if numbers or addresses != self._addresses:
            self.point(addresses, numbers)
        self._binding.launch(stream)
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
            self._binding.point(self._struct, addresses[count:after], workspace)
            self._addresses = addresses
        if numbers:
            self._binding.scale(*numbers)  # type: ignore[attr-defined]


class _Bound(threading.local):
    """This thread's bound calls, by operator, options, layouts, devices and remainders. Emptied when full."""

    def __init__(self) -> None:
        self.calls: dict[Hashable, BoundCall] = {}

    def keep(self, key: Hashable, call: BoundCall) -> BoundCall:
        if len(self.calls) >= _LIMIT:
            self.calls.clear()
        self.calls[key] = call
        return call


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


class Calls:
    """All calls of one operator, once or prepared."""

    def __init__(
        self,
        arguments: Arguments[Any, Any],
        read: Callable[..., tuple[Any, Any]],
        wanted: Callable[[Any, Any], Results],
        bind: Callable[[Any, Any, Sequence[View], bool], Binding],
        on_cpu: Callable[[Any, Any], Callable[[], Any]],
        *,
        look: Callable[[Any, Any, object], None] | None = None,
        memory: Callable[[Any, Callable[[], View], int, bool], tuple[int, object]] | None = None,
        handed: Callable[[Any, Any, Sequence[Any]], Sequence[Any]] | None = None,
        size: Callable[[Any, Any], int] | None = None,
    ) -> None:
        """Join what an operator has.

        Args:
            arguments: what it takes.
            read: checks arguments, given by name, and makes views and a problem of them. Raises InputError.
            wanted: the results, of views and problem.
            bind: lays out kernels for views and problem. Gets views of the results, and whether XLA is to record the
                launches: then no kernel overlaps another one, and there is no memory but the arrays.
            on_cpu: the NumPy reference on arrays of the CPU, made ready.
            look: looks at index values where a call asks for it; gets views, problem and stream. Raises InputError.
            memory: gives a call its workspace where that is not freshly allocated; see `BoundCall.memory`.
            handed: turns results as they were allocated into those that are returned; gets views and problem, too.
            size: how large a workspace a call needs, in bytes, where it has a parameter for it.
        """
        self.arguments = arguments
        self.read, self.wanted, self.bind, self.on_cpu = read, wanted, bind, on_cpu
        self._look, self._memory, self._handed, self._size = look, memory, handed, size
        self._takes_numbers = bool(arguments.numbers)
        self._returns_results = handed is None and not arguments.updates

    # The short way: arrays of one fast framework, on the current stream, no outputs given -----------------------------

    def __call__(
        self,
        inputs: tuple[Any, ...],
        options: tuple[Any, ...],
        outputs: tuple[Any, ...] = (),
        check_indices: object = False,
        stream: object = None,
    ) -> Any:
        """Run once: arguments in the declared order. Raises what the operator raises."""
        framework = fast.frameworks.get(type(inputs[0]))
        if framework is not None and stream is None and check_indices is False:
            for output in outputs:
                if output is not None:
                    break
            else:
                found = self.again(framework, inputs, options)
                if found is not None:
                    return found
        return self._once(inputs, options, outputs, check_indices, stream)

    def again(self, framework: fast.Framework, inputs: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
        """A call that allocates its results in a fast framework; None where it has to be looked at more closely."""
        # Types are part of it: True equals 1 and 1.0, which no option takes for each other.
        facts: list[Any] = [self, *options, *map(type, options)]
        numbers: list[float] = []
        seen = framework.look(inputs, facts, numbers)
        if seen is None or (numbers and not self._takes_numbers):
            return None
        addresses, index = seen
        bits = 0
        for address in addresses:
            bits |= address
        if bits % _ALIGNMENT or 0 in addresses or not driver.is_current(index):
            return None
        key = tuple(facts)
        try:
            call = bound.calls.get(key)
        except Exception:
            # Options of a caller's own kind may refuse to be hashed or compared in any way.
            return None
        if call is None or call.in_use:
            call = self._fast(framework, key, inputs, options, index)
            if call is None:
                return None
        if call.is_written and not call.lies_apart(addresses):
            call.in_use = False
            return None
        call.in_use = True
        arrays, pointers = call.maker()  # type: ignore[misc]
        addresses += pointers
        pointer = framework.stream(index)
        keep = None
        if call.workspace_bytes:
            if call.workspace_maker is None:
                place, keep = call.memory(lambda: tensor.view(inputs[0], "input"), None, pointer)
                addresses.append(place)
            else:
                # By itself: its memory is given back when this returns, and handed out again in the stream's order.
                keep, places = call.workspace_maker()
                addresses += places
        call.run(addresses, numbers, pointer)
        tensor.release(index, pointer)
        if keep is not None and driver.capturing(pointer):
            captured.keep(keep)
        if self._returns_results:
            return arrays[0] if len(arrays) == 1 else tuple(arrays)
        return self._returned(call, arrays, inputs)

    def _fast(
        self, framework: fast.Framework, key: Hashable, inputs: Sequence[Any], options: Sequence[Any], index: int
    ) -> BoundCall | None:
        """A call bound for a fast framework, kept; None for what only the long way can judge."""
        seen = self._seen(inputs, ())
        if seen is None or not all(map(is_plain, options)):
            return None
        # One that the long way made is as good, and the other way round.
        shared = self._key(seen, options)
        call = taken(shared) or kept(shared, BoundCall(self, self.checked(seen, options)))
        call.maker = framework.maker(call.results, index)
        if call.workspace_bytes and self._memory is None:
            call.workspace_maker = framework.maker([((call.workspace_bytes,), "uint8")], index)
        return bound.keep(key, call)

    # The long way: any arrays, any stream -----------------------------------------------------------------------------

    def _once(self, inputs: Any, options: Any, outputs: Any, check_indices: object, stream: object) -> Any:
        seen = self._seen(inputs, outputs)
        if seen is None or seen[0].device.kind == "cpu":
            return self._on_cpu(inputs, options, outputs, check_indices, stream)()
        fast.remember(inputs[0])
        given = [view for view in seen if isinstance(view, View)]
        index = seen[0].device.index
        key = self._key(seen, options)
        call = taken(key)
        # Before anything touches the GPU.
        checked = None if call else self.checked(seen, options)
        with driver.on_device(index):
            if call is None:
                assert checked is not None
                call = kept(key, BoundCall(self, checked))
            self._check(call, seen, options, check_indices, stream)
            pointer = tensor.launch_stream(given, stream)
            arrays = _Arrays(call, self.arguments, seen, None if stream is None else pointer)
            place, keep = self._workspace(call, seen, None if stream is None else pointer, pointer)
            addresses = [*arrays.addresses, *place]
            call.run(addresses, numbers_of(seen), pointer)
            if isinstance(keep, Allocation) and driver.capturing(pointer):
                captured.keep(keep)
        tensor.hold(given, pointer)
        return self._returned(call, arrays.finish(), inputs)

    def checked(self, seen: Sequence[Any], options: Sequence[Any]) -> Checked:
        """Check a call, whose arrays are not kept. Raises what the operator's checks raise."""
        arrays = [replace(v, owner=None, capsule=None, stream=None) if isinstance(v, View) else v for v in seen]
        return Checked(arrays, *self.read(**self.arguments.named(arrays, options)))

    def _check(self, call: BoundCall, seen: Sequence[Any], options: Any, check_indices: object, stream: object) -> None:
        """What each call is checked for: arrays apart from each other, and index values where that is asked for."""
        asked = self._asked(check_indices)
        addresses = [view.ptr for view in seen if isinstance(view, View)]
        if asked or (call.is_written and not call.lies_apart(addresses)):
            views, problem = self.read(**self.arguments.named(seen, options))
            if asked and self._look is not None:
                self._look(views, problem, stream)

    def _asked(self, check_indices: object) -> bool:
        try:
            return check_indices is not False and Flag()("check_indices", check_indices)
        except InputError as refused:
            raise InputError(refused.argument, refused.expected, refused.got, self.arguments.operator) from None

    def _seen(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any] | None:
        """Views, numbers and Nones in the declared order; None where checks have to say what is wrong."""
        try:
            return self.arguments.viewed(inputs, outputs)
        except InputError:
            return None

    def _key(self, seen: Sequence[Any], options: Sequence[Any]) -> Hashable | None:
        """What tells a call from all that its checks could find different; None where there is no telling."""
        if not all(map(is_plain, options)):
            return None
        facts: list[Any] = [self, seen[0].framework, *options, *map(type, options)]
        for view in seen:
            if isinstance(view, View):
                if view.device.kind != "cuda":
                    return None
                facts.append((view.dtype, view.shape, view.strides, view.device.index, view.ptr % _ALIGNMENT))
            elif view is None:
                facts.append(None)
            elif isinstance(view, str):
                facts.append(view)
            else:
                number_class = fast.number_class(view)
                if not number_class:
                    return None
                facts.append(number_class)
        return tuple(facts)

    def _workspace(
        self, call: BoundCall, seen: Sequence[Any], own: int | None, stream: int, prepared: bool = False
    ) -> tuple[tuple[int, ...], object]:
        """A workspace's address, if there is one, and what is to be kept of it: the caller's, or one of this call's."""
        given = seen[-1] if self.arguments.has_workspace else None
        if given is not None:
            require(given, call.workspace_bytes, self.arguments.operator)
            return (given.ptr,), None
        if not call.workspace_bytes:
            return (), None
        place, keep = call.memory(lambda: seen[0], own, stream, prepared)
        return (place,), keep

    def memory(
        self, binding: Binding, like: Callable[[], View], own: int | None, stream: int, prepared: bool
    ) -> tuple[int, object]:
        """A workspace from the allocator of the caller's framework, or as the operator has it.

        Its memory may be given back as soon as the launches are queued, unless a graph is to run them: allocators hand
        it out again in stream order.
        """
        if self._memory is not None:
            return self._memory(binding, like, stream, prepared)
        made = tensor.allocate(like(), (binding.workspace_bytes,), "uint8", own)
        return made.ptr, made

    def _returned(self, call: BoundCall, arrays: Sequence[Any], inputs: Sequence[Any]) -> Any:
        if self._handed is not None:
            arrays = self._handed(call._struct, call.problem, arrays)
        elif self.arguments.updates:
            return tuple([inputs[self.arguments.inputs.index(name)] for name in self.arguments.updates])
        return arrays[0] if len(arrays) == 1 else tuple(arrays)

    # Prepared, and on the CPU -----------------------------------------------------------------------------------------

    def _on_cpu(self, inputs: Any, options: Any, outputs: Any, check_indices: object, stream: object) -> Any:
        """A call of the NumPy reference, or of what no key can tell from others."""
        asked = self._asked(check_indices)
        views, problem = self.read(**self.arguments.named((*inputs, *outputs), options))
        run = self.on_cpu(views, problem)

        def looked() -> Any:
            if asked and self._look is not None:
                self._look(views, problem, None)
            return run()

        return CpuCall(looked)

    def prepare(self, **arguments: Any) -> Prepared[Any]:
        """Everything of a call but the launch. Raises what the operator raises, and UnsupportedError."""
        stream, check_indices = arguments.pop("stream", None), arguments.pop("check_indices", False)
        inputs, options, outputs = self.arguments.placed(arguments)
        seen = self._seen(inputs, outputs)
        if seen is None or seen[0].device.kind == "cpu":
            return self._on_cpu(inputs, options, outputs, check_indices, stream)  # type: ignore[no-any-return]
        return PreparedCall(self, seen, inputs, options, check_indices, stream)

    def required_bytes(self, **arguments: Any) -> int:
        """How large a workspace a call needs, in bytes: none on the CPU. Raises what the operator raises."""
        for name in ("stream", "check_indices"):
            arguments.pop(name, None)
        inputs, options, outputs = self.arguments.placed(arguments)
        views, problem = self.read(**self.arguments.named((*inputs, *outputs), options))
        on_cpu = tensor.view(inputs[0], "input").device.kind == "cpu"
        return 0 if on_cpu or self._size is None else self._size(views, problem)


class _Arrays:
    """The results of one call: the caller's arrays where given, else fresh ones in the framework of the first input.

    Attributes:
        addresses: of the call's inputs and, behind them, of these.
        fresh: whether any was made here.
    """

    def __init__(self, call: BoundCall, arguments: Arguments[Any, Any], seen: Sequence[Any], own: int | None) -> None:
        """Take or make them; `own`: the stream they are written on where it is not the current one of the first."""
        by_name = dict(zip(arguments.names, seen, strict=True))
        names = (*arguments.results, *(None,) * len(call.results))
        self._arrays: list[View | Allocation] = [
            by_name.get(name) or tensor.allocate(seen[0], shape, dtype, own)
            for name, (shape, dtype) in zip(names, call.results)  # noqa: B905 - not all of them are wanted
        ]
        self.addresses = [by_name[name].ptr for name in call.names] + [array.ptr for array in self._arrays]
        self.fresh = any(isinstance(array, Allocation) for array in self._arrays)

    def require_mutable(self, like: View) -> None:
        """Raise UnsupportedError when an output would be an array that cannot be written a second time."""
        if any(isinstance(array, Allocation) and not array.repeatable for array in self._arrays):
            wanted = f"a prepared call that allocates {like.framework} arrays"
            raise UnsupportedError(wanted, str(like.device), "a plain call")

    def finish(self) -> list[Any]:
        """The arrays to return. To be called once, after the launch (see `tensor.Allocation`)."""
        return [array.finish() if isinstance(array, Allocation) else array.owner for array in self._arrays]


class PreparedCall:
    """A prepared call on a GPU; see `cupymla.ops.operator.Prepared`.

    Attributes:
        launcher: the launch that computes the result; None when there is nothing to compute.
    """

    def __init__(
        self, calls: Calls, seen: Sequence[Any], inputs: Any, options: Any, check_indices: object, stream: object
    ) -> None:
        """Bind, and wait on the host for what was queued on the stream so far, where a run depends on it.

        Memory that is allocated here may be in use by work ahead of it on this stream, and what an input names is ready
        behind it, while a run may be on any stream. An event would not do: a run that is being captured must not wait
        for one from outside. There is no waiting for a stream that is itself being captured; the call may then run in
        that capture alone, in the order of this stream.
        """
        checked = calls.checked(seen, options)
        self._given = [view for view in seen if isinstance(view, View)]
        pointer = tensor.launch_stream(self._given, stream)
        self._stream = own = None if stream is None else pointer
        like = self._given[0]
        self._device = like.device.index
        self._on_cupy = like.framework == "cupy" and like.stream is None
        # What one framework's current stream orders needs no ordering and no holding at each run; see `tensor.hold`.
        self._loose = any(seen.stream is not None or seen.framework != like.framework for seen in self._given)
        # Memory that is allocated here is the call's own: no graph has to repeat that.
        with driver.beside_captures(), driver.on_device(self._device):
            self._call = call = BoundCall(calls, checked)
            calls._check(call, seen, options, check_indices, stream)
            arrays = _Arrays(call, calls.arguments, seen, own)
            arrays.require_mutable(like)
            place, self._keep = calls._workspace(call, seen, own, pointer, prepared=True)
            call.point([*arrays.addresses, *place], numbers_of(seen))
            if (arrays.fresh or self._keep is not None or self._loose) and not driver.capturing(pointer):
                driver.wait(pointer)
        self._binding = call._binding
        self.launcher = self._binding.launcher
        self._result = calls._returned(call, arrays.finish(), inputs)
        if self._loose:
            tensor.hold(self._given, pointer)

    def __call__(self, *, stream: object = None) -> Any:
        """Launch once more, without waiting for the result. Raises DriverError."""
        if self._loose:
            pointer = tensor.launch_stream(self._given, self._stream if stream is None else stream)
        elif stream is not None:
            pointer = tensor.stream_pointer(stream)
        elif self._stream is not None:
            pointer = self._stream
        elif self._on_cupy:
            pointer = tensor.cupy_stream(self._device)
        else:
            pointer = tensor.current_stream(self._given[0])
        if driver.is_current(self._device):
            self._binding.launch(pointer)
        else:
            with driver.on_device(self._device):
                self._binding.launch(pointer)
        if self._loose:
            tensor.hold(self._given, pointer)
        return self._result


def numbers_of(seen: Sequence[Any]) -> list[float]:
    """The numbers in the places of arrays."""
    return [float(value) for value in seen if not isinstance(value, View | str | None)]
