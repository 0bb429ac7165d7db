"""Times an operator's benchmark cases on this machine's GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import UnsupportedError
from ..ops.case import Case
from . import machine, rivals, timing
from .operators import Subject
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


def run(
    subject: Subject,
    cases: Sequence[Case],
    progress: Callable[[str], None] = lambda name: None,
    ceilings: Ceilings | None = None,
    commit: str | None = None,
) -> Benchmark:
    """Measure the ceilings, then each case.

    Args:
        subject: the operator.
        cases: what to time.
        progress: called with each case's name when it is done.
        ceilings: those already measured in this run; None measures them.
        commit: what to write as the commit; None asks git.

    Raises:
        UnsupportedError: there is no GPU, or the operator has no kernel for it.
    """
    from .. import driver

    if not driver.available():
        raise UnsupportedError(f"timing {subject.name}", "cpu", "CUDA GPUs")
    timer = Timer()
    limits = ceilings or timing.ceilings(timer)
    rows, beside = [], []
    for case in cases:
        us, others = time_case(subject, case, timer)
        rows.append(row(subject, case, us, limits))
        beside.extend(others)
        progress(case.name)
    return Benchmark(
        **machine.provenance(commit),
        ceilings=limits.as_dict(),
        rows=rows,
        rivals=beside,
    )


def host_overhead(subject: Subject) -> dict[str, Any]:
    """Host microseconds per call of the operator's cheapest benchmark case, and the case's name.

    `bare` is the driver's launch function alone, with everything laid out; `prepared` a prepared call; `ordinary` a
    public call with CuPy arrays that allocates its outputs. `torch` and `jax`, where they are installed for this GPU,
    are a torch operator and a custom call outside of a CUDA graph, of the operator's smallest case.
    """
    import cupy

    from . import frameworks

    case = min(subject.cases.BENCH, key=subject.cases.flops)
    inputs = subject.cases.inputs(case, 0, cupy)
    prepared = subject.call.prepare(**inputs)
    calls = {
        "bare": bare_launch(prepared.launcher),
        "prepared": prepared,
        "ordinary": lambda: subject.call(**inputs),
    }
    wait = cupy.cuda.get_current_stream().synchronize
    found = {name: round(timing.host_us(calls[name], wait), 2) for name in HOST_COLUMNS}
    return {"case": case.name, **found, **frameworks.overhead(subject)}


def bare_launch(launcher: Any) -> Callable[[], object]:
    """What a `launch.Launcher` does at least: one call of the driver's entry point with what it holds ready."""
    launch = launcher._launch
    arguments = (launcher._config_address, launcher._function, launcher._slots_address, None)
    return lambda: launch(*arguments)
