"""Machine code (SASS) of compiled kernels, for tests that look for the instructions that a design counts on."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

import pytest

from cupymla import build
from cupymla.build import KernelSource, cache
from cupymla.build.cubin import Cubin
from cupymla_lab.emulate import by_content
from cupymla_lab.machine_code import WHEEL, disassembled, disassembler


def machine_code(made: Cubin, folder: Path) -> str:
    """What a kernel was compiled to, one instruction a line; skips the test where there is no disassembler.

    Several tests look at the same kernels, and the disassembler takes most of a second to start: texts are kept.
    """
    program, kept = disassembler(), by_content.folder()
    if program is None:
        pytest.skip(f"needs nvdisasm of the CUDA toolkit (pip install {WHEEL})")
    written = Path(program).stat().st_mtime_ns
    name = by_content.digest(hashlib.sha256(made.data).hexdigest(), program, str(written))
    file = (kept or folder) / f"sass-{name}.gz"
    if not file.is_file():
        content = gzip.compress(str(disassembled(made, folder)).encode(), compresslevel=1)
        cache.keep(file, lambda part: part.write_bytes(content))
    return gzip.decompress(file.read_bytes()).decode()


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
