"""The survey of mutants: which of them the host engine catches.

    python tests/emulate/survey_mutants.py                                  all kernels' mutants that have not run yet
    python tests/emulate/survey_mutants.py --kernel dist-64 --which all
    python tests/emulate/survey_mutants.py --table                          docs/log/mutants.md

`mutants.json` keeps the mutants, which a fixed seed has drawn of all whose instructions a kernel executes on its
problem (`mutant_subjects.py`), and how each was caught. It is written as each mutant ends. What stands there of the
PTX interpreter was found while there was one.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mutant_engines
import mutant_table
import mutants
from mutant_subjects import KERNELS
from mutants import Mutant

from cupymla import build
from cupymla.bench.machine import today
from cupymla.build import KernelSource, compiler
from cupymla.ops import registry
from cupymla.testing import operators

LIST = Path(__file__).with_name("mutants.json")
ENGINE, GONE = "host", "interpreter"
WHICH = {
    "new": "those that have not run",
    "compared": "of these, what the interpreter had run",
    "survivors": "those that were not caught",
    "missing": "of these, what the interpreter had caught",
    "all": "all",
}

_Entry = dict[str, Any]


def read() -> dict[str, _Entry]:
    """What is known of each kernel."""
    known: dict[str, _Entry] = json.loads(LIST.read_text()) if LIST.is_file() else {}
    return known


def write(known: dict[str, _Entry]) -> None:
    """The same, a mutant to a line."""
    kernels = []
    for name in (name for name in KERNELS if name in known):
        entry = dict(known[name])
        lines = ",\n".join(f"   {json.dumps(each)}" for each in entry.pop("mutants"))
        kernels.append(f' {json.dumps(name)}: {json.dumps(entry)[:-1]},\n  "mutants": [\n{lines}\n  ]}}')
    part = LIST.with_suffix(".part")
    part.write_text("{\n" + ",\n".join(kernels) + "\n}\n")
    part.replace(LIST)


@contextmanager
def changed() -> Iterator[dict[str, _Entry]]:
    """A block that changes what is known, one process at a time."""
    with LIST.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = read()
        yield known
        write(known)


def identity(each: _Entry) -> tuple[str, str, int]:
    """Of a mutant as the list has it."""
    return each["kind"], each["text"], each["ordinal"]


class _Survey:
    """Chooses mutants, and keeps what becomes of them."""

    def __init__(self, name: str, which: str, seconds: float) -> None:
        self._name, self._which, self._seconds = name, which, seconds
        self._started = time.monotonic()

    def choose(
        self, source: KernelSource, executed: Sequence[Mutant], binding: Sequence[Mutant] | None
    ) -> Iterable[Mutant]:
        """Those that the list has, or as many as a new one may have."""
        kernel = KERNELS[self._name]
        with changed() as known:
            if self._name not in known:
                chosen = mutants.drawn(executed, kernel.most)
                counts = Counter(mutant.kind for mutant in executed)
                known[self._name] = {
                    "kernel": str(source),
                    "case": kernel.case_name,
                    "multiprocessors": kernel.multiprocessors,
                    "compiler": str(compiler.toolchain()),
                    "executed": {kind: counts[kind] for kind in mutants.KINDS if counts[kind]},
                    "mutants": [
                        {"kind": m.kind, "text": m.text, "ordinal": m.ordinal, "place": m.place} for m in chosen
                    ],
                }
            listed = known[self._name]["mutants"]
            if binding is not None:
                bind = {mutant.identity for mutant in binding}
                for each in listed:
                    if each["kind"] == "bound" and identity(each) not in bind:
                        each["idle"] = True
        by_identity = {mutant.identity: mutant for mutant in executed}
        lost = [identity(each) for each in listed if identity(each) not in by_identity]
        if lost:
            raise LookupError(f"{self._name} does not execute {lost[0]}; {len(lost)} in all")
        wanted = [by_identity[identity(each)] for each in listed if self._wants(each)]
        random.Random(mutants.SEED).shuffle(wanted)  # what the time is enough for is no part of the kernel then
        self._started = time.monotonic()
        return itertools.takewhile(lambda mutant: time.monotonic() - self._started < self._seconds, wanted)

    def _wants(self, each: _Entry) -> bool:
        if self._which in ("survivors", "missing"):
            return each.get(ENGINE) == "" and (self._which == "survivors" or bool(each.get(GONE)))
        if self._which == "compared" and GONE not in each:
            return False
        return self._which == "all" or ENGINE not in each

    def tell(self, mutant: Mutant, how: str) -> None:
        """How a mutant was caught."""
        with changed() as known:
            for each in known[self._name]["mutants"]:
                if identity(each) == mutant.identity:
                    each[ENGINE] = how
        shown = f"{mutant.kind:9} {mutant.text[:60]:60} {mutant.place[:50]:50}"
        seconds = time.monotonic() - self._started
        print(f"{self._name:16} {seconds:5.0f} s {shown} | {how or '-'}", flush=True)


def survey(name: str, which: str, seconds: float, runs: int) -> None:
    """Run one kernel's mutants."""
    mutant_engines.emulate(KERNELS[name], _Survey(name, which, seconds), mutant_engines.HOST_RUNS[:runs])


def relocate(name: str) -> None:
    """Write down where the sources of today have the mutants that are listed of a kernel."""
    kernel, entry = KERNELS[name], read()[name]
    every = operators.variants(registry.named(kernel.operator), [kernel.arch])
    source = next((each for each in every if str(each) == entry["kernel"]), None)
    if source is None:  # of an open set, which its problem chooses from
        print(f"{name}: left, for the listing of kernels does not have {entry['kernel']}")
        return
    today = mutants.resolved(build.ptx(source), source.entry, [identity(each) for each in entry["mutants"]])
    with changed() as known:
        for each, mutant in zip(known[name]["mutants"], today, strict=True):
            each["place"] = mutant.place


def is_left(name: str) -> bool:
    """Whether a kernel has mutants that have not run, or none have been drawn."""
    entry = read().get(name)
    return entry is None or any(ENGINE not in each for each in entry["mutants"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run mutants, or write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernel", choices=list(KERNELS), metavar="NAME", action="append", help="; ".join(KERNELS))
    parser.add_argument("--jobs", type=int, default=1, help="kernels at a time")
    parser.add_argument("--runs", type=int, default=9, help="how many schedules are tried at most")
    parser.add_argument("--which", choices=WHICH, default="new", help="; ".join(f"{w}: {h}" for w, h in WHICH.items()))
    parser.add_argument("--seconds", type=float, default=1e9, help="for one kernel's mutants, some are left out then")
    parser.add_argument("--table", action="store_true", help="write docs/log/mutants.md")
    parser.add_argument("--places", action="store_true", help="write anew where the mutants are, and run none")
    options = parser.parse_args(arguments)
    if options.table:
        mutant_table.write(read(), today())
        return
    if options.places:
        for name in options.kernel or read():
            relocate(name)
        return
    names = [name for name in options.kernel or KERNELS if options.which != "new" or is_left(name)]
    context = multiprocessing.get_context("fork")
    waiting = list(names)
    running: list[Any] = []
    failed: list[str] = []
    target: Callable[..., None] = survey
    while waiting or running:
        while waiting and len(running) < options.jobs:
            arguments_of = (waiting[0], options.which, options.seconds, options.runs)
            process = context.Process(target=target, args=arguments_of, name=waiting.pop(0))
            process.start()
            running.append(process)
        for process in list(running):
            process.join(0.2)
            if process.exitcode is not None:
                running.remove(process)
                failed += [process.name] if process.exitcode else []
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
