"""nvfp4_gemv and its related functions on a GPU, beyond the cases: hostile codes, large shapes, graphs, frameworks,
bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gemv_scales_kit import every_code_and_scale, neighbours_far_apart

import cupymla
from cupymla import InputError
from cupymla.ops.nvfp4_gemv import cases, formats, reference
from cupymla.testing import compare, operators

pytestmark = pytest.mark.gpu


def on_host(result: Any) -> Any:
    return result.get()


def require_within_bound(host: dict[str, Any], got: Any) -> None:
    """The documented error bound, plus half a unit in the last place of the output's dtype."""
    exact = reference.nvfp4_gemv(**host)
    bound = reference.error_bound(**host)
    with np.errstate(over="ignore"):
        stored = exact.astype(got.dtype)
    finite = np.isfinite(stored.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float64)), np.isnan(exact))
    ulp = np.array([compare.half_ulp(abs(v), got.dtype) for v in exact[finite].ravel()])
    smallest = {2: 2.0**-25, 4: 2.0**-150}[got.dtype.itemsize]
    error = np.abs(got.astype(np.float64)[finite] - exact[finite]).ravel()
    assert np.all(error <= bound[finite].ravel() * 1.01 + np.maximum(ulp, smallest))


# The product -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("b_dtype", ["e2m1", "bfloat16", "float16"])
@pytest.mark.parametrize("data", ["plain", "full"])
@pytest.mark.parametrize("n", [1, 5, 16])
def test_error_bound_holds(cp: Any, format: str, b_dtype: str, data: str, n: int) -> None:
    """Long rows, so that the tensor cores' own rounding would show if it were allowed to add up."""
    case = cases.make("bound", m=40, n=n, k=20_480, format=format, b_dtype=b_dtype, data=data, out_dtype="float32")
    host = cases.inputs(case, 1)
    got = on_host(cupymla.nvfp4_gemv(**operators.arguments_on(cp, host)))
    require_within_bound(host, got)


def test_every_code_times_every_scale(cp: Any) -> None:
    """Row s has every E2M1 code under scale code s: all 256 scales, negative ones, zeros and NaN among them."""
    k = 16
    codes = formats.pack_pairs(np.tile(np.arange(16, dtype=np.uint8), (256, 1)))
    host = {
        "a": codes,
        "sfa": np.arange(256, dtype=np.uint8).reshape(256, 1),
        # Column j picks element j.
        "b": formats.pack_pairs(np.eye(k, dtype=np.uint8) * 2),
        "sfb": np.full((16, 1), 0x38, np.uint8),
        "out_dtype": "float32",
    }
    got = on_host(cupymla.nvfp4_gemv(**operators.arguments_on(cp, host)))
    with np.errstate(invalid="ignore"):
        expected = formats.E4M3[:, np.newaxis] * formats.E2M1[np.newaxis, :]
    # A NaN scale makes NaN of the whole row, whatever its codes.
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("b_dtype", ["e2m1", "bfloat16"])
@pytest.mark.parametrize("n", [1, 2, 16])
def test_every_power_of_two_as_a_scale(cp: Any, n: int, b_dtype: str) -> None:
    """With several columns they are multiplied into bfloat16 codes, subnormal ones among them."""
    for host in (every_code_and_scale(n, b_dtype)[0], neighbours_far_apart(n, b_dtype)):
        require_within_bound(host, on_host(cupymla.nvfp4_gemv(**operators.arguments_on(cp, host))))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("b_dtype", ["bfloat16", "float16"])
def test_activations_that_are_not_finite(cp: Any, value: float, b_dtype: str) -> None:
    """They reach the outputs of their own column only: as they are, or as NaN where a zero meets an infinity."""
    case = cases.make("poison", m=130, n=3, k=544, b_dtype=b_dtype, out_dtype="float32")
    host = cases.inputs(case, 2)
    host["b"] = host["b"].copy()
    host["b"][1, 300] = value
    exact = reference.nvfp4_gemv(**host)
    got = on_host(cupymla.nvfp4_gemv(**operators.arguments_on(cp, host)))
    for where in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(where(got), where(exact))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("n", [1, 2])
def test_activations_over_the_whole_range_of_bfloat16(cp: Any, format: str, n: int) -> None:
    """Blocks of one column are normalised; neither their largest nor their smallest elements may be lost."""
    case = cases.make("bound", m=64, n=n, k=1024, format=format, b_dtype="bfloat16", out_dtype="float32")
    host = cases.inputs(case, 10)
    exponents = np.random.default_rng(0).integers(-100, 100, (n, 32, 1, 1))
    host["b"] = (host["b"].astype(np.float32).reshape(n, 32, 32, 1) * 2.0**exponents).reshape(n, 1024, 1)
    host["b"] = host["b"].astype(ml_dtypes.bfloat16)
    got = on_host(cupymla.nvfp4_gemv(**operators.arguments_on(cp, host)))
    require_within_bound(host, got)


@pytest.mark.parametrize("shape", [(40_000, 1, 64, 1), (20, 16, 41_216, 1), (5, 2, 64, 3_000), (300, 3, 512, 140)])
def test_shapes_of_many_passes_phases_and_items(cp: Any, shape: tuple[int, int, int, int]) -> None:
    m, n, k, batches = shape
    for format in ("nvfp4", "mxfp4"):
        case = cases.make("shapes", m=m, n=n, k=k, batches=batches, format=format, out_dtype="float32")
        host = cases.inputs(case, 3)
        got = on_host(cupymla.nvfp4_gemv(**operators.arguments_on(cp, host)))
        exact, same = reference.nvfp4_gemv(**host), reference.nvfp4_gemv(**host, precision="same")
        compare.require([compare.compare("c", got, same, exact)])


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_every_alignment_gives_the_same_bits(cp: Any, offset: int) -> None:
    """Operands at odd addresses take other ways into shared memory, but meet the same arithmetic."""
    case = cases.make("shapes", m=100, n=3, k=1024, out_dtype="float32")
    arguments = operators.arguments_on(cp, cases.inputs(case, 4))
    expected = on_host(cupymla.nvfp4_gemv(**arguments))
    for name in ("a", "b", "sfa", "sfb"):
        array = arguments[name]
        moved = cp.zeros(array.size + offset, cp.uint8)[offset:].reshape(array.shape)
        moved[...] = array
        got = on_host(cupymla.nvfp4_gemv(**{**arguments, name: moved}))
        assert got.tobytes() == expected.tobytes()


def test_reversed_and_broadcast_strides(cp: Any) -> None:
    case = cases.make("strides", m=90, n=2, k=320, batches=3, batch="first", out_dtype="float32")
    host = cases.inputs(case, 5)
    arguments = operators.arguments_on(cp, host)
    for name in ("a", "sfa"):
        host[name] = np.broadcast_to(host[name][:1, ::-1], host[name].shape)
        arguments[name] = cp.broadcast_to(arguments[name][:1, ::-1], arguments[name].shape)
    got = on_host(cupymla.nvfp4_gemv(**arguments))
    exact, same = reference.nvfp4_gemv(**host), reference.nvfp4_gemv(**host, precision="same")
    compare.require([compare.compare("c", got, same, exact)])


def test_prepared_calls_follow_their_inputs_and_replay_in_graphs(cp: Any) -> None:
    case = cases.make("options", m=200, n=2, k=512, alpha="rows", bias="rows")
    arguments = operators.arguments_on(cp, cases.inputs(case, 6))
    other = cases.inputs(case, 7)
    call = cupymla.nvfp4_gemv.prepare(**arguments)
    first = call()
    with cp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        captured = call()
        graph = stream.end_capture()
    assert captured is first
    for name, value in operators.arguments_on(cp, other).items():
        if isinstance(value, cp.ndarray):
            arguments[name][...] = value
    cp.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    exact, same = reference.nvfp4_gemv(**other), reference.nvfp4_gemv(**other, precision="same")
    compare.require([compare.compare("c", on_host(captured), same, exact)])


def test_torch_tensors_with_typed_scales(cp: Any) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    case = cases.make("options", m=130, n=2, k=256, batches=2)
    host = cases.inputs(case, 8)
    arguments = {k: torch.from_numpy(v).cuda() if isinstance(v, np.ndarray) else v for k, v in host.items()}
    for name in ("sfa", "sfb"):
        arguments[name] = arguments[name].view(torch.float8_e4m3fn)
    got = cupymla.nvfp4_gemv(**arguments)
    assert isinstance(got, torch.Tensor)
    exact, same = reference.nvfp4_gemv(**host), reference.nvfp4_gemv(**host, precision="same")
    compare.require([compare.compare("c", got.cpu().numpy(), same, exact)])


def test_bad_input_launches_nothing(cp: Any) -> None:
    arguments = operators.arguments_on(cp, cases.inputs(cases.make("shapes", m=8, n=2, k=64), 9))
    c = cp.full((8, 2), 7, cp.float16)
    with pytest.raises(InputError):
        cupymla.nvfp4_gemv(**{**arguments, "sfb": None}, c=c)
    assert bool((c == 7).all())


# The related functions, to the bit
# --------------------------------------------------------------------------------------


def hostile_floats(rows: int, k: int, dtype: Any) -> Any:
    """Rows of every kind: ordinary, huge, tiny, midpoints of both formats, zeros of both signs, infinities, NaN."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, k)).astype(np.float32)
    kinds = rng.integers(0, 8, rows)
    with np.errstate(over="ignore"):
        x[kinds == 1] *= np.float32(1e38)
        x[kinds == 2] *= np.float32(1e-39)
    x[kinds == 3] = rng.choice(np.array([0.25, -0.75, 1.25, 1.75, 2.5, -3.5, 5.0, 6.0], np.float32), (rows, k))[
        kinds == 3
    ]
    x[kinds == 4] = rng.choice(np.array([0.0, -0.0], np.float32), (rows, k))[kinds == 4]
    x[kinds == 5, ::37] = np.inf
    x[kinds == 6, ::41] = np.nan
    x[kinds == 7] = rng.integers(0, 1 << 32, (rows, k), dtype=np.uint32).view(np.float32)[kinds == 7]
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("factor", [None, 3.7, "amax"])
@pytest.mark.parametrize("k", [512, 54])
def test_quantising_and_back_is_that_of_the_cpu(
    cp: Any, format: str, layout: str, dtype: Any, factor: Any, k: int
) -> None:
    if format == "mxfp4" and factor is not None:
        pytest.skip("MXFP4 has no per-tensor scale")
    x = hostile_floats(300, k, dtype)
    options: dict[str, Any] = {"format": format, "scale_layout": layout}
    on_cpu = cupymla.quantize_nvfp4(x, global_scale=factor, **options)
    on_gpu = cupymla.quantize_nvfp4(cp.asarray(x), global_scale=factor, **options)
    for ours, right in zip(on_gpu, on_cpu, strict=True):
        np.testing.assert_array_equal(on_host(ours), np.asarray(right))
    scale = None if factor is None else (on_cpu[2] if factor == "amax" else factor)
    device_scale = on_gpu[2] if factor == "amax" else scale
    for out_dtype in ("float32", "float16"):
        right = cupymla.dequantize_nvfp4(*on_cpu[:2], global_scale=scale, out_dtype=out_dtype, **options)
        ours = cupymla.dequantize_nvfp4(*on_gpu[:2], global_scale=device_scale, out_dtype=out_dtype, **options)
        np.testing.assert_array_equal(on_host(ours), right)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_every_code_under_every_scale_is_dequantised_as_on_the_cpu(cp: Any, format: Any) -> None:
    block = formats.named(format).block
    codes = formats.pack_pairs(np.tile(np.arange(block, dtype=np.uint8) % 16, (256, 1)))
    scales = np.arange(256, dtype=np.uint8).reshape(256, 1)
    right = cupymla.dequantize_nvfp4(codes, scales, format=format)
    ours = cupymla.dequantize_nvfp4(cp.asarray(codes), cp.asarray(scales), format=format)
    np.testing.assert_array_equal(
        on_host(ours).view(np.uint32)[~np.isnan(right)], right.view(np.uint32)[~np.isnan(right)]
    )
    np.testing.assert_array_equal(np.isnan(on_host(ours)), np.isnan(right))


@pytest.mark.parametrize("batch_axis", [-1, 0])
@pytest.mark.parametrize("shape", [(128, 8), (1, 1), (300, 11), (129, 5)])
def test_swizzling_is_that_of_the_cpu(cp: Any, batch_axis: int, shape: tuple[int, int]) -> None:
    rows, columns = shape
    scales = np.random.default_rng(1).integers(0, 256, (3, rows, columns), dtype=np.uint8)
    seen = scales if batch_axis == 0 else np.moveaxis(scales, 0, -1)
    on_gpu = cp.asarray(scales) if batch_axis == 0 else cp.moveaxis(cp.asarray(scales), 0, -1)
    right = cupymla.swizzle_scales(seen, batch_axis=batch_axis)
    swizzled = cupymla.swizzle_scales(on_gpu, batch_axis=batch_axis)
    np.testing.assert_array_equal(on_host(swizzled), right)
    back = cupymla.unswizzle_scales(swizzled, rows, columns, batch_axis=batch_axis)
    np.testing.assert_array_equal(on_host(back), seen)


def test_what_quantize_gives_the_product_takes(cp: Any) -> None:
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((150, 1000)).astype(np.float32), rng.standard_normal((4, 1000)).astype(np.float32)
    for layout in ("linear", "128x4"):
        a, sfa, ga = cupymla.quantize_nvfp4(cp.asarray(x), global_scale="amax", scale_layout=layout)
        b, sfb, gb = cupymla.quantize_nvfp4(cp.asarray(y), global_scale="amax", scale_layout=layout)
        alpha = (1 / (ga * gb)).astype(cp.float32)
        c = cupymla.nvfp4_gemv(a, b, sfa, sfb, alpha=alpha, scale_layout=layout, out_dtype="float32")
        assert compare.dissimilarity(on_host(c), x @ y.T) < 0.02
