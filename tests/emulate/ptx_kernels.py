"""PTX kernels around one instruction under test: state goes in from memory and comes out to memory.

A kernel has one warpgroup per CTA. It copies an image into dynamic shared memory and another into Tensor Memory, runs
the instruction, and writes Tensor Memory back. Addresses that are only known on the device, the first byte of shared
memory and the first column, are added there.
"""

from __future__ import annotations

from collections.abc import Sequence

REGISTERS = 128
COLUMNS = 512
ARGUMENTS = 8


def _move(direction: str, group: int) -> str:
    """Lines that move the CTA's 32 columns at %column between Tensor Memory and %image."""
    names = [f"%v{i}" for i in range(32)]
    listed = "{" + ", ".join(names) + "}"
    lines = []
    if direction == "in":
        for i in range(0, 32, 4):
            lines.append(f"ld.global.v4.b32 {{{', '.join(names[i : i + 4])}}}, [%image+{4 * i}];")
        lines.append(f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%column], {listed};")
        lines.append("tcgen05.wait::st.sync.aligned;")
    else:
        lines.append(f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {listed}, [%column];")
        lines.append("tcgen05.wait::ld.sync.aligned;")
        for i in range(0, 32, 4):
            lines.append(f"st.global.v4.b32 [%image+{4 * i}], {{{', '.join(names[i : i + 4])}}};")
    return "\n".join(lines)


def _loop(direction: str, base: str, group: int) -> str:
    return f"""
    mov.b32 %i, 0;
    mad.wide.u32 %image, %row, {COLUMNS * 4}, {base};
    add.u32 %column, %tmem, %window;
{direction}_loop:
    {_move(direction, group)}
    add.u32 %column, %column, 32;
    add.u64 %image, %image, 128;
    add.u32 %i, %i, 1;
    setp.lt.u32 %p, %i, {COLUMNS // 32};
    @%p bra {direction}_loop;
"""


def one_of(bodies: Sequence[str], which: str) -> str:
    """The body whose number a register of 32 bits holds: a compiler then takes them all at once. Each has a scope of
    its own, for registers and labels."""
    names = [f"body_{i}" for i in range(len(bodies))]
    scoped = (f"{name}:\n{{\n{body}\n}}\nbra body_done;\n" for name, body in zip(names, bodies, strict=True))
    return f"""{{
    bodies: .branchtargets {", ".join(names)};
    brx.idx {which}, bodies;
{"".join(scoped)}body_done:
}}"""


def around(operation: str, group: int = 1, by: str = "thread") -> str:
    """A kernel that runs `operation`.

    Args:
        operation: PTX. It may use %tmem (the first column's address), %smem (the first byte of dynamic shared memory,
            32 bits), %start (the same as the start address of a descriptor), %a0 to %a7 (64-bit arguments) and %r0 to
            %r127, which are written out.
        group: CTAs that the Tensor Memory belongs to.
        by: "thread" runs it in one thread of the first CTA of a pair and commits, "warps" in every thread.
    """
    arguments = "\n".join(f"    ld.global.b64 %a{i}, [%arguments+{8 * i}];" for i in range(ARGUMENTS))
    written = "\n".join(f"    st.global.b32 [%image+{4 * i}], %r{i};" for i in range(REGISTERS))
    cleared = "\n".join(f"    mov.b32 %r{i}, 0;" for i in range(REGISTERS))
    everybody = "barrier.cluster.arrive.aligned;\n    barrier.cluster.wait.aligned;" if group == 2 else "bar.sync 0;"
    commit = f"tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster"
    commit += ".multicast::cluster.b64 [%bar], %mask;" if group == 2 else ".b64 [%bar];"
    single = f"""
    setp.ne.u32 %p, %thread, 0;
    @%p bra issued;
    setp.ne.u32 %p, %rank, 0;
    @%p bra issued;
    {operation}
    mov.b16 %mask, 3;
    {commit}
issued:
waiting:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], 0;
    @!%p bra waiting;
    tcgen05.fence::after_thread_sync;
"""
    return f"""
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry around(.param .u64 p_smem, .param .u32 p_bytes, .param .u64 p_in, .param .u64 p_out,
                       .param .u64 p_arguments, .param .u64 p_registers)
.maxntid 128, 1, 1
{{
    .reg .pred %p;
    .reg .b16 %mask;
    .reg .b32 %r<{REGISTERS}>, %v<32>;
    .reg .b32 %i, %n, %tmem, %smem, %bar, %slot, %column, %window, %thread, %row, %cta, %rank, %word, %at;
    .reg .b64 %a<{ARGUMENTS}>, %image, %in, %out, %source, %arguments, %registers, %start;
    .shared .align 8 .b64 barrier;
    .shared .align 4 .b32 base;
{cleared}
    mov.u32 %thread, %tid.x;
    mov.u32 %cta, %ctaid.x;
    mov.u32 %rank, %cluster_ctarank;
    mov.u32 %smem, dynamic;
    mov.u32 %bar, barrier;
    mov.u32 %slot, base;
    ld.param.b64 %source, [p_smem];
    ld.param.b32 %n, [p_bytes];
    ld.param.b64 %in, [p_in];
    ld.param.b64 %out, [p_out];
    ld.param.b64 %arguments, [p_arguments];
    ld.param.b64 %registers, [p_registers];
    mad.wide.u32 %source, %cta, %n, %source;
    mad.lo.u32 %row, %cta, 128, %thread;
    and.b32 %window, %thread, 96;
    shl.b32 %window, %window, 16;
    and.b32 %at, %smem, 0x3ffff;
    cvt.u64.u32 %start, %at;
    shr.u64 %start, %start, 4;
{arguments}
    shl.b32 %i, %thread, 2;
copy:
    setp.ge.u32 %p, %i, %n;
    @%p bra copied;
    cvt.u64.u32 %image, %i;
    add.u64 %image, %image, %source;
    ld.global.b32 %word, [%image];
    add.u32 %at, %smem, %i;
    st.shared.b32 [%at], %word;
    add.u32 %i, %i, 512;
    bra copy;
copied:
    fence.proxy.async.shared::cta;
    setp.ne.u32 %p, %thread, 0;
    @%p bra made;
    mbarrier.init.shared::cta.b64 [%bar], 1;
    fence.mbarrier_init.release.cluster;
made:
    setp.ge.u32 %p, %thread, 32;
    @%p bra allocated;
    tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%slot], {COLUMNS};
    tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
allocated:
    tcgen05.fence::before_thread_sync;
    {everybody}
    tcgen05.fence::after_thread_sync;
    ld.shared.b32 %tmem, [%slot];
    {_loop("in", "%in", group)}
    tcgen05.fence::before_thread_sync;
    {everybody}
    tcgen05.fence::after_thread_sync;
    {single if by == "thread" else operation}
    tcgen05.fence::before_thread_sync;
    {everybody}
    tcgen05.fence::after_thread_sync;
    {_loop("out", "%out", group)}
    mad.wide.u32 %image, %row, {4 * REGISTERS}, %registers;
{written}
    tcgen05.fence::before_thread_sync;
    {everybody}
    tcgen05.fence::after_thread_sync;
    setp.ge.u32 %p, %thread, 32;
    @%p bra freed;
    tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %tmem, {COLUMNS};
freed:
    {everybody}
    ret;
}}
"""


def mma_ws(
    kind: str, a_in_tmem: bool = False, hints: tuple[str, ...] = ("",), masked: bool = False, sparse: bool = False,
) -> str:  # fmt: skip
    """tcgen05.mma.ws, once for each collector hint; D is added to from the second on.

    Arguments are those of `mma`, but that %a4 is the zero-column mask or the offset of a sparse A's metadata, and
    %a5 is added to B's descriptor each time.
    """
    setup = mma(kind, 1, a_in_tmem).rsplit("tcgen05.mma", 1)[0]
    a, mask = "[%r1]" if a_in_tmem else "%a0", ", %a4" if masked else ""
    stem, metadata = ("tcgen05.mma.ws.sp", "[%r6], ") if sparse else ("tcgen05.mma.ws", "")
    lines = []
    for hint in hints:
        lines.append(f"{stem}.cta_group::1.kind::{kind}{hint} [%r2], {a}, %a1, {metadata}%r3, q{mask};")
        lines.append("add.u64 %a1, %a1, %a5;\nsetp.eq.b32 q, 0, 0;")
    return setup + "\n".join(lines) + "\n}\n"


def mma(
    kind: str, group: int = 1, a_in_tmem: bool = False, vector: str = "", scale: int = 0, disabled: int = 0,
    shifted: bool = False, sparse: bool = False,
) -> str:  # fmt: skip
    """One tcgen05.mma.

    %a0 and %a1 hold A and B, %a2 the offset of D and the instruction descriptor, %a3 whether D is added, %a4 the
    offsets of the scale factors, or of a sparse A's metadata. `scale` is scale-input-d, `disabled` has a bit for every
    lane that keeps its D.
    """
    scaled = kind.startswith("mxf")
    qualifiers = f".block_scale{vector}" if scaled else ".ashift" if shifted else ""
    a = "[%r1]" if a_in_tmem else "%a0"
    place = "add.u32 %r1, %tmem, %r1;" if a_in_tmem else "add.u64 %a0, %a0, %start;"
    between, setup = ("[%r6], [%r7], " if scaled else ""), ""
    if disabled:
        words = [disabled >> (32 * i) & 0xFFFFFFFF for i in range(4 * group)]
        setup = "\n".join(f"mov.b32 %r{10 + i}, {word:#x};" for i, word in enumerate(words))
        between = "{" + ", ".join(f"%r{10 + i}" for i in range(4 * group)) + "}, "
    last = f", {scale}" if scale else ""
    stem, metadata = ("tcgen05.mma.sp", "[%r6], ") if sparse else ("tcgen05.mma", "")
    return f"""
    {{
    .reg .pred q;
    cvt.u32.u64 %r1, %a0;
    {place}
    add.u64 %a1, %a1, %start;
    mov.b64 {{%r2, %r3}}, %a2;
    add.u32 %r2, %r2, %tmem;
    cvt.u32.u64 %r4, %a3;
    setp.ne.b32 q, %r4, 0;
    mov.b64 {{%r6, %r7}}, %a4;
    add.u32 %r6, %r6, %tmem;
    add.u32 %r7, %r7, %tmem;
    {setup}
    {stem}.cta_group::{group}.kind::{kind}{qualifiers} [%r2], {a}, %a1, {metadata}%r3, {between}q{last};
    }}
"""
