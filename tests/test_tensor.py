"""Arrays, inwards: every one is seen as what it is, or refused by name."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from fake_arrays import CPU, CUDA1, Foreign, Interface, view_at
from fake_driver import INVALID, FakeDriver, installed
from hypothesis import given
from hypothesis import strategies as st

from cupymla import dlpack, tensor
from cupymla.dlpack import Seen
from cupymla.errors import InputError
from cupymla.tensor import Device, View
from cupymla.tensor.types import NUMPY_DTYPES


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    with installed(monkeypatch) as made:
        yield made


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> fake_cupy.FakeCupy:
    return fake_cupy.install(monkeypatch)


def refused(array: Any, **more: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        tensor.view(array, "kv", **more)
    assert caught.value.argument == "kv"
    return caught.value


# NumPy


@pytest.mark.parametrize("label", sorted(set(NUMPY_DTYPES) - {"float4_e2m1fn_x2"}))
def test_numpy_dtypes(label: str) -> None:
    array = np.zeros((3, 4), NUMPY_DTYPES[label])
    seen = tensor.view(array, "q")
    expected = (array.ctypes.data, (3, 4), (4, 1), label, CPU, False, "numpy", array)
    assert (seen.ptr, seen.shape, seen.strides, seen.dtype, seen.device, seen.readonly, seen.framework) == expected[:-1]
    assert seen.owner is array
    assert tensor.to_numpy(seen).dtype == array.dtype


@st.composite
def strided(draw: st.DrawFn) -> np.ndarray:
    """A view of an array with any steps, directions, order of axes and broadcast axes; extents may be 0."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = draw(st.sampled_from([np.int8, np.float32, np.complex128, ml_dtypes.bfloat16]))
    base = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    base = base.transpose(draw(st.permutations(range(len(shape)))))
    steps = tuple(slice(None, None, draw(st.sampled_from([1, 2, -1, -3]))) for _ in shape)
    array = base[steps]
    return np.broadcast_to(array, (2, *array.shape)) if draw(st.booleans()) else np.asarray(array)


@given(strided())
def test_address_and_strides_describe_the_same_elements(array: np.ndarray) -> None:
    """Through ptr, shape and strides alone, as a kernel reads them, the elements are those of the array."""
    seen = tensor.view(Foreign(dlpack.CPU, 0, host=array), "q")
    np.testing.assert_array_equal(tensor.to_numpy(seen), array)
    direct = tensor.view(array, "q")
    assert (direct.shape, direct.strides) == (seen.shape, seen.strides)
    assert direct.contiguous == (array.flags.c_contiguous or array.size == 0)


@pytest.mark.parametrize("shape", [(0, 4, 8), (4, 0, 8), (4, 8, 0), (0,)])
def test_empty_arrays_have_the_strides_of_c_order(shape: tuple[int, ...]) -> None:
    """NumPy gives them zeros, which would fail a check for a contiguous last axis."""
    assert tensor.view(np.empty(shape), "q").strides == dlpack.contiguous_strides(shape)


def test_axes_of_extent_one_have_the_stride_of_c_order() -> None:
    array = np.zeros((7, 9, 11), np.int32)[:1, ::2, 3:4]
    assert tensor.view(array, "indices").strides == (110, 22, 1)


def test_scalar_array() -> None:
    assert tensor.view(np.array(3.0), "alpha").shape == ()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(3, ">f4"),
        np.array(["text"]),
        np.array([object()]),
        np.zeros(3, "datetime64[s]"),
        np.zeros(3, [("a", "i4")]),
        np.ma.masked_array([1, 2], [True, False]),
        np.zeros(4, [("a", "i2"), ("b", "i4")])["b"],
        [1.0, 2.0],
        None,
        3.0,
        np.float32(3),
        np.ndarray,
        memoryview(b"abc"),
    ],
    ids=lambda a: type(a).__name__ + str(getattr(a, "dtype", "")),
)
def test_what_is_no_plain_array_is_refused(array: Any) -> None:
    refused(array)


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_subclasses_are_plain_arrays_to_the_reference() -> None:
    """`*` of a matrix is a matrix product."""
    assert type(tensor.to_numpy(tensor.view(np.asmatrix(np.eye(2)), "q"))) is np.ndarray


# Labels


@pytest.mark.parametrize("label", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"])
def test_bytes_declared_as_narrow_floats(label: str) -> None:
    array = np.arange(8, dtype=np.uint8).reshape(2, 4)
    seen = tensor.view(array, "a", label=label)
    assert (seen.dtype, seen.shape, seen.ptr) == (label, (2, 4), array.ctypes.data)
    shared = tensor.to_numpy(seen)
    assert shared.dtype == NUMPY_DTYPES[label]
    assert np.shares_memory(shared, array)


def test_label_that_is_already_there_is_accepted() -> None:
    assert tensor.view(np.zeros(3, ml_dtypes.float8_e4m3fn), "a", label="float8_e4m3fn").dtype == "float8_e4m3fn"


@pytest.mark.parametrize(("dtype", "label"), [("int8", "float8_e4m3fn"), ("uint8", "float16"), ("float32", "uint8")])
def test_label_is_no_cast(dtype: str, label: str) -> None:
    assert label in refused(np.zeros(3, dtype), label=label).expected


# torch


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2", "bool", "int64"]
)
def test_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    array = torch.empty((4, 6), dtype=getattr(torch, dtype)).t()[1:]
    seen = tensor.view(array, "q")
    assert (seen.ptr, seen.shape, seen.strides, seen.dtype) == (array.data_ptr(), (5, 4), (1, 6), dtype)
    assert (seen.device, seen.readonly, seen.framework, seen.owner is array) == (CPU, False, "torch", True)


def test_torch_memory_is_shared_and_kept_alive() -> None:
    torch = pytest.importorskip("torch")
    array = torch.arange(12).to(torch.bfloat16).reshape(3, 4)
    shared = tensor.to_numpy(tensor.view(array[:, ::2], "q"))
    assert shared.dtype == ml_dtypes.bfloat16
    shared[2, 1] = -7
    assert array[2, 2].item() == -7
    del array
    np.testing.assert_array_equal(shared.astype(np.float32), [[0, 2], [4, 6], [8, -7]])


def test_torch_tensor_inside_autograd_is_refused_and_says_detach() -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert "detach()" in refused(parameter).expected
    assert "cupymla.interop.torch" in refused(parameter).expected, "who trains needs no detach()"
    assert "detach()" in refused(parameter * 2).expected
    with torch.no_grad():
        assert tensor.view(parameter, "sink").framework == "torch"
    assert tensor.view(parameter.detach(), "sink").ptr == parameter.data_ptr()


def test_torch_memory_that_does_not_hold_the_values_is_refused() -> None:
    torch = pytest.importorskip("torch")
    negated = torch.zeros(3, dtype=torch.complex64).conj().imag
    assert "resolve_neg" in refused(negated).expected
    refused(torch.zeros(3, dtype=torch.complex64).conj())
    refused(torch.zeros(3, 3).to_sparse())
    refused(torch.zeros(3, device="meta"))
    wrapped: list[Any] = []

    def inside(x: Any) -> Any:
        refused(x)
        wrapped.append(x)
        return x

    torch.vmap(inside)(torch.zeros(2, 3))
    assert len(wrapped) == 1


# JAX


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int32", "bool"])
def test_jax(dtype: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    array = jnp.ones((3, 4), dtype=getattr(jnp, dtype, dtype))
    seen = tensor.view(array, "q")
    assert (seen.shape, seen.strides, seen.dtype, seen.device) == ((3, 4), (4, 1), dtype, CPU)
    assert (seen.ptr, seen.readonly, seen.framework) == (array.unsafe_buffer_pointer(), True, "jax")
    shared = tensor.to_numpy(seen)
    assert not shared.flags.writeable
    np.testing.assert_array_equal(shared, np.asarray(array))


def test_jax_array_that_is_still_being_computed_is_waited_for() -> None:
    """Dispatch returns at once; 60 products of this size take a tenth of a second or more."""
    jax = pytest.importorskip("jax")
    start = jax.numpy.full((512, 512), 1 / 512)
    array = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, y: y @ x, x))(start)
    np.testing.assert_array_equal(tensor.to_numpy(tensor.view(array, "q")), np.full((512, 512), 1 / 512, np.float32))


def test_jax_packed_fp4_is_seen_in_pairs() -> None:
    jnp = pytest.importorskip("jax.numpy")
    if not hasattr(jnp, "float4_e2m1fn"):
        pytest.skip("this JAX has no float4_e2m1fn")
    array = jnp.array([[0, 0.5, 1, 1.5], [2, 3, 4, 6]], dtype=jnp.float4_e2m1fn)
    seen = tensor.view(array, "a")
    assert (seen.dtype, seen.shape) == ("float4_e2m1fn_x2", (2, 2))
    np.testing.assert_array_equal(tensor.to_numpy(seen), [[0x10, 0x32], [0x54, 0x76]])


def test_jax_output_deleted_and_traced_arrays_are_refused() -> None:
    jax = pytest.importorskip("jax")
    array = jax.numpy.ones(3)
    with pytest.raises(InputError, match="JAX array, which is immutable"):
        tensor.view_output(array, "out")
    array.delete()
    assert "deleted" in refused(array).got
    errors: list[InputError] = []

    def traced(x: Any) -> Any:
        errors.append(refused(x))
        return x

    jax.jit(traced)(jax.numpy.ones(3))
    assert "cupymla.interop.jax" in errors[0].expected


# CuPy, by a stand-in


def test_cupy_is_read_by_attributes(cupy: fake_cupy.FakeCupy) -> None:
    host = np.zeros((6, 8), ml_dtypes.bfloat16)[::2, 4:]
    array = fake_cupy.ndarray(host, device=1)
    seen = tensor.view(array, "q")
    assert (seen.ptr, seen.shape, seen.strides, seen.dtype) == (host.ctypes.data, (3, 4), (16, 1), "bfloat16")
    assert (seen.device, seen.readonly, seen.framework, seen.stream) == (CUDA1, False, "cupy", None)
    assert seen.owner is array
    assert refused(fake_cupy.ndarray(np.zeros(3, ">i4"))).expected.startswith("a numeric dtype")


@pytest.mark.parametrize("dtype", ["float32", "int32", "float16", "int64"])
def test_gpus_read_no_odd_addresses(cupy: fake_cupy.FakeCupy, dtype: str) -> None:
    """A load from there would end the process's CUDA context; a CPU does not mind."""
    item = np.dtype(dtype).itemsize
    memory = np.zeros(8 * item + 16, np.uint8)
    start = -memory.ctypes.data % 8
    for offset in range(1, 8):
        odd = memory[start + offset : start + offset + 8 * item].view(dtype)
        assert tensor.view(odd, "x").ptr == odd.ctypes.data
        if offset % item:
            assert refused(fake_cupy.ndarray(odd)).expected.startswith(f"an address that is a multiple of {item} bytes")
        else:
            assert tensor.view(fake_cupy.ndarray(odd), "x").ptr == odd.ctypes.data


def test_cupy_subclass_is_cupy(cupy: fake_cupy.FakeCupy) -> None:
    class Mine(fake_cupy.ndarray):
        pass

    assert tensor.view(Mine(np.zeros(3)), "q").framework == "cupy"


# Unknown DLPack producers


@pytest.mark.parametrize(
    ("kind", "device", "stream"),
    [
        (dlpack.CPU, CPU, None),
        (dlpack.CUDA_HOST, CPU, None),
        (dlpack.CUDA, CUDA1, 1),
        (dlpack.CUDA_MANAGED, CUDA1, 1),
    ],
)
def test_devices_of_unknown_producers(kind: int, device: Device, stream: int | None) -> None:
    array = Foreign(kind)
    seen = tensor.view(array, "q")
    assert (seen.device, seen.stream, seen.framework, seen.owner is array) == (device, stream, "dlpack", True)


@pytest.mark.parametrize(("kind", "name"), [(10, "ROCm"), (8, "Metal"), (99, "unknown")])
def test_other_devices_are_named(kind: int, name: str) -> None:
    assert name in refused(Foreign(kind)).got


@pytest.mark.parametrize("flags", [dlpack.READ_ONLY, dlpack.IS_COPIED, dlpack.READ_ONLY | dlpack.IS_COPIED])
def test_flagged_memory_is_no_output(flags: int) -> None:
    array = Foreign(flags=flags)
    assert tensor.view(array, "q").readonly
    with pytest.raises(InputError, match="read-only"):
        tensor.view_output(array, "out")


def test_producer_that_fails_is_refused_with_its_words() -> None:
    class Broken(Foreign):
        def __dlpack__(self, **_: Any) -> object:
            raise BufferError("not today")

    assert "not today" in refused(Broken()).got
    Broken.__dlpack__ = lambda self, **_: "no capsule"  # type: ignore[method-assign]
    refused(Broken())


def test_null_memory_is_refused_unless_empty() -> None:
    array = Foreign()
    array.seen = Seen(0, (2, 3), (3, 1), "float32", dlpack.CUDA, 0, 0)
    assert "without memory" in refused(array).got
    array.seen = Seen(0, (0, 3), (3, 1), "float32", dlpack.CUDA, 0, 0)
    assert tensor.view(array, "q").size == 0


def test_capsule_lives_as_long_as_the_view() -> None:
    """JAX's capsule is what keeps a buffer from being donated or deleted."""
    array = Foreign()
    before = sys.getrefcount(array)
    seen = tensor.view(array, "q")
    assert sys.getrefcount(array) == before + 2, "the view's owner, and the capsule"
    del seen
    assert sys.getrefcount(array) == before


# Array interfaces


def test_cuda_array_interface(fake: FakeDriver) -> None:
    fake.address_device = 1
    seen = tensor.view(Interface(strides=(24, 8), stream=77), "q")
    assert (seen.ptr, seen.shape, seen.strides, seen.dtype) == (0x1000, (2, 3), (6, 2), "float32")
    assert (seen.device, seen.stream, seen.readonly) == (CUDA1, 77, False)
    assert tensor.view(Interface(strides=None), "q").strides == (3, 1)
    assert tensor.view(Interface(data=(0x1000, True)), "q").readonly
    assert tensor.view(Interface(shape=(0, 3), data=(0, False)), "q").size == 0


@pytest.mark.parametrize(
    "facts",
    [
        *({"mask": object()}, {"typestr": ">f4"}, {"typestr": "|V2"}, {"strides": (12, 3)}),
        *({"data": (-64, False)}, {"stream": "legacy"}),
    ],
)
def test_cuda_array_interface_that_cannot_be_read(fake: FakeDriver, facts: dict[str, Any]) -> None:
    refused(Interface(**facts))


MALFORMED: list[Any] = [
    *({"bogus": 1}, {}, 5, "interface", [1], object()),
    *({"typestr": "<f4", "shape": (2, 3), "data": data} for data in (5, (1,), (None, False), ("x", 0), (2**64, False))),
    *({"typestr": "<f4", "shape": shape, "data": (64, False)} for shape in (3, "x", (2.0, 3), (-2, 3), None)),
    *({"typestr": typestr, "shape": (2, 3), "data": (64, False)} for typestr in (4, "nothing", object())),
    {"typestr": "<f4", "shape": (2, 3), "data": (64, False), "strides": (4,)},
    {"typestr": "<f4", "shape": (2, 3), "data": (64, False), "strides": 4},
]


@pytest.mark.parametrize("protocol", ["__cuda_array_interface__", "__array_interface__"])
@pytest.mark.parametrize("facts", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_array_interfaces_are_refused(fake: FakeDriver, protocol: str, facts: Any) -> None:
    """An interface is somebody's dictionary, or no dictionary at all; it is an InputError whatever is wrong in it."""
    refused(type("Producer", (), {protocol: facts})())


def test_objects_that_fail_when_asked_for_an_interface_are_refused() -> None:
    class Failing:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no {name}")

    refused(Failing())


def test_cuda_array_interface_of_host_memory(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDriver, "cuPointerGetAttribute", lambda *_: (INVALID, None))
    assert "CUDA_ERROR_INVALID_VALUE" in refused(Interface()).got


def test_array_interface_shares_memory() -> None:
    host = np.zeros(4, np.int32)

    class Holder:
        __array_interface__ = host.__array_interface__

    holder = Holder()
    seen = tensor.view(holder, "q")
    assert (seen.ptr, seen.framework, seen.owner is holder) == (host.ctypes.data, "dlpack", True)


# Outputs


def test_output_must_be_writable_with_memory_for_every_element() -> None:
    array = np.zeros((4, 6))
    assert tensor.view_output(array[::-1, 1::2], "out").ptr
    assert tensor.view_output(np.zeros((0, 3)), "out").size == 0
    for bad in (np.broadcast_to(array, (2, 4, 6)), np.lib.stride_tricks.as_strided(array, (4, 6), (8, 8))):
        with pytest.raises(InputError) as caught:
            tensor.view_output(bad, "out")
        assert caught.value.argument == "out"


def test_expanded_torch_tensor_is_no_output() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InputError, match="memory of their own"):
        tensor.view_output(torch.zeros(3).expand(2, 3), "out")


# Several views


def bytes_of(seen: View) -> set[int]:
    starts = (
        seen.ptr + sum(i * s for i, s in zip(index, seen.strides_bytes, strict=True))
        for index in itertools.product(*map(range, seen.shape))
    )
    return {start + k for start in starts for k in range(seen.itemsize)}


small_views = st.builds(
    lambda ptr, axes, dtype: view_at(ptr, tuple(a[0] for a in axes), tuple(a[1] for a in axes), dtype),
    st.integers(1000, 1040),
    st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), max_size=3),
    st.sampled_from(["int8", "int16", "int32"]),
)


@given(small_views, small_views)
def test_overlap_never_misses(a: View, b: View) -> None:
    if bytes_of(a) & bytes_of(b):
        assert tensor.overlap(a, b)
        assert tensor.overlap(b, a)


@st.composite
def lattices(draw: st.DrawFn) -> tuple[View, View]:
    """Two views of the same strides, which nest for both."""
    span, strides, extents = 1, [], []
    for _ in range(draw(st.integers(0, 3))):
        pair = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        stride = span + draw(st.integers(0, 3))
        strides.append(stride * draw(st.sampled_from([1, -1])))
        extents.append(pair)
        span += stride * (max(pair) - 1)
    order = draw(st.permutations(range(len(strides))))
    shapes = [tuple(extents[i][side] for i in order) for side in (0, 1)]
    shift = draw(st.integers(-60, 60))
    steps = tuple(strides[i] for i in order)
    return view_at(1000, shapes[0], steps), view_at(1000 + shift, shapes[1], steps)


@given(lattices())
def test_overlap_is_exact_for_equal_nested_strides(pair: tuple[View, View]) -> None:
    a, b = pair
    assert tensor.overlap(a, b) == bool(bytes_of(a) & bytes_of(b))


def test_halves_of_a_matrix_do_not_overlap() -> None:
    matrix = np.zeros((64, 128), np.float16)
    left, right, both = (tensor.view(m, "x") for m in (matrix[:, :64], matrix[:, 64:], matrix[:, 63:65]))
    assert not tensor.overlap(left, right)
    assert tensor.overlap(left, both)
    assert tensor.overlap(right, both)
    assert tensor.overlap(left, left)


def test_other_devices_never_overlap() -> None:
    assert not tensor.overlap(view_at(1000, (4,), (1,)), view_at(1000, (4,), (1,), device=CUDA1))
