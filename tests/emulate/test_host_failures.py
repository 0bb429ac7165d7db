"""What a kernel that fails on the host says: which thread, of which CTA, at which line."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest

from cupymla.errors import CupymlaError
from cupymla.launch import Geometry
from cupymla_lab.emulate import EmulationError, HostError, load
from cupymla_lab.emulate.host import library

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(not library.available(), reason="needs a C++ compiler on x86-64"),
]

HEAD = """.version 8.6
.target sm_100a
.address_size 64
.extern .func __assertfail (.param .b64 what, .param .b64 file, .param .b32 at, .param .b64 in, .param .b64 size);
.global .align 1 .b8 said[7] = {110, 32, 61, 61, 32, 53, 0};
.global .align 1 .b8 where[5] = {97, 46, 99, 117, 0};
.visible .entry k(.param .u64 out) {
    .reg .b64 %d<4>;
    .reg .b32 %r<4>;
    .reg .pred %p;
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p, %r1, 5;
    @%p bra end;
"""
FIRST_LINE = HEAD.count("\n") + 1

ASSERTION = """    mov.u64 %d1, said;
    cvta.global.u64 %d1, %d1;
    mov.u64 %d2, where;
    cvta.global.u64 %d2, %d2;
    {
    .param .b64 p0; st.param.b64 [p0], %d1;
    .param .b64 p1; st.param.b64 [p1], %d2;
    .param .b32 p2; st.param.b32 [p2], 17;
    .param .b64 p3; st.param.b64 [p3], %d1;
    .param .b64 p4; st.param.b64 [p4], 1;
    call.uni __assertfail, (p0, p1, p2, p3, p4);
    }
"""
MISALIGNED = """    ld.param.u64 %d1, [out];
    st.global.b32 [%d1+2], %r1;
"""


def failure(body: str) -> str:
    kernel = load(HEAD + body + "end:\n    ret;\n}\n", on="host")
    out = np.zeros(64, np.int32)
    with pytest.raises(HostError) as caught:
        kernel.launch(Geometry((2, 1, 1), 32, 0), [ctypes.c_uint64(out.ctypes.data)])
    return str(caught.value)


@pytest.mark.parametrize(
    ("body", "line", "what"),
    [
        ("    trap;\n", 0, "trap"),
        (MISALIGNED, 1, r"address 0x[0-9a-f]+ is not aligned to 4"),
        (ASSERTION, 10, r"assertion `n == 5' of n == 5 fails, a.cu:17"),
    ],
    ids=["trap", "misaligned", "assert"],
)
def test_a_failure_names_thread_cta_and_line(body: str, line: int, what: str) -> None:
    told = failure(body)
    place = rf"thread 5 of CTA \([01], 0, 0\), PTX line {FIRST_LINE + line}: {what}"
    assert re.fullmatch(place, told), told


def test_both_kinds_of_failure_are_this_packages() -> None:
    assert issubclass(HostError, CupymlaError) and issubclass(EmulationError, CupymlaError)
    assert not issubclass(HostError, EmulationError)
