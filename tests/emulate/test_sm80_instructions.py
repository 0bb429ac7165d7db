"""What kernels for sm_80 add to the host machine: mma.sync, cp.async and packed 16-bit floats, against NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device import Kernel, Memory
from isa_oracle import Array

from cupymla.launch import Geometry
from cupymla_lab.emulate import Settings
from cupymla_lab.emulate.host.machine import HostError

pytestmark = pytest.mark.compile

LANES = 32
TYPES: dict[str, Any] = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


def run(operation: str, inputs: Array, outputs: int, variables: str = "") -> Array:
    """One warp: %r0 onwards are the lane's row of inputs, %s0 onwards what comes back; %smem has 4 KB."""
    loads = "\n".join(f"ld.global.b32 %r{i}, [%in+{4 * i}];" for i in range(inputs.shape[1]))
    stores = "\n".join(f"st.global.b32 [%out+{4 * i}], %s{i};" for i in range(outputs))
    text = f"""
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 128 .b8 dynamic[];
{variables}
.visible .entry k(.param .u64 p_in, .param .u64 p_out)
{{
    .reg .b32 %r<12>, %s<8>, %n, %smem, %lane; .reg .f32 %f<4>; .reg .b64 %in, %out, %source; .reg .b16 %h<4>;
    ld.param.b64 %source, [p_in];
    ld.param.b64 %out, [p_out];
    mov.u32 %lane, %tid.x;
    mad.wide.u32 %in, %lane, {4 * inputs.shape[1]}, %source;
    mad.wide.u32 %out, %lane, {4 * outputs}, %out;
    mov.u32 %smem, dynamic;
    {loads}
    {operation}
    {stores}
    ret;
}}
"""
    source, target = Memory(inputs, "host"), Memory(np.zeros((LANES, outputs), np.uint32), "host")
    kernel = Kernel(text, "warp.ptx", "host")
    kernel.launch(Geometry((1, 1, 1), LANES, 4096), [source.parameter, target.parameter], Settings("lazy"))
    return target.read()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_warp_products(kind: str) -> None:
    """Operands are made as matrices and assigned to lanes as the ISA's fragment tables say; every sum is exact."""
    random = np.random.default_rng(1)
    dtype = TYPES[kind]
    a, b, c = (random.integers(-8, 9, shape).astype(np.float32) for shape in ((16, 16), (16, 8), (16, 8)))
    a[3, 5], b[7, 2] = np.nan, np.inf
    group, place = np.arange(LANES) // 4, np.arange(LANES) % 4
    words: list[Array] = []

    def pair(first: Array, second: Array) -> Array:
        bits = [x.astype(dtype).view(np.uint16).astype(np.uint32) for x in (first, second)]
        return bits[0] | bits[1] << 16

    for column in (0, 8):
        for row in (0, 8):
            columns = 2 * place + column
            words.append(pair(a[group + row, columns], a[group + row, columns + 1]))
    for row in (0, 8):
        words.append(pair(b[2 * place + row, group], b[2 * place + row + 1, group]))
    for row in (0, 8):
        for column in (0, 1):
            words.append(c[group + row, 2 * place + column].view(np.uint32))
    sums = "{%f0, %f1, %f2, %f3}"
    opcode = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    product = f"{opcode} {sums}, {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, {sums};"
    text = f"""
    mov.b32 %f0, %r6; mov.b32 %f1, %r7; mov.b32 %f2, %r8; mov.b32 %f3, %r9;
    {product}
    {product}
    mov.b32 %s0, %f0; mov.b32 %s1, %f1; mov.b32 %s2, %f2; mov.b32 %s3, %f3;
    """
    found = run(text, np.stack(words, 1), 4).view(np.float32)
    with np.errstate(invalid="ignore"):
        wanted = c + 2 * (a @ b)
    for index in range(4):
        np.testing.assert_array_equal(found[:, index], wanted[group + index // 2 * 8, 2 * place + index % 2])


COPY = """
    mad.lo.u32 %n, %lane, 16, %smem;
    cp.async.cg.shared.global [%n], [%in], 16;
    cp.async.commit_group;
    add.u32 %n, %n, 1024;
    cp.async.ca.shared.global [%n], [%in], 8, 5;
    cp.async.commit_group;
    {wait}
    bar.sync 0;
    xor.b32 %lane, %lane, 1;
    mad.lo.u32 %n, %lane, 16, %smem;
    ld.shared.v4.b32 {{%s0, %s1, %s2, %s3}}, [%n];
    ld.shared.v2.b32 {{%s4, %s5}}, [%n+1024];
    cp.async.wait_all;
"""


@pytest.mark.parametrize(("wait", "first", "second"), [(0, True, True), (1, True, False), (2, False, False)])
def test_asynchronous_copies_are_in_after_their_wait(wait: int, first: bool, second: bool) -> None:
    """What was waited for is there; what was not is late. Zeros follow what a short copy reads."""
    inputs = np.arange(1, LANES * 4 + 1, dtype=np.uint32).reshape(LANES, 4) * 0x01010101
    found = run(COPY.format(wait=f"cp.async.wait_group {wait};"), inputs, 6)
    neighbour = inputs[np.arange(LANES) ^ 1]
    assert (found[:, :4] == neighbour).all() == first
    short = np.stack([neighbour[:, 0], neighbour[:, 1] & 0xFF], 1)
    assert (found[:, 4:] == short).all() == second


def test_a_copy_to_an_address_that_its_size_does_not_divide_is_refused() -> None:
    with pytest.raises(HostError, match="not aligned to 16"):
        run("add.u32 %n, %smem, 8; cp.async.cg.shared.global [%n], [%in], 16;", np.zeros((LANES, 4), np.uint32), 1)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["mul", "add", "fma.rn"])
def test_packed_halves_round_once(name: str, kind: str) -> None:
    random = np.random.default_rng(2)
    dtype = TYPES[kind]
    values = (random.standard_normal((LANES, 4)) * 2.0 ** random.integers(-12, 6, (LANES, 4))).astype(dtype)
    values[0], values[1] = np.inf, np.nan
    inputs = values.view(np.uint32)
    operands = "%r0, %r1, %r0" if name == "fma.rn" else "%r0, %r1"
    found = run(f"{name}.{kind}x2 %s0, {operands};", inputs, 1).view(dtype).astype(np.float64)
    a, b = values[:, :2].astype(np.longdouble), values[:, 2:].astype(np.longdouble)
    with np.errstate(invalid="ignore"):
        wanted = {"mul": a * b, "add": a + b, "fma.rn": a * b + a}[name]
    np.testing.assert_array_equal(found, wanted.astype(dtype).astype(np.float64))


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_eight_bit_floats_become_halves(kind: str) -> None:
    codes = np.arange(256, dtype=np.uint32)[:, None] + np.array([0, 64], np.uint32)
    dtype: Any = ml_dtypes.float8_e4m3fn if kind == "e4m3" else ml_dtypes.float8_e5m2
    for part in range(0, 256, LANES):
        chosen = codes[part : part + LANES] & 0xFF
        text = f"cvt.u16.u32 %h0, %r0; cvt.rn.f16x2.{kind}x2 %s0, %h0;"
        found = run(text, chosen[:, :1] | chosen[:, 1:] << 8, 1).view(np.float16)
        np.testing.assert_array_equal(found, chosen.astype(np.uint8).view(dtype).astype(np.float16))


def test_variables_may_begin_negative() -> None:
    """nvcc writes an unsigned constant past 2^31 as a negative number; a device's constants share its fate."""
    text = "mov.u64 %source, number; ld.global.u32 %s0, [%source];"
    found = run(text, np.zeros((LANES, 1), np.uint32), 1, ".global .align 4 .u32 number = -2139062144;")
    assert (found == 0x80808080).all()
