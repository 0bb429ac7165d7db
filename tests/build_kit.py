"""Small kernels for the tests of the compile service, each compiled in well under a second."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cupymla.build import Cubin, KernelSource, cubin, folders, forget

PLAIN = """\
#include "part.cuh"
extern "C" __global__ void __launch_bounds__(64) plain(float* x, int n) {
  if (threadIdx.x < n) x[threadIdx.x] = part();
}
"""
PART = "#pragma once\n__device__ inline float part() { return 1.0f; }\n"

# 64 values live across a barrier with 32 registers per thread.
SPILLING = """\
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x) {
  float a[64];
#pragma unroll
  for (int i = 0; i < 64; i++) a[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; i++) x[i * 1024 + threadIdx.x] = a[63 - i] * a[i];
}
"""

BACKENDS = [
    "nvrtc",
    pytest.param("nvcc", marks=pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")),
]


def plain(root: Path, **fields: object) -> KernelSource:
    """The kernel `plain`, its translation unit and header written below `root`."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "plain.cu").write_text(PLAIN)
    (root / "part.cuh").write_text(PART)
    return written(root, "plain.cu", PLAIN, "plain", **fields)


def written(root: Path, name: str, text: str, entry: str, **fields: object) -> KernelSource:
    """A kernel whose translation unit is written below `root`."""
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return KernelSource(name, entry, root=str(root), **fields)  # type: ignore[arg-type]


def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the compile service forget everything and keep its files below `tmp_path`; returns its cache folder."""
    for name in ("CACHE_DIR", "READONLY_CACHE", "CUTLASS", "COMPILER", "NVCC", "FAIL_ON_SPILL", "QUIET"):
        monkeypatch.delenv(f"CUPYMLA_{name}", raising=False)
    folder = tmp_path / "cache"
    monkeypatch.setenv("CUPYMLA_CACHE_DIR", str(folder))
    monkeypatch.setattr(folders, "_warned", set())
    forget()
    return folder


def again(kernel: KernelSource) -> Cubin:
    """What a new process would get."""
    forget()
    return cubin(kernel)


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that runs `code`, with this checkout on its path and `environment` added to its own."""
    import os
    import sys

    root = str(Path(__file__).resolve().parent.parent)
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=os.sep,
        env={**os.environ, "PYTHONPATH": root, **environment},
    )
