"""Which cases the references' tests take: those that NumPy computes in a moment."""

from __future__ import annotations

from cupymla.ops.case import Case
from cupymla_lab.subjects import Subject

MOST_FLOPS, MOST_BYTES = 2e8, 3e7


def quick(operator: str) -> list[Case]:
    """An operator's small cases, and the cheapest of each intent that has none.

    What larger ones are for, tiles that come round and numbers past 32 bits, is in kernels, not in references.
    """
    subject = Subject(operator)

    def small(case: Case) -> bool:
        return bool(subject.cases.flops(case) <= MOST_FLOPS and subject.cases.bytes_moved(case) <= MOST_BYTES)

    chosen = [case for case in subject.cases.CASES if small(case)]
    others = {case.intent for case in subject.cases.CASES} - {case.intent for case in chosen}
    cheapest: dict[str, Case] = {}
    for case in sorted(subject.cases.CASES, key=subject.cases.flops):
        if case.intent in others:
            cheapest.setdefault(case.intent, case)
    return [case for case in subject.cases.CASES if case in chosen or case in cheapest.values()]
