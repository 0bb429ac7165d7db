"""Machine code (SASS) of compiled kernels, for tests that look for the instructions that a design counts on."""

from __future__ import annotations

from pathlib import Path

import pytest

from cupymla.build.cubin import Cubin
from cupymla.testing.machine_code import WHEEL, disassembled


def machine_code(made: Cubin, folder: Path) -> str:
    """What a kernel was compiled to, one instruction a line; skips the test where there is no disassembler."""
    text = disassembled(made, folder)
    if text is None:
        pytest.skip(f"needs nvdisasm of the CUDA toolkit (pip install {WHEEL})")
    return text


def require_single_issuers(text: str) -> None:
    """Products and commits are issued by a thread of which the compiler knows that it is alone.

    Where it does not, it puts each into a loop over the lanes of the warp, which ends in `BRA.U.ANY`. What remains are
    the copies by tensor map whose coordinates differ from lane to lane.
    """
    loops, copies = text.count("BRA.U.ANY"), text.count("UTMALDG")
    assert loops <= copies, f"{loops} loops over lanes for {copies} copies"
