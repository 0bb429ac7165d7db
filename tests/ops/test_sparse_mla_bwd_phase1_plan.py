"""What the host tells the kernel of sparse_mla_bwd_phase1: the parameter record, the grid; and what it compiles to."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_kit import MLA, queries_of, require_mirrored
from sass_kit import machine_code, require_single_issuers

from cupymla import InputError, UnsupportedError, arch, build, tensor
from cupymla.ops.mla_cases import sized
from cupymla.ops.sparse_mla_bwd_phase1 import cases, cuda, plan, spec
from cupymla_lab.emulated import emulated
from cupymla_lab.problems import sparse_mla_bwd_phase1 as problems
from cupymla_lab.subjects import Subject

BLACKWELL = arch.named("sm_100f")


def test_parameter_record_is_the_one_that_the_kernel_reads() -> None:
    require_mirrored(cuda.Parameters, "sparse_mla_bwd_phase1/sm100/params.cuh")


def test_record_has_the_strides_of_every_array() -> None:
    """One array's strides in another's fields would go unseen with contiguous arrays."""
    case = sized(16, 576, 65, 4, 50, "_x", "options", batch=2, layout="strided", lengths="hostile")
    arguments = cases.inputs(case, 0)
    views, problem = spec.read(**arguments)
    p = np.zeros((2, 5, 17, 80), np.float32)[:, :4, :16, :65]
    delta = np.zeros((16, 4, 2), np.float32).T
    outputs = [tensor.view(array, "output") for array in (p, delta)]
    record = cuda.parameters(plan.plan(problem, BLACKWELL, 148), problem, views, outputs)

    def expect(prefix: str, array: np.ndarray, names: tuple[str, ...]) -> None:
        for name, stride in zip(names, array.strides, strict=False):
            in_bytes = name.endswith("bytes")
            assert getattr(record, f"{prefix}_{name}") == stride // (1 if in_bytes else array.itemsize), (prefix, name)

    for name in ("out", "dout"):
        expect(name, arguments[name], ("batch_bytes", "query_bytes", "head_bytes"))
    expect("indices", arguments["indices"], ("batch", "query"))
    expect("topk_length", arguments["topk_length"], ("batch", "query"))
    expect("p", p, ("batch", "query", "head"))
    expect("delta", delta, ("batch", "query", "head"))


@given(tokens=st.integers(0, 1000), heads=st.integers(1, 400), multiprocessors=st.integers(1, 200))
def test_every_block_of_heads_of_every_query_is_assigned_once(tokens: int, heads: int, multiprocessors: int) -> None:
    """As `Work` in work.cuh."""
    chosen = plan.plan(replace(MLA, s_q=tokens, h_q=heads), BLACKWELL, multiprocessors)
    places = [
        (token, pair // chosen.assignment.ctas)
        for pair in range(chosen.ctas // 2)
        for token in queries_of(chosen.assignment, pair % chosen.assignment.ctas)
    ]
    assert sorted(places) == [(t, b) for t in range(tokens) for b in range(-(-heads // 128))]


@given(s_q=st.integers(0, 1000), h_q=st.integers(1, 400), multiprocessors=st.integers(1, 200), batch=st.integers(1, 3))
def test_a_launch_on_its_own_has_the_same_grid(s_q: int, h_q: int, multiprocessors: int, batch: int) -> None:
    chosen = plan.plan(replace(MLA, s_q=s_q, h_q=h_q, batch=batch), BLACKWELL, multiprocessors)
    assigned = plan.raw_work_assignment(chosen.source, {}, multiprocessors, s_q=s_q, h_q=h_q, batch=batch)
    assert assigned.ctas == chosen.ctas
    found = chosen.assignment
    assert assigned.fields == {
        "groups": found.groups,
        "group_tokens": found.group_tokens,
        "head_block_clusters": found.ctas,
    }


def test_grids_that_cannot_be_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"two for each query and 128 heads"):
        plan.plan(replace(MLA, batch=4, s_q=2**28, h_q=1000), BLACKWELL, 148)


@pytest.mark.parametrize(("word", "value"), [("d_qk", 128), ("d_qk", 576.0), ("dtype", "float32"), ("dtype", None)])
def test_variants_that_there_are_not(word: str, value: object) -> None:
    with pytest.raises(InputError, match=word):
        plan.variant(BLACKWELL, **{word: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["sm_90a", "sm_80"])
def test_targets_without_a_kernel(name: str) -> None:
    with pytest.raises(UnsupportedError, match="Blackwell"):
        plan.plan(MLA, arch.named(name), 132)


def test_calls_on_other_gpus_are_refused() -> None:
    """Said as UnsupportedError, with what would work, before anything is compiled."""
    with emulated("sm_90a", 4) as machine, pytest.raises(UnsupportedError, match=r"phase1.*sm_90a.*Blackwell.*CPU"):
        machine.run(Subject("sparse_mla_bwd_phase1"), cases.inputs(problems.CASES[0], 0))


@pytest.mark.compile
@pytest.mark.parametrize("source", plan.sources(), ids=str)
def test_machine_code_has_the_intended_instructions(source: build.KernelSource, tmp_path: Path) -> None:
    """Products for both CTAs, gathers of four rows, loads from Tensor Memory; each as often as the tiles ask."""
    pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")
    made = build.cubin(source, fail_on_spill=True)
    text = machine_code(made, tmp_path)
    require_single_issuers(text)
    found = Counter(re.findall(r"\b(UTCHMMA\S*|UTMALDG\S*|LDTM\S*|UTCBAR\S*)", text))
    tiles = dict(source.defines)["CUPYMLA_D_QK"]
    assert isinstance(tiles, int)
    tiles //= 64
    assert found["UTCHMMA.2CTA"] == 4 * tiles
    assert found["UTMALDG.2D.GATHER4.2CTA"] == sum(-(-half // 2) for half in (-(-tiles // 2), tiles // 2))
    assert found["UTMALDG.4D.2CTA"] == tiles
    assert found["LDTM.16dp256bit.x8"] == 2
    assert found["UTCBAR.2CTA.MULTICAST"] == 3
    assert not [name for name in found if name.startswith("UTCHMMA") and name != "UTCHMMA.2CTA"]
    assert made.facts["tmem_columns"] == 128
