"""Times an operator's benchmark cases on this machine's GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from ..launch import Launcher
from ..ops.case import Case
from ..testing.operators import Subject
from . import baselines as rivals
from . import machine, timing
from .processes import Lost
from .report import Benchmark, RivalRow, Row
from .timing import Ceilings, Timer

# Their arithmetic is a chain of matrix products and takes longer than their memory traffic; the others only stream.
MATRIX_BOUND = frozenset({"sparse_mla_fwd", "sparse_mla_bwd", "sparse_mla_bwd_phase1", "attn_dist"})

HOST_COLUMNS = ("bare", "prepared", "ordinary")
FRAMEWORK_COLUMNS = ("torch", "jax")


def chosen(subject: Subject, names: Sequence[str]) -> list[Case]:
    """The benchmark cases of these names, all when there are no names. Raises InputError for an unknown one."""
    cases: Sequence[Case] = subject.cases.BENCH
    return subject.those(cases, names) if names else list(cases)


def row(subject: Subject, case: Case, us: float, ceilings: Ceilings) -> Row:
    """A measured time as a row of the benchmark file."""
    busy_us = max(us - ceilings.empty_us, 1e-3)
    tflops = subject.cases.flops(case) / busy_us / 1e6
    tbps = subject.cases.bytes_moved(case) / busy_us / 1e6
    matrix_bound = subject.name in MATRIX_BOUND
    share = tflops / ceilings.cublas_bf16_tflops if matrix_bound else tbps / ceilings.read_tbps
    return Row(case.name, round(us, 2), round(tflops, 2), round(tbps, 3), round(share, 4))


def time_case(subject: Subject, case: Case, timer: Timer, *, beside: bool = True) -> tuple[float, list[RivalRow]]:
    """Median time of a prepared call of the case, in microseconds, and those of what else can run it, if wanted."""
    import cupy

    inputs = subject.cases.inputs(case, 0, cupy)
    prepared = subject.call.prepare(**inputs)
    us = timer.us(prepared)
    del prepared
    others = rivals.of(subject.name, case, inputs) if beside else ()
    rows = [RivalRow(case.name, name, round(timer.us(call), 2)) for name, call in others]
    del inputs
    cupy.get_default_memory_pool().free_all_blocks()
    return us, rows


@dataclass(frozen=True, slots=True)
class Job:
    """What `do` is to time.

    Attributes:
        operator, case: names of an operator and of one of its benchmark cases; none for the ceilings.
    """

    operator: str = ""
    case: str = ""


@dataclass(frozen=True, slots=True)
class Timed:
    """What came of it.

    Attributes:
        us: of the case.
        beside: times of what else can run it.
        ceilings: where they were asked for.
    """

    us: float = 0.0
    beside: tuple[RivalRow, ...] = ()
    ceilings: Ceilings | None = None


_timer = functools.cache(Timer)


def do(job: Job) -> Timed:
    """Time a case, or the ceilings, on GPU 0 in this process."""
    if not job.operator:
        return Timed(ceilings=timing.ceilings(_timer()))
    subject = Subject(job.operator)
    (case,) = chosen(subject, [job.case])
    us, beside = time_case(subject, case, _timer())
    return Timed(us, tuple(beside))


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
) -> tuple[Benchmark, dict[str, str]]:
    """Time cases.

    Args:
        subject: the operator.
        cases: what to time.
        limits: the ceilings, measured in this run.
        result: does a job; may raise Lost.
        progress: called with each case's name when it is done.
        commit: what to write as the commit; None asks git.

    Returns:
        the rows of the cases that were timed, and what went wrong with the others, by their names.
    """
    rows: list[Row] = []
    beside: list[RivalRow] = []
    lost: dict[str, str] = {}
    for case in cases:
        try:
            timed = result(Job(subject.name, case.name))
        except Lost as error:
            lost[case.name] = str(error)
        else:
            rows.append(row(subject, case, timed.us, limits))
            beside.extend(timed.beside)
        progress(case.name)
    return Benchmark(**machine.provenance(commit), ceilings=limits.as_dict(), rows=rows, rivals=beside), lost


def host_overhead(subject: Subject) -> dict[str, Any]:
    """Host microseconds per call of the operator's cheapest benchmark case, the case's name, and its launches.

    `bare` is the driver's launch function alone, once for each of the launches, with everything laid out; `prepared` a
    prepared call; `ordinary` a public call with CuPy arrays that allocates its outputs, all three of one round
    (`timing.host_us_in_turns`). `torch` and `jax`, where they are installed for this GPU, are a torch operator and a
    custom call outside of a CUDA graph, of the operator's smallest case.
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
