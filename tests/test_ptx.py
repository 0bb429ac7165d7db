"""The PTX parser reads all of PTX's shapes, loses nothing, and says where text is no PTX."""

from __future__ import annotations

import pytest

from cupymla_lab.ptx import Places, PtxError, parse
from cupymla_lab.ptx.syntax import (
    Address,
    Block,
    Constant,
    Directive,
    Function,
    Group,
    Instruction,
    Label,
    Name,
    Negated,
    Offset,
    Pair,
    Statement,
    Variable,
    Vector,
    shape,
)
from cupymla_lab.ptx.variables import initial_bytes, size_bytes

HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n"
MODULE = (
    HEAD
    + r"""
// a comment with { braces } and ; semicolons
.file 1 "/a path/with spaces.cu", 17, 42
.extern .func (.param .b32 func_retval0) vprintf (.param .b64 a, .param .b64 b) ;
.global .align 4 .b8 table[8] = {1, 2, (3), 0x4, 0b101, 6, 7, 8};
.const .f32 half = 0f3F000000;
.extern .shared .align 1024 .b8 memory[];
.visible .func (.param .b32 out) twice (.param .b32 in)
.noreturn
{ .reg .b32 %r<2>; ld.param.b32 %r1, [in]; st.param.b32 [out], %r1; ret; }
.visible .entry kernel(
    .param .u64 .ptr .global .align 16 kernel_param_0, /* a block
    comment */ .param .align 128 .b8 kernel_param_1[128]
)
.maxntid 384, 1, 1
.minnctapersm 1
.explicitcluster
{
    .reg .pred %p<4>;
    .reg .b32 %r<100>;
    .reg .b64 %rd<10>;
    .local .align 16 .b8 __local_depot0[64];
    .pragma "nounroll";
    .loc 1 12 3, function_name $L__info_string0, inlined_at 1 9 5
    mov.u64 %rd1, kernel_param_0;
    mov.b32 %r1, %tid.x;
    mov.b32 %r7, -17;
$L__BB0_1:
    @!%p1 bra $L__BB0_1;
    setp.eq.s32 %p1|%p2, %r1, 0, !%p3;
    ld.global.v4.b32 {%r1, %r2, _, %r4}, [%rd1+-16];
    st.shared.b32 [memory+8], %r1;
    // begin inline asm
    {
    .reg .pred P1;
LAB_WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 P1, [%r2], %r3;
    @P1 bra DONE;
    bra LAB_WAIT;
DONE:
    }
    // end inline asm
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd2, {%r3, %r4}], [%r5];
    {
    .param .b32 p; st.param.b32 [p], 3; .param .b32 retval0;
    call.uni (retval0), twice, (p);
    ld.param.b32 %r9, [retval0];
    }
    fma.rn.f32 %r1, %r2, 0f3F800000, 0d3FF0000000000000;
    tex.2d.v4.f32.f32 {%r1,%r2,%r3,%r4}, [table, {%r5,%r6}];
$targets: .branchtargets $L__BB0_1, DONE;
    brx.idx %r1, $targets;
    exit;
}
.section .debug_str { info: .b8 116 .b8 0 .b32 info+4 { nested } }
"""
)


def statements(text: str) -> list[Statement]:
    """The statements of one kernel's body."""
    kernel = parse(HEAD + ".entry k() {" + text + "}").kernel("k")
    assert kernel is not None and kernel.body is not None
    return list(kernel.body.statements)


def instruction(text: str) -> Instruction:
    (found,) = statements(text)
    assert isinstance(found, Instruction)
    return found


def test_a_module_of_every_construct_is_read() -> None:
    module = parse(MODULE)
    assert [f.name for f in module.functions] == ["vprintf", "twice", "kernel"]
    kernel = module.kernel("kernel")
    assert kernel is not None and kernel.body is not None
    kinds = [type(statement).__name__ for statement, _ in kernel.body.walk()]
    assert kinds.count("Label") == 3 and kinds.count("Variable") == 7
    assert ".maxntid" in kernel.heading and ".explicitcluster" in kernel.heading
    target = module.directive(".target")
    assert target is not None and target.words == (".target", "sm_100a")


def test_every_part_stands_where_it_says() -> None:
    """Places are offsets into the text: what is between two parts is white space and comments, so nothing is lost."""
    module = parse(MODULE)
    for item in module.items:
        assert MODULE[item.start : item.end].split()[0] == item_words(item)[0]
    for function in module.functions:
        if function.body is None:
            continue
        for statement, around in function.body.walk():
            text = MODULE[statement.start : statement.end]
            assert around[0].start < statement.start < statement.end < around[0].end
            if isinstance(statement, Instruction):
                assert text.endswith(";") and statement.opcode in text


def item_words(item: Directive | Variable | Function) -> tuple[str, ...]:
    return item.heading if isinstance(item, Function) else item.words


def test_what_debuggers_read_may_be_passed_over() -> None:
    """All else is where it was, and errors name the same line."""
    text = MODULE.replace("{ nested } ", "")
    found: list[list[tuple[int, int]]] = []
    for debug in (True, False):
        module = parse(text, debug=debug)
        parts = [*module.items, *(part for f in module.functions if f.body for part, _ in f.body.walk())]
        names = [part.words[0] if isinstance(part, Directive) else "" for part in parts]
        assert (names.count(".loc"), names.count(".section")) == ((1, 1) if debug else (0, 0))
        found.append(
            [(p.start, p.end) for p, name in zip(parts, names, strict=True) if name not in (".loc", ".section")]
        )
        with pytest.raises(PtxError, match=f"<ptx>:{text.count(chr(10)) + 1}: "):
            parse(text + "nothing", debug=debug)
    assert found[0] == found[1]


def test_printing_and_reading_again_gives_the_same() -> None:
    module = parse(MODULE)
    assert shape(parse(str(module))) == shape(module)


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        ("ld.global.b32 %r1, [%rd1];", (Name("%r1"), Address((Name("%rd1"),)))),
        ("ld.global.b32 %r1, [%rd1+16];", (Name("%r1"), Address((Offset(Name("%rd1"), "16"),)))),
        ("ld.global.b32 %r1, [%rd1+-16];", (Name("%r1"), Address((Offset(Name("%rd1"), "-16"),)))),
        ("selp.b32 %r1, -1, 0x10, !%p1;", (Name("%r1"), Constant("-1"), Constant("0x10"), Negated(Name("%p1")))),
        ("setp.eq.s32 %p1|%p2, %r1, 0;", (Pair(Name("%p1"), Name("%p2")), Name("%r1"), Constant("0"))),
        ("mov.b64 {%r1, %r2}, %rd1;", (Vector((Name("%r1"), Name("%r2"))), Name("%rd1"))),
        ("call (r), f, (a, 1);", (Group((Name("r"),)), Name("f"), Group((Name("a"), Constant("1"))))),
        ("mov.u32 %r1, (1 << 4) | 3;", (Name("%r1"), Constant("(1<<4)|3"))),
        (
            "cp.x [%r1], [%rd1, {%r2, %r3}], [%r4];",
            (
                Address((Name("%r1"),)),
                Address((Name("%rd1"), Vector((Name("%r2"), Name("%r3"))))),
                Address((Name("%r4"),)),
            ),
        ),
    ],
)
def test_operands(text: str, operands: tuple[object, ...]) -> None:
    assert instruction(text).operands == operands


def test_an_offset_is_printed_as_ptxas_reads_it() -> None:
    """It takes `%rd1+-16` and not `%rd1-16`, which this parser takes as well."""
    assert [str(instruction(f"ld.b32 %r1, [{x}];").operands[1]) for x in ("%rd1+-16", "%rd1-16", "%rd1+16")] == [
        *("[%rd1+-16]", "[%rd1+-16]", "[%rd1+16]")
    ]


def test_variables_hold_what_their_initialisers_say() -> None:
    text = (
        ".global .align 4 .b32 a[4] = {1, -2, 0x3U};\n.const .b8 b[3] = {65, 66};\n.global .u64 c = a;\n.global .b16 d;"
    )
    held = [item for item in parse(f"{HEAD}{text}").items if isinstance(item, Variable)]
    assert [size_bytes(item) for item in held] == [16, 3, 8, 2]
    numbers = b"\x01\0\0\0" + b"\xfe\xff\xff\xff" + b"\x03\0\0\0" + bytes(4)
    assert [initial_bytes(item) for item in held] == [numbers, b"AB\0", bytes(8), bytes(2)]


def test_guards_and_opcodes() -> None:
    found = instruction("@!%p3 tcgen05.mma.cta_group::2.kind::f16 [%r1], %rd1, %rd2, %r2, p;")
    assert found.guard is not None and (found.guard.register, found.guard.negated) == ("%p3", True)
    assert found.parts == ("tcgen05", "mma", "cta_group::2", "kind::f16")


def test_scopes_nest_and_labels_belong_to_them() -> None:
    first, second = statements("{ .reg .b32 a; { L: bra L; } } { L: bra L; }")
    assert isinstance(first, Block) and isinstance(second, Block)
    inner = first.statements[1]
    assert isinstance(inner, Block) and isinstance(inner.statements[0], Label)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (HEAD + ".entry k() {\n mov.b32 %r1, %r2\n}\n", 6),
        (HEAD + ".entry k() {\n ret;\n", 6),
        (HEAD + ".entry k() {\n mov.b32 %r1, §;\n}\n", 5),
        (HEAD + "mov.b32 %r1, %r2;\n", 4),
        (HEAD + ".entry k() {\n ld.b32 %r1, [%rd1;\n}", 5),
    ],
)
def test_what_is_no_ptx_is_refused_with_its_line(text: str, line: int) -> None:
    with pytest.raises(PtxError) as caught:
        parse(text, "bad.ptx")
    assert caught.value.line == line and str(caught.value).startswith(f"bad.ptx:{line}")


def test_lines_are_traced_to_their_sources_and_callers() -> None:
    """Of an instruction that was inlined twice over, all three places are told; a function's end ends what it said."""
    text = HEAD + (
        '.file 1 "/home/me/cuda/op/sm90/kernel.cu"\n.file 2 "/home/me/cuda/op/sm90/../../common/barrier.cuh"\n'
        ".visible .entry kernel()\n{\n"
        "mov.u32 %r1, 0;\n"
        ".loc 1 20 3\nmov.u32 %r1, 1;\n"
        ".loc 1 30 5, function_name $L__info_string0, inlined_at 1 20 3\nmov.u32 %r1, 2;\n"
        ".loc 2 42 7, function_name $L__info_string1, inlined_at 1 30 5\nmov.u32 %r1, 3;\n"
        ".loc 2 0 7, function_name $L__info_string1, inlined_at 1 30 5\nmov.u32 %r1, 4;\n"
        "}\nmov.u32 %r1, 5;\n"
    )
    places = Places(text)
    found = [places.of(number) for number, line in enumerate(text.splitlines(), 1) if line.startswith("mov")]
    kernel, caller = "cuda/op/sm90/kernel.cu:20", "cuda/op/sm90/kernel.cu:30, from cuda/op/sm90/kernel.cu:20"
    waits = f"cuda/common/barrier.cuh:42, from {caller}"
    assert found == ["", kernel, caller, waits, waits, ""]
