"""The headers our kernels include, gathered into one folder: for the wheel, and for machines without CUTLASS.

`python -m cupymla.build.pack OUTDIR` writes `OUTDIR/cuda` and `OUTDIR/cutlass`; CUPYMLA_CUTLASS=OUTDIR/cutlass then
serves a checkout on a machine that cannot have CUTLASS otherwise.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..errors import CupymlaError
from .source import KernelSource, closure, cuda_root, units, without_comments


def files() -> dict[str, Path]:
    """Every file to pack, as its place in the pack and where it lies now.

    All of `cuda/` but third-party code and pages, and each CUTLASS header in the include closure of a translation
    unit; each of those carries its licence in its first lines.
    Raises CompileError when CUTLASS is included and cannot be found.
    """
    root = cuda_root()
    packed: dict[str, Path] = {}
    for file in sorted(root.rglob("*")):
        name = file.relative_to(root)
        if file.is_file() and file.suffix != ".md" and name.parts[0] != "third_party":
            packed[f"cuda/{name.as_posix()}"] = file
    for unit in units():
        for member in closure(KernelSource(unit, entry="")):
            packed[f"{member.tree}/{member.name}"] = member.file
    return packed


COUNTS = "cases.json"
"""The file of evidence that says how many cases there are."""

UNTOLD = ("driver", "how", "emulator", "worst_errors", "repeats", "sanitizers")
"""What files of evidence hold and `cupymla list` does not tell."""


def runs(folder: Path) -> str:
    """One JSON object of all files of evidence in a folder, by their names, without what nobody is told of; and of the
    file that says how many cases there are."""
    told = {
        file.name: {
            name: type(value)() if name in UNTOLD else value
            for name, value in json.loads(file.read_text(encoding="utf-8")).items()
        }
        for file in sorted(folder.glob("*.sm_*.json"))
    }
    told[COUNTS] = json.loads((folder / COUNTS).read_text(encoding="utf-8"))
    return json.dumps(told, separators=(",", ":"))


def pack(folder: Path) -> int:
    """Copy `files()` into a folder, ours without comments; returns how many. Raises CompileError like `files`."""
    found = files()
    for name, file in found.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        content = file.read_bytes()
        target.write_bytes(without_comments(content) if name.startswith("cuda/") else content)
    return len(found)


def main(arguments: list[str]) -> int:
    """The command line: one argument, the folder to write. Returns the exit status."""
    if len(arguments) != 1:
        print("usage: python -m cupymla.build.pack OUTDIR", file=sys.stderr)
        return 2
    try:
        count = pack(Path(arguments[0]))
    except CupymlaError as error:
        print(f"cupymla: {error}", file=sys.stderr)
        return 1
    print(f"{count} files in {arguments[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
