"""Every kernel on this machine's GPU, every case: right by the comparison law, and the same bits each time.

A run in which all cases of an operator pass writes its evidence.
"""

from __future__ import annotations

import pytest

from cupymla import driver
from cupymla.ops import registry
from cupymla.ops.case import Case
from cupymla.testing import compare, gpu, operators
from cupymla.testing.evidence import Recorder

SUBJECTS = [operators.Subject(entry.name) for entry in registry.OPERATORS if entry.kernels]
CASES = [pytest.param(s.name, case, id=f"{s.name}-{case.name}") for s in SUBJECTS for case in s.cases.CASES]
REPEATED = [pytest.param(s.name, case, id=f"{s.name}-{case.name}") for s in SUBJECTS for case in gpu.repeatable(s)]


def require_kernel(operator: str) -> None:
    if operators.kernel_for(registry.named(operator), driver.compute_capability(0)) is None:
        pytest.skip(f"{operator} has no kernel for {driver.device_name(0)}")


@pytest.mark.gpu
@pytest.mark.parametrize(("operator", "case"), CASES)
def test_kernel_keeps_the_law(operator: str, case: Case, evidence: Recorder) -> None:
    require_kernel(operator)
    reports = gpu.check_case(operator, case)
    compare.require(reports)
    evidence.record(operator, case, reports)


@pytest.mark.gpu
@pytest.mark.parametrize(("operator", "case"), REPEATED)
def test_kernel_gives_the_same_bits(operator: str, case: Case) -> None:
    require_kernel(operator)
    gpu.check_same_bits(operator, case)
