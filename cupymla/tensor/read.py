"""Arrays in: one reader per kind of array, chosen once per type.

A `View` stands for itself: a caller who already knows address, layout and device, such as a foreign-function handler,
passes it where an array goes. NumPy, CuPy and torch arrays are read by their attributes, which takes less time than a
DLPack capsule and tells more (a tensor's grad flag and lazy negation). Everything else is asked for the DLPack C
exchange API, a DLPack capsule, or an array interface, in this order. No framework is imported: a type belongs to one
when its module says so.

Sources: the DLPack Python specification (https://dmlc.github.io/dlpack/latest/python_spec.html), NumPy's
`__array_interface__` version 3, Numba's `__cuda_array_interface__` version 3.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np

from .. import device as devices
from .. import dlpack, driver
from ..device import Device
from ..errors import DriverError, InputError, shown
from .types import BYTE_LABELS, LABELS, View, strides_of

K = TypeVar("K")
T = TypeVar("T")
Reader: TypeAlias = Callable[[Any, str], View]

_EXPECTED = "an array that speaks DLPack"
_MAX_REMEMBERED = 1024

_readers: dict[type, Reader] = {}
_exchanges: dict[type, dlpack.Exchange | None] = {}
_lock = threading.Lock()


def view(array: Any, argument: str, label: str | None = None) -> View:
    """Look at an array without copying it.

    Args:
        array: NumPy, CuPy, torch or JAX array, a `View`, or any object with `__dlpack__`, `__cuda_array_interface__` or
            `__array_interface__`.
        argument: the parameter's name, for the error.
        label: declares what bytes hold: a "uint8" array is seen as that 8-bit (or packed 4-bit) floating-point type.

    Raises InputError when the array cannot be read as it is.
    """
    try:
        reader = _readers[type(array)]
    except KeyError:
        reader = _remember(_readers, type(array), _choose(type(array)))
    seen = reader(array, argument)
    shape = seen.shape
    if reader is not _read_cupy and reader is not _read_view and (1 in shape or 0 in shape):
        seen.strides = _settled(shape, seen.strides)
    if not seen.ptr and 0 not in shape:
        raise InputError(argument, "an array whose memory can be addressed", f"a {type(array).__name__} without memory")
    if seen.ptr & 7 and seen.device.kind == "cuda" and seen.ptr % seen.itemsize:
        expected = f"an address that is a multiple of {seen.itemsize} bytes, as GPUs need for {seen.dtype}"
        raise InputError(argument, expected, hex(seen.ptr))
    if label is not None and seen.dtype != label:
        if seen.dtype != "uint8" or label not in BYTE_LABELS:
            raise InputError(argument, f"{label}, or uint8 that holds it", seen.dtype)
        seen = dataclasses.replace(seen, dtype=label)
    return seen


@functools.lru_cache(maxsize=1024)
def _settled(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in which those that no element is reached by are what they would be in C order.

    NumPy gives empty arrays zero strides and slices of extent 1 any, which no check downstream should stumble over.
    """
    if 0 in shape:
        return strides_of(shape)
    settled: list[int] = []
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        settled.append(step if extent == 1 else stride)
        step = settled[-1] * extent
    return tuple(reversed(settled))


def view_output(array: Any, argument: str, label: str | None = None) -> View:
    """Like `view`, for an array that is about to be written.

    Raises InputError also for read-only arrays, JAX arrays (immutable), and arrays whose elements share memory.
    """
    seen = view(array, argument, label)
    if seen.readonly:
        got = "a JAX array, which is immutable" if seen.framework == "jax" else "a read-only array"
        raise InputError(argument, "a writable array", got)
    if not _nested(seen.shape, seen.strides):
        got = f"shape {seen.shape} with strides {seen.strides}"
        raise InputError(argument, "an array whose elements have memory of their own", got)
    return seen


@functools.lru_cache(maxsize=1024)
def _nested(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether every axis steps over all that the axes of smaller strides span, so that no two elements coincide."""
    if 0 in shape:
        return True
    span = 1
    for stride, extent in sorted((abs(s), e) for s, e in zip(strides, shape, strict=True) if e != 1):
        if stride < span:
            return False
        span += stride * (extent - 1)
    return True


def _choose(kind: type) -> Reader:
    """The reader for a type: the framework that the type or one of its bases belongs to, else its protocols."""
    if kind is View:
        return _read_view
    if issubclass(kind, np.ma.MaskedArray):
        return _refuse_masked
    if issubclass(kind, np.ndarray):
        return _read_numpy
    for base in kind.__mro__:
        known = _KNOWN.get((base.__module__.partition(".")[0], base.__name__))
        if known is not None:
            return known
    if exchange(kind) is not None:
        return _read_exchange
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return functools.partial(_read_capsule, framework="dlpack")
    return _read_unknown


def framework_of(kind: type) -> str:
    """ "cupy" or "torch" for a type whose arrays are read as theirs; else nothing."""
    reader = _readers.get(kind)
    return "cupy" if reader is _read_cupy else "torch" if reader is _read_torch else ""


def exchange(kind: type) -> dlpack.Exchange | None:
    """The DLPack C exchange API of an array type, looked up once."""
    try:
        return _exchanges[kind]
    except KeyError:
        return _remember(_exchanges, kind, dlpack.exchange(kind))


def _remember(cache: dict[K, T], key: K, value: T) -> T:
    with _lock:
        if len(cache) >= _MAX_REMEMBERED:
            cache.clear()
        cache[key] = value
    return value


@functools.lru_cache(maxsize=1024)
def _element_strides(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """Byte strides in elements; None when they are no whole elements."""
    if any(stride % itemsize for stride in strides):
        return None
    return tuple(stride // itemsize for stride in strides)


def _read_view(array: Any, argument: str) -> View:
    seen: View = array
    return seen


def _read_unknown(array: Any, argument: str) -> View:
    """Objects that carry an interface themselves, which their type does not show."""
    if not isinstance(array, (type, np.generic)):
        facts = _asked(lambda a: getattr(a, "__cuda_array_interface__", None), array, argument)
        if facts is not None:
            return _read_cuda_interface(array, facts, argument)
        if _asked(lambda a: hasattr(a, "__array_interface__"), array, argument):
            return _read_array_interface(array, argument)
    raise InputError(argument, _EXPECTED, "None" if array is None else type(array).__name__)


def _refuse_masked(array: Any, argument: str) -> View:
    raise InputError(argument, "an array without a mask", type(array).__name__)


def _label(dtype: Any, argument: str) -> str:
    label = LABELS.get(dtype)
    if label is None:
        raise InputError(argument, "a numeric dtype in native byte order", dtype)
    return label


def _strides(array: Any, itemsize: int, argument: str) -> tuple[int, ...]:
    strides = _element_strides(array.strides, itemsize)
    if strides is None:
        raise InputError(argument, f"strides that are whole elements of {itemsize} bytes", f"{array.strides} bytes")
    return strides


def _read_numpy(array: Any, argument: str) -> View:
    dtype = array.dtype
    label = _label(dtype, argument)
    strides = _strides(array, dtype.itemsize, argument)
    address: int = array.__array_interface__["data"][0]
    return View(address, array.shape, strides, label, devices.CPU, not array.flags.writeable, "numpy", array)


_cupy_layouts: dict[tuple[Any, ...], tuple[str, tuple[int, ...]]] = {}


def _read_cupy(array: Any, argument: str) -> View:
    """CuPy's arrays come on every call of a loop: label and settled strides are worked out once for each layout."""
    shape = array.shape
    layout = array.dtype, shape, array.strides
    try:
        label, strides = _cupy_layouts[layout]
    except KeyError:
        dtype = array.dtype
        made = _label(dtype, argument), _settled(shape, _strides(array, dtype.itemsize, argument))
        label, strides = _remember(_cupy_layouts, layout, made)
    memory = array.data
    return View(memory.ptr, shape, strides, label, devices.cuda(memory.device_id), False, "cupy", array)


@functools.lru_cache(maxsize=64)
def _torch_label(dtype: Any) -> str | None:
    """The label of a torch dtype: torch uses the same names."""
    name = str(dtype).removeprefix("torch.")
    return name if name in dlpack.CODES else None


def _read_torch(array: Any, argument: str) -> View:
    if array.requires_grad and sys.modules["torch"].is_grad_enabled():
        expected = "a tensor outside autograd (gradients: cupymla.interop.torch; none wanted: pass tensor.detach())"
        raise InputError(argument, expected, "a tensor that requires grad")
    if array.is_neg() or array.is_conj():
        raise InputError(
            argument, "plain memory (pass tensor.resolve_neg().resolve_conj())", "a lazy negation or conjugate"
        )
    try:
        address = array.data_ptr()
        strides = array.stride()
    except RuntimeError as refused:
        got = f"a {type(array).__name__} of layout {array.layout}"
        raise InputError(argument, "a dense tensor with memory of its own", got) from refused
    label = _torch_label(array.dtype)
    if label is None:
        raise InputError(argument, "a numeric dtype", array.dtype)
    device = _torch_device(array.device)
    if device is None:
        raise InputError(argument, "memory of the CPU or a CUDA device", f"a tensor on {array.device}")
    return View(address, tuple(array.shape), strides, label, device, False, "torch", array)


@functools.lru_cache(maxsize=64)
def _torch_device(device: Any) -> Device | None:
    return devices.cuda(device.index) if device.type == "cuda" else devices.CPU if device.type == "cpu" else None


def _read_jax(array: Any, argument: str) -> View:
    """JAX computes on in the background: its export of a CPU array waits until the values are there."""
    if array.is_deleted():
        raise InputError(argument, _EXPECTED, "a JAX array that was deleted or donated")
    seen = _read_capsule(array, argument, "jax")
    # JAX's capsules have no read-only flag, and its arrays never change.
    seen.readonly = True
    return seen


def _refuse_traced(array: Any, argument: str) -> View:
    expected = "a concrete array (inside jit, grad and vmap: the function in cupymla.interop.jax)"
    raise InputError(argument, expected, "a traced JAX array")


def _read_exchange(array: Any, argument: str) -> View:
    api = exchange(type(array))
    assert api is not None
    seen = _asked(api.see, array, argument)
    return _view_of(seen, array, argument, "dlpack")


def _read_capsule(array: Any, argument: str, framework: str) -> View:
    seen, capsule = _asked(dlpack.request, array, argument)
    made = _view_of(seen, array, argument, framework)
    made.capsule = capsule
    if made.device.kind == "cuda":
        made.stream = driver.LEGACY_STREAM
    return made


def _asked(ask: Callable[[Any], Any], array: Any, argument: str) -> Any:
    try:
        return ask(array)
    except Exception as refused:
        # Producers refuse with whatever they like: BufferError, RuntimeError, their own classes.
        raise InputError(argument, _EXPECTED, f"{type(array).__name__}: {refused}") from refused


def _view_of(seen: dlpack.Seen, array: Any, argument: str, framework: str) -> View:
    if seen.kind in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        device = devices.cuda(seen.index)
    elif seen.kind in (dlpack.CPU, dlpack.CUDA_HOST):
        device = devices.CPU
    else:
        name = dlpack.DEVICE_NAMES.get(seen.kind, "an unknown device")
        raise InputError(argument, "memory of the CPU or a CUDA device", f"an array on {name} (DLPack {seen.kind})")
    # Writing into a copy made for the capsule would be lost.
    readonly = bool(seen.flags & (dlpack.READ_ONLY | dlpack.IS_COPIED))
    return View(seen.ptr, seen.shape, seen.strides, seen.dtype, device, readonly, framework, array)


def _read_cuda_interface(array: Any, facts: Any, argument: str) -> View:
    try:
        masked = facts.get("mask") is not None
        dtype = np.dtype(facts["typestr"])
        shape = tuple(map(operator.index, facts["shape"]))
        pointer, readonly = facts["data"]
        address, readonly = operator.index(pointer), bool(readonly)
        given = None if facts.get("strides") is None else tuple(map(operator.index, facts["strides"]))
        stream = None if facts.get("stream") is None else operator.index(facts["stream"])
        sound = min((0, *shape)) == 0 and 0 <= address < 2**64 and (given is None or len(given) == len(shape))
    except Exception:
        # Whatever a producer's own objects raise.
        sound = False
    if not sound:
        raise InputError(argument, "a __cuda_array_interface__ of version 3", shown(facts))
    if masked:
        raise InputError(argument, "an array without a mask", type(array).__name__)
    label = _label(dtype, argument)
    strides = strides_of(shape) if given is None else _element_strides(given, dtype.itemsize)
    if strides is None:
        raise InputError(argument, f"strides that are whole elements of {dtype.itemsize} bytes", f"{given} bytes")
    try:
        device = devices.cuda(driver.pointer_device(address) if address else 0)
    except DriverError as refused:
        raise InputError(argument, "memory of a CUDA device", f"address {address:#x}: {refused}") from refused
    return View(address, shape, strides, label, device, readonly, "dlpack", array, stream)


def _read_array_interface(array: Any, argument: str) -> View:
    seen = _read_numpy(_asked(np.asarray, array, argument), argument)
    seen.framework, seen.owner, seen.capsule = "dlpack", array, seen.owner
    return seen


# Array types by the root of their module and their name; a subclass is read as its base.
_KNOWN: dict[tuple[str, str], Reader] = {
    ("cupy", "ndarray"): _read_cupy,
    ("torch", "Tensor"): _read_torch,
    ("jaxlib", "ArrayImpl"): _read_jax,
    ("jax", "ArrayImpl"): _read_jax,
    ("jax", "Tracer"): _refuse_traced,
}
