"""Traces for tests of the estimate of cycles: of small kernels in PTX, and written by hand."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np

from cupymla.launch import Geometry
from cupymla_lab.interpret import GlobalMemory, Program, interpret, parse
from cupymla_lab.interpret.cycles import Recorder, Trace, trace
from cupymla_lab.interpret.cycles.trace import WarpTrace

HEAD = ".version 8.0\n.target sm_90a\n.address_size 64\n"


def text_of(body: str) -> str:
    """PTX of a kernel of these statements; `%r0` is the thread, `%r1` shared memory, `%rd1` a buffer."""
    return f"""{HEAD}.extern .shared .align 128 .b8 smem[];
    .visible .entry k(.param .u64 out) {{
    .reg .pred %p<4>; .reg .b32 %r<16>; .reg .b64 %rd<8>; .reg .f32 %f<16>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, smem;
    {body}
    ret; }}"""


def recorded(
    body: str,
    threads: int = 32,
    seed: int = 0,
    smem_bytes: int = 16384,
    machine_code: Mapping[int, trace.Run] | None = None,
) -> Trace:
    """What the warps of one CTA do that runs such a kernel, with what each line became where that is given."""
    memory = GlobalMemory()
    room = np.zeros(4096 + 32, np.float32)
    aligned = room[-room.ctypes.data % 128 // 4 :][:4096]  # as device memory is
    out = memory.add("out", aligned, writable=True)
    recorders: list[Recorder] = []

    def watch(program: Program) -> Recorder:
        recorders.append(Recorder(program, machine_code))
        return recorders[-1]

    geometry = Geometry((1, 1, 1), threads, smem_bytes)
    interpret(
        parse(text_of(body), "k"), geometry, [struct.pack("<Q", out)], memory, seed=seed, strict=False, watch=watch
    )
    return recorders[0].trace


def warps_of(*lists: list[trace.Event], barriers: tuple[int, ...] = (), ctas: int = 1) -> Trace:
    """A trace written by hand: a list of events for each warp; with two CTAs every second warp is of the second."""
    made = [WarpTrace(k % ctas, k // ctas, list(events), [0] * len(events), 8) for k, events in enumerate(lists)]
    return Trace(made, [0] * ctas, list(barriers), {}, 32 * len(lists) // ctas)
