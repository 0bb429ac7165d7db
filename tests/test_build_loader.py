"""Loaded kernels run with what their launch facts ask for, and CuPy takes the same cubins."""

from __future__ import annotations

import contextlib
import ctypes
import enum
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
    other = "sm_100a" if native.startswith("sm_9") else "sm_90"
    text = 'extern "C" __global__ void k() {}\n'
    with pytest.raises(DriverError, match=f"loading k for {other} on cuda:0"):
        build.kernel(written(tmp_path, "k.cu", text, "k", arch=other), 0)


# A driver that keeps a diary, for machines without one ---------------------------------------------------------


class Diary:
    """Stands in for `cuda.bindings.driver`: notes every call and answers with handles that say what they are."""

    CUresult = enum.IntEnum("CUresult", {"CUDA_SUCCESS": 0, "CUDA_ERROR_NO_BINARY_FOR_GPU": 209})
    CUfunction_attribute = enum.IntEnum(
        "CUfunction_attribute",
        {
            "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8,
            "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED": 14,
        },
    )
    HANDLES: ClassVar = {
        "cuDeviceGet": 1,
        "cuDevicePrimaryCtxRetain": 2,
        "cuLibraryLoadData": 3,
        "cuLibraryGetKernel": 4,
        "cuKernelGetFunction": 5,
        "cuCtxPopCurrent": 2,
    }

    def __init__(self, failing: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._failing = failing

    def cuGetErrorString(self, status: int) -> tuple[int, bytes]:
        return 0, b"no kernel image is available"

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name == self._failing:
                return (self.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU, None)
            handle = self.HANDLES.get(name)
            return (self.CUresult.CUDA_SUCCESS,) if handle is None else (self.CUresult.CUDA_SUCCESS, handle)

        return call


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> Diary:
    import cuda.bindings

    made = Diary()
    monkeypatch.setattr(cuda.bindings, "driver", made, raising=False)
    monkeypatch.setattr(build, "_kernels", {})
    return made


def test_loading_happens_in_the_primary_context_once_per_device(tmp_path: Path, diary: Diary) -> None:
    source = written(tmp_path, "large.cu", LARGE, "large", arch="sm_90")
    kernel = build.kernel(source, 7)
    assert build.kernel(source, 7) is kernel
    assert (kernel.function, kernel.library, kernel.device) == (5, 3, 7)
    assert kernel.facts["smem_bytes"] == 100256
    attribute = Diary.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert diary.calls == [
        ("cuInit", 0),
        ("cuDeviceGet", 7),
        ("cuDevicePrimaryCtxRetain", 1),
        ("cuCtxPushCurrent", 2),
        ("cuLibraryLoadData", kernel.cubin.data, [], [], 0, [], [], 0),
        ("cuLibraryGetKernel", 3, b"large"),
        ("cuKernelSetAttribute", attribute, 100256, 4, 1),
        ("cuKernelGetFunction", 4),
        ("cuCtxPopCurrent",),
    ]


@pytest.mark.parametrize(
    ("facts", "asked"),
    [
        ({}, []),
        ({"smem_bytes": 48 * 1024, "cluster": 8}, []),
        ({"smem_bytes": 48 * 1024 + 1}, [("MAX_DYNAMIC_SHARED_SIZE_BYTES", 48 * 1024 + 1)]),
        ({"cluster": 16}, [("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)]),
    ],
)
def test_only_what_exceeds_the_default_is_asked_for(facts: dict[str, int], asked: list[tuple[str, int]]) -> None:
    wanted = loader._attributes(Diary(), facts)
    assert [(attribute.name.removeprefix("CU_FUNC_ATTRIBUTE_"), value) for attribute, value in wanted] == asked


def test_a_refusal_is_told_and_the_context_restored(
    tmp_path: Path, diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diary, "_failing", "cuLibraryLoadData")
    with pytest.raises(DriverError, match="loading large for sm_90 on cuda:0: CUDA_ERROR_NO_BINARY_FOR_GPU") as caught:
        build.kernel(written(tmp_path, "large.cu", LARGE, "large", arch="sm_90"), 0)
    assert caught.value.code == 209
    assert diary.calls[-1] == ("cuCtxPopCurrent",)
