"""Arrays of frameworks that calls in a loop come with: their layouts and addresses, and results, without a `View`.

A layout is whatever tells it from all others, as the framework spells it. What this cannot read, `read.view` can.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from . import read, streams
from .make import cupy_maker, torch_dtype

ALIGNMENT = 16
"""Whether a kernel can do with an address that is no multiple of this only its operator's checks know."""

_NUMBERS = frozenset({int, float, np.int32, np.int64, np.float32, np.float64})

_LEAST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

Maker: TypeAlias = "Callable[[], tuple[list[Any], list[int]]]"


def number_class(value: Any) -> str:
    """What of a number in the place of an array a check may depend on: which of a few kinds it is.

    Empty for what only a check itself can judge: other types, and numbers that float32 does not hold as normal ones.
    """
    if type(value) not in _NUMBERS:
        return ""
    if value == 1:
        return "one"
    if value == 0:
        return "zero"
    if _LEAST <= value <= _LARGEST:
        return "positive"
    return "negative" if _LEAST <= -value <= _LARGEST else ""


class Framework(Protocol):
    """What a call needs of a framework beside its arrays.

    Attributes:
        graphs_keep_memory: whether what is allocated while a graph is captured stays the graph's, given back or not.
    """

    graphs_keep_memory: bool

    def look(self, arrays: Sequence[Any], facts: list[Any], numbers: list[float]) -> list[int] | None:
        """Addresses of arrays, all multiples of 16, and behind them the index of the first one's GPU.

        None for what only `read.view` can judge.

        Args:
            arrays: the first is an array; the others are arrays, numbers, or None.
            facts: where to add what tells layouts and devices apart; of a number its `number_class`.
            numbers: where to add the numbers.
        """

    def maker(self, wanted: Sequence[tuple[tuple[int, ...], str]], index: int) -> Maker:
        """A function that makes uninitialised arrays of these (shape, dtype label)s, and gives their addresses."""

    def stream(self, index: int) -> int:
        """The current stream of a device, as an address."""


class _Cupy:
    """CuPy's arrays; `Framework`."""

    graphs_keep_memory = False

    def look(self, arrays: Sequence[Any], facts: list[Any], numbers: list[float]) -> list[int] | None:
        kind = type(arrays[0])
        addresses: list[int] = []
        for array in arrays:
            if type(array) is kind:
                memory = array.data
                address = memory.ptr
                if address % ALIGNMENT or not address:
                    return None
                addresses.append(address)
                facts += array.dtype, array.shape, array.strides, memory.device_id
            elif array is None:
                facts.append(None)
            elif kind_of_number := number_class(array):
                facts.append(kind_of_number)
                numbers.append(float(array))
            else:
                return None
        addresses.append(arrays[0].data.device_id)
        return addresses

    def maker(self, wanted: Sequence[tuple[tuple[int, ...], str]], index: int) -> Maker:
        return cupy_maker(wanted)

    def stream(self, index: int) -> int:
        return streams.cupy_stream(index)


class _Torch:
    """Tensors of torch's own class, and parameters, that are no more than their memory; `Framework`."""

    graphs_keep_memory = True

    def look(self, arrays: Sequence[Any], facts: list[Any], numbers: list[float]) -> list[int] | None:
        torch: Any = sys.modules["torch"]
        kinds = torch.Tensor, torch.nn.Parameter
        addresses: list[int] = []
        try:
            for tensor in arrays:
                if type(tensor) in kinds:
                    # A lazy negation is no memory that a kernel can read. Conjugates are complex: no kernel takes them.
                    if tensor.is_neg() or (tensor.requires_grad and torch.is_grad_enabled()):
                        return None
                    facts += tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device()
                    address = tensor.data_ptr()
                    if address % ALIGNMENT or not address:
                        return None
                    addresses.append(address)
                elif tensor is None:
                    facts.append(None)
                elif kind_of_number := number_class(tensor):
                    facts.append(kind_of_number)
                    numbers.append(float(tensor))
                else:
                    return None
            if not arrays[0].is_cuda:
                return None
            addresses.append(arrays[0].get_device())
        except RuntimeError:
            # Tensors without strides, or without memory of their own.
            return None
        return addresses

    def maker(self, wanted: Sequence[tuple[tuple[int, ...], str]], index: int) -> Maker:
        torch: Any = sys.modules["torch"]
        device = torch.device("cuda", index)
        # What torch itself calls contiguous; `torch.empty` takes longer to read its arguments.
        layouts = [(s, torch.empty(s, device="meta").stride(), torch_dtype(label)) for s, label in wanted]
        empty = torch.empty_strided

        def make() -> tuple[list[Any], list[int]]:
            made = [empty(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in layouts]
            return made, [tensor.data_ptr() for tensor in made]

        return make

    def stream(self, index: int) -> int:
        handle: int = sys.modules["torch"]._C._cuda_getCurrentRawStream(index)
        return handle


CUPY: Framework = _Cupy()
TORCH: Framework = _Torch()

frameworks: dict[type, Framework] = {}
"""By the type of an array. Types are added as they come by; see `remember`."""

_lock = threading.Lock()
_MOST_TYPES = 64


def remember(array: object) -> bool:
    """Let arrays of this one's type, which was seen as a view, be read here where they can be; whether that is new."""
    kind = type(array)
    known = read.framework_of(kind)
    # Other subclasses of tensors may mean more than their memory.
    is_tensor = known == "torch" and kind.__name__ in ("Tensor", "Parameter")
    framework = CUPY if known == "cupy" else TORCH if is_tensor else None
    if framework is None or kind in frameworks:
        return False
    with _lock:
        if len(frameworks) >= _MOST_TYPES:
            frameworks.clear()
        frameworks[kind] = framework
    return True
