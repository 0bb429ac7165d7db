"""Which kernel serves a problem, and how its queries and their slots are dealt to CTAs. Pure: no array, no driver."""

from __future__ import annotations

from dataclasses import dataclass

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ...errors import InputError, UnsupportedError, shown
from ..mla import D_QK, DTYPES
from ..shares import shares
from .spec import OPERATOR, Problem

SOURCES = {
    "sm_90a": "attn_dist/sm90/attn_dist.cu",
    "sm_100a": "attn_dist/sm100/attn_dist.cu",
    "sm_103a": "attn_dist/sm100/attn_dist.cu",
}
"""The kernel of each target."""

MAX_CTAS = 2**31 - 1
"""The extent of grid.x, on which queries and slices of their slots lie (CUDA C++ Programming Guide)."""

PASS_HEADS = (64, 128)
"""Heads that a kernel variant takes in one pass over a query's slots."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel variant for one problem.

    Attributes:
        source: what to compile.
        tokens: queries of all batch entries together.
    """

    source: KernelSource
    tokens: int


@dataclass(frozen=True, slots=True)
class Deal:
    """How queries and their slots are dealt to CTAs.

    Attributes:
        groups: shares of `group_tokens` neighbouring queries; every other share is one query.
        group_tokens: queries of such a share.
        slices: CTAs, or on Blackwell clusters, that divide the slots of a share's queries between them.
        slice_blocks: blocks of slots in a slice.
        ctas: all CTAs. On Blackwell each takes shares until there are none.
    """

    groups: int
    group_tokens: int
    slices: int
    slice_blocks: int
    ctas: int


def plan(problem: Problem, arch: Arch) -> Plan:
    """Choose the kernel. Raises UnsupportedError when the architecture has none, or the grid cannot be that large."""
    tokens = problem.s_q * (1 if problem.batch is None else problem.batch)
    if tokens > MAX_CTAS:
        raise UnsupportedError(f"{OPERATOR} on {tokens} queries", arch.name, f"up to {MAX_CTAS}")
    pass_heads = next((heads for heads in PASS_HEADS if problem.h_q <= heads), PASS_HEADS[-1])
    return Plan(variant(arch, d_qk=problem.d_qk, dtype=problem.dtype, pass_heads=pass_heads), tokens)


def deal(problem: Problem, tokens: int, block_slots: int, multiprocessors: int) -> Deal:
    """Deal out queries, and where they are fewer than multiprocessors, slices of them."""
    dealt = shares(tokens, 1, multiprocessors)
    slices, slice_blocks = _slices(problem, tokens, block_slots, multiprocessors)
    return Deal(dealt.groups, dealt.group_tokens, slices, slice_blocks, dealt.ctas * slices)


def deal_in_turn(problem: Problem, tokens: int, block_slots: int, multiprocessors: int, cluster: int) -> Deal:
    """Deal queries or slices of them out to as many clusters as run at a time, one after another."""
    clusters = max(1, multiprocessors // cluster)
    slices, slice_blocks = _slices(problem, tokens, block_slots, clusters)
    return Deal(0, 1, slices, slice_blocks, cluster * min(clusters, tokens * slices))


def _slices(problem: Problem, tokens: int, block_slots: int, places: int) -> tuple[int, int]:
    """In how many slices a row is dealt, and blocks of each, where so many can be worked on at a time.

    A row that is to be normalised stays in one place, where its sum is then known.
    """
    row_blocks = -(-problem.topk // block_slots)
    slices = 1
    if problem.options.normalize is None and 0 < tokens < places:
        slices = min(row_blocks, places // tokens)
    slice_blocks = -(-row_blocks // slices)
    return -(-row_blocks // slice_blocks), slice_blocks


def variant(arch: Arch, *, d_qk: int = 576, dtype: str = "bfloat16", pass_heads: int = 128) -> KernelSource:
    """One kernel variant.

    Args:
        arch: the target.
        d_qk: 576 or 512.
        dtype: "bfloat16" or "float16".
        pass_heads: heads of one pass over a query's slots, 64 or 128; more are taken in several passes.

    Raises InputError, and UnsupportedError when the target has no kernel.
    """
    if arch.name not in SOURCES:
        supported = "Hopper (sm_90a), Blackwell (sm_100a, sm_103a), or the CPU"
        raise UnsupportedError(OPERATOR, f"a GPU of architecture {arch.name}", supported)
    if type(d_qk) is not int or d_qk not in D_QK:
        raise InputError("d_qk", "576 or 512", shown(d_qk), OPERATOR)
    if type(dtype) is not str or dtype not in DTYPES:
        raise InputError("dtype", "'bfloat16' or 'float16'", shown(dtype), OPERATOR)
    if type(pass_heads) is not int or pass_heads not in PASS_HEADS:
        raise InputError("pass_heads", "64 or 128", shown(pass_heads), OPERATOR)
    defines = (
        ("CUPYMLA_D_QK", d_qk),
        ("CUPYMLA_FP16", int(dtype == "float16")),
        ("CUPYMLA_HEADS", pass_heads),
    )
    return KernelSource(SOURCES[arch.name], OPERATOR, defines, arch.name)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """Every kernel variant, of one target or of all."""
    return tuple(
        variant(arches.named(name), d_qk=d_qk, dtype=dtype, pass_heads=pass_heads)
        for name in SOURCES
        if arch_name in (None, name)
        for d_qk in D_QK
        for dtype in DTYPES
        for pass_heads in PASS_HEADS
    )
