"""How rows of dKV leave the sm_90a backward: sixteen bytes at a time, added or stored.

Left to itself NVRTC made four stores of some sixteen bytes, and the deterministic call took half as long again.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sass_kit import machine_code

from cupymla import build
from cupymla.build import KernelSource
from cupymla.ops.sparse_mla_bwd import plan

ADDED = re.compile(r"\bREDG?\.\S*F32x4\b")
STORED = re.compile(r"\bSTG\.E\.128\b")
STORED_BY_WORDS = re.compile(r"\bSTG\.E(?!\.(?:64|128))\b")


def attentions() -> list[KernelSource]:
    return [source for source in plan.sources("sm_90a") if dict(source.defines)["CUPYMLA_STAGE"] == 0]


@pytest.mark.compile
@pytest.mark.parametrize("source", attentions(), ids=str)
def test_rows_leave_sixteen_bytes_at_a_time(source: KernelSource, tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")
    code = machine_code(build.cubin(source), tmp_path)
    added, stored, words = (len(form.findall(code)) for form in (ADDED, STORED, STORED_BY_WORDS))
    # Of a block's 64 slots each thread of two consumers has two, of at least eight tiles of 64 columns, four at a time;
    # a pair of CTAs has half of the tiles each.
    tiles = 4 if dict(source.defines).get("CUPYMLA_CLUSTER") == 2 else 8
    assert added >= tiles * 8
    if dict(source.defines).get("CUPYMLA_PARTIALS"):
        assert stored >= added, "a row is stored by the first pass and added to by later ones"
    # Statistics, distribution and terms of the sink are stored by words.
    assert words <= 8
