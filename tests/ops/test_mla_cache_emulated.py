"""Kernels of the fp8 caches without a GPU: on the host machine they give the CPU's bits. Compiles, needs no GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupymla
from cupymla.testing.operators import Subject, as_tuple
from cupymla_lab.emulated import emulated

pytestmark = pytest.mark.compile

Array = np.ndarray[Any, Any]
ARCHS = ("sm_80", "sm_90")
"""Before and from sm_89 on, which has an instruction for what the other does by integer arithmetic."""


def bits(array: Array) -> bytes:
    """An array's bytes, every NaN of more than a byte the same: which NaN a product gives is not promised."""
    made = np.array(array)
    if made.dtype.itemsize > 1 and made.dtype.kind not in "iu":
        made[np.isnan(made)] = np.nan
    return made.tobytes()


def require_same(name: str, arguments: dict[str, Any], written: tuple[str, ...] = (), arch: str = "sm_90") -> None:
    """The kernel's results, and what it writes in place, have the bits of the CPU's."""
    function = getattr(cupymla, name)
    on_host = {n: v.copy() if n in written else v for n, v in arguments.items()}
    expected = as_tuple(function(**on_host))
    with emulated(arch, 3) as machine:
        results = as_tuple(machine.call(function, **machine.arguments(arguments, written)))
    assert len(results) == len(expected)
    for got, want in zip(results, expected, strict=True):
        assert got.shape == want.shape
        assert bits(got.get()) == bits(want)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", Subject("quantize_fp8").cases.CASES, ids=lambda case: case.name)
def test_quantised_bits(arch: str, case: Any) -> None:
    require_same("quantize_fp8", Subject("quantize_fp8").cases.inputs(case, 5), arch=arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kind_of_float(arch: str) -> None:
    """With a scale of 1: all exponents, ties of every code, subnormal numbers; and random bits."""
    rng = np.random.default_rng(0)
    bits_of = rng.integers(0, 2**32, (64, 32), dtype=np.uint32)
    bits_of[:32] = (bits_of[:32] & 0x80FFFFFF) | np.uint32(0x3A000000)  # 2^-11 to 2^-7
    bits_of[16:] &= np.uint32(0xFFF80000)  # ties
    x = bits_of.view(np.float32).copy()
    x[:48, 0] = 448
    require_same("quantize_fp8", {"x": x, "group": 32}, arch=arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("padding", [0, 1, 8])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_dequantised_bits(arch: str, padding: int, as_bytes: bool) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 256).repeat(6, 1).repeat(2, 0)
    wide = np.concatenate([codes, np.zeros((2, 6, padding), np.uint8)], axis=-1)[..., :256]
    scales = np.random.default_rng(0).standard_normal((4, 6, 2)).astype(np.float32).transpose(2, 1, 0)
    scales[0, :, 0] = [1, 0, 2.0**-140, 3e38, np.inf, np.nan]
    given = wide if as_bytes else wide.view(ml_dtypes.float8_e4m3fn)
    require_same("dequantize_fp8", {"codes": given, "scales": scales, "group": 64}, arch=arch)


@pytest.mark.parametrize("gap", [1, 4, 16])
def test_given_outputs_of_any_strides(gap: int) -> None:
    """Rows at addresses that take bytes, words or whole vectors."""
    x = np.random.default_rng(2).standard_normal((3, 2, 64)).astype(ml_dtypes.bfloat16)
    want = cupymla.quantize_fp8(x, group=16)
    back = cupymla.dequantize_fp8(*want, group=16)
    with emulated("sm_90", 1) as machine:
        codes = machine.array(np.zeros((3, 2, 64 + gap), np.uint8)[..., :64], writable=True)
        scales = machine.array(np.zeros((4, 2, 3), np.float32).transpose(2, 1, 0), writable=True)
        out = machine.array(np.zeros((3, 2, 64 + gap), ml_dtypes.bfloat16)[..., :64], writable=True)
        made = machine.call(cupymla.quantize_fp8, machine.array(x), group=16, codes=codes, scales=scales)
        assert made[0] is codes and made[1] is scales
        machine.call(cupymla.dequantize_fp8, codes, scales, group=16, out=out)
        assert bits(codes.get()) == bits(want[0]) and bits(scales.get()) == bits(want[1])
        assert bits(out.get()) == bits(back)
