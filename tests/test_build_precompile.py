"""Kernels compiled ahead land in the cache, and each that fails is reported rather than raised."""

from __future__ import annotations

from pathlib import Path

import pytest
from build_kit import SPILLING, plain, private, python, written

from cupymla import build
from cupymla.build import KernelSource, folders, precompile

pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private(tmp_path, monkeypatch)


@pytest.fixture
def kernel(tmp_path: Path) -> KernelSource:
    return plain(tmp_path / "src")


def test_precompile_fills_the_cache_and_reports_each(tmp_path: Path, kernel: KernelSource) -> None:
    spilling = written(tmp_path / "src", "spilling.cu", SPILLING, "spilling", defines=(("N", 1),))
    broken = written(tmp_path / "src", "broken.cu", "no CUDA at all\n", "broken")
    seen: list[precompile.Outcome] = []
    wanted = [broken, kernel, spilling, kernel]
    outcomes = precompile.precompile(wanted, jobs=2, progress=seen.append)
    assert [outcome.source for outcome in outcomes] == [broken, kernel, spilling]
    assert sorted(outcome.source.entry for outcome in seen) == ["broken", "plain", "spilling"]
    assert [outcome.ok for outcome in outcomes] == [False, True, True]
    assert f"{tmp_path}/src/broken.cu(1)" in outcomes[0].error
    assert outcomes[1].resources is not None
    assert (outcomes[1].cached, outcomes[1].resources.spills) == (False, False)
    assert outcomes[2].resources is not None
    assert outcomes[2].resources.spills
    assert build.cubin(kernel).cached
    assert [outcome.cached for outcome in precompile.precompile([kernel], jobs=1)] == [True]


def test_what_the_cache_does_not_keep_is_told_once(
    tmp_path: Path, kernel: KernelSource, capfd: pytest.CaptureFixture[str]
) -> None:
    """Compiled all the same, but not ahead of anything; and workers say so where nobody reads it."""
    layer = folders.location()
    assert layer
    (layer / kernel.arch).write_text("a file where the folder should be")
    other = written(tmp_path / "src", "other.cu", SPILLING, "spilling")
    outcomes = precompile.precompile([kernel, other], jobs=1)
    assert [(outcome.ok, outcome.kept) for outcome in outcomes] == [(True, False)] * 2
    assert capfd.readouterr().err.count("are not used") == 1
    (layer / kernel.arch).unlink()
    assert [outcome.kept for outcome in precompile.precompile([kernel])] == [True]


def test_precompile_can_refuse_spills(tmp_path: Path) -> None:
    (outcome,) = precompile.precompile([written(tmp_path, "k.cu", SPILLING, "spilling")], fail_on_spill=True)
    assert "spills registers" in outcome.error


def test_precompile_reports_a_worker_that_dies(kernel: KernelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "_WORKER", "import os; os._exit(3)")
    (outcome,) = precompile.precompile([kernel])
    assert not outcome.ok
    assert "died (3)" in outcome.error


def test_precompile_needs_nothing_of_the_callers_main(kernel: KernelSource) -> None:
    # No `if __name__ == "__main__"` guard, as in a notebook or a short script.
    code = (
        "import sys; from cupymla.build import KernelSource; from cupymla.build.precompile import precompile\n"
        "print([o.ok for o in precompile([KernelSource('plain.cu', 'plain', root=sys.argv[1])])])"
    )
    done = python(code, kernel.root)
    assert done.stdout.strip() == "[True]", done.stderr
