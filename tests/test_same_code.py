"""Evidence outlives a change of words in a kernel's sources, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cupymla import build, evidence
from cupymla.build.source import KernelSource, cuda_root
from cupymla.errors import InputError
from cupymla.ops import registry
from cupymla.ops.nvfp4_gemv import plan
from cupymla.ops.registry import KernelEntry
from cupymla_lab import recorder, same_code

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
    monkeypatch.setattr(same_code, "differing", lambda sources, *_: list(sources)[:1])
    with pytest.raises(InputError, match="the same machine code"):
        same_code.keep(ENTRY, KERNEL, tmp_path)
    monkeypatch.setattr(same_code, "differing", lambda *_: [])
    same_code.keep(ENTRY, KERNEL, tmp_path)
    kept = evidence.read(folder / "kept.json")
    assert kept is not None and kept.same_code_as == "before"
    assert kept.content_hash == evidence.current_hash(ENTRY, KERNEL)
    row = evidence.Support("nvfp4_gemv", "nvfp4_gemv", "sm_90", True, kept)
    assert "its code has not" in evidence.told(row)


EMULATED = next(kernel for kernel in ENTRY.kernels if kernel.name == "nvfp4_gemv_tcgen05")


def test_what_was_emulated_for_another_target_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And only where all variants are emulated by the same code; what ran on a GPU of that target stays there."""
    monkeypatch.setattr(evidence, "path", lambda operator, kernel, where=tmp_path: where / f"{kernel.arch}.json")
    monkeypatch.setattr(evidence, "FOLDER", tmp_path)
    monkeypatch.setattr(recorder.write, "__defaults__", (tmp_path,))
    ran = evidence.Evidence(
        "nvfp4_gemv", EMULATED.name, "sm_100a", "before", "NVIDIA H200", "580", "nvrtc 13.0.88", 42, {}, "hardware", "d"
    )
    seen: list[str] = []

    def there(entry: object, kernel: KernelEntry, place: Path) -> str:
        seen.append(kernel.arch)
        return "before"

    def carry() -> None:
        same_code.keep(ENTRY, EMULATED, tmp_path, "sm_100a")

    monkeypatch.setattr(same_code, "hash_there", there)
    monkeypatch.setattr(same_code, "ptx_there", lambda *_: {})
    (tmp_path / "sm_100a.json").write_text(json.dumps(asdict(ran)))
    with pytest.raises(InputError, match="'--emulated': expected a target whose kernel was emulated"):
        carry()
    emulated = replace(ran, ran="emulated", of=42, how="modes: eager", emulator="digest")
    (tmp_path / "sm_100a.json").write_text(json.dumps(asdict(emulated)))
    with pytest.raises(InputError, match="the same emulated code, got 4 others"):
        carry()
    monkeypatch.setattr(same_code, "differing_emulated", lambda *_: [])
    carry()
    assert set(seen) == {"sm_100a"}
    kept = evidence.read(tmp_path / "sm_100f.json")
    present = evidence.current_hash(ENTRY, EMULATED)
    assert present is not None
    assert kept == replace(
        emulated, arch="sm_100f", content_hash=present, same_code_as="before", carried_from="sm_100a"
    )
    row = evidence.Support("nvfp4_gemv", EMULATED.name, "sm_100f", True, kept)
    assert row.status == "emulated" and "as sm_100a, emulated by the same code" in evidence.told(row)


@pytest.mark.compile
def test_code_is_the_emulators_and_not_the_targets() -> None:
    """The spellings of a target do not matter, nor where sources lie; what is multiplied does."""
    source = next(source for source in plan.sources("sm_100f") if source.entry == EMULATED.name)
    text = build.ptx(source)
    other = text.replace("sm_100f", "sm_100a").replace(".block16", ".scale_vec::4X").replace("/cuda/", "/elsewhere/")
    assert other.count(".scale_vec::4X") == 4
    variant = source.path, source.defines
    assert same_code.differing_emulated([source], {variant: other}) == []
    turned = other.replace("tcgen05.commit", "tcgen05.wait::ld.sync.aligned; tcgen05.commit", 1)
    assert same_code.differing_emulated([source], {variant: turned}) == [source]
    assert same_code.differing_emulated([source], {}) == [source]


VARIABLES = """
.version 8.8
.target sm_100f
.address_size 64
.global .align 4 .u32 first = 1;
.visible .global .align 4 .b8 second[4] = {1, 2};
.global .align 4 .u32 unused = 3;
.visible .entry k()
{
    .reg .b32 %r<3>;
    ld.global.u32 %r1, [first];
    ld.global.u32 %r2, [second];
    ret;
}
"""


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("first = 1;\n", "first = 1;\n.global .align 4 .u32 another;\n", True),
        (".global .align 4 .u32 unused = 3;\n", "", True),
        ("unused = 3", "unused = 4", True),
        ("first = 1", "first = 2", False),
        ("{1, 2}", "{1, 3}", False),
    ],
)
def test_variables_count_where_an_instruction_names_them(old: str, new: str, same: bool) -> None:
    assert old in VARIABLES
    other = VARIABLES.replace(old, new)
    for code in (same_code.emulated_code, same_code.compiled_code):
        assert (code(VARIABLES) == code(other)) == same


def test_the_order_of_variables_does_not_count() -> None:
    lines = VARIABLES.splitlines()
    lines[4], lines[5] = lines[5], lines[4]
    assert same_code.emulated_code(VARIABLES) == same_code.emulated_code("\n".join(lines))
    assert same_code.compiled_code(VARIABLES) == same_code.compiled_code("\n".join(lines))


@pytest.mark.compile
def test_launch_facts_count() -> None:
    text = build.ptx(SWIZZLE)
    made = build.cubin(SWIZZLE)
    assert same_code.compiled_code(text)[1] == dict(made.facts) != {}
    number = re.search(r"cupymla_fact_values\[\d+\] = \{\d+", text)
    assert number is not None
    other = text.replace(number[0], number[0][:-1] + str((int(number[0][-1]) + 1) % 10))
    assert same_code.compiled_code(other)[0] == same_code.compiled_code(text)[0]
    assert same_code.compiled_code(other) != same_code.compiled_code(text)


def test_a_checkout_tells_the_hash_of_its_own_sources() -> None:
    root = Path(same_code.__file__).resolve().parents[1]
    assert same_code.hash_there(ENTRY, KERNEL, root) == evidence.current_hash(ENTRY, KERNEL)


def test_a_kernel_that_there_is_not_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert same_code.main(["nvfp4_gemv", "nothing", "sm_90", "--ran", "."]) == 2
    assert "python -m cupymla list" in capsys.readouterr().err


FORMER = "nvfp4_former"
RENAMES = ((FORMER, "nvfp4_swizzle"),)


def test_names_of_the_checkout_that_ran_become_the_present_ones(tmp_path: Path) -> None:
    """And back: its kernels are compiled under the names that they had."""
    source = replace(SWIZZLE, path="nvfp4_gemv/sm80/nvfp4_swizzle.cu")
    there = same_code.former(source, tmp_path, RENAMES)
    assert (there.path, there.entry, there.defines) == (f"nvfp4_gemv/sm80/{FORMER}.cu", FORMER, source.defines)
    assert there.root == str(tmp_path / "cuda")
    assert same_code.present(f".entry {FORMER}(.param {FORMER}_param_0)", RENAMES).count("nvfp4_swizzle") == 2
    with pytest.raises(InputError, match="--renamed"):
        same_code.renames_of(["old="])


@pytest.mark.compile
@pytest.mark.parametrize("as_machine_code", [False, True])
def test_a_kernel_of_another_name_has_the_same_code(
    as_machine_code: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its PTX, and in sections of machine code, which are named after kernels. No other change hides behind it."""
    names = edited(tmp_path / "names", "nvfp4_swizzle(", f"{FORMER}(")
    file = names / "cuda" / SWIZZLE.path
    numbers = tmp_path / "numbers"
    shutil.copytree(names, numbers)
    text = file.read_text()
    assert "(params.columns + 3) / 4" in text
    (numbers / "cuda" / SWIZZLE.path).write_text(
        text.replace("(params.columns + 3) / 4", "(params.columns + 4) / 4", 1)
    )
    if as_machine_code:
        monkeypatch.setattr(same_code, "compiled_code", lambda *_: object())
    assert same_code.differing([SWIZZLE], names, RENAMES) == []
    assert same_code.differing([SWIZZLE], numbers, RENAMES) == [SWIZZLE]


@pytest.mark.compile
@pytest.mark.parametrize("as_machine_code", [False, True])
def test_a_variant_of_other_definitions_is_compared_with_what_it_was(
    as_machine_code: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch fact that has gone is none of it; one that is another is."""

    def differ(folder: str, number: str, facts: str, *definitions: tuple[str, int]) -> list[KernelSource]:
        made = edited(tmp_path / folder, "nvfp4_swizzle(", f"{FORMER}(")
        file = made / "cuda" / SWIZZLE.path
        text = file.read_text().replace("(params.columns + 3) / 4", f"(params.columns + {number}) / 4", 1)
        file.write_text(text.replace("CUPYMLA_LAUNCH_FACTS(", f"CUPYMLA_LAUNCH_FACTS({facts}", 1))
        now, then = (SWIZZLE.path, SWIZZLE.entry, SWIZZLE.defines), (SWIZZLE.path, FORMER, definitions)
        known = same_code.were(json.dumps([(now, then)]), made, "sm_90")
        return same_code.differing([SWIZZLE], made, known=known)

    if as_machine_code:
        monkeypatch.setattr(same_code, "compiled_code", lambda ptx: ([ptx], {}))
    assert differ("numbers", "4", "") == [SWIZZLE]
    if not as_machine_code:  # facts are data of the image as well
        assert differ("names", "N", "gone = 3, ", ("N", 3)) == []
        assert differ("facts", "3", "threads = 1, former_") == [SWIZZLE]


def test_pairs_have_to_be_of_every_variant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = evidence.read(evidence.path("nvfp4_gemv", KERNEL))
    assert found is not None
    monkeypatch.setattr(same_code, "hash_there", lambda entry, kernel, place: found.content_hash)
    with pytest.raises(InputError, match=r"all variants of the kernel and its units, got none for nvfp4_gemv"):
        same_code.keep(ENTRY, KERNEL, tmp_path, pairs="[]")
    for text in ("{", "[1]", '[["path"]]'):
        with pytest.raises(InputError, match="--were"):
            same_code.keep(ENTRY, KERNEL, tmp_path, pairs=text)


def test_evidence_of_a_kernel_moves_to_its_present_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = evidence.read(evidence.path("nvfp4_gemv", KERNEL))
    assert found is not None
    monkeypatch.setattr(evidence, "path", lambda operator, kernel, where=tmp_path: where / f"{kernel.name}.json")
    monkeypatch.setattr(evidence, "FOLDER", tmp_path)
    monkeypatch.setattr(recorder.write, "__defaults__", (tmp_path,))
    monkeypatch.setattr(same_code, "hash_there", lambda entry, kernel, place: "before")
    monkeypatch.setattr(same_code, "differing", lambda *_: [])
    former = replace(found, kernel="former", content_hash="before", same_code_as="")
    (tmp_path / "former.json").write_text(json.dumps(asdict(former)))
    same_code.keep(ENTRY, KERNEL, tmp_path, renames=[("former", "nvfp4_gemv")])
    assert [file.name for file in tmp_path.iterdir()] == ["nvfp4_gemv.json"]
    kept = evidence.read(tmp_path / "nvfp4_gemv.json")
    assert kept is not None and (kept.kernel, kept.same_code_as) == ("nvfp4_gemv", "before")
    assert kept.content_hash == evidence.current_hash(ENTRY, KERNEL)
