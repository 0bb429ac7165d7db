"""What the host tells the kernels of nvfp4_gemv: parameter records, targets, and how rows are assigned to CTAs."""

from __future__ import annotations

import ctypes
import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_kit import require_mirrored
from variants_kit import compiled

from cupymla import InputError, UnsupportedError, arch, build, raw_module, tensor
from cupymla.device import Device
from cupymla.errors import shown
from cupymla.ops.nvfp4_gemv import conversions, cuda, formats, model, plan, spec, tiles
from cupymla.ops.nvfp4_gemv.validation import Operand
from cupymla_lab.emulate.translate import translate

RECORDS = [
    ("sm80/params.cuh", "Parameters", cuda.Parameters),
    ("sm80/conversion_params.cuh", "AmaxParameters", conversions.AmaxParameters),
    ("sm80/conversion_params.cuh", "QuantizeParameters", conversions.QuantizeParameters),
    ("sm80/conversion_params.cuh", "DequantizeParameters", conversions.DequantizeParameters),
    ("sm80/conversion_params.cuh", "SwizzleParameters", conversions.SwizzleParameters),
    ("sm100/params.cuh", "Parameters", tiles.Parameters),
]


@pytest.mark.parametrize(("file", "name", "record"), RECORDS, ids=[f"{file}-{name}" for file, name, _ in RECORDS])
def test_parameter_records_are_those_that_the_kernels_read(
    file: str, name: str, record: type[ctypes.Structure]
) -> None:
    require_mirrored(record, f"nvfp4_gemv/{file}", name)


def problem(m: int, n: int, k: int, batches: int, format: str = "nvfp4", b_dtype: str = "e2m1") -> spec.Problem:
    return spec.Problem(
        m=m, n=n, k=k, batches=batches, format=formats.named(format), b_dtype=b_dtype, scale_layout="linear",
        alpha="one", bias=False, out_dtype="float16", device=Device("cuda", 0),
    )  # fmt: skip


def tiled(m: int, n: int, k: int, batches: int, format: str = "nvfp4", b_dtype: str = "e2m1") -> spec.Problem:
    return replace(problem(m, n, k, batches, format, b_dtype), scale_layout="128x4")


def assigned(
    given: spec.Problem, multiprocessors: int = 132, vector_bytes: int = 41_472, factor_bytes: int = 32, groups: int = 4
) -> plan.Work:
    facts = {"phase_elements": 16_384, "chunk": 256, "pass_rows": 256, "groups": groups}
    facts |= {"vector_bytes": vector_bytes, "factor_bytes": factor_bytes}
    return plan.assign_work(given.m, given.n, given.k, given.batches, multiprocessors, facts)


@given(m=st.integers(1, 100_000), batches=st.integers(1, 5_000), multiprocessors=st.integers(1, 200))
def test_parts_are_never_empty_and_keep_every_multiprocessor_busy(m: int, batches: int, multiprocessors: int) -> None:
    work = assigned(problem(m, 1, 512, batches), multiprocessors)
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
    assert assigned(problem(m, 1, 4096, batches)).parts == parts


@given(
    n=st.integers(1, 16),
    k=st.integers(0, 1 << 20).map(lambda half: 2 * half),
    factor_bytes=st.sampled_from([0, 32]),
    sizes=st.sampled_from([(27_648, 2), (41_472, 4), (52_224, 4)]),
)
def test_what_is_kept_of_b_fits(n: int, k: int, factor_bytes: int, sizes: tuple[int, int]) -> None:
    vector_bytes, groups = sizes
    if n == 1:
        factor_bytes *= 2  # scales of NVFP4 are twice as many, and kept for one vector only
    work = assigned(problem(64, n, k, 1), vector_bytes=vector_bytes, factor_bytes=factor_bytes, groups=groups)
    assert n * (work.phase_chunks * (2 * 256 + factor_bytes) + 80 * groups) <= vector_bytes
    assert n * work.phase_chunks * 256 <= 16_384
    assert work.phase_chunks >= groups
    assert work.phase_chunks % groups == 0


def test_more_items_than_can_be_counted_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="batches"):
        assigned(problem(1, 1, 64, 1 << 31))


def test_alignment_is_that_of_every_row_and_batch_that_there_is() -> None:
    """A stray row would be read by an instruction that faults on it."""
    view = tensor.view(np.zeros((2, 8, 144), np.uint8), "a")

    def steps(shape: tuple[int, int, int], strides: tuple[int, int, int]) -> int:
        return cuda._steps(Operand(view, shape, strides, 0), 1)

    assert steps((8, 144, 2), (144, 1, 1152)) % 16 == 0
    assert steps((8, 144, 2), (145, 1, 1152)) % 16 != 0
    assert steps((8, 144, 2), (-144, 1, 1151)) % 16 != 0
    assert steps((1, 144, 1), (7, 1, 9)) == 0


@pytest.mark.parametrize(("name", "target"), [("sm_80", "sm_80"), ("sm_90a", "sm_90"), ("sm_100f", "sm_100f")])
def test_targets(name: str, target: str) -> None:
    assert plan.plan(problem(8, 1, 64, 1), arch.named(name)).arch == target


def test_an_architecture_without_a_kernel_is_named() -> None:
    turing = arch.Arch("sm_75", (7, 5), 64 * 1024)
    with pytest.raises(UnsupportedError, match="sm_75"):
        plan.plan(problem(8, 1, 64, 1), turing)


@pytest.mark.parametrize(("n", "most"), [(1, 1), (2, 8), (8, 8), (9, 16), (16, 16)])
def test_variants_serve_one_up_to_eight_and_up_to_sixteen_columns(n: int, most: int) -> None:
    chosen = plan.plan(problem(8, n, 64, 1), arch.named("sm_90"))
    assert dict(chosen.defines)["CUPYMLA_MOST_COLUMNS"] == most
    assert chosen in plan.sources("sm_90")


@pytest.mark.compile
def test_variants_for_whole_calls_are_launched_as_the_others(subtests: pytest.Subtests) -> None:
    """A binding takes the facts of the one that is likely to run. PTX states them as the cubin does."""
    whole = [source for source in compiled("cupymla.ops.nvfp4_gemv") if dict(source.defines).get("CUPYMLA_WHOLE")]
    assert {dict(source.defines)["CUPYMLA_WHOLE"] for source in whole} == {1, 2}
    for source in whole:
        other = replace(source, defines=tuple({**dict(source.defines), "CUPYMLA_WHOLE": 0}.items()))
        with subtests.test(str(source.defines)):
            facts = build.cubin(source).facts
            assert facts == translate(build.ptx(other), str(other)).facts
            assert (facts["chunk"], facts["pass_rows"]) == (plan.CHUNK, plan.PASS_ROWS)


def test_a_call_is_whole_where_k_has_no_tail_and_no_cta_a_second_pass() -> None:
    def is_whole(m: int, k: int, batches: int = 1) -> bool:
        return plan.is_whole(assigned(problem(m, 1, k, batches)), k)

    assert is_whole(7168, 16384) and is_whole(4096, 7168, 8) and is_whole(1, 256) and is_whole(132 * 256, 512)
    assert not is_whole(7168, 16384 - 2) and not is_whole(132 * 256 + 1, 512)
    assert not is_whole(64, 512, 133) and is_whole(64, 512, 132)
    for m, k, batches in ((7168, 16384, 1), (4096, 7168, 8), (132 * 256, 512, 1), (64, 512, 132), (8, 0, 1)):
        given = problem(m, 1, k, batches)
        assert plan.may_be_whole(given, arch.named("sm_90"), 132) and is_whole(m, k, batches)
        assert not plan.may_be_whole(given, arch.named("sm_80"), 132)
    for m, k, batches in ((7168, 16382, 1), (132 * 256 + 1, 512, 1), (64, 512, 133), (8, 2**31, 1)):
        assert not plan.may_be_whole(problem(m, 1, k, batches), arch.named("sm_90"), 132)
    assert is_whole(8, 2**31 - 256) and not is_whole(8, 2**31)


@given(m=st.integers(1, 40_000), batches=st.integers(1, 200), multiprocessors=st.integers(1, 200))
def test_whether_a_call_is_whole_is_known_before_its_kernel_is(m: int, batches: int, multiprocessors: int) -> None:
    """A call compiles the variant that it then runs, and no other."""
    one = problem(m, 1, 512, batches)
    expected = plan.is_whole(assigned(one, multiprocessors), 512)
    assert plan.may_be_whole(one, arch.named("sm_90"), multiprocessors) == expected


def test_only_some_targets_have_variants_for_whole_calls() -> None:
    given = problem(64, 1, 512, 1)
    for name in plan.TARGETS:
        target = arch.named(name)
        chosen = [dict(plan.plan(given, target, whole).defines)["CUPYMLA_WHOLE"] for whole in plan.WHOLE]
        assert chosen == ([0, 1, 2] if name in plan.WHOLE_TARGETS else [0, 0, 0])
        assert dict(plan.plan(given, target).defines)["CUPYMLA_WHOLE"] == 0
    with pytest.raises(InputError, match=r"whole.*sm_80"):
        plan.variant(arch.named("sm_80"), whole="rows")


def test_the_variant_for_whole_calls_assigns_no_others() -> None:
    source = plan.variant(arch.named("sm_90"), whole="words")
    facts = {"phase_elements": 16_384, "chunk": 256, "pass_rows": 256, "groups": 4}
    facts |= {"vector_bytes": 41_472, "factor_bytes": 32}
    assert plan.raw_work_assignment(source, facts, 132, m=300, n=1, k=512).ctas == 132
    with pytest.raises(InputError, match="whole"):
        plan.raw_work_assignment(source, facts, 132, m=300, n=1, k=514)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *[("format", value) for value in ("fp4", 4, None)],
        *[("b_dtype", value) for value in ("float32", 16, None)],
        *[("n", value) for value in (0, 17, "1", True, None, 10**5000)],
        *[("whole", value) for value in (1, True, "yes", None)],
    ],
    ids=shown,
)
def test_a_variant_that_does_not_exist_is_refused_by_name(word: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        raw_module("nvfp4_gemv", arch="sm_90", **{word: value})
    assert (caught.value.operator, caught.value.argument) == ("nvfp4_gemv", word)


@given(
    m=st.integers(1, 100_000),
    n=st.integers(1, 16),
    k=st.integers(1, 1 << 17).map(lambda half: 2 * half),
    batches=st.integers(1, 2_000),
    multiprocessors=st.integers(1, 200),
)
def test_every_cta_of_a_cluster_has_chunks_of_k(m: int, n: int, k: int, batches: int, multiprocessors: int) -> None:
    """The tcgen05 kernel has no way to add up nothing."""
    made = model.tiling(tiled(m, n, k, batches), multiprocessors)
    chunks = -(-k // model.CHUNK)
    bounds = [chunks * rank // made.splits for rank in range(made.splits + 1)]
    assert all(first < end for first, end in itertools.pairwise(bounds))
    assert made.tiles == -(-m // 128) and made.ctas == made.tiles * made.splits * batches
    assert made.us >= m * batches * model.row_bytes(tiled(m, n, k, batches)) / model.HBM_BYTES_PER_US


@pytest.mark.parametrize("name", plan.TENSOR_TARGETS)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_the_tensor_core_gets_what_it_is_predicted_to_be_faster_at(name: str, format: str) -> None:
    """Many columns; not one column, where memory is the limit of both, nor a few rows of 128."""
    target = arch.named(name)
    assert plan.plan_tiles(tiled(8192, 1, 28672, 1, format), target, 148) is None
    assert plan.plan_tiles(tiled(1024, 1, 4096, 1, format), target, 148) is None
    for n, columns in ((8, 8), (9, 16), (16, 16)):
        chosen = plan.plan_tiles(tiled(8192, n, 28672, 1, format), target, 148)
        assert chosen is not None
        source, made = chosen
        assert dict(source.defines)["CUPYMLA_COLUMNS"] == columns
        assert source in plan.sources(name)
        assert made.us < model.stream_us(tiled(8192, n, 28672, 1, format), 148)


def test_the_streaming_kernel_gets_everything_that_the_other_cannot_do() -> None:
    blackwell, many = arch.named("sm_100f"), (8192, 16, 28672, 1)
    assert plan.plan_tiles(tiled(*many), blackwell, 148) is not None
    assert plan.plan_tiles(tiled(*many), arch.named("sm_90"), 148) is None
    assert plan.plan_tiles(problem(*many), blackwell, 148) is None
    assert plan.plan_tiles(tiled(*many, b_dtype="bfloat16"), blackwell, 148) is None
    assert plan.plan_tiles(tiled(2**31, 16, 28672, 1), blackwell, 148) is None
    for m, k, batches in ((0, 64, 1), (64, 0, 1), (64, 64, 0)):
        assert plan.plan_tiles(tiled(m, 16, k, batches), blackwell, 148) is None


def aligned(shape: tuple[int, ...], offset: int = 0) -> Any:
    """Bytes whose first one is `offset` past a multiple of 16."""
    size = int(np.prod(shape))
    raw = np.zeros(size + 32, np.uint8)
    first = -raw.ctypes.data % 16 + offset
    return raw[first : first + size].reshape(shape)


def readable(**changed: Any) -> bool:
    """Whether TMA can read the arrays of a small batched call, some of which are exchanged; `[l, rows, bytes]`."""
    given = {
        "a": aligned((2, 130, 64)),
        "b": aligned((2, 3, 64)),
        "sfa": aligned((2, 256, 8)),
        "sfb": aligned((2, 128, 8)),
        "scale_layout": "128x4",
        "batch_axis": 0,
        **changed,
    }
    views, seen = spec.read(given.pop("a"), given.pop("b"), given.pop("sfa"), **given)
    return tiles.fits(views, seen)


def test_what_tma_can_read() -> None:
    """16-byte steps from 16-byte addresses; a step that no element is at the end of does not matter."""
    assert readable()
    assert readable(a=aligned((2, 130, 96))[:, :, :64])
    assert not readable(a=aligned((2, 130, 72))[:, :, :64])
    assert not readable(b=aligned((2, 3, 65))[:, :, :64])
    assert not readable(a=aligned((2, 130, 64))[:, ::-1])
    assert not readable(a=np.broadcast_to(aligned((1, 130, 64)), (2, 130, 64)))
    assert not readable(scale_layout="linear", sfa=aligned((2, 130, 8)), sfb=aligned((2, 3, 8)))
    for name, shape in (("a", (2, 130, 64)), ("b", (2, 3, 64)), ("sfa", (2, 256, 8)), ("sfb", (2, 128, 8))):
        assert not readable(**{name: aligned(shape, offset=8)}), name
    one = {"a": aligned((1, 1, 72))[:, :, :64], "b": aligned((1, 1, 65))[:, :, :64]}
    assert readable(**one, sfa=aligned((1, 128, 8)), sfb=aligned((1, 128, 8)))


def test_the_page_shows_what_the_model_predicts() -> None:
    """Each row of the table of predictions in docs/log/nvfp4_gemv.md, for the 148 multiprocessors of a B200."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "log" / "nvfp4_gemv.md").read_text()
    size = r"(?:(\d+) x (\d+) x (\d+)|the same in MXFP4), (\d+)"
    rows = re.findall(size + r" \| ([\d.]+) \| ([\d.]+), (\d) \| ([\d.]+) \| (\w+) \|", page)
    assert len(rows) == 11
    sizes: tuple[int, ...] = ()
    for m, k, batches, n, floor, tensor_us, splits, streaming_us, taken in rows:
        sizes = (int(m), int(k), int(batches)) if m else sizes
        problem = tiled(sizes[0], int(n), sizes[1], sizes[2], "nvfp4" if m else "mxfp4")
        made = model.tiling(problem, 148)
        bytes_ = problem.m * problem.batches * model.row_bytes(problem)
        assert f"{bytes_ / model.HBM_BYTES_PER_US:.1f}" == floor
        assert (f"{made.us:.1f}", str(made.splits)) == (tensor_us, splits)
        assert f"{model.stream_us(problem, 148):.1f}" == streaming_us
        assert taken == ("tcgen05" if model.tensor_core_is_faster(problem, 148) else "streaming")
