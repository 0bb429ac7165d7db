"""cuBLAS beside nvfp4_gemv: what a user without a 4-bit kernel would call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes

Call = Callable[[], object]


def calls(case: Any, inputs: dict[str, Any]) -> Iterator[tuple[str, Call]]:
    """As `rivals.of`; nothing where b is fp16, which no benchmark has. What is bfloat16 from the beginning is the same
    product whatever the format, so it is timed for the first of the cases of each size."""
    if case.format == "nvfp4" and case.b_dtype == "e2m1":
        yield "cuBLAS bf16", _cublas_bf16(case)
    if case.b_dtype in ("e2m1", "bfloat16"):
        yield "dequantize_nvfp4, then cuBLAS bf16", _dequantize_then_cublas(case, inputs)


def _cublas_bf16(case: Any) -> Call:
    """The product of matrices that are bfloat16 from the beginning."""
    return _bf16_product(
        _random_bf16((case.batches, case.m, case.k), 0), _random_bf16((case.batches, case.n, case.k), 1)
    )


def _dequantize_then_cublas(case: Any, inputs: dict[str, Any]) -> Call:
    """What is 4-bit of the operands decoded to bfloat16 by `dequantize_nvfp4`, then multiplied.

    Not as one graph: CuPy refuses cuBLAS under capture.
    """
    import cupy

    from ...ops.nvfp4_gemv import dequantize_nvfp4

    decoded, operands = [], []
    for name, scales in (("a", "sfa"), ("b", "sfb")):
        operand = cupy.moveaxis(inputs[name], -1, 0)
        if inputs[scales] is not None:
            codes, operand = operand, cupy.empty((*operand.shape[:2], case.k), ml_dtypes.bfloat16)
            factors = cupy.moveaxis(inputs[scales], -1, 0)
            call = dequantize_nvfp4.prepare(codes, factors, batch_axis=0, format=case.format, out=operand)
            decoded.append(call)
        operands.append(cupy.ascontiguousarray(operand))
    product = _bf16_product(*operands)

    def run() -> None:
        for decode in decoded:
            decode()
        product()

    return run


def _bf16_product(a: Any, b: Any) -> Callable[[], object]:
    """`[l, m, k]` times `[l, n, k]` transposed, bfloat16 with float32 sums, by cuBLAS through CuPy."""
    import cupy
    import numpy as np
    from cupy.cuda import cublas, device, runtime

    batches, m, k = a.shape
    n = b.shape[1]
    out = cupy.empty((batches, n, m), np.uint16)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    bf16, fp32 = runtime.CUDA_R_16BF, cublas.CUBLAS_COMPUTE_32F

    def run() -> None:
        handle = device.get_cublas_handle()
        cublas.gemmStridedBatchedEx(
            handle, cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, m, n, k, one.ctypes.data,
            a.data.ptr, bf16, k, m * k, b.data.ptr, bf16, k, n * k, zero.ctypes.data,
            out.data.ptr, bf16, m, n * m, batches, fp32, cublas.CUBLAS_GEMM_DEFAULT,
        )  # fmt: skip

    return run


def _random_bf16(shape: tuple[int, ...], seed: int) -> Any:
    """Normal random bfloat16, the upper halves of float32."""
    import cupy

    values = cupy.random.default_rng(seed).standard_normal(shape, dtype=cupy.float32)
    return (values.view(cupy.uint32) >> 16).astype(cupy.uint16).view(ml_dtypes.bfloat16)
