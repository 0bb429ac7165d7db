"""Whose stream a kernel runs on, and what keeps memory alive until it has run.

CuPy and torch order work by a current stream: an array is ready in its order, and memory freed by its owner is handed
out again in its order. A kernel launched on that stream needs no more.

JAX and unknown DLPack producers show no stream. What their protocol offers instead is used on both sides:

- in: `__dlpack__(stream=1)` makes the legacy default stream wait for the array's pending writes, so that stream is
  where such a view is ready (`View.stream`), and the stream a kernel runs on unless the caller names another, which
  then is made to wait for the legacy stream;
- out: memory of ours is handed over by a capsule whose producer makes the consumer's stream wait for the kernel
  (`make.Handover`);
- meanwhile: JAX hands an array's memory out again as soon as the array dies, in the order of a stream of its own, so
  `hold` keeps inputs alive until an event behind the kernel has been reached.

`__cuda_array_interface__` version 3 names the stream behind which the data is ready; it is treated the same way.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from .. import dlpack, driver
from ..errors import DriverError, InputError, shown
from .read import exchange
from .types import View


def current_stream(like: View) -> int:
    """The stream on which the array is ready, as an address: the framework's current one, or the array's own.

    0 and 1 are the legacy default stream; CPU arrays have 0.
    """
    if like.device.kind == "cpu":
        return 0
    if like.stream is not None:
        return like.stream
    if like.framework == "cupy":
        return cupy_stream(like.device.index)
    api = exchange(type(like.owner))
    if api is not None:
        return api.current_stream(dlpack.CUDA, like.device.index)
    if like.framework == "torch":
        handle: int = sys.modules["torch"].cuda.current_stream(like.device.index).cuda_stream
        return handle
    return driver.LEGACY_STREAM


def cupy_stream(index: int) -> int:
    """CuPy's current stream of a device, as an address."""
    pointer: int = sys.modules["cupy"].cuda.get_current_stream(index).ptr
    return pointer


def stream_pointer(stream: object) -> int:
    """The address of a CUDA stream.

    Args:
        stream: an int; None, the default stream; or an object with `__cuda_stream__` (a tuple (0, address), or a method
            that returns it), `ptr` (CuPy) or `cuda_stream` (torch).

    Raises InputError for anything else.
    """
    handle = _handle(stream)
    if isinstance(handle, bool) or not isinstance(handle, int) or not 0 <= handle < 2**64:
        got = shown(stream) if isinstance(stream, int) else type(stream).__name__
        raise InputError("stream", "an address, or an object with __cuda_stream__, .ptr or .cuda_stream", got)
    return handle


def _handle(stream: Any) -> object:
    if stream is None:
        return 0
    if isinstance(stream, int):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        return getattr(stream, "ptr", getattr(stream, "cuda_stream", None))
    described = protocol() if callable(protocol) else protocol
    if not isinstance(described, tuple) or len(described) != 2 or described[0] != 0:
        raise InputError("stream", "a __cuda_stream__ of (0, address)", shown(described))
    return described[1]


def _alone(views: Sequence[View]) -> bool:
    """Whether all views are of one framework whose current stream orders them."""
    framework = views[0].framework
    for seen in views:  # noqa: SIM110 - a generator costs every call three times as much
        if seen.stream is not None or seen.framework != framework:
            return False
    return True


def launch_stream(views: Sequence[View], stream: object = None) -> int:
    """The stream to launch on, made to wait for what its own order does not cover.

    Without `stream` that is the current stream of the first view, behind the current streams of other frameworks'
    views. With it, the caller vouches for arrays of frameworks with a current stream. Views that name a stream
    themselves (JAX, unknown DLPack producers) are waited for in both cases. A stream that is being captured waits for
    streams of the same capture alone: a graph knows nothing of what was queued before it.

    Returns the stream's address; 0 for CPU views. Raises InputError and DriverError.
    """
    first = views[0]
    chosen = current_stream(first) if stream is None else stream_pointer(stream)
    if first.device.kind == "cpu":
        return 0
    if _alone(views):
        return chosen
    behind = set()
    for seen in views:
        if seen.stream is not None:
            behind.add(seen.stream)
        elif stream is None and seen.framework != first.framework:
            behind.add(current_stream(seen))
    behind.discard(chosen)
    if behind:
        with driver.on_device(first.device.index):
            capture = driver.capture_id(chosen)
            for other in behind:
                if capture is None or _takes_part(other, capture):
                    driver.order(first=other, then=chosen)
    return chosen


def _takes_part(stream: int, capture: int) -> bool:
    """Whether a stream takes part in a capture. The legacy default stream never does, and asking it is an error."""
    return stream not in (0, driver.LEGACY_STREAM) and driver.capture_id(stream) == capture


class _Held:
    """Arrays whose memory a kernel may still be using, oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.entries: deque[tuple[int, driver.Event, list[object]]] = deque()

    def add(self, device: int, stream: int, arrays: list[object]) -> None:
        with driver.on_device(device):
            event = driver.Event(stream)
        with self._lock:
            self.entries.append((device, event, arrays))

    def sweep(self) -> None:
        # Arrays die outside the lock: their destructors may run any code.
        finished = []
        with self._lock:
            while self.entries and _over(self.entries[0][1]):
                finished.append(self.entries.popleft())
        for _, event, _arrays in finished:
            event.close()


def _over(event: driver.Event) -> bool:
    """Whether nothing behind the event can be running any more. Work that failed is reported where it is waited for."""
    try:
        return event.reached()
    except DriverError:
        return True


_held = _Held()


def hold(views: Sequence[View], stream: int) -> None:
    """Keep memory from being used again while the kernel just launched on `stream` uses it.

    To be called after the launch, with inputs and outputs. CuPy and torch hand memory out again in the order of their
    current stream: where that is another than `stream`, it is made to wait for the kernel. Arrays that name a stream
    themselves (JAX, unknown DLPack producers) are kept alive until a later call finds the kernel finished. Nothing is
    done while `stream` is being captured: a graph uses the arrays at every replay, so whoever replays it keeps them.

    Raises DriverError.
    """
    first = views[0]
    if _alone(views):
        release(first.device.index, stream)
        return
    others = [seen for seen in views if seen.stream is not None or seen.framework != first.framework]
    with driver.on_device(first.device.index):
        if driver.capturing(stream):
            return
        _held.sweep()
        for pool in {current_stream(seen) for seen in others if seen.stream is None}:
            driver.order(first=stream, then=pool)
    loose = [seen for seen in others if seen.stream is not None]
    if loose:
        _held.add(first.device.index, stream, [(seen.owner, seen.capsule) for seen in loose])


def release(index: int, stream: int) -> None:
    """Let go of what `hold` keeps and no kernel uses any more, as every call does after its launch on `stream`.

    Nothing is done while `stream` is being captured. Raises DriverError.
    """
    if _held.entries:
        with driver.on_device(index):
            if not driver.capturing(stream):
                _held.sweep()
