"""The test kit catches what it is there to catch. Nothing else checks the checker."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupymla.ops import registry
from cupymla.ops.registry import KernelEntry, OperatorEntry
from cupymla.testing import compare as compare_module
from cupymla.testing import operators
from cupymla.testing.compare import Mismatch, compare, compare_bits, dissimilarity, half_ulp, require
from cupymla.testing.poison import span_bytes, strided_like
from cupymla_lab import gpu
from cupymla_lab.emulate import Settings
from cupymla_lab.emulated import Emulated
from cupymla_lab.guarded import GUARD_BYTES, Guarded
from cupymla_lab.subjects import Subject, cheapest

Array = npt.NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(np.float32), np.dtype(np.float16), BF16]
ROWS, COLUMNS = 24, 96


@pytest.fixture
def product() -> tuple[Array, Array]:
    """A matrix product as float64 and as float32 operands give it, the latter to be stored as bf16."""
    rng = np.random.default_rng(7)
    a, b = rng.standard_normal((ROWS, 64)), rng.standard_normal((64, COLUMNS))
    return a @ b, (a.astype(np.float32) @ b.astype(np.float32)).astype(BF16)


def failure(got: Array, product: tuple[Array, Array]) -> str | None:
    exact, same = product
    return compare("out", got, same, exact).failure


def test_correctly_rounded_result_passes(product: tuple[Array, Array]) -> None:
    exact, _ = product
    assert failure(exact.astype(BF16), product) is None


def test_same_precision_result_in_another_order_passes(product: tuple[Array, Array]) -> None:
    """A kernel sums in its own order; that alone must not fail it."""
    rng = np.random.default_rng(7)
    a, b = rng.standard_normal((ROWS, 64)).astype(np.float32), rng.standard_normal((64, COLUMNS)).astype(np.float32)
    total = np.zeros((ROWS, COLUMNS), np.float32)
    for k in range(63, -1, -1):
        total += a[:, k : k + 1] * b[k]
    assert failure(total.astype(BF16), product) is None


def test_nan_leak_is_caught(product: tuple[Array, Array]) -> None:
    got = product[1].copy()
    got[3, 5] = np.nan
    message = failure(got, product)
    assert message is not None
    assert "NaN" in message
    assert "[3, 5]" in message


def test_swapped_rows_are_caught(product: tuple[Array, Array]) -> None:
    got = product[1].copy()
    got[[2, 9]] = got[[9, 2]]
    assert "out" in (failure(got, product) or "")


@given(row=st.integers(0, ROWS - 1), column=st.integers(0, COLUMNS - 1), up=st.booleans())
def test_one_wrong_element_is_caught(row: int, column: int, up: bool) -> None:
    """Anything past the limit at a single place fails, and the message leads there."""
    rng = np.random.default_rng(7)
    exact = rng.standard_normal((ROWS, 64)) @ rng.standard_normal((64, COLUMNS))
    same = exact.astype(BF16)
    limit = compare("out", same, same, exact).limit
    got = same.astype(np.float32)
    got[row, column] = exact[row, column] + (1.01 if up else -1.01) * limit
    found = compare("out", got.astype(np.float64), same, exact)
    # In float64 the output rounds to nothing, so its own limit is the reference's part alone, which is smaller.
    assert found.failure is not None
    assert f"[{row}, {column}]" in found.failure


def test_scaled_result_is_caught(product: tuple[Array, Array]) -> None:
    """An error of 1% everywhere can stay below the absolute bound of a bf16 output; the similarity sees it."""
    exact, same = product
    report_ = compare("out", (exact * 1.01).astype(BF16), same, exact)
    assert report_.failure is not None
    assert report_.dissimilarity > 1e-5


def test_systematic_error_below_the_absolute_bound_is_caught() -> None:
    """One outlier makes the absolute bound generous; a relative error everywhere else must still fail."""
    exact = np.full(4096, 1.0)
    exact[0] = 64.0
    same = exact.astype(BF16)
    same[0] = 64.5
    got = (exact * 1.01).astype(BF16)
    got[0] = 64.0
    found = compare("out", got, same, exact)
    assert found.error <= found.limit
    assert "dissimilarity" in (found.failure or "")


@pytest.mark.parametrize("dtype", [*FLOATS, np.dtype(np.int32), np.dtype(np.uint8)])
def test_unwritten_output_is_caught(dtype: np.dtype[Any]) -> None:
    """What was never written still holds poison, in every dtype."""
    exact = np.arange(60.0).reshape(3, 20) % 17
    same = exact.astype(dtype)
    guarded = Guarded(np, (3, 20), dtype)
    assert compare("out", guarded.array, same, exact).failure is not None
    guarded.array[...] = same
    assert compare("out", guarded.array, same, exact).failure is None
    guarded.poison()
    guarded.array[:2] = same[:2]
    assert compare("out", guarded.to_numpy(), same, exact).failure is not None


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_infinities_and_nan_belong_where_the_reference_has_them(value: float) -> None:
    exact = np.array([1.0, value, 2.0])
    good = exact.astype(np.float32)
    assert compare("lse", good, good, exact).failure is None
    for wrong in (np.inf, -np.inf, np.nan, 3e38):
        if not (math.isnan(value) and math.isnan(wrong)) and wrong != value:
            bad = good.copy()
            bad[1] = wrong
            assert compare("lse", bad, good, exact).failure is not None
    misplaced = good[[1, 0, 2]]
    assert compare("lse", misplaced, good, exact).failure is not None


def test_overflow_counts_as_right_only_where_the_dtype_cannot_hold_the_value() -> None:
    exact = np.array([70000.0, 60000.0])
    good = np.array([np.inf, 60000.0], np.float16)
    assert compare("c", good, good, exact).failure is None
    assert compare("c", np.array([65504.0, 60000.0], np.float16), good, exact).failure is not None
    assert compare("c", np.array([np.inf, np.inf], np.float16), good, exact).failure is not None


def test_integers_have_to_be_equal() -> None:
    exact = np.arange(10)
    assert compare("codes", exact.astype(np.uint8), exact, exact).failure is None
    wrong = exact.astype(np.uint8)
    wrong[4] += 1
    assert "[4]: expected 4, got 5" in (compare("codes", wrong, exact, exact).failure or "")


def test_wrong_shape_is_caught() -> None:
    assert "shape" in (compare("out", np.zeros((2, 3)), np.zeros((3, 2)), np.zeros((3, 2))).failure or "")


def test_empty_and_all_zero_outputs_are_right() -> None:
    for shape in ((0, 4), (3, 4)):
        zeros = np.zeros(shape)
        assert compare("out", zeros.astype(BF16), zeros.astype(BF16), zeros).failure is None
    almost = np.zeros(4, np.float32)
    almost[1] = 1e-30
    assert compare("out", almost, np.zeros(4, np.float32), np.zeros(4)).failure is not None


@pytest.mark.parametrize("broken", [None, (0, 0), (3, 6), (8, 10)])
@pytest.mark.parametrize("how", [np.nan, -np.inf, 7.0])
def test_outputs_are_compared_block_by_block(
    broken: tuple[int, int] | None, how: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is found does not depend on how many elements are looked at together."""
    exact = np.random.default_rng(3).standard_normal((9, 22))[:, ::2]
    exact[2, 3], exact[5, 5] = np.inf, np.nan
    same = exact.astype(BF16)
    got = (exact * 1.001).astype(BF16)
    if broken is not None:
        got[broken] = how
    whole = compare("out", got, same, exact)
    assert (whole.failure is None) == (broken is None)
    assert broken is None or str(list(broken)) in str(whole.failure)
    for block in (1, 7, 98, 99):
        monkeypatch.setattr(compare_module, "_BLOCK", block)
        found = compare("out", got, same, exact)
        assert found.dissimilarity == pytest.approx(whole.dissimilarity, rel=1e-12)
        assert dataclasses.replace(found, dissimilarity=whole.dissimilarity) == whole


def test_a_comparison_needs_little_memory() -> None:
    exact = np.ones((1 << 12, 1 << 11))
    got = exact.astype(np.float32)
    tracemalloc.start()
    assert compare("out", got, got, exact).failure is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < exact.nbytes


def test_require_raises_with_every_failure() -> None:
    good, bad = np.ones(3, np.float32), np.zeros(3, np.float32)
    require([compare("a", good, good, np.ones(3))])
    with pytest.raises(Mismatch) as caught:
        require([compare("first", bad, good, np.ones(3)), compare("second", bad, good, np.ones(3))])
    assert "first" in str(caught.value)
    assert "second" in str(caught.value)


@given(st.floats(1e-30, 1e30))
def test_dissimilarity_is_the_published_formula(scale: float) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal(50), rng.standard_normal(50)
    assert dissimilarity(x * scale, y * scale) == pytest.approx(1 - 2 * x @ y / (x @ x + y @ y), rel=1e-9)
    assert dissimilarity(x, -x) == pytest.approx(2)
    assert dissimilarity(np.zeros(3), np.zeros(3)) == 0


@pytest.mark.parametrize("dtype", FLOATS)
@given(value=st.floats(1e-3, 6e4))
def test_half_ulp_is_what_rounding_can_do(dtype: np.dtype[Any], value: float) -> None:
    """No rounding is larger, and at the midpoint between two neighbours one is exactly that large."""
    value = float(np.float32(value))  # NumPy casts to bfloat16 by way of float32, which would round twice
    assert abs(float(np.float64(value).astype(dtype)) - value) <= half_ulp(value, dtype)
    power = 2.0 ** math.floor(math.log2(value))
    middle = power + half_ulp(power, dtype)
    assert abs(float(np.float64(middle).astype(dtype)) - middle) == half_ulp(power, dtype)


@pytest.mark.parametrize("offset", [-GUARD_BYTES, -1, 0, GUARD_BYTES - 1])
def test_writes_outside_an_output_are_caught(offset: int) -> None:
    guarded = Guarded(np, (4, 3), np.float32)
    guarded.check("out")
    memory = guarded.array.base
    while memory.base is not None:
        memory = memory.base
    end = GUARD_BYTES + guarded.array.nbytes
    memory[GUARD_BYTES + offset if offset < 0 else end + offset] ^= 1
    with pytest.raises(Mismatch, match="outside: 1 guard bytes"):
        guarded.check("out")


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16, np.dtype(np.int32)])
def test_copies_keep_their_strides_and_poison_their_gaps(dtype: np.dtype[Any]) -> None:
    wide = np.arange(6 * 4 * 10).reshape(6, 4, 10).astype(dtype)
    for view in (wide[::2, 1:3, :7], wide.transpose(2, 0, 1), np.broadcast_to(wide[:1, :, :5], (3, 4, 5)), wide):
        copy = strided_like(np, view)
        assert copy.strides == view.strides
        np.testing.assert_array_equal(copy.astype(np.float64), view.astype(np.float64))
        assert not np.shares_memory(copy, wide)
    gaps = strided_like(np, wide[::2, :, :7])
    extent = 1 + sum((n - 1) * stride for n, stride in zip(gaps.shape, gaps.strides, strict=True)) // dtype.itemsize
    memory = np.lib.stride_tricks.as_strided(gaps, (extent,), (dtype.itemsize,))
    poisoned = np.isnan(memory.astype(np.float64)) | (memory.astype(np.float64) == -1)
    assert np.count_nonzero(poisoned) == extent - gaps.size


E5M2 = np.dtype(ml_dtypes.float8_e5m2)


@pytest.mark.parametrize("machine", [Emulated("sm_100f", 2, Settings())])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16, E5M2])
def test_arrays_of_a_machine_keep_their_strides_and_poison_their_gaps(dtype: np.dtype[Any], machine: Emulated) -> None:
    wide = (np.arange(6 * 4 * 10) % 4).reshape(6, 4, 10).astype(dtype)
    for view in (wide[::2, 1:3, :7], wide.transpose(2, 0, 1), np.broadcast_to(wide[:1, :, :5], (3, 4, 5)), wide):
        copy = machine.array(view).host
        assert copy.strides == view.strides and copy.dtype == dtype
        np.testing.assert_array_equal(copy.astype(np.float64), view.astype(np.float64))
        assert not np.shares_memory(copy, wide)
    copy = machine.array(wide[::2, :, :7]).host
    span = span_bytes(copy)
    memory = np.frombuffer(memoryview((ctypes.c_ubyte * span).from_address(copy.ctypes.data)), np.uint8)
    poisoned = np.ones(span, bool)
    for first in np.ndindex(copy.shape):
        start = sum(i * stride for i, stride in zip(first, copy.strides, strict=True))
        poisoned[start : start + dtype.itemsize] = False
    assert poisoned.any() and (memory[poisoned] == 0xFF).all() and not (memory[~poisoned] == 0xFF).all()


def test_an_emulated_array_is_copied_once() -> None:
    machine, host = Emulated("sm_90a", 2, Settings()), np.ones((1 << 11, 1 << 10), np.float32)
    for array in (host, host[:, 1:]):
        tracemalloc.start()
        machine.array(array)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert array.nbytes < peak < 1.5 * host.nbytes


def test_exact_functions_are_compared_by_their_bits() -> None:
    """Any NaN is as good as any other, and nothing else is as good as something else."""
    wanted = np.array([1, 0, np.nan, 448], np.float32).astype(ml_dtypes.float8_e4m3fn)
    other_nan = wanted.copy()
    other_nan.view(np.uint8)[2] |= 0x80
    require([compare_bits("codes", other_nan, wanted)])
    for place, changed in ((0, 1.125), (1, -0.0), (2, 0.0), (3, 416.0)):
        got = wanted.copy()
        got[place] = changed
        with pytest.raises(Mismatch, match=rf"1 of 4 elements, the first at \[{place}\]"):
            require([compare_bits("codes", got, wanted)])
    with pytest.raises(Mismatch, match="expected float8_e4m3fn of shape"):
        require([compare_bits("codes", wanted.astype(np.float32), wanted)])


def test_what_an_update_leaves_alone_is_compared_too() -> None:
    """A writer's cache begins with bytes of its own, which slots that are not named keep."""
    subject = Subject("concat_and_cache_mla")
    case = next(case for case in subject.cases.CASES if case.name == "v32_t90_page16_outside")
    inputs = subject.cases.inputs(case, 0)
    before = inputs["cache"].copy()
    expected = subject.expected(inputs, "same")["cache"]
    assert np.array_equal(inputs["cache"], before) and not np.array_equal(expected, before)
    left_alone = np.argwhere((expected == before).all(axis=-1))[0]
    require(subject.reports(inputs, {"cache": expected}))
    expected[tuple(left_alone)][0] ^= 1
    with pytest.raises(Mismatch, match="cache: other bits"):
        require(subject.reports(inputs, {"cache": expected}))


def test_functions_of_a_family_have_the_kernels_that_they_launch() -> None:
    writers = operators.variants(registry.named("indexer_k_quant_and_cache"), ["sm_90"])
    assert [source.entry for source in writers] == ["quantize_fp8"]


# Operators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", registry.subjects(), ids=lambda entry: entry.name)
def test_every_operator_offers_what_the_kit_reads(entry: OperatorEntry) -> None:
    subject = Subject(entry.name)
    assert subject.outputs
    names = [case.name for case in subject.cases.CASES]
    assert len(set(names)) == len(names), "evidence counts cases by name"
    bench_names = [case.name for case in subject.cases.BENCH]
    assert bench_names
    assert len(set(bench_names)) == len(bench_names)
    for case in subject.cases.BENCH:
        assert subject.cases.flops(case) > 0
        assert subject.cases.bytes_moved(case) > 0
    grid = cheapest(subject)
    assert {case.intent for case in grid} <= {case.intent for case in subject.cases.CASES}
    # Few flops are not little to do: one query of a long context clears and compares as much as many.
    assert max(subject.cases.bytes_moved(case) for case in grid) < 32e6


@pytest.mark.parametrize("entry", registry.OPERATORS, ids=lambda entry: entry.name)
def test_public_call_meets_the_accuracy_criterion_on_a_small_grid(entry: OperatorEntry) -> None:
    """The CPU back end, through the public call and into given outputs, against float64."""
    subject = Subject(entry.name)
    for case in cheapest(subject, per_intent=1):
        host = subject.cases.inputs(case, 3)
        same, exact = subject.reference(host, "same"), subject.reference(host, "float64")
        outputs = {name: Guarded(np, like.shape, like.dtype) for name, like in zip(subject.outputs, same, strict=False)}
        subject.call(**host, **{name: guarded.array for name, guarded in outputs.items()})
        for (name, guarded), like, true in zip(outputs.items(), same, exact, strict=True):
            guarded.check(name)
            require([compare(name, guarded.array, like, true)])


@pytest.mark.parametrize("entry", registry.subjects(), ids=lambda entry: entry.name)
def test_repetition_takes_only_what_promises_equal_bits(entry: OperatorEntry) -> None:
    """With a `deterministic` option, the runs without it may differ; without one, none may.

    A kernel that only runs without it has none.
    """
    subject = Subject(entry.name)
    for kernel in entry.kernels:
        cases = gpu.repeatable(subject, kernel)
        assert bool(cases) == (kernel.name != "sparse_mla_bwd_packed")
        assert {case.name for case in cases} <= {case.name for case in subject.cases_of(kernel)}
        if entry.name == "sparse_mla_bwd":
            assert all(case.options["deterministic"] for case in cases)  # type: ignore[attr-defined]


def test_kernels_are_chosen_by_compute_capability() -> None:
    entry = OperatorEntry(
        "x",
        "",
        kernels=tuple(
            KernelEntry(name, arch)
            for name, arch in (
                ("plain", "sm_80"),
                ("plain", "sm_90"),
                ("hopper", "sm_90a"),
                ("b", "sm_100f"),
                ("beside", "sm_100f"),
            )
        ),
    )
    chosen = {c: operators.kernels_for(entry, c) for c in ((7, 5), (8, 6), (9, 0), (10, 0), (12, 0))}
    names = {capability: [kernel.name for kernel in kernels] for capability, kernels in chosen.items()}
    assert names == {(7, 5): [], (8, 6): ["plain"], (9, 0): ["hopper"], (10, 0): ["b", "beside"], (12, 0): []}
