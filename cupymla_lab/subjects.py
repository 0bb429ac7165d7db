"""An operator that is checked: its correctness cases, which of them are run, and whether its kernel did the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cupymla.ops.case import Case
from cupymla.ops.registry import KernelEntry
from cupymla.testing import operators
from cupymla.testing.compare import Mismatch

from .problems import Problems

_FLOPS_OF_A_BYTE = 16
"""What a byte costs beside arithmetic where a kernel runs a thousand times slower; a guess, for long contexts of few
queries to count as the large problems that they are."""


MOST_EMULATED_FLOPS = 7e9
"""What is larger runs in the emulator on a GPU for minutes, in each of its modes."""

MOST_EMULATED_CTAS = 16384
"""Of a grid: the model keeps about a megabyte of a GPU's memory for each."""


class Subject(operators.Subject):
    """One operator, with its correctness cases among `cases`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.cases = Problems(name, self.cases)

    def cases_of(self, kernel: KernelEntry) -> list[Case]:
        """The cases that a kernel can run."""
        choice = self.choice(kernel)
        return [case for case in self.cases.CASES if choice is None or choice.serves(case)]


def cases_run(subject: Subject, kernel: KernelEntry, emulated: bool) -> list[Case]:
    """The cases that a kernel can run on a GPU, or those of them that are not too large for one that emulates."""
    every = subject.cases_of(kernel)
    return [case for case in every if not emulated or not _is_too_large(subject, case)]


def _is_too_large(subject: Subject, case: Case) -> bool:
    """Whether the emulator would take too long for a case, or too much memory."""
    most_ctas = getattr(subject.cases, "most_ctas", lambda case: 0)
    return bool(subject.cases.flops(case) > MOST_EMULATED_FLOPS or most_ctas(case) > MOST_EMULATED_CTAS)


def cheapest(subject: Subject, per_intent: int = 2, keep: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """The cheapest cases of each intent that do anything, for tools that slow a kernel down a thousandfold.

    Args:
        subject: the operator.
        per_intent: how many of each.
        keep: which cases to choose from.
    """

    def cost(case: Case) -> float:
        return float(subject.cases.flops(case) + _FLOPS_OF_A_BYTE * subject.cases.bytes_moved(case))

    cheap: dict[str, list[Case]] = {}
    for case in sorted(filter(keep, subject.cases.CASES), key=cost):
        group = cheap.setdefault(case.intent, [])
        if len(group) < per_intent and subject.cases.flops(case) > 0:
            group.append(case)
    return [case for group in cheap.values() for case in group]


def require_launched(subject: Subject, kernel: KernelEntry, case: Case, launched: Sequence[str]) -> None:
    """Raise Mismatch where another kernel of the target did a kernel's work, or none did the work that there was.

    A case without arithmetic may be one where there is nothing to launch.
    """
    choice = subject.choice(kernel)
    expected = {kernel.name, *(choice.beside if choice else ())}
    own, beside, others = set(kernel.names), set[str](), set[str]()
    for other in subject.entry.kernels:
        if other.arch == kernel.arch and other.name != kernel.name:
            own.difference_update(other.names)  # what only this kernel's calls launch
            (beside if other.name in expected else others).update(other.names)
    missing = own.isdisjoint(launched) and subject.cases.flops(case) > 0
    if missing or not (others - beside).difference(kernel.names).isdisjoint(launched):
        raise Mismatch(f"launched {', '.join(launched) or 'nothing'} in the place of {kernel.name}")
