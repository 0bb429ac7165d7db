"""The MLA operators on problems that are drawn: the kernels for Hopper interpreted, and whatever there is on a GPU.

`--random-problems N` draws N for each operator, others in every run; without it they are few, and always the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_problems import OPERATORS, attends_to_several, problems

from cupymla.ops.attn_dist import plan as attn_dist_plan
from cupymla.ops.mla_cases import MlaCase
from cupymla.ops.sparse_mla_bwd import plan as sparse_mla_bwd_plan
from cupymla.testing import compare, gpu
from cupymla.testing.compare import Report
from cupymla.testing.interpreted import interpreted
from cupymla.testing.operators import Subject

FEW = 6

# Makes plans choose the one kernel, the other one, or another way through it, whatever a problem's sizes are.
CHOICES: dict[str, tuple[dict[str, float], ...]] = {
    "sparse_mla_fwd": ({},),
    "attn_dist": ({}, {"_MARGIN": 0.0}, {"_MARGIN": 1e9}),
    "sparse_mla_bwd": ({}, {"_MARGIN": 0.0}, {"_MARGIN": 1e9}, {"_MARGIN": 0.0, "_ORDER_GAIN": -1.0}),
}
PLANS = {"attn_dist": attn_dist_plan, "sparse_mla_bwd": sparse_mla_bwd_plan}


@contextlib.contextmanager
def choosing(operator: str, constants: dict[str, float]) -> Iterator[None]:
    """A block in which an operator's plan has other constants."""
    with contextlib.ExitStack() as block:
        for name, value in constants.items():
            block.enter_context(mock.patch.object(PLANS[operator], name, value))
        yield


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
def test_interpreted_kernels_keep_the_law(operator: str, request: pytest.FixtureRequest) -> None:
    def run(case: MlaCase, data: st.DataObject) -> None:
        constants = data.draw(st.sampled_from(CHOICES[operator]), "constants of the plan")
        multiprocessors = data.draw(st.sampled_from((1, 2, 5, 20)), "multiprocessors")
        with choosing(operator, constants), interpreted("sm_90a", multiprocessors=multiprocessors) as machine:
            compare.require(machine.check(operator, case))

    draw_problems(request, operator, 1e7, run)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("operator", OPERATORS)
def test_kernels_on_a_gpu_keep_the_law(operator: str, request: pytest.FixtureRequest) -> None:
    def run(case: MlaCase, data: st.DataObject) -> None:
        def launched() -> list[Report]:
            found = gpu.Run(Subject(operator), case)
            return found.reports(found.launch())

        constants = data.draw(st.sampled_from(CHOICES[operator]), "constants of the plan")
        # A thread keeps what it has bound before, with other constants.
        with choosing(operator, constants), ThreadPoolExecutor(1) as fresh:
            compare.require(fresh.submit(launched).result())

    draw_problems(request, operator, 1e8, run)
