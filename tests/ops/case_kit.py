"""Which cases the references' tests take: those that NumPy computes in a moment."""

from __future__ import annotations

from cupymla.ops.case import Case
from cupymla.testing.operators import Subject

MOST_FLOPS, MOST_BYTES = 2e8, 3e7


def quick(operator: str) -> list[Case]:
    """An operator's small cases, and the cheapest of each intent. What larger ones are for, tiles that come round and
    numbers past 32 bits, is in kernels, not in references."""
    subject = Subject(operator)
    cheapest: dict[str, Case] = {}
    for case in sorted(subject.cases.CASES, key=subject.cases.flops):
        cheapest.setdefault(case.intent, case)

    def small(case: Case) -> bool:
        return bool(subject.cases.flops(case) <= MOST_FLOPS and subject.cases.bytes_moved(case) <= MOST_BYTES)

    return [case for case in subject.cases.CASES if small(case) or case in cheapest.values()]
