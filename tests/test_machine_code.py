"""What kernels were compiled to is told truly, and two folders of sources are told apart."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cupymla import arch, build
from cupymla.build.source import cuda_root
from cupymla.cli import main as cli
from cupymla.errors import InputError
from cupymla.ops import registry
from cupymla.testing import operators
from cupymla_lab import machine_code

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA 0x50 ;
        /*0020*/             @UP1  UIADD3 UR4, UR4, 0x1, URZ ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0040*/                   LDC.64 R2, c[0x0][0x210] ;
        /*0050*/                   EXIT ;
        /*0060*/                   NOP ;
"""


def test_instructions_are_counted_without_guards_modifiers_and_padding() -> None:
    counts = {"LDC": 2, "BRA": 1, "UIADD3": 1, "HGMMA": 1, "EXIT": 1}
    assert machine_code.opcodes(SASS) == counts
    assert machine_code.changes(SASS, SASS) == "the same code"
    assert machine_code.changes(SASS, SASS.replace("0x210", "0x218")).startswith("as many of each")
    fewer = SASS.replace("                   LDC.64", "                   ULDC.64")
    assert machine_code.changes(SASS, fewer) == "LDC 2 -> 1, ULDC 0 -> 1"


@pytest.mark.parametrize(
    ("target", "threads", "registers", "smem_bytes", "ctas"),
    [
        ("sm_90a", 384, 168, 1024, 1),  # 168 x 384 of 65536 registers: no second CTA
        ("sm_90a", 256, 128, 1024, 2),
        ("sm_90a", 256, 129, 1024, 1),  # a warp takes 136 x 32
        ("sm_90a", 128, 32, 113 * 1024, 2),  # 228 KB for both, each with 1 KB of its own
        ("sm_90a", 128, 32, 113 * 1024 + 1, 1),
        ("sm_90a", 1024, 32, 0, 2),
        ("sm_89", 1024, 32, 0, 1),
        ("sm_90a", 32, 16, 0, 32),
        ("sm_80", 1024, 65, 0, 0),
        # A warp's registers lie in one of four parts, as cuda_occupancy.h has it.
        ("sm_90a", 96, 224, 0, 2),  # two warps in each
        ("sm_90a", 288, 104, 0, 1),  # four
        ("sm_90a", 288, 184, 0, 0),  # three asked of each, for nine warps
    ],
)
def test_ctas_of_an_sm_by_hand(target: str, threads: int, registers: int, smem_bytes: int, ctas: int) -> None:
    assert machine_code.ctas_per_sm(arch.named(target), threads, registers, smem_bytes) == ctas


def test_variants_are_chosen_by_their_definitions() -> None:
    every = operators.variants(registry.named("nvfp4_gemv"), ["sm_90"])
    chosen = operators.defining(every, ["CUPYMLA_MXFP4=1", "CUPYMLA_MOST_COLUMNS=8", "CUPYMLA_WHOLE=0"])
    assert [dict(source.defines)["CUPYMLA_VECTORS"] for source in chosen] == [0, 1, 2]
    assert operators.defining(every, []) == every
    with pytest.raises(InputError, match="CUPYMLA_MOST_COLUMNS=1, CUPYMLA_MOST_COLUMNS=16, CUPYMLA_MOST_COLUMNS=8"):
        operators.defining(every, ["CUPYMLA_MOST_COLUMNS=2"])
    with pytest.raises(InputError, match="CUPYMLA_MXFP4"):
        operators.defining(every, ["kStages=4"])


VARIANT = ("CUPYMLA_MXFP4=0", "CUPYMLA_VECTORS=0", "CUPYMLA_MOST_COLUMNS=1", "CUPYMLA_WHOLE=0")
ONE = ("--arch", "sm_90", *(word for define in VARIANT for word in ("--define", define)))


@pytest.mark.compile
def test_a_change_is_seen_beside_what_it_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other folder has the streaming kernel bounded to half of the registers."""
    other = tmp_path / "cuda"
    for name in ("common", "nvfp4_gemv"):
        shutil.copytree(cuda_root() / name, other / name)
    kernel = other / "nvfp4_gemv" / "sm80" / "nvfp4_gemv.cu"
    text = kernel.read_text()
    changed = text.replace("ThisConfig::kThreads, 1)", "ThisConfig::kThreads, 2)")
    assert changed != text
    kernel.write_text(changed)
    out = tmp_path / "sass"
    words = ("nvfp4_gemv", *ONE, "--baseline", str(other), "--out", str(out))
    assert machine_code.main(words) == 0
    _, variant, here, there, *more = capsys.readouterr().out.splitlines()
    assert variant == "nvfp4_gemv sm_90 CUPYMLA_MXFP4=0 CUPYMLA_VECTORS=0 CUPYMLA_MOST_COLUMNS=1 CUPYMLA_WHOLE=0"
    assert here.startswith("here ") and there.startswith(str(other))
    registers = [int(line.removeprefix(str(other)).removeprefix("here").split()[0]) for line in (here, there)]
    assert registers[1] <= 64 < registers[0]
    if machine_code.disassembler() is not None:
        assert " -> here: " in more[0] and "the same code" not in more[0]
        texts = [
            (folder / "nvfp4_gemv-sm_90-mxfp40-vectors0-most_columns1-whole0.sass").read_text()
            for folder in (out, out / "baseline-1")
        ]
        assert all("EXIT" in text for text in texts) and texts[0] != texts[1]


@pytest.mark.compile
def test_kernels_are_told_apart_that_are_disassembled_at_once() -> None:
    every = operators.variants(registry.named("nvfp4_gemv"), ["sm_90"])
    images = [build.cubin(source).data for source in operators.defining(every, [VARIANT[0], *VARIANT[2:]])[:2]]
    texts = machine_code.disassembled("sm_90", images)
    if texts is None:
        pytest.skip(f"needs nvdisasm of the CUDA toolkit (pip install {machine_code.WHEEL})")
    alone = [text for image in images for text in machine_code.disassembled("sm_90", [image]) or ()]
    counts = [machine_code.opcodes(text) for text in texts]
    assert counts == [machine_code.opcodes(text) for text in alone]
    assert counts[0] != counts[1] and texts[0] == alone[0]


@pytest.mark.compile
def test_one_variant_is_compiled_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["precompile", "nvfp4_gemv", *ONE]) == 0
    assert capsys.readouterr().out.count("CUPYMLA_VECTORS=0") == 1


def test_what_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        machine_code.main(["nvfp4_gemv", "--arch", "sm_90a"])
    assert "one of sm_80, sm_89, sm_90, sm_100f, got sm_90a" in capsys.readouterr().err
