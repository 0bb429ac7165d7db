"""One call makes a kernel of PTX text, of a file, or of a source, on either machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import gemm
import numpy as np
import pytest
from device import Memory, Where

from cupymla import driver
from cupymla.build import KernelSource
from cupymla.emulate import MODES, Program, Settings, load
from cupymla.emulate.host import library, machine
from cupymla.errors import InputError
from cupymla.launch import Geometry
from cupymla.tensormap import TileMap

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
    flags = ("-H", *library._header_flags(), *library._KERNEL_FLAGS)
    command = library._command('#include "runtime.hpp"\nint x;\n', tmp_path, flags)
    done = subprocess.run((*command, str(tmp_path / "x.o")), capture_output=True, text=True, check=True)
    (taken,) = library._header_flags()
    assert f"! {taken.removeprefix('-I')}/runtime.hpp.gch" in done.stderr.splitlines()
    assert library._HERE.as_posix() not in done.stderr
