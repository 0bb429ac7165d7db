"""All calls of an operator: the fast path, the slow path, prepared, and on the CPU (docs/how_a_call_flows.md)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import driver, tensor
from ..errors import InputError, UnsupportedError, shown
from ..tensor import Allocation, View, fast
from .arguments import all_plain, truth
from .bound import BoundCall, Operation, bound, numbers_of
from .operator import Prepared


@dataclass(eq=False)
class Calls(Operation):
    """All calls of one operator, with arguments in the declared order. They raise what the operator raises."""

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
            call = self._bound_for(framework, facts, inputs, options, index)
            if call is None:
                return None
        if call.written and not call.lies_apart(addresses):
            call.in_use = False
            return None
        call.in_use = True
        arrays, pointers = call.maker()
        addresses += pointers
        stream = framework.stream(index)
        call.run(addresses, numbers, stream, inputs[0], framework)
        tensor.release(index, stream)
        return self._returned(call, arrays, inputs)

    def _bound_for(
        self, framework: fast.Framework, facts: list[Any], inputs: Sequence[Any], options: Sequence[Any], index: int
    ) -> BoundCall | None:
        """A call bound for a fast framework, kept; None for what only the slow path can judge."""
        seen = self._seen(inputs, ())
        key = None if seen is None else self._key(seen, options)
        if seen is None or key is None:
            return None
        # One that the slow path made is as good, and the other way round.
        call = bound.take(key, lambda: BoundCall(self, self.arguments.named(seen, options)))
        call.maker = framework.maker([(shape, dtype) for _, shape, dtype in call.results], index)
        # By itself: its memory is given back when the call returns, and handed out again in the stream's order.
        call.workspace_maker = framework.maker([((call.binding.workspace_bytes,), "uint8")], index)
        bound.keep(tuple(facts), call)
        bound.latest[self] = facts, call
        return call

    # The slow path: any arrays, any stream ----------------------------------------------------------------------------

    def _once(self, inputs: Any, options: Any, outputs: Any, check_indices: object, stream: object) -> Any:
        seen = self._seen(inputs, outputs)
        if seen is None:
            return self._on_cpu(inputs, options, outputs, check_indices, stream)()
        fast.remember(inputs[0])
        call = bound.take(self._key(seen, options), lambda: BoundCall(self, self.arguments.named(seen, options)))
        given = [view for view in seen if isinstance(view, View)]
        with driver.on_device(given[0].device.index):
            pointer, addresses, made = self._placed(call, seen, given, options, check_indices, stream)
            call.run(addresses, numbers_of(seen), pointer, given[0])
        tensor.hold(given, pointer)
        return self._returned(call, [array.finish() for array in made], inputs)

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

    def _placed(
        self, call: BoundCall, seen: Sequence[Any], given: list[View], options: Any, asking: object, stream: object
    ) -> tuple[int, list[int], list[Allocation]]:
        """The stream to launch on, addresses as `BoundCall.run` takes them, and the results, some of them fresh.

        Each call is checked here: for arrays apart from each other, and for index values where that is asked for.
        """
        asked = self._asked(asking)
        if asked or (call.written and not call.lies_apart([view.ptr for view in given])):
            views, problem = self.read(**self.arguments.named(seen, options))
            if asked and self.look is not None:
                self.look(views, problem, stream)
        pointer = tensor.launch_stream(given, stream)
        own = None if stream is None else pointer
        made = [
            tensor.allocate(given[0], shape, dtype, own) if at is None else Allocation(seen[at].ptr, seen[at].owner)
            for at, shape, dtype in call.results
        ]
        addresses = [seen[place].ptr for place in call.places] + [array.ptr for array in made]
        if self.arguments.has_workspace and seen[-1] is not None:
            addresses.append(seen[-1].ptr)
        return pointer, addresses, made

    def _returned(self, call: BoundCall, arrays: Sequence[Any], inputs: Sequence[Any]) -> Any:
        if self.handed is not None:
            arrays = self.handed(call.views, call.problem, arrays)
        elif self.arguments.updates:
            arrays = [inputs[self.arguments.inputs.index(name)] for name in self.arguments.updates]
        return arrays[0] if len(arrays) == 1 else tuple(arrays)

    # Prepared, and on the CPU -----------------------------------------------------------------------------------------

    def _asked(self, check_indices: object) -> bool:
        asked = truth(check_indices)
        if asked is None:
            raise InputError("check_indices", "True or False", shown(check_indices), self.arguments.operator)
        return asked

    def _on_cpu(self, inputs: Any, options: Any, outputs: Any, check_indices: object, where: object) -> Prepared[Any]:
        """A call of the NumPy reference. Raises what is wrong with arrays that `_seen` cannot see."""
        asked = self._asked(check_indices)
        views, problem = self.read(**self.arguments.named((*inputs, *outputs), options))
        run = self.on_cpu(views, problem)

        def call(*, stream: object = None) -> Any:
            if asked and self.look is not None:
                self.look(views, problem, where)
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
        self._given = given = [view for view in seen if isinstance(view, View)]
        like = given[0]
        self._index = like.device.index
        # What one framework's current stream orders needs no ordering and no holding at each run; see `tensor.hold`.
        self._loose = any(view.stream is not None or view.framework != like.framework for view in given)
        arguments = calls.arguments.named(seen, options)
        calls.read(**arguments)  # what is wrong is said before anything touches the GPU
        # Memory that is allocated here is the call's own: no graph has to repeat that.
        with driver.beside_captures(), driver.on_device(self._index):
            call = BoundCall(calls, arguments)
            pointer, addresses, made = calls._placed(call, seen, given, options, check_indices, stream)
            if not all(array.repeatable for array in made):
                wanted = f"a prepared call that allocates {like.framework} arrays"
                raise UnsupportedError(wanted, str(like.device), "a plain call")
            self._keep = call.run(addresses, numbers_of(seen), pointer, like, prepared=True)
            depends = self._loose or self._keep is not None or any(place is None for place, *_ in call.results)
            if depends and not driver.capturing(pointer):
                driver.wait(pointer)
        self._stream = None if stream is None else pointer
        self._binding = call.binding
        self._result = calls._returned(call, [array.finish() for array in made], inputs)
        if self._loose:
            tensor.hold(given, pointer)

    def __call__(self, *, stream: object = None) -> Any:
        """Launch once more, without waiting for the result. Raises DriverError."""
        wanted = self._stream if stream is None else stream
        if self._loose:
            pointer = tensor.launch_stream(self._given, wanted)
        elif wanted is None:
            pointer = tensor.current_stream(self._given[0])
        else:
            pointer = tensor.stream_pointer(wanted)
        if driver.is_current(self._index):
            self._binding.launch(pointer)
        else:
            with driver.on_device(self._index):
                self._binding.launch(pointer)
        if self._loose:
            tensor.hold(self._given, pointer)
        return self._result
