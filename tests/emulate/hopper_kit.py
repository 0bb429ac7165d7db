"""Tiny kernels for Hopper in PTX: a body with its registers, run by a CTA or a cluster on NumPy arrays, on the host."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy.typing as npt

from cupymla.launch import Geometry
from cupymla_lab.emulate import Settings
from cupymla_lab.emulate.host.machine import HostProgram, load
from cupymla_lab.emulate.host.memory import Arrays
from cupymla_lab.emulate.settings import Check, Mode
from cupymla_lab.ptx.approximation import Approximation
from cupymla_lab.ptx.races import Races

HEAD = """.version 9.0
.target sm_90a
.address_size 64
.visible .entry kernel({parameters}) {bounds}
{{
    .reg .pred %p<8>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .b64 %d<32>; .reg .f32 %f<160>;
    .shared .align 1024 .b8 tile[{shared}];
    mov.u32 %r0, %tid.x;
{loads}
{body}
    ret;
}}
"""


def text(body: str, arrays: int, shared: int = 4096, bounds: str = "") -> str:
    """PTX of a kernel: `%d0`, `%d1`, ... hold the arrays' addresses, `%r0` the thread. `bounds`: of its launch."""
    parameters = ", ".join(f".param .u64 a{k}" for k in range(arrays))
    loads = "\n".join(f"    ld.param.u64 %d{k}, [a{k}];" for k in range(arrays))
    return HEAD.format(parameters=parameters, loads=loads, body=body, shared=shared, bounds=bounds)


@functools.cache
def program(body: str, arrays: int, shared: int = 4096, bounds: str = "") -> HostProgram:
    """The kernel, ready to run."""
    return load(text(body, arrays, shared, bounds), "kernel", "tiny.ptx")


def run(
    body: str,
    *arrays: npt.NDArray[Any],
    threads: int = 32,
    readonly: int = 0,
    shared: int = 4096,
    bounds: str = "",
    cluster: int = 1,
    grid: int = 0,
    pdl: bool = False,
    memory: Arrays | None = None,
    mode: Mode = "random",
    seed: int = 0,
    races: Races = "unchecked",
    checks: tuple[Check, ...] = ("proxy", "init", "written"),
    approximation: Approximation = "exact",
) -> None:
    """Run a body on arrays, of which the first `readonly` may not be written. `memory` knows them where it is given."""
    known = Arrays() if memory is None else memory
    for k, array in enumerate(arrays if memory is None else ()):
        known.add(f"a{k}", array.ctypes.data, array.nbytes, k >= readonly)
    settings = Settings(mode, seed, checks, 0.05, races=races, approximation=approximation)
    geometry = Geometry((grid or cluster, 1, 1), threads, 0, cluster, pdl=pdl)
    parameters = [ctypes.c_uint64(array.ctypes.data) for array in arrays]
    program(body, len(arrays), shared, bounds).launch(geometry, parameters, settings, arrays=known)


def element(size: int, array: int = 0, into: str = "%d10") -> str:
    """Instructions that put the address of this thread's element of an array into a register."""
    return f"mul.wide.u32 {into}, %r0, {size}; add.s64 {into}, {into}, %d{array};"
