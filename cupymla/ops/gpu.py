"""What operators with kernels share: output arrays, launches, the memo of bindings, calls once and prepared, the record
check."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from .. import driver, tensor
from ..build.source import KernelSource
from ..errors import CompileError, DriverError, InputError, UnsupportedError
from ..launch import Launcher
from ..tensor import Allocation, View
from ..tensormap import EncodedMap, TileMap, encoded
from .workspace import require

T = TypeVar("T")
R = TypeVar("R")

_MEMO_LIMIT = 256


def tiles(request: TileMap, argument: str, operator: str) -> EncodedMap:
    """The tensor map of an operator's argument.

    A driver may refuse strides of 0, which broadcast axes have: no document promises them. Raises InputError for that,
    and DriverError.
    """
    try:
        return encoded(request)
    except DriverError as refused:
        if 0 not in request.strides_bytes:
            raise
        wanted = "an array without broadcast axes, as this driver refuses strides of 0 in a tensor map: make a copy"
        raise InputError(argument, wanted, f"strides of {request.strides_bytes} bytes", operator) from refused


class OutputArrays:
    """The arrays one call writes: the caller's where given, else fresh ones in the framework of `like`.

    Attributes:
        pointers: their addresses, in the order of `wanted`.
        layouts: the strides of those given, None for the fresh ones, which are C-contiguous; None when all are fresh.
    """

    __slots__ = ("_allocations", "_arrays", "_like", "layouts", "pointers")

    def __init__(
        self,
        like: View,
        wanted: Sequence[tuple[tuple[int, ...], str]],
        given: tuple[View | None, ...],
        stream: int | None,
        current: bool = False,
    ) -> None:
        """Take or make the arrays.

        Args:
            like: a view of one of the caller's arrays.
            wanted: shape and dtype label of each array.
            given: the caller's array for each, or None.
            stream: the one the arrays are written on, where it is not the current stream of `like`.
            current: whether the device of `like` is known to be the current one.
        """
        self._like = like
        self.layouts: tuple[tuple[int, ...] | None, ...] | None = None
        self._arrays: list[Any] | None = None
        all_fresh = given.count(None) == len(given)
        if all_fresh and current and stream is None and like.framework == "cupy":
            self._arrays, self.pointers = tensor.cupy_arrays(wanted)
            return
        self._allocations = [
            tensor.allocate(like, shape, dtype, stream) if array is None else array
            for (shape, dtype), array in zip(wanted, given, strict=True)
        ]
        self.pointers = [array.ptr for array in self._allocations]
        if not all_fresh:
            self.layouts = tuple([None if array is None else array.strides for array in given])

    @property
    def fresh(self) -> bool:
        """Whether any of them was made here."""
        return self._arrays is not None or any(isinstance(array, Allocation) for array in self._allocations)

    @property
    def views(self) -> tuple[View, ...]:
        """Where to write, in the order of `wanted`."""
        if self._arrays is not None:
            return tuple(tensor.view(array, "output") for array in self._arrays)
        return tuple(array.view if isinstance(array, Allocation) else array for array in self._allocations)

    def require_mutable(self) -> None:
        """Raise UnsupportedError when an output would be an array that cannot be written a second time."""
        if self._arrays is None and any(
            isinstance(array, Allocation) and not array.repeatable for array in self._allocations
        ):
            wanted = f"a prepared call that allocates {self._like.framework} arrays"
            raise UnsupportedError(wanted, str(self._like.device), "a plain call")

    def finish(self) -> Any:
        """The arrays to return, as a tuple. To be called once, after the launch (see `tensor.Allocation`)."""
        if self._arrays is not None:
            return tuple(self._arrays)
        return tuple([array.finish() if isinstance(array, Allocation) else array.owner for array in self._allocations])


class Bound(Protocol):
    """Loaded kernels with everything that a launch needs but the stream."""

    @property
    def launcher(self) -> Launcher | None:
        """The launch that computes the result; None when there is nothing to compute."""

    def launch(self, stream: int) -> None:
        """Run on `stream`, with the device's context current. Raises DriverError."""


class Launches:
    """Launches that run one after the other.

    Attributes:
        launcher: the last of them; None where there is nothing to launch.
    """

    def __init__(self, *launchers: Launcher | None) -> None:
        self._launchers = [launcher for launcher in launchers if launcher is not None]
        self.launcher = self._launchers[-1] if self._launchers else None

    def launch(self, stream: int) -> None:
        """Run on `stream`, with the device's context current. Raises DriverError."""
        for launcher in self._launchers:
            launcher(stream)


class ThreadMemo(threading.local, Generic[T]):
    """What this thread has made, such as bindings, by what it was made for. Emptied when full.

    Attributes:
        entries: to look in; `add` puts something in, `take` takes it out.
    """

    def __init__(self) -> None:
        self.entries: dict[object, T] = {}

    def take(self, key: object) -> T | None:
        """What was made for this, which is no longer here then; None where nothing was.

        For what a call sets as it likes, such as a binding's addresses: until it is added again no call within this one
        finds it, of a finalizer that Python runs wherever memory is asked for.
        """
        return self.entries.pop(key, None)

    def add(self, key: object, made: T) -> T:
        """Remember something, and hand it back."""
        if len(self.entries) >= _MEMO_LIMIT:
            self.entries.clear()
        self.entries[key] = made
        return made


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


def workspace(
    given: View | None, size_bytes: int, like: View, stream: int | None, operator: str
) -> View | Allocation | None:
    """The caller's workspace, or one from the allocator of the caller's framework; None where none is needed.

    Its memory may be given back as soon as the launches are queued, unless a graph is to run them: allocators hand it
    out again in stream order.

    Args:
        given: the caller's.
        size_bytes: how much the call needs.
        like: a view of one of the caller's arrays.
        stream: the one that it is used on, where that is not the current stream of `like`.
        operator: whose call it is.

    Raises InputError for one that is too small.
    """
    if given is not None:
        require(given, size_bytes, operator)
        return given
    return tensor.allocate(like, (size_bytes,), "uint8", stream) if size_bytes else None


def launch_workspace(
    given: View | None, size_bytes: int, like: View, own: int | None, stream: int, operator: str
) -> View | Allocation | None:
    """The same for one launch on `stream`, kept for good where that is being captured; `own`: `workspace`'s stream."""
    taken = workspace(given, size_bytes, like, own, operator)
    if isinstance(taken, Allocation) and driver.capturing(stream):
        captured.keep(taken)
    return taken


def missing_workspace(given: View | None, size_bytes: int, operator: str) -> int:
    """How many bytes a call made ready is to have beside the caller's workspace: none where there is one.

    Raises InputError for one that is too small.
    """
    if given is None:
        return size_bytes
    require(given, size_bytes, operator)
    return 0


Ready: TypeAlias = "tuple[Callable[[Sequence[int], int, bool], None], int]"
"""A launch, and how many bytes of workspace it is to have; see `ReadyKernel`."""


class ReadyKernel:
    """A call that allocates CuPy arrays on the current device, made ready; see `cupymla.ops.repeat`.

    Returns a tuple of its outputs; where it has only one, that one.
    """

    __slots__ = ("_device", "_launch", "_make", "_make_workspace", "_pointers")

    def __init__(
        self,
        like: View,
        wanted: Sequence[tuple[tuple[int, ...], str]],
        bind: Callable[[tuple[View, ...]], Ready],
    ) -> None:
        """Bind.

        Args:
            like: a view of one of the caller's arrays.
            wanted: shape and dtype label of each output.
            bind: makes the binding. Gets views of outputs without addresses; returns a function that launches with the
                addresses that its caller's views have by then, and how many bytes of workspace the call is to have. The
                function is given the addresses of the outputs and, last, of the workspace, a stream, and whether any
                address, the views' too, is another one than when it last returned.
        """
        self._device = like.device.index
        self._make = tensor.CupyMaker(wanted)
        self._launch, size = bind(tuple([tensor.contiguous(like, shape, dtype) for shape, dtype in wanted]))
        self._make_workspace = tensor.CupyMaker([((size,), "uint8")]) if size else None
        self._pointers: list[int] | None = None  # of the last call, if it launched

    def __call__(self, moved: bool = True) -> Any:
        """Launch on the current stream, without waiting for the result. Raises DriverError.

        Args:
            moved: whether the views have other addresses than at the last call.
        """
        arrays, pointers = self._make()
        memory: list[Any] = []
        if self._make_workspace is not None:
            # By itself: its memory is given back when this returns, and handed out again in the order of the stream.
            memory, places = self._make_workspace()
            pointers += places
        stream = tensor.cupy_stream(self._device)
        # A loop often has its memory at the same places again, and then there is nothing to set.
        moved = moved or pointers != self._pointers
        self._pointers = None
        self._launch(pointers, stream, moved)
        self._pointers = pointers
        tensor.release(self._device, stream)
        if memory and driver.capturing(stream):
            captured.keep(memory[0])
        return tuple(arrays) if len(arrays) > 1 else arrays[0]


class PreparedKernel(Generic[R]):
    """A prepared call on a GPU; see `cupymla.ops.operator.Prepared`.

    Attributes:
        launcher: the launch that computes the result; None when there is nothing to compute.
    """

    def __init__(
        self,
        given: Sequence[View],
        stream: object,
        outputs: Callable[[int | None], OutputArrays],
        bind: Callable[[OutputArrays, int], tuple[Bound, object]],
        result: Callable[[OutputArrays], R] = OutputArrays.finish,
    ) -> None:
        """Bind, and wait on the host for what was queued on the stream so far, where a run depends on it.

        Memory that is allocated here may be in use by work ahead of it on this stream, and what `bind` fills or
        `given` names is ready behind it, while a run may be on any stream. An event would not do: a run that is being
        captured must not wait for one from outside. There is no waiting for a stream that is itself being captured;
        the call may then run in that capture alone, in the order of this stream.

        Args:
            given: the caller's arrays, the one whose framework counts first.
            stream: as the public function takes it.
            outputs: makes the outputs; gets the address of `stream`, None without one.
            bind: makes a binding that has every address, with the device's context current. Gets the outputs and the
                stream to work on; returns the binding and what must live as long as the call, such as a workspace.
            result: what a call returns, of the outputs.

        Raises UnsupportedError for outputs that cannot be written twice, and what `outputs` and `bind` raise.
        """
        self._given = given
        pointer = tensor.launch_stream(given, stream)
        self._stream = None if stream is None else pointer
        like = given[0]
        self._device = like.device.index
        self._on_cupy = like.framework == "cupy" and like.stream is None
        # What one framework's current stream orders needs no ordering and no holding at each run; see `tensor.hold`.
        self._loose = any(seen.stream is not None or seen.framework != like.framework for seen in given)
        # Memory that is allocated here is the call's own: no graph has to repeat that.
        with driver.beside_captures():
            arrays = outputs(self._stream)
            arrays.require_mutable()
            with driver.on_device(self._device):
                self._binding, self._keep = bind(arrays, pointer)
                if (arrays.fresh or self._keep is not None or self._loose) and not driver.capturing(pointer):
                    driver.wait(pointer)
        self.launcher = self._binding.launcher
        self._result = result(arrays)
        if self._loose:
            tensor.hold(given, pointer)

    def __call__(self, *, stream: object = None) -> R:
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


@dataclass(frozen=True, slots=True)
class KernelCall(Generic[R]):
    """A checked call on a GPU, of an operator that remembers no bindings: to be run once, or to be prepared.

    Attributes are the arguments of `PreparedKernel`.
    """

    given: Sequence[View]
    stream: object
    outputs: Callable[[int | None], OutputArrays]
    bind: Callable[[OutputArrays, int], tuple[Bound, object]]
    result: Callable[[OutputArrays], R] = OutputArrays.finish

    def prepared(self) -> PreparedKernel[R]:
        """The prepared call. Raises what `PreparedKernel` raises."""
        return PreparedKernel(self.given, self.stream, self.outputs, self.bind, self.result)

    def __call__(self, *, stream: object = None) -> R:
        """Bind and launch, without waiting for the result. Raises DriverError."""
        chosen = self.stream if stream is None else stream
        pointer = tensor.launch_stream(self.given, chosen)
        arrays = self.outputs(None if chosen is None else pointer)
        with driver.on_device(self.given[0].device.index):
            binding, keep = self.bind(arrays, pointer)
            binding.launch(pointer)
            if keep is not None and driver.capturing(pointer):
                captured.keep(keep)
        tensor.hold(self.given, pointer)
        return self.result(arrays)


def check_record(source: KernelSource, facts: Mapping[str, int], record: type[ctypes.Structure]) -> None:
    """Raise CompileError unless the parameter record has the size that the kernel was compiled with."""
    expected = facts["parameter_bytes"]
    if ctypes.sizeof(record) != expected:
        twin = f"its twin {record.__module__}.{record.__qualname__} has {ctypes.sizeof(record)}"
        hint = "the tests of plans compare fields; a folder of sources with another record wants its own checkout"
        raise CompileError(source.path, f"parameter record of {expected} bytes, {twin}; {hint}")
