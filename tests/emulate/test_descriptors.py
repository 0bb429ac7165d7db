"""CUTLASS builds descriptors, the model reads them: both mean the same layouts and the same instructions."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cupymla.build.compiler import header_folders
from cupymla.build.source import cuda_root, find_cutlass

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[1] / "cupymla_lab" / "emulate" / "model"
MEMORY = ("--param", "ggc-min-expand=400", "--param", "ggc-min-heapsize=800000")
"""GCC's: it collects garbage from 800 MB on, in kilobytes here."""


def toolkit() -> tuple[Path, Path]:
    """The headers of nvcc's toolkit, which unlike those for NVRTC are whole, and its CCCL."""
    command = ["nvcc", "--dryrun", "-E", "-x", "cu", "/dev/null"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.search(r'INCLUDES="-I([^"]+)"', told)
    assert found, told
    return Path(found[1].strip()), Path(found[1].strip()) / "cccl"


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None or find_cutlass() is None, reason="needs a CUDA toolkit and CUTLASS")
def test_the_decoder_reads_what_cutlass_builds(tmp_path: Path) -> None:
    """Layouts and places of results element by element, an instruction descriptor of each kind field by field."""
    found = find_cutlass()
    assert found is not None
    folders = (found[1], cuda_root(), MODEL, header_folders()[0].folder, *toolkit())
    program = tmp_path / "descriptors"
    # Nothing runs on a device, and nvcc would read CuTe twice. Clean-up of what never throws, and a compiler that looks
    # for memory that it no longer needs, are a quarter of its time.
    command = ["c++", "-std=c++17", "-w", "-fno-exceptions", *MEMORY, "-x", "c++"]
    command += [*(f"-I{folder}" for folder in folders), "-o", str(program)]
    subprocess.run([*command, str(HERE / "descriptors.cu")], check=True, capture_output=True, text=True)
    lines = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    kinds = ("layout", "instruction", "result", "operand", "bytes", "metadata")
    told = [line for line in lines if line.startswith(kinds)]
    assert len([line for line in told if line.startswith("layout")]) == 21
    assert len([line for line in told if line.startswith("instruction")]) == 9
    assert len([line for line in told if line.startswith("result")]) == 14
    assert len([line for line in told if line.startswith("operand")]) == 12
    assert len([line for line in told if line.startswith("bytes")]) == 8
    assert len([line for line in told if line.startswith("metadata")]) == 12
    assert [line for line in told if not line.endswith(" same")] == []
