"""What the tests of xl_paged_attention share: a problem, cases of which clusters share units, plans for long work,
workspaces as they are made."""

from __future__ import annotations

import pytest

from cupymla.device import Device
from cupymla.ops.xl_paged_attention import cases, cuda, plan
from cupymla.ops.xl_paged_attention.cases import XlCase
from cupymla.ops.xl_paged_attention.spec import Problem
from cupymla_lab.problems import xl_paged_attention as problems

PROBLEM = Problem(
    device=Device("cuda", 0), num_seqs=4, num_heads=32, num_kv_heads=8, head_size=128, num_blocks=100, block_size=16,
    max_blocks=64, dtype="bfloat16", kv_dtype="bfloat16", kv_layout="vllm", bias="none", bias_dtype="", extent=0,
    rel_extend="zero", bias_scaled=True, scale=0.1, return_lse=False, lse_base="e",
)  # fmt: skip

MULTIPROCESSORS = 132
"""Of a GPU on which the clusters of `shared` all run at once."""

SHARED_UNITS, SHARED_CLUSTERS = 2, 3
"""Of `shared`: a block of sixteen query heads and one of four."""


def take_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that may be a tile for each share is long and fills the GPU: the kernel for any work has small parts."""
    monkeypatch.setattr(plan, "_SMALL_TILES", 0)
    monkeypatch.setattr(plan, "_LONG_BYTES", 0)
    monkeypatch.setattr(plan, "ctas", lambda work, multiprocessors, ctas_per_sm: multiprocessors * ctas_per_sm)


def named(name: str) -> XlCase:
    """One of the operator's cases."""
    return next(case for case in problems.CASES if case.name == name)


def shared(keys: int = 1100, kv_layout: str = "vllm", head_size: int = 96) -> XlCase:
    """Three clusters for each of two units, by the room in the block table; `keys` say how many of them have tiles.

    The last of a cluster's CTAs have no channels of 96 to put together.
    """
    return cases.make(
        "cluster", f"shared_{kv_layout}", num_heads=20, num_kv_heads=1, head_size=head_size, context_lens=(keys,),
        max_blocks=70, kv_layout=kv_layout, bias="dense",
    )  # fmt: skip


def workspaces(monkeypatch: pytest.MonkeyPatch) -> list[cuda.Workspace]:
    """The workspaces that are made from now on."""
    made: list[cuda.Workspace] = []

    class Followed(cuda.Workspace):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(cuda, "Workspace", Followed)
    return made
