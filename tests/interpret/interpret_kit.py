"""Tiny kernels in PTX: a body with its registers, run by one CTA on NumPy arrays."""

from __future__ import annotations

import struct
from typing import Any

import numpy.typing as npt

from cupymla.launch import Geometry
from cupymla_lab.interpret import GlobalMemory, interpret, parse
from cupymla_lab.interpret.machine import Machine

HEAD = """.version 9.0
.target sm_90a
.address_size 64
.visible .entry kernel({parameters}) {bounds}
{{
    .reg .pred %p<8>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .b64 %d<32>; .reg .f32 %f<64>;
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


def run(body: str, *arrays: npt.NDArray[Any], threads: int = 32, readonly: int = 0, **options: Any) -> Machine:
    """Run a body on arrays, of which the first `readonly` may not be written."""
    memory = GlobalMemory()
    places = [memory.add(f"a{k}", array, writable=k >= readonly) for k, array in enumerate(arrays)]
    program = parse(text(body, len(arrays), options.pop("shared", 4096), options.pop("bounds", "")), "kernel")
    cluster = options.pop("cluster", 1)
    geometry = Geometry((options.pop("grid", cluster), 1, 1), threads, 0, cluster, pdl=options.pop("pdl", False))
    return interpret(program, geometry, [struct.pack("<Q", place) for place in places], memory, **options)


def element(size: int, array: int = 0, into: str = "%d10") -> str:
    """Instructions that put the address of this thread's element of an array into a register."""
    return f"mul.wide.u32 {into}, %r0, {size}; add.s64 {into}, {into}, %d{array};"
