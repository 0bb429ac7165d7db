"""The MLA operators on problems that are drawn: kernels for Hopper on the host machine, and whatever there is on a GPU.

`--random-problems N` draws N for each operator, others in every run; without it they are few, and always the same.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_problems import OPERATORS, attends_to_several, problems

from cupymla.ops.mla_cases import MlaCase
from cupymla.testing import compare
from cupymla.testing.compare import Report
from cupymla_lab import ab, gpu
from cupymla_lab.emulate import MODES, Settings
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject

FEW = 6


def settings_of(subject: Subject) -> list[tuple[str, ...]]:
    """None, and what makes plans choose one kernel or another way through it, whatever a problem's sizes are."""
    choices = getattr(subject.cases, "CHOICES", {}).values()
    ways = [(*choice.chosen, setting) for choice in choices for _, setting in choice.further]
    return [(), *(choice.chosen for choice in choices), *ways]


def draw_problems(
    request: pytest.FixtureRequest, operator: str, most_flops: float, run: Callable[[MlaCase, st.DataObject], None]
) -> None:
    """Run an operator on problems as often as the command line says."""
    wanted = request.config.getoption("--random-problems")

    @settings(max_examples=wanted or FEW, derandomize=wanted is None, database=None, print_blob=wanted is not None)
    @given(case=problems(operator, most_flops), data=st.data())
    def examples(case: MlaCase, data: st.DataObject) -> None:
        if operator != "sparse_mla_fwd":
            assume(attends_to_several(case, Subject(operator).cases.inputs(case, 0)))
        run(case, data)

    examples()


@pytest.mark.compile
@pytest.mark.parametrize("operator", OPERATORS)
def test_emulated_kernels_meet_the_accuracy_criterion(operator: str, request: pytest.FixtureRequest) -> None:
    def run(case: MlaCase, data: st.DataObject) -> None:
        wanted = data.draw(st.sampled_from(settings_of(Subject(operator))), "settings")
        multiprocessors = data.draw(st.sampled_from((1, 2, 5, 20)), "multiprocessors")
        mode = data.draw(st.sampled_from(MODES), "mode")
        with (
            ab.constants(Subject(operator), wanted),
            emulated("sm_90a", multiprocessors, Settings(mode, races="hardware")) as machine,
        ):
            compare.require(machine.check(operator, case))

    draw_problems(request, operator, 1e7, run)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("operator", OPERATORS)
def test_kernels_on_a_gpu_meet_the_accuracy_criterion(operator: str, request: pytest.FixtureRequest) -> None:
    def run(case: MlaCase, data: st.DataObject) -> None:
        def launched() -> list[Report]:
            found = gpu.Run(Subject(operator), case)
            return found.reports(found.launch())

        wanted = data.draw(st.sampled_from(settings_of(Subject(operator))), "settings")
        # A thread keeps what it has bound before, with other constants.
        with ab.constants(Subject(operator), wanted), ThreadPoolExecutor(1) as fresh:
            compare.require(fresh.submit(launched).result())

    draw_problems(request, operator, 1e8, run)
