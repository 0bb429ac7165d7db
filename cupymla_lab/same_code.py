"""Keeps evidence of a kernel whose sources have changed in nothing that a compiler sees, such as a comment.

    python -m cupymla_lab same-code OP KERNEL SM --ran CHECKOUT
    python -m cupymla_lab same-code OP KERNEL SM --ran CHECKOUT --emulated OTHER
    python -m cupymla_lab same-code OP KERNEL SM --ran CHECKOUT --renamed OLD=NEW ...
    python -m cupymla_lab same-code OP KERNEL SM --ran CHECKOUT --were FILE

CHECKOUT is one of the sources that ran. Every variant is compiled from both. Where all have the same PTX, or the same
machine code and constants, and the same launch facts, the evidence is of the present sources as well. Of a kernel that
was emulated, what the emulator makes of its PTX is compared instead.

The second form is for a kernel that was emulated while it was compiled for target OTHER. The evidence is carried over
to SM, and says from where. The third is for kernels, files and launch facts that had other names in CHECKOUT. The
evidence of a kernel that had another name is moved to its present one. The fourth is for a kernel whose variants had
other files or definitions. FILE is a JSON list of pairs, each a present variant and one that it was in CHECKOUT, and
each of these [path, entry, [[definition, value], ...]]. All pairs are compared of every variant of the kernel and its
units. A launch fact that is no longer there decides nothing, so that only those that are there have to be as they were.
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

Were = Mapping[KernelSource, Sequence[KernelSource]]
"""What variants were in the checkout that ran, each one or several."""

Code = tuple[list[str], dict[str, int]]
"""Lines of code, and launch facts."""

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
    names = getattr(kernel, "names", (name,))
    sources = [source for source in operators.variants(entry, [arch]) if source.entry in names]
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


def were(text: str, checkout: Path, arch: str) -> dict[KernelSource, list[KernelSource]]:
    """What `--were` was given: variants for a target, and those of the checkout that they were. Raises InputError."""

    def read(path: str, entry: str, defines: Sequence[Sequence[str | int]]) -> KernelSource:
        return KernelSource(path, entry, tuple((str(name), value) for name, value in defines), arch)

    found: dict[KernelSource, list[KernelSource]] = {}
    try:
        for now, then in json.loads(text):
            found.setdefault(read(*now), []).append(replace(read(*then), root=str(checkout / "cuda")))
    except (TypeError, ValueError) as error:
        expected = "pairs of [path, entry, [[definition, value], ...]]"
        raise InputError("--were", expected, f"what cannot be read so: {error}") from error
    return found


def as_entry(text: str, old: str, new: str) -> str:
    """PTX, or the name of a section, of a kernel by another name: whole words alone, and those of its parameters."""
    return re.sub(rf"\b{old}(?=(_param_\d+)?\b)", new, text)


def differing(
    sources: Sequence[KernelSource], checkout: Path, renames: Renames = (), known: Were | None = None
) -> list[KernelSource]:
    """Variants that the two checkouts compile to different code; `known`: what they were. Raises CompileError.

    The same PTX is the same code; only where it differs is machine code compared.
    """
    if known is not None:
        return [source for source in sources if not all(_compiled_alike(source, each) for each in known[source])]
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


def _compiled_alike(source: KernelSource, there: KernelSource) -> bool:
    """Whether a variant is compiled to the code of one that had another entry, with the launch facts that it has."""
    names = there.entry, source.entry
    if _alike(compiled_code(build.ptx(source)), compiled_code(as_entry(build.ptx(there), *names))):
        return True
    made, other = build.cubin(source), build.cubin(there)
    code = {as_entry(section, *names): part for section, part in Image(other.data).machine_code().items()}
    return Image(made.data).machine_code() == code and made.facts.items() <= other.facts.items()


def _alike(made: Code, other: Code) -> bool:
    return made[0] == other[0] and made[1].items() <= other[1].items()


def _renamed(by_name: Mapping[str, Any], renames: Renames) -> dict[str, Any]:
    return {present(name, renames): value for name, value in by_name.items()}


def compiled_code(ptx: str, renames: Renames = ()) -> Code:
    """What ptxas is given of a kernel: the lines of its PTX that count, and its launch facts by their present names."""
    held = {name: _bytes(size, values) for name, size, values in _FACTS.findall(ptx)}
    return _lines_that_count(ptx), _renamed(facts_of(held.get), renames)


def emulated_code(ptx: str, renames: Renames = ()) -> Code:
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
    sources: Sequence[KernelSource], there: Mapping[Variant, str], renames: Renames = (), known: Were | None = None
) -> list[KernelSource]:
    """Variants of which the emulator makes other code than of PTX from elsewhere, or that are not there; `known`: what
    they were there."""

    def alike(source: KernelSource, other: KernelSource) -> bool:
        text = there.get((other.path, other.defines))
        if text is None:
            return False
        text = as_entry(text, other.entry, source.entry)
        return _alike(emulated_code(build.ptx(source)), emulated_code(text))

    if known is not None:
        return [source for source in sources if not all(alike(source, other) for other in known[source])]
    found = []
    for source in sources:
        text = there.get((source.path, source.defines))
        if text is None or emulated_code(build.ptx(source)) != emulated_code(text, renames):
            found.append(source)
    return found


def keep(
    entry: OperatorEntry,
    kernel: KernelEntry,
    checkout: Path,
    emulated: str = "",
    renames: Renames = (),
    pairs: str | None = None,
) -> None:
    """Make a kernel's evidence one of the present sources.

    Args:
        entry: the operator.
        kernel: its kernel.
        checkout: one of the sources that ran.
        emulated: the target that they were emulated for, where it is another one.
        renames: what has other names in the checkout.
        pairs: what the variants were there, as `--were` has it.

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
    sources = [source for source in operators.variants(entry, [kernel.arch]) if source.entry in kernel.names]
    known = None if pairs is None else were(pairs, checkout, kernel.arch)
    if known is not None and (missing := [str(source) for source in sources if source not in known]):
        raise InputError("--were", "all variants of the kernel and its units", f"none for {missing[0]}")
    if found.ran == "emulated":
        there = ptx_there(entry, ran_as, checkout, renames)
        kind, changed = "emulated", differing_emulated(sources, there, renames, known)
    else:
        kind, changed = "machine", differing(sources, checkout, renames, known)
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
    parser.add_argument("--were", type=Path, metavar="FILE", help="which variants of CHECKOUT the present ones were")
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
        pairs = None if options.were is None else options.were.read_text(encoding="utf-8")
        keep(*kernels[wanted], options.ran, options.emulated, renames_of(options.renamed), pairs)
    except (CupymlaError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    exit_with(main)
