"""What a kernel is compiled from: its translation unit, everything that includes, and where outside headers come from.

A kernel is identified by content. The include closure is found by reading `#include` lines; conditional ones are
followed too, so the closure may hold a file the preprocessor skips but never lacks one it reads. Files of this
package and of CUTLASS are hashed; CCCL and CUDA headers belong to the compiler and are told apart by version
(see `compiler.Toolchain`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import config
from ..errors import CompileError, InputError

_PACKAGE = Path(__file__).resolve().parent.parent
PACKED = _PACKAGE / "_packed"

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*(?:<([^>\n]+)>|"([^"\n]+)"|([A-Za-z_]\w*))', re.MULTILINE)

CUTLASS_HELP = (
    "CUTLASS's headers were not found. Do one of: `git submodule update --init cuda/third_party/cutlass`; "
    "`pip install nvidia-cutlass==4.2.0.0`; set CUPYMLA_CUTLASS to a folder that holds `cutlass/` and `cute/`"
)


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One kernel to compile.

    Attributes:
        path: the translation unit, relative to `root`.
        entry: the name of its extern "C" kernel.
        defines: preprocessor definitions, (name, value) each.
        arch: the exact target, such as "sm_90a".
        root: the folder that `path` and includes are relative to; empty for this package's `cuda/`.
    """

    path: str
    entry: str
    defines: tuple[tuple[str, str | int], ...] = ()
    arch: str = "sm_90a"
    root: str = ""

    @property
    def file(self) -> Path:
        """The translation unit on this machine."""
        return (Path(self.root) if self.root else cuda_root()) / self.path

    def __str__(self) -> str:
        variant = "".join(f" {name}={value}" for name, value in self.defines)
        return f"{self.entry}{variant} for {self.arch}"


@dataclass(frozen=True, slots=True)
class Tree:
    """A folder of headers that `#include` lines are resolved against.

    Attributes:
        label: what the folder is called in hashes, which must not depend on where it lies.
        folder: where it lies.
    """

    label: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Member:
    """One file of an include closure.

    Attributes:
        tree: label of the tree that holds it.
        name: its path inside that tree, with forward slashes.
        file: where it lies.
        digest: SHA-256 of its content.
        code_digest: the same; of a file of ours, without lines that are comments.
    """

    tree: str
    name: str
    file: Path
    digest: str
    code_digest: str


def cuda_root() -> Path:
    """This package's CUDA sources: beside the package in a checkout, inside it in an installed wheel.

    Raises CompileError when neither is there.
    """
    # An installed cupymla has cuda-python's `cuda` namespace package as its neighbour; only ours has this file.
    for folder in (_PACKAGE.parent / "cuda", PACKED / "cuda"):
        if (folder / "common" / "entry.cuh").is_file():
            return folder
    raise CompileError(str(PACKED / "cuda"), "this installation lacks its CUDA sources; reinstall cupymla")


def package_folder(name: str) -> Path | None:
    """The folder of an installed package, found without importing it; None when it is not installed."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


def _plain(path: str | Path) -> Path:
    """The path from the root on and without "..", so that files that one way leads to are seen to lie below another."""
    return Path(os.path.normpath(Path(path).absolute()))


def _holds_cutlass(folder: Path) -> bool:
    return (folder / "cutlass").is_dir() and (folder / "cute").is_dir()


def find_cutlass() -> tuple[str, Path] | None:
    """Where CUTLASS's headers come from, in words, and their folder; None when they are nowhere.

    Searched in order: CUPYMLA_CUTLASS, the submodule, headers packed into an installed wheel, the PyPI package
    nvidia-cutlass. Raises InputError when CUPYMLA_CUTLASS is set to a folder without them.
    """
    asked = config.cutlass_dir()
    if asked is not None:
        for folder in (asked, asked / "include"):
            if _holds_cutlass(folder):
                return "CUPYMLA_CUTLASS", _plain(folder)
        raise InputError("CUPYMLA_CUTLASS", "a folder that holds `cutlass/` and `cute/`", asked)
    pypi = package_folder("cutlass_library")
    candidates = [
        ("submodule", _PACKAGE.parent / "cuda" / "third_party" / "cutlass" / "include"),
        ("wheel", PACKED / "cutlass"),
        *([("nvidia-cutlass package", pypi / "source" / "include")] if pypi else []),
    ]
    return next(((where, folder) for where, folder in candidates if _holds_cutlass(folder)), None)


def trees(source: KernelSource) -> tuple[Tree, ...]:
    """Where the includes of `source` are looked up, first to last: its own root, `cuda/`, CUTLASS if there."""
    own = cuda_root()
    found = [Tree("cuda", own)]
    if source.root and _plain(source.root) != own:
        found.insert(0, Tree("root", _plain(source.root)))
    cutlass = find_cutlass()
    if cutlass:
        found.append(Tree("cutlass", cutlass[1]))
    return tuple(found)


_COMMENT = re.compile(rb"^[ \t]*//.*\n?", re.MULTILINE)


def without_comments(text: bytes) -> bytes:
    """A source of ours without the lines that are comments. None of these is part of a macro."""
    return _COMMENT.sub(b"", text)


@functools.lru_cache(maxsize=4096)
def _read(file: str, modified_ns: int, size: int) -> tuple[str, str, tuple[tuple[str, bool], ...], bool]:
    """Digest, that of the code alone, includes as (name, quoted), and whether an include is spelled by a macro."""
    text = Path(file).read_bytes()
    matches = list(_INCLUDE.finditer(text))
    includes = tuple(((m[1] or m[2]).decode(), m[2] is not None) for m in matches if not m[3])
    digest, code_digest = (hashlib.sha256(some).hexdigest() for some in (text, without_comments(text)))
    return digest, code_digest, includes, any(m[3] for m in matches)


_read_lock = threading.Lock()


def _scan(file: Path) -> tuple[str, str, tuple[tuple[str, bool], ...], bool]:
    state = file.stat()
    with _read_lock:
        return _read(str(file), state.st_mtime_ns, state.st_size)


def _home(file: Path, where: tuple[Tree, ...]) -> Tree | None:
    """The innermost tree that holds a file: the submodule lies inside `cuda/` and is CUTLASS all the same."""
    holding = [tree for tree in where if file.is_relative_to(tree.folder)]
    return max(holding, key=lambda tree: len(tree.folder.parts), default=None)


def _locate(name: str, includer: Path | None, where: tuple[Tree, ...]) -> tuple[Tree, Path] | None:
    beside = [includer.parent] if includer else []
    for folder in (*beside, *(tree.folder for tree in where)):
        file = _plain(folder / name)
        if file.is_file():
            tree = _home(file, where)
            return (tree, file) if tree else None
    return None


def closure(source: KernelSource) -> tuple[Member, ...]:
    """The translation unit and every file of this package or CUTLASS that it may include, sorted by name.

    Raises CompileError when the unit is missing, when CUTLASS is included but absent, or when one of our files
    spells an include through a macro, which cannot be followed.
    """
    unit = _plain(source.file)
    if not unit.is_file():
        raise CompileError(str(unit), "no such file")
    where = trees(source)
    home = _home(unit, where)
    if home is None:
        raise CompileError(str(unit), f"lies outside {where[0].folder}")
    members: dict[Path, Member] = {}
    waiting = [(home, unit)]
    while waiting:
        tree, file = waiting.pop()
        if file in members:
            continue
        digest, code_digest, includes, by_macro = _scan(file)
        if by_macro and tree.label != "cutlass":
            raise CompileError(str(file), "an #include spelled by a macro hides what this file depends on")
        name = file.relative_to(tree.folder).as_posix()
        members[file] = Member(tree.label, name, file, digest, digest if tree.label == "cutlass" else code_digest)
        for name, quoted in includes:
            found = _locate(name, file if quoted else None, where)
            if found:
                waiting.append(found)
            elif name.startswith(("cute/", "cutlass/")) and where[-1].label != "cutlass":
                raise CompileError(str(unit), f"{file} includes <{name}>, but {CUTLASS_HELP}")
    return tuple(sorted(members.values(), key=lambda member: (member.tree, member.name)))


def content_hash(source: KernelSource) -> str:
    """SHA-256 (hex) of all that decides what `source` computes: its closure, definitions, entry and target.

    No absolute path and no compiler enters: two checkouts of one commit agree on every machine. Raises
    CompileError like `closure`.
    """
    return _hash(source, [(member.tree, member.name, member.digest) for member in closure(source)])


def code_hash(source: KernelSource) -> str:
    """The same, without our comments: what evidence speaks for. A wheel's sources have none. Raises CompileError."""
    return _hash(source, [(member.tree, member.name, member.code_digest) for member in closure(source)])


def _hash(source: KernelSource, files: list[tuple[str, str, str]]) -> str:
    defines = [[name, str(value)] for name, value in source.defines]
    text = json.dumps([source.path, source.entry, defines, source.arch, files])
    return hashlib.sha256(text.encode()).hexdigest()


def units() -> Iterator[str]:
    """Every translation unit of this package, relative to `cuda/`."""
    root = cuda_root()
    for file in sorted(root.rglob("*.cu")):
        name = file.relative_to(root).as_posix()
        if not name.startswith("third_party/"):
            yield name
