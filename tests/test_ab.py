"""Variants in turn: whose kernels run, which constants hold, and what the table says of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupymla import build
from cupymla.build import source as sources
from cupymla.errors import InputError
from cupymla.ops.sparse_mla_fwd import plan
from cupymla_lab import ab
from cupymla_lab.__main__ import main
from cupymla_lab.subjects import Subject
from cupymla_lab.without_gpu import machine_for


class Clock:
    """Gives times by the order of calls."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)

    def us(self, call: Any) -> float:
        call()
        return self.times.pop(0)


class Doubling:
    """A subject whose call gives the constant of a module, as often as it is called."""

    name = "doubling"
    written = ("beside",)
    written_in = Subject.written_in

    def __init__(self) -> None:
        self.runs = 0
        self.call = self

    def prepare(self, value: int, beside: np.ndarray | None = None) -> Any:
        """With an array to write `beside`, that gets the constant in the place of what is returned."""
        made = np.full(3, value * (plan._MERGE_STEPS if beside is None else 1))
        constant = plan._MERGE_STEPS

        def run() -> Any:
            self.runs += 1
            if beside is not None:
                beside.fill(constant)
            return made

        return run


def test_variants_take_turns_and_are_compared_with_the_first() -> None:
    subject = Doubling()
    case = Subject("sparse_mla_fwd").cases.BENCH[0]
    kept = plan._MERGE_STEPS
    variants = [ab.here(), ab.constant(Subject("sparse_mla_fwd"), f"plan._MERGE_STEPS={kept + 1}")]
    clock = Clock(10.0, 20.0, 12.0, 18.0, 11.0, 22.0)
    first, second = ab.take_turns(subject, case, {"value": 1}, variants, clock, rounds=3)  # type: ignore[arg-type]
    assert (first.us, first.ratio, first.variation, first.same_bits) == (11.0, 1.0, round(2 / 11, 4), True)
    assert (second.us, second.variation, second.same_bits) == (20.0, 0.2, False)
    assert second.ratio == round(20 / 11, 4)
    assert second.variant == f"plan._MERGE_STEPS={kept + 1}"
    assert (subject.runs, plan._MERGE_STEPS) == (8, kept)


@pytest.mark.parametrize(("step", "same"), [(0, True), (1, False)])
def test_what_is_written_beside_the_results_is_compared_too(step: int, same: bool) -> None:
    """All variants write into the same array."""
    subject = Doubling()
    setting = f"plan._MERGE_STEPS={plan._MERGE_STEPS + step}"
    variants = [ab.here(), ab.constant(Subject("sparse_mla_fwd"), setting)]
    inputs = {"value": 1, "beside": np.zeros(2)}
    case = Subject("sparse_mla_fwd").cases.BENCH[0]
    _, second = ab.take_turns(subject, case, inputs, variants, Clock(1.0, 1.0), rounds=1)  # type: ignore[arg-type]
    assert second.same_bits == same


@pytest.mark.parametrize(
    "setting",
    [
        *("", "plan", "LIMIT=3", "plan._MERGE_STEPS", "plan.missing=3", "nowhere.LIMIT=3"),
        *("plan._MERGE_STEPS=x y", "plan._MERGE_STEPS='8'", "plan._MERGE_STEPS=None", "plan.__name__='x'"),
    ],
)
def test_what_is_no_setting_is_refused(setting: str) -> None:
    with pytest.raises(InputError, match="--set"):
        ab.constant(Subject("sparse_mla_fwd"), setting)


def test_a_folder_without_kernels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--baseline"):
        ab.kernels_of(tmp_path)


def test_equal_bits_are_told_from_equal_values() -> None:
    zeros = np.zeros(3, np.float32)
    assert ab.same_bits([zeros, None], [zeros.copy(), None])
    assert not ab.same_bits([zeros], [-zeros])


@pytest.mark.compile
def test_kernels_of_another_folder_run(tmp_path: Path) -> None:
    """Twice the sum in a copy of the sources, and nowhere else."""
    other = tmp_path / "cuda"
    shutil.copytree(sources.cuda_root(), other, ignore=shutil.ignore_patterns("third_party"))
    file = other / "nvfp4_gemv" / "sm80" / "epilogue.cuh"
    text = file.read_text()
    assert "float sum = 0.0f;" in text
    file.write_text(
        text.replace("const float alpha = ", "const float alpha = 2.0f * (").replace("[alpha_at];", "[alpha_at]);")
    )

    subject = Subject("nvfp4_gemv")
    case = min((case for case in subject.cases.CASES if subject.cases.flops(case) > 0), key=subject.cases.flops)
    with machine_for(subject.name, "sm_90", 0) as machine:
        real = build.kernel
        given = machine.arguments(subject.cases.inputs(case, 0), subject.written)
        ours, theirs = (ab.prepared(subject, given, variant)().get() for variant in (ab.here(), ab.kernels_of(other)))
        assert build.kernel == real
    assert np.any(ours != 0)
    np.testing.assert_array_equal(2 * ours.astype(np.float64), theirs.astype(np.float64))


@pytest.mark.parametrize("option", [("--baseline", "no-kernels-here"), ("--set", "plan.no_such_constant=3")])
def test_a_variant_that_is_none_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: tuple[str, str]
) -> None:
    monkeypatch.setattr(ab, "with_kernels", lambda names: [Subject(name) for name in names])
    monkeypatch.setattr(ab, "Timer", lambda: pytest.fail("measured"))
    assert main(["ab", "sparse_mla_fwd", *option]) == 2
    assert option[0] in capsys.readouterr().err
