"""Kernels of which a parameter chooses one of several bodies, in a cluster of two CTAs; for `test_kernel_forms`."""

from __future__ import annotations

import functools
import shutil
import subprocess
from typing import Any

import numpy as np
from device import Kernel, Where
from isa_oracle import Array
from ptx_kernels import one_of

THREADS, CTAS = 64, 2

BARRIER = """
    setp.ne.u32 %p, %thread, 0;
    @!%p mbarrier.init.shared::cta.b64 [%bar], 1;
    @!%p fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
"""
WAIT = """
waiting:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], 0;
    @!%p bra waiting;
"""
EVERYBODY = """
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
"""
NUMBERED = "mul.wide.u32 %d0, %n, 4; add.u64 %d0, %d0, %out; st.global.b32 [%d0], %n;"


def numbers(count: int, dtype: Any = np.float32, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(-9, 10, count).astype(dtype)


@functools.cache
def loaded(together: tuple[str, ...], where: Where, target: str) -> tuple[Kernel, list[int]]:
    """A kernel that does one of several bodies, and the lines where they begin."""
    text = f"""
.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k(.param .u64 p_in, .param .u64 p_out, .param .u32 p_which)
.maxntid {THREADS}, 1, 1
{{
    .reg .pred %p, %q; .reg .b16 %h<4>; .reg .b32 %r<16>, %n, %thread, %cta, %rank, %smem, %bar, %which;
    .reg .f32 %f<8>; .reg .b64 %d<8>, %in, %out;
    .shared .align 8 .b64 barrier;
    mov.u32 %smem, dynamic; mov.u32 %bar, barrier;
    mov.u32 %thread, %tid.x; mov.u32 %cta, %ctaid.x; mov.u32 %rank, %cluster_ctarank;
    mad.lo.u32 %n, %cta, {THREADS}, %thread;
    ld.param.b64 %in, [p_in]; ld.param.b64 %out, [p_out]; ld.param.b32 %which, [p_which];
    {one_of(together, "%which")}
    {EVERYBODY}
    ret;
}}
"""
    require_real(text, target)
    lines = text.splitlines()
    starts = [lines.index(f"body_{i}:") + 1 for i in range(len(together))]
    return Kernel(text, "forms.ptx", where, THREADS), starts


@functools.cache
def require_real(text: str, target: str) -> None:
    """Fails where ptxas does not take a kernel for its target; without a toolkit it does nothing."""
    if shutil.which("ptxas"):
        command = ["ptxas", f"-arch={target}", "-o", "/dev/null", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
