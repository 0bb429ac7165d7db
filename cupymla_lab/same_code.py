"""Keeps evidence of a kernel whose sources have changed in nothing that a compiler sees, such as a comment.

    python -m cupymla_lab same-code OP KERNEL SM --ran CHECKOUT

CHECKOUT is one of the sources that ran. Every variant is compiled from both, and where all have the same machine code,
constants and launch facts, the evidence is of the present sources as well.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cupymla import build, evidence
from cupymla.build.cubin import Image
from cupymla.build.source import KernelSource
from cupymla.cli.terminal import exit_with
from cupymla.errors import CupymlaError, InputError
from cupymla.ops import registry
from cupymla.ops.registry import KernelEntry, OperatorEntry
from cupymla.testing import operators

from . import recorder

_HASH_THERE = """
from cupymla.ops import registry
from cupymla.testing import evidence
entry = registry.named({operator!r})
print(evidence.current_hash(entry, next(k for k in entry.kernels if (k.name, k.arch) == ({kernel!r}, {arch!r}))))
"""


def hash_there(entry: OperatorEntry, kernel: KernelEntry, checkout: Path) -> str:
    """The content hash of a kernel in another checkout, by that checkout's own code."""
    text = _HASH_THERE.format(operator=entry.name, kernel=kernel.name, arch=kernel.arch)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(checkout)!r})" + text]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=checkout).stdout.strip()


def differing(sources: Sequence[KernelSource], checkout: Path) -> list[KernelSource]:
    """Variants that the two checkouts compile to different machine code. Raises CompileError."""
    found = []
    for source in sources:
        here, there = build.cubin(source), build.cubin(replace(source, root=str(checkout / "cuda")))
        if (Image(here.data).machine_code(), here.facts) != (Image(there.data).machine_code(), there.facts):
            found.append(source)
    return found


def keep(entry: OperatorEntry, kernel: KernelEntry, checkout: Path) -> None:
    """Make a kernel's evidence one of the present sources. Raises InputError where it cannot be."""
    file = evidence.path(entry.name, kernel)
    found = evidence.read(file)
    if found is None:
        raise InputError("KERNEL", "one that has evidence", f"none at {file}")
    ran = hash_there(entry, kernel, checkout.resolve())
    if ran not in (found.content_hash, found.same_code_as):
        raise InputError("--ran", "a checkout of the sources that ran", f"{checkout}, whose sources are others")
    sources = [source for source in operators.variants(entry, [kernel.arch]) if source.entry == kernel.name]
    changed = differing(sources, checkout.resolve())
    if changed:
        raise InputError(
            "--ran", "sources that compile to the same machine code", f"{len(changed)} others: {changed[0]}"
        )
    present = evidence.current_hash(entry, kernel) or ""
    recorder.write(replace(found, content_hash=present, same_code_as=found.same_code_as or found.content_hash))
    print(
        f"{len(sources)} variants of {kernel.name} for {kernel.arch} are the same: {file.name} is of these sources too"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 2 where evidence cannot be kept."""
    parser = argparse.ArgumentParser(prog="python -m cupymla_lab same-code", description=__doc__)
    parser.add_argument("operator", metavar="OP")
    parser.add_argument("kernel", metavar="KERNEL")
    parser.add_argument("arch", metavar="SM")
    parser.add_argument("--ran", type=Path, required=True, metavar="CHECKOUT")
    options = parser.parse_args(arguments)
    try:
        kernels = {
            (entry.name, kernel.name, kernel.arch): (entry, kernel)
            for entry in registry.OPERATORS
            for kernel in entry.kernels
        }
        wanted = (options.operator, options.kernel, options.arch)
        if wanted not in kernels:
            raise InputError("KERNEL", "one that `python -m cupymla list` names", " ".join(wanted))
        keep(*kernels[wanted], options.ran)
    except (CupymlaError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    exit_with(main)
