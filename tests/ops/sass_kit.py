"""Machine code (SASS) of compiled kernels, for tests that look for the instructions that a design counts on."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import pytest

from cupymla.build.cubin import Cubin

WHEEL = "nvidia-cuda-nvdisasm"


def disassembler() -> str | None:
    """nvdisasm of a CUDA toolkit on PATH, else of the installed wheel; None where neither has it."""
    found = shutil.which("nvdisasm")
    if found:
        return found
    try:
        files = importlib.metadata.files(WHEEL) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    programs = (file.locate() for file in files if file.name in ("nvdisasm", "nvdisasm.exe"))
    return next(map(str, programs), None)


def machine_code(made: Cubin, folder: Path) -> str:
    """What a kernel was compiled to, one instruction a line; skips the test where there is no disassembler."""
    program = disassembler()
    if program is None:
        pytest.skip(f"needs nvdisasm of the CUDA toolkit (pip install {WHEEL})")
    image = folder / "kernel.cubin"
    image.write_bytes(made.data)
    return subprocess.run([program, "--print-code", str(image)], check=True, capture_output=True, text=True).stdout


def require_single_issuers(text: str) -> None:
    """Products and commits are issued by a thread of which the compiler knows that it is alone.

    Where it does not, it puts each into a loop over the lanes of the warp, which ends in `BRA.U.ANY`. What remains are
    the copies by tensor map whose coordinates differ from lane to lane.
    """
    loops, copies = text.count("BRA.U.ANY"), text.count("UTMALDG")
    assert loops <= copies, f"{loops} loops over lanes for {copies} copies"
