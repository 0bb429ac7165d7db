"""The backward's paths: which there are, which one a plan takes, and that none whose time is recorded is faster."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from backward_plan_kit import HOPPER, PROBLEM
from hypothesis import example, given
from hypothesis import strategies as st
from plan_kit import MLA

from cupymla import arch, driver
from cupymla.bench import machine
from cupymla.build import KernelSource
from cupymla.ops.mla_cases import MlaCase
from cupymla.ops.sparse_mla_bwd import cases, paths, plan, spec
from cupymla.ops.sparse_mla_bwd.paths.path import Path as PlanPath
from cupymla_lab import backward_paths
from cupymla_lab.backward_paths import Loss, PathRow, losses, problem_of
from cupymla_lab.subjects import Subject

MARGIN = 0.02
"""Medians of one path are up to 1% apart from run to run (two benchmark runs of 2026-11-27 on an H200, in
docs/log/sparse_mla_bwd.md, 0.2 and 0.7%), so those of two paths that are equally fast up to 2%."""

RECORDED = sorted((machine.ROOT / "docs" / "benchmarks").glob(f"*/{backward_paths.FILE}.json"))
BLACKWELL = arch.named("sm_100f")
BENCH = [case for case in cases.BENCH if not case.wants_lists]

TOPKS = st.one_of(st.integers(1, 4096), st.sampled_from([1 << 15, 2 << 20]))
HEADS = st.sampled_from([1, 16, 17, 32, 33, 64, 65, 128, 129, 300])
TOKENS = st.one_of(st.integers(0, 1 << 18), st.sampled_from([8192, 16384, 32768, 131072]))


@st.composite
def problems(draw: st.DrawFn) -> spec.Problem:
    """Sizes around what the rules ask for."""
    options = spec.Options(deterministic=draw(st.booleans()), attn_dist_sink=draw(st.booleans()))
    shared = replace(
        MLA,
        s_q=draw(st.one_of(st.integers(0, 300), st.integers(0, 20_000))),
        s_kv=draw(TOKENS),
        h_q=draw(HEADS),
        topk=draw(TOPKS),
        d_qk=draw(st.sampled_from([512, 576])),
        batch=draw(st.sampled_from([None, 1, 3, 16])),
        has_sink=options.attn_dist_sink or draw(st.booleans()),
        options=options,
    )
    dtype = draw(st.sampled_from(["bfloat16", "float32"]))
    return replace(PROBLEM, shared=shared, has_attn_dist=draw(st.booleans()), dkv_dtype=dtype)


@given(problem=problems(), target=st.sampled_from([HOPPER, BLACKWELL]), multiprocessors=st.integers(1, 200))
@example(PROBLEM, HOPPER, 132)
def test_the_path_of_a_problem_may_pay_and_bounds_its_workspace(
    problem: spec.Problem, target: arch.Arch, multiprocessors: int
) -> None:
    """A path that were chosen where it says that it never pays would be missing in the limit over all."""
    chosen = plan.plan(problem, target, multiprocessors)
    assert chosen.path in paths.ways(problem, target)
    assert chosen.path.pays_somewhere(problem)
    assert chosen.workspace.bytes <= chosen.path.workspace_limit(problem) <= plan.workspace_limit(problem)


@functools.cache
def compiled_ahead() -> frozenset[KernelSource]:
    """All that is, which takes a tenth of a second to list."""
    return frozenset(plan.sources("sm_90a"))


@given(problem=problems(), multiprocessors=st.integers(1, 200))
def test_every_path_that_can_be_forced_bounds_its_workspace(problem: spec.Problem, multiprocessors: int) -> None:
    """Their names tell them apart, and the kernels that they launch are compiled ahead of use."""
    found = list(paths.ways(problem, HOPPER))
    assert len({path.name for path in found}) == len(found)
    for path in found:
        made = plan.planned(problem, HOPPER, multiprocessors, path)
        assert made.workspace.bytes <= path.workspace_limit(problem)
        stages = {launch.stage for launch in made.launches()}
        assert stages <= set(path.stages) and {made.source(stage) for stage in stages} <= compiled_ahead()


def of(*heads: int, **traits: Any) -> list[list[str]]:
    """Names of all paths of a problem of so many heads each, on Hopper."""
    options = spec.Options(deterministic=traits.pop("deterministic", False))
    base = replace(PROBLEM, dkv_dtype=traits.pop("dkv_dtype", "bfloat16"))
    shared = replace(MLA, s_kv=8192, topk=traits.pop("topk", 2048), options=options)
    return [[p.name for p in paths.ways(replace(base, shared=replace(shared, h_q=h)), HOPPER)] for h in heads]


def test_paths_of_few_and_of_many_heads() -> None:
    by_two, by_four = "packed queries, 2", "packed queries, 4"
    in_order, single = "single query, token order", "single query"
    cluster = ["2-CTA cluster, token order", "2-CTA cluster"]
    two_phase = ["two-phase", "two-phase, split-N", "two-phase, token order", "two-phase, split-N, token order"]
    few = [[by_four, by_two, in_order, single], [by_two, in_order, single], [in_order, single]]
    assert of(16, 32, 64) == few
    assert of(65, 128, 129) == [[*two_phase, *cluster], [*two_phase, *cluster], cluster]
    assert of(16, 128, topk=8193) == [[single], ["two-phase", "two-phase, split-N", "2-CTA cluster"]]


def test_paths_of_deterministic_calls() -> None:
    """Rows of a float32 dkv are stored as they are; those of one head block may have 16 bits a column."""
    packed, whole = "packed rows", "float32 rows"
    single = [f"single query, {rows}" for rows in (packed, whole)]
    cluster = [f"2-CTA cluster, {rows}" for rows in (packed, whole)]
    assert of(17, 64, 128, deterministic=True) == [
        [f"packed queries, 2, {packed}", *single],
        single,
        [f"two-phase, {packed}", *cluster],
    ]
    assert of(129, deterministic=True) == [cluster[1:]]
    assert of(16, 128, deterministic=True, dkv_dtype="float32") == [single[1:], cluster[1:]]


def test_blackwell_has_one_path() -> None:
    for options, rows in ((spec.Options(), ""), (spec.Options(deterministic=True), ", float32 rows")):
        problem = replace(PROBLEM, shared=replace(PROBLEM.shared, options=options))
        assert [path.name for path in paths.ways(problem, BLACKWELL)] == [f"2-CTA cluster of Blackwell{rows}"]


# What was measured ----------------------------------------------------------------------------------------------------


def test_a_rule_that_picks_a_slower_path_is_a_loss() -> None:
    rows = [PathRow("a", "one", 100.0, 0.0), PathRow("a", "two", 98.0, 0.0), PathRow("b", "one", 50.0, 0.0)]
    assert losses(rows, {"a": (1, "one"), "b": (2, "one")}, 0.03) == []
    assert losses(rows, {"a": (1, "two"), "b": (2, "one")}, 0.0) == []
    assert losses(rows, {"a": (1, "one"), "b": (2, "one")}, 0.02) == [Loss("a", "one", "two", 1.02)]
    with pytest.raises(KeyError):
        losses(rows, {"a": (1, "three"), "b": (2, "one")}, 0.02)


def test_a_path_of_cases_that_differ_in_data_counts_by_its_worst() -> None:
    """For random rows the second takes 1.3 of the first, for neighbours that agree the first 1.08 of the second."""
    times = {"random": (100.0, 130.0), "overlap": (108.0, 100.0)}
    rows = [PathRow(case, path, us, 0.0) for case, (a, b) in times.items() for path, us in (("one", a), ("two", b))]
    assert losses(rows, dict.fromkeys(times, (1, "one")), 0.03) == []
    assert losses(rows, dict.fromkeys(times, (1, "two")), 0.03) == [Loss("random", "two", "one", 1.204)]


def recorded(file: Path) -> tuple[list[PathRow], arch.Arch, int]:
    content = json.loads(file.read_text(encoding="utf-8"))
    return [PathRow(**row) for row in content["rows"]], arch.named(content["arch"]), content["multiprocessors"]


def test_no_recorded_path_is_faster_than_the_chosen_one() -> None:
    """Renew the files on a GPU with `python -m cupymla_lab backward-paths --out docs/benchmarks`."""
    if not RECORDED:
        pytest.skip("times of paths were never recorded: `python -m cupymla_lab backward-paths` does that on a GPU")
    for file in RECORDED:
        rows, target, multiprocessors = recorded(file)
        every = {case.name: problem_of(case) for case in BENCH}
        ways = {name: {path.name for path in paths.ways(problem, target)} for name, problem in every.items()}
        timed = {name: {row.path for row in rows if row.case == name} for name in {row.case for row in rows}}
        assert timed == ways, f"{file.parent.name}: other cases or paths than there are; renew the file"
        chosen = {
            name: (problem, paths.choose(problem, target, multiprocessors).name) for name, problem in every.items()
        }
        assert losses(rows, chosen, MARGIN) == [], file.parent.name


# The command ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", BENCH, ids=lambda case: case.name)
def test_calls_take_the_path_that_is_timed(case: MlaCase) -> None:
    problem = problem_of(case)
    first, *others = backward_paths.in_turn(problem, HOPPER, 132)
    assert first == plan.plan(problem, HOPPER, 132).path and first not in others
    for path in others:
        with backward_paths.taking(path).applied():
            assert plan.plan(problem, HOPPER, 132).path == path


def test_the_problem_of_a_case_is_the_one_that_its_arrays_make() -> None:
    every: list[dict[str, Any]] = [
        {},
        {"batch": 2, "sink": "finite", "wants_dist": True, "options": {"deterministic": True}},
    ]
    for traits in every:
        case = replace(BENCH[0], s_q=3, s_kv=70, topk=65, h_q=5, **traits)
        _, problem = spec.read(**cases.inputs(replace(case, intent="options", selection="full"), 0))
        assert problem_of(case) == problem


@pytest.mark.parametrize("wrong", [[], ["a path: other gradients"]], ids=["right", "wrong"])
def test_rows_are_written_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    facts = {"available": True, "device_name": "NVIDIA H200", "compute_capability": (9, 0), "multiprocessor_count": 132}
    for name, told in facts.items():
        monkeypatch.setattr(driver, name, lambda *_, told=told: told)
    monkeypatch.setattr(machine, "driver_text", lambda: "580.1")
    monkeypatch.setattr(backward_paths, "Timer", lambda: None)
    monkeypatch.setattr(backward_paths, "precompile", lambda sources: [])
    file = tmp_path / "h200" / "sparse_mla_bwd.paths.json"
    seen: list[int] = []

    def measure(_: Subject, case: MlaCase, every: Iterable[PlanPath], timer: object) -> tuple[list[PathRow], list[str]]:
        seen.append(len(json.loads(file.read_text())["rows"]) if file.exists() else 0)
        return [PathRow(case.name, path.name, 1.5, 0.0) for path in every], wrong

    monkeypatch.setattr(backward_paths, "measure", measure)
    names = [BENCH[0].name, "h64_d576_k2048_q4096_kv8192"]
    given = [word for name in names for word in ("--case", name)]
    assert backward_paths.main([*given, "--out", str(tmp_path), "--commit", "abc"]) == (1 if wrong else 0)
    assert seen == [0, 6]
    content = json.loads(file.read_text())
    assert content["gpu"] == "NVIDIA H200"
    rows, target, multiprocessors = recorded(file)
    assert (target, multiprocessors) == (HOPPER, 132)
    assert [row.case for row in rows] == [names[0]] * 6 + [names[1]] * 2
    assert list(asdict(rows[0])) == ["case", "path", "us", "difference"]
    out = capsys.readouterr().out
    assert "h64_d576_k2048_q4096_kv8192  single query  1.5 us" in out and all(line in out for line in wrong)


def test_without_a_gpu_nothing_is_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(driver, "available", lambda: False)
    assert backward_paths.main([]) == 2
    assert "there is none" in capsys.readouterr().err
