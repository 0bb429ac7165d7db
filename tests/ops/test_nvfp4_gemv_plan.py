"""What the host tells the kernels of nvfp4_gemv: parameter records, targets, and how rows are dealt to CTAs."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_kit import require_twin

from cupymla import InputError, UnsupportedError, arch, raw_module, tensor
from cupymla.device import Device
from cupymla.errors import shown
from cupymla.ops.nvfp4_gemv import companions, cuda, formats, plan, spec
from cupymla.ops.nvfp4_gemv.door import Operand

RECORDS = [
    ("params.cuh", "Parameters", cuda.Parameters),
    ("companion_params.cuh", "AmaxParameters", companions.AmaxParameters),
    ("companion_params.cuh", "QuantizeParameters", companions.QuantizeParameters),
    ("companion_params.cuh", "DequantizeParameters", companions.DequantizeParameters),
    ("companion_params.cuh", "SwizzleParameters", companions.SwizzleParameters),
]


@pytest.mark.parametrize(("file", "name", "record"), RECORDS, ids=[name for _, name, _ in RECORDS])
def test_parameter_records_are_those_that_the_kernels_read(
    file: str, name: str, record: type[ctypes.Structure]
) -> None:
    require_twin(record, f"nvfp4_gemv/sm80/{file}", name)


def problem(m: int, n: int, k: int, batches: int, format: str = "nvfp4", b_dtype: str = "e2m1") -> spec.Problem:
    return spec.Problem(
        m=m, n=n, k=k, batches=batches, format=formats.named(format), b_dtype=b_dtype, scale_layout="linear",
        alpha="one", bias=False, out_dtype="float16", device=Device("cuda", 0),
    )  # fmt: skip


def dealt(given: spec.Problem, multiprocessors: int = 132, vector_bytes: int = 76_672) -> plan.Work:
    return plan.deal(given, multiprocessors, vector_bytes, chunk=256, pass_rows=256)


@given(m=st.integers(1, 100_000), batches=st.integers(1, 5_000), multiprocessors=st.integers(1, 200))
def test_parts_are_never_empty_and_keep_every_multiprocessor_busy(m: int, batches: int, multiprocessors: int) -> None:
    work = dealt(problem(m, 1, 512, batches), multiprocessors)
    assert 1 <= work.parts <= m
    assert work.items == work.parts * batches
    assert work.ctas == min(work.items, multiprocessors)
    if m >= 256 and m * batches >= 256 * multiprocessors:
        busiest = -(-work.items // work.ctas) * -(-m // work.parts)
        assert busiest <= 1.5 * m * batches / multiprocessors


@pytest.mark.parametrize(
    ("m", "batches", "parts"), [(7168, 1, 132), (8192, 1, 132), (4096, 1, 132), (7168, 4, 33), (4096, 8, 16)]
)
def test_large_problems_fill_the_gpu_once(m: int, batches: int, parts: int) -> None:
    assert dealt(problem(m, 1, 4096, batches)).parts == parts


@given(
    n=st.integers(1, 16),
    k=st.integers(0, 1 << 20).map(lambda half: 2 * half),
    format=st.sampled_from(["nvfp4", "mxfp4"]),
    b_dtype=st.sampled_from(["e2m1", "bfloat16", "float16"]),
    vector_bytes=st.sampled_from([19_328, 68_480, 76_672]),
)
def test_what_is_kept_of_b_fits(n: int, k: int, format: str, b_dtype: str, vector_bytes: int) -> None:
    work = dealt(problem(64, n, k, 1, format, b_dtype), vector_bytes=vector_bytes)
    beside = b_dtype != "float16" if n == 1 else (format, b_dtype) == ("mxfp4", "e2m1")
    scales = 4 * 256 // formats.named(format).block if beside else 0
    assert n * (work.phase_chunks * (2 * 256 + scales) + 64) <= vector_bytes
    assert work.phase_chunks >= 1


def test_more_items_than_can_be_counted_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="batches"):
        dealt(problem(1, 1, 64, 1 << 31))


def test_alignment_is_that_of_every_row_and_batch_that_there_is() -> None:
    """A stray row would be read by an instruction that faults on it."""
    view = tensor.view(np.zeros((2, 8, 144), np.uint8), "a")

    def steps(shape: tuple[int, int, int], strides: tuple[int, int, int]) -> int:
        return cuda._steps(Operand(view, shape, strides, 0), 1)

    assert steps((8, 144, 2), (144, 1, 1152)) % 16 == 0
    assert steps((8, 144, 2), (145, 1, 1152)) % 16 != 0
    assert steps((8, 144, 2), (-144, 1, 1151)) % 16 != 0
    assert steps((1, 144, 1), (7, 1, 9)) == 0


@pytest.mark.parametrize(("name", "target"), [("sm_80", "sm_80"), ("sm_90a", "sm_90"), ("sm_100a", "sm_100a")])
def test_targets(name: str, target: str) -> None:
    assert plan.plan(problem(8, 1, 64, 1), arch.named(name)).arch == target


def test_an_architecture_without_a_kernel_is_named() -> None:
    turing = arch.Arch("sm_75", (7, 5), 64 * 1024, exact=False)
    with pytest.raises(UnsupportedError, match="sm_75"):
        plan.plan(problem(8, 1, 64, 1), turing)


@pytest.mark.parametrize(("n", "most"), [(1, 1), (2, 8), (8, 8), (9, 16), (16, 16)])
def test_variants_serve_one_up_to_eight_and_up_to_sixteen_columns(n: int, most: int) -> None:
    chosen = plan.plan(problem(8, n, 64, 1), arch.named("sm_90"))
    assert dict(chosen.defines)["CUPYMLA_MOST_COLUMNS"] == most
    assert chosen in plan.sources("sm_90")


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *[("format", value) for value in ("fp4", 4, None)],
        *[("b_dtype", value) for value in ("float32", 16, None)],
        *[("n", value) for value in (0, 17, "1", True, None, 10**5000)],
    ],
    ids=shown,
)
def test_a_variant_that_does_not_exist_is_refused_by_name(word: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        raw_module("nvfp4_gemv", arch="sm_90", **{word: value})
    assert (caught.value.operator, caught.value.argument) == ("nvfp4_gemv", word)
