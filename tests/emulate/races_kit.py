"""Kernels of a few lines with accesses or waits that nothing orders, on the host emulator."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from device import Kernel, Memory
from isa_oracle import Array

from cupymla.launch import Geometry
from cupymla_lab.emulate import MODES, Settings
from cupymla_lab.emulate.host.machine import HostError
from cupymla_lab.emulate.settings import Mode
from cupymla_lab.ptx.races import Races

HEAD = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry kernel(.param .u64 a0, .param .u64 a1)
{{
    .reg .pred %p<8>; .reg .b32 %r<64>; .reg .b64 %d<32>;
    .shared .align 1024 .b8 tile[4096];
    mov.u32 %r0, %tid.x; mov.u32 %r1, tile; mov.u32 %r5, %cluster_ctarank; setp.eq.s32 %p1, %r0, 0;
    ld.param.u64 %d0, [a0]; ld.param.u64 %d1, [a1];
    mul.wide.u32 %d10, %r0, 4; mad.wide.u32 %d11, %r5, 1024, %d10; add.s64 %d11, %d11, %d1; add.s64 %d10, %d10, %d0;
{body}
    ret;
}}
"""
TOGETHER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
FENCE = "fence.proxy.async.shared::cta;"


@functools.cache
def kernel(body: str) -> Kernel:
    return Kernel(HEAD.format(body=body), "races.ptx", "host")


def run(
    body: str, races: Races, mode: Mode = "eager", threads: int = 32, cluster: int = 1, seed: int = 1, ctas: int = 0
) -> tuple[Array, Array]:
    """Run a body on two arrays of numbers, which %d0 and %d1, and this thread's of them %d10 and %d11, name. Those of
    the CTA with rank 1 in the second one begin 1024 bytes later."""
    arrays = [np.arange(1024, dtype=np.uint32), np.zeros(1024, np.uint32)]
    memories = [Memory(array, "host") for array in arrays]
    settings = Settings(mode, seed, checks=(), races=races)
    parameters = [memory.parameter for memory in memories]
    kernel(body).launch(Geometry((ctas or cluster, 1, 1), threads, 0, cluster=cluster), parameters, settings)
    return memories[0].read(), memories[1].read()


def raced(body: str, what: str = "nothing orders the two", **options: Any) -> None:
    """Only the check sees the fault, and sees it in every mode."""
    for mode in MODES:
        run(body, "unchecked", mode, **options)
        with pytest.raises(HostError, match=rf"race: .*{what}"):
            run(body, "practice", mode, **options)


def ordered(body: str, races: Races = "letter", **options: Any) -> Array:
    """Nothing is found in any mode; the second array."""
    for mode in MODES:
        found = run(body, races, mode, **options)[1]
    return found
