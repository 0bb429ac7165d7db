"""The wheel compiles kernels by itself: our sources and the CUTLASS headers they include travel inside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from build_kit import private, python

from cupymla import evidence
from cupymla.build import pack, source
from cupymla.ops import registry

ROOT = Path(__file__).resolve().parent.parent

MOST_BYTES = 2_100_000 + 100_000 * (len(registry.OPERATORS) - 6)
MOST_STUB_BYTES = 14_000 * len(registry.OPERATORS)

USES_CUTE = """\
#include <common/entry.cuh>
#include <cute/tensor.hpp>
extern "C" __global__ void probe(float* x) {
  auto tensor = cute::make_tensor(cute::make_gmem_ptr(x), cute::make_shape(cute::Int<4>{}, cute::Int<8>{}));
  tensor(1, 2) = 3.0f;
}
CUPYMLA_LAUNCH_FACTS(threads = 1, smem_bytes = 0);
"""

COMPILE = """\
import sys
sys.modules["cutlass_library"] = None  # as if nvidia-cutlass were not installed
import cupymla
from cupymla.build import KernelSource, cubin
from cupymla.build.source import find_cutlass
print(cupymla.__file__)
print(find_cutlass()[0])
from cupymla import evidence
print(sorted((row.kernel, row.arch, evidence.told(row)) for row in evidence.support_rows()))
print(dict(cubin(KernelSource("probe/probe.cu", "probe")).facts))
"""


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private(tmp_path, monkeypatch)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a wheel is built from, with one more kernel that uses CuTe."""
    copy = tmp_path / "checkout"
    ours = shutil.ignore_patterns("__pycache__", "third_party", "_packed")
    for name in ("cupymla", "cuda"):
        shutil.copytree(ROOT / name, copy / name, ignore=ours)
    shutil.copytree(ROOT / "tests" / "evidence", copy / "tests" / "evidence")
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    (copy / "cuda" / "probe").mkdir()
    (copy / "cuda" / "probe" / "probe.cu").write_text(USES_CUTE)
    return copy


def has_cutlass() -> bool:
    return source.find_cutlass() is not None


def test_all_of_our_sources_are_packed_and_nobody_elses() -> None:
    ours = {name for name in pack.files() if name.startswith("cuda/")}
    root = source.cuda_root()
    assert ours == {
        f"cuda/{file.relative_to(root).as_posix()}"
        for file in root.rglob("*")
        if file.is_file() and file.suffix != ".md" and "third_party" not in file.parts
    }
    assert "cuda/common/entry.cuh" in ours


@pytest.mark.skipif(not has_cutlass(), reason="needs CUTLASS's headers")
def test_packed_cutlass_headers_carry_their_licence(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "cuda_root", lambda: checkout / "cuda")
    monkeypatch.setattr(pack, "cuda_root", lambda: checkout / "cuda")
    packed = {name: file for name, file in pack.files().items() if name.startswith("cutlass/")}
    assert "cutlass/cute/tensor.hpp" in packed
    assert "cutlass/cutlass/cutlass.h" in packed
    bare = [name for name, file in packed.items() if "Redistribution and use" not in file.read_text()]
    assert bare == []


def test_a_folder_can_be_packed_by_command(tmp_path: Path) -> None:
    done = python(
        "import sys; from cupymla.build.pack import main; sys.exit(main(sys.argv[1:]))", str(tmp_path / "out")
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "cuda" / "common" / "entry.cuh").is_file()
    assert python("from cupymla.build.pack import main; raise SystemExit(main([]))").returncode == 2


def require_light(site: Path) -> None:
    """A wheel holds what users call: no laboratory, no pages, and no more than 2.1 MB beside CUTLASS's headers.

    Operators past the first six may add 100 KB each; stubs, which repeat every signature, 14 KB an operator.
    """
    files = [file.relative_to(site) for file in site.rglob("*") if file.is_file()]
    assert {file.parts[0] for file in files if not file.parts[0].endswith(".dist-info")} == {"cupymla"}
    assert [file for file in files if file.suffix == ".md" and file.parts[0] == "cupymla"] == []
    ours = [file for file in files if file.parts[:3] != ("cupymla", "_packed", "cutlass")]
    stubs = [file for file in ours if file.suffix == ".pyi"]
    assert sum((site / file).stat().st_size for file in ours if file not in stubs) <= MOST_BYTES
    assert sum((site / file).stat().st_size for file in stubs) <= MOST_STUB_BYTES


@pytest.mark.compile
@pytest.mark.skipif(not has_cutlass(), reason="needs CUTLASS's headers")
def test_the_unpacked_wheel_knows_its_evidence_and_compiles_a_cutlass_kernel_alone(
    checkout: Path, tmp_path: Path
) -> None:
    pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")
    pytest.importorskip("hatchling", reason="builds the wheel without a network")
    build_wheel = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build_wheel, str(tmp_path)], cwd=checkout, check=True, capture_output=True)
    known = sorted((row.kernel, row.arch, evidence.told(row)) for row in evidence.support_rows())
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    require_light(site)
    assert (site / "cupymla" / "py.typed").is_file()  # type checkers read the annotations of packages that say so
    assert (site / "cupymla" / "__init__.pyi").is_file()
    (commands,) = site.glob("cupymla-*.dist-info/entry_points.txt")
    assert "cupymla = cupymla.cli:run" in commands.read_text(encoding="utf-8")
    shutil.rmtree(checkout)
    done = python(COMPILE, PYTHONPATH=str(site), CUPYMLA_CACHE_DIR=str(tmp_path / "empty"))
    assert done.stdout.splitlines() == [
        str(site / "cupymla" / "__init__.py"),
        "wheel",
        str(known),
        "{'threads': 1, 'smem_bytes': 0}",
    ], done.stderr


def test_the_source_archive_leaves_the_submodule_out() -> None:
    hatchling = pytest.importorskip("hatchling.builders.sdist", reason="reads the build configuration")
    builder = hatchling.SdistBuilder(str(ROOT))
    names = {file.relative_path for file in builder.recurse_included_files()}
    assert "cuda/common/entry.cuh" in names
    assert "hatch_build.py" in names
    assert not [name for name in names if name.startswith("cuda/third_party/cutlass/")]
