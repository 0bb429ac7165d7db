"""The list of operators. Everything that lists operators, kernels or related functions reads it."""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_lowercase


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """A CUDA kernel of an operator.

    Attributes:
        name: the kernel's name, which is its folder entry under `cuda/<operator>/<folder>/`.
        arch: the NVRTC target it is compiled for.
        first: the first target its source serves, where that is not `arch`.
        units: further translation units of its calls, for which its evidence speaks, too: "folder/kernel" in
            `cuda/<operator>`.
    """

    name: str
    arch: str
    first: str | None = None
    units: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Its own name, and those of its units' kernels."""
        return (self.name, *(unit.rpartition("/")[2] for unit in self.units))

    @property
    def folder(self) -> str:
        """Its folder in `cuda/<operator>`: "sm90" for a source written for sm_90 or sm_90a."""
        return (self.first or self.arch).rstrip(ascii_lowercase).replace("_", "")


@dataclass(frozen=True, slots=True)
class OperatorEntry:
    """A public operator.

    Attributes:
        name: the public function's name.
        summary: one line for tables.
        kernels: its CUDA kernels; empty while it has only the NumPy reference.
        related: further public functions that live in the same folder.
        made_of: other operators whose parts and kernels it uses; those use none themselves.
        family: the name of the folder and of the page, where functions share them that none of them could name.
        cases: the module of its cases, in its package.
    """

    name: str
    summary: str
    kernels: tuple[KernelEntry, ...] = ()
    related: tuple[str, ...] = ()
    made_of: tuple[str, ...] = ()
    family: str | None = None
    cases: str = "cases"

    @property
    def folder(self) -> str:
        """Its folder in `cupymla/ops` and in `cuda`, and its page in `docs/operators`."""
        return self.family or self.name

    @property
    def module(self) -> str:
        """The package that holds it."""
        return f"cupymla.ops.{self.folder}"

    @property
    def functions(self) -> tuple[str, ...]:
        """Its public functions: itself, then those that go with it."""
        return (self.name, *self.related)

    @property
    def targets(self) -> tuple[str, ...]:
        """What its kernels are compiled for."""
        return tuple(dict.fromkeys(kernel.arch for kernel in self.kernels))


def _units(operator: str, *words: str) -> tuple[str, ...]:
    """Units of an operator's calls that are written for Hopper, by the last words of their kernels."""
    return tuple(f"sm90/{operator}_{word}" for word in words)


def _backward(*words: str) -> tuple[str, ...]:
    return _units("sparse_mla_bwd", *words)


OPERATORS: tuple[OperatorEntry, ...] = (
    OperatorEntry(
        "sparse_mla_fwd",
        "sparse MLA attention, forward",
        kernels=(
            KernelEntry("sparse_mla_fwd", "sm_90a", units=_units("sparse_mla_fwd", "order")),
            KernelEntry("sparse_mla_fwd", "sm_100f"),
        ),
    ),
    OperatorEntry(
        "sparse_mla_bwd",
        "sparse MLA attention, gradients",
        kernels=(
            KernelEntry(
                "sparse_mla_bwd",
                "sm_90a",
                units=_backward(
                    *("cluster", "cluster_sum", "p_ds", "dq_dkv", "sort", "scatter"),
                    *("zero", "round", "sink", "list", "sum"),
                ),
            ),
            KernelEntry("sparse_mla_bwd_packed", "sm_90a", units=_backward("packed_zero", "merge", "round", "sink")),
            KernelEntry(
                "sparse_mla_bwd_stored",
                "sm_90a",
                units=_backward(
                    *("stored_sum", "packed_zero", "merge"),
                    *("zero", "round", "sink", "list"),
                ),
            ),
            KernelEntry("sparse_mla_bwd_sink_lse", "sm_90a"),
            KernelEntry(
                "sparse_mla_bwd",
                "sm_100f",
                units=(
                    *("sm100/sparse_mla_bwd_zero", "sm100/sparse_mla_bwd_round"),
                    *_backward("sink", "list", "sum"),
                ),
            ),
            KernelEntry("sparse_mla_bwd_sink_lse", "sm_100f", first="sm_90"),
        ),
    ),
    OperatorEntry(
        "sparse_mla_bwd_phase1",
        "first phase of the sparse MLA backward: scores and delta",
        kernels=(KernelEntry("sparse_mla_bwd_phase1", "sm_100f"),),
    ),
    OperatorEntry(
        "attn_dist",
        "attention distribution summed over heads",
        kernels=(
            KernelEntry("attn_dist", "sm_90a"),
            KernelEntry("attn_dist_packed", "sm_90a"),
            KernelEntry("attn_dist", "sm_100f"),
        ),
    ),
    OperatorEntry(
        "nvfp4_gemv",
        "GEMV on block-scaled 4-bit weights",
        kernels=(
            *(KernelEntry("nvfp4_gemv", arch, first="sm_80") for arch in ("sm_80", "sm_89", "sm_90", "sm_100f")),
            KernelEntry("nvfp4_gemv_tcgen05", "sm_100f"),
        ),
        related=("quantize_nvfp4", "dequantize_nvfp4", "swizzle_scales", "unswizzle_scales"),
    ),
    OperatorEntry(
        "xl_paged_attention",
        "paged decode attention with Transformer-XL relative positions",
        kernels=(
            *(KernelEntry("xl_paged_attention", arch, first="sm_80") for arch in ("sm_80", "sm_89", "sm_90a")),
            KernelEntry("xl_attention_cluster", "sm_90a"),
            KernelEntry("xl_paged_attention", "sm_100f", first="sm_80"),
        ),
        related=("reshape_and_cache", "copy_blocks", "rel_shift", "matrix_bd"),
    ),
    OperatorEntry(
        "sparse_mla_decode",
        "sparse MLA attention over paged caches",
        kernels=(KernelEntry("sparse_mla_decode", "sm_90a", units=_units("sparse_mla_decode", "merge")),),
        made_of=("sparse_mla_fwd", "quantize_fp8"),
    ),
    OperatorEntry(
        "merge_attention",
        "one attention output of those over parts of the keys",
        kernels=tuple(KernelEntry("merge_attention", arch, first="sm_80") for arch in ("sm_80", "sm_90", "sm_100f")),
        made_of=("quantize_fp8",),
    ),
    OperatorEntry(
        "indexer_logits",
        "lightning indexer: scores of all keys",
        kernels=(KernelEntry("indexer_logits", "sm_90a"),),
    ),
    OperatorEntry(
        "indexer_topk",
        "lightning indexer: the keys that it selects",
        kernels=(KernelEntry("indexer_topk", "sm_90a"),),
        made_of=("indexer_logits", "topk"),
    ),
    OperatorEntry(
        "paged_indexer_topk",
        "lightning indexer on paged keys: the keys that it selects",
        kernels=(KernelEntry("paged_indexer_topk", "sm_90a", units=("sm90/paged_indexer_logits",)),),
        related=("paged_indexer_logits",),
        made_of=("indexer_logits", "topk", "quantize_fp8"),
    ),
    OperatorEntry(
        "indexer_loss",
        "lightning indexer: training loss and its gradient",
        kernels=(KernelEntry("indexer_loss", "sm_90a"),),
    ),
    OperatorEntry(
        "indexer_bwd",
        "lightning indexer: gradients of its training loss",
        kernels=(KernelEntry("indexer_bwd", "sm_90a", units=_units("indexer_bwd", "zero", "bound", "total", "round")),),
    ),
    OperatorEntry(
        "indexer_loss_dense",
        "lightning indexer: warm-up towards dense attention, with gradients",
        kernels=(
            KernelEntry(
                "indexer_loss_dense",
                "sm_90a",
                units=_units("indexer_loss_dense", "mask", "lse", "row_loss", "dq", "dk", "round"),
            ),
        ),
        made_of=("attn_dist", "indexer_logits"),
    ),
    OperatorEntry(
        "topk",
        "exact, reproducible top-k of each row",
        kernels=tuple(KernelEntry("topk", arch, first="sm_80") for arch in ("sm_80", "sm_90", "sm_100f")),
    ),
    OperatorEntry(
        "invert_indices",
        "top-k entries by the token that they name",
        kernels=(
            KernelEntry("invert_indices", "sm_90a", units=_units("invert_indices", "list")),
            KernelEntry("invert_indices", "sm_100f", first="sm_90", units=_units("invert_indices", "list")),
        ),
    ),
    # Named by the function whose results a call returns, as tests and benchmarks want it; writers store what it makes.
    OperatorEntry(
        "quantize_fp8",
        "fp8 caches: quantise, write, read",
        kernels=tuple(KernelEntry("quantize_fp8", arch, first="sm_80") for arch in ("sm_80", "sm_90", "sm_100f")),
        related=(
            *("dequantize_fp8", "indexer_k_quant_and_cache", "gather_indexer_cache", "hadamard"),
            *("concat_and_cache_mla", "gather_mla_cache"),
        ),
        family="mla_cache",
    ),
)


def _member(name: str, summary: str, kernel: str | None = None) -> OperatorEntry:
    kernels = tuple(KernelEntry(kernel or name, arch, first="sm_80") for arch in ("sm_80", "sm_90", "sm_100f"))
    return OperatorEntry(name, summary, kernels, family="mla_cache", cases=f"cases_of.{name}")


MEMBERS: tuple[OperatorEntry, ...] = (
    _member("dequantize_fp8", "fp8 codes and their scales to bfloat16"),
    _member("hadamard", "rows times the Hadamard matrix"),
    _member("indexer_k_quant_and_cache", "keys of the lightning indexer into a paged cache", "quantize_fp8"),
    _member("gather_indexer_cache", "keys of the lightning indexer out of a paged cache"),
    _member("concat_and_cache_mla", "latents into a paged cache"),
    _member("gather_mla_cache", "latents out of a paged cache"),
)
"""Related functions of a family that have cases, evidence and benchmarks of their own."""


def subjects() -> tuple[OperatorEntry, ...]:
    """What is checked and timed by itself: operators, then members of families."""
    return (*OPERATORS, *MEMBERS)


def public_functions() -> list[str]:
    """The public functions of all operators."""
    return [name for entry in OPERATORS for name in entry.functions]


def named(name: str) -> OperatorEntry:
    """The entry of that name, an operator or a member. Raises KeyError."""
    for entry in subjects():
        if entry.name == name:
            return entry
    raise KeyError(name)
