"""Every kernel on this machine's GPU, every case: right by the accuracy criterion, and the same bits each time.

A run in which all cases of an operator pass writes its evidence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cupymla import driver
from cupymla.ops import registry
from cupymla.ops.case import Case
from cupymla.ops.registry import KernelEntry
from cupymla.testing import compare, operators
from cupymla_lab import gpu
from cupymla_lab.recorder import Recorder
from cupymla_lab.subjects import Subject

SUBJECTS = [Subject(entry.name) for entry in registry.subjects() if entry.kernels]


def params(chosen: Callable[[Subject, KernelEntry], list[Case]]) -> list[Any]:
    """Operator, kernel and case, whichever GPU there is: of kernels of one name that of the target written last."""
    kernels = {
        (subject.name, kernel.name): (subject, kernel) for subject in SUBJECTS for kernel in subject.entry.kernels
    }
    return [
        pytest.param(subject.name, name, case, id=f"{name}-{case.name}")
        for (_, name), (subject, kernel) in kernels.items()
        for case in chosen(subject, kernel)
    ]


def kernel_here(subject: Subject, name: str) -> KernelEntry:
    """The kernel of that name for this GPU; skips the test where there is none."""
    for kernel in operators.kernels_for(subject.entry, driver.compute_capability(0)):
        if kernel.name == name:
            return kernel
    pytest.skip(f"{subject.name} has no kernel {name} for {driver.device_name(0)}")


@pytest.mark.gpu
@pytest.mark.parametrize(("operator", "name", "case"), params(Subject.cases_of))
def test_kernel_meets_the_accuracy_criterion(operator: str, name: str, case: Case, evidence: Recorder) -> None:
    subject = Subject(operator)
    kernel = kernel_here(subject, name)
    reports = gpu.check_case(subject, kernel, case)
    compare.require(reports)
    evidence.record(operator, kernel, case, reports)


@pytest.mark.gpu
@pytest.mark.parametrize(("operator", "name", "case"), params(gpu.repeatable))
def test_kernel_gives_the_same_bits(operator: str, name: str, case: Case) -> None:
    subject = Subject(operator)
    gpu.check_same_bits(subject, kernel_here(subject, name), case)
