"""DLPack by ctypes: layouts and codes agree with real producers, and exported memory lives as long as it must."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupymla import dlpack
from cupymla.dlpack import DLTensor, FormatError, Seen


class Owner:
    """Memory that says when it is let go."""

    def __init__(self) -> None:
        # JAX takes memory without a copy only at a multiple of 64 bytes.
        memory = np.empty(128, np.uint8)
        start = -memory.ctypes.data % 64
        self.array = memory[start : start + 24].view(np.float32)
        self.array[:] = range(6)


class Producer:
    """An array of another library: a 2 x 3 float32 matrix."""

    def __init__(self, owner: Owner, flags: int = 0) -> None:
        self.owner = owner
        self.flags = flags

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None, **_: Any) -> object:
        seen = Seen(self.owner.array.ctypes.data, (2, 3), (3, 1), "float32", 1, 0, self.flags)
        return dlpack.export(seen, self.owner, versioned=max_version is not None)


def from_torch(producer: Producer) -> Any:
    return pytest.importorskip("torch").from_dlpack(producer)


def from_jax(producer: Producer) -> Any:
    return pytest.importorskip("jax").dlpack.from_dlpack(producer)


def unversioned_numpy(producer: Producer) -> Any:
    class Old:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, *, stream: object = None) -> object:
            return producer.__dlpack__()

    return np.from_dlpack(Old())  # type: ignore[arg-type]


def from_numpy(producer: Producer) -> Any:
    return np.from_dlpack(producer)  # type: ignore[arg-type]


CONSUMERS: list[Callable[[Producer], Any]] = [from_numpy, unversioned_numpy, from_torch, from_jax]


def test_layouts_are_those_of_dlpack_h() -> None:
    """Sizes and offsets as a C compiler lays out dlpack.h on a 64-bit machine."""
    assert ctypes.sizeof(DLTensor) == 48
    assert (DLTensor.dtype.offset, DLTensor.shape.offset, DLTensor.byte_offset.offset) == (20, 24, 40)
    assert ctypes.sizeof(dlpack.DLManagedTensor) == 64
    assert ctypes.sizeof(dlpack.DLManagedTensorVersioned) == 80
    assert dlpack.DLManagedTensorVersioned.flags.offset == 24


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_exported_memory_is_read_by_others_and_let_go_once_they_are_done(consumer: Callable[[Producer], Any]) -> None:
    owner = Owner()
    gone = weakref.ref(owner)
    producer = Producer(owner)
    del owner
    taken = consumer(producer)
    del producer
    gc.collect(1)  # all that is old would take a second
    assert gone() is not None
    np.testing.assert_array_equal(np.asarray(taken), [[0, 1, 2], [3, 4, 5]])
    del taken
    gc.collect(1)  # all that is old would take a second
    assert gone() is None


@pytest.mark.parametrize("versioned", [False, True])
def test_unconsumed_capsule_lets_go_when_it_dies(versioned: bool) -> None:
    owner = Owner()
    count = sys.getrefcount(owner)
    capsule = Producer(owner).__dlpack__(max_version=(1, 0) if versioned else None)
    assert sys.getrefcount(owner) > count
    del capsule
    gc.collect(1)  # all that is old would take a second
    assert sys.getrefcount(owner) == count


def test_many_exports_keep_the_count() -> None:
    """A lost or doubled reference per export would show in a hundred of them, or crash."""
    owner = Owner()
    count = sys.getrefcount(owner)
    taken = [np.from_dlpack(Producer(owner)) for _ in range(100)]  # type: ignore[arg-type]
    taken.clear()
    gc.collect(1)  # all that is old would take a second
    assert sys.getrefcount(owner) == count


@pytest.mark.parametrize("consumer", ["numpy", "torch", "jax.dlpack"])
def test_interpreter_ends_cleanly_with_exported_memory_in_use(consumer: str) -> None:
    library = consumer.partition(".")[0]
    pytest.importorskip(library)
    code = f"""
import {consumer}, numpy
from cupymla import dlpack
memory = numpy.arange(1024, dtype=numpy.float32)
class Producer:
    def __dlpack_device__(self):
        return 1, 0
    def __dlpack__(self, *, max_version=None, **_):
        seen = dlpack.Seen(memory.ctypes.data, (1024,), (1,), "float32", 1, 0, 0)
        return dlpack.export(seen, memory, max_version is not None)
kept = {consumer}.from_dlpack(Producer())
loose = Producer().__dlpack__()
print("end")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")


def test_own_capsules_read_back() -> None:
    owner = Owner()
    capsule = Producer(owner, dlpack.READ_ONLY).__dlpack__(max_version=(1, 0))
    expected = Seen(owner.array.ctypes.data, (2, 3), (3, 1), "float32", 1, 0, dlpack.READ_ONLY)
    assert dlpack.read_capsule(capsule) == expected


def test_read_only_flag_reaches_numpy() -> None:
    taken = np.from_dlpack(Producer(Owner(), dlpack.READ_ONLY))  # type: ignore[arg-type]
    assert not taken.flags.writeable


@pytest.mark.parametrize("label", sorted(dlpack.CODES))
def test_codes_agree_with_torch(label: str) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, label):
        pytest.skip(f"torch has no {label}")
    tensor = torch.empty((3, 4), dtype=getattr(torch, label)).t()
    seen, _ = dlpack.request(tensor)
    assert (seen.dtype, seen.shape, seen.strides, seen.ptr) == (label, (4, 3), (1, 4), tensor.data_ptr())
    api = dlpack.exchange(type(tensor))
    assert api is not None
    assert api.see(tensor) == seen


@pytest.mark.parametrize(
    "label", ["float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16", "bool"]
)
def test_codes_agree_with_jax(label: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    seen, _ = dlpack.request(jnp.zeros((3, 4), dtype=getattr(jnp, label, label)))
    assert (seen.dtype, seen.shape, seen.strides) == (label, (3, 4), (4, 1))


def tensor_of(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, code: tuple[int, int, int], **more: int
) -> DLTensor:
    made = DLTensor(more.get("data", 0x1000), dlpack.DLDevice(1, 0), len(shape), dlpack.DLDataType(*code))
    made.shape = (ctypes.c_int64 * len(shape))(*shape)
    if strides is not None:
        made.strides = (ctypes.c_int64 * len(shape))(*strides)
    made.byte_offset = more.get("byte_offset", 0)
    return made


@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 3, 4), (12, 4, 1)), ((), ()), ((0, 4), (4, 1)), ((4, 0), (1, 1)), ((5,), (1,))]
)
def test_null_strides_mean_c_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert dlpack.describe(tensor_of(shape, None, (2, 32, 1))).strides == strides


def test_byte_offset_is_added_and_null_data_is_zero() -> None:
    assert dlpack.describe(tensor_of((1,), None, (2, 32, 1), data=0x1000, byte_offset=24)).ptr == 0x1018
    assert dlpack.describe(tensor_of((0,), None, (2, 32, 1), data=0)).ptr == 0


def test_packed_fp4_counts_pairs() -> None:
    seen = dlpack.describe(tensor_of((3, 8), (16, 1), (17, 4, 1)))
    assert (seen.dtype, seen.shape, seen.strides) == ("float4_e2m1fn_x2", (3, 4), (8, 1))


@pytest.mark.parametrize(("shape", "strides"), [((3, 7), (8, 1)), ((3, 8), (9, 1)), ((8, 3), (1, 8)), ((), ())])
def test_packed_fp4_that_does_not_pair_up_is_refused(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match="pair up"):
        dlpack.describe(tensor_of(shape, strides, (17, 4, 1)))


def test_padded_fp4_has_a_byte_per_number() -> None:
    seen = dlpack.describe(tensor_of((3, 7), (7, 1), (17, 4, 1)), dlpack.SUBBYTE_PADDED)
    assert (seen.dtype, seen.shape) == ("float4_e2m1fn", (3, 7))


@pytest.mark.parametrize("code", [(3, 64, 1), (0, 4, 1), (2, 32, 4), (99, 8, 1), (15, 6, 1)])
def test_unknown_codes_are_refused(code: tuple[int, int, int]) -> None:
    with pytest.raises(FormatError, match="DLPack type code"):
        dlpack.describe(tensor_of((4,), None, code))


def test_foreign_and_consumed_capsules_are_refused() -> None:
    with pytest.raises(FormatError):
        dlpack.read_capsule(object())
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    capsule = np.zeros(3).__dlpack__()
    assert rename(capsule, b"used_dltensor") == 0
    with pytest.raises(FormatError):
        dlpack.read_capsule(capsule)
    assert rename(capsule, b"dltensor") == 0


def test_capsule_of_another_major_version_is_not_read_further() -> None:
    capsule = Producer(Owner()).__dlpack__(max_version=(1, 0))
    address = dlpack._get_pointer(capsule, b"dltensor_versioned")
    dlpack.DLManagedTensorVersioned.from_address(address).major = 2
    with pytest.raises(FormatError, match="version 2"):
        dlpack.read_capsule(capsule)


class Asked:
    """A producer that notes how it is asked; `old` ones know no max_version."""

    def __init__(self, kind: int, old: bool = False) -> None:
        self.kind = kind
        self.old = old
        self.arguments: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, **arguments: Any) -> object:
        self.arguments.append(arguments)
        if self.old and "max_version" in arguments:
            raise TypeError("unexpected keyword argument 'max_version'")
        return dlpack.export(Seen(0x1000, (4,), (1,), "int8", self.kind, 0, 0), None, not self.old)


@pytest.mark.parametrize("kind", [dlpack.CUDA, dlpack.CUDA_MANAGED])
def test_cuda_producers_are_told_the_consumer_s_stream(kind: int) -> None:
    asked = Asked(kind)
    dlpack.request(asked)
    assert asked.arguments == [{"stream": 1, "max_version": (1, 3)}]


@pytest.mark.parametrize("kind", [dlpack.CPU, dlpack.CUDA_HOST])
def test_host_producers_are_told_no_stream(kind: int) -> None:
    asked = Asked(kind)
    dlpack.request(asked)
    assert asked.arguments == [{"max_version": (1, 3)}]


def test_old_producers_are_asked_again_without_a_version() -> None:
    asked = Asked(dlpack.CUDA, old=True)
    seen, _ = dlpack.request(asked)
    assert asked.arguments[-1] == {"stream": 1}
    assert seen.dtype == "int8"


def test_types_without_exchange_api_have_none() -> None:
    class Invalid:
        __dlpack_c_exchange_api__ = "not a capsule"

    assert dlpack.exchange(np.ndarray) is None
    assert dlpack.exchange(Invalid) is None


@given(st.lists(st.integers(1, 5), max_size=5).map(tuple))
def test_contiguous_strides_agree_with_numpy(shape: tuple[int, ...]) -> None:
    assert dlpack.contiguous_strides(shape) == np.empty(shape, np.int8).strides
