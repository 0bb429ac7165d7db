"""The gathers' copies as ptxas leaves them: in a form that GPUs execute.

ptxas (12.9 and 13.0, sm_90a) may fold the uniform part of a shared address into the copy, `LDGSTS [R+UR], desc[UR]`,
and then names an odd register for the descriptor, which takes a pair of them: an illegal instruction on a GPU.
`KeyBuffer::address` in cuda/sparse_mla_bwd/sm90/producer.cuh keeps it from that.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from backward_plan_kit import ATTENTIONS
from sass_kit import machine_code
from variants_kit import compiled

from cupymla import build
from cupymla.build import KernelSource

ODD_DESCRIPTOR = re.compile(r"\bdesc\[UR\d*[13579]\]")


def gathers() -> list[KernelSource]:
    every = [s for name in ("sparse_mla_fwd", "attn_dist") for s in compiled(f"cupymla.ops.{name}")]
    attend = [source for source in every if source.entry != "sparse_mla_fwd_order"]
    backward = compiled("cupymla.ops.sparse_mla_bwd")
    attend += [source for source in backward if source.entry in ATTENTIONS]
    return [source for source in attend if source.arch == "sm_90a"]


@pytest.mark.compile
@pytest.mark.parametrize("source", gathers(), ids=str)
def test_descriptors_lie_in_even_registers(source: KernelSource, tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")
    code = machine_code(build.cubin(source), tmp_path)
    copies = re.findall(r"\bLDGSTS\b.*", code)
    assert copies
    assert not [copy for copy in copies if ODD_DESCRIPTOR.search(copy)]
