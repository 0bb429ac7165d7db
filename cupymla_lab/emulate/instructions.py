"""Which PTX instruction is translated how: the one table that the translator, the documentation and the tests read."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from . import lower_copy, lower_math, lower_sync, lower_tensor, lower_warp
from .code import Code

How = Literal["model", "observed", "rewritten", "dropped", "left out"]
Lowering = Callable[[Code], None]
Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One family of instructions.

    Attributes:
        name: as documentation shows it.
        how: "model" (a call), "observed" (executed by hardware, the model is told), "rewritten" (as sm_90a
            instructions), "dropped" (changes no result) or "left out" (an error).
        note: what is covered, or why not.
        matches: whether an opcode, cut at its dots, belongs to it.
        lower: writes the replacement; None where it is left out.
        mutation: what taking it away is called in a mutation test, "" where that makes no sense.
    """

    name: str
    how: How
    note: str
    matches: Callable[[Parts], bool]
    lower: Lowering | None = None
    mutation: str = ""


def _begins(*stems: str) -> Callable[[Parts], bool]:
    return lambda parts: any(".".join(parts).startswith(stem) for stem in stems)


def _tcgen05(*names: str) -> Callable[[Parts], bool]:
    return lambda parts: parts[0] == "tcgen05" and len(parts) > 1 and parts[1] in names


def _narrow(parts: Parts) -> bool:
    """Whether a conversion touches a type or rounding that sm_90a does not have."""
    if parts[0] != "cvt":
        return False
    new = ("e2m1x2", "e2m3x2", "e3m2x2", "ue8m0x2", "e2m1x4", "e2m3x4", "e3m2x4", "e4m3x4", "e5m2x4")
    return "rs" in parts or any(part in new for part in parts)


def _wide(parts: Parts) -> bool:
    wide = "v8" in parts or ("v4" in parts and parts[-1] in ("b64", "u64", "s64", "f64"))
    return parts[0] in ("ld", "st") and wide


def _store(parts: Parts) -> bool:
    if parts[0] == "stmatrix":
        return True
    space = {"global", "local", "const", "param", "async", "bulk", "param::func", "param::entry"}
    return parts[0] == "st" and not space & set(parts)


def _three(parts: Parts) -> bool:
    return parts[0] in ("min", "max") and parts[-1] == "f32"


def _named(parts: Parts) -> bool:
    return parts[0] in ("bar", "barrier") and parts[1:2] not in (("warp",), ("cluster",))


def _mixed(parts: Parts) -> bool:
    return parts[0] in ("add", "sub", "fma") and len(parts) > 2 and parts[-2] == "f32" and parts[-1] in ("f16", "bf16")


_BY_THREADS = frozenset({"cta_group::2", "tile::gather4", "tile::scatter4"})

ROWS: tuple[Row, ...] = (
    Row(
        "`tcgen05.alloc`, `.dealloc`, `.relinquish_alloc_permit`",
        "model",
        "both CTA groups; double free, leak, use of free columns and allocation after relinquishing are failures",
        _tcgen05("alloc", "dealloc", "relinquish_alloc_permit"),
        lower_tensor.alloc,
    ),
    Row(
        "`tcgen05.mma` (dense)",
        "model",
        "kinds f16, tf32, f8f6f4, i8, mxf8f6f4, mxf4, mxf4nvf4; A in shared or Tensor Memory; both CTA groups; "
        "disable-output-lane, scale-input-d, .ashift; collector hints are accepted and change nothing",
        lambda parts: parts[:2] == ("tcgen05", "mma") and not {"sp", "ws"} & set(parts),
        lower_tensor.mma,
    ),
    Row(
        "`tcgen05.mma.ws`, `.mma.ws.sp`",
        "model",
        "kinds f16, tf32, f8f6f4, i8; A in shared or Tensor Memory, where each group of lanes reads its own copy; "
        "zero-column masks; collector buffers b0 to b3: use without a fill, or of another B, is a failure",
        lambda parts: parts[:3] == ("tcgen05", "mma", "ws"),
        lower_tensor.mma_ws,
    ),
    Row(
        "`tcgen05.mma.sp`",
        "model",
        "kinds f16, tf32, f8f6f4, i8; A of 128 rows per CTA in shared or Tensor Memory; selectors 0 and 1; the rest of "
        "what dense products have",
        lambda parts: parts[:3] == ("tcgen05", "mma", "sp") and "block_scale" not in parts,
        lower_tensor.mma,
    ),
    Row("`tcgen05.mma.sp` with `.block_scale`", "left out", "no kernel here uses it", _tcgen05("mma")),
    Row(
        "`tcgen05.ld`",
        "model",
        "all shapes and multiplicities, .pack::16b; a warp's own lanes only",
        lambda parts: parts[:2] == ("tcgen05", "ld") and "red" not in parts,
        lower_tensor.load,
    ),
    Row("`tcgen05.ld.red`", "left out", "of the two targets sm_103a alone has it", _tcgen05("ld")),
    Row(
        "`tcgen05.st`",
        "model",
        "all shapes and multiplicities, .unpack::16b; lands at `tcgen05.wait::st` in modes lazy and random",
        _tcgen05("st"),
        lower_tensor.store,
    ),
    Row("`tcgen05.wait`", "model", "::ld and ::st", _tcgen05("wait::ld", "wait::st"), lower_tensor.wait, "wait"),
    Row(
        "`tcgen05.fence`",
        "model",
        "::before_thread_sync and ::after_thread_sync",
        _tcgen05("fence::before_thread_sync", "fence::after_thread_sync"),
        lower_tensor.fence,
        "fence",
    ),
    Row(
        "`tcgen05.cp`",
        "model",
        "all shapes, multicasts and formats, both CTA groups",
        _tcgen05("cp"),
        lower_tensor.copy,
    ),
    Row("`tcgen05.shift`", "model", "both CTA groups", _tcgen05("shift"), lower_tensor.shift),
    Row(
        "`tcgen05.commit`",
        "model",
        "one barrier or multicast, both CTA groups",
        _tcgen05("commit"),
        lower_tensor.commit,
        "commit",
    ),
    Row(
        "`cp.async.bulk.tensor` with `.cta_group::2`, `.tile::gather4` or `.tile::scatter4`",
        "model",
        "carried out by threads from the request that the tensor map was encoded from; not .im2col",
        lambda parts: parts[:3] == ("cp", "async", "bulk") and not _BY_THREADS.isdisjoint(parts),
        lower_copy.bulk,
    ),
    Row(
        "`cp.async.bulk.wait_group`",
        "model",
        "executes the bulk stores that were deferred",
        lambda parts: parts[:3] == ("cp", "async", "bulk") and "wait_group" in parts,
        lower_copy.bulk,
        "wait",
    ),
    Row(
        "`cp.async.bulk.commit_group`",
        "observed",
        "",
        lambda parts: parts[:3] == ("cp", "async", "bulk") and "commit_group" in parts,
        lower_copy.bulk,
        "commit",
    ),
    Row(
        "other `cp.async.bulk`, `cp.reduce.async.bulk`",
        "model",
        "executed by the TMA; when, is the mode's choice. On a GPU, from shared memory to shared memory, copies are "
        "carried out by threads and reductions at once. Prefetches are dropped. `.im2col::w`, `.im2col::w::128`, "
        "`.cp_mask` and `.ignore_oob` are left out",
        _begins("cp.async.bulk", "cp.reduce.async.bulk"),
        lower_copy.bulk,
    ),
    Row(
        "`mbarrier.init`, `.inval`", "observed", "", _begins("mbarrier.init", "mbarrier.inval"), lower_sync.barrier_init
    ),
    Row(
        "`mbarrier.try_wait`, `.test_wait`",
        "observed",
        "the hardware's barrier; a thread that waits executes what others have queued",
        _begins("mbarrier.try_wait", "mbarrier.test_wait"),
        lower_sync.barrier_wait,
        "wait",
    ),
    Row(
        "`mbarrier.arrive` with `.expect_tx`, `mbarrier.expect_tx`",
        "observed",
        "the hardware's",
        lambda parts: parts[0] == "mbarrier" and "expect_tx" in parts,
        lower_sync.barrier_arrive,
        "expect_tx",
    ),
    Row(
        "other `mbarrier.arrive`",
        "observed",
        "the hardware's",
        _begins("mbarrier.arrive"),
        lower_sync.barrier_arrive,
        "arrive",
    ),
    Row("`barrier.cluster.arrive`", "model", "", _begins("barrier.cluster.arrive"), lower_sync.cluster_barrier),
    Row("`barrier.cluster.wait`", "model", "", _begins("barrier.cluster.wait"), lower_sync.cluster_barrier, "wait"),
    Row(
        "`bar`, `barrier` (`.sync`, `.arrive`, `.red`)",
        "model",
        "counted in memory, so that waiting threads can help and be told of failures",
        _named,
        lower_sync.named_barrier,
        "barrier",
    ),
    Row(
        "`fence.proxy.async`, `fence.mbarrier_init`",
        "observed",
        "executed, and noted for the checks",
        _begins("fence.proxy.async", "fence.mbarrier_init"),
        lower_sync.fence,
        "fence",
    ),
    Row("other `fence`, `membar`", "observed", "executed", _begins("fence.", "membar."), lower_sync.fence, "fence"),
    Row(
        "`griddepcontrol.wait`",
        "observed",
        "executed; on the host, use of global memory before it is an error in a launch with `pdl`, but for reading what"
        " no launch may write",
        _begins("griddepcontrol.wait"),
        lower_sync.fence,
        "wait",
    ),
    Row(
        "`setmaxnreg`",
        "model",
        "on the host registers are granted out of the CTA's pool; on a GPU a thread keeps those it was launched with",
        _begins("setmaxnreg"),
        lower_sync.registers,
    ),
    Row(
        "`wgmma.fence`",
        "observed",
        "of kernels for sm_90a, on the host",
        _begins("wgmma.fence"),
        lower_sync.kept,
        "fence",
    ),
    Row("`wgmma.commit_group`", "observed", "the same", _begins("wgmma.commit_group"), lower_sync.kept, "commit"),
    Row("`wgmma.wait_group`", "observed", "the same", _begins("wgmma.wait_group"), lower_sync.kept, "wait"),
    Row("`cp.async.commit_group`", "observed", "executed", _begins("cp.async.commit_group"), lower_sync.kept, "commit"),
    Row(
        "`cp.async.wait_group`, `.wait_all`",
        "observed",
        "executed",
        _begins("cp.async.wait_group", "cp.async.wait_all"),
        lower_sync.kept,
        "wait",
    ),
    Row(
        "`cp.async.mbarrier.arrive`",
        "observed",
        "executed",
        _begins("cp.async.mbarrier.arrive"),
        lower_sync.kept,
        "arrive",
    ),
    Row("`bar.warp.sync`", "observed", "executed", _begins("bar.warp.sync"), lower_sync.kept, "warp"),
    Row(
        "`ld`, `st` of 32 bytes",
        "rewritten",
        "two of 16 bytes; L2 eviction priorities and cache policies are dropped",
        _wide,
        lower_math.wide_move,
    ),
    Row("`st.bulk`", "model", "", _begins("st.bulk"), lower_copy.zero_fill),
    Row(
        "`st` to shared memory, `stmatrix`",
        "observed",
        "noted for the check of `fence.proxy.async`",
        _store,
        lower_sync.shared_store,
    ),
    Row(
        "`add`, `sub`, `mul`, `fma` on `.f32x2`",
        "rewritten",
        "each half by itself",
        lambda parts: parts[-1] == "f32x2" and parts[0] in ("add", "sub", "mul", "fma"),
        lower_math.packed_pair,
    ),
    Row("`add`, `sub`, `fma` of 16-bit into 32-bit floats", "rewritten", "", _mixed, lower_math.mixed_precision),
    Row(
        "`cvt` to and from e2m1, e2m3, e3m2, ue8m0; `cvt.rs`",
        "model",
        "in software, all roundings; `.scaled` forms are left out",
        _narrow,
        lower_math.conversion,
    ),
    Row(
        "`cvt.rn`, `cvt.rz` to tf32 with `.satfinite`",
        "rewritten",
        "",
        lambda parts: parts[0] == "cvt" and {"tf32", "satfinite"} <= set(parts) and "rna" not in parts,
        lower_math.saturated_tf32,
    ),
    Row(
        "`redux.sync` of `.f32`",
        "model",
        "",
        lambda parts: parts[0] == "redux" and parts[-1] == "f32",
        lower_math.float_reduction,
    ),
    Row(
        "`st.async`, `red.async` to global memory or `.mmio`",
        "left out",
        "no kernel here uses it",
        lambda parts: parts[0] in ("st", "red") and "async" in parts and not {"global", "mmio"}.isdisjoint(parts),
    ),
    Row(
        "`multimem` of 8-bit floats",
        "left out",
        "no kernel here uses it",
        lambda parts: parts[0] == "multimem" and parts[-1].startswith(("e4m3", "e5m2")),
    ),
    Row(
        "`tensormap.replace.tile.swizzle_atomicity`",
        "left out",
        "no kernel here uses it",
        _begins("tensormap.replace.tile.swizzle_atomicity"),
    ),
    Row(
        "`clusterlaunchcontrol`",
        "model",
        "requests fail where all CTAs have begun; with `resident_clusters` on the host others are handed over",
        _begins("clusterlaunchcontrol"),
        lower_sync.cluster_launch,
    ),
    Row(
        "`ldmatrix` and `stmatrix` of 8-bit elements",
        "model",
        "`.m16n16`, `.m8n16` (from 4- and 6-bit elements too), `.m16n8`",
        lambda parts: parts[0] in ("ldmatrix", "stmatrix") and not lower_warp.SHAPES.isdisjoint(parts),
        lower_warp.byte_matrices,
    ),
)

THREE_INPUTS = Row("`min`, `max` of three", "rewritten", "two steps", _three, lower_math.three_inputs)
"""Told from the ordinary ones by the number of operands."""

# Instructions that sm_90a executes as they are. Anything else is an error that names it.
_PLAIN_WORDS = """
    abs activemask add addc alloca and applypriority atom bfe bfi bfind bmsk bra brev brkpt brx call clz cnot copysign
    cos cp createpolicy cvt cvta discard div dp2a dp4a elect ex2 exit fence fma fns getctarank griddepcontrol isspacep
    istypep ld ldmatrix ldu lg2 lop3 mad mad24 madc mapa match max mbarrier membar min mma mov movmatrix mul mul24
    multimem nanosleep neg not or pmevent popc prefetch prefetchu prmt rcp red redux rem ret rsqrt sad selp set setp
    shf shfl shl shr sin slct sqrt st stackrestore stacksave stmatrix sub subc szext tanh tensormap testp trap vote
    vadd vabsdiff vmax vmin vset vshl vshr vsub wgmma wmma xor barrier bar
"""
PLAIN = frozenset(_PLAIN_WORDS.split())

# Types and qualifiers that came after sm_90, wherever no row above lowers them: products by kind and with scale
# factors, elements of 4 and 6 bits and scale factors, pairs of 32-bit floats, packed integers below 16 bits.
_NEWER = re.compile(
    r"""kind::.* | block_scale | scale_vec::.* | scaled::.*
      | (?:e2m1|e2m3|e3m2|s2f6|ue\d+m\d+)(?:x\d+)? | f32x2 | [bsu][468]x\d+""",
    re.VERBOSE,
)


def newer_qualifier(parts: Parts) -> str:
    """Of an instruction that no row translates, the first qualifier that sm_90a does not have, or ""."""
    return next((part for part in parts[1:] if _NEWER.fullmatch(part)), "")


@functools.lru_cache(maxsize=4096)
def row_for(opcode: str, operands: int) -> Row | None:
    """The row that translates an instruction; None where it stays as it is."""
    parts = tuple(opcode.split("."))
    if operands == 4 and _three(parts):
        return THREE_INPUTS
    special = ROWS[-1]
    if special.matches(parts):
        return special
    return next((row for row in ROWS if row.matches(parts)), None)


def table() -> str:
    """The instruction table of docs/emulation.md."""
    lines = ["| instruction | how | |", "| --- | --- | --- |"]
    lines += [f"| {row.name} | {row.how} | {row.note} |" for row in (*ROWS, THREE_INPUTS)]
    return "\n".join(lines)
