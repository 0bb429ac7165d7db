"""NVIDIA's CuTe tutorials for Blackwell, built from the installed nvidia-cutlass package and run translated.

Their host programs insist on a Blackwell GPU, so the kernels are launched from here, with the problem, tiles, clusters
and tensor maps that the host programs use, and the result is compared with NumPy's.

    python tests/emulate/tutorials.py ptx FOLDER     # compile; needs nvcc and the package
    python tests/emulate/tutorials.py host FOLDER    # run what lies there on the host's processor
    python tests/emulate/tutorials.py gpu FOLDER     # or on a Hopper GPU
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from device import Kernel, Memory, Where, tile_map
from isa_oracle import instruction

from cupymla import tensormap
from cupymla.build.source import package_folder
from cupymla.launch import Geometry
from cupymla_lab.emulate import MODES, EmulationError, Settings
from cupymla_lab.emulate.host.machine import HostError
from cupymla_lab.emulate.settings import Check

M, N, K = 512, 1024, 256


@dataclass(frozen=True)
class Tutorial:
    """One of them.

    Attributes:
        name: its file, without what all have in common.
        cluster: CTAs along x and y.
        mma: M and N of its instruction.
        a_rows, b_rows: rows of A and B in the box of one copy; 0 without TMA.
        grid: CTAs along x and y.
        smem_bytes: shared memory.
        epilogue: whether C and D are copied by TMA as well.
    """

    name: str
    cluster: tuple[int, int]
    mma: tuple[int, int]
    a_rows: int
    b_rows: int
    smem_bytes: int
    epilogue: bool = False

    @property
    def grid(self) -> tuple[int, int, int]:
        pair = 2 if self.mma[0] == 256 else 1
        return M // (self.mma[0] // pair), N // self.mma[1], 1


TUTORIALS = (
    Tutorial("01_mma", (1, 1), (128, 256), 0, 0, 49408),
    Tutorial("02_mma_tma", (1, 1), (128, 256), 128, 256, 49408),
    Tutorial("03_mma_tma_multicast", (4, 4), (128, 256), 32, 64, 49408),
    Tutorial("04_mma_tma_2sm", (4, 4), (256, 256), 32, 64, 33024),
    Tutorial("05_mma_tma_epi", (4, 4), (256, 256), 32, 64, 33024, epilogue=True),
)


def sources() -> Path | None:
    """The tutorials' folder in the installed package."""
    package = package_folder("cutlass_library")
    folder = package / "source" / "examples" / "cute" / "tutorial" / "blackwell" if package else None
    return folder if folder and folder.is_dir() else None


def can_compile() -> bool:
    """Whether nvcc and the package are here."""
    return shutil.which("nvcc") is not None and sources() is not None


def compile_ptx(tutorial: Tutorial, folder: Path) -> Path:
    """Compile a tutorial for sm_100a, unchanged, to PTX, where nobody has done so in that folder before."""
    with (folder / f".{tutorial.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder / f"{tutorial.name}.ptx"
        return made if made.is_file() else _compiled(tutorial, folder).rename(made)


def _compiled(tutorial: Tutorial, folder: Path) -> Path:
    source = sources()
    assert source is not None
    root = source.parents[3]
    file = folder / f"{tutorial.name}.part"
    includes = [f"-I{root / part}" for part in ("include", "tools/util/include", source.relative_to(root))]
    command = ["nvcc", "-arch=sm_100a", "-std=c++17", "--expt-relaxed-constexpr", "-lineinfo", *includes]
    command += ["-ptx", "-o", str(file), str(source / f"{tutorial.name}_sm100.cu")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return file


def with_cluster(tutorial: Tutorial, ptx: str) -> str:
    """A tutorial's PTX with the cluster that the host program asks for written into the kernel."""
    x, y = tutorial.cluster
    if x * y == 1:
        return ptx
    body = ptx.index("{", ptx.index(")", ptx.index("gemm_device")))
    return f"{ptx[:body]}.explicitcluster .reqnctapercluster {x}, {y}, 1\n{ptx[body:]}"


class Bytes(ctypes.Structure):
    """A kernel parameter of up to 512 bytes at an aligned address."""

    _fields_ = (("words", ctypes.c_uint64 * 64),)

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._buffer = ctypes.create_string_buffer(1024)
        start = -(-ctypes.addressof(self._buffer) // 128) * 128
        ctypes.memmove(start, data, len(data))
        self.address = start


class _At:
    def __init__(self, holder: Bytes) -> None:
        self._holder = holder
        self.address = holder.address


def _bytes(data: bytes) -> Any:
    return _At(Bytes(data))


def _plain(shape: tuple[int, int], memory: Memory) -> Any:
    words = np.array([shape[0], shape[1], shape[1], 0], np.int32).tobytes()
    return _bytes(words + memory.pointer.to_bytes(8, "little"))


def _map(memory: Memory, dtype: str, shape: tuple[int, int], box: tuple[int, int], where: Where) -> Any:
    bytes_ = 4 if dtype == "float32" else 2
    strides = (shape[1] * bytes_,)
    request = tensormap.TileMap(memory.pointer, dtype, (shape[1], shape[0]), strides, box)
    encoded = tile_map(request, where)
    made = _bytes(ctypes.string_at(encoded.address, 128) + bytes(128))
    made.request = request
    return made


def entry_of(ptx: str) -> str:
    """The tutorial's kernel; its module holds others, of the libraries that its host program uses."""
    names: list[str] = re.findall(r"\.entry\s+([\w$]+)", ptx)
    return next(name for name in names if "gemm_device" in name)


class Runner:
    """A loaded tutorial with a problem in memory; K of the problem may be cut short."""

    def __init__(self, tutorial: Tutorial, ptx: str, where: Where, k: int = K) -> None:
        self.tutorial, self._where, self._k = tutorial, where, k
        self.kernel = Kernel(with_cluster(tutorial, ptx), tutorial.name, where, 128, entry_of(ptx))
        rng = np.random.default_rng(5)
        self._a = rng.integers(-3, 4, (M, k)).astype(np.float16)
        self._b = rng.integers(-3, 4, (N, k)).astype(np.float16)
        self._c = rng.integers(-3, 4, (M, N)).astype(np.float32)
        self._memory = [Memory(array, where) for array in (self._a, self._b, self._c)]

    def _parameters(self, d: Memory) -> list[Any]:
        tutorial, (a, b, c), where = self.tutorial, self._memory, self._where
        one = _bytes(bytes(8))
        tiled = np.array([instruction("f16", *tutorial.mma, "f16", "f16"), 1], np.uint32).tobytes()
        shapes = [(M, self._k), (N, self._k), (M, N), (M, N)]
        places = [_bytes(np.array([*shape, 0], np.int32).tobytes()) for shape in shapes]
        if not tutorial.a_rows:
            places[0], places[1] = _plain(shapes[0], a), _plain(shapes[1], b)
        if not tutorial.epilogue:
            places[2], places[3] = _plain((M, N), c), _plain((M, N), d)
        tilers = [one, one] if tutorial.epilogue else [one]
        listed = [*places, *tilers, _bytes(tiled), one]
        if tutorial.a_rows:
            listed.append(_map(a, "float16", shapes[0], (64, tutorial.a_rows), where))
            listed.append(_map(b, "float16", shapes[1], (64, tutorial.b_rows), where))
        if tutorial.epilogue:
            listed += [_map(memory, "float32", (M, N), (32, 128), where) for memory in (c, d)]
        return [*listed, ctypes.c_float(1.0), ctypes.c_float(0.5)]

    def run(self, settings: Settings) -> float:
        """The largest error of a run; NaN where an element was not written."""
        d = Memory(np.full((M, N), np.nan, np.float32), self._where)
        try:
            geometry = Geometry(self.tutorial.grid, 128, self.tutorial.smem_bytes)
            self.kernel.launch(geometry, self._parameters(d), settings)
            wanted = self._a.astype(np.float64) @ self._b.astype(np.float64).T + 0.5 * self._c
            return float(np.max(np.abs(d.read() - wanted)))
        finally:
            d.free()


def main() -> None:
    """Compile or run all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("ptx", "host", "gpu"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="part of a tutorial's name")
    parser.add_argument("--k", type=int, default=K)
    parser.add_argument("--mode", choices=MODES, action="append")
    options = parser.parse_args()
    for tutorial in TUTORIALS:
        if options.only not in tutorial.name:
            continue
        if options.action == "ptx":
            print(compile_ptx(tutorial, options.folder))
            continue
        runner = Runner(tutorial, (options.folder / f"{tutorial.name}.ptx").read_text(), options.action, options.k)
        for mode in options.mode or MODES:
            started = time.monotonic()
            try:
                checks: tuple[Check, ...] = () if tutorial.name == "01_mma" else ("proxy",)
                found = str(runner.run(Settings(mode, checks=checks, stalls=False)))
            except (EmulationError, HostError) as error:
                found = f"{type(error).__name__}: {error}"
            print(f"{tutorial.name} {mode}: {found} ({time.monotonic() - started:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
