"""cuBLAS beside nvfp4_gemv: what a user without a 4-bit kernel would call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes

Call = Callable[[], object]


def _version() -> str:
    from cupy.cuda import cublas, device

    version: int = cublas.getVersion(device.get_cublas_handle())
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _read(product: Any) -> Mapping[str, Any]:
    """`[l, n, m]` as c, `[m, n, l]`."""
    return {"c": product.transpose(2, 1, 0)}


def cublas_bf16(case: Any, inputs: dict[str, Any]) -> Any:
    """The product alone, of operands that were decoded to bfloat16 beforehand, which loses nothing.

    For the first of the cases of each size: what is bfloat16 from the beginning is as fast whatever the format was.
    """
    if case.format != "nvfp4" or case.b_dtype != "e2m1":
        return None
    decoded, operands = _bf16_operands(case, inputs)
    for decode in decoded:
        decode()
    return _bf16_product(*operands), _version(), _read


def dequantize_then_cublas(case: Any, inputs: dict[str, Any]) -> Any:
    """What is 4-bit of the operands decoded to bfloat16 by `dequantize_nvfp4`, then multiplied.

    Not as one graph: CuPy refuses cuBLAS under capture.
    """
    if case.b_dtype not in ("e2m1", "bfloat16"):
        return None
    decoded, operands = _bf16_operands(case, inputs)
    product = _bf16_product(*operands)

    def run() -> object:
        for decode in decoded:
            decode()
        return product()

    return run, _version(), _read


MAKERS = {"cuBLAS bf16": cublas_bf16, "dequantize_nvfp4, then cuBLAS bf16": dequantize_then_cublas}


def _bf16_operands(case: Any, inputs: dict[str, Any]) -> tuple[list[Call], list[Any]]:
    """a and b, `[l, rows, k]` in bfloat16, and what decodes those that are 4-bit into these arrays."""
    import cupy

    from ...ops.nvfp4_gemv import dequantize_nvfp4

    decoded: list[Call] = []
    operands = []
    for name, scales in (("a", "sfa"), ("b", "sfb")):
        operand = cupy.moveaxis(inputs[name], -1, 0)
        if inputs[scales] is not None:
            codes, operand = operand, cupy.empty((*operand.shape[:2], case.k), ml_dtypes.bfloat16)
            factors = cupy.moveaxis(inputs[scales], -1, 0)
            decoded.append(dequantize_nvfp4.prepare(codes, factors, batch_axis=0, format=case.format, out=operand))
        operands.append(cupy.ascontiguousarray(operand))
    return decoded, operands


def _bf16_product(a: Any, b: Any) -> Callable[[], object]:
    """`[l, m, k]` times `[l, n, k]` transposed, bfloat16 with float32 sums, by cuBLAS through CuPy: `[l, n, m]`."""
    import cupy
    import numpy as np
    from cupy.cuda import cublas, device, runtime

    batches, m, k = a.shape
    n = b.shape[1]
    out = cupy.empty((batches, n, m), np.uint16).view(ml_dtypes.bfloat16)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    bf16, fp32 = runtime.CUDA_R_16BF, cublas.CUBLAS_COMPUTE_32F

    def run() -> object:
        handle = device.get_cublas_handle()
        cublas.gemmStridedBatchedEx(
            handle, cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, m, n, k, one.ctypes.data,
            a.data.ptr, bf16, k, m * k, b.data.ptr, bf16, k, n * k, zero.ctypes.data,
            out.data.ptr, bf16, m, n * m, batches, fp32, cublas.CUBLAS_GEMM_DEFAULT,
        )  # fmt: skip
        return out

    return run
