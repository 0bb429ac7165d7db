"""Evidence outlives a change of words in a kernel's sources, and nothing else."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cupymla import evidence
from cupymla.build.source import cuda_root
from cupymla.errors import InputError
from cupymla.ops import registry
from cupymla.ops.nvfp4_gemv import plan
from cupymla_lab import same_code

SWIZZLE = next(s for s in plan.sources("sm_90") if s.path.endswith("/swizzle.cu"))
ENTRY = registry.named("nvfp4_gemv")
KERNEL = next(kernel for kernel in ENTRY.kernels if (kernel.name, kernel.arch) == ("nvfp4_gemv", "sm_90"))


def edited(folder: Path, old: str, new: str) -> Path:
    """A checkout whose kernel has other words. Sources are read once a process, so each has a folder of its own."""
    shutil.copytree(cuda_root(), folder / "cuda", ignore=shutil.ignore_patterns("third_party"))
    file = folder / "cuda" / SWIZZLE.path
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    return folder


@pytest.mark.compile
def test_words_change_no_code_and_numbers_do(tmp_path: Path) -> None:
    words = edited(tmp_path / "words", "#include", "// A line more.\n#include")
    assert same_code.differing([SWIZZLE], words) == []
    numbers = edited(tmp_path / "numbers", "(params.columns + 3) / 4", "(params.columns + 4) / 4")
    assert same_code.differing([SWIZZLE], numbers) == [SWIZZLE]


def test_evidence_names_what_ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = evidence.read(evidence.path("nvfp4_gemv", KERNEL))
    assert found is not None
    folder = tmp_path / "evidence"
    folder.mkdir()
    monkeypatch.setattr(evidence, "path", lambda operator, kernel, where=folder: folder / "kept.json")
    (folder / "kept.json").write_text(json.dumps(asdict(replace(found, content_hash="before", same_code_as=""))))
    monkeypatch.setattr(same_code, "hash_there", lambda entry, kernel, place: "another")
    with pytest.raises(InputError, match="whose sources are others"):
        same_code.keep(ENTRY, KERNEL, tmp_path)
    monkeypatch.setattr(same_code, "hash_there", lambda entry, kernel, place: "before")
    monkeypatch.setattr(same_code, "differing", lambda sources, place: list(sources)[:1])
    with pytest.raises(InputError, match="the same machine code"):
        same_code.keep(ENTRY, KERNEL, tmp_path)
    monkeypatch.setattr(same_code, "differing", lambda sources, place: [])
    same_code.keep(ENTRY, KERNEL, tmp_path)
    kept = evidence.read(folder / "kept.json")
    assert kept is not None and kept.same_code_as == "before"
    assert kept.content_hash == evidence.current_hash(ENTRY, KERNEL)
    row = evidence.Support("nvfp4_gemv", "nvfp4_gemv", "sm_90", "hardware", True, kept)
    assert "its machine code has not" in evidence.status(row)


def test_a_kernel_that_there_is_not_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert same_code.main(["nvfp4_gemv", "nothing", "sm_90", "--ran", "."]) == 2
    assert "python -m cupymla list" in capsys.readouterr().err
