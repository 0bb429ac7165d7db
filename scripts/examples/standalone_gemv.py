"""Launches the NVFP4 GEMV kernel on its own, with CuPy and cuda-python: no call of ours between arrays and GPU.

`cupymla.raw_module` compiles the kernel and says what a launch of it needs; `assign_work` says which CTA takes which
rows. The rest is what any CUDA program does: fill the parameter record, launch. Without a GPU, tests hand what it
launches to the PTX interpreter. On a GPU of compute capability 8.0 or later:

    python scripts/examples/standalone_gemv.py
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np
from cuda.bindings import driver

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import cupymla

M, N, K, BATCHES = 500, 2, 1024, 2
BLOCK = 16  # elements of k that share a scale
FLOAT16 = 0  # of `FloatType` in cuda/nvfp4_gemv/floats.cuh, what c holds
SCALES_BY_ROWS, SCALES_BY_WORDS, SCALES_BY_BYTES = 1, 2, 0  # of `ScaleAccess` in cuda/nvfp4_gemv/sm80/params.cuh


def problem(xp: Any) -> tuple[Any, Any, Any, Any]:
    """Random a, b and their scales, batch first: pairs of E2M1 codes, and E4M3 codes from 2^-4 to 1."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 256, (BATCHES, rows, K // 2), dtype=np.uint8) for rows in (M, N))
    sfa, sfb = (rng.integers(0x18, 0x39, (BATCHES, rows, K // BLOCK), dtype=np.uint8) for rows in (M, N))
    return xp.asarray(a), xp.asarray(b), xp.asarray(sfa), xp.asarray(sfb)


def divides(unit: int, array: Any) -> bool:
    """Whether every row of an array begins at a multiple of so many bytes."""
    return all(number % unit == 0 for number in (array.data.ptr, *array.strides[:2]))


def launch(
    kernel: Any, a: Any, b: Any, sfa: Any, sfb: Any, c: Any, multiprocessors: int, stream: int
) -> tuple[int, int]:
    """c = a * b, scaled, of arrays [batch, row, k]: the kernel alone. Returns how many CTAs of how many threads."""
    function = kernel.module.get_function(kernel.entry)
    function.max_dynamic_shared_size_bytes = kernel.facts["smem_bytes"]
    batches, m, n = c.shape
    assigned = kernel.assign_work(multiprocessors, m=m, n=n, k=2 * a.shape[2], batches=batches)
    scales = SCALES_BY_WORDS if divides(4, sfa) else SCALES_BY_BYTES
    if divides(kernel.facts["chunk"] // BLOCK, sfa):
        scales = SCALES_BY_ROWS
    record = kernel.parameters(
        a=a.data.ptr,
        sfa=sfa.data.ptr,
        b=b.data.ptr,
        sfb=sfb.data.ptr,
        alpha=None,
        bias=None,
        c=c.data.ptr,
        a_batch_bytes=a.strides[0],
        a_row_bytes=a.strides[1],
        sfa_batch_bytes=sfa.strides[0],
        sfa_row_bytes=sfa.strides[1],
        b_batch_bytes=b.strides[0],
        b_row_bytes=b.strides[1],
        sfb_batch_bytes=sfb.strides[0],
        sfb_row_bytes=sfb.strides[1],
        c_batch=m * n,
        c_row=n,
        c_column=1,
        k=2 * a.shape[2],
        n=n,
        alpha_value=1.0,
        out_type=FLOAT16,
        swizzled=0,
        a_aligned=divides(16, a),
        b_aligned=divides(16, b),
        sfa_access=scales,
        **assigned.fields,
    )
    slots = (ctypes.c_void_p * 1)(ctypes.addressof(record))
    (error,) = driver.cuLaunchKernel(
        function.kernel.ptr, assigned.ctas, 1, 1, kernel.facts["threads"], 1, 1, kernel.facts["smem_bytes"], stream,
        ctypes.addressof(slots), 0,
    )  # fmt: skip
    if int(error):
        raise RuntimeError(f"cuLaunchKernel: {error}")
    return assigned.ctas, kernel.facts["threads"]


def main() -> None:
    """Compute one small problem and compare it with the package's own call."""
    if not cp.cuda.is_available() or int(cp.cuda.Device().compute_capability) < 80:
        raise SystemExit("this launches a kernel for sm_80 and later, and CuPy finds no GPU of compute capability 8.0")
    a, b, sfa, sfb = problem(cp)
    c = cp.empty((BATCHES, M, N), np.float16)
    kernel = cupymla.raw_module("nvfp4_gemv", format="nvfp4", b_dtype="e2m1", n=N)
    multiprocessors = cp.cuda.Device().attributes["MultiProcessorCount"]
    stream = cp.cuda.get_current_stream()
    ctas, threads = launch(kernel, a, b, sfa, sfb, c, multiprocessors, stream.ptr)
    stream.synchronize()

    expected = cupymla.nvfp4_gemv(a, b, sfa, sfb, batch_axis=0)
    same = bool((c.view(np.uint16) == expected.view(np.uint16)).all())
    print(f"{ctas} CTAs of {threads} threads, {kernel.facts['smem_bytes']} bytes of shared memory each")
    print("the same bits as cupymla.nvfp4_gemv" if same else "DIFFERENT from cupymla.nvfp4_gemv")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
