"""What kernels were compiled to: registers, spills, CTAs per SM, instructions; of two folders of sources side by side.

    python -m cupymla_lab machine-code OP --arch SM [--define NAME=VALUE ...] [--baseline CUDA ...] [--out FOLDER]

Needs no GPU. Instructions want nvdisasm, of a CUDA toolkit or of the wheel nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cupymla import arch as arches
from cupymla import build
from cupymla.arch import Arch
from cupymla.build import KernelSource
from cupymla.build.cubin import Image
from cupymla.build.precompile import precompile
from cupymla.cli.terminal import exit_with
from cupymla.errors import CupymlaError, InputError
from cupymla.ops import registry
from cupymla.testing import operators

WHEEL = "nvidia-cuda-nvdisasm"
MOST_CHANGES = 12

# Per SM: registers, in how many parts, each with warps of its own, and in which numbers a warp gets them; what each CTA
# takes of shared memory beside its own; threads and CTAs. Source: CUDA C++ Programming Guide, "Compute Capabilities";
# cuda_occupancy.h for the parts; shared memory of an SM is 1 KB more than a block can have.
_REGISTERS, _PARTS, _WARP_REGISTERS, _CTA_SMEM = 65536, 4, 256, 1024
_THREADS, _CTAS = {(8, 9): 1536}, {(8, 9): 24}
_USUAL_THREADS, _USUAL_CTAS = 2048, 32

_LINE = re.compile(r"^ */\*([0-9a-f]+)\*/ .*$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


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


def disassembled(target: str, images: Sequence[bytes]) -> list[str] | None:
    """SASS of each kernel, one instruction a line; None where there is no disassembler.

    It takes longer to start than for a kernel, so it is given the instructions of all of them behind each other:
    addresses count from the first kernel's.

    Args:
        target: such as "sm_90a", that of all kernels.
        images: their cubins.
    """
    program = disassembler()
    if program is None:
        return None
    code, places = bytearray(), []
    for image in images:
        first = len(code)
        code += b"".join(part for name, part in Image(image).machine_code().items() if name.startswith(".text."))
        places.append(range(first, len(code)))
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "code.bin"
        raw.write_bytes(code)
        # Its analysis of branches takes a quarter of the time; of these kernels it gives up, and says the same without.
        command = [program, "--binary", target.replace("sm_", "SM"), "--no-dataflow", str(raw)]
        text = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", errors="replace").stdout
    lines = [(int(found[1], 16), found[0]) for found in _LINE.finditer(text)]
    return ["\n".join(line for at, line in lines if at in place) for place in places]


def opcodes(sass: str) -> Counter[str]:
    """How often each instruction stands in a text of `disassembled`, without its modifiers, and without padding."""
    found = Counter(name.partition(".")[0] for name in _INSTRUCTION.findall(sass))
    del found["NOP"]
    return found


def ctas_per_sm(arch: Arch, threads: int, registers: int, smem_bytes: int) -> int:
    """How many CTAs of these needs an SM can hold, by arithmetic; 0 where one is too much for it."""
    warps = -(-threads // 32)
    warp_registers = -(-registers * 32 // _WARP_REGISTERS) * _WARP_REGISTERS
    # A launch is refused as if each part had to take as many warps as the fullest.
    if warp_registers * -(-warps // _PARTS) * _PARTS > _REGISTERS:
        return 0
    return min(
        _REGISTERS // _PARTS // warp_registers * _PARTS // warps,
        (arch.smem_bytes + _CTA_SMEM) // (smem_bytes + _CTA_SMEM),
        _THREADS.get(arch.capability, _USUAL_THREADS) // threads,
        _CTAS.get(arch.capability, _USUAL_CTAS),
    )


@dataclass(frozen=True, slots=True)
class Made:
    """What one variant was compiled to.

    Attributes:
        source: of the variant.
        registers: of a thread at launch; a kernel with `setmaxnreg` deals them out anew.
        spill_bytes: stored and loaded.
        stack_bytes: of a thread.
        smem_bytes: of a CTA, static and dynamic.
        ctas: that an SM can hold.
        sass: its instructions; None where there is no disassembler.
    """

    source: KernelSource
    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int
    ctas: int
    sass: str | None

    @property
    def cells(self) -> tuple[str, ...]:
        """As a row of the table."""
        numbers = (self.registers, self.spill_bytes, self.stack_bytes, self.smem_bytes, self.ctas)
        return (*map(str, numbers), "-" if self.sass is None else str(opcodes(self.sass).total()))


COLUMNS = ("registers", "spills", "stack", "shared", "CTAs/SM", "instructions")


def made_of(source: KernelSource, out: Path | None = None) -> Made:
    """Compile a variant and look at it; with a folder, its SASS is written there. Raises CompileError."""
    cubin = build.cubin(source)
    texts = disassembled(source.arch, [cubin.data])
    sass = texts[0] if texts else None
    if out is not None and sass is not None:
        variant = "".join(f"-{name.removeprefix('CUPYMLA_').lower()}{value}" for name, value in source.defines)
        (out / f"{source.entry}-{source.arch}{variant}.sass").write_text(sass, encoding="utf-8")
    needs = cubin.resources
    threads = cubin.facts["threads"]
    smem = needs.static_smem_bytes + cubin.facts.get("smem_bytes", 0)
    return Made(
        source=source,
        registers=needs.registers,
        spill_bytes=needs.spill_store_bytes + needs.spill_load_bytes,
        stack_bytes=needs.stack_bytes,
        smem_bytes=smem,
        ctas=ctas_per_sm(arches.named(source.arch), threads, needs.registers, smem),
        sass=sass,
    )


def changes(old: str, new: str) -> str:
    """Which instructions of two texts are more or fewer, those of the largest difference first, then by name."""
    before, after = opcodes(old), opcodes(new)
    if before == after:
        return "the same code" if old == new else "as many of each instruction, other operands or another order"
    moved = sorted(before.keys() | after.keys(), key=lambda name: (-abs(after[name] - before[name]), name))
    told = [f"{name} {before[name]} -> {after[name]}" for name in moved if before[name] != after[name]]
    return ", ".join(told[:MOST_CHANGES]) + (", ..." if len(told) > MOST_CHANGES else "")


def show(sources: Sequence[KernelSource], folders: Sequence[Path], out: Path | None) -> None:
    """Print a table of these variants, each as it is here and as it is in other folders. Raises CompileError.

    With `out`, the SASS of what is here is written there, that of other folders into baseline-1, baseline-2, ... below.
    """
    others = [replace(source, root=str(folder.absolute())) for source in sources for folder in folders]
    precompile([*sources, *others])
    places = ["here", *map(str, folders)]
    width = max(map(len, places))
    print(" " * width, *(f"{name:>12}" for name in COLUMNS))
    for source in sources:
        print(" ".join((source.entry, source.arch, *(f"{name}={value}" for name, value in source.defines))))
        here = made_of(source, out)
        print(f"{places[0]:{width}}", *(f"{cell:>12}" for cell in here.cells))
        for number, (folder, place) in enumerate(zip(folders, places[1:], strict=True), 1):
            below = None if out is None else out / f"baseline-{number}"
            if below is not None:
                below.mkdir(exist_ok=True)
            other = made_of(replace(source, root=str(folder.absolute())), below)
            print(f"{place:{width}}", *(f"{cell:>12}" for cell in other.cells))
            if other.sass is not None and here.sass is not None:
                print(f"  {place} -> here: {changes(other.sass, here.sass)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when everything compiled, 1 when something did not."""
    parser = argparse.ArgumentParser(prog="python -m cupymla_lab machine-code", description=__doc__.splitlines()[0])
    parser.add_argument("operator", metavar="OP", choices=[entry.name for entry in registry.subjects()])
    parser.add_argument("--arch", action="append", metavar="SM", help="a target; repeatable (default: all)")
    parser.add_argument(
        "--define",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="only variants with this definition; repeatable",
    )
    parser.add_argument(
        "--baseline", action="append", default=[], type=Path, metavar="CUDA", help="another cuda/ folder; repeatable"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="write SASS, a file per variant; of other folders into baseline-1, baseline-2, ... below",
    )
    options = parser.parse_args(arguments)
    try:
        entry = registry.named(options.operator)
        sources = operators.variants(entry, options.arch)
        if not sources:
            raise InputError("--arch", "one of " + ", ".join(entry.targets), ", ".join(options.arch), entry.name)
        sources = operators.defining(sources, options.define)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
        show(sources, options.baseline, options.out)
    except InputError as error:
        parser.error(str(error))
    except CupymlaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    exit_with(main)
