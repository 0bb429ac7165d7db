"""Mutants of an operator's kernel on whatever runs PTX without a GPU: a call runs up to the kernel once, and from there
on in a process of its own for each mutant.

A mutant is caught by an error of the engine, by a result that the accuracy criterion refuses, and where it does not
end.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import mutants
import numpy as np
from mutant_subjects import Kernel
from mutants import Mutant

from cupymla import build
from cupymla.build import KernelSource
from cupymla.errors import CupymlaError
from cupymla.launch import Geometry
from cupymla.tensormap import TileMap
from cupymla.testing import compare
from cupymla.testing.compare import Mismatch
from cupymla.testing.operators import Array
from cupymla_lab import ab
from cupymla_lab.emulate import EmulationError, Settings
from cupymla_lab.emulate.failures import SENTENCES
from cupymla_lab.emulate.host.machine import HostProgram, load
from cupymla_lab.emulate.host.recompile import mangled
from cupymla_lab.emulate.settings import CHECKS
from cupymla_lab.emulated import Device, Emulated, installed
from cupymla_lab.without_gpu import READS_UNWRITTEN

HOST_RUNS = (
    Settings("lazy", 1, races="hardware"),
    Settings("random", 1, races="hardware"),
    Settings("random", 2, races="hardware"),
    Settings("eager", 1, races="hardware"),
)
"""What a mutant is run with on the host engine, one after another until it is caught."""

PATIENCE_SECONDS = 3.0
LIMIT_SECONDS = 120.0

_TOLD = 160  # characters of a message that are kept


class Done(Exception):
    """All mutants have been run, and nobody needs the rest of the call."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a mutant, or of the kernel as it is.

    Attributes:
        seed: of the schedule.
        settings: of the host engine.
        mutant: what is in force; None for the kernel as it is.
        notes: whether the kernel is to note what it executes.
    """

    seed: int
    settings: Settings | None = None
    mutant: Mutant | None = None
    notes: bool = False

    @property
    def name(self) -> str:
        """How a verdict names it."""
        return f"{self.settings.mode} {self.settings.seed}" if self.settings else f"seed {self.seed}"


class Listener(Protocol):
    """Who says what to run, and is told how it went."""

    def choose(
        self, source: KernelSource, executed: Sequence[Mutant], binding: Sequence[Mutant] | None
    ) -> Iterable[Mutant]:
        """The mutants to run, of those whose instructions the call executes; `binding`: the bounds among them that bind
        somewhere, None where nobody knows."""

    def tell(self, mutant: Mutant, how: str) -> None:
        """How a mutant was caught; "" where it was not."""


class Surveyed(Device):
    """A machine that runs mutants where a call launches their kernel; before the one that it is otherwise."""

    def prepare(self, kernel: Kernel, runs: Sequence[Run], listener: Listener) -> None:
        """Say what is to be run, before a call.

        Args:
            kernel: whose mutants.
            runs: how each of them is run, in turn.
            listener: who chooses them.
        """
        self.of, self.runs, self.listener = kernel, runs, listener
        self.all: tuple[Mutant, ...] = ()
        self.ptx = ""
        self.run_now: Run | None = None
        self._answer = -1
        self._unmutated: set[str] = set()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call an operator in this thread: a process that forks keeps no other."""
        return function(*args, **kwargs)

    def kernel(self, source: KernelSource, device: int) -> Any:
        """In the place of `build.kernel`."""
        if self.of.is_of(source) and not self.ptx:
            with self.real_cupy():
                self.ptx = build.ptx(source)
                self.all = mutants.found(self.ptx, source.entry)
        return super().kernel(source, device)

    def execute(
        self, kernel: Any, geometry: Geometry, parameters: Sequence[bytes], maps: Mapping[int, TileMap]
    ) -> None:
        """Run a kernel to its end; the one of the mutants once for each of them, in processes of their own."""
        if not self.of.is_of(kernel.source):
            super().execute(kernel, geometry, parameters, maps)
            return
        if self.run_now is None:
            self._survey(kernel.source)
        run = self.run_now
        if run is None:
            raise Done
        self.put(kernel, run)
        super().execute(kernel, replace(geometry, pdl=geometry.pdl and not run.notes), parameters, maps)
        digest = self._digest()
        if run.notes:
            self._say("|".join(" ".join(map(str, numbers)) for numbers in self.noted()))
        if run.mutant is None:
            self._say(digest)
        if digest in self._unmutated and "griddepcontrol" not in run.mutant.text:
            self._say("")  # whatever comes behind has the same memory before it as behind the kernel as it is

    def put(self, kernel: Any, run: Run) -> None:
        """Have a kernel run so from now on, in this process."""
        raise NotImplementedError

    def memory(self) -> Iterable[tuple[int, int]]:
        """All memory that the call knows of: addresses and sizes."""
        raise NotImplementedError

    def noted(self) -> Sequence[Iterable[int]]:
        """The numbers of the mutants whose instructions have been executed, and perhaps of bounds that bind."""
        raise NotImplementedError

    def _survey(self, source: KernelSource) -> None:
        """In this process all runs; in another one return to run one of them."""
        noted = self._apart(replace(self.runs[0], notes=True))
        if noted is None:
            return
        if not re.fullmatch("[0-9 |]*", noted):
            raise RuntimeError(f"{source}: the kernel as it is fails: {noted}")
        executed, *binding = [[self.all[int(number) - 1] for number in part.split()] for part in noted.split("|")]
        for run in self.runs:
            digest = self._apart(run)
            if digest is None:
                return
            if not re.fullmatch("[0-9a-f]{32}", digest):
                raise RuntimeError(f"{source}: the kernel as it is fails with {run.name}: {digest}")
            self._unmutated.add(digest)
        for mutant in self.listener.choose(source, executed, binding[0] if binding else None):
            how = ""
            for run in self.runs:
                found = self._apart(replace(run, mutant=mutant))
                if found is None:
                    return
                if found:
                    how = f"{run.name}: {found}"
                    break
            self.listener.tell(mutant, how)

    def _apart(self, run: Run) -> str | None:
        """What a run in a process of its own says; None in that process."""
        reader, writer = os.pipe()
        process = os.fork()
        if not process:
            os.close(reader)
            self._answer, self.run_now = writer, run
            return None
        os.close(writer)
        parts: list[bytes] = []
        until = time.monotonic() + LIMIT_SECONDS
        try:
            while (left := until - time.monotonic()) > 0 and select.select([reader], [], [], left)[0]:
                part = os.read(reader, 1 << 16)
                if not part:
                    break
                parts.append(part)
            else:
                return "does not end"
        finally:
            os.kill(process, signal.SIGKILL)
            os.close(reader)
            os.waitpid(process, 0)
        return b"".join(parts).decode().removesuffix(".") if parts else "the process dies"

    def _say(self, how: str) -> NoReturn:
        """End this process with its answer."""
        os.write(self._answer, f"{how}.".encode())
        os._exit(0)

    def _digest(self) -> str:
        """What is in memory."""
        made = hashlib.blake2b(digest_size=16)
        for base, size in self.memory():
            made.update(ctypes.string_at(base, size))
        return made.hexdigest()

    def attempt(self) -> None:
        """Call the operator: returns where all mutants have been run. Raises what the kernels before them raise."""
        subject, inputs = self.of.problem()
        with ab.constants(subject, self.of.settings), installed(self):
            expected = [subject.expected(inputs, "same"), subject.expected(inputs, "float64")]
            try:
                results: dict[str, Array] = self.results(subject, inputs)
                with np.errstate(all="ignore"):
                    compare.require(subject.compared(results, *expected))
            except Done:
                return
            except Exception as error:
                if self.run_now is None:
                    raise
                self._say(told(error))
            if self.run_now is None:
                raise RuntimeError(f"{self.of.operator}: the call has no such kernel")
            self._say("")


def told(error: Exception) -> str:
    """An error in a few words, without places and numbers of threads."""
    if isinstance(error, Mismatch):
        return "wrong result"
    if not isinstance(error, CupymlaError):
        return f"{type(error).__name__} of the engine"
    text = str(error)
    if isinstance(error, EmulationError):
        text = re.sub(r"\{\d[^}]*\}", "..", SENTENCES[error.code])
    for pattern, instead in _PLAINER:
        text = re.sub(pattern, instead, text)
    text = " ".join(text.split()).strip(" ,;:")
    return text if len(text) <= _TOLD else text[: _TOLD - 3] + "..."


_PLAINER = (
    (r"^deadlock:.*", "deadlock"),
    (r" ?\((?:[^()]|\([^()]*\))*\.(?:cuh?|h|hpp|inl):\d+[^()]*\)", ""),
    (r"^CTA \d+, thread \d+,? ?|^thread \d+ of CTA \([^)]*\),? ?", ""),
    (r",? ?(?:at )?PTX line \d+,?", ""),
    (r"@%mutant_o\w+ ", ""),
    (r"%([a-z]+)\d+\b", r"%\1"),
    (r"0x[0-9a-f]+", "0x"),
    (r"\b(thread|offset|CTA|lane|warp|rank|byte)s? \d+", r"\1"),
    (r"\bCTA \([^)]*\)", "CTA"),
)


# The engines ------------------------------------------------------------------------------------------------------


class HostMutants(Surveyed, Emulated):
    """Mutants on the host engine: one library holds all of a kernel's."""

    program: HostProgram

    def load(self, source: KernelSource) -> HostProgram:
        """A kernel ready to run."""
        ptx = build.ptx(source)
        if not self.of.is_of(source):
            return load(ptx, source.entry, str(source))
        self.program = load(mutants.together(ptx, source.entry, self.all), source.entry, str(source))
        return self.program

    def memory(self) -> Iterable[tuple[int, int]]:
        """All memory that the call knows of: addresses and sizes."""
        return ((region.base, region.size) for region in self._arrays._regions)

    def put(self, kernel: Any, run: Run) -> None:
        """Have a kernel run so from now on, in this process."""
        assert run.settings is not None
        number = mutants.NOTE if run.notes else 1 + self.all.index(run.mutant) if run.mutant else 0
        ctypes.c_uint32.in_dll(self.program._library, mangled(mutants.CHOSEN)).value = number
        self.settings, self.seed = replace(run.settings, patience_seconds=PATIENCE_SECONDS), run.seed
        if run.notes:
            self.settings = replace(self.settings, races="unchecked")

    def noted(self) -> Sequence[Iterable[int]]:
        """The numbers of the mutants whose instructions have been executed, and of bounds that bind."""
        count = 1 + len(self.all)
        words = (ctypes.c_uint32 * (2 * count)).in_dll(self.program._library, mangled(mutants.SEEN))
        return [[number for number in range(count) if words[first + number]] for first in (0, count)]


def emulate(kernel: Kernel, listener: Listener, runs: Sequence[Settings] = HOST_RUNS) -> None:
    """Run mutants on the host engine, in a process of its own."""
    checks = tuple(check for check in CHECKS if check != "written" or kernel.operator not in READS_UNWRITTEN)
    ahead = Settings("eager", checks=checks, patience_seconds=20.0, races="hardware")
    machine = HostMutants(kernel.arch, kernel.multiprocessors, ahead)
    machine.prepare(kernel, [Run(each.seed, replace(each, checks=checks)) for each in runs], listener)
    machine.attempt()
