"""Which kernel serves a target. Pure: no array, no driver."""

from __future__ import annotations

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ...errors import UnsupportedError
from .spec import OPERATOR

SOURCE = "merge_attention/sm80/merge_attention.cu"
TARGETS = ("sm_80", "sm_90", "sm_100f")


def variant(arch: Arch) -> KernelSource:
    """The kernel for a target; sm_90 serves sm_90a, too. Raises UnsupportedError when the target has none."""
    target = next((target for target in TARGETS if arches.named(target).runs_on(arch.capability)), None)
    if target is None:
        raise UnsupportedError(OPERATOR, f"a GPU of architecture {arch.name}", ", ".join(TARGETS) + ", or the CPU")
    return KernelSource(SOURCE, OPERATOR, (), target)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """Every kernel, of one target or of all."""
    return tuple(variant(arches.named(target)) for target in TARGETS if arch_name in (None, target))
