"""The list of operators. Everything that lists operators, kernels or companions reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """A CUDA kernel of an operator.

    Attributes:
        name: the kernel's name, which is its folder entry under `cuda/<operator>/<arch folder>/`.
        arch: the NVRTC target it is written for.
    """

    name: str
    arch: str


@dataclass(frozen=True, slots=True)
class OperatorEntry:
    """A public operator.

    Attributes:
        name: the public function's name and its folder's name in `cupymla/ops`.
        summary: one line for tables.
        kernels: its CUDA kernels; empty while it has only the NumPy reference.
        companions: further public functions that live in the same folder.
    """

    name: str
    summary: str
    kernels: tuple[KernelEntry, ...] = ()
    companions: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The package that holds it."""
        return f"cupymla.ops.{self.name}"


OPERATORS: tuple[OperatorEntry, ...] = (
    OperatorEntry(
        "sparse_mla_fwd",
        "sparse MLA attention, forward",
        kernels=(KernelEntry("sparse_mla_fwd", "sm_90a"),),
    ),
    OperatorEntry("sparse_mla_bwd", "sparse MLA attention, gradients"),
    OperatorEntry("sparse_mla_bwd_phase1", "first phase of the sparse MLA backward: scores and delta"),
    OperatorEntry("attn_dist", "attention distribution summed over heads"),
    OperatorEntry(
        "nvfp4_gemv",
        "GEMV on block-scaled 4-bit weights",
        companions=("quantize_nvfp4", "dequantize_nvfp4", "swizzle_scales", "unswizzle_scales"),
    ),
    OperatorEntry(
        "xl_paged_attention",
        "paged decode attention with Transformer-XL relative positions",
        companions=("reshape_and_cache", "copy_blocks", "rel_shift", "matrix_bd"),
    ),
)


def named(name: str) -> OperatorEntry:
    """The entry of that name. Raises KeyError."""
    for entry in OPERATORS:
        if entry.name == name:
            return entry
    raise KeyError(name)
