"""Machine code (SASS) of compiled kernels, for tests that look for the instructions that a design counts on."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupymla import build
from cupymla.build import KernelSource, cache
from cupymla.build.cubin import Cubin
from cupymla_lab.emulate import by_content
from cupymla_lab.machine_code import WHEEL, disassembled, disassembler

TOGETHER = ("sparse_mla", "attn_dist")
"""How the entries of kernels begin of which tests look at nearly all variants."""
PARTS = 8
"""In so many parts the variants of a target are disassembled: each of some eight."""


def machine_code(made: Cubin, folder: Path) -> str:
    """What a kernel was compiled to, one instruction a line; skips the test where there is no disassembler.

    Several tests look at the same kernels: texts are kept, and several are made at once.
    """
    program, kept = disassembler(), by_content.folder() or folder
    if program is None:
        pytest.skip(f"needs nvdisasm of the CUDA toolkit (pip install {WHEEL})")
    written = str(Path(program).stat().st_mtime_ns)

    def file_of(data: bytes) -> Path:
        return kept / f"sass-{by_content.digest(hashlib.sha256(data).hexdigest(), program, written)}.gz"

    file = file_of(made.data)
    if not file.is_file():
        with _one_process(kept / f"sass-{made.arch}-{_part(made.path)}.lock"):
            if not file.is_file():
                missing = [data for data in (made.data, *_beside(made)) if not file_of(data).is_file()]
                for data, text in zip(missing, disassembled(made.arch, missing) or (), strict=True):
                    _keep(file_of(data), text)
    return gzip.decompress(file.read_bytes()).decode()


def _part(file: Path | None) -> int:
    """Which of the parts a kernel in the cache belongs to: by its key, which is a hash."""
    return int(file.stem[-1], 16) * PARTS // 16 if file is not None else PARTS


def _beside(made: Cubin) -> list[bytes]:
    """The other kernels of its part."""
    if made.path is None or not made.entry.startswith(TOGETHER):
        return []
    files = sorted(file for start in TOGETHER for file in made.path.parent.glob(f"{start}*.cubin"))
    return [file.read_bytes() for file in files if file != made.path and _part(file) == _part(made.path)]


def _keep(file: Path, text: str) -> None:
    cache.keep(file, lambda part: part.write_bytes(gzip.compress(text.encode(), compresslevel=1)))


@contextlib.contextmanager
def _one_process(lock: Path) -> Iterator[None]:
    """A block in which one process at a time is."""
    with lock.open("w", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    lock.unlink(missing_ok=True)  # who waits for it finds what was made


def require_single_issuers(text: str) -> None:
    """Products and commits are issued by a thread of which the compiler knows that it is alone.

    Where it does not, it puts each into a loop over the lanes of the warp, which ends in `BRA.U.ANY`. What remains are
    the copies by tensor map whose coordinates differ from lane to lane.
    """
    loops, copies = text.count("BRA.U.ANY"), text.count("UTMALDG")
    assert loops <= copies, f"{loops} loops over lanes for {copies} copies"


def marked_products(text: str, shape: str = "") -> int:
    """How many wgmma are marked gsb0, of all shapes or of one such as "64x32x16".

    A wait for all but N groups becomes one for all but N products marked so (WARPGROUP.DEPBAR.LE gsb0, N), and ptxas
    marks the last product before every wgmma.fence, also where no group ends there.
    """
    return len(re.findall(rf"\bHGMMA\.{re.escape(shape)}\S*[^;]*\bgsb0\b", text))


def product_waits(text: str) -> set[int]:
    """How many marked products the waits for wgmma leave unfinished."""
    return {int(pending, 0) for pending in re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (\w+)", text)}


def require_groups_end_where_products_are_marked(source: KernelSource, waits: set[int], folder: Path) -> None:
    """Each group has one marked product, its last, so that a wait for all but N groups is for no more than it says."""
    pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")
    code = machine_code(build.cubin(source), folder)
    assert marked_products(code) == build.ptx(source).count("wgmma.commit_group.sync.aligned") > 0
    assert product_waits(code) == waits
