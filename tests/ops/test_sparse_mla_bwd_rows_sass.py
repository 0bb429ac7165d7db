"""How rows of dKV leave the sm_90a backward: sixteen bytes at a time, added or stored.

Left to itself NVRTC made four stores of some sixteen bytes, and the deterministic call took half as long again.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from backward_plan_kit import ATTENTIONS, CLUSTER
from sass_kit import machine_code
from variants_kit import compiled

from cupymla import build
from cupymla.build import KernelSource

ADDED = re.compile(r"\bREDG?\.\S*F32x4\b")
STORED = re.compile(r"\bSTG\.E\.128\b")
STORED_BY_WORDS = re.compile(r"\bSTG\.E(?!\.(?:64|128))\b")


def attentions() -> list[KernelSource]:
    every = compiled("cupymla.ops.sparse_mla_bwd")
    return [source for source in every if source.arch == "sm_90a" and source.entry in ATTENTIONS]


@pytest.mark.compile
@pytest.mark.parametrize("source", attentions(), ids=str)
def test_rows_leave_sixteen_bytes_at_a_time(source: KernelSource, tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")
    code = machine_code(build.cubin(source), tmp_path)
    added, kept, words = (len(form.findall(code)) for form in (ADDED, STORED, STORED_BY_WORDS))
    defines = dict(source.defines)
    d_qk = int(defines["CUPYMLA_D_QK"])
    # Of dQ, by either consumer: 64 heads' columns, eight to a store.
    of_query = d_qk // 16
    assert kept >= (of_query + added if defines.get("CUPYMLA_PARTIALS") else of_query)
    if source.entry == "sparse_mla_bwd_stored":
        # Of a tile of 64 columns a thread has two rows' sixteen; never added. Of packed queries tiles may be a loop's.
        places = d_qk // 64 if defines["CUPYMLA_QUERIES"] == 1 else 2 * 2
        assert added == 0
        assert kept >= of_query + places * 4
    elif defines.get("CUPYMLA_PARTIALS") == 2:
        # As below, but eight columns at a time, and never added.
        assert added == 0
        assert kept >= of_query + 2 * (8 + (1 if d_qk > 512 else 0))
    elif source.entry == CLUSTER:
        # Of a block's 64 entries each thread of two consumers has two, of 128 columns of the values and 16 of the RoPE,
        # four at a time; no code is there twice.
        assert added == 2 * (16 + (2 if d_qk > 512 else 0))
    else:
        # Of eight tiles of 64 columns, and the RoPE's; the one that may go amid scores is there twice.
        assert added >= d_qk // 64 * 8
    # Statistics, distribution and terms of the sink are stored by words.
    assert words <= 8
