"""What is kept on record of tests that need a GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import COLLECTED

from cupymla import InputError, driver, evidence
from cupymla.bench import machine
from cupymla_lab import examples, gpu_tests

RESULT = gpu_tests.FileResult(
    file="tests/test_x.py",
    passed=3,
    skipped=1,
    failed=0,
    seconds=1.5,
    gpu="NVIDIA H200",
    driver="580",
    date="2026-11-26",
    commit="abc",
    devices=1,
    versions={"python": "3.12"},
    content_hash="none",
)
TESTS = """
import pytest

class TestMore:
    def test_inside(self): pass

def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip(reason="why not")
def test_is_skipped(): pass
@pytest.fixture
def broken(): raise ValueError
def test_cannot_begin(broken): pass
"""


def test_outcomes_are_counted_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pytest names them in its report."""
    folder = tmp_path / "tests" / "deeper"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # as below
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "tests"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    (found,) = gpu_tests.counted(report).items()
    assert found[0] == "tests/deeper/test_some.py"
    assert {key: value for key, value in found[1].items() if key != "seconds"} == {
        "passed": 2,
        "skipped": 1,
        "failed": 2,
    }


EXAMPLES = """
def test_passes(record_property): record_property("example", "one in JAX")
def test_fails(record_property):
    assert False
    record_property("example", "another")
"""


def test_examples_that_passed_are_known_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_some.py").write_text(EXAMPLES)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # as below
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert list(gpu_tests.examples_in(report)) == ["one in JAX"]


GPU_TESTS = """
import os
import pytest

pytestmark = pytest.mark.gpu

def test_passes(record_property): record_property("example", "one")
@pytest.mark.parametrize("fails", [False, True])
def test_may_fail(fails): assert not (fails and {fails})
"""


def test_each_file_runs_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # these take longer to load than the tests do
    monkeypatch.setattr(
        machine, "provenance", lambda commit: {"gpu": "g", "driver": "d", "date": "t", "commit": commit}
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "tests" / "ops").mkdir(parents=True)
    for name, fails in (("test_a", False), ("ops/test_b", True), ("ops/test_kernels", False)):
        (tmp_path / "tests" / f"{name}.py").write_text(GPU_TESTS.format(fails=fails))
    (tmp_path / "tests" / "test_on_the_cpu.py").write_text("def test_passes(): pass\n")
    status, found = gpu_tests.run([], "abc", 2)
    assert status == 1
    assert sorted((result.file, result.passed, result.failed, result.commit) for result in found) == [
        ("tests/ops/test_b.py", 2, 1, "abc"),
        ("tests/test_a.py", 3, 0, "abc"),
    ]
    current = examples.content_hash()
    assert [(list(result.examples), result.examples_hash) for result in found] == [(["one"], current)] * 2
    status, found = gpu_tests.run([gpu_tests.CASES], None, 2)
    assert (status, [result.file for result in found]) == (0, [gpu_tests.CASES])
    for path in ("tests/test_on_the_cpu.py", "tests/nowhere"):
        with pytest.raises(InputError, match="PATH"):
            gpu_tests.files_of([path])
    (tmp_path / "tests" / "test_a.py").write_text(GPU_TESTS.format(fails=False) + "def test_dies(): os.abort()\n")
    status, found = gpu_tests.run(["tests/test_a.py"], None, 2)
    assert status
    assert [(result.file, result.failed) for result in found] == [("tests/test_a.py", 1)]


# Files of which no run is on record, with the operators whose kernels they are for: once evidence has one, its file is
# due. That of a function of several operators, whose kernels have run without it, names none.
NEVER_RAN: dict[str, tuple[str, ...]] = {}


def test_every_file_is_on_record(request: pytest.FixtureRequest) -> None:
    """With how many of its tests have passed, and on what; that is of these sources only as `--show` says."""
    every = gpu_tests.read()
    results = {result.file: result for result in every}
    found = set((machine.ROOT / "tests").rglob("test_*.py"))
    known = {machine.ROOT / name for name in (*results, *NEVER_RAN, gpu_tests.CASES)}
    # What this run has collected itself is not collected again, which takes ten seconds.
    collected, with_gpu_tests = request.config.stash[COLLECTED]
    assert sorted((found & with_gpu_tests) - known) == []
    others = sorted(str(file.relative_to(machine.ROOT)) for file in found - known - collected)
    if others:  # without a framework the files that need it are not found to have any
        with pytest.raises(InputError, match=r"expected folders or files with tests for a GPU"):
            gpu_tests.files_of(others)
    assert not results.keys() & NEVER_RAN.keys()
    of_never = {name for names in NEVER_RAN.values() for name in names}
    ran = [row for row in evidence.support_rows() if row.operator in of_never and row.found is not None]
    assert ran == [], "test files of kernels that a GPU has run belong on record"
    assert [name for name in results if not (machine.ROOT / name).exists()] == []
    assert [result.file for result in every if result.failed] == []


def test_a_run_renews_what_it_went_through_and_leaves_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "gpu_tests.json"
    assert gpu_tests.read(file) == []
    other = replace(RESULT, file="tests/test_a.py")
    gpu_tests.write([RESULT, other], file)
    renewed = replace(RESULT, passed=4, date="2026-11-27")
    gpu_tests.write([renewed], file)
    assert gpu_tests.read(file) == [other, renewed]
    with_examples = replace(other, examples={"one": 2.0}, examples_hash="some")
    gpu_tests.write([with_examples], file)
    assert gpu_tests.read(file) == [with_examples, renewed]


def test_tests_of_transformers_are_on_record_for_each_of_its_versions(tmp_path: Path) -> None:
    file = tmp_path / "gpu_tests.json"
    older, newer = ({"python": "3.12", "transformers": version} for version in ("5.17.0", "5.24.0"))
    named = replace(RESULT, file="tests/interop/test_transformers_x.py")
    gpu_tests.write([replace(named, versions=older), replace(RESULT, versions=older)], file)
    gpu_tests.write([replace(named, versions=newer), replace(RESULT, versions=newer)], file)
    found = [(result.file, result.versions["transformers"]) for result in gpu_tests.read(file)]
    assert found == [(named.file, "5.17.0"), (named.file, "5.24.0"), (RESULT.file, "5.24.0")]


def test_a_run_that_skips_all_of_a_file_leaves_what_it_had(tmp_path: Path) -> None:
    """Tests of several GPUs are skipped on one."""
    file = tmp_path / "gpu_tests.json"
    two = replace(RESULT, devices=2)
    gpu_tests.write([two], file)
    gpu_tests.write([replace(RESULT, passed=0, skipped=4), replace(RESULT, file="tests/test_y.py", passed=0)], file)
    assert gpu_tests.read(file) == [two, replace(RESULT, file="tests/test_y.py", passed=0)]
    failed = replace(RESULT, passed=0, failed=1)
    gpu_tests.write([failed], file)
    assert gpu_tests.read(file)[0] == failed


@pytest.mark.parametrize("page", ["docs/torch.md", "docs/jax.md"])
def test_what_pages_say_of_several_gpus_is_on_record(page: str) -> None:
    said = "several GPUs" in (machine.ROOT / page).read_text(encoding="utf-8").replace("\n", " ")
    (result,) = (each for each in gpu_tests.read() if each.file == "tests/interop/test_parallel.py")
    assert said and result.passed and not result.failed and result.devices > 1


def test_any_source_changes_the_hash(tmp_path: Path) -> None:
    for name in ("cupymla/a.py", "cuda/a.cuh", "cuda/third_party/b.cuh", "scripts/examples/a.py", "tests/test_a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    before = gpu_tests.content_hash(tmp_path)
    seen = {before}
    for name in ("cupymla/a.py", "cuda/a.cuh", "scripts/examples/a.py", "tests/test_a.py"):
        (tmp_path / name).write_text("2")
        seen.add(gpu_tests.content_hash(tmp_path))
    assert len(seen) == 5
    (tmp_path / "cuda/third_party/b.cuh").write_text("2")
    assert gpu_tests.content_hash(tmp_path) in seen


def test_the_table_says_what_is_of_other_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "gpu_tests.json"
    now = replace(RESULT, file="tests/test_now.py", content_hash=gpu_tests.content_hash())
    gpu_tests.write([RESULT, now], file)
    assert gpu_tests.main(["--show", "--out", str(file), "tests/test_tensor_gpu.py"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "tests/test_" in line]
    told = [("yes" in line, "no " in line, "not run" in line) for line in lines]
    assert told == [(True, False, False), (False, True, False), (False, True, True)]


def test_versions_are_those_that_are_installed() -> None:
    found = gpu_tests.versions()
    assert {"python", "numpy"} <= set(found)
    assert (machine.ROOT / "pyproject.toml").exists()


@pytest.mark.skipif(driver.available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_tests.main([]) == 2
    assert "there is none" in capsys.readouterr().err
