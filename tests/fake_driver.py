"""A CUDA driver that records what it is asked and answers from a table, for tests without a GPU.

It stands behind `cupymla.driver` in the place of `cuda.bindings.driver`: enums and handle classes are the real ones,
calls through the bindings are methods here, and raw entry points are C callbacks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cuda.bindings import driver as real

from cupymla import driver, tensormap
from cupymla.tensor import streams

CACHED = (
    driver._bindings,
    driver.function,
    driver.device_name,
    driver.compute_capability,
    driver.has_dependent_launch,
    driver.multiprocessor_count,
    driver.arch_of,
)
OK = real.CUresult.CUDA_SUCCESS
INVALID = real.CUresult.CUDA_ERROR_INVALID_VALUE


class FakeDriver:
    """The fake.

    Attributes:
        calls: name and arguments of stream, event, context and attribute calls, in order.
        raw: C callbacks behind cuGetProcAddress.
        attributes: of devices and kernels, by name.
        pending: handles of events that are not reached yet.
        captured: id of the capture that a stream takes part in, by the stream's address.
        stream_ids: ids of streams, by address.
        capture_mode: how captures restrict the calling thread; 0 is the driver's default.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.raw: dict[str, Any] = {}
        self.attributes: dict[str, int] = {}
        self.name = "Test GPU"
        self.devices = 2
        self.context = 0
        self.pending: set[int] = set()
        self.captured: dict[int, int] = {}
        self.stream_ids: dict[int, int] = {}
        self.address_device = 0
        self.version = 13010
        self.capture_mode = 0
        self._events = 0x9000
        self.answer("cuCtxGetCurrent", [ctypes.c_void_p], self._get_current)
        self.answer("cuThreadExchangeStreamCaptureMode", [ctypes.c_void_p], self._exchange_mode)
        self.answer("cuStreamGetCaptureInfo", [ctypes.c_void_p] * 6, self._get_capture)
        self.answer("cuStreamGetId", [ctypes.c_void_p] * 2, self._get_stream_id)

    def answer(self, name: str, argtypes: list[Any], function: Callable[..., int]) -> None:
        """Put a Python function behind a raw entry point."""
        self.raw[name] = ctypes.CFUNCTYPE(ctypes.c_int, *argtypes)(function)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of every recorded call of that name."""
        return [call[1:] for call in self.calls if call[0] == name]

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)

    def _get_current(self, result: int) -> int:
        ctypes.c_void_p.from_address(result).value = self.context or None
        return 0

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (OK,)

    def cuGetErrorName(self, result: Any) -> tuple[Any, ...]:
        return OK, result.name.encode()

    def cuGetErrorString(self, result: Any) -> tuple[Any, ...]:
        return OK, b"text of " + result.name.encode()

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return OK, self.version

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return OK, self.devices

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return (OK, index) if index < self.devices else (real.CUresult.CUDA_ERROR_INVALID_DEVICE, None)

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Any, ...]:
        return OK, self.name.encode().ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[Any, ...]:
        return OK, self.attributes[attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    def cuGetProcAddress(self, symbol: bytes, version: int, flags: Any) -> tuple[Any, ...]:
        self.calls.append(("cuGetProcAddress", symbol.decode(), version, int(flags)))
        if symbol.decode() not in self.raw:
            return OK, 0, real.CUdriverProcAddressQueryResult.CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
        return OK, ctypes.cast(self.raw[symbol.decode()], ctypes.c_void_p).value, 0

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        self.calls.append(("cuDevicePrimaryCtxRetain", device))
        return OK, real.CUcontext(0xC0 + device)

    def cuCtxPushCurrent(self, context: Any) -> tuple[Any, ...]:
        self.calls.append(("cuCtxPushCurrent", int(context)))
        self.previous, self.context = self.context, int(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        popped, self.context = self.context, self.previous
        self.calls.append(("cuCtxPopCurrent", popped))
        return OK, real.CUcontext(popped)

    def cuEventCreate(self, flags: Any) -> tuple[Any, ...]:
        self._events += 1
        self.calls.append(("cuEventCreate", int(flags)))
        return OK, real.CUevent(self._events)

    def cuEventRecord(self, event: Any, stream: Any) -> tuple[Any, ...]:
        self.calls.append(("cuEventRecord", int(event), int(stream)))
        return (OK,)

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> tuple[Any, ...]:
        self.calls.append(("cuStreamWaitEvent", int(stream), int(event)))
        return (OK,)

    def cuStreamSynchronize(self, stream: Any) -> tuple[Any, ...]:
        self.calls.append(("cuStreamSynchronize", int(stream)))
        return (OK,)

    def _exchange_mode(self, place: int) -> int:
        mode = ctypes.c_int.from_address(place)
        mode.value, self.capture_mode = self.capture_mode, mode.value
        self.calls.append(("cuThreadExchangeStreamCaptureMode", self.capture_mode))
        return 0

    def _get_capture(self, stream: int | None, status: int, number: int, *rest: int | None) -> int:
        captured = self.captured.get(stream or 0)
        ctypes.c_int.from_address(status).value = int(captured is not None)
        if captured is not None:
            ctypes.c_uint64.from_address(number).value = captured
        return 0

    def _get_stream_id(self, stream: int | None, number: int) -> int:
        ctypes.c_uint64.from_address(number).value = self.stream_ids[stream or 0]
        return 0

    def cuEventQuery(self, event: Any) -> tuple[Any, ...]:
        return (real.CUresult.CUDA_ERROR_NOT_READY if int(event) in self.pending else OK,)

    def cuEventDestroy(self, event: Any) -> tuple[Any, ...]:
        self.calls.append(("cuEventDestroy", int(event)))
        return (OK,)

    def cuPointerGetAttribute(self, attribute: Any, address: int) -> tuple[Any, ...]:
        return OK, self.address_device

    def cuFuncGetAttribute(self, attribute: Any, kernel: Any) -> tuple[Any, ...]:
        return OK, self.attributes.get(attribute.name, 0)

    def cuFuncSetAttribute(self, kernel: Any, attribute: Any, value: int) -> tuple[Any, ...]:
        self.calls.append(("cuFuncSetAttribute", int(kernel), attribute.name, value))
        self.attributes[attribute.name] = value
        return (OK,)


def forget() -> None:
    """Empty every cache that remembers a driver's answers, and let go of arrays that wait for a driver's events."""
    for cached in CACHED:
        cached.cache_clear()
    driver._contexts.clear()
    vars(driver._scratch).clear()
    streams._held.entries.clear()
    tensormap._cache.clear()


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A fresh fake behind `cupymla.driver`, and no trace of it afterwards."""
    forget()
    fake = FakeDriver()
    with monkeypatch.context() as patch:
        patch.setattr(driver, "_bindings", lambda: fake)
        yield fake
    forget()


needs_gpu = pytest.mark.skipif(not driver.available(), reason="needs a CUDA GPU")
