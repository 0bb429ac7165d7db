"""Related functions without a GPU: their kernels on the host machine give the CPU's bits.

Compiles, needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupymla
from cupymla.testing.operators import as_tuple
from cupymla_lab.emulated import DeviceArray, emulated

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


def require_bits(results: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert len(results) == len(expected)
    for got, want in zip(results, expected, strict=True):
        have = got.get() if isinstance(got, DeviceArray) else np.asarray(got)
        assert have.shape == np.shape(want)
        assert bits(have) == bits(want)


@pytest.mark.compile
@pytest.mark.parametrize("case", CALLS)
def test_kernels_give_the_bits_of_the_cpu(case: str) -> None:
    name, arguments = CALLS[case]
    function = getattr(cupymla, name)
    expected = as_tuple(function(**arguments))
    with emulated("sm_90", 3) as machine:
        results = as_tuple(machine.call(function, **machine.arguments(arguments)))
    require_bits(results, expected)


@pytest.mark.compile
@pytest.mark.parametrize("case", CALLS)
def test_prepared_calls_write_their_arrays_again(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From what their inputs hold by then, with no memory but what `prepare` took, and with the call's own kernels."""
    name, arguments = CALLS[case]
    function = getattr(cupymla, name)
    first = next(iter(arguments))
    changed = {**arguments, first: arguments[first][..., ::-1].copy()}
    assert bits(as_tuple(function(**changed))[0]) != bits(as_tuple(function(**arguments))[0])
    with emulated("sm_90", 3) as machine:
        given = machine.arguments(arguments)
        prepared = machine.call(function.prepare, **given)
        assert not machine.launched
        monkeypatch.setattr(machine, "empty", lambda *_: pytest.fail("allocated"))
        results = as_tuple(machine.call(prepared))
        require_bits(results, as_tuple(function(**arguments)))
        given[first].host[...] = changed[first]
        again = as_tuple(machine.call(prepared))
        assert all(new is old for new, old in zip(again, results, strict=True))
        require_bits(again, as_tuple(function(**changed)))
        monkeypatch.undo()
        launched, machine.launched = machine.launched, []
        machine.call(function, **given)
        assert launched == 2 * machine.launched


@pytest.mark.compile
def test_prepared_calls_write_to_given_outputs() -> None:
    x = np.random.default_rng(4).standard_normal((130, 64)).astype(np.float32)
    want = cupymla.quantize_nvfp4(x, scale_layout="128x4", global_scale="amax")
    with emulated("sm_90", 3) as machine:
        packed, scales = (machine.empty(made.shape, made.dtype) for made in want[:2])
        options = {"scale_layout": "128x4", "global_scale": "amax", "packed": packed, "scales": scales}
        prepared = machine.call(cupymla.quantize_nvfp4.prepare, machine.array(x), **options)
        results = machine.call(prepared)
    assert results[0] is packed and results[1] is scales
    require_bits(results, want)


@pytest.mark.compile
def test_a_batch_axis_in_last_place_comes_back_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """In new arrays, whose rows are contiguous in memory all the same, and in given ones."""

    def transposed(array: DeviceArray, *axes: int) -> DeviceArray:
        return DeviceArray(array.host.transpose(axes))

    monkeypatch.setattr(DeviceArray, "transpose", transposed, raising=False)
    x = np.moveaxis(np.random.default_rng(5).standard_normal((3, 9, 32)).astype(np.float32), 0, -1)
    want = cupymla.quantize_nvfp4(x, global_scale="amax")
    with emulated("sm_90", 3) as machine:
        given = machine.array(x)
        results = machine.call(cupymla.quantize_nvfp4, given, global_scale="amax")
        require_bits(results, want)
        assert [made.host.strides for made in results[:2]] == [made.strides for made in want[:2]]
        prepared = machine.call(cupymla.quantize_nvfp4.prepare, given, global_scale="amax")
        require_bits(machine.call(prepared), want)
        rows = DeviceArray(machine.empty((3, 9, 16), np.uint8).host.transpose(1, 2, 0))
        made = machine.call(cupymla.quantize_nvfp4, given, global_scale="amax", packed=rows)
    assert made[0] is rows
    require_bits(made, want)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_every_e4m3_code_stands_for_its_number(arch: str) -> None:
    """Targets before sm_89 have no instruction for it."""
    codes = np.arange(256, dtype=np.uint8)
    ones = np.full((1, 256 * 8), 0x22, np.uint8)  # pairs of E2M1 codes, 1.0 each
    with emulated(arch, 1) as machine:
        arguments = machine.arguments({"packed": ones, "scales": codes[None]})
        made = machine.call(cupymla.dequantize_nvfp4, **arguments, out_dtype="float32")
    numbers = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert bits(made.get()) == bits(np.repeat(numbers, 16)[None])
