"""cupymla as an entry to GPU MODE's NVFP4 GEMV competition: its 7-tuple in, its output out, nothing copied.

    python scripts/examples/gpumode_nvfp4_gemv.py      a small problem with its check, on a GPU where there is one

The competition gives, batch axis l last and memory with l first behind it:

- a `[m, k/2, l]`, b `[128, k/2, l]`: E2M1 pairs (uint8 or float4_e2m1fn_x2), of b only row 0 counts;
- sfa `[m, k/16, l]`, sfb `[128, k/16, l]`: their E4M3 scales, which may be on the CPU;
- sfa_permuted, sfb_permuted: the same in cuBLASLt's 128x4 blocks, seen as `[32, 4, rows/128, 4, columns/4, l]`;
- c `[m, 1, l]` float16, to be written and returned.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import cupymla


def custom_kernel(data: tuple[Any, ...]) -> Any:
    """c `[m, 1, l]`, written, of the competition's (a, b, sfa, sfb, sfa_permuted, sfb_permuted, c).

    Arrays of torch, CuPy or NumPy, all taken as views of the caller's memory.
    """
    a, b, sfa, sfb, sfa_permuted, sfb_permuted, c = data
    if _place(sfa) == _place(a) == _place(sfb):
        return cupymla.nvfp4_gemv(a, b[:1], sfa, sfb[:1], c=c)
    blocks = _blocks(sfa_permuted), _blocks(sfb_permuted)
    return cupymla.nvfp4_gemv(a, b[:1], *blocks, scale_layout="128x4", c=c)


def _place(array: Any) -> str:
    return str(getattr(array, "device", "cpu"))


def _blocks(permuted: Any) -> Any:
    """128x4 blocks `[bytes, l]` from their six-dimensional view."""
    order = (5, 2, 4, 0, 1, 3)
    memory = permuted.permute(*order) if hasattr(permuted, "permute") else permuted.transpose(*order)
    blocks = memory.reshape(memory.shape[0], -1)
    if _address(blocks) != _address(memory):
        raise ValueError("permuted scales are to be a view of 128x4 blocks, and these would have to be copied")
    return blocks.T


def _address(array: Any) -> int:
    if hasattr(array, "data_ptr"):
        return int(array.data_ptr())
    return int(array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data)


def problem(m: int, k: int, batches: int, xp: Any, seed: int = 0) -> tuple[Any, ...]:
    """The competition's 7-tuple of random data in the memory of xp, numpy or cupy."""
    random = xp.random.default_rng(seed)

    def batch_last(rows: int, columns: int, low: int, high: int) -> Any:
        values = random.integers(low, high, (batches, rows, columns), dtype=xp.int32).astype(xp.uint8)
        return xp.moveaxis(values, 0, -1)

    def permuted(scales: Any) -> Any:
        rows, columns, _ = (swizzled := cupymla.swizzle_scales(scales)).shape
        blocks = xp.moveaxis(swizzled, -1, 0).reshape(batches, rows // 128, columns // 4, 32, 4, 4)
        return blocks.transpose(3, 4, 1, 5, 2, 0)

    a, b = batch_last(m, k // 2, 0, 256), batch_last(128, k // 2, 0, 256)
    # E4M3 codes from 2^-4 to 2^0.
    sfa, sfb = batch_last(m, k // 16, 0x18, 0x39), batch_last(128, k // 16, 0x18, 0x39)
    c = xp.moveaxis(xp.zeros((batches, m, 1), xp.float16), 0, -1)
    return a, b, sfa, sfb, permuted(sfa), permuted(sfb), c


def on_host(array: Any) -> Any:
    """A NumPy array whose memory has the batch first, as on the GPU; `get` by itself gives C order of the axes."""
    return array.transpose(2, 0, 1).get().transpose(1, 2, 0) if hasattr(array, "get") else array


def main() -> int:
    """Run a small problem; 0 when the result is right."""
    import numpy as np

    xp: Any = np
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount():
            xp = cupy
    except Exception:
        print("no CuPy with a GPU: NumPy arrays on the CPU")
    data = problem(256, 1024, 2, xp)
    c = custom_kernel(data)
    a, b, sfa, sfb = map(on_host, data[:4])
    weights = cupymla.dequantize_nvfp4(a, sfa).astype(np.float64)
    vector = cupymla.dequantize_nvfp4(b[:1], sfb[:1]).astype(np.float64)
    expected = np.einsum("mkl,nkl->mnl", weights, vector)
    error = np.abs(on_host(c).astype(np.float64) - expected)
    right = bool(np.all(error <= 1e-3 * np.abs(expected) + 1e-2))
    print(f"{xp.__name__}: largest error {error.max():.3g} at values up to {np.abs(expected).max():.3g}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
