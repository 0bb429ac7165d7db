"""The calls of all functions: the NumPy references on the CPU, the kernels on a GPU."""

from __future__ import annotations

import math
from typing import Any

from ...arch import Gpu
from ...build import KernelSource
from ..calls import Calls
from ..mla import by_reference
from . import cuda, plan, reference, spec

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


def sources(gpu: Gpu, **arguments: Any) -> tuple[KernelSource, ...]:
    """The kernels that a call of `quantize_fp8` on such a GPU compiles. Raises InputError, UnsupportedError."""
    _, problem = spec.read(**arguments)
    if not math.prod(problem.shape):
        return ()
    return (plan.kernel("quantize_fp8", gpu.arch, spec.ARGUMENTS.operator),)
