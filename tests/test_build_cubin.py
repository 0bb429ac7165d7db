"""What Python reads from a cubin is what C++ wrote into it, and a damaged image is told apart from a whole one."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from build_kit import BACKENDS, private, written
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cupymla.build import cubin
from cupymla.build.cubin import Cubin, Image, whole_bytes

pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")

TWO_KERNELS = """\
#include <common/entry.cuh>
struct alignas(128) Map { float words[32]; };
struct Storage { alignas(1024) char tiles[5][9000]; };
struct alignas(64) Record { long long where; int count; };
template <int A, int B> struct Pair { static constexpr int kProduct = A * B; };
extern "C" __global__ void __launch_bounds__(96) facts(float* x, const __grid_constant__ Record record) {
  __shared__ float shared[33];
  shared[threadIdx.x & 31] = x[record.count];
  __syncthreads();
  x[threadIdx.x] = shared[threadIdx.x & 7];
}
extern "C" __global__ void other(float* x, const __grid_constant__ Map map, short n) { x[threadIdx.x] = map.words[n]; }
CUPYMLA_LAUNCH_FACTS(threads = 96, cluster = Pair<2, 4>::kProduct == 8 ? 2 : 1, smem_bytes = sizeof(Storage),
                     parameter_bytes = sizeof(Record), all_ones = 0xffffffffu, twice = 2 * threads, none = 0);
"""
FACTS = {
    "threads": 96,
    "cluster": 2,
    "smem_bytes": 45056,  # 5 * 9000 rounded up to the alignment of 1024
    "parameter_bytes": 64,
    "all_ones": 0xFFFFFFFF,
    "twice": 192,
    "none": 0,
}


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def image_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("image")
    with pytest.MonkeyPatch.context() as patch:
        private(folder, patch)
        return cubin(written(folder, "facts.cu", TWO_KERNELS, "facts")).data


def made(tmp_path: Path, backend: str, arch: str, monkeypatch: pytest.MonkeyPatch, text: str = TWO_KERNELS) -> Cubin:
    monkeypatch.setenv("CUPYMLA_COMPILER", backend)
    return cubin(written(tmp_path, "facts.cu", text, "facts", arch=arch))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100f"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_facts_reach_python(tmp_path: Path, backend: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = made(tmp_path, backend, arch, monkeypatch)
    assert compiled.facts == FACTS
    assert list(compiled.facts) == list(FACTS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_facts_that_are_all_zero_reach_python(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # An all-zero object takes no room in the file: its section has a size and no bytes.
    text = TWO_KERNELS[: TWO_KERNELS.index("CUPYMLA_LAUNCH_FACTS")] + "CUPYMLA_LAUNCH_FACTS(a = 0, b = 0);\n"
    assert made(tmp_path, backend, "sm_90a", monkeypatch, text).facts == {"a": 0, "b": 0}


def test_a_kernel_without_facts_states_none(tmp_path: Path) -> None:
    assert cubin(written(tmp_path, "k.cu", 'extern "C" __global__ void k() {}\n', "k")).facts == {}


def test_facts_cannot_be_changed_by_a_caller(tmp_path: Path, image_bytes: bytes) -> None:
    compiled = cubin(written(tmp_path, "facts.cu", TWO_KERNELS, "facts"))
    with pytest.raises(TypeError):
        compiled.facts["threads"] = 1  # type: ignore[index]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_image_agrees_with_the_compilers_log(
    tmp_path: Path, backend: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = made(tmp_path, backend, arch, monkeypatch)
    image = Image(compiled.data)
    assert set(image.kernels) == {"facts", "other"}
    assert image.registers("facts") == compiled.resources.registers > 0
    assert compiled.resources.static_smem_bytes == 33 * 4
    assert image.parameters("facts") == compiled.parameters == (8, 64)
    assert image.parameters("other") == (8, 128, 2)
    assert image.registers("absent") == 0
    assert image.parameters("absent") == ()


def test_an_image_is_whole(image_bytes: bytes) -> None:
    """CuPy's binding of NVRTC drops the last byte; tools refuse such a file, and an older cache may hold some."""
    start, (step, count) = struct.unpack_from("<Q", image_bytes, 32)[0], struct.unpack_from("<HH", image_bytes, 54)
    assert start + step * count <= len(image_bytes) == whole_bytes(image_bytes)
    with pytest.raises(ValueError, match="bytes of an ELF image of"):
        Image(image_bytes[:-1])
    assert whole_bytes(b"") == 0 and whole_bytes(b"no image" * 20) == 160


def test_a_truncated_image_is_refused(image_bytes: bytes) -> None:
    for length in range(0, len(image_bytes), 61):
        with pytest.raises(ValueError, match=r"."):
            Image(image_bytes[:length])


@pytest.mark.parametrize("data", [b"", b"\x7fELF", bytes(4096), b"\x7fELF\x02\x01" + bytes(200)], ids=len)
def test_what_is_no_cubin_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="ELF"):
        Image(data)


def test_facts_without_matching_names_are_refused(image_bytes: bytes) -> None:
    at = image_bytes.index(b"threads = 96")
    with pytest.raises(ValueError, match="7 launch facts but 6 names"):
        Image(image_bytes[:at] + b"threads _ 96" + image_bytes[at + 12 :]).facts()


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8))
@example([(0.0, 0)])
def test_a_damaged_image_raises_value_error_or_reads(image_bytes: bytes, damage: list[tuple[float, int]]) -> None:
    data = bytearray(image_bytes)
    for place, value in damage:
        data[int(place * len(data))] = value
    try:
        image = Image(bytes(data))
        image.facts()
    except ValueError:
        return
    assert image.registers("facts") >= 0
    image.parameters("facts")
