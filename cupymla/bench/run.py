"""Times an operator's benchmark cases on this machine's GPU."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from ..launch import Launcher
from ..ops.case import Case
from ..testing.compare import Mismatch
from ..testing.operators import Subject
from . import baselines, machine, timing
from .baselines import Maker, agreement
from .processes import Lost
from .report import BaselineRow, Benchmark, Row
from .timing import Ceilings, Timer

HOST_COLUMNS = ("bare", "prepared", "ordinary")
FRAMEWORK_COLUMNS = ("torch", "torch_grad", "jax")


def chosen(subject: Subject, names: Sequence[str]) -> list[Case]:
    """The benchmark cases of these names, all when there are no names. Raises InputError for an unknown one."""
    cases: Sequence[Case] = subject.cases.BENCH
    return subject.those(cases, names) if names else list(cases)


def row(subject: Subject, case: Case, us: float, ceilings: Ceilings) -> Row:
    """A measured time as a row of the benchmark file."""
    busy_us = max(us - ceilings.empty_us, 1e-3)
    tflops = subject.cases.flops(case) / busy_us / 1e6
    tbps = subject.cases.bytes_moved(case) / busy_us / 1e6
    is_fp8 = getattr(case, "dtype", "") == "fp8"
    peak = ceilings.cublas_fp8_tflops if is_fp8 else ceilings.cublas_bf16_tflops
    copies = getattr(subject.cases, "BOUND_BY_COPYING", False)
    of_memory = tbps / (ceilings.copy_tbps if copies else ceilings.read_tbps)
    # What takes longer at its ceiling binds; a matrix rate that is not known is taken to.
    of_compute = tflops / peak if peak else None
    if of_compute is not None and of_compute < of_memory:
        bound = "copy" if copies else "memory"
        return Row(case.name, round(us, 2), round(tflops, 2), round(tbps, 3), bound, round(of_memory, 4))
    share = None if of_compute is None else round(of_compute, 4)
    return Row(case.name, round(us, 2), round(tflops, 2), round(tbps, 3), "compute", share)


@dataclass(frozen=True, slots=True)
class BaselineTime:
    """What came of one baseline of a case.

    Attributes:
        name, version: of the baseline.
        us: its time in microseconds, None where it was not timed.
        difference: from the operator's outputs, see `agreement.difference`; None where they could not be compared.
        error: why it was not timed.
    """

    name: str
    version: str
    us: float | None = None
    difference: float | None = None
    error: str | None = None

    def row(self, subject: Subject, case: Case, ceilings: Ceilings) -> BaselineRow:
        """As a row of the benchmark file: it counts the case's operations and bytes."""
        difference = None if self.difference is None else float(f"{self.difference:.2g}")
        made = BaselineRow(case.name, self.name, self.version, difference=difference, error=self.error)
        if self.us is None:
            return made
        found = row(subject, case, self.us, ceilings)
        return replace(made, us=found.us, tflops=found.tflops, tbps=found.tbps, of_ceiling=found.of_ceiling)


def time_case(
    subject: Subject, case: Case, timer: Timer, makers: Mapping[str, Maker] | None = None
) -> tuple[float, list[BaselineTime]]:
    """Median time of a prepared call of the case, in microseconds, and those of baselines, which alternate with it.

    A baseline whose outputs are not the operator's is not timed, nor one that raises.

    Args:
        subject: the operator.
        case: the case.
        timer: on the GPU that runs it.
        makers: of baselines, by name.
    """
    import cupy

    us, found = _times(subject, case, timer, makers or {})
    # What it held is free now: the next case may want it in another framework.
    cupy.get_default_memory_pool().free_all_blocks()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return us, found


def _times(subject: Subject, case: Case, timer: Timer, makers: Mapping[str, Maker]) -> tuple[float, list[BaselineTime]]:
    import cupy

    inputs = subject.cases.inputs(case, 0, cupy)
    prepared = subject.call.prepare(**inputs)
    calls: dict[str, Callable[[], object]] = {"": prepared}
    found: dict[str, BaselineTime] = {}
    for name, maker in makers.items():
        version, difference, error = "", None, None
        try:
            baseline = baselines.make(name, maker, case, inputs, subject.outputs)
            if baseline is None:
                continue
            version = baseline.version
            theirs = baseline.outputs(baseline.call())
            difference = agreement.difference(subject.name, inputs, subject.named(prepared()), theirs)
            calls[name] = baseline.call
        except Mismatch as raised:
            error = f"wrong: {raised}"
        except Exception as raised:
            error = f"failed: {type(raised).__name__}: {raised}"
        found[name] = BaselineTime(name, version, None, difference, error)
    times = timer.alternating_us(calls)
    return times[""], [replace(one, us=times.get(name)) for name, one in found.items()]


@dataclass(frozen=True, slots=True)
class Job:
    """What `do` is to time.

    Attributes:
        operator, case: names of an operator and of one of its benchmark cases; none for the ceilings.
        with_baselines: whether baselines are timed beside the case.
        file: of further baselines.
    """

    operator: str = ""
    case: str = ""
    with_baselines: bool = True
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class Timed:
    """What came of it.

    Attributes:
        us: of the case.
        baselines: of the case.
        ceilings: where they were asked for.
    """

    us: float = 0.0
    baselines: tuple[BaselineTime, ...] = ()
    ceilings: Ceilings | None = None


_timer = functools.cache(Timer)


def do(job: Job) -> Timed:
    """Time a case, or the ceilings, on GPU 0 in this process."""
    if not job.operator:
        return Timed(ceilings=timing.ceilings(_timer()))
    subject = Subject(job.operator)
    (case,) = chosen(subject, [job.case])
    makers = baselines.makers(job.operator, job.case, job.file) if job.with_baselines else {}
    us, timed = time_case(subject, case, _timer(), makers)
    return Timed(us, tuple(timed))


def ceilings(result: Callable[[Job], Timed] = do) -> Ceilings:
    """What this GPU reaches. Raises Lost when `result` does."""
    try:
        measured = result(Job()).ceilings
    except Lost as error:
        raise Lost(f"the ceilings: {error}") from error
    assert measured is not None
    return measured


def run(
    subject: Subject,
    cases: Sequence[Case],
    limits: Ceilings,
    result: Callable[[Job], Timed] = do,
    progress: Callable[[str], None] = lambda name: None,
    commit: str | None = None,
    file: Path | None = None,
) -> tuple[Benchmark, dict[str, str]]:
    """Time cases.

    Args:
        subject: the operator.
        cases: what to time.
        limits: the ceilings, measured in this run.
        result: does a job; may raise Lost.
        progress: called with each case's name when it is done.
        commit: what to write as the commit; None asks git.
        file: of baselines beside those of installed packages.

    Returns:
        the rows of the cases that were timed, and what went wrong with the others, or with baselines, by their names.
    """
    rows: list[Row] = []
    beside: list[BaselineRow] = []
    wrong: dict[str, str] = {}
    for case in cases:
        try:
            timed = _timed(subject, case, result, file, wrong)
        except Lost as error:
            wrong[case.name] = str(error)
        else:
            rows.append(row(subject, case, timed.us, limits))
            beside.extend(one.row(subject, case, limits) for one in timed.baselines)
            wrong |= {f"{case.name}, {one.name}": one.error for one in timed.baselines if one.error}
        progress(case.name)
    return Benchmark(**machine.provenance(commit), ceilings=limits.as_dict(), rows=rows, baselines=beside), wrong


def _timed(
    subject: Subject, case: Case, result: Callable[[Job], Timed], file: Path | None, wrong: dict[str, str]
) -> Timed:
    """A case with its baselines, or where they cost the process, without; `wrong` then says so. Raises Lost."""
    names = list(baselines.makers(subject.name, case.name, file))
    if names:
        try:
            return result(Job(subject.name, case.name, file=file))
        except Lost as error:
            wrong[f"{case.name}, beside {', '.join(names)}"] = str(error)
    return result(Job(subject.name, case.name, with_baselines=False))


def host_overhead(subject: Subject) -> dict[str, Any]:
    """Host microseconds per call of the operator's cheapest benchmark case, the case's name, and its launches.

    `bare` is the driver's launch function alone, once for each of the launches, with everything laid out; `prepared` a
    prepared call; `ordinary` a public call with CuPy arrays that allocates its outputs, all three of one round
    (`timing.host_us_in_turns`). `torch` and `jax`, where they are installed for this GPU, are a torch operator and a
    custom call outside of a CUDA graph, of the operator's smallest case; `torch_grad` is the operator with tensors that
    require a gradient, without its backward.
    """
    import cupy

    from . import frameworks

    case = min(subject.cases.BENCH, key=subject.cases.flops)
    inputs = subject.cases.inputs(case, 0, cupy)
    prepared = subject.call.prepare(**inputs)
    launches = bare_launches(prepared)
    calls = {
        "bare": launches[0] if len(launches) == 1 else lambda: [launch() for launch in launches],
        "prepared": prepared,
        "ordinary": lambda: subject.call(**inputs),
    }
    wait = cupy.cuda.get_current_stream().synchronize
    found = timing.host_us_in_turns(calls, wait)
    rounded = {name: round(found[name], 2) for name in HOST_COLUMNS}
    return {"case": case.name, "launches": len(launches), **rounded, **frameworks.overhead(subject)}


def bare_launches(prepared: Callable[[], object]) -> list[Callable[[], object]]:
    """What each launch of a prepared call does at least. Makes the call."""
    made: list[Launcher] = []
    launch = Launcher.__call__

    def noted(launcher: Launcher, stream: int) -> None:
        made.append(launcher)
        launch(launcher, stream)

    with mock.patch.object(Launcher, "__call__", noted):
        prepared()
    return [bare_launch(launcher) for launcher in made]


def bare_launch(launcher: Any) -> Callable[[], object]:
    """What a `launch.Launcher` does at least: one call of the driver's entry point with what it holds ready."""
    launch = launcher._launch
    arguments = (launcher._config_address, launcher._function, launcher._slots_address, None)
    return lambda: launch(*arguments)
