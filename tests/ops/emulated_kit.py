"""What tests of sm_100f kernels on the host emulator share: which cases run in which mode, and how.

Cases are the operators', with fewer queries: the emulator takes a second or so for each. The cheapest of each intent
run always, each in one mode, so that all modes have their turn; `--interpret-all` runs every small case in every mode.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupymla.launch import Geometry
from cupymla.ops.mla_cases import MlaCase
from cupymla.testing import compare, operators
from cupymla.testing.operators import Array
from cupymla_lab.emulate import MODES, Settings
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject, cheapest
from cupymla_lab.without_gpu import MOST_FLOPS

QUERIES, MOST_QUERIES, CAUSAL_QUERIES = 2, 6, 25
PATIENCE_SECONDS = 20.0  # a shared machine may not come to run a process for seconds
PAUSE_SECONDS = 1e-5  # between changes: some 70 us with what a system adds, of which a launch takes thousands


def shortened(case: MlaCase, queries: int) -> MlaCase:
    """The case with fewer queries; which tokens they may see is the same. With a causal limit there are enough for some
    to see several tokens: with one, gradients are 0 but for rounding errors."""
    fewer = max(1, (max(queries, CAUSAL_QUERIES) if case.softmax.causal else queries) // (case.batch or 1))
    return case if case.s_q <= fewer else replace(case, s_q=fewer)


def case_parameters(subject: Subject) -> Iterator[object]:
    """(case, mode) for `pytest.mark.parametrize`."""
    always = {case.name: MODES[k % len(MODES)] for k, case in enumerate(cheapest(subject, 1))}
    for case in subject.cases.CASES:
        for mode in MODES:
            runs = always.get(case.name) == mode
            few = shortened(case, QUERIES if runs else MOST_QUERIES)
            if runs or subject.cases.flops(few) <= MOST_FLOPS:
                marks = [] if runs else [pytest.mark.interpret_all]
                yield pytest.param(few, mode, id=f"{case.name}-{mode}", marks=marks)


def settings(mode: Any, seed: int = 1) -> Settings:
    """Settings of a mode, patient enough for a machine that others use."""
    return Settings(mode, seed, patience_seconds=PATIENCE_SECONDS, races="hardware")


def check(subject: Subject, case: MlaCase, mode: Any, seed: int = 1, multiprocessors: int = 2) -> list[Geometry]:
    """Run a case and require the accuracy criterion; the launches that it took."""
    with emulated("sm_100f", multiprocessors, settings(mode, seed)) as machine:
        compare.require(machine.check(subject.name, case))
        return list(machine.launches)


def check_inputs(
    subject: Subject, inputs: dict[str, Any], mode: Any, seed: int = 1, multiprocessors: int = 2
) -> dict[str, Array]:
    """The same for inputs of the test's own; the results by name, those written beside what is returned among them."""
    with emulated("sm_100f", multiprocessors, settings(mode, seed)) as machine:
        results = machine.results(subject, inputs)
    compare.require(subject.reports(inputs, results))
    return results


@contextlib.contextmanager
def changing(arrays: Mapping[str, tuple[Array, Sequence[Any]]]) -> Iterator[None]:
    """A block in which each of the arrays goes round and round between its values."""
    if all(len(values) == 1 for _, values in arrays.values()):
        yield  # as they are
        return
    done = threading.Event()

    def change() -> None:
        rounds = [(memory, value) for memory, values in arrays.values() for value in values]
        for memory, value in itertools.cycle(rounds):
            np.copyto(memory, value)
            if done.wait(PAUSE_SECONDS):
                return

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def results_while_changing(
    subject: Subject,
    inputs: dict[str, Any],
    values: Mapping[str, Sequence[Any]],
    mode: Any = "random",
    seed: int = 1,
    multiprocessors: int = 2,
    arch: str = "sm_100f",
) -> tuple[Array, ...]:
    """What the kernel gives while those inputs go round and round between those values."""
    first = {name: np.broadcast_to(each[0], inputs[name].shape).astype(np.int32) for name, each in values.items()}
    with emulated(arch, multiprocessors, settings(mode, seed)) as machine:
        given = machine.arguments(inputs | first, subject.written)
        with changing({name: (given[name].host, each) for name, each in values.items()}):
            results = machine.call(subject.call, **given)
        return tuple(result.get() for result in operators.as_tuple(results))
