"""Which kernels serve a target. Pure: no array, no driver."""

from __future__ import annotations

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ...errors import InputError, UnsupportedError, shown

TARGETS = ("sm_80", "sm_90", "sm_100f")

KERNELS = (
    "quantize_fp8",
    "dequantize_fp8",
    "gather_indexer_cache",
    "hadamard",
    "concat_and_cache_mla",
    "gather_mla_cache",
)
"""A translation unit each. Dtypes and groups are parameters: the kernels wait for memory, not for branches."""


def kernel(name: str, arch: Arch, function: str) -> KernelSource:
    """A kernel for a target; sm_90 serves sm_90a, too.

    Args:
        name: one of `KERNELS`.
        arch: the target.
        function: the public function, for errors.

    Raises UnsupportedError when the target has no kernel.
    """
    target = next((target for target in TARGETS if arches.named(target).runs_on(arch.capability)), None)
    if target is None:
        raise UnsupportedError(function, f"a GPU of architecture {arch.name}", ", ".join(TARGETS) + ", or the CPU")
    return KernelSource(f"mla_cache/sm80/{name}.cu", name, (), target)


def variant(arch: Arch, *, kernel_name: str = "quantize_fp8") -> KernelSource:
    """One of `KERNELS` for a target. Raises InputError, and UnsupportedError when the target has no kernel."""
    if type(kernel_name) is not str or kernel_name not in KERNELS:
        raise InputError("kernel_name", " or ".join(map(repr, KERNELS)), shown(kernel_name), "quantize_fp8")
    return kernel(kernel_name, arch, "quantize_fp8")


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """Every kernel, of one target or of all."""
    targets = [arches.named(target) for target in TARGETS if arch_name in (None, target)]
    return tuple(kernel(name, target, name) for target in targets for name in KERNELS)


def merged(
    extents: tuple[int, ...], *strides: tuple[int, ...]
) -> tuple[tuple[int, int, int], list[tuple[int, int, int]]]:
    """Axes of rows as three, those that all arrays step over alike as one, and each array's strides on them.

    Args:
        extents: of at most three axes, none of which is 0.
        strides: of each array, on these axes.
    """
    axes: list[tuple[int, ...]] = []  # (extent, stride of each array), the last axis first
    for extent, *steps in reversed(list(zip(extents, *strides, strict=True))):
        if extent == 1:
            continue
        if axes and all(step == axes[-1][0] * inner for step, inner in zip(steps, axes[-1][1:], strict=True)):
            axes[-1] = (axes[-1][0] * extent, *axes[-1][1:])
        else:
            axes.append((extent, *steps))
    axes += [(1, *(0,) * len(strides))] * (3 - len(axes))
    (a, *outer), (b, *middle), (c, *inner) = reversed(axes)
    return (a, b, c), list(zip(outer, middle, inner, strict=True))


_HADAMARD_THREADS = 256
_WARP = 32
_THREAD_BYTES = 32  # of shared memory, where a row has several warps


def hadamard_cta(lanes: int) -> tuple[int, int]:
    """Threads of a CTA, and its shared memory in bytes, where `lanes` threads share a row."""
    threads = max(_HADAMARD_THREADS, lanes)
    return threads, threads * _THREAD_BYTES if lanes > _WARP else 0
