"""A kernel is identified by what it is compiled from, wherever that lies, and by nothing else."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from build_kit import PLAIN, plain, private, python, written

from cupymla.build import KernelSource, content_hash, source
from cupymla.errors import CompileError, InputError


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private(tmp_path, monkeypatch)


def cutlass(folder: Path, text: str = "// one\n") -> Path:
    """A stand-in for CUTLASS."""
    (folder / "cutlass").mkdir(parents=True)
    (folder / "cute").mkdir()
    (folder / "cute" / "tensor.hpp").write_text(text)
    return folder


def names(kernel: KernelSource) -> set[str]:
    return {member.name for member in source.closure(kernel)}


def test_hash_is_the_same_wherever_the_sources_lie(tmp_path: Path) -> None:
    assert content_hash(plain(tmp_path / "a")) == content_hash(plain(tmp_path / "b" / "deeper"))


def test_hash_follows_a_header_edit(tmp_path: Path) -> None:
    kernel = plain(tmp_path)
    before = content_hash(kernel)
    (tmp_path / "part.cuh").write_text("#pragma once\n__device__ inline float part() { return 2.5f; }\n")
    assert content_hash(kernel) != before


def test_hash_ignores_files_that_are_not_included(tmp_path: Path) -> None:
    kernel = plain(tmp_path)
    before = content_hash(kernel)
    (tmp_path / "other.cuh").write_text("// unrelated\n")
    assert content_hash(kernel) == before


@pytest.mark.parametrize(
    "change",
    [{"defines": (("N", 1),)}, {"arch": "sm_100f"}, {"entry": "another"}],
    ids=lambda change: next(iter(change)),
)
def test_hash_follows_what_the_source_asks_for(tmp_path: Path, change: dict[str, object]) -> None:
    kernel = plain(tmp_path)
    assert content_hash(replace(kernel, **change)) != content_hash(kernel)  # type: ignore[arg-type]


def test_numbers_and_text_define_the_same(tmp_path: Path) -> None:
    kernel = plain(tmp_path)
    assert content_hash(replace(kernel, defines=(("N", 1),))) == content_hash(replace(kernel, defines=(("N", "1"),)))


@pytest.mark.parametrize(
    "line",
    [
        '#include "leaf.cuh"',
        "#include <leaf.cuh>",
        '  #  include\t"leaf.cuh"  // why',
        '#include"leaf.cuh"',
        '#include "leaf.cuh"\r',
        '#if 0\n#include "leaf.cuh"\n#endif',
        '#include "sub/../leaf.cuh"',
    ],
)
def test_closure_finds_every_spelling(tmp_path: Path, line: str) -> None:
    (tmp_path / "leaf.cuh").write_text("")
    assert "leaf.cuh" in names(written(tmp_path, "unit.cu", f"// first line\n{line}\n", "k"))


def test_closure_is_transitive_and_survives_cycles(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text('#include "b.cuh"\n')
    (tmp_path / "b.cuh").write_text('#include "a.cuh"\n#include "c.cuh"\n')
    (tmp_path / "c.cuh").write_text("")
    assert names(written(tmp_path, "unit.cu", '#include "a.cuh"\n', "k")) == {"unit.cu", "a.cuh", "b.cuh", "c.cuh"}


def test_quotes_look_beside_the_includer_first_and_angles_do_not(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "config.cuh").write_text("// outer\n")
    (tmp_path / "sub" / "config.cuh").write_text("// inner\n")
    assert names(written(tmp_path, "sub/q.cu", '#include "config.cuh"\n', "k")) == {"sub/q.cu", "sub/config.cuh"}
    assert names(written(tmp_path, "sub/a.cu", "#include <config.cuh>\n", "k")) == {"sub/a.cu", "config.cuh"}


def test_an_include_that_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="spelled by a macro"):
        content_hash(written(tmp_path, "unit.cu", '#define WHAT "x.cuh"\n#include WHAT\n', "k"))


def test_a_missing_unit_is_named(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"nowhere\.cu: no such file"):
        content_hash(KernelSource("nowhere.cu", "k", root=str(tmp_path)))


def test_a_unit_outside_its_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "unit.cu").write_text("")
    with pytest.raises(CompileError, match="lies outside"):
        content_hash(KernelSource("../unit.cu", "k", root=str(tmp_path / "root")))


def test_a_root_is_the_same_however_it_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--baseline ../before/cuda` is how the docs name one."""
    kernel = plain(tmp_path / "before")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for spelled in ("../before", "./../before/", f"{tmp_path}/here/../before"):
        assert content_hash(replace(kernel, root=spelled)) == content_hash(kernel)


def test_this_package_ships_its_own_root() -> None:
    assert (source.cuda_root() / "common" / "entry.cuh").is_file()


def test_the_cuda_python_namespace_is_not_taken_for_our_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In site-packages the neighbour called `cuda` belongs to cuda-python.
    (tmp_path / "cuda" / "bindings").mkdir(parents=True)
    packed = tmp_path / "cupymla" / "_packed"
    monkeypatch.setattr(source, "_PACKAGE", tmp_path / "cupymla")
    monkeypatch.setattr(source, "PACKED", packed)
    with pytest.raises(CompileError, match="lacks its CUDA sources"):
        source.cuda_root()
    (packed / "cuda" / "common").mkdir(parents=True)
    (packed / "cuda" / "common" / "entry.cuh").write_text("")
    assert source.cuda_root() == packed / "cuda"


def test_cutlass_is_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "checkout" / "cupymla"
    places = [
        ("CUPYMLA_CUTLASS", tmp_path / "asked"),
        ("submodule", tmp_path / "checkout" / "cuda" / "third_party" / "cutlass" / "include"),
        ("wheel", package / "_packed" / "cutlass"),
        ("nvidia-cutlass package", tmp_path / "site" / "cutlass_library" / "source" / "include"),
    ]
    monkeypatch.setattr(source, "_PACKAGE", package)
    monkeypatch.setattr(source, "PACKED", package / "_packed")
    monkeypatch.setattr(source, "package_folder", lambda name: tmp_path / "site" / name)
    for _, folder in places:
        cutlass(folder)
    monkeypatch.setenv("CUPYMLA_CUTLASS", str(places[0][1]))
    for where, folder in places:
        assert source.find_cutlass() == (where, folder)
        shutil.rmtree(folder)
        monkeypatch.delenv("CUPYMLA_CUTLASS", raising=False)
    assert source.find_cutlass() is None


def test_a_submodule_that_is_not_checked_out_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "cupymla"
    (tmp_path / "cuda" / "third_party" / "cutlass").mkdir(parents=True)
    monkeypatch.setattr(source, "_PACKAGE", package)
    monkeypatch.setattr(source, "PACKED", cutlass(package / "_packed" / "cutlass").parent)
    found = source.find_cutlass()
    assert found is not None
    assert found[0] == "wheel"


def test_cutlass_may_be_named_by_its_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cutlass(tmp_path / "cutlass" / "include")
    monkeypatch.setenv("CUPYMLA_CUTLASS", str(tmp_path / "cutlass"))
    assert source.find_cutlass() == ("CUPYMLA_CUTLASS", folder)


def test_cutlass_is_followed_however_it_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers that were not followed would not be in the hash, and a kernel of other ones would be taken."""
    kernel = written(tmp_path / "unit", "unit.cu", "#include <cute/tensor.hpp>\n", "k")
    cutlass(tmp_path / "cutlass")
    monkeypatch.setenv("CUPYMLA_CUTLASS", f"{tmp_path}/unit/../cutlass")
    assert "cute/tensor.hpp" in names(kernel)


def test_a_wrong_cutlass_folder_is_an_error_rather_than_a_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPYMLA_CUTLASS", str(tmp_path))
    with pytest.raises(InputError, match="CUPYMLA_CUTLASS"):
        source.find_cutlass()


def test_missing_cutlass_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "find_cutlass", lambda: None)
    kernel = written(tmp_path, "unit.cu", "#include <cute/tensor.hpp>\n", "k")
    with pytest.raises(CompileError, match=r"git submodule.*pip install nvidia-cutlass.*CUPYMLA_CUTLASS"):
        content_hash(kernel)
    assert content_hash(written(tmp_path, "plain.cu", "// needs no CUTLASS\n", "k"))


def test_hash_follows_cutlass_by_content_not_by_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = written(tmp_path, "unit.cu", "#include <cute/tensor.hpp>\n", "k")
    hashes = []
    for place, text in (("a", "// one\n"), ("b", "// one\n"), ("c", "// another\n")):
        monkeypatch.setenv("CUPYMLA_CUTLASS", str(cutlass(tmp_path / place, text)))
        hashes.append(content_hash(kernel))
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_submodule_and_the_package_hash_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The submodule lies inside our own folder, the package elsewhere.
    hashes = []
    for root, place in (("a", "a/third_party/cutlass/include"), ("b", "site")):
        monkeypatch.setenv("CUPYMLA_CUTLASS", str(cutlass(tmp_path / place)))
        hashes.append(content_hash(written(tmp_path / root, "unit.cu", "#include <cute/tensor.hpp>\n", "k")))
    assert hashes[0] == hashes[1]


def test_macro_includes_inside_cutlass_are_its_own_business(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cutlass(tmp_path / "x", "#include CUDA_STD_HEADER(tuple)\n")
    monkeypatch.setenv("CUPYMLA_CUTLASS", str(folder))
    assert "cute/tensor.hpp" in names(written(tmp_path, "unit.cu", "#include <cute/tensor.hpp>\n", "k"))


def test_hashing_imports_neither_cupy_nor_cutlass(tmp_path: Path) -> None:
    plain(tmp_path)
    code = (
        "import sys; from cupymla.build import KernelSource, content_hash\n"
        "from cupymla.build.source import find_cutlass\n"
        "content_hash(KernelSource('plain.cu', 'plain', root=sys.argv[1])); find_cutlass()\n"
        "print([name for name in ('cupy', 'cutlass_library', 'numpy') if name in sys.modules])"
    )
    done = python(code, str(tmp_path))
    assert done.stdout.strip() == "[]", done.stderr


def test_the_translation_unit_counts_itself(tmp_path: Path) -> None:
    kernel = plain(tmp_path)
    before = content_hash(kernel)
    (tmp_path / "plain.cu").write_text(PLAIN + "// one more line\n")
    assert content_hash(kernel) != before


# Without comments -----------------------------------------------------------------------------------------------------


def test_comments_are_no_part_of_the_code(tmp_path: Path) -> None:
    text = "// What it is.\nint a = 1;  // one\n  // and more\nint b;\n"
    kernel = written(tmp_path, "unit.cu", text, "k")
    whole, code = content_hash(kernel), source.code_hash(kernel)
    written(tmp_path, "unit.cu", text.replace("What it is", "What it was"), "k")
    assert content_hash(kernel) != whole and source.code_hash(kernel) == code
    written(tmp_path, "unit.cu", "int a = 1;  // one\nint b;\n", "k")
    assert source.code_hash(kernel) == code
    written(tmp_path, "unit.cu", text.replace("= 1", "= 2"), "k")
    assert source.code_hash(kernel) != code


def test_no_comment_of_ours_is_in_the_middle_of_a_line_of_code() -> None:
    """A backslash would join it with the next one, or with the one before."""
    root = source.cuda_root()
    joined = []
    for file in sorted(root.rglob("*.cu*")):
        if "third_party" in file.parts:
            continue
        lines = file.read_text(encoding="utf-8").splitlines()
        for before, line in zip(["", *lines], lines, strict=False):
            if line.lstrip().startswith("//") and (before.endswith("\\") or line.endswith("\\")):
                joined.append(f"{file.relative_to(root)}: {line}")
        assert 'R"' not in file.read_text(encoding="utf-8"), "a raw string could have a line like that"
    assert joined == []
