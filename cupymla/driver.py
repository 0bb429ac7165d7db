"""The CUDA driver: its facts about devices, its entry points and its error text.

The only importer of `cuda.bindings.driver`, and only when a function here is called: a machine without the driver
imports this module and is told `available() == False`.

Source: CUDA Driver API reference (device, primary context, stream, event and driver entry point sections).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from . import arch as arches
from .arch import Arch
from .device import Device
from .errors import DriverError, UnsupportedError

_lock = threading.RLock()
_contexts: dict[int, int] = {}

LEGACY_STREAM = 1
"""CU_STREAM_LEGACY: the default stream that synchronises with every blocking stream of its context."""

PER_THREAD_STREAM = 2
"""CU_STREAM_PER_THREAD: each thread's own default stream. Addresses up to this one are never those of other streams."""

RawFunction: TypeAlias = Callable[..., int]
"""A driver function called through ctypes: takes what the C function takes, returns the CUresult."""

_NOT_READY = 600
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@functools.cache
def _bindings() -> Any:
    """cuda.bindings.driver, initialised. Raises DriverError where there is no driver or no device."""
    from cuda.bindings import driver

    doing = "initialising the CUDA driver"
    try:
        result = driver.cuInit(0)
    except RuntimeError as missing:
        raise DriverError(100, "CUDA_ERROR_NO_DEVICE", f"no NVIDIA driver library ({missing})", doing) from missing
    if int(result[0]):
        raise _error(driver, int(result[0]), doing)
    return driver


def _error(bindings: Any, code: int, doing: str) -> DriverError:
    try:
        result = bindings.CUresult(code)
    except ValueError:
        return DriverError(code, f"CUresult {code}", "an error these bindings do not know", doing)
    name, text = (bindings.cuGetErrorName(result)[1], bindings.cuGetErrorString(result)[1])
    return DriverError(code, name.decode(), text.decode(), doing)


def error(code: int, doing: str) -> DriverError:
    """The DriverError for a CUresult that a raw entry point returned while `doing` was being done."""
    return _error(_bindings(), code, doing)


def check(result: tuple[Any, ...], doing: str) -> Any:
    """The value of a `cuda.bindings` call: None, one value, or a tuple of them. Raises DriverError."""
    if int(result[0]):
        raise error(int(result[0]), doing)
    return None if len(result) == 1 else result[1] if len(result) == 2 else result[1:]


def available() -> bool:
    """Whether this process can use a CUDA device. Never raises."""
    return device_count() > 0


def device_count() -> int:
    """CUDA devices that this process sees; 0 without a driver."""
    try:
        cu = _bindings()
    except (DriverError, ImportError):
        return 0
    return int(check(cu.cuDeviceGetCount(), "counting CUDA devices"))


def version() -> tuple[int, int]:
    """The newest CUDA version that the driver supports, as (major, minor)."""
    number = int(check(_bindings().cuDriverGetVersion(), "asking for the driver's version"))
    return number // 1000, number % 1000 // 10


def _handle(index: int) -> Any:
    return check(_bindings().cuDeviceGet(index), f"opening CUDA device {index}")


def _attribute(index: int, name: str) -> int:
    cu = _bindings()
    attribute = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(check(cu.cuDeviceGetAttribute(attribute, _handle(index)), f"reading {name} of CUDA device {index}"))


@functools.cache
def device_name(index: int) -> str:
    """The product name of a device, such as "NVIDIA H200". Raises DriverError."""
    name: bytes = check(_bindings().cuDeviceGetName(128, _handle(index)), f"naming CUDA device {index}")
    return name.split(b"\0", 1)[0].decode()


@functools.cache
def compute_capability(index: int) -> tuple[int, int]:
    """The compute capability (major, minor) of a device. Raises DriverError."""
    return _attribute(index, "COMPUTE_CAPABILITY_MAJOR"), _attribute(index, "COMPUTE_CAPABILITY_MINOR")


@functools.cache
def multiprocessor_count(index: int) -> int:
    """The number of multiprocessors (SMs) of a device. Raises DriverError."""
    return _attribute(index, "MULTIPROCESSOR_COUNT")


@functools.cache
def has_dependent_launch(index: int) -> bool:
    """Whether launches on a device may be programmatic dependent ones (`launch.Geometry.pdl`). Raises DriverError.

    Kernels need compute capability 9.0 for it, and the driver CUDA 12.3, which gave the edges of graphs the data by
    which a captured launch stays a dependent one (`CUgraphEdgeData` in cuda.h). No document says what older drivers
    make of one in a capture.
    """
    return version() >= (12, 3) and compute_capability(index) >= (9, 0)


@functools.cache
def arch_of(device: Device) -> Arch:
    """The compile target for a CUDA device: an "a" or "f" target that lists its compute capability, else the
    newest it can load.

    Raises UnsupportedError where no known target runs on it, and DriverError.
    """
    if device.kind != "cuda":
        raise UnsupportedError("a CUDA kernel", str(device), "CUDA devices")
    capability = compute_capability(device.index)
    arch = arches.serving(capability)
    if arch is None:
        name = f"{device_name(device.index)} (compute capability {capability[0]}.{capability[1]})"
        # Kernels are machine code for a target, so no operator has one that a GPU of another kind could load.
        otherwise = "or arrays on the CPU, for which every operator has its NumPy reference"
        raise UnsupportedError("any operator's CUDA kernel", name, f"{arches.served()}; {otherwise}")
    return arch


def entry_point(name: str) -> int:
    """The address of a driver function, in its CUDA 12.0 form with the legacy default stream. Raises DriverError.

    The name is the one without a version: "cuMemAlloc" finds `cuMemAlloc_v2`, which itself is no name that the driver
    knows.
    """
    cu = _bindings()
    flags = int(cu.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_LEGACY_STREAM)
    address, _ = check(cu.cuGetProcAddress(name.encode(), 12000, flags), f"looking up {name}")
    if not address:  # for a name that it does not know the call succeeds all the same
        raise error(int(cu.CUresult.CUDA_ERROR_NOT_FOUND), f"looking up {name}")
    return int(address)


@functools.cache
def function(name: str, *argtypes: Any) -> RawFunction:
    """A driver function as a ctypes function that returns its CUresult and lets go of the GIL meanwhile.

    A raw call costs a fraction of one through the bindings, which matters for what runs on every launch.
    """
    return ctypes.CFUNCTYPE(ctypes.c_int, *argtypes)(entry_point(name))


_scratch = threading.local()


def current_context() -> int:
    """The handle of this thread's CUDA context; 0 when it has none."""
    try:
        query, address, handle = _scratch.place
    except AttributeError:
        # The entry point, and where it writes the handle, one place per thread: every launch asks.
        handle = ctypes.c_void_p()
        # ctypes passes a c_void_p on as it is, where an int would be converted on each call.
        query, address = function("cuCtxGetCurrent", ctypes.c_void_p), ctypes.c_void_p(ctypes.addressof(handle))
        _scratch.place = query, address, handle
    code = query(address)
    if code:
        raise error(code, "asking for the current context")
    return handle.value or 0


def primary_context(index: int) -> int:
    """The handle of a device's primary context, the one that every framework uses. Retained for the process's life."""
    context = _contexts.get(index)
    if context is None:
        with _lock:
            if index not in _contexts:
                doing = f"retaining the primary context of CUDA device {index}"
                _contexts[index] = int(check(_bindings().cuDevicePrimaryCtxRetain(_handle(index)), doing))
            context = _contexts[index]
    return context


def is_current(index: int) -> bool:
    """Whether the device's primary context is this thread's current one, so that `on_device` would do nothing."""
    try:
        query, address, handle = _scratch.place
    except AttributeError:
        return current_context() == _contexts.get(index)
    # `current_context` once more: this is asked at every launch.
    return not query(address) and (handle.value or 0) == _contexts.get(index)


class on_device:
    """A block in which a device's primary context is current, whatever was current before.

    Handles 0 and 1 name the default stream of the current context, so launches and stream operations for a device
    belong in such a block. Costs one context query when the device is already current.
    """

    __slots__ = ("_index", "_pushed")

    def __init__(self, index: int) -> None:
        self._index = index
        self._pushed = False

    def __enter__(self) -> None:
        context = primary_context(self._index)
        if current_context() != context:
            cu = _bindings()
            check(cu.cuCtxPushCurrent(cu.CUcontext(context)), f"making CUDA device {self._index} current")
            self._pushed = True

    def __exit__(self, *exception: object) -> None:
        if self._pushed:
            self._pushed = False
            check(_bindings().cuCtxPopCurrent(), "restoring the current context")


class Event:
    """A point in a stream's work: made and recorded at once, without timing."""

    __slots__ = ("_event",)

    def __init__(self, stream: int) -> None:
        cu = _bindings()
        flags = int(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._event: Any = check(cu.cuEventCreate(flags), "creating an event")
        try:
            check(cu.cuEventRecord(self._event, cu.CUstream(stream)), f"recording an event on stream {stream:#x}")
        except DriverError:
            self.close()
            raise

    def before(self, stream: int) -> None:
        """Make what is launched on `stream` from now on wait until this point is reached. The host does not wait."""
        cu = _bindings()
        check(cu.cuStreamWaitEvent(cu.CUstream(stream), self._event, 0), f"making stream {stream:#x} wait")

    def reached(self) -> bool:
        """Whether all work before this point has finished. Raises DriverError when that work failed."""
        code = int(_bindings().cuEventQuery(self._event)[0])
        if code == _NOT_READY:
            return False
        if code:
            raise error(code, "asking whether a kernel has finished")
        return True

    def close(self) -> None:
        """Give the event back. What already waits for it still does."""
        event, self._event = self._event, None
        if event is not None:
            check(_bindings().cuEventDestroy(event), "destroying an event")


def order(first: int, then: int) -> None:
    """Make work launched on stream `then` from now on wait for all work so far on stream `first`.

    Nothing is done when both name the same stream; 0 and 1 both name the legacy default stream. The device's context
    must be current.
    """
    if (first or LEGACY_STREAM) == (then or LEGACY_STREAM):
        return
    event = Event(first)
    try:
        event.before(then)
    finally:
        event.close()


def capture_id(stream: int) -> int | None:
    """What identifies the capture into a CUDA graph that a stream takes part in; None where it takes part in none.

    All streams of one capture have its id, and no later capture has it again. The device's context must be current.
    """
    try:
        query, status, number, places = _scratch.capture
    except AttributeError:
        # As of CUDA 11.3, the newest form up to 12.0: stream, status, id, graph, dependencies and their number.
        query = function("cuStreamGetCaptureInfo", *(ctypes.c_void_p,) * 6)
        status, number = ctypes.c_int(), ctypes.c_uint64()
        # ctypes passes a c_void_p on as it is, where an int would be converted on each call.
        places = ctypes.c_void_p(ctypes.addressof(status)), ctypes.c_void_p(ctypes.addressof(number))
        _scratch.capture = query, status, number, places
    code = query(stream, *places, None, None, None)
    if code:
        raise error(code, f"asking whether stream {stream:#x} is being captured")
    return int(number.value) if status.value else None


class beside_captures:
    """A block in which this thread may allocate memory, load kernels and wait while streams are being captured.

    A capture in the driver's default mode forbids all threads what a graph would not repeat, and ends where one does it
    all the same. So only what no graph has to repeat belongs in such a block. What conflicts with a capture in any case
    stays forbidden: to wait for a stream that is being captured, or for the legacy default stream while one is that was
    not made non-blocking. Source: CUDA Driver API, "cuThreadExchangeStreamCaptureMode"; CUDA C++ Programming Guide,
    "Prohibited and Unhandled Operations". Raises DriverError.
    """

    __slots__ = ("_mode",)

    def __enter__(self) -> None:
        self._mode = ctypes.c_int(_RELAXED)
        self._exchange()

    def __exit__(self, *exception: object) -> None:
        self._exchange()

    def _exchange(self) -> None:
        """Give this thread the mode that is kept here, and keep the one it had."""
        code = function("cuThreadExchangeStreamCaptureMode", ctypes.c_void_p)(ctypes.addressof(self._mode))
        if code:
            raise error(code, "changing this thread's capture mode")


def capturing(stream: int) -> bool:
    """Whether work on a stream is being captured into a CUDA graph. The device's context must be current."""
    return capture_id(stream) is not None


def stream_id(stream: int) -> int:
    """What identifies a stream for the life of the process; its address may be another's after it is destroyed."""
    try:
        query, number = _scratch.stream
    except AttributeError:
        query, number = function("cuStreamGetId", *(ctypes.c_void_p,) * 2), ctypes.c_uint64()
        _scratch.stream = query, number
    code = query(stream, ctypes.addressof(number))
    if code:
        raise error(code, f"identifying stream {stream:#x}")
    return int(number.value)


def wait(stream: int) -> None:
    """Wait on the host for all work so far on a stream. The device's context must be current. Raises DriverError."""
    cu = _bindings()
    check(cu.cuStreamSynchronize(cu.CUstream(stream)), f"waiting for stream {stream:#x}")


def pointer_device(address: int) -> int:
    """The ordinal of the CUDA device that an address belongs to. Raises DriverError for a host address."""
    cu = _bindings()
    attribute = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(check(cu.cuPointerGetAttribute(attribute, address), f"asking for the device of address {address:#x}"))


def copy_to_host(host: int, device: int, size_bytes: int, stream: int) -> None:
    """Copy device memory to host memory in the order of `stream`, and wait for it.

    Args:
        host: host address.
        device: device address, of the device whose context is current.
        size_bytes: how much.
        stream: stream address.
    """
    cu = _bindings()
    handle = cu.CUstream(stream)
    check(cu.cuMemcpyDtoHAsync(host, device, size_bytes, handle), f"copying {size_bytes} bytes to the host")
    wait(stream)


def fill_zero(device: int, size_bytes: int, stream: int) -> None:
    """Fill device memory with zero bytes in the order of `stream`, without waiting for it. Raises DriverError.

    Args:
        device: device address, of the device whose context is current.
        size_bytes: how much.
        stream: stream address.
    """
    cu = _bindings()
    check(cu.cuMemsetD8Async(device, 0, size_bytes, cu.CUstream(stream)), f"zeroing {size_bytes} bytes")


def allow(function_handle: int, smem_bytes: int, cluster: int) -> None:
    """Let a kernel use that much dynamic shared memory, and clusters of more than 8 CTAs, if it may not already.

    Limits only grow, so that launchers with different needs can share one function. Raises DriverError.

    Args:
        function_handle: CUfunction.
        smem_bytes: dynamic shared memory per CTA; up to 48 KiB needs no leave.
        cluster: CTAs per cluster; up to 8 is portable and needs no leave.
    """
    cu = _bindings()
    kernel = cu.CUfunction(function_handle)
    attributes = cu.CUfunction_attribute
    wanted = []
    if smem_bytes > 48 * 1024:
        wanted.append((attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem_bytes))
    if cluster > 8:
        wanted.append((attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
    with _lock:
        for attribute, value in wanted:
            if int(check(cu.cuFuncGetAttribute(attribute, kernel), f"reading {attribute.name}")) < value:
                doing = f"setting {attribute.name} to {value}"
                check(cu.cuFuncSetAttribute(kernel, attribute, value), doing)


def prefer_shared_memory(function_handle: int) -> None:
    """Ask that SMs which run a kernel give shared memory all that it can share with L1, for several CTAs at once.

    What the driver chooses by itself need not hold more than one CTA's. Raises DriverError.

    Args:
        function_handle: CUfunction.
    """
    cu = _bindings()
    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    most = int(cu.CUshared_carveout.CU_SHAREDMEM_CARVEOUT_MAX_SHARED)
    check(cu.cuFuncSetAttribute(cu.CUfunction(function_handle), attribute, most), f"setting {attribute.name}")
