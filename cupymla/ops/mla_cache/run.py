"""The calls of all functions: the NumPy references on the CPU, the kernels on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ... import tensor
from ...arch import Gpu
from ...build import KernelSource
from ..arguments import Arguments
from ..calls import Calls
from ..mla import by_reference
from . import cuda, latent_cuda, latent_spec, paged_spec, plan, reference, spec

QUANTIZE_FP8 = Calls(
    spec.ARGUMENTS,
    spec.read,
    cuda.wanted,
    cuda.Quantize,
    by_reference(spec.ARGUMENTS, reference.quantize_fp8, cuda.wanted),
)
DEQUANTIZE_FP8 = Calls(
    spec.DEQUANTIZE,
    spec.read_dequantize,
    cuda.dequantize_wanted,
    cuda.Dequantize,
    by_reference(spec.DEQUANTIZE, reference.dequantize_fp8, cuda.dequantize_wanted),
)
HADAMARD = Calls(
    spec.HADAMARD,
    spec.read_hadamard,
    cuda.hadamard_wanted,
    cuda.Hadamard,
    by_reference(spec.HADAMARD, reference.hadamard, cuda.hadamard_wanted),
)


def _writing(arguments: Arguments[Any, Any], write: Callable[..., Any]) -> Callable[[Any, Any], Callable[[], Any]]:
    """The run on the CPU of a reference that writes into the argument `cache`."""

    def on_cpu(views: Any, problem: Any) -> Callable[[], Any]:
        seen = [getattr(views, name) for name in arguments.inputs]
        arrays = [None if view is None else tensor.to_numpy(view) for view in seen]
        options = {name: getattr(problem.options, name) for name in arguments.options}

        def run() -> Any:
            write(*arrays, **options)
            return views.cache.owner

        return run

    return on_cpu


INDEXER_K_QUANT_AND_CACHE = Calls(
    paged_spec.WRITE,
    paged_spec.read_write,
    cuda.nothing_wanted,
    cuda.Write,
    _writing(paged_spec.WRITE, reference.indexer_k_quant_and_cache),
    look=paged_spec.look_at_slot_mapping,
)
GATHER_INDEXER_CACHE = Calls(
    paged_spec.GATHER,
    paged_spec.read_gather,
    cuda.gather_wanted,
    cuda.Gather,
    by_reference(paged_spec.GATHER, reference.gather_indexer_cache, cuda.gather_wanted),
    look=paged_spec.look_at_places,
)


CONCAT_AND_CACHE_MLA = Calls(
    latent_spec.CONCAT,
    latent_spec.read_concat,
    cuda.nothing_wanted,
    latent_cuda.Concat,
    _writing(latent_spec.CONCAT, reference.concat_and_cache_mla),
    look=latent_spec.look_at_slot_mapping,
)
GATHER_MLA_CACHE = Calls(
    latent_spec.GATHER,
    latent_spec.read_gather,
    latent_cuda.gather_wanted,
    latent_cuda.Gather,
    by_reference(latent_spec.GATHER, reference.gather_mla_cache, latent_cuda.gather_wanted),
    look=latent_spec.look_at_places,
)


def sources(gpu: Gpu, **arguments: Any) -> tuple[KernelSource, ...]:
    """The kernels that a call of `quantize_fp8` on such a GPU compiles. Raises InputError, UnsupportedError."""
    _, problem = spec.read(**arguments)
    if not math.prod(problem.shape):
        return ()
    return (plan.kernel("quantize_fp8", gpu.arch, spec.ARGUMENTS.operator),)
