"""The translator: what it changes, what it leaves alone, what it refuses; sm_100a kernels here assemble."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import gemm
import ptx_kernels
import pytest
from isa_oracle import MOVE_REGISTERS
from variants_kit import PLANNED, compiled

from cupymla import build as service
from cupymla.build import KernelSource, folders
from cupymla.build.cubin import Image
from cupymla.errors import CompileError
from cupymla_lab.emulate import Program, PtxError, build, failures, program, translate
from cupymla_lab.emulate.code import LAUNCH, MODEL, REMOVED_OFFSET
from cupymla_lab.emulate.instructions import ROWS, THREE_INPUTS, row_for, table
from cupymla_lab.emulate.program import link, missing_bytes, model, model_facts
from cupymla_lab.emulate.settings import LaunchState, Report

CUDA = Path(__file__).resolve().parents[2] / "cupymla_lab" / "emulate" / "model"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "emulation.md"
HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n"
REGISTERS = ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<200>; .reg .b64 %rd<20>; .reg .f32 %f<9>; .reg .b8 %b<9>;"


def kernel(body: str) -> str:
    shared = ".extern .shared .align 16 .b8 memory[];"
    return f"{HEAD}{shared}\n.visible .entry k(.param .u64 a)\n{{\n{REGISTERS}\n{body}\nret;\n}}\n"


def assembled_for_blackwell(text: str, folder: Path) -> bool:
    """Whether ptxas takes a text for sm_100a; without a toolkit, true."""
    if shutil.which("ptxas") is None:
        return True
    (folder / "k.ptx").write_text(text)
    command = ["ptxas", "-arch=sm_100a", "-o", str(folder / "k.cubin"), str(folder / "k.ptx")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def moves() -> list[str]:
    """tcgen05.ld and .st in every shape and multiplicity, plain and with 16-bit packing."""
    found = []
    for shape, each in MOVE_REGISTERS.items():
        for times in (1, 2, 4, 8, 16, 32, 64, 128):
            if each * times > 128:
                continue
            registers = "{" + ", ".join(f"%r{i}" for i in range(each * times)) + "}"
            for pack in ("", "16b"):
                split = ", 16" if shape == "16x32bx2" else ""
                load = f".pack::{pack}" if pack else ""
                store = f".unpack::{pack}" if pack else ""
                found.append(f"tcgen05.ld.sync.aligned.{shape}.x{times}{load}.b32 {registers}, [%r190]{split};")
                found.append(f"tcgen05.st.sync.aligned.{shape}.x{times}{store}.b32 [%r190]{split}, {registers};")
    return found


def copies() -> list[str]:
    """tcgen05.cp in every shape, multicast and format."""
    shapes = ("128x256b", "4x256b", "128x128b", "64x128b.warpx2::02_13", "64x128b.warpx2::01_23", "32x128b.warpx4")
    formats = ("", ".b8x16.b6x16_p32", ".b8x16.b4x16_p64")
    return [f"tcgen05.cp.cta_group::1.{shape}{form} [%r1], %rd1;" for shape in shapes for form in formats]


FORMATS = ("b8", "b8x16.b6x16_p32", "b8x16.b4x16_p64")
STATIONARY = [
    f"tcgen05.mma.ws.cta_group::1.kind::{kind}{hint} [%r1], {a}, %rd2, %r3, %p1{mask};"
    for kind in ("f16", "tf32", "f8f6f4", "i8")
    for hint in ("", *(f".collector::b{i}::{use}" for i in range(4) for use in ("fill", "use", "lastuse", "discard")))
    for a in ("%rd1", "[%r2]")
    for mask in ("", ", %rd3", ", 0")
]

SPARSE = [
    "tcgen05.mma.ws.sp.cta_group::1.kind::tf32 [%r1], %rd1, %rd2, [%r2], %r3, %p1;",
    "tcgen05.mma.ws.sp.cta_group::1.kind::i8.collector::b2::fill [%r1], [%r2], %rd2, [%r2], %r3, %p1, %rd3;",
    *(
        f"tcgen05.mma.sp.cta_group::1.kind::{kind} [%r1], {a}, %rd2, [%r4], %r3, %p1;"
        for kind in ("f16", "tf32", "f8f6f4", "i8")
        for a in ("%rd1", "[%r2]")
    ),
]
SHIFTED = [
    f"tcgen05.mma.cta_group::1.kind::f16.ashift{hint} [%r1], [%r2], %rd2, %r3, %p1;"
    for hint in ("", ".collector::a::lastuse", ".collector::a::discard")
]
MATRICES = [
    *(f"ldmatrix.sync.aligned.m16n16.x1.trans.shared.{form} {{%r1, %r2}}, [%r5];" for form in FORMATS),
    *(f"ldmatrix.sync.aligned.m16n16.x2.trans.{form} {{%r1, %r2, %r3, %r4}}, [%rd5];" for form in FORMATS),
    *(f"ldmatrix.sync.aligned.m8n16.x1.shared::cta.{form} {{%r1}}, [%r5+16];" for form in FORMATS[1:]),
    *(f"ldmatrix.sync.aligned.m8n16.x2.shared.{form} {{%r1, %r2}}, [%r5];" for form in FORMATS[1:]),
    *(f"ldmatrix.sync.aligned.m8n16.x4.shared.{form} {{%r1, %r2, %r3, %r4}}, [%r5];" for form in FORMATS[1:]),
    "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r5], {%r1};",
    "stmatrix.sync.aligned.m16n8.x2.trans.b8 [%rd5], {%r1, %r2};",
    "stmatrix.sync.aligned.m16n8.x4.trans.shared::cta.b8 [%r5], {%r1, %r2, %r3, %r4};",
]

ARITHMETIC = [
    "add.rn.f32x2 %rd1, %rd2, %rd3;",
    "mul.rz.ftz.f32x2 %rd1, %rd2, %rd3;",
    "fma.rn.f32x2 %rd1, %rd2, %rd3, %rd1;",
    "sub.rn.f32x2 %rd1, %rd2, %rd3;",
    "add.f32.f16 %f1, %h1, %f2;",
    "fma.rn.f32.bf16 %f1, %h1, %h2, %f2;",
    "max.f32 %f1, %f2, %f3, %f4;",
    "min.NaN.abs.f32 %f1, %f2, %f3, %f4;",
    "cvt.rn.satfinite.e2m1x2.f32 %b1, %f1, %f2;",
    "cvt.rn.satfinite.relu.e2m3x2.f32 %h1, %f1, %f2;",
    "cvt.rn.satfinite.e3m2x2.f32 %h1, %f1, %f2;",
    "cvt.rn.f16x2.e2m1x2 %r1, %b1;",
    "cvt.rn.f16x2.e2m3x2 %r1, %h1;",
    "cvt.rp.satfinite.ue8m0x2.f32 %h1, %f1, %f2;",
    "cvt.rz.ue8m0x2.bf16x2 %h1, %r1;",
    "cvt.rn.bf16x2.ue8m0x2 %r1, %h1;",
    "cvt.rs.satfinite.e4m3x4.f32 %r1, {%f1, %f2, %f3, %f4}, %r2;",
    "cvt.rs.f16x2.f32 %r1, %f1, %f2, %r2;",
    "redux.sync.max.abs.NaN.f32 %f1, %f2, %r1;",
    "ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%rd1+32];",
    "ld.global.nc.L1::no_allocate.L2::cache_hint.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, _}, [%rd1], %rd2;",
    "st.global.L2::cache_hint.v4.b64 [%rd1+32], {%rd1, %rd2, %rd3, %rd4}, %rd2;",
    "cvt.rn.satfinite.relu.tf32.f32 %r1, %f1;",
    "cvt.rz.satfinite.tf32.f32 %r1, %f1;",
    "cvt.rna.satfinite.tf32.f32 %r1, %f1;",
    "ld.global.L2::evict_last.v4.b64 {%rd1, %rd2, %rd3, %rd4}, [%rd1];",
    "st.global.v8.f32 [%rd1], {%f1, %f2, %f3, %f4, %f1, %f2, %f3, %f4};",
    "st.bulk.shared::cta [%r1], 1024, 0;",
]
SYNCHRONISATION = [
    "tcgen05.alloc.cta_group::1.sync.aligned.b32 [%rd1], 512;",
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [memory+16], %r1;",
    "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;",
    "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
    "tcgen05.wait::ld.sync.aligned;",
    "tcgen05.wait::st.sync.aligned;",
    "tcgen05.fence::before_thread_sync;",
    "tcgen05.fence::after_thread_sync;",
    "tcgen05.shift.cta_group::1.down [%r1];",
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%rd1];",
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %h1;",
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%r1+-8], %rd2, [%r2];",
    "@%p1 st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%r1], {%f1, %f2, %f3, %f4}, [%r2+8];",
    "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r1], %r3, [%r2];",
    "mbarrier.init.b64 [%rd1], 3;",
    "mbarrier.inval.shared::cta.b64 [memory];",
    "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r1], %r2, 100;",
    "mbarrier.test_wait.b64 %p1, [%rd1], %rd2;",
    "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %rd2, [%r1], 128;",
    "mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%r1], 128;",
    "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1];",
    "bar.sync 0;",
    "barrier.cta.sync.aligned %r1, 64;",
    "barrier.arrive 3, 128;",
    "bar.red.popc.u32 %r1, 0, %p1;",
    "barrier.red.and.pred %p1, 1, 64, !%p2;",
    "barrier.cluster.arrive.release.aligned;",
    "barrier.cluster.wait.acquire.aligned;",
    "setmaxnreg.inc.sync.aligned.u32 232;",
    "fence.proxy.async;",
    "fence.mbarrier_init.release.cluster;",
    "fence.acq_rel.cluster;",
    "griddepcontrol.wait;",
    "st.shared.v4.b32 [memory], {%r1, %r2, %r3, %r4};",
    "st.b32 [%rd1], %r1;",
    "@!%p1 exit;",
]
PAIRED = [
    "tcgen05.alloc.cta_group::2.sync.aligned.b32 [%rd1], 512;",
    "tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r1, 32;",
    "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;",
    "tcgen05.shift.cta_group::2.down [%r1];",
    "tcgen05.mma.cta_group::2.kind::f16.ashift [%r1], [%r2], %rd2, %r3, %p1;",
    "tcgen05.cp.cta_group::2.32x128b.warpx4 [%r1], %rd1;",
    "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %h1;",
]
_TENSOR = "cp.async.bulk.tensor.2d"
_INTO = "shared::cluster.global"
_DONE = "mbarrier::complete_tx::bytes"
BULK = [
    f"{_TENSOR}.{_INTO}.tile.{_DONE} [%r1], [%rd1, {{%r2, %r3}}], [%r4];",
    f"{_TENSOR}.cta_group::2.{_INTO}.{_DONE}.multicast::cluster.L2::cache_hint "
    "[%r1], [%rd1, {%r2, %r3}], [%r4], %h1, %rd2;",
    f"{_TENSOR}.{_INTO}.tile::gather4.{_DONE} [%r1], [%rd1, {{%r2, %r3, %r5, %r6, %r7}}], [%r4];",
    f"cp.async.bulk.tensor.4d.{_INTO}.im2col.{_DONE} [%r1], [%rd1, {{%r2, %r3, %r4, %r5}}], [%r6], {{%h1, %h2}};",
    f"cp.async.bulk.{_INTO}.{_DONE} [%r1], [%rd1], 256, [%r2];",
    f"{_TENSOR}.global.shared::cta.bulk_group [%rd1, {{%r2, %r3}}], [%r1];",
    f"{_TENSOR}.global.shared::cta.tile::scatter4.bulk_group.L2::cache_hint "
    "[%rd1, {%r2, %r3, %r4, %r5, %r6}], [%r1], %rd2;",
    "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%rd1, {%r2, %r3}], [%r1];",
    "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%rd1], [%r1], %r2, %rd2;",
    "cp.async.bulk.prefetch.tensor.2d.L2.global [%rd1, {%r2, %r3}];",
    "cp.async.bulk.commit_group;",
    "cp.async.bulk.wait_group.read 1;",
    f"cp.async.bulk.shared::cluster.shared::cta.{_DONE} [%r1], [%r2], 256, [%r3];",
    f"cp.reduce.async.bulk.shared::cluster.shared::cta.{_DONE}.inc.u32 [%r1], [%r2], 256, [%r3];",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%rd1], [%r1], %r2;",
    f"clusterlaunchcontrol.try_cancel.async.{_DONE}.b128 [%rd1], [%rd2];",
    f"clusterlaunchcontrol.try_cancel.async.shared::cta.{_DONE}.multicast::cluster::all.b128 [%r1], [%r2];",
    "{ .reg .b128 q; ld.shared.b128 q, [%r1]; clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, q;",
    "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r1, %r2, %r3, _}, q; }",
]


def products(group: int) -> str:
    """A kernel that does a product of any kind, with A in either place."""
    kinds = ("f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4")
    every = [
        ptx_kernels.mma(kind, group, a_in_tmem, ".scale_vec::4X" if kind == "mxf4nvf4" else "")
        for kind in kinds
        for a_in_tmem in (False, True)
    ]
    return ptx_kernels.around("cvt.u32.u64 %i, %a7;\n" + ptx_kernels.one_of(every, "%i"), group)


def test_untouched_text_stays_byte_for_byte() -> None:
    plain = 'mov.b32 %r1,   7; // kept\n.loc 1 2 3\n.pragma "nounroll";\nadd.s32 %r2 , %r1, 1;'
    made = translate(kernel(plain)).text
    assert plain in made and ".target sm_90a" in made and "sm_100a" not in made


def test_lines_are_kept_track_of() -> None:
    """An error of the assembler about the translation is told as one about the original."""
    text = kernel("tcgen05.wait::ld.sync.aligned;\nmov.b32 %r1, %rd1;")
    with pytest.raises(PtxError, match="does not assemble") as caught:
        link(translate(text, "bad.ptx"), b"")  # it does not come to the model, which takes seconds to compile
    assert text.splitlines()[caught.value.line - 1] == "mov.b32 %r1, %rd1;"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            "tcgen05.mma.sp.cta_group::1.kind::mxf4.block_scale [%r1], %rd1, %rd2, [%r2], %r3, [%r4], [%r5], %p1;",
            "left out",
        ),
        ("tcgen05.mma.sp.cta_group::1.kind::mxf4 [%r1], %rd1, %rd2, [%r2], %r3, %p1;", "needs .block_scale"),
        ("tcgen05.mma.ws.cta_group::2.kind::f16 [%r1], %rd1, %rd2, %r3, %p1;", ".cta_group::1 only"),
        ("tcgen05.mma.ws.cta_group::1.kind::mxf4 [%r1], %rd1, %rd2, %r3, %p1;", "has no .ws"),
        ("tcgen05.mma.ws.cta_group::1.kind::f16.collector::a::fill [%r1], %rd1, %rd2, %r3, %p1;", "b0 to b3"),
        ("tcgen05.mma.ws.cta_group::1.kind::f16.collector::b4::fill [%r1], %rd1, %rd2, %r3, %p1;", "b0 to b3"),
        ("tcgen05.mma.ws.cta_group::1.kind::f16.collector::b1::keep [%r1], %rd1, %rd2, %r3, %p1;", "lastuse"),
        ("tcgen05.mma.ws.cta_group::1.kind::f16.ashift [%r1], [%r2], %rd2, %r3, %p1;", ".ashift"),
        ("tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, {%r1, %r2, %r3, %r4}, %p1;", "expected D"),
        ("tcgen05.mma.cta_group::1.kind::f16.ashift [%r1], %rd1, %rd2, %r3, %p1;", "takes A in Tensor Memory"),
        ("tcgen05.mma.cta_group::1.kind::f16.ashift.collector::a::use [%r1], [%r2], %rd2, %r3, %p1;", "without"),
        ("tcgen05.mma.cta_group::1.kind::f16.collector::b1::fill [%r1], %rd1, %rd2, %r3, %p1;", "belong to .ws"),
        ("tcgen05.ld.red.sync.aligned.32x32b.x2.min.u32 {%r1, %r2}, %r3, [%r4];", "left out"),
        ("ldmatrix.sync.aligned.m16n16.x1.shared.b8 {%r1, %r2}, [%r3];", "does not have"),
        ("ldmatrix.sync.aligned.m8n16.x1.shared.b8 {%r1}, [%r3];", "does not have"),
        ("ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {%r1, %r2}, [%r3];", "expected 4 registers"),
        ("stmatrix.sync.aligned.m16n8.x1.shared.b8 [%r3], {%r1};", "does not have"),
        ("tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r1}, [%r4];", "no .x64"),
        ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1}, [%r4];", "expected 2 registers"),
        ("tcgen05.cp.cta_group::1.32x128b [%r1], %rd1;", "other multicasts"),
        ("tcgen05.mma.cta_group::1.kind::mxf4 [%r1], %rd1, %rd2, %r3, [%r4], [%r5], %p1;", "needs .block_scale"),
        ("tcgen05.mma.cta_group::1.kind::f4 [%r1], %rd1, %rd2, %r3, %p1;", "no .kind"),
        ("st.async.release.gpu.global.b32 [%rd1], %r2;", "left out"),
        ("st.async.mmio.release.sys.global.b32 [%rd1], %r2;", "left out"),
        ("multimem.ld_reduce.global.add.acc::f16.v4.e4m3x4 {%r1, %r2, %r3, %r4}, [%rd1];", "left out"),
        ("tensormap.replace.tile.swizzle_atomicity.global.b1024.b32 [%rd1], 1;", "left out"),
        ("cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd1], [%r1], %r2, %h1;", "cp_mask is left out"),
        ("quantum.leap.b32 %r1, %r2;", "no translation is known"),
        (
            "cp.async.bulk.tensor.3d.shared::cluster.global.im2col::w::128.mbarrier::complete_tx::bytes "
            "[%r1], [%rd1, {%r2, %r3, %r4}], [%r5], {%h1, %h2};",
            "im2col::w::128 is left out",
        ),
        (
            "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.ignore_oob [%r1], [%rd1], 16, 1, 1, [%r2];",
            "ignore_oob is left out",
        ),
        (
            "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
            "{%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f1, %f2, %f3, %f4}, "
            "%r7, {%h1, %h2}, %r8, {%h1, %h2};",
            "known for mma with .kind::mxf4nvf4",
        ),
        (
            "mma.sync.aligned.m16n8k32.row.col.f32.e3m2.e2m3.f32 "
            "{%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f1, %f2, %f3, %f4};",
            "known for mma with .e3m2",
        ),
        ("add.u8x4 %r1, %r2, %r3;", "known for add with .u8x4"),
        ("@%p1 min.s8x4 %r1, %r2, %r3;", "known for min with .s8x4"),
        ("max.f32x2 %rd1, %rd2, %rd3;", "known for max with .f32x2"),
        ("cvt.rn.satfinite.s2f6x2.f32 %h1, %f1, %f2;", "known for cvt with .s2f6x2"),
        ("cvt.rn.bf16x2.scaled::n2::ue8m0.e4m3x2 %r1, %h1, %h2;", "known for cvt with .scaled::n2::ue8m0"),
        ("mov.b32 %r1, %missing;", "the register %missing is declared nowhere"),
        ("tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%rd20];", "the register %rd20 is declared nowhere"),
        ("@%q bra DONE; DONE:", "the register %q is declared nowhere"),
        (
            "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%rd1, {%r2, %r3, %r5, %r6}], [%r1];",
            "four rows",
        ),
    ],
)
def test_what_is_left_out_is_an_error_that_names_instruction_and_line(text: str, part: str) -> None:
    with pytest.raises(PtxError, match=part) as caught:
        translate(kernel(text), "new.ptx")
    assert caught.value.line == 8 and text.split(maxsplit=1)[0] in caught.value.instruction
    instruction = text.removesuffix(" DONE:")
    assert str(caught.value).count("new.ptx:8") == 1 and str(caught.value).count(instruction) == 1


def test_what_sm_90_has_passes() -> None:
    """Types that look like newer ones, special registers, registers of scopes, vectors and functions' headings."""
    body = """add.u16x2 %r1, %r2, %r3;
    mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32
        {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f1, %f2, %f3, %f4};
    cvt.rn.f16x2.e4m3x2 %r1, %h1;
    { .reg .v4 .b32 %v; .reg .f16x2 %pair; mov.b32 %v.x, %tid.x; mov.b32 %pair, %r1; }
    mov.v4.u32 {%r1, %r2, %r3, _}, %cluster_ctaid;
    mov.u32 %r1, %lanemask_lt; mov.u64 %rd1, %globaltimer; mov.u32 %r1, %envreg3; mov.u32 %r1, %smid;
    mov.pred %p1, %is_explicit_cluster; mov.b32 %r1, %reserved_smem_offset_begin; mov.u64 %rd1, %pm1_64;"""
    function = ".func (.reg .b32 %back) twice(.reg .b32 %given) { add.s32 %back, %given, %given; ret; }\n"
    made = translate(kernel(body).replace(".extern", function + ".extern", 1))
    assert body in made.text and function.strip() in made.text


def test_registers_of_a_scope_are_not_known_outside_it() -> None:
    with pytest.raises(PtxError, match="%inner is declared nowhere"):
        translate(kernel("{ .reg .b32 %inner; mov.b32 %inner, 1; }\nmov.b32 %r1, %inner;"))


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
def test_loads_that_reduce_are_left_out_for_either_target(target: str) -> None:
    text = kernel("tcgen05.ld.red.sync.aligned.32x32b.x2.min.u32 {%r1, %r2}, %r3, [%r4];")
    with pytest.raises(PtxError, match="of the two targets sm_103a alone has it"):
        translate(text.replace("sm_100a", target))


@pytest.mark.parametrize(
    "text",
    [
        "bar;",
        "bar.red;",
        "cvt.rn.satfinite.tf32.f32;",
        "fma.rn.f32.f16 %f1;",
        "cp.async.bulk.global.shared::cta.bulk_group [%rd1];",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%r1];",
        "tcgen05.mma.cta_group::1.kind::f16;",
        "mbarrier.init;",
    ],
)
def test_operands_that_are_missing_are_an_error_with_a_line(text: str) -> None:
    with pytest.raises(PtxError) as caught:
        translate(kernel(text), "short.ptx")
    assert caught.value.line == 8


def test_a_target_without_a_name_is_refused() -> None:
    with pytest.raises(PtxError, match="no name"):
        translate(".target\n")


def test_other_targets_are_refused() -> None:
    with pytest.raises(PtxError, match="sm_100a"):
        translate(kernel("").replace("sm_100a", "sm_75"))
    # Kernels for Hopper run on the host machine; a Hopper GPU needs no emulator for them.
    older = kernel("").replace("sm_100a", "sm_90a")
    assert translate(older).source == "sm_90a"
    with pytest.raises(PtxError, match="expected PTX for sm_100a or sm_103a for a GPU, found sm_90a"):
        build(older)


def test_sites_name_their_instructions() -> None:
    made = translate(kernel("@%p1 tcgen05.wait::ld.sync.aligned;"))
    assert [(site.number, site.line, site.mutation) for site in made.sites] == [(1, 8, "wait"), (2, 9, "")]
    assert made.sites[0].text == "@%p1 tcgen05.wait::ld.sync.aligned;" and made.sites[0].kernel == "k"


@pytest.mark.compile
@pytest.mark.parametrize(
    "group",
    [moves(), copies(), STATIONARY, SPARSE, SHIFTED, MATRICES, ARITHMETIC, SYNCHRONISATION, PAIRED, BULK],
    ids=["move", "copy", "stationary", "sparse", "shifted", "matrix", "math", "sync", "paired", "bulk"],
)
def test_every_form_assembles_for_both_targets(group: list[str], tmp_path: Path) -> None:
    """Each instruction is real sm_100a PTX, and its translation is real sm_90a PTX that links with the model."""
    text = kernel("\n".join(group))
    assert assembled_for_blackwell(text, tmp_path)
    assert isinstance(build(text, "forms.ptx"), Program)


@pytest.mark.compile
@pytest.mark.parametrize("group", [1, 2])
def test_every_product_assembles_for_both_targets(group: int, tmp_path: Path) -> None:
    text = products(group)
    assert assembled_for_blackwell(text, tmp_path)
    assert build(text, "products.ptx").kernels == ("around",)


def variants() -> dict[str, KernelSource]:
    """One of each kernel for sm_100f."""
    every = [source for entry in PLANNED for source in compiled(entry.module) if source.arch == "sm_100f"]
    return {source.entry: source for source in reversed(every)}


@pytest.mark.compile
@pytest.mark.parametrize("source", variants().values(), ids=variants())
def test_operators_kernels_assemble(source: KernelSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is kept of a kernel is what was built; its launch facts are its own, not the model's."""
    text = service.ptx(source)
    program.model(program._registers(512 * program._resident(text)))  # compiled for seconds, and here for all workers
    monkeypatch.setattr(program, "ptx", lambda asked: text if asked == source else "")
    monkeypatch.setattr(folders, "location", lambda: tmp_path)
    made = program.kept(source, 512)
    assert made.kernels == (source.entry,) and set(made.facts) >= {"threads", "smem_bytes"}
    monkeypatch.setattr(program, "build", None)
    assert program.kept(source, 512) == made


@pytest.mark.compile
def test_the_gemm_assembles() -> None:
    made = gemm.program()
    assert made.kernels == ("gemm",)
    assert {site.mutation for site in made.sites} > {"wait", "fence", "commit", "expect_tx"}


def test_a_saved_program_is_read_back(tmp_path: Path) -> None:
    translation = translate(gemm.ptx(), "gemm.ptx")
    parts = translation.kernels, translation.sites, 64, dict(translation.facts)
    made = Program("gemm.ptx", b"a cubin, for whose model a compiler would take seconds", *parts)
    made.save(tmp_path / "gemm.cubin")
    assert Program.read(tmp_path / "gemm.cubin") == made


# The model's numbers are written once in CUDA and once in Python -------------------------------------------------


def test_functions_and_parameters_agree_with_the_model() -> None:
    text = (CUDA / "model.cu").read_text()
    found = {}
    for result, name, parameters in re.findall(r"CUPYMLA_MODEL (\w+) cupymla_emulate_(\w+)\(([^)]*)\)", text):
        bits = tuple(64 if "uint64_t" in p else 32 for p in parameters.split(",") if p.strip())
        found[name] = (0 if result == "void" else 32, bits)
    assert found == MODEL


def test_failures_agree_with_the_model() -> None:
    text = (CUDA / "failure.cuh").read_text()
    codes = {int(number) for number in re.findall(r"^  k\w+ = (\d+),$", text, re.MULTILINE)} - {0}
    assert codes == set(failures.SENTENCES)


@pytest.mark.compile
def test_structs_agree_with_the_model() -> None:
    facts = model_facts()
    import ctypes

    assert facts["launch_bytes"] == ctypes.sizeof(LaunchState) and facts["failure_bytes"] == ctypes.sizeof(Report)
    assert LaunchState.removed.offset == REMOVED_OFFSET
    assert LAUNCH in (CUDA / "state.cuh").read_text()


def test_the_documentation_shows_the_table() -> None:
    assert table() in DOCS.read_text()


def test_rows_tell_forms_apart() -> None:
    assert row_for("max.f32", 4) is THREE_INPUTS and row_for("max.f32", 3) is None
    assert row_for("st.global.b32", 2) is None and row_for("st.param.b32", 2) is None
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)


SHARED_BY_TWO = """.extern .shared .align 1024 .b8 memory[];
.shared .align 64 .b8 both[80];
.visible .entry first(.param .u64 a) {
.reg .b32 %r<4>; .reg .b64 %rd; .shared .align 8 .b64 barrier; .shared .b8 odd[13];
mov.u32 %r0, memory; mov.u32 %r1, both; mov.u32 %r2, barrier; mov.u32 %r3, odd; ld.param.b64 %rd, [a];
st.global.v4.b32 [%rd], {%r0, %r1, %r2, %r3}; ret; }
.visible .entry second(.param .u64 a) {
.reg .b32 %r<4>; .reg .b64 %rd;
mov.u32 %r0, memory; ld.param.b64 %rd, [a]; st.global.b32 [%rd], %r0; ret; }
"""


@pytest.mark.compile
@pytest.mark.parametrize("alignment", [16, 128, 1024])
def test_dynamic_shared_memory_lies_behind_the_static_as_it_is_aligned(alignment: int) -> None:
    """Linkers put it 16 bytes aligned. It begins where static shared memory, told by its section's size, ends."""
    text = HEAD + SHARED_BY_TWO.replace(".align 1024", f".align {alignment}")
    translation = translate(text, "two.ptx")
    assert translation.alignment == alignment
    plain = link(translation, model(128))
    assert set(missing_bytes(translation, plain)) == ({"first"} if alignment > 16 else set())
    image = Image(build(text, "two.ptx", 128).cubin)
    assert [image.shared_bytes(kernel) % alignment for kernel in ("first", "second")] == [0, 0]
    assert image.shared_bytes("first") >= Image(plain).shared_bytes("first") > image.shared_bytes("second")


@pytest.mark.compile
def test_a_linker_that_misplaces_shared_memory_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "translate", lambda text, name, padding=None: translate(text, name))
    with pytest.raises(CompileError, match="at a multiple of 1024 bytes"):
        build(HEAD + SHARED_BY_TWO, "two.ptx", 128)


@pytest.mark.compile
@pytest.mark.parametrize("threads", [512, 1024])
def test_the_model_leaves_room_for_every_thread(threads: int) -> None:
    """A kernel's registers are at least those of the functions it calls, and a CTA has 65536."""
    text = ptx_kernels.around(ptx_kernels.mma("f16")).replace(".maxntid 128, 1, 1", f".maxntid {threads}, 1, 1")
    registers = Image(build(text, "room.ptx").cubin).registers("around")
    assert 0 < registers * threads <= 65536
