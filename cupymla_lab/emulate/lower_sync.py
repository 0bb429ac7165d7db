"""Barriers, fences and the ends of threads: the hardware's own instructions with calls that tell the model.

Source: PTX ISA 9.0, "Parallel Synchronization and Communication Instructions".
"""

from __future__ import annotations

from ..ptx.syntax import Constant, Negated, Operand
from .code import Code


def _named_space(code: Code) -> bool:
    return any(part.startswith("shared") for part in code.instruction.parts)


def barrier_init(code: Code) -> None:
    """mbarrier.init and .inval: executed, and noted."""
    code.line(code.original())
    function = "barrier_init" if code.instruction.parts[1] == "init" else "barrier_end"
    code.call(function, code.shared(code.operand(0), _named_space(code)))


def barrier_wait(code: Code) -> None:
    """mbarrier.try_wait and .test_wait: one test, then the model does what could complete the phase.

    The model is told before the first test of a wait as well, so that mode random can let a thread come late to it.
    """
    done, barrier = code.operand(0), code.shared(code.operand(1), _named_space(code))
    removed, finished = code.removed(), code.label()
    code.line(f"setp.eq.b32 {done}, 0, 0;")
    code.line(f"@{removed} bra {finished};")
    code.call("begin_wait", barrier)
    opcode = code.instruction.opcode.replace("mbarrier.try_wait", "mbarrier.test_wait")
    code.line(code.original(opcode=opcode, operands=code.instruction.operands[:3]))
    missed, end = code.label(), code.label()
    code.line(f"@!{done} bra {missed};")
    code.call("polled", barrier)
    code.line(f"bra {end};")
    code.line(f"{missed}:")
    code.call("poll", barrier, code.site)
    code.line(f"{end}:")
    code.line(f"{finished}:")


def barrier_arrive(code: Code) -> None:
    """mbarrier.arrive and .expect_tx: without .expect_tx when the launch removes that, else not at all.

    A thread may be late behind it: what it has let others do is over before it goes on.
    """
    parts = code.instruction.parts
    plain = ""
    if "expect_tx" in parts and parts[1] != "expect_tx":
        opcode = ".".join(part for part in parts if part != "expect_tx")
        plain = code.original(opcode=opcode, operands=code.instruction.operands[:-1])
    code.unless_removed(code.original(), plain)
    code.call("arrived")


def fence(code: Code) -> None:
    """fence, membar and griddepcontrol.wait; the two that order the asynchronous proxy are noted."""
    opcode = code.instruction.opcode
    code.unless_removed(code.original())
    if opcode.startswith("fence.proxy.async"):
        code.call("proxy_fence", code.site)
    elif opcode.startswith("fence.mbarrier_init"):
        code.call("init_fence", code.site)


def named_barrier(code: Code) -> None:
    """bar and barrier in all forms but bar.warp.sync."""
    parts = [part for part in code.instruction.parts if part not in ("cta", "aligned")]
    operands = list(code.instruction.operands)
    destination = operands.pop(0) if parts[1] == "red" else None
    vote: Operand | None = operands.pop() if destination is not None else None
    identifier = code.value(operands[0])
    count = code.value(operands[1]) if len(operands) > 1 else 0
    voted: str | int = code.value(vote) if vote is not None else 0
    how = int(parts[1] != "arrive") | int(destination is not None) << 1  # it waits, it reduces
    result = code.call("named_barrier", identifier, count, how, voted, code.site)
    if destination is None:
        return
    yes, all_ = code.temporary(32), code.temporary(32)
    code.line(f"and.b32 {yes}, {result}, 65535;")
    code.line(f"shr.u32 {all_}, {result}, 16;")
    if "popc" in parts:
        code.line(f"mov.b32 {destination}, {yes};")
    elif "or" in parts:
        code.line(f"setp.ne.b32 {destination}, {yes}, 0;")
    else:
        code.line(f"setp.eq.b32 {destination}, {yes}, {all_};")


def cluster_barrier(code: Code) -> None:
    """barrier.cluster.arrive and .wait."""
    code.call(f"cluster_{code.instruction.parts[2]}", code.site)


def leave(code: Code) -> None:
    """The end of a thread: exit anywhere, ret in a kernel."""
    code.call("leave", code.site)
    code.line(f"{code.instruction.opcode};")


def registers(code: Code) -> None:
    """setmaxnreg: on a GPU ptxas gives every thread the same number, and registers are not moved between warps."""
    code.call("registers", code.value(code.operand(0)), int("inc" in code.instruction.parts), code.site)


def kept(code: Code) -> None:
    """What is executed as it stands, unless the launch takes it away."""
    code.unless_removed(code.original())


def shared_store(code: Code) -> None:
    """st and stmatrix: executed; what goes to shared memory is noted for the check of fence.proxy.async."""
    code.line(code.original())
    parts = code.instruction.parts
    bytes_ = _stored_bytes(parts)
    if any(part.startswith("shared") for part in parts):
        code.call("shared_store", code.shared(code.operand(0), named=True), bytes_)
        return
    inner = code.inner(code.operand(0))
    wide, inside, end = code.value(inner, 64), code.temporary(1), code.label()
    code.line(f"isspacep.shared {inside}, {wide};")
    code.line(f"@!{inside} bra {end};")
    narrow = code.temporary(32)
    code.line(f"cvta.to.shared.u64 {wide}, {wide};")
    code.line(f"cvt.u32.u64 {narrow}, {wide};")
    code.call("shared_store", narrow, bytes_)
    code.line(f"{end}:")


def _stored_bytes(parts: tuple[str, ...]) -> int:
    if parts[0] == "stmatrix":
        return 16
    width = int(parts[-1].lstrip("bfusx").split("x")[0] or 0) // 8
    times = next((int(part[1:]) for part in parts if part in ("v2", "v4", "v8")), 1)
    return max(width, 1) * times


def negated(operand: Operand) -> bool:
    """Whether a predicate operand is used upside down."""
    return isinstance(operand, Negated)


def cluster_launch(code: Code) -> None:
    """clusterlaunchcontrol: a request is answered like a bulk copy, when the mode says.

    The answer's four words are 1 and the first CTA of the cluster that was handed over, or zeros.
    """
    parts = code.instruction.parts
    if "query_cancel" in parts:
        _query_cancel(code)
        return
    answer, barrier = (code.shared(code.operand(i), _named_space(code)) for i in (0, 1))
    mask = 65535 if "multicast::cluster::all" in parts else 0
    words = [(code.value(Constant("0xffffffff")), 32), (barrier, 32), (code.value(Constant(str(mask))), 32)]
    code.call("try_cancel", code.buffer([*words, (answer, 32)]), code.site)


def _query_cancel(code: Code) -> None:
    low, high = code.temporary(64), code.temporary(64)
    code.line(f"mov.b128 {{{low}, {high}}}, {code.operand(1)};")
    words = [code.temporary(32) for _ in range(4)]
    code.line(f"mov.b64 {{{words[0]}, {words[1]}}}, {low};")
    code.line(f"mov.b64 {{{words[2]}, {words[3]}}}, {high};")
    if "is_canceled" in code.instruction.parts:
        code.call("query_cancel", words[0], code.site)
        code.line(f"setp.ne.b32 {code.operand(0)}, {words[0]}, 0;")
        return
    asked = next((part for part in code.instruction.parts if part.startswith("get_first_ctaid")), "")
    _, _, dimension = asked.partition("::")
    if dimension:
        code.line(f"mov.b32 {code.operand(0)}, {words[1 + 'xyz'.index(dimension)]};")
        return
    for target, word in zip(code.items(code.operand(0)), words[1:], strict=False):
        if str(target) != "_":
            code.line(f"mov.b32 {target}, {word};")
