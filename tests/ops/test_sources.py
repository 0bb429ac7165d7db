"""What an operator says that a call compiles is what the call then asks the compile service for.

`python -m cupymla demo` compiles these kernels ahead, in processes beside each other. One that it leaves out is
compiled by the call, alone; one too many is a compiler's time for nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cupymla import arch as arches
from cupymla.arch import Gpu
from cupymla.build import KernelSource
from cupymla.ops import registry
from cupymla.ops.case import Case
from cupymla.ops.registry import KernelEntry
from cupymla.testing import operators
from cupymla.testing.operators import Array
from cupymla_lab import ab
from cupymla_lab.emulated import Device, DeviceArray, installed
from cupymla_lab.subjects import Subject, cheapest

FACTS: dict[str, Any] = {
    # What a binding compares with itself is as it wants it: each of these is compared with a kernel's elsewhere.
    **dict.fromkeys(("parameter_bytes", "heads_per_cta", "block_heads", "cta_heads", "range_rows"), mock.ANY),
    "threads": 256,
    "chunk": 256,
    "pass_rows": 256,
    "groups": 4,
    "vector_bytes": 41472,
    "phase_elements": 16384,
    "rows": 16,
    "tile_bytes": 128,
    **dict.fromkeys(("scale_block_bytes", "vector_block_bytes"), 512),
    "cluster_queries": 1 << 30,
}
"""Of every kernel; what is not here is 1."""

CLUSTERS = {"sparse_mla_bwd_phase1": 2, "xl_attention_cluster": 8}
"""CTAs of a cluster, where a binding wants to know."""


class Asked(Device):
    """A GPU that notes what it is asked to compile, and runs nothing.

    Attributes:
        sources: in order, each once.
    """

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu.arch.name, gpu.multiprocessors, seed=0)
        self.sources: dict[KernelSource, None] = {}
        self._capability = gpu.capability

    def array(self, host: Array, writable: bool = False, name: str = "argument") -> DeviceArray:
        return DeviceArray(host)

    def empty(self, shape: tuple[int, ...], dtype: Any, name: str = "allocated") -> DeviceArray:
        return DeviceArray(np.empty(shape, dtype))

    def kernel(self, source: KernelSource, device: int) -> Any:
        self.sources[source] = None
        facts = defaultdict(lambda: 1, FACTS, cluster=CLUSTERS.get(source.entry, 1))
        return SimpleNamespace(function=0x1000, facts=facts)

    def replacements(self) -> dict[str, Any]:
        return {**super().replacements(), "compute_capability": lambda index: self._capability}

    def fill_zero(self, device: int, size_bytes: int, stream: int) -> None:
        pass

    def _launch(self, *arguments: Any) -> int:
        return 0


GPUS = {
    (9, 0): Gpu(arches.named("sm_90a"), (9, 0), 132),
    (10, 0): Gpu(arches.named("sm_100f"), (10, 0), 148),
    (8, 6): Gpu(arches.named("sm_80"), (8, 6), 84),
}


def kernels() -> Iterator[tuple[str, KernelEntry, Gpu]]:
    for entry in registry.OPERATORS:
        for capability, gpu in GPUS.items():
            for kernel in operators.kernels_for(entry, capability):
                yield entry.name, kernel, gpu


def cases(subject: Subject, kernel: KernelEntry) -> list[Case]:
    served = subject.cases_of(kernel)
    small = [case for case in cheapest(subject, 2, served.__contains__) if subject.cases.flops(case) <= 4e8]
    return [*small, subject.cases.DEMO] if subject.choice(kernel) is None else small


@pytest.mark.parametrize(
    ("operator", "kernel", "gpu"),
    [pytest.param(*each, id=f"{each[0]}-{each[1].name}-{each[2].arch.name}") for each in kernels()],
)
def test_a_call_compiles_what_its_operator_says(operator: str, kernel: KernelEntry, gpu: Gpu) -> None:
    """Of the small cases of each intent, with the choice of the kernel that each is for."""
    subject = Subject(operator)
    seen: set[KernelSource] = set()
    for case in cases(subject, kernel):
        inputs = subject.cases.inputs(case, 0)
        with ab.chosen(subject, kernel, case), installed(Asked(gpu)) as machine:
            machine.call(subject.call.prepare, **machine.arguments(inputs))
            assert set(subject.sources(inputs, gpu)) == set(machine.sources), case.name
        seen.update(machine.sources)
    assert any(source.entry == kernel.name for source in seen)
    if kernel.units:  # else its evidence does not say which others its calls launch
        beside = ((choice := subject.choice(kernel)) and choice.beside) or ()
        named = [other for other in subject.entry.kernels if other.name in (kernel.name, *beside)]
        own = (source for source in seen if source.path.startswith(f"{subject.entry.folder}/"))  # of no part of it
        assert {source.entry for source in own} <= {name for other in named for name in other.names}
