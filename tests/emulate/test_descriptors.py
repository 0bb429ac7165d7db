"""CUTLASS builds descriptors, the model reads them: both mean the same layouts and the same instructions."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cupymla.build.compiler import header_folders
from cupymla.build.source import cuda_root, find_cutlass

HERE = Path(__file__).resolve().parent


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None or find_cutlass() is None, reason="needs nvcc and CUTLASS")
def test_the_decoder_reads_what_cutlass_builds(tmp_path: Path) -> None:
    """Layouts and places of results element by element, an instruction descriptor of each kind field by field."""
    found = find_cutlass()
    assert found is not None
    cccl = header_folders()[0].folder
    includes = [f"-I{folder}" for folder in (found[1], cuda_root(), cccl)]
    program = tmp_path / "descriptors"
    command = ["nvcc", "-std=c++17", "--expt-relaxed-constexpr", "-arch=sm_100a", *includes, "-o", str(program)]
    subprocess.run([*command, str(HERE / "descriptors.cu")], check=True, capture_output=True, text=True)
    lines = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    kinds = ("layout", "instruction", "result", "operand", "bytes", "metadata")
    told = [line for line in lines if line.startswith(kinds)]
    assert len([line for line in told if line.startswith("layout")]) == 33
    assert len([line for line in told if line.startswith("instruction")]) == 9
    assert len([line for line in told if line.startswith("result")]) == 21
    assert len([line for line in told if line.startswith("operand")]) == 12
    assert len([line for line in told if line.startswith("bytes")]) == 8
    assert len([line for line in told if line.startswith("metadata")]) == 12
    assert [line for line in told if not line.endswith(" same")] == []
