"""The XLA FFI handler behind every function here: a ctypes callback, so nothing is compiled to reach XLA.

XLA calls it with a frame of C structures when a program runs. The frame's one attribute is the call as a text
(`interop.call.Call`), its arguments and results are buffers; on a GPU the handler enqueues on XLA's stream and returns.
It enqueues the same work each time and waits for nothing. Where a call uses no memory but its buffers, XLA may record
it into a command buffer (a CUDA graph) and replay it; the others have a handler that says no to that.

Source of all layouts and rules: xla/ffi/api/c_api.h of OpenXLA, API version 0.1 and later, which only appends to its
structures (https://github.com/openxla/xla; jaxlib ships it under include/).
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
import traceback
from collections.abc import Hashable
from ctypes import c_char_p, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p, py_object
from typing import Any

from ... import device as devices
from ...device import Device
from ...errors import InputError, UnsupportedError
from ..call import Call, parsed, run, run_bound

API_VERSION = (0, 1)
"""The oldest version of XLA's FFI that has everything used here but the device ordinal, whose presence is checked."""

COMMAND_BUFFER_COMPATIBLE = 1
_METADATA = 1
_EXECUTE = 3
_NO_ORDINAL = -1
_INVALID_ARGUMENT, _UNIMPLEMENTED, _INTERNAL = 3, 12, 13


class _Version(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int))


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("version", _Version), ("traits", c_uint32))


class _Extension(ctypes.Structure):
    """XLA_FFI_Extension_Base and, in the one kind there is, what it points at."""

    _fields_ = (("struct_size", c_size_t), ("kind", c_int), ("next", c_void_p), ("metadata", c_void_p))


class _ErrorCreate(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int))


class _StreamGet(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("context", c_void_p), ("stream", c_void_p))


class _OrdinalGet(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("context", c_void_p), ("ordinal", c_int32))


# XLA_FFI_CallFrame: size, extension, api, context, stage; then of arguments, results and attributes each size,
# extension, count, types, (names of attributes,) items; then the future, which is not read.
_FRAME = struct.Struct("=4QiI 2QqQQ 2QqQQ 2QqQQQ")
_FUNCTION = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_HEADER_BYTES = 48
"""Of XLA_FFI_Api: size, extension, version, internal API."""
_DATA_OFFSET, _RANK_OFFSET = 24, 32
"""Of XLA_FFI_Buffer: size, extension, dtype, data, rank, dims."""
_memory = (c_uint64 * (1 << 58)).from_address(0)
"""All of it, in words: that at an address is `_memory[address >> 3]`. What XLA hands over begins at multiples of 8."""
string_at = ctypes.PYFUNCTYPE(py_object, c_void_p, ctypes.c_ssize_t)(("PyBytes_FromStringAndSize", ctypes.pythonapi))
"""`ctypes.string_at`, without its Python wrapper."""


class _Api:
    """XLA's functions, by their place in XLA_FFI_Api. Only errors are known to every version that calls us."""

    def __init__(self, address: int) -> None:
        self._table_bytes = c_size_t.from_address(address).value
        self._address = address
        self.error_create = self._function(0)

    @functools.cached_property
    def stream_get(self) -> Any:
        """XLA_FFI_Stream_Get. Raises UnsupportedError."""
        return self._function(4)

    @functools.cached_property
    def ordinal_get(self) -> Any:
        """XLA_FFI_DeviceOrdinal_Get. Raises UnsupportedError."""
        return self._function(17)

    def _function(self, place: int) -> Any:
        offset = _HEADER_BYTES + 8 * place
        if offset + 8 > self._table_bytes:
            raise UnsupportedError("running on a GPU", "this version of XLA", "jax 0.10 and later")
        return _FUNCTION(c_void_p.from_address(self._address + offset).value or 0)


_api = functools.cache(_Api)
_thread = threading.local()


def _keep_thread() -> None:
    """Let Python keep its state of this thread between callbacks.

    XLA calls from threads of its own, whose Python state ctypes makes and drops with every callback, and all that
    operators remember for the thread along with it. One PyGILState_Ensure without its PyGILState_Release holds it.
    """
    ctypes.pythonapi.PyGILState_Ensure()
    _thread.kept = True


def _words(address: int, count: int) -> list[int]:
    first = address >> 3
    return _memory[first : first + count]


def _shape(buffer: int) -> tuple[int, ...]:
    rank, dims = _words(buffer + _RANK_OFFSET, 2)
    return tuple(_words(dims, rank))


@functools.lru_cache(maxsize=4096)
def _call(attribute: bytes, shapes: tuple[tuple[int, ...], ...] = ()) -> Call:
    """The call of an attribute's bytes."""
    return parsed(attribute.decode(), shapes)


class Handler:
    """The callback for one platform, kept alive here for as long as XLA may call it.

    Attributes:
        address: of the C function.
    """

    def __init__(self, on_gpu: bool, replayable: bool = True) -> None:
        self._on_gpu = on_gpu
        self._replayable = replayable
        self._callback = _FUNCTION(self._entered)
        self.address = ctypes.cast(self._callback, c_void_p).value or 0

    def _entered(self, frame: int) -> int | None:
        api, context, stage = 0, 0, 0
        try:
            fields = _FRAME.unpack(string_at(frame, _FRAME.size))
            extension, api, context, stage = fields[1:5]
            if extension and _Extension.from_address(extension).kind == _METADATA:
                self._describe(_Extension.from_address(extension).metadata)
            elif stage == _EXECUTE:
                self._execute(_api(api), context, fields)
        except BaseException as failure:
            return _error(_api(api), failure)
        return None

    def _describe(self, metadata: int) -> None:
        facts = _Metadata.from_address(metadata)
        facts.version.major, facts.version.minor = API_VERSION
        facts.traits = COMMAND_BUFFER_COMPATIBLE if self._on_gpu and self._replayable else 0

    def _execute(self, api: _Api, context: int, fields: tuple[int, ...]) -> None:
        if not hasattr(_thread, "kept"):
            _keep_thread()
        text = string_at(*_words(_memory[fields[21] >> 3], 2))
        buffers = _words(fields[10], fields[8]) + _words(fields[15], fields[13])
        addresses = [_memory[buffer + _DATA_OFFSET >> 3] for buffer in buffers]
        stream, ordinal = _places.of(api, context) if self._on_gpu else (0, _NO_ORDINAL)
        key: tuple[Hashable, ...] = (text, ordinal)
        # Nothing is bound with open shapes alone.
        if run_bound(key, ordinal, addresses, stream):
            return
        call = _call(text)
        if not call.is_static:
            shapes = tuple([_shape(buffer) for buffer in buffers])
            key, call = (text, ordinal, shapes), _call(text, shapes)
        run(key, call, _device(ordinal), addresses, stream)


def _device(ordinal: int) -> Device:
    return devices.CPU if ordinal == _NO_ORDINAL else devices.cuda(ordinal)


class _Places:
    """Asks XLA for stream and device, with requests that are made once and lent to one call at a time."""

    def __init__(self) -> None:
        self._free: list[tuple[_StreamGet, _OrdinalGet, c_void_p, c_void_p]] = []

    def of(self, api: _Api, context: int) -> tuple[int, int]:
        """Address of the stream and ordinal of the device that a call is to run on."""
        try:
            request = self._free.pop()
        except IndexError:
            stream, ordinal = _StreamGet(ctypes.sizeof(_StreamGet)), _OrdinalGet(ctypes.sizeof(_OrdinalGet))
            # ctypes passes a c_void_p on as it is, where an int would be converted on each call.
            places = c_void_p(ctypes.addressof(stream)), c_void_p(ctypes.addressof(ordinal))
            request = stream, ordinal, *places
        stream, ordinal, stream_address, ordinal_address = request
        stream.context = ordinal.context = context
        if api.stream_get(stream_address) or api.ordinal_get(ordinal_address):
            raise RuntimeError("XLA names no stream or no device for this call")
        place = stream.stream or 0, ordinal.ordinal
        self._free.append(request)
        return place


_places = _Places()


def _error(api: _Api, failure: BaseException) -> int:
    """What XLA gets to hear of an exception: a status of the nearest kind, with the exception's own text."""
    if isinstance(failure, InputError):
        code, text = _INVALID_ARGUMENT, str(failure)
    elif isinstance(failure, UnsupportedError):
        code, text = _UNIMPLEMENTED, str(failure)
    else:
        code, text = _INTERNAL, "".join(traceback.format_exception(failure))
    request = _ErrorCreate(ctypes.sizeof(_ErrorCreate), None, f"cupymla: {text}".encode(), code)
    made: int = api.error_create(ctypes.addressof(request))
    return made
