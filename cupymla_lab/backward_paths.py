"""Times every path of sparse_mla_bwd's plan, in turn, on its benchmark cases: what says whether the plan chooses well.

    python -m cupymla_lab backward-paths --out docs/benchmarks

Writes <out>/<gpu>/sparse_mla_bwd.paths.json, anew after each case. Kernels are compiled first, by a process each. A
path whose gradients are not those of the path that the plan chooses is not written, and the command fails.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from cupymla import arch as arches
from cupymla import driver
from cupymla.arch import Arch
from cupymla.bench import machine, report
from cupymla.bench import run as bench
from cupymla.bench.baselines import agreement
from cupymla.bench.timing import Timer
from cupymla.build.precompile import precompile
from cupymla.build.source import KernelSource
from cupymla.cli.terminal import exit_with
from cupymla.errors import CompileError
from cupymla.interop.call import Call
from cupymla.interop.declaration import Facts
from cupymla.interop.table import declared
from cupymla.ops.mla import D_V
from cupymla.ops.mla_cases import MlaCase
from cupymla.ops.sparse_mla_bwd import paths, plan, spec
from cupymla.ops.sparse_mla_bwd.paths.path import Path as PlanPath
from cupymla.testing.compare import Mismatch

from . import ab
from .subjects import Subject

OPERATOR = spec.OPERATOR
FILE = f"{OPERATOR}.paths"
REPEATS = 11


@dataclass(frozen=True, slots=True)
class PathRow:
    """One path of one case.

    Attributes:
        case: the case's name.
        path: the path's.
        us: median time of a call, in microseconds, all paths of a case in turn.
        difference: from the gradients of the path that was chosen then, the largest of an element, as a share of the
            largest magnitude.
    """

    case: str
    path: str
    us: float
    difference: float


@dataclass(frozen=True, slots=True)
class Loss:
    """A case whose chosen path is slower than another one.

    Attributes:
        case: its name.
        chosen: the path that is chosen.
        fastest: the path that took the least time.
        ratio: the time of the former over that of the latter.
    """

    case: str
    chosen: str
    fastest: str
    ratio: float


def problem_of(case: MlaCase) -> spec.Problem:
    """The problem of a case whose arrays are contiguous, without these."""
    rows, dtype = (*case.lead, case.s_q), case.dtype
    heads = (*rows, case.h_q)
    arrays = {
        "q": Facts((*heads, case.d_qk), dtype),
        "kv": Facts((*case.lead, case.s_kv, case.d_qk), dtype),
        **{name: Facts((*heads, D_V), dtype) for name in ("out", "dout")},
        "lse": Facts(heads, "float32"),
        "indices": Facts((*rows, case.topk), "int32"),
    }
    if case.lengths != "none":
        arrays["topk_length"] = Facts(rows, "int32")
    if case.sink != "none":
        arrays["attn_sink"] = Facts((case.h_q,), "float32")
    made: spec.Problem = Call.of(declared(OPERATOR), arrays, _options(case)).check()
    return made


def _options(case: MlaCase) -> dict[str, Any]:
    """All options of the bridges, as `Call.of` takes them."""
    given = {**case.options, "return_attn_dist": case.wants_dist}
    return {name: given.get(name, option.default) for name, option in declared(OPERATOR).options.items()}


def losses(rows: Iterable[PathRow], chosen: Mapping[str, tuple[Hashable, str]], margin: float) -> list[Loss]:
    """The cases whose chosen path took more than `margin` longer, as a share, than the fastest.

    Cases that are one problem to the plan differ in data alone, and have one path. Each path counts by its worst of
    them, over the fastest path there, so that a path that is best for some data need not be best for all.

    Args:
        rows: times.
        chosen: of each case its problem and the name of the path that the plan chooses.
        margin: the share.

    Raises KeyError for a case whose chosen path has no row.
    """
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        times.setdefault(row.case, {})[row.path] = row.us
    alike: dict[Hashable, list[str]] = {}
    for case in times:
        alike.setdefault(chosen[case][0], []).append(case)
    found = []
    for cases in alike.values():
        path = chosen[cases[0]][1]
        worst = {name: max(times[case][name] / min(times[case].values()) for case in cases) for name in times[cases[0]]}
        fastest = min(worst, key=worst.__getitem__)
        ratio = worst[path] / worst[fastest]
        if ratio > 1 + margin:
            found.append(Loss(cases[0], path, fastest, round(ratio, 3)))
    return found


def taking(path: PlanPath) -> ab.Variant:
    """Calls whose plans take a path, whatever their rules say."""

    @contextlib.contextmanager
    def applied() -> Iterator[None]:
        with mock.patch.object(paths, "choose", lambda *_: path):
            yield

    return ab.Variant(path.name, applied)


def in_turn(problem: spec.Problem, arch: Arch, multiprocessors: int) -> list[PlanPath]:
    """Every path that can compute a problem, the chosen one first."""
    chosen = paths.choose(problem, arch, multiprocessors)
    return [chosen, *(path for path in paths.ways(problem, arch) if path != chosen)]


def kernels(cases: Iterable[MlaCase], arch: Arch, multiprocessors: int) -> list[KernelSource]:
    """What all paths of these cases are compiled from."""
    found: dict[KernelSource, None] = {}
    for case in cases:
        problem = problem_of(case)
        for path in paths.ways(problem, arch):
            made = plan.planned(problem, arch, multiprocessors, path)
            found |= dict.fromkeys(made.source(launch.stage) for launch in made.launches())
    return list(found)


def measure(
    subject: Subject, case: MlaCase, every: Sequence[PlanPath], timer: Timer
) -> tuple[list[PathRow], list[str]]:
    """The rows of a case on this GPU, and what went wrong with paths that have none."""
    import cupy

    inputs = subject.cases.inputs(case, 0, cupy)
    calls: dict[str, Callable[[], Any]] = {path.name: ab.prepared(subject, inputs, taking(path)) for path in every}
    first, *_ = calls.values()
    ours = subject.named(first())
    differences, wrong = {}, []
    for name, call in calls.items():
        try:
            differences[name] = agreement.difference(OPERATOR, inputs, ours, _gradients(subject.named(call())))
        except Mismatch as error:
            wrong.append(f"{case.name}, {name}: {error}")
    times = timer.alternating_us({name: calls[name] for name in differences}, REPEATS)
    rows = [PathRow(case.name, name, round(us, 2), float(f"{differences[name]:.2g}")) for name, us in times.items()]
    del inputs, calls, first, ours
    cupy.get_default_memory_pool().free_all_blocks()
    return rows, wrong


def _gradients(outputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: array for name, array in outputs.items() if array is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; 1 where a path's gradients are others, 2 without a GPU that has paths."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of benchmark files")
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="only this case; repeatable")
    parser.add_argument("--commit", help="the commit to record (default: ask git)")
    options = parser.parse_args(arguments)
    subject = Subject(OPERATOR)
    every = [case for case in bench.chosen(subject, options.case) if isinstance(case, MlaCase)]
    cases = [case for case in every if not case.wants_lists]  # lists change no path
    if not driver.available():
        print("paths are timed on a CUDA GPU, and there is none", file=sys.stderr)
        return 2
    arch, multiprocessors = arches.serving(driver.compute_capability(0)), driver.multiprocessor_count(0)
    if arch is None or arch.name not in paths.ARCHS:
        print(f"{OPERATOR} has no path on {driver.device_name(0)}", file=sys.stderr)
        return 2
    for outcome in precompile(kernels(cases, arch, multiprocessors)):
        if not outcome.ok:
            raise CompileError(outcome.source.path, outcome.error)
    head = {**machine.provenance(options.commit), "arch": arch.name, "multiprocessors": multiprocessors}
    timer, found, wrong = Timer(), list[PathRow](), list[str]()
    for case in cases:
        rows, errors = measure(subject, case, in_turn(problem_of(case), arch, multiprocessors), timer)
        found += rows
        wrong += errors
        print(*(f"{row.case}  {row.path}  {row.us:.1f} us" for row in rows), *errors, sep="\n", flush=True)
        if options.out:
            report.write(options.out, FILE, {**head, "rows": [asdict(row) for row in found]})
    return int(bool(wrong))


if __name__ == "__main__":
    exit_with(main)
