"""The commands. Each takes the parsed options and returns the exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError, UnsupportedError
from ..ops import registry
from ..ops.registry import OperatorEntry
from . import doctor as examination
from .tables import folder_for, outcome_row, show_checks, show_outcomes, show_variables, state_of
from .terminal import Terminal

if TYPE_CHECKING:
    from ..bench.report import Benchmark
    from ..testing.operators import Subject


def entries(names: Sequence[str]) -> list[OperatorEntry]:
    """The registry rows of these operators, all when there are no names. Raises InputError for an unknown one."""
    known = {entry.name: entry for entry in registry.subjects()}
    for name in names:
        if name not in known:
            raise InputError("OP", "one of " + ", ".join(known), repr(name))
    return [known[name] for name in names] if names else list(known.values())


def doctor(options: argparse.Namespace) -> int:
    """`doctor`."""
    from .. import config

    terminal = Terminal(options.json)
    checks = examination.examine()
    variables = {name: {"meaning": text, "value": config.value(name)} for name, text in config.VARIABLES.items()}
    terminal.json({"checks": [check.as_dict() for check in checks], "variables": variables})
    show_checks(terminal, checks)
    show_variables(terminal, {name: (config.value(name), text) for name, text in config.VARIABLES.items()})
    return 0 if examination.healthy(checks) else 1


def list_(options: argparse.Namespace) -> int:
    """`list`."""
    from .. import evidence

    rows = evidence.support_rows()
    terminal = Terminal(options.json)
    if any(row.current is None for row in rows):
        print(f"cannot tell what ran with these sources: {evidence.cannot_tell()}", file=sys.stderr)
    if options.json:
        terminal.json([row.as_dict() for row in rows])
        return 0
    if options.markdown:
        print(evidence.support_markdown(rows))
        return 0
    table = [(r.operator, r.kernel, r.arch, evidence.told(r)) for r in rows]
    terminal.table("Operators", ("operator", "kernel", "target", "status"), table)
    return 0


def demo(options: argparse.Namespace) -> int:
    """`demo`."""
    from . import demo as show

    return show.run(Terminal(options.json), folder_for("--out", options.out))


def precompile(options: argparse.Namespace) -> int:
    """`precompile`."""
    from .. import arch
    from ..build import cache, compiler
    from ..build.precompile import check_settings
    from ..build.precompile import precompile as compile_ahead
    from ..testing import operators

    if options.jobs is not None and options.jobs < 1:
        raise InputError("--jobs", "a number of processes, at least 1", options.jobs)
    for name in options.arch or ():
        arch.named(name)
    # What no kernel could be compiled with is said once, not by each of them.
    check_settings()
    sources = []
    terminal = Terminal(options.json)
    for entry in entries(options.operators):
        targets = operators.targets_on(entry, options.arch) if options.arch else None
        for name in set(targets or ()) - set(options.arch or ()):
            terminal.line(f"{entry.name}: {name}, which is what runs there")
        sources += operators.variants(entry, targets)
    # Functions of a family share kernels.
    sources = operators.defining(list(dict.fromkeys(sources)), options.define)
    if sources:
        compiler.toolchain()
    shared = cache.share_entries() if options.shared else None
    with terminal.progress("kernels", len(sources)) as step:
        outcomes = compile_ahead(sources, options.jobs, lambda done: step(f"{done.source} {state_of(done)}"))
    terminal.json([outcome_row(outcome) for outcome in outcomes])
    show_outcomes(terminal, outcomes)
    if not outcomes:
        terminal.line("no kernel for these operators and targets")
    lost = sum(outcome.ok and not outcome.kept for outcome in outcomes)
    if lost:
        terminal.line(f"{lost} not kept: the first call will compile them again")
    if shared:
        terminal.line(f"others use these kernels with CUPYMLA_READONLY_CACHE={shared}")
    return 0 if all(outcome.ok and outcome.kept for outcome in outcomes) else 1


def with_kernels(names: Sequence[str]) -> Sequence[Subject]:
    """The operators of these names, or all, that have a kernel for GPU 0.

    Raises UnsupportedError without a GPU, and for an operator asked for by name that has none.
    """
    from .. import driver
    from ..testing import operators

    chosen = entries(names)
    if not driver.available():
        raise UnsupportedError("timing kernels", "this machine, which has no CUDA GPU", "CUDA GPUs")
    capability = driver.compute_capability(0)
    fitting = [entry for entry in chosen if operators.kernels_for(entry, capability)]
    lacking = [entry.name for entry in chosen if entry not in fitting]
    if (names and lacking) or not fitting:
        raise UnsupportedError(
            ", ".join(lacking), driver.device_name(0), "operators that `list` shows with a kernel for it"
        )
    return [operators.Subject(entry.name) for entry in fitting]


def bench(options: argparse.Namespace) -> int:
    """`bench`."""
    from ..bench import baselines
    from ..bench import run as measure
    from ..bench.processes import Processes
    from ..build.precompile import check_settings

    terminal = Terminal(options.json)
    if not options.limit > 0:
        raise InputError("--limit", "a time above 0, in seconds", options.limit)
    check_settings()
    subjects = with_kernels(options.operators)
    if options.out:
        folder_for("--out", options.out)
    if options.host:
        # A call costs the host what its operator's does: members of families only by name.
        chosen_ones = [each for each in subjects if options.operators or each.entry not in registry.MEMBERS]
        return _bench_host(terminal, chosen_ones, options)
    chosen = [(subject, measure.chosen(subject, options.case)) for subject in subjects]
    if options.baselines:
        baselines.load(options.baselines)
    found: dict[str, Benchmark] = {}
    failed = False
    # A process beside this one: a kernel that faults or hangs costs its own row, and no other.
    with Processes(measure.do, 1, options.limit) as processes:
        limits = measure.ceilings(processes.result)
        with terminal.progress("timed", sum(len(cases) for _, cases in chosen)) as step:
            for subject, cases in chosen:
                benchmark, lost = measure.run(
                    subject, cases, limits, processes.result, step, options.commit, options.baselines
                )
                found[subject.name] = benchmark
                failed |= bool(lost)
                _show(terminal, subject.name, benchmark, lost)
                # At once, so that it is there whatever comes of the next operator.
                if options.out and not options.case and benchmark.rows:
                    _keep(terminal, benchmark, subject.name, options.out)
    terminal.line("ceilings: " + ", ".join(f"{name} {value}" for name, value in limits.as_dict().items()))
    terminal.json({name: asdict(benchmark) for name, benchmark in found.items()})
    return 1 if failed else 0


def _show(terminal: Terminal, name: str, benchmark: Benchmark, lost: Mapping[str, str]) -> None:
    from ..bench.report import TABLE_COLUMNS

    terminal.table(f"{name} on {benchmark.gpu}", TABLE_COLUMNS, benchmark.table())
    for case, error in lost.items():
        print(f"{name} {case}: {error}", file=sys.stderr)


def _keep(terminal: Terminal, benchmark: Benchmark, name: str, folder: Path) -> None:
    from ..bench.report import draw_benchmark

    file = benchmark.write(folder, name)
    terminal.line(f"wrote {file}")
    try:
        draw_benchmark(benchmark, name, file.with_suffix(".png"))
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'cupymla[cli]')", file=sys.stderr)


def _bench_host(terminal: Terminal, subjects: Sequence[Subject], options: argparse.Namespace) -> int:
    from ..bench import machine, report
    from ..bench import run as measure

    rows = []
    with terminal.progress("timing", len(subjects), begins=True) as step:
        for subject in subjects:
            step(subject.name)
            rows.append({"operator": subject.name, **measure.host_overhead(subject)})
    content = {**machine.provenance(options.commit), "rows": rows}
    columns = ("launches", *measure.HOST_COLUMNS, *measure.FRAMEWORK_COLUMNS)
    cells = [(row["operator"], row["case"], *(row.get(key, "-") for key in columns)) for row in rows]
    terminal.table(f"Host microseconds per call on {content['gpu']}", ("operator", "case", *columns), cells)
    if options.out:
        terminal.line(f"wrote {report.write(options.out, 'host', content)}")
    terminal.json(content)
    return 0


def cache(options: argparse.Namespace) -> int:
    """`cache ls`, `cache clear` and `cache path`."""
    from ..build import cache as store
    from ..build import folders

    terminal = Terminal(options.json)
    if options.action == "path":
        folder = folders.location()
        terminal.json({"path": folder})
        terminal.line(str(folder) if folder else "no cache folder that can be trusted")
        return 0 if folder else 1
    if options.action == "clear":
        freed = store.clear()
        terminal.json({"freed_bytes": freed})
        terminal.line(f"freed {freed / 2**20:.1f} MiB")
        return 0
    kept = store.entries()
    terminal.json([{**asdict(entry), "path": str(entry.path)} for entry in kept])
    rows = [
        (e.entry, e.arch, " ".join(e.defines), e.toolchain, e.date, f"{e.size_bytes / 1024:.0f} KiB", e.path)
        for e in kept
    ]
    columns = ("kernel", "target", "variant", "compiler", "date", "size", "file")
    terminal.table(f"{len(kept)} compiled kernels", columns, rows)
    emulated = store.host_files()
    if emulated:
        size = sum(file.stat().st_size for file in emulated)
        terminal.line(f"and {size / 2**20:.1f} MiB that the emulator compiled")
    return 0


COMMANDS = {
    "doctor": doctor,
    "list": list_,
    "demo": demo,
    "precompile": precompile,
    "bench": bench,
    "cache": cache,
}
