"""Keeps evidence of a kernel whose sources have changed in nothing that a compiler sees, such as a comment.

    python -m cupymla_lab same-code OP KERNEL SM --ran CHECKOUT
    python -m cupymla_lab same-code OP KERNEL SM --ran CHECKOUT --emulated OTHER
    python -m cupymla_lab same-code OP KERNEL SM --ran CHECKOUT --renamed OLD=NEW ...

CHECKOUT is one of the sources that ran. Every variant is compiled from both. Where all have the same PTX, or the same
machine code and constants, and the same launch facts, the evidence is of the present sources as well. Of a kernel that
was emulated, what the emulator makes of its PTX is compared instead.

The second form is for a kernel that was emulated while it was compiled for target OTHER. The evidence is carried over
to SM, and says from where. The third is for kernels, files and launch facts that had other names in CHECKOUT. The
evidence of a kernel that had another name is moved to its present one.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cupymla import build, evidence
from cupymla.build.cubin import Image, facts_of
from cupymla.build.source import KernelSource
from cupymla.cli.terminal import exit_with
from cupymla.errors import CupymlaError, InputError
from cupymla.ops import registry
from cupymla.ops.registry import KernelEntry, OperatorEntry
from cupymla.testing import operators

from . import recorder
from .emulate.translate import translate

Renames = Sequence[tuple[str, str]]
"""What had another name in the checkout that ran: (old, new) each, of kernels, files and launch facts."""

Variant = tuple[str, tuple[tuple[str, str | int], ...]]
"""What a variant is known by in every checkout: its unit and its definitions."""

_DEBUG = re.compile(r"^\s*\.section\s+\.debug_\w+\s*\{[^}]*\}", re.MULTILINE)
_NAME = re.compile(r"[\w$]+")
_VARIABLE = re.compile(r"(?:\.visible |\.weak )?\.(?:global|const)(?: \.\w+| \d+)* ([\w$]+)(?:\[\d*\])*(?: =.*)?;$")
_FACTS = re.compile(r"\.b8 (cupymla_fact_\w+)\[(\d+)\] = \{([\d, ]+)\};")

# What a checkout says of its own kernel: the hash of its sources, and, for a translation, the PTX of every variant.
_THERE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from cupymla import build
from cupymla.ops import registry
from cupymla.testing import operators
try:
    from cupymla import evidence
except ImportError:
    from cupymla.testing import evidence  # where it was before 2026-11-27
operator, name, arch = sys.argv[2:5]
entry = registry.named(operator)
kernel = next(k for k in entry.kernels if (k.name, k.arch) == (name, arch))
told = {"hash": evidence.current_hash(entry, kernel), "ptx": []}
if sys.argv[5:]:
    sources = [source for source in operators.variants(entry, [arch]) if source.entry == name]
    told["ptx"] = [(source.path, source.defines, build.ptx(source)) for source in sources]
print(json.dumps(told))
"""


def _said_there(operator: str, kernel: KernelEntry, checkout: Path, *more: str) -> dict[str, Any]:
    words = [str(checkout), operator, kernel.name, kernel.arch, *more]
    command = [sys.executable, "-c", _THERE, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", errors="replace", check=True, cwd=checkout)
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def hash_there(entry: OperatorEntry, kernel: KernelEntry, checkout: Path) -> str:
    """The content hash of a kernel in another checkout, by that checkout's own code."""
    return str(_said_there(entry.name, kernel, checkout)["hash"])


def ptx_there(entry: OperatorEntry, kernel: KernelEntry, checkout: Path, renames: Renames = ()) -> dict[Variant, str]:
    """The PTX of each variant of a kernel in another checkout, by that checkout's own code, under present names."""
    said = _said_there(entry.name, kernel, checkout, "ptx")["ptx"]
    return {
        (present(path, renames), tuple((name, value) for name, value in defines)): present(text, renames)
        for path, defines, text in said
    }


def renames_of(words: Sequence[str]) -> list[tuple[str, str]]:
    """What `--renamed` was given. Raises InputError."""
    renames = [(old, new) for old, _, new in (word.partition("=") for word in words)]
    if not all(old and new for old, new in renames):
        raise InputError("--renamed", "OLD=NEW", " ".join(words))
    return renames


def present(text: str, renames: Renames) -> str:
    """A text of the checkout that ran, with the names that things have here."""
    for old, new in renames:
        text = text.replace(old, new)
    return text


def former(source: KernelSource, checkout: Path, renames: Renames) -> KernelSource:
    """A kernel of this checkout as the other one has it."""
    back = [(new, old) for old, new in renames]
    path, name = present(source.path, back), present(source.entry, back)
    return replace(source, path=path, entry=name, root=str(checkout / "cuda"))


def differing(sources: Sequence[KernelSource], checkout: Path, renames: Renames = ()) -> list[KernelSource]:
    """Variants that the two checkouts compile to different code. Raises CompileError.

    The same PTX is the same code; only where it differs is machine code compared.
    """
    found = []
    for source in sources:
        there = former(source, checkout, renames)
        if compiled_code(build.ptx(source)) == compiled_code(present(build.ptx(there), renames), renames):
            continue
        made, other = build.cubin(source), build.cubin(there)
        codes = Image(made.data).machine_code(), _renamed(Image(other.data).machine_code(), renames)
        if codes[0] != codes[1] or dict(made.facts) != _renamed(other.facts, renames):
            found.append(source)
    return found


def _renamed(by_name: Mapping[str, Any], renames: Renames) -> dict[str, Any]:
    return {present(name, renames): value for name, value in by_name.items()}


def compiled_code(ptx: str, renames: Renames = ()) -> tuple[list[str], dict[str, int]]:
    """What ptxas is given of a kernel: the lines of its PTX that count, and its launch facts by their present names."""
    held = {name: _bytes(size, values) for name, size, values in _FACTS.findall(ptx)}
    return _lines_that_count(ptx), _renamed(facts_of(held.get), renames)


def emulated_code(ptx: str, renames: Renames = ()) -> tuple[list[str], dict[str, int]]:
    """What the emulator makes of a kernel: the lines of its translation that count, and its launch facts."""
    made = translate(ptx)
    return _lines_that_count(made.text), _renamed(made.facts, renames)


def _bytes(size: str, values: str) -> bytes:
    return bytes(map(int, values.split(","))).ljust(int(size), b"\0")


def _lines_that_count(text: str) -> list[str]:
    """PTX without what no instruction depends on.

    That is names of source files and places in them, variables that are not used, and the order of those that are.
    """
    lines = [line.strip() for line in _DEBUG.sub("", text).splitlines()]
    kept = [line for line in lines if line and not line.startswith((".loc", ".file", "//"))]
    named = Counter(word for line in kept for word in _NAME.findall(line))
    variables = {line: found[1] for line in kept if (found := _VARIABLE.match(line))}
    used = sorted(line for line, name in variables.items() if named[name] > 1)
    return [*used, *(line for line in kept if line not in variables)]


def differing_emulated(
    sources: Sequence[KernelSource], there: Mapping[Variant, str], renames: Renames = ()
) -> list[KernelSource]:
    """Variants of which the emulator makes other code than of PTX from elsewhere, or that are not there."""
    found = []
    for source in sources:
        text = there.get((source.path, source.defines))
        if text is None or emulated_code(build.ptx(source)) != emulated_code(text, renames):
            found.append(source)
    return found


def keep(entry: OperatorEntry, kernel: KernelEntry, checkout: Path, emulated: str = "", renames: Renames = ()) -> None:
    """Make a kernel's evidence one of the present sources.

    Args:
        entry: the operator.
        kernel: its kernel.
        checkout: one of the sources that ran.
        emulated: the target that they were emulated for, where it is another one.
        renames: what has other names in the checkout.

    Raises InputError where it cannot be.
    """
    checkout = checkout.resolve()
    back = [(new, old) for old, new in renames]
    ran_as = replace(kernel, name=present(kernel.name, back), arch=emulated or kernel.arch)
    file = evidence.path(entry.name, ran_as)
    found = evidence.read(file)
    if found is None:
        raise InputError("KERNEL", "one that has evidence", f"none at {file}")
    if emulated and found.ran != "emulated":
        raise InputError("--emulated", "a target whose kernel was emulated", f"{emulated}, where it was not")
    if hash_there(entry, ran_as, checkout) not in (found.content_hash, found.same_code_as):
        raise InputError("--ran", "a checkout of the sources that ran", f"{checkout}, whose sources are others")
    sources = [source for source in operators.variants(entry, [kernel.arch]) if source.entry == kernel.name]
    if found.ran == "emulated":
        there = ptx_there(entry, ran_as, checkout, renames)
        kind, changed = "emulated", differing_emulated(sources, there, renames)
    else:
        kind, changed = "machine", differing(sources, checkout, renames)
    if changed:
        raise InputError(
            "--ran", f"sources that compile to the same {kind} code", f"{len(changed)} others: {changed[0]}"
        )
    digest = evidence.current_hash(entry, kernel) or ""
    kept = replace(found, content_hash=digest, same_code_as=found.same_code_as or found.content_hash)
    kept = replace(kept, kernel=kernel.name, arch=kernel.arch, carried_from=found.carried_from or emulated)
    recorder.write(kept)
    written = evidence.path(entry.name, kernel).name
    if ran_as.name != kernel.name:
        file.unlink()
    print(f"{len(sources)} variants of {kernel.name} for {kernel.arch} are the same: {written} is of these sources")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 2 where evidence cannot be kept."""
    parser = argparse.ArgumentParser(prog="python -m cupymla_lab same-code", description=__doc__)
    parser.add_argument("operator", metavar="OP")
    parser.add_argument("kernel", metavar="KERNEL")
    parser.add_argument("arch", metavar="SM")
    parser.add_argument("--ran", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--emulated", default="", metavar="OTHER", help="the target that was emulated, if not SM")
    parser.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW", help="had a name; repeatable")
    options = parser.parse_args(arguments)
    try:
        kernels = {
            (entry.name, kernel.name, kernel.arch): (entry, kernel)
            for entry in registry.subjects()
            for kernel in entry.kernels
        }
        wanted = (options.operator, options.kernel, options.arch)
        if wanted not in kernels:
            raise InputError("KERNEL", "one that `python -m cupymla list` names", " ".join(wanted))
        keep(*kernels[wanted], options.ran, options.emulated, renames_of(options.renamed))
    except (CupymlaError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    exit_with(main)
