"""Arrays out: results in the caller's framework, on the caller's device."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import dlpack, driver
from ..device import Device
from ..errors import UnsupportedError
from . import read
from .streams import current_stream, launch_stream
from .types import BYTE_LABELS, LABELS, NUMPY_DTYPES, View, strides_of

# CuPy has no narrow floats: their bytes travel as uint8.
_CUPY_DTYPES = {name: NUMPY_DTYPES["uint8" if name in BYTE_LABELS else name] for name in NUMPY_DTYPES}


class _Memory:
    """CPU memory of a view, in the form that NumPy takes without a copy; NumPy keeps it as the array's base."""

    def __init__(self, seen: View, typestr: str) -> None:
        self._seen = seen
        self.__array_interface__ = {
            "version": 3,
            "data": (seen.ptr, seen.readonly),
            "shape": seen.shape,
            "strides": seen.strides_bytes,
            "typestr": typestr,
        }


def to_numpy(seen: View) -> np.ndarray:
    """A CPU view as a NumPy array over the same memory, writable only if the view is; ml_dtypes for narrow floats.

    Packed 4-bit pairs come as uint8. The array keeps the view's owner alive. Raises ValueError for a CUDA view.
    """
    if seen.device.kind != "cpu":
        raise ValueError(f"a view of memory on {seen.device}")
    dtype = NUMPY_DTYPES[seen.dtype]
    if isinstance(seen.owner, np.ndarray):
        return np.asarray(seen.owner).view(dtype)
    if 0 in seen.shape:
        return np.empty(seen.shape, dtype)
    # The interface has no names for ml_dtypes: their bits travel as unsigned integers.
    typestr = dtype.str if dtype.isbuiltin == 1 else f"<u{dtype.itemsize}"
    return np.asarray(_Memory(seen, typestr)).view(dtype)


def fetched(seen: View, stream: object = None) -> np.ndarray:
    """A view's elements as a NumPy array: the memory itself on the CPU, a copy of it from a CUDA device.

    The copy waits for all work so far on `stream`, by default the one on which the view is ready, so it cannot be
    captured into a CUDA graph. Strides must not be negative. Raises DriverError.
    """
    if seen.device.kind == "cpu":
        return to_numpy(seen)
    dtype = NUMPY_DTYPES[seen.dtype]
    if 0 in seen.shape:
        return np.empty(seen.shape, dtype)
    reach = 1 + sum((extent - 1) * stride for extent, stride in zip(seen.shape, seen.strides, strict=True))
    host = np.empty(reach, dtype)
    with driver.on_device(seen.device.index):
        driver.copy_to_host(host.ctypes.data, seen.ptr, host.nbytes, launch_stream((seen,), stream))
    return np.lib.stride_tricks.as_strided(host, seen.shape, seen.strides_bytes)


def from_numpy(array: np.ndarray, like: View, label: str | None = None) -> Any:
    """A CPU result as an array of like's framework, over the same memory wherever the framework can.

    Args:
        array: fresh memory that nobody else will write.
        like: a CPU view of one of the caller's arrays.
        label: the element type, where `array` holds it as bytes.

    Raises ValueError when `like` is not on the CPU.
    """
    if like.device.kind != "cpu":
        raise ValueError(f"a NumPy result for arrays on {like.device}")
    array = np.asarray(array)
    if label is not None:
        array = array.view(NUMPY_DTYPES[label])
    if like.framework == "torch":
        return _torch_from_numpy(array, label or LABELS[array.dtype])
    if like.framework == "jax":
        owner: Any = like.owner
        (device,) = owner.devices()
        return sys.modules["jax"].device_put(array, device)
    if like.framework == "dlpack":
        array = np.ascontiguousarray(array)
        return _imported(
            Handover(array.ctypes.data, array.shape, LABELS[array.dtype], like.device, array, 0), like, array
        )
    return array


def _torch_from_numpy(array: np.ndarray, label: str) -> Any:
    torch: Any = sys.modules["torch"]
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    if array.dtype.isbuiltin == 1 and label == LABELS[array.dtype]:
        return torch.from_numpy(array)
    carrier = np.dtype("uint8") if array.dtype.itemsize == 1 else np.dtype("int16")
    return torch.from_numpy(array.view(carrier)).view(torch_dtype(label))


def torch_dtype(label: str) -> Any:
    """The torch dtype of that label; bytes where this torch does not know a narrow float."""
    torch: Any = sys.modules["torch"]
    return getattr(torch, label, torch.uint8) if label in BYTE_LABELS else getattr(torch, label)


def _imported(handover: Handover, like: View, otherwise: Any) -> Any:
    """The memory as an array of like's framework; `otherwise` when that framework has no array namespace."""
    owner: Any = like.owner
    if like.framework == "jax":
        return sys.modules["jax"].dlpack.from_dlpack(handover)
    if hasattr(owner, "__array_namespace__"):
        return owner.__array_namespace__().from_dlpack(handover)
    return otherwise


class Handover:
    """Memory of ours on its way into a framework that takes DLPack: the producer's side of the protocol.

    The capsule keeps `memory` alive until the consumer is done with it. On a CUDA device the consumer's stream is made
    to wait for all work so far on the stream that fills the memory.
    """

    def __init__(
        self, ptr: int, shape: tuple[int, ...], dtype: str, device: Device, memory: object, stream: int
    ) -> None:
        kind = dlpack.CUDA if device.kind == "cuda" else dlpack.CPU
        self._seen = dlpack.Seen(ptr, shape, strides_of(shape), dtype, kind, device.index, 0)
        self._memory = memory
        self._stream = stream

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._seen.kind, self._seen.index

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        if copy:
            raise BufferError("results are handed over without a copy")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"results stay on DLPack device {self.__dlpack_device__()}")
        # -1 is a consumer that orders itself; None is one that uses the legacy default stream.
        if self._seen.kind == dlpack.CUDA and stream != -1:
            with driver.on_device(self._seen.index):
                driver.order(first=self._stream, then=driver.LEGACY_STREAM if stream is None else stream)
        return dlpack.export(self._seen, self._memory, versioned=max_version is not None and max_version[0] >= 1)


class Allocation:
    """An output that is about to be written, C-contiguous.

    Attributes:
        ptr: address of element 0.
    """

    __slots__ = ("_array", "_finish", "_view", "ptr")

    def __init__(self, ptr: int, array: Any, finish: Callable[[], Any] | None = None, view: View | None = None) -> None:
        self.ptr = ptr
        self._array = array
        self._finish = finish
        self._view = view

    @property
    def view(self) -> View:
        """Where to write, seen as any other array. Made when asked for: a repeated call needs the address only."""
        return read.view(self._array, "output") if self._view is None else self._view

    @property
    def repeatable(self) -> bool:
        """Whether the memory is the framework's array itself, which can be written again and again."""
        return self._finish is None

    def finish(self) -> Any:
        """The framework's array. To be called once, after the kernel that fills it was launched."""
        return self._array if self._finish is None else self._finish()


def empty(like: View, shape: tuple[int, ...], dtype: str) -> Any:
    """An uninitialised array in the framework and on the device of `like`; see `allocate`.

    For frameworks whose arrays can be written; JAX's cannot, so what this makes for them stays uninitialised.
    """
    return allocate(like, shape, dtype).finish()


def allocate(like: View, shape: tuple[int, ...], dtype: str, stream: int | None = None) -> Allocation:
    """Memory for an output in the framework and on the device of `like`, in two steps.

    The memory comes from the framework's own allocator, so that CUDA-graph pools and memory limits hold. JAX offers
    none to the outside, and its arrays must not be seen before they are complete: there, memory from CuPy's pool is
    filled first and becomes an array in `finish`, ordered behind the kernel by the DLPack protocol.

    Frameworks without a narrow type get its bytes as uint8 (CuPy: all 8- and 4-bit floats; NumPy and JAX: 4-bit pairs).
    Unknown DLPack producers get arrays through their `__array_namespace__`, else NumPy or CuPy arrays.

    Args:
        like: a view of one of the caller's arrays.
        shape: extents; the array is C-contiguous.
        dtype: label.
        stream: the stream that the memory is written on, where it is not like's current stream.

    Raw memory has no framework: what is allocated for it are NumPy and CuPy arrays.

    Raises UnsupportedError when memory for JAX or raw memory on a CUDA device is wanted without CuPy.
    """
    if like.framework == "cupy":
        return _allocate_cupy(like, shape, dtype, stream)
    if like.framework == "torch":
        return _allocate_torch(like, shape, dtype, stream)
    if like.device.kind == "cpu":
        array = np.empty(shape, NUMPY_DTYPES[dtype])
        label = None if dtype != "float4_e2m1fn_x2" else dtype

        def finish() -> Any:
            return from_numpy(array, like, label)

        seen = View(array.ctypes.data, shape, strides_of(shape), dtype, like.device, False, "numpy", array)
        return Allocation(seen.ptr, array, finish, seen)
    return _allocate_handover(like, shape, dtype, current_stream(like) if stream is None else stream)


TOGETHER_BYTES = 1 << 20
"""So much memory at most is shared by the arrays of one call; 0 for an allocation each."""
_CUPY_ALIGNMENT = 512  # of what CuPy's pools give


def cupy_maker(wanted: Sequence[tuple[tuple[int, ...], str]]) -> Callable[[], tuple[list[Any], list[int]]]:
    """A function that makes uninitialised CuPy arrays of fixed shapes and dtypes on the current device.

    What `allocate` makes, the fast path: ordinary calls with CuPy arrays come through here. Small ones share one
    allocation, which takes more time than all else about an array: up to TOGETHER_BYTES, held for as long as any of
    them.

    Args:
        wanted: (shape, dtype label) of each array.

    Returns:
        a function that gives the arrays and their addresses.
    """
    size = 0
    # Shapes, dtypes as CuPy takes them, and offsets. A letter is taken faster than a dtype; ml_dtypes' have none.
    places: list[tuple[tuple[int, ...], np.dtype[Any] | str, int]] = []
    for shape, label in wanted:
        dtype = _CUPY_DTYPES[label]
        places.append((shape, dtype.char if dtype.isbuiltin == 1 else dtype, size))
        size += -(-math.prod(shape) * dtype.itemsize // _CUPY_ALIGNMENT) * _CUPY_ALIGNMENT
    modules = sys.modules

    # What cupy.empty ends in. As NumPy's, arrays are complete without __init__, which takes a tenth of their time.
    def one() -> tuple[list[Any], list[int]]:
        kind: Any = modules["cupy"].ndarray
        ((shape, dtype, _),) = places
        array = kind.__new__(kind, shape, dtype)
        return [array], [array.data.ptr]

    def together() -> tuple[list[Any], list[int]]:
        cupy: Any = modules["cupy"]
        kind = cupy.ndarray
        make, memory = kind.__new__, cupy.cuda.alloc(size)
        first = memory.ptr
        arrays, addresses = [], []
        for shape, dtype, offset in places:
            arrays.append(make(kind, shape, dtype, memory + offset if offset else memory))
            addresses.append(first + offset)
        return arrays, addresses

    def apart() -> tuple[list[Any], list[int]]:
        kind: Any = modules["cupy"].ndarray
        arrays = [kind.__new__(kind, shape, dtype) for shape, dtype, _ in places]
        return arrays, [array.data.ptr for array in arrays]

    if len(wanted) == 1:
        return one
    return together if 0 < size <= TOGETHER_BYTES else apart


def cupy_arrays(wanted: Sequence[tuple[tuple[int, ...], str]]) -> tuple[list[Any], list[int]]:
    """Uninitialised CuPy arrays of these (shape, dtype label)s on the current device, and their addresses."""
    return cupy_maker(wanted)()


def _allocate_cupy(like: View, shape: tuple[int, ...], dtype: str, stream: int | None) -> Allocation:
    cupy: Any = sys.modules["cupy"]
    numpy_dtype = _CUPY_DTYPES[dtype]
    index = like.device.index
    if stream is None and cupy.cuda.runtime.getDevice() == index:
        array = cupy.ndarray(shape, numpy_dtype)
    else:
        with cupy.cuda.Device(index), _cupy_stream(cupy, index, stream):
            array = cupy.ndarray(shape, numpy_dtype)
    return _relabelled(array.data.ptr, array, dtype)


def _relabelled(ptr: int, array: Any, dtype: str) -> Allocation:
    """The allocation of a framework's own array, seen as narrow floats where it holds their bytes."""
    return Allocation(ptr, array, None, read.view(array, "output", dtype) if dtype in BYTE_LABELS else None)


class _ForeignStream:
    """A stream address in the form that CuPy takes (https://nvidia.github.io/cuda-python, "CUDA Stream Protocol")."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def _cupy_stream(cupy: Any, index: int, stream: int | None) -> contextlib.AbstractContextManager[Any]:
    """A block in which CuPy's pool serves that stream: freed memory is handed out again in its order."""
    chosen: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if stream in (0, driver.LEGACY_STREAM):
        chosen = cupy.cuda.Stream.null
    elif stream is not None and hasattr(cupy.cuda.Stream, "from_external"):
        chosen = cupy.cuda.Stream.from_external(_ForeignStream(stream))
    elif stream is not None:
        chosen = cupy.cuda.ExternalStream(stream, index)
    return chosen


def _allocate_torch(like: View, shape: tuple[int, ...], dtype: str, stream: int | None) -> Allocation:
    torch: Any = sys.modules["torch"]
    owner: Any = like.owner
    if stream is None or stream == current_stream(like):
        array = torch.empty(shape, dtype=torch_dtype(dtype), device=owner.device)
    else:
        default = stream in (0, driver.LEGACY_STREAM)
        foreign = (
            torch.cuda.default_stream(owner.device)
            if default
            else torch.cuda.ExternalStream(stream, device=owner.device)
        )
        with torch.cuda.stream(foreign):
            array = torch.empty(shape, dtype=torch_dtype(dtype), device=owner.device)
    return _relabelled(array.data_ptr(), array, dtype)


def _allocate_handover(like: View, shape: tuple[int, ...], dtype: str, stream: int) -> Allocation:
    try:
        import cupy
    except ImportError as missing:
        raise UnsupportedError(
            "a result for JAX or another DLPack producer", str(like.device), "having CuPy installed"
        ) from missing
    index = like.device.index
    carrier = "uint8" if dtype in BYTE_LABELS else dtype
    # Somebody else's array says where it lies: a device that is not there is to be our error, and not CuPy's.
    driver.compute_capability(index)
    with cupy.cuda.Device(index), _cupy_stream(cupy, index, stream):
        array = cupy.ndarray(shape, NUMPY_DTYPES[carrier])
    # JAX knows packed 4-bit numbers one by one only, not in pairs.
    exported = "uint8" if dtype == "float4_e2m1fn_x2" else dtype
    handover = Handover(array.data.ptr, shape, exported, like.device, array, stream)

    def finish() -> Any:
        return _imported(handover, like, array)

    seen = View(array.data.ptr, shape, strides_of(shape), dtype, like.device, False, "cupy", array, stream)
    return Allocation(seen.ptr, array, finish, seen)
