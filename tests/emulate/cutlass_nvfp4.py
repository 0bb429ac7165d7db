"""CUTLASS's NVFP4 GEMM for Blackwell, example 72a of the installed nvidia-cutlass package, translated.

The kernel is the example's own: `cutlass_nvfp4.cu` includes its file, and only fills the arguments in another way.

    python tests/emulate/cutlass_nvfp4.py compile FOLDER   # needs nvcc and the package; some minutes
    python tests/emulate/cutlass_nvfp4.py run FOLDER [gpu]   # on the host's processor, or on a Hopper GPU
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from device import Memory, Where
from isa_oracle import Array

from cupymla import driver, tensormap
from cupymla.build.source import package_folder
from cupymla.launch import Geometry
from cupymla_lab.emulate import MODES, ForeignMap, Settings, load

EXAMPLE = Path("examples/72_blackwell_narrow_precision_gemm")
SOURCE = Path(__file__).resolve().with_suffix(".cu")
MAGIC = 0x70614D656C69546D
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class _Problem(ctypes.Structure):
    """`Problem` of cutlass_nvfp4.cu."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in "mnk"),
        *((name, ctypes.c_float) for name in ("alpha", "beta")),
        *((name, ctypes.c_uint64) for name in ("a", "b", "a_scales", "b_scales", "c", "d")),
    )


class _Launch(ctypes.Structure):
    """`Launch` of cutlass_nvfp4.cu."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        *((name, ctypes.c_uint32) for name in ("block", "smem_bytes", "parameter_bytes")),
    )


class _Map(ctypes.Structure):
    """`HostMap` of cutlass_nvfp4.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("magic", "pointer")),
        ("shape", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
        *((name, ctypes.c_uint32) for name in ("rank", "element_bits", "swizzle")),
        ("box", ctypes.c_uint32 * 5),
        ("rest", ctypes.c_uint32 * 2),
    )


def package() -> Path | None:
    """The package's sources, if they hold the example."""
    folder = package_folder("cutlass_library")
    return folder / "source" if folder and (folder / "source" / EXAMPLE).is_dir() else None


def compile_both(folder: Path) -> None:
    """The kernel's PTX and a library with the host side, to `folder`. One call of nvcc makes both."""
    root = package()
    assert root is not None
    includes = [f"-I{root / part}" for part in ("include", "tools/util/include", "examples/common", EXAMPLE)]
    command = ["nvcc", "-arch=compute_100a", "-code=compute_100a", "-std=c++17", "--expt-relaxed-constexpr"]
    command += ["-DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL=1", "-shared", "-Xcompiler", "-fPIC", *includes]
    command += ["--keep", "--keep-dir", str(folder), "-o", str(folder / "cutlass_nvfp4.so"), str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True, text=True)


def scale_places(rows: int, blocks: int) -> Array:
    """Where the factor of (row, block) lies: tiles of 128 rows by 4 blocks, 512 bytes each, blocks of tiles first."""
    row, block = np.meshgrid(np.arange(rows), np.arange(blocks), indexing="ij")
    tile = row // 128 * (blocks // 4) + block // 4
    places: Array = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    return places


class Operand:
    """A matrix of (rows, k) NVFP4: codes, factors, and the numbers they stand for."""

    def __init__(self, rows: int, k: int, seed: int, where: Where) -> None:
        rng = np.random.default_rng(seed)
        codes = rng.integers(0, 16, (rows, k)).astype(np.uint8)
        factors = rng.choice(np.array([0.5, 1, 2, 3], np.float32), (rows, k // 16))
        self.numbers: Array = E2M1[codes] * np.repeat(factors, 16, axis=1)
        self.data = Memory(codes[:, ::2] | codes[:, 1::2] << 4, where)
        bytes_ = np.zeros(factors.size, np.uint8)
        bytes_[scale_places(*factors.shape)] = factors.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        self.scales = Memory(bytes_, where)


class _At:
    def __init__(self, buffer: ctypes.Array[Any]) -> None:
        self._buffer = buffer
        self.address = ctypes.addressof(buffer)


class Runner:
    """The example's kernel with a problem in memory."""

    def __init__(self, folder: Path, m: int = 256, n: int = 1024, k: int = 512, where: Where = "host") -> None:
        self._where: Where = where
        self._a, self._b = Operand(m, k, 1, where), Operand(n, k, 2, where)
        self._c = np.random.default_rng(3).integers(-8, 9, (m, n)).astype(ml_dtypes.bfloat16)
        self._shape, self._c_memory = (m, n, k), Memory(self._c, where)
        self._host = ctypes.CDLL(str(folder / "cutlass_nvfp4.so"), mode=1)
        text = (folder / "cutlass_nvfp4.ptx").read_text()
        (entry,) = re.findall(r"\.entry (\w*device_kernel\w*)", text)
        self._launch = _Launch()
        self._describe(0)
        x, y, z = self._launch.cluster
        body = text.index("{", text.index(")", text.index(entry)))
        cluster = f".explicitcluster .reqnctapercluster {x}, {y}, {z}\n"
        # The example's own bound is its block's threads.
        clustered = text[:body] + cluster + text[body:]
        self.kernel: Any = load(clustered, entry, on="host") if where == "host" else load(clustered, entry)

    def _describe(self, d: int) -> ctypes.Array[Any]:
        m, n, k = self._shape
        pointers = [each.pointer for each in (self._a.data, self._b.data, self._a.scales, self._b.scales)]
        problem = _Problem(m, n, k, 0.5, 2.0, *pointers, self._c_memory.pointer, d)
        parameters = ctypes.create_string_buffer(16384)
        code = self._host.describe(
            ctypes.byref(problem), parameters, ctypes.c_uint64(16384), ctypes.byref(self._launch)
        )
        assert code == 0, code
        return parameters

    def _maps(self, parameters: ctypes.Array[Any]) -> list[ForeignMap]:
        found = []
        for at in range(0, self._launch.parameter_bytes - 127, 64):
            made = _Map.from_buffer(parameters, at)
            if made.magic == MAGIC:
                rank, address = made.rank, ctypes.addressof(parameters) + at
                lists = tuple(made.shape[:rank]), tuple(made.strides[: rank - 1]), tuple(made.box[:rank])
                known = ForeignMap(address, made.pointer, *lists, made.element_bits, made.swizzle)
                if self._where == "gpu" and known.element_bits == 16:
                    self._encode(known)
                found.append(known)
        return found

    @staticmethod
    def _encode(known: ForeignMap) -> None:
        """Puts what the TMA reads in a map's place. C and D come and go by it; the operands' copies are for pairs of
        CTAs, so the model makes them, and what stands in the place of their maps only has to be told apart."""
        request = tensormap.TileMap(known.ptr, "bfloat16", known.shape, known.strides_bytes, known.box, known.swizzle)
        with driver.on_device(0):
            encoded = tensormap.encode(request)
        ctypes.memmove(known.address, encoded.address, tensormap.BYTES)

    def run(self, settings: Settings) -> tuple[Array, Array]:
        """The result and NumPy's, both as bfloat16. Every sum is exact in float, so they have to be equal."""
        m, n, _ = self._shape
        d = Memory(np.full((m, n), np.nan, ml_dtypes.bfloat16), self._where)
        parameters = self._describe(d.pointer)
        launch = self._launch
        x, y, z = launch.grid
        geometry = Geometry((x, y, z), launch.block, launch.smem_bytes)
        self.kernel.launch(geometry, [_At(parameters)], settings=settings, maps=self._maps(parameters))
        product = self._a.numbers @ self._b.numbers.T
        wanted = (0.5 * product + 2 * self._c.astype(np.float64)).astype(np.float32).astype(ml_dtypes.bfloat16)
        return d.read(), wanted


def main() -> None:
    """Compile or run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("compile", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("where", choices=("host", "gpu"), nargs="?", default="host")
    options = parser.parse_args()
    if options.action == "compile":
        compile_both(options.folder)
        return
    runner = Runner(options.folder, where=options.where)
    for mode in MODES:
        started = time.monotonic()
        found, wanted = runner.run(Settings(mode, 1, ("proxy", "init")))
        print(mode, (found != wanted).sum(), f"of {found.size} differ ({time.monotonic() - started:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
