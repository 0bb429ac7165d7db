"""One call makes a kernel of PTX text, of a file, or of a source, on either machine."""

from __future__ import annotations

import ctypes
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fake_driver
import gemm
import numpy as np
import pytest
from device import Memory, Where
from fake_driver import FakeDriver

from cupymla import driver
from cupymla.build import KernelSource, loader
from cupymla.build.cubin import Image
from cupymla.errors import InputError, UnsupportedError
from cupymla.launch import Geometry
from cupymla.tensormap import TileMap
from cupymla_lab.emulate import MODES, EmulatedKernel, Program, Settings, build, load, program, run
from cupymla_lab.emulate.host import library, machine

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("kind", ["text", "path", "name", "source"])
def test_sources(kind: str, where: Where, tmp_path: Path) -> None:
    """The GEMM from each kind of source, through the same lines on both machines."""
    file = tmp_path / "gemm.ptx"
    file.write_text(gemm.ptx())
    sources: dict[str, str | Path | KernelSource] = {
        "text": gemm.ptx(),
        "path": file,
        "name": str(file),
        "source": gemm.SOURCE,
    }
    kernel = load(sources[kind], on=where)
    m, n, k = gemm.TILE_M, gemm.TILE_N, 2 * gemm.TILE_K
    ones = [Memory(np.full((rows, k), 0x3F80, np.uint16), where) for rows in (m, n)]
    d = Memory(np.zeros((m, n), np.float32), where)
    maps = [
        kernel.tensor_map(TileMap(each.pointer, "bfloat16", (k, rows), (2 * k,), (gemm.TILE_K, rows)))
        for each, rows in zip(ones, (m, n), strict=True)
    ]
    maps.append(kernel.tensor_map(TileMap(d.pointer, "float32", (n, m), (4 * n,), (32, m), 0)))
    for mode in MODES:
        geometry = Geometry((1, 1, 1), gemm.THREADS, gemm.SMEM_BYTES)
        kernel.launch(geometry, [*maps, gemm.Parameters(1, 1, 2)], settings=Settings(mode))
        np.testing.assert_array_equal(d.read(), k)


def test_without_a_gpu_the_host_is_taken(where: Where) -> None:
    if where == "gpu" or driver.available():
        pytest.skip("this is about machines without a GPU")
    assert type(load(gemm.SOURCE, on="auto")).__name__ == "HostProgram"


def of_capability(fake: FakeDriver, capability: tuple[int, int]) -> None:
    """Have every GPU answer with it."""

    def device(place: int, index: int) -> int:
        ctypes.c_int.from_address(place).value = index
        return 0

    def attribute(place: int, number: int, index: int) -> int:
        ctypes.c_int.from_address(place).value = dict(zip((75, 76), capability, strict=True))[number]
        return 0

    fake.answer("cuDeviceGet", [ctypes.c_void_p, ctypes.c_int], device)
    fake.answer("cuDeviceGetAttribute", [ctypes.c_void_p, ctypes.c_int, ctypes.c_int], attribute)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    with fake_driver.installed(monkeypatch) as made:
        yield made


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_a_gpu_that_is_no_hopper_gpu_is_refused_by_name(fake: FakeDriver, capability: tuple[int, int]) -> None:
    """Before anything is built or loaded, whatever the source is."""
    of_capability(fake, capability)
    for source in (gemm.SOURCE, Path(__file__), Program("p", b"", ("k",), (), 0, {})):
        with pytest.raises(UnsupportedError, match="a Hopper GPU") as caught:
            load(source, "k")
        assert caught.value.device == "Test GPU (compute capability {}.{})".format(*capability)
        assert 'on="host"' in caught.value.supported
    with pytest.raises(UnsupportedError):
        EmulatedKernel(Program("p", b"", ("k",), (), 0, {}), "k", 0)


def test_auto_takes_a_hopper_gpu_and_the_host_beside_others(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program("p", b"", ("k",), (), 0, {})
    monkeypatch.setattr(run, "EmulatedKernel", lambda program, entry, device: (program, entry, device))
    of_capability(fake, (9, 0))
    taken: object = load(program, "k", 1, on="auto")
    assert taken == (program, "k", 1)
    of_capability(fake, (10, 0))
    driver.function.cache_clear()
    assert type(load(gemm.SOURCE, on="auto")).__name__ == "HostProgram"


def test_the_gpu_itself_is_asked_where_it_passes_for_another(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """`testing.translated` has `driver.compute_capability` answer for a Blackwell GPU."""
    of_capability(fake, (9, 0))
    monkeypatch.setattr(driver, "compute_capability", lambda index: (10, 0))
    monkeypatch.setattr(run, "EmulatedKernel", lambda program, entry, device: entry)
    taken: object = load(Program("p", b"", ("k",), (), 0, {}))
    assert taken == "k"


def test_blocks_that_do_not_fit_the_register_file_are_refused(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is launched, nor prepared; `threads` of `load` makes room."""
    of_capability(fake, (9, 0))
    monkeypatch.setattr(loader, "load", lambda cubin, device: SimpleNamespace(function=1, library=2))
    monkeypatch.setattr(run, "_global", lambda *_: 3)
    monkeypatch.setattr(run, "_mapped_report", lambda: (None, 4))
    monkeypatch.setattr(run, "_new_event", lambda: 5)
    prepared: list[int] = []
    monkeypatch.setattr(EmulatedKernel, "_prepare", lambda self, geometry, *_: prepared.append(geometry.block))
    monkeypatch.setattr(run, "Launcher", lambda *_: lambda stream: None)
    fake.answer("cuEventRecord", [ctypes.c_void_p, ctypes.c_void_p], lambda event, stream: 0)
    head = ".version 8.8\n.target sm_100a\n.address_size 64\n"
    text = head + ".visible .entry k() {\ntcgen05.wait::ld.sync.aligned;\nret;\n}\n"
    asked: list[int] = []
    model = program.model

    def compiled_once(registers: int) -> bytes:
        """For as many registers as the first time: it takes seconds."""
        asked.append(registers)
        return model(asked[0])

    monkeypatch.setattr(program, "model", compiled_once)
    small, large = build(text, "k.ptx"), build(text, "k.ptx", threads=1024)
    assert asked == [128, 64]

    def start(made: Program, threads: int) -> None:
        EmulatedKernel(made, "k", 0).start(Geometry((1, 1, 1), threads, 0), [], 0, Settings())

    with pytest.raises(InputError, match=r"load\(\.\.\., threads=1024\)") as caught:
        start(small, 1024)
    assert caught.value.argument == "block" and f" {Image(small.cubin).registers('k')} registers" in str(caught.value)
    with pytest.raises(InputError, match="1 to 1024 threads"):
        start(small, 2048)
    assert prepared == []
    start(small, 512)
    monkeypatch.setattr(Image, "registers", lambda *_: asked[1])
    start(large, 1024)
    assert prepared == [512, 1024]


@pytest.mark.parametrize(("registers", "most"), [(128, 512), (136, 384), (168, 384), (64, 1024), (65, 896), (0, 1024)])
def test_registers_are_counted_as_a_launch_counts_them(registers: int, most: int) -> None:
    """In units of 256 for each warp, of which there are a multiple of four."""
    kernel = object.__new__(EmulatedKernel)
    kernel._registers, kernel.program = registers, Program("p", b"", ("k",), (), 0, {})
    kernel._require_registers(most)
    if most < 1024:
        with pytest.raises(InputError):
            kernel._require_registers(most + 1)


def test_what_cannot_be_loaded_is_refused() -> None:
    with pytest.raises(InputError, match="a file that can be read"):
        load(Path("missing.ptx"), on="host")
    with pytest.raises(InputError, match="a program for a GPU"):
        load(Program("p", b"", ("k",), (), 0, {}), on="host")
    with pytest.raises(InputError, match="entry"):
        load(gemm.SOURCE, "another", on="host")


@pytest.mark.skipif(not machine.available(), reason="needs a C++ compiler on x86-64")
def test_kernels_do_not_parse_the_machines_header_again(tmp_path: Path) -> None:
    """What a kernel includes lies parsed beside it; `-H` marks with '!' what the compiler took so."""
    version = subprocess.run(("c++", "--version"), capture_output=True, text=True, check=True).stdout
    if "Free Software Foundation" not in version:
        pytest.skip("another compiler than GCC reads the header itself")
    flags = ("-H", *library._header_flags(), *library._kernel_flags())
    command = library._command('#include "runtime.hpp"\nint x;\n', tmp_path, flags)
    done = subprocess.run((*command, str(tmp_path / "x.o")), capture_output=True, text=True, check=True)
    (taken,) = library._header_flags()
    assert f"! {taken.removeprefix('-I')}/runtime.hpp.gch" in done.stderr.splitlines()
    assert library._HERE.as_posix() not in done.stderr


def test_processes_build_a_kernel_once(tmp_path: Path) -> None:
    """Who comes while another builds waits for it, and no lock is left."""
    lock = tmp_path / "kernel.lock"
    order: list[str] = []

    def build_too() -> None:
        with library._one_process(lock):
            order.append("second")

    second = threading.Thread(target=build_too)
    with library._one_process(lock):
        second.start()
        time.sleep(0.2)
        order.append("first")
    second.join()
    assert order == ["first", "second"]
    assert list(tmp_path.iterdir()) == []
