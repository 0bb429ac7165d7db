"""All calls of an operator: the fast path, the slow path, prepared, and on the CPU (docs/how_a_call_flows.md)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import driver, tensor
from ..errors import InputError, UnsupportedError
from ..tensor import Allocation, View, fast
from .arguments import Flag, all_plain
from .bound import BoundCall, Operation, bound, captured, kept, numbers_of, taken
from .operator import CpuCall, Prepared
from .workspace import require

_ALIGNMENT = 16


@dataclass(eq=False)
class Calls(Operation):
    """All calls of one operator, once or prepared."""

    def __post_init__(self) -> None:
        self._takes_numbers = bool(self.arguments.numbers)
        self._returns_results = self.handed is None and not self.arguments.updates

    # The fast path: arrays of one fast framework, on the current stream, no outputs given -----------------------------

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
                found = self.cached(framework, inputs, options)
                if found is not None:
                    return found
        return self._once(inputs, options, outputs, check_indices, stream)

    def cached(self, framework: fast.Framework, inputs: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
        """A call that allocates its results in a fast framework; None where it has to be looked at more closely."""
        # Types are part of it: True equals 1 and 1.0, which no option takes for each other.
        facts: list[Any] = [self, *options, *map(type, options)]
        numbers: list[float] = []
        addresses = framework.look(inputs, facts, numbers)
        if addresses is None or (numbers and not self._takes_numbers):
            return None
        index: int = addresses.pop()
        if not driver.is_current(index):
            return None
        latest = bound.latest.get(self)
        try:
            # A loop comes with the same again, and to compare takes half the time of a look-up.
            if latest is not None and latest[0] == facts:
                call: BoundCall | None = latest[1]
            else:
                call = bound.calls.get(tuple(facts))
                if call is not None:
                    bound.latest[self] = facts, call
        except Exception:
            # Options of a caller's own kind may refuse to be hashed or compared in any way.
            return None
        if call is None or call.in_use:
            call = self._fast(framework, tuple(facts), inputs, options, index)
            if call is None:
                return None
            bound.latest[self] = facts, call
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
        if keep is not None and not framework.graphs_keep_memory and driver.capturing(pointer):
            captured.keep(keep)
        if self._returns_results:
            return arrays[0] if len(arrays) == 1 else tuple(arrays)
        return self._returned(call, arrays, inputs)

    def _fast(
        self, framework: fast.Framework, key: Hashable, inputs: Sequence[Any], options: Sequence[Any], index: int
    ) -> BoundCall | None:
        """A call bound for a fast framework, kept; None for what only the slow path can judge."""
        seen = self._seen(inputs, ())
        if seen is None or not all_plain(options):
            return None
        # One that the slow path made is as good, and the other way round.
        shared = self._key(seen, options)
        call = taken(shared) or kept(shared, BoundCall(self, self.checked(seen, options)))
        call.maker = framework.maker(call.results, index)
        if call.workspace_bytes and self.memory is None:
            call.workspace_maker = framework.maker([((call.workspace_bytes,), "uint8")], index)
        return bound.keep(key, call)

    # The slow path: any arrays, any stream ----------------------------------------------------------------------------

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
            arrays = _Arrays(call, seen, None if stream is None else pointer)
            place, keep = self._workspace(call, seen, None if stream is None else pointer, pointer)
            addresses = [*arrays.addresses, *place]
            call.run(addresses, numbers_of(seen), pointer)
            if isinstance(keep, Allocation) and driver.capturing(pointer):
                captured.keep(keep)
        tensor.hold(given, pointer)
        return self._returned(call, arrays.finish(), inputs)

    def _check(self, call: BoundCall, seen: Sequence[Any], options: Any, check_indices: object, stream: object) -> None:
        """What each call is checked for: arrays apart from each other, and index values where that is asked for."""
        asked = self._asked(check_indices)
        if asked or (call.is_written and not call.lies_apart([v.ptr for v in seen if isinstance(v, View)])):
            views, problem = self.read(**self.arguments.named(seen, options))
            if asked and self.look is not None:
                self.look(views, problem, stream)

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
        if not all_plain(options):
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

    def _returned(self, call: BoundCall, arrays: Sequence[Any], inputs: Sequence[Any]) -> Any:
        if self.handed is not None:
            arrays = self.handed(call.views, call.problem, arrays)
        elif self.arguments.updates:
            arrays = [inputs[self.arguments.inputs.index(name)] for name in self.arguments.updates]
        return arrays[0] if len(arrays) == 1 else tuple(arrays)

    # Prepared, and on the CPU -----------------------------------------------------------------------------------------

    def _on_cpu(self, inputs: Any, options: Any, outputs: Any, check_indices: object, stream: object) -> Any:
        """A call of the NumPy reference, or of what no key can tell from others."""
        asked = self._asked(check_indices)
        views, problem = self.read(**self.arguments.named((*inputs, *outputs), options))
        run = self.on_cpu(views, problem)

        def looked() -> Any:
            if asked and self.look is not None:
                self.look(views, problem, stream)
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
        return 0 if on_cpu or self.size is None else self.size(views, problem)


class _Arrays:
    """The results of one call: the caller's arrays where given, else fresh ones in the framework of the first input.

    Attributes:
        addresses: of the call's inputs and, behind them, of these.
        fresh: whether any was made here.
    """

    def __init__(self, call: BoundCall, seen: Sequence[Any], own: int | None) -> None:
        """Take or make them; `own`: the stream they are written on where it is not the current one of the first."""
        self._arrays: list[View | Allocation] = [
            tensor.allocate(seen[0], shape, dtype, own) if place is None else seen[place]
            for place, (shape, dtype) in zip(call.result_places, call.results, strict=True)
        ]
        self.addresses = [seen[place].ptr for place in call.places] + [array.ptr for array in self._arrays]
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
            arrays = _Arrays(call, seen, own)
            arrays.require_mutable(like)
            place, self._keep = calls._workspace(call, seen, own, pointer, prepared=True)
            call.point([*arrays.addresses, *place], numbers_of(seen))
            if (arrays.fresh or self._keep is not None or self._loose) and not driver.capturing(pointer):
                driver.wait(pointer)
        self._binding = call.binding
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
