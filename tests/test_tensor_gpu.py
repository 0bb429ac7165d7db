"""Arrays on a real GPU: kernels see each framework's data when it is ready, and frameworks see complete
results.

Each test launches a kernel that adds one, on whatever stream the call chooses, behind work that takes long enough
for a missing order to show.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import pytest
from fake_driver import needs_gpu

from cupymla import driver, tensor
from cupymla.launch import Geometry, Launcher
from cupymla.tensor import View

pytestmark = [pytest.mark.gpu, needs_gpu]

SIZE = 1 << 20
ROUNDS = 20
SOURCE = r"""
extern "C" __global__ void add_one(const float* in, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i] + 1.0f;
}
"""


@dataclass
class Loaded:
    function: int


@functools.cache
def module() -> Any:
    """The loaded module, kept so that its function stays valid."""
    cupy = pytest.importorskip("cupy")
    return cupy.RawModule(code=SOURCE)


def add_one(source: View, target: View, stream: int) -> None:
    kernel = Loaded(module().get_function("add_one").kernel.ptr)
    parameters = (ctypes.c_void_p(source.ptr), ctypes.c_void_p(target.ptr), ctypes.c_int(source.size))
    with driver.on_device(source.device.index):
        Launcher(kernel, Geometry((-(-source.size // 256), 1, 1), 256, 0), parameters)(stream)


def call(array: Any, stream: object = None) -> Any:
    """What an operator does: read, choose the stream, allocate, launch, hold, finish."""
    source = tensor.view(array, "array")
    chosen = tensor.launch_stream([source], stream)
    output = tensor.allocate(source, source.shape, "float32", None if stream is None else chosen)
    add_one(source, output.view, chosen)
    tensor.hold([source], chosen)
    return output.finish()


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture
def torch() -> Any:
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return found


@pytest.fixture
def jax() -> Any:
    found = pytest.importorskip("jax")
    if found.default_backend() != "gpu":
        pytest.skip("this JAX has no CUDA")
    return found


def test_cupy_views(cupy: Any) -> None:
    base = cupy.zeros((6, 8), cupy.float16)
    array = base[::2, 1:].T
    seen = tensor.view(array, "q")
    assert (seen.ptr, seen.shape, seen.strides, seen.dtype) == (base.data.ptr + 2, (7, 3), (1, 16), "float16")
    assert (seen.device.index, seen.framework) == (base.device.id, "cupy")
    assert tensor.view(cupy.empty((0, 4)), "q").strides == (4, 1)


@pytest.mark.parametrize("label", ["bfloat16", "float8_e4m3fn", "float4_e2m1fn_x2", "float32"])
def test_cupy_results(cupy: Any, label: str) -> None:
    made = tensor.allocate(tensor.view(cupy.zeros(3), "q"), (4, 8), label)
    seen = tensor.view(made.finish(), "result", None if label in ("bfloat16", "float32") else label)
    assert (seen.ptr, seen.shape, seen.dtype) == (made.view.ptr, (4, 8), label)


@pytest.mark.parametrize("label", ["bfloat16", "float8_e4m3fn", "float32"])
def test_torch_views_and_results(torch: Any, label: str) -> None:
    array = torch.zeros((6, 8), dtype=getattr(torch, label), device="cuda").t()[2:]
    seen = tensor.view(array, "q")
    assert (seen.ptr, seen.shape, seen.strides, seen.dtype) == (array.data_ptr(), (6, 6), (1, 8), label)
    result = tensor.empty(seen, (3, 5), label)
    assert (result.dtype, result.device, tuple(result.shape)) == (array.dtype, array.device, (3, 5))


def test_current_streams_are_those_of_the_frameworks(cupy: Any, torch: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        assert tensor.current_stream(tensor.view(cupy.zeros(3), "q")) == stream.ptr
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert tensor.current_stream(tensor.view(torch.zeros(3, device="cuda"), "q")) == side.cuda_stream
    assert tensor.stream_pointer(stream) == stream.ptr
    assert tensor.stream_pointer(side) == side.cuda_stream


def test_cupy_on_a_stream_of_its_own(cupy: Any) -> None:
    with cupy.cuda.Stream(non_blocking=True) as stream:
        square = cupy.full((2048, 2048), 1 / 2048, cupy.float32)
        for _ in range(ROUNDS):
            square = square @ square
        result = call(square)
        assert float(cupy.abs(result - 1 - 1 / 2048).max()) < 1e-5
        stream.synchronize()


def test_torch_on_a_stream_of_its_own(torch: Any) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        square = torch.full((2048, 2048), 1 / 2048, device="cuda")
        for _ in range(ROUNDS):
            square = square @ square
        result = call(square)
        assert (result - 1 - 1 / 2048).abs().max().item() < 1e-5


def test_mixed_frameworks_on_different_streams(cupy: Any, torch: Any) -> None:
    """The kernel runs on CuPy's stream and must wait for torch's."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), cupy.cuda.Stream(non_blocking=True) as stream:
        target = cupy.zeros((2048, 2048), cupy.float32)
        source = torch.full((2048, 2048), 1 / 2048, device="cuda")
        for _ in range(ROUNDS):
            source = source @ source
        views = [tensor.view(target, "out"), tensor.view(source, "array")]
        chosen = tensor.launch_stream(views)
        assert chosen == stream.ptr
        add_one(views[1], views[0], chosen)
        assert float(cupy.abs(target - 1 - 1 / 2048).max()) < 1e-5


@pytest.mark.parametrize("explicit", [False, True])
def test_jax_inputs_are_complete_and_results_are_waited_for(cupy: Any, jax: Any, explicit: bool) -> None:
    """JAX computes on streams it does not show, before and after our kernel; every round has values of its own."""
    stream = cupy.cuda.Stream(non_blocking=True) if explicit else None

    def powers(x: Any) -> Any:
        for _ in range(ROUNDS):
            x = x @ x
        return x

    slow = jax.jit(powers)
    for i in range(ROUNDS):
        start = jax.numpy.full((1024, 1024), 1 / 1024, "float32")
        squared = slow(start) * i
        result = jax.numpy.sum(call(squared, stream) * 2)
        del start, squared
        # 2 * (i / 1024 + 1) summed over 2**20 elements; TF32 products keep powers of two exact.
        assert float(result) == pytest.approx(2 * (i * 1024 + 2**20), rel=1e-5)


def test_jax_inputs_survive_until_the_kernel_has_read_them(jax: Any) -> None:
    """Inputs die right after the launch, and JAX writes other values into memory of the same size at once."""
    for i in range(ROUNDS):
        array = jax.numpy.full(SIZE, float(i))
        result = call(array)
        del array
        others = [jax.numpy.full(SIZE, -1.0) for _ in range(8)]
        assert bool((result == i + 1).all())
        del others


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
def test_jax_narrow_types_both_ways(jax: Any, dtype: str) -> None:
    array = jax.numpy.ones((4, 8), dtype=getattr(jax.numpy, dtype))
    seen = tensor.view(array, "q")
    assert (seen.dtype, seen.device.kind, seen.readonly, seen.stream) == (dtype, "cuda", True, 1)
    made = tensor.allocate(seen, (4, 8), dtype)
    bindings = driver._bindings()
    with driver.on_device(seen.device.index):
        nbytes = seen.size * seen.itemsize
        driver.check(bindings.cuMemcpyDtoDAsync(made.view.ptr, seen.ptr, nbytes, bindings.CUstream(1)), "copying")
    result = made.finish()
    assert result.dtype == array.dtype
    assert bool((result.astype("float32") == 1).all())


def test_second_device(cupy: Any) -> None:
    """Everything happens on the array's device, whatever device is current."""
    if driver.device_count() < 2:
        pytest.skip("needs two GPUs")
    with cupy.cuda.Device(1):
        array = cupy.arange(1000, dtype=cupy.float32)
        module_there = cupy.RawModule(code=SOURCE)
        kernel = Loaded(module_there.get_function("add_one").kernel.ptr)
    seen = tensor.view(array, "q")
    made = tensor.allocate(seen, (1000,), "float32")
    parameters = (ctypes.c_void_p(seen.ptr), ctypes.c_void_p(made.view.ptr), ctypes.c_int(1000))
    with driver.on_device(1):
        Launcher(kernel, Geometry((4, 1, 1), 256, 0), parameters)(tensor.launch_stream([seen]))
    result = made.finish()
    assert result.device.id == 1
    with cupy.cuda.Device(1):
        assert bool((result == array + 1).all())
