"""Loaded kernels run with what their launch facts ask for, and CuPy takes the same cubins."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from build_kit import plain, private, written

from cupymla import build
from cupymla.build import KernelSource, loader
from cupymla.errors import DriverError

pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private(tmp_path, monkeypatch)


@pytest.fixture
def kernel(tmp_path: Path) -> KernelSource:
    return plain(tmp_path / "src")


def test_a_cubin_that_is_not_kept_still_has_a_file_for_cupy(kernel: KernelSource) -> None:
    made = build.cubin(kernel)
    assert loader.file_of(made) == made.path
    assert made.path is not None
    made.path.unlink()
    file = loader.file_of(made)
    assert file.read_bytes() == made.data
    assert file.stat().st_mode & 0o077 == 0
    with contextlib.suppress(FileNotFoundError):
        file.unlink()


def test_raw_module_takes_our_cubin_without_a_gpu(kernel: KernelSource) -> None:
    import cupy

    assert isinstance(build.raw_module(build.cubin(kernel)), cupy.RawModule)


LARGE = """\
#include <common/entry.cuh>
extern "C" __global__ void __launch_bounds__(64) large(float* x) {
  extern __shared__ float tile[];
  tile[25000 + threadIdx.x] = threadIdx.x;
  __syncthreads();
  x[threadIdx.x] = tile[25063 - threadIdx.x];
}
CUPYMLA_LAUNCH_FACTS(threads = 64, cluster = 1, smem_bytes = 4 * 25064);
"""


@pytest.fixture
def native() -> str:
    """The plain target of GPU 0."""
    import cupy

    return f"sm_{cupy.cuda.Device(0).compute_capability}"


@pytest.mark.gpu
def test_a_loaded_kernel_runs_with_more_shared_memory_than_the_default(tmp_path: Path, native: str) -> None:
    import cupy
    from cuda.bindings import driver as cu

    kernel = build.kernel(written(tmp_path, "large.cu", LARGE, "large", arch=native), 0)
    out = cupy.zeros(64, cupy.float32)
    pointer = ctypes.c_void_p(out.data.ptr)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    function = cu.CUfunction(kernel.function)
    smem, stream = kernel.facts["smem_bytes"], cupy.cuda.get_current_stream().ptr
    (status,) = cu.cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, smem, stream, ctypes.addressof(parameters), 0)
    assert status == cu.CUresult.CUDA_SUCCESS
    assert out.get().tolist() == [63.0 - i for i in range(64)]


@pytest.mark.gpu
def test_a_kernel_is_loaded_once(tmp_path: Path, native: str) -> None:
    source = written(tmp_path, "large.cu", LARGE, "large", arch=native)
    assert build.kernel(source, 0) is build.kernel(source, 0)


@pytest.mark.gpu
def test_cupy_launches_the_same_cubin(tmp_path: Path, native: str) -> None:
    import cupy

    made = build.cubin(written(tmp_path, "large.cu", LARGE, "large", arch=native))
    function = build.raw_module(made).get_function("large")
    function.max_dynamic_shared_size_bytes = made.facts["smem_bytes"]
    out = cupy.zeros(64, cupy.float32)
    function((1,), (made.facts["threads"],), (out,), shared_mem=made.facts["smem_bytes"])
    assert out.get().tolist() == [63.0 - i for i in range(64)]


@pytest.mark.gpu
def test_an_image_for_another_gpu_is_refused(tmp_path: Path, native: str) -> None:
    other = "sm_100f" if native.startswith("sm_9") else "sm_90"
    text = 'extern "C" __global__ void k() {}\n'
    with pytest.raises(DriverError, match=f"loading k for {other} on cuda:0"):
        build.kernel(written(tmp_path, "k.cu", text, "k", arch=other), 0)


# A driver that keeps a diary, for machines without one ---------------------------------------------------------


class Diary:
    """Stands in for `cupymla.driver`: notes every call and answers with handles that say what they are."""

    HANDLES: ClassVar = {"cuLibraryLoadData": 3, "cuLibraryGetKernel": 4, "cuKernelGetFunction": 5}

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing = ""

    @contextlib.contextmanager
    def on_device(self, index: int) -> Iterator[None]:
        self.calls.append(("enter", index))
        try:
            yield
        finally:
            self.calls.append(("leave", index))

    def function(self, name: str, *types: Any) -> Callable[..., int]:
        def call(result: int, *arguments: Any) -> int:
            assert len(types) == 1 + len(arguments)
            self.calls.append((name, *arguments))
            ctypes.c_void_p.from_address(result).value = self.HANDLES[name]
            return 209 if name == self.failing else 0

        return call

    def error(self, code: int, doing: str) -> DriverError:
        return DriverError(code, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image", doing)

    def allow(self, function: int, smem_bytes: int, cluster: int) -> None:
        self.calls.append(("allow", function, smem_bytes, cluster))


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> Diary:
    made = Diary()
    monkeypatch.setattr(loader, "driver", made)
    monkeypatch.setattr(build, "_kernels", {})
    return made


def test_loading_happens_on_the_device_once_per_device(tmp_path: Path, diary: Diary) -> None:
    source = written(tmp_path, "large.cu", LARGE, "large", arch="sm_90")
    kernel = build.kernel(source, 7)
    assert build.kernel(source, 7) is kernel
    assert (kernel.function, kernel.library, kernel.device) == (5, 3, 7)
    assert diary.calls == [
        ("enter", 7),
        ("cuLibraryLoadData", kernel.cubin.data, None, None, None, None, None, None),
        ("cuLibraryGetKernel", 3, b"large"),
        ("cuKernelGetFunction", 4),
        ("allow", 5, 100256, 1),
        ("leave", 7),
    ]


def test_a_refusal_is_told_and_the_device_left(tmp_path: Path, diary: Diary) -> None:
    diary.failing = "cuLibraryLoadData"
    with pytest.raises(DriverError, match="loading large for sm_90 on cuda:0: CUDA_ERROR_NO_BINARY_FOR_GPU"):
        build.kernel(written(tmp_path, "large.cu", LARGE, "large", arch="sm_90"), 0)
    assert [call[0] for call in diary.calls] == ["enter", "cuLibraryLoadData", "leave"]
