"""Launches the sparse MLA forward kernel on its own, with CuPy and cuda-python: no call of ours between arrays and GPU.

`cupymla.raw_module` compiles the kernel and says what a launch of it needs; the rest is what any CUDA program does:
fill the parameter record, encode the tensor map, launch. Without a GPU, tests hand what it
launches to the PTX interpreter. On a Hopper GPU:

    python scripts/examples/standalone_launch.py
"""

from __future__ import annotations

import ctypes
import math
import sys
from pathlib import Path
from typing import Any

import cupy as cp
import ml_dtypes
import numpy as np
from cuda.bindings import driver

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import cupymla

# Queries enough to give each of an H200's multiprocessors a CTA of 64 heads: fewer the package's call divides among
# smaller CTAs, whose sums are rounded otherwise.
S_Q, S_KV, H_Q, D_QK, D_V, TOPK = 128, 1024, 128, 576, 512, 256


def aligned_copy(data: bytes) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """A copy of `data` at a multiple of 128, which a tensor map asks for: the buffer that holds it, and the address."""
    buffer = ctypes.create_string_buffer(len(data) + 127)
    address = -(-ctypes.addressof(buffer) // 128) * 128
    ctypes.memmove(address, data, len(data))
    return buffer, address


def query_map(q: Any, heads: int) -> bytes:
    """The tensor map of Q: boxes of 64 channels x `heads` heads of one query, 128-byte swizzle."""
    kinds = driver
    numbers = (kinds.cuuint64_t, kinds.cuuint32_t)
    dims = [numbers[0](n) for n in (D_QK, H_Q, S_Q, 1)]
    strides = [numbers[0](n) for n in (q.strides[1], q.strides[0], q.strides[0])]
    box = [numbers[1](n) for n in (64, heads, 1, 1)]
    error, encoded = driver.cuTensorMapEncodeTiled(
        kinds.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        4,
        q.data.ptr,
        dims,
        strides,
        box,
        [numbers[1](1)] * 4,
        kinds.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        kinds.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        kinds.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        kinds.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(error):
        raise RuntimeError(f"cuTensorMapEncodeTiled: {error}")
    return ctypes.string_at(encoded.getPtr(), 128)


def launch(
    kernel: Any, q: Any, kv: Any, indices: Any, out: Any, max_logits: Any, lse: Any, multiprocessors: int, stream: int
) -> int:
    """Attention of q to the rows of kv that indices name: the kernel alone. Returns how many CTAs there are."""
    function = kernel.module.get_function(kernel.entry)
    function.max_dynamic_shared_size_bytes = kernel.facts["smem_bytes"]
    heads = kernel.facts["heads_per_cta"]
    assigned = kernel.assign_work(multiprocessors, s_q=S_Q, h_q=H_Q)
    # Scores are taken to log2 by a rounded factor; what a unit of them is in natural logarithms, in two floats.
    sm_scale = D_QK**-0.5
    scale_log2 = float(np.float32(sm_scale * math.log2(math.e)))
    unit = sm_scale / scale_log2
    base_unit = float(np.float32(unit))
    record = kernel.parameters(
        kv=kv.data.ptr,
        indices=indices.data.ptr,
        out=out.data.ptr,
        max_logits=max_logits.data.ptr,
        lse=lse.data.ptr,
        kv_token_bytes=kv.strides[0],
        indices_query=TOPK,
        out_query_bytes=out.strides[0],
        out_head_bytes=out.strides[1],
        max_logits_query=H_Q,
        max_logits_head=1,
        lse_query=H_Q,
        lse_head=1,
        k_stride=1,
        s_q=S_Q,
        s_kv=S_KV,
        h_q=H_Q,
        topk=TOPK,
        scale_log2=scale_log2,
        max_unit=sm_scale,
        base_unit=base_unit,
        base_unit_rest=unit - base_unit,
        lse_unit=math.log(2.0),
        **assigned.fields,
    )
    keep, map_address = aligned_copy(query_map(q, heads))
    slots = (ctypes.c_void_p * 2)(map_address, ctypes.addressof(record))
    (error,) = driver.cuLaunchKernel(
        function.kernel.ptr, assigned.ctas, 1, 1, kernel.facts["threads"], 1, 1, kernel.facts["smem_bytes"], stream,
        ctypes.addressof(slots), 0,
    )  # fmt: skip
    if int(error):
        raise RuntimeError(f"cuLaunchKernel: {error}")
    del keep
    return assigned.ctas


def main() -> None:
    """Compute one small problem and compare it with the package's own call."""
    if not cp.cuda.is_available() or cp.cuda.Device().compute_capability != "90":
        raise SystemExit("this launches a kernel for sm_90a, and CuPy finds no GPU of compute capability 9.0")
    rng = cp.random.default_rng(0)
    q = rng.standard_normal((S_Q, H_Q, D_QK), dtype=np.float32).astype(ml_dtypes.bfloat16)
    kv = rng.standard_normal((S_KV, D_QK), dtype=np.float32).astype(ml_dtypes.bfloat16)
    indices = rng.integers(0, S_KV, size=(S_Q, TOPK)).astype(np.int32)
    out = cp.empty((S_Q, H_Q, D_V), ml_dtypes.bfloat16)
    max_logits, lse = cp.empty((S_Q, H_Q), np.float32), cp.empty((S_Q, H_Q), np.float32)

    kernel = cupymla.raw_module("sparse_mla_fwd", d_qk=D_QK, dtype="bfloat16")
    multiprocessors = cp.cuda.Device().attributes["MultiProcessorCount"]
    stream = cp.cuda.get_current_stream()
    grid = launch(kernel, q, kv, indices, out, max_logits, lse, multiprocessors, stream.ptr)
    stream.synchronize()

    expected, *statistics = cupymla.sparse_mla_fwd(q, kv, indices)
    same = bool((out.view(np.uint16) == expected.view(np.uint16)).all())
    same &= all(bool((ours == theirs).all()) for ours, theirs in zip((max_logits, lse), statistics, strict=True))
    print(f"{grid} CTAs of {kernel.facts['threads']} threads, {kernel.facts['smem_bytes']} bytes of shared memory each")
    print("the same bits as cupymla.sparse_mla_fwd" if same else "DIFFERENT from cupymla.sparse_mla_fwd")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
