"""Kernels of a few lines with accesses or waits that nothing orders, on the host emulator.

A test yields what it claims of each kernel. All kernels of a `Claims` are compiled at once, as bodies of one of which a
parameter chooses one.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from device import Kernel, Memory
from isa_oracle import Array
from ptx_kernels import one_of

from cupymla.launch import Geometry
from cupymla_lab.emulate import MODES, Settings
from cupymla_lab.emulate.host.machine import HostError
from cupymla_lab.emulate.settings import Mode
from cupymla_lab.ptx.races import Races

HEAD = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry kernel(.param .u64 a0, .param .u64 a1, .param .u32 a2)
{{
    .reg .pred %p<8>; .reg .b32 %r<64>, %which; .reg .b64 %d<32>;
    .shared .align 1024 .b8 tile[4096];
    mov.u32 %r0, %tid.x; mov.u32 %r1, tile; mov.u32 %r5, %cluster_ctarank; setp.eq.s32 %p1, %r0, 0;
    ld.param.u64 %d0, [a0]; ld.param.u64 %d1, [a1]; ld.param.u32 %which, [a2];
    mul.wide.u32 %d10, %r0, 4; mad.wide.u32 %d11, %r5, 1024, %d10; add.s64 %d11, %d11, %d1; add.s64 %d10, %d10, %d0;
{bodies}
    ret;
}}
"""
TOGETHER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
FENCE = "fence.proxy.async.shared::cta;"


@dataclass(frozen=True)
class Run:
    """One run of a body, and what it is refused with, as a pattern; None where it is not."""

    races: Races
    mode: Mode
    refusal: str | None = None


@dataclass(frozen=True)
class Claim:
    """What is claimed of a body.

    Attributes:
        body: PTX. %d0 and %d1 name two arrays of numbers, %d10 and %d11 this thread's of them; those in the second one
            of the CTA with rank 1 begin 1024 bytes later.
        runs: of it.
        gives: whether the second array is right after a run that is not refused.
        threads, cluster, ctas: of the launch; 0 CTAs is one cluster.
        seed: of the emulation.
    """

    body: str
    runs: tuple[Run, ...]
    gives: Callable[[Array], bool] | None = None
    threads: int = 32
    cluster: int = 1
    ctas: int = 0
    seed: int = 1

    def check(self, kernel: Kernel, number: int) -> None:
        """Run the body with that number in a kernel."""
        for run in self.runs:
            if run.refusal is None:
                found = self._launch(kernel, number, run)
                assert self.gives is None or self.gives(found), (run, self.body, found)
                continue
            with pytest.raises(HostError) as caught:
                self._launch(kernel, number, run)
            assert re.search(run.refusal, str(caught.value)), (run, self.body, str(caught.value))

    def _launch(self, kernel: Kernel, number: int, run: Run) -> Array:
        arrays = [np.arange(1024, dtype=np.uint32), np.zeros(1024, np.uint32)]
        memories = [Memory(array, "host") for array in arrays]
        settings = Settings(run.mode, self.seed, checks=(), races=run.races)
        parameters = [*(memory.parameter for memory in memories), ctypes.c_uint32(number)]
        geometry = Geometry((self.ctas or self.cluster, 1, 1), self.threads, 0, cluster=self.cluster)
        kernel.launch(geometry, parameters, settings)
        return memories[1].read()


def passed(body: str, races: Races, modes: Iterable[Mode] = MODES, **options: Any) -> Claim:
    """Nothing is found."""
    return Claim(body, tuple(Run(races, mode) for mode in modes), **options)


def ordered(body: str, races: Races = "specified", **options: Any) -> Claim:
    """Nothing is found in any mode."""
    return passed(body, races, **options)


def refused(
    body: str, what: str = "nothing orders the two", races: Races = "hardware", modes: Iterable[Mode] = MODES,
    **options: Any,
) -> Claim:  # fmt: skip
    """The check finds a race, in every mode."""
    return Claim(body, tuple(Run(races, mode, rf"race: .*{what}") for mode in modes), **options)


def raced(body: str, what: str = "nothing orders the two", **options: Any) -> Claim:
    """Only the check sees the fault, and sees it in every mode."""
    unchecked, checked = passed(body, "unchecked"), refused(body, what)
    pairs = zip(unchecked.runs, checked.runs, strict=True)
    return Claim(body, tuple(itertools.chain.from_iterable(pairs)), **options)


class Claims:
    """The claims of several tests.

    The check of races looks at as few bytes at a time as the smallest store of a module has: tests of smaller stores
    have claims of their own.
    """

    def __init__(self) -> None:
        self._tests: list[Callable[[], Iterator[Claim]]] = []

    @functools.cached_property
    def _bodies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(claim.body for test in self._tests for claim in test()))

    @functools.cached_property
    def _kernel(self) -> Kernel:
        text = HEAD.format(bodies=one_of(self._bodies, "%which"))
        return Kernel(text, "races.ptx", "host")

    def test(
        self, **values: Mapping[str, Any] | Iterable[str]
    ) -> Callable[[Callable[..., Iterator[Claim]]], Callable[..., None]]:
        """A test that yields claims, for each combination of its arguments' values, which may have names."""
        named = {name: each if isinstance(each, Mapping) else {v: v for v in each} for name, each in values.items()}

        def made(claims: Callable[..., Iterator[Claim]]) -> Callable[..., None]:
            for chosen in itertools.product(*(each.values() for each in named.values())):
                self._tests.append(functools.partial(claims, **dict(zip(named, chosen, strict=True))))

            @functools.wraps(claims)
            def test(**given: Any) -> None:
                for claim in claims(**given):
                    claim.check(self._kernel, self._bodies.index(claim.body))

            for name, each in named.items():
                test = pytest.mark.parametrize(name, list(each.values()), ids=list(each))(test)
            return test

        return made
