"""Companions without a GPU: their kernels in the PTX interpreter give the CPU's bits.

Compiles to PTX, needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupymla
from cupymla.testing.interpreted import DeviceArray, interpreted
from cupymla.testing.operators import as_tuple

Array = np.ndarray[Any, Any]


def calls() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(function, id, arguments)."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((5, 76)).astype(np.float32) * np.exp(3 * rng.standard_normal((5, 1))).astype(np.float32)
    x[2, 7], x[3] = np.nan, 0
    strided = np.zeros((130, 100), np.float32)[:, :72]
    strided[...] = rng.standard_normal(strided.shape)
    for factor in (None, 3.7, "amax", np.array(0.3, np.float32)):
        scale = {} if factor is None else {"global_scale": factor}
        yield "quantize_nvfp4", f"{type(factor).__name__}", {"x": x, **scale}
    yield "quantize_nvfp4", "swizzled", {"x": strided, "scale_layout": "128x4", "global_scale": "amax"}
    yield "quantize_nvfp4", "bf16_mxfp4", {"x": x.astype(ml_dtypes.bfloat16), "format": "mxfp4"}
    yield "quantize_nvfp4", "batch", {"x": np.stack([x, -x]), "batch_axis": 0}
    for dtype in ("float32", "float16", "bfloat16"):
        for layout in ("linear", "128x4"):
            packed, scales = cupymla.quantize_nvfp4(strided, scale_layout=layout, global_scale=2.0)
            arguments = {"packed": packed, "scales": scales, "scale_layout": layout, "out_dtype": dtype}
            yield "dequantize_nvfp4", f"{dtype}_{layout}", {**arguments, "global_scale": 2.0}
    packed, scales = cupymla.quantize_nvfp4(x[:, :70], format="mxfp4")
    yield "dequantize_nvfp4", "mxfp4_tail", {"packed": packed, "scales": scales, "format": "mxfp4"}
    scales = rng.integers(0, 256, (130, 7), np.uint8)
    swizzled = cupymla.swizzle_scales(scales)
    yield "swizzle_scales", "plain", {"scales": scales}
    yield "unswizzle_scales", "plain", {"swizzled": swizzled, "rows": 130, "columns": 7}


CALLS = {f"{name}-{tag}": (name, arguments) for name, tag, arguments in calls()}


def bits(array: Array) -> bytes:
    """An array's bytes, every NaN the same: which NaN a division gives is nobody's promise."""
    made = np.array(array)
    if made.dtype.itemsize > 1:
        made[np.isnan(made)] = np.nan
    return made.tobytes()


@pytest.mark.compile
@pytest.mark.parametrize("case", CALLS)
def test_kernels_give_the_bits_of_the_cpu(case: str) -> None:
    name, arguments = CALLS[case]
    function = getattr(cupymla, name)
    expected = as_tuple(function(**arguments))
    with interpreted("sm_90", 3) as machine:
        results = as_tuple(machine.call(function, **machine.arguments(arguments)))
    assert len(results) == len(expected)
    for got, want in zip(results, expected, strict=True):
        have = got.get() if isinstance(got, DeviceArray) else np.asarray(got)
        assert have.shape == np.shape(want)
        assert bits(have) == bits(want)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_every_e4m3_code_stands_for_its_number(arch: str) -> None:
    """Targets before sm_89 have no instruction for it."""
    codes = np.arange(256, dtype=np.uint8)
    ones = np.full((1, 256 * 8), 0x22, np.uint8)  # pairs of E2M1 codes, 1.0 each
    with interpreted(arch, 1) as machine:
        arguments = machine.arguments({"packed": ones, "scales": codes[None]})
        made = machine.call(cupymla.dequantize_nvfp4, **arguments, out_dtype="float32")
    numbers = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert bits(made.get()) == bits(np.repeat(numbers, 16)[None])
