"""Which kernel serves a problem. Pure: no array, no driver."""

from __future__ import annotations

from dataclasses import dataclass

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ...errors import InputError, UnsupportedError, shown
from ..mla import D_QK, DTYPES, MlaProblem

OPERATOR = "sparse_mla_fwd"
MAX_CTAS = 2**31 - 1
"""The extent of grid.x, on which queries and blocks of heads lie (CUDA C++ Programming Guide)."""

# sm_scale * log2(e) is a factor of -inf in the kernel that wants it positive, so it must not vanish in fp32.
_SMALLEST_SCALE = 2.0**-100


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
class Shares:
    """How queries are dealt to CTAs, one set of CTAs for each block of heads.

    Attributes:
        groups: CTAs that take `group_tokens` queries each.
        group_tokens: queries of such a CTA; every other CTA takes one.
        ctas: all CTAs of a block of heads.
    """

    groups: int
    group_tokens: int
    ctas: int


def shares(tokens: int, head_blocks: int, multiprocessors: int) -> Shares:
    """Deal out queries: groups first, because a CTA's next query is fetched while its last one ends, then single ones.

    The hardware hands out CTAs in order, so the single ones even out what the groups leave: one group's worth of them
    for each multiprocessor.
    """
    wave = -(-multiprocessors // head_blocks)
    for group_tokens in (4, 2):
        groups = (tokens - group_tokens * wave) // group_tokens
        if groups >= wave:
            return Shares(groups, group_tokens, groups + tokens - groups * group_tokens)
    return Shares(0, 1, tokens)


def plan(problem: MlaProblem, arch: Arch) -> Plan:
    """Choose the kernel. Raises UnsupportedError when the architecture has none, or the grid cannot be that large."""
    tokens = problem.s_q * (1 if problem.batch is None else problem.batch)
    if tokens * problem.h_q > MAX_CTAS:
        raise UnsupportedError(
            f"{OPERATOR} on {tokens} queries of {problem.h_q} heads", arch.name, f"up to {MAX_CTAS} heads in all"
        )
    any_scale = problem.sm_scale < _SMALLEST_SCALE
    return Plan(variant(arch, d_qk=problem.d_qk, dtype=problem.dtype, any_scale=any_scale), tokens)


def variant(arch: Arch, *, d_qk: int = 576, dtype: str = "bfloat16", any_scale: bool = False) -> KernelSource:
    """One kernel variant.

    Args:
        arch: the target.
        d_qk: 576 or 512.
        dtype: "bfloat16" or "float16".
        any_scale: whether sm_scale may be zero or negative.

    Raises InputError, and UnsupportedError when the target has no kernel.
    """
    if arch.name != "sm_90a":
        raise UnsupportedError(OPERATOR, f"a GPU of architecture {arch.name}", "Hopper (sm_90a), or the CPU")
    if type(d_qk) is not int or d_qk not in D_QK:
        raise InputError("d_qk", "576 or 512", shown(d_qk), OPERATOR)
    if type(dtype) is not str or dtype not in DTYPES:
        raise InputError("dtype", "'bfloat16' or 'float16'", shown(dtype), OPERATOR)
    if type(any_scale) is not bool:
        raise InputError("any_scale", "True or False", shown(any_scale), OPERATOR)
    defines = (
        ("CUPYMLA_D_QK", d_qk),
        ("CUPYMLA_FP16", int(dtype == "float16")),
        ("CUPYMLA_ANY_SCALE", int(any_scale)),
    )
    return KernelSource("sparse_mla_fwd/sm90/sparse_mla_fwd.cu", OPERATOR, defines, arch.name)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """Every kernel variant, of one target or of all."""
    if arch_name not in (None, "sm_90a"):
        return ()
    hopper = arches.named("sm_90a")
    return tuple(
        variant(hopper, d_qk=d_qk, dtype=dtype, any_scale=any_scale)
        for d_qk in D_QK
        for dtype in DTYPES
        for any_scale in (False, True)
    )
