"""What `python -m cupymla_lab gpu` says of a kernel has come from it. Run on the emulator's machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cupy
import pytest

from cupymla import driver, evidence
from cupymla.bench import processes
from cupymla.bench.processes import Lost, Processes
from cupymla.ops.registry import KernelEntry
from cupymla.testing import compare, operators
from cupymla.testing.compare import Mismatch, Report
from cupymla_lab import gpu, recorder
from cupymla_lab.emulate import EmulationError
from cupymla_lab.emulate.host import machine as host_machine
from cupymla_lab.emulated import Emulated, emulated
from cupymla_lab.subjects import Subject, cheapest

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(not host_machine.available(), reason="needs a C++ compiler on x86-64"),
]


@pytest.fixture
def blackwell() -> Iterator[Emulated]:
    """A GPU of compute capability 10.0, as far as the check can tell."""
    with emulated("sm_100f", 4) as machine:
        fake_cupy.computing(machine)
        yield machine


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> Subject:
    """nvfp4_gemv, which has two kernels for sm_100f, with the smallest case that both can run and one for one alone."""
    found = Subject("nvfp4_gemv")
    for_both = min((case for case in found.cases.CASES if case.intent == "tensor"), key=found.cases.flops)
    for_one = min((case for case in cheapest(found) if case.intent == "shapes"), key=found.cases.flops)
    monkeypatch.setattr(f"cupymla_lab.problems.{found.name}.CASES", (for_both, for_one))
    return found


def by_name(subject: Subject) -> dict[str, KernelEntry]:
    return {kernel.name: kernel for kernel in operators.kernels_for(subject.entry, driver.compute_capability(0))}


def test_each_of_a_targets_kernels_gets_evidence_from_its_own_runs(
    blackwell: Emulated, subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "available", lambda: True)
    monkeypatch.setattr(driver, "version", lambda: (13, 0))
    monkeypatch.setattr(gpu, "Recorder", functools.partial(recorder.Recorder, tmp_path))
    monkeypatch.setattr(gpu, "REPEATS", 2)
    assert gpu.main(["check", subject.name, "--out", str(tmp_path / "out"), "--jobs", "0", "--sanitizers"]) == 0
    found = {
        name: evidence.read(evidence.path(subject.name, kernel, tmp_path)) for name, kernel in by_name(subject).items()
    }
    assert {name: told and told.cases for name, told in found.items()} == {"nvfp4_gemv": 2, "nvfp4_gemv_tcgen05": 1}
    assert set(blackwell.launched) == set(found)


def test_a_cache_is_as_it_was_before_each_run_of_its_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its bytes are what is compared, those of slots that are not written among them."""
    writer = Subject("concat_and_cache_mla")
    (kernel,) = (kernel for kernel in writer.entry.kernels if kernel.arch == "sm_90")
    (case,) = (case for case in writer.cases.CASES if case.name == "bf16_t30_page16_gaps")
    with emulated("sm_90", 3) as machine:
        fake_cupy.computing(machine)
        run = gpu.Run(writer, case)
        (cache,) = run._beside.values()
        for _ in range(2):
            compare.require(run.reports(run.launch()))
            cache.view("uint16").fill(0)  # so that what is left alone would be lost
        compare.require(gpu.check_case(writer, kernel, case))
        monkeypatch.setattr(gpu.Run, "_poison_beside", lambda self: self._beside["cache"].view("uint16").fill(0))
        with pytest.raises(Mismatch, match="cache: other bits"):
            compare.require(gpu.check_case(writer, kernel, case))


def in_a_process(job: gpu.Job) -> list[Report]:
    """What a process does that has no GPU but the emulator's; one case hangs."""
    if job.case == HANGS:
        time.sleep(600)
    with emulated("sm_100f", 4) as machine:
        fake_cupy.computing(machine)
        return gpu.do(job)


HANGS = "m8_k32_l1_n1"


def test_cases_run_in_processes_and_are_told_of_by_kernel(
    blackwell: Emulated, subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command: both kernels pass in processes of their own, but for the case that never comes back."""
    hangs = dataclasses.replace(subject.cases.CASES[1], name=HANGS)
    monkeypatch.setattr(driver, "available", lambda: True)
    monkeypatch.setattr(driver, "version", lambda: (13, 0))
    monkeypatch.setattr(gpu, "Recorder", functools.partial(recorder.Recorder, tmp_path))
    monkeypatch.setattr(gpu, "REPEATS", 2)
    work = {"do": in_a_process}
    monkeypatch.setattr(gpu, "Processes", lambda do, *rest: Processes(work["do"], *rest))
    command = ["check", subject.name, "--out", str(tmp_path / "out"), "--jobs", "2", "--sanitizers"]
    assert gpu.main(command) == 0
    kernels = by_name(subject)
    files = {name: evidence.path(subject.name, kernel, tmp_path) for name, kernel in kernels.items()}
    passed = {name: evidence.read(file) for name, file in files.items()}
    assert {name: told and told.cases for name, told in passed.items()} == {"nvfp4_gemv": 2, "nvfp4_gemv_tcgen05": 1}
    assert not blackwell.launched, "in this process"
    for file in files.values():
        file.unlink()
    monkeypatch.setattr(f"cupymla_lab.problems.{subject.name}.CASES", (*subject.cases.CASES, hangs))
    limits: list[float] = []
    result = processes._Process.result

    def impatiently(process: Any, work: bytes, seconds: float) -> Any:
        """Two seconds for what never comes back, and for all else what it is given."""
        if HANGS.encode() not in work:
            return result(process, work, seconds)
        limits.append(seconds)
        return result(process, work, 2.0)

    monkeypatch.setattr(processes._Process, "result", impatiently)
    assert gpu.main([*command, "--limit", "20"]) == 1
    assert set(limits) == {20.0}
    assert f"{HANGS}: did not come back within 2 s" in (tmp_path / "out" / "details.txt").read_text()
    assert [name for name, file in files.items() if file.exists()] == ["nvfp4_gemv_tcgen05"]


def some_job(operator: str = "sparse_mla_fwd") -> tuple[Subject, KernelEntry]:
    subject = Subject(operator)
    return subject, next(kernel for kernel in subject.entry.kernels if kernel.arch == "sm_90a")


def test_a_lost_case_fails_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of all cases of a kernel, two of which never come back or come back wrong; nothing is kept of such a kernel."""
    subject, kernel = some_job()
    hung, wrong, *_ = (case.name for case in subject.cases_of(kernel))

    def result(job: gpu.Job) -> list[Report]:
        if job.repeats or job.case not in (hung, wrong):
            return []
        if job.case == hung:
            raise Lost("did not come back within 5 s")
        return [Report("out", 2.0, 0.5, 1.0, 0.0, "error 2.0 above its limit")]

    cases, same_bits = gpu.check(subject, kernel, tmp_path, [], 60, gpu.Runner(result, at_once=3))
    assert same_bits.passed and not cases.passed
    assert f"2 of {len(subject.cases_of(kernel))} cases failed" in cases.note
    assert f"{hung}: did not come back within 5 s" in cases.note and f"{wrong}: " in cases.note
    assert "FAILED" in capsys.readouterr().err


def test_what_is_translated_runs_in_every_mode(
    blackwell: Emulated, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here in the host emulator, which takes its mode from the same settings."""
    modes: list[tuple[str, int]] = []
    execute = blackwell.execute

    def noted(*arguments: Any) -> None:
        modes.append((blackwell.settings.mode, blackwell.settings.seed))
        execute(*arguments)

    monkeypatch.setattr(blackwell, "execute", noted)
    kernel = by_name(subject)["nvfp4_gemv_tcgen05"]
    (case,) = subject.cases_of(kernel)
    machine: Any = blackwell
    assert not [report for report in gpu.check_case(subject, kernel, case, machine=machine) if report.failure]
    each = len(modes) // 5
    every = [("random", 1), ("random", 2), ("lazy", 0), ("eager", 0)]
    assert modes == [mode for mode in (*every, every[-1]) for _ in range(each)]
    modes.clear()
    gpu.check_same_bits(subject, kernel, case, 2, machine=machine)
    assert modes == [mode for mode in every for _ in range(2 * each)]


def test_objections_of_the_emulator_are_failures_of_their_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the target's kernels are those that are translated, whatever this machine's GPU."""
    entered: list[str] = []

    @contextlib.contextmanager
    def pretended(arch: str) -> Iterator[object]:
        entered.append(arch)
        yield object()

    def objects(subject: Subject, kernel: KernelEntry, case: Any, **_: object) -> list[Report]:
        assert kernel.arch == "sm_100f"
        raise EmulationError(code, (0, 0))

    code = 2
    monkeypatch.setattr(gpu, "translated", pretended)
    monkeypatch.setattr(gpu, "check_case", objects)
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(get_default_memory_pool=lambda: pool))
    case = Subject("attn_dist").cases.CASES[0].name
    with pytest.raises(Mismatch, match=f"attn_dist {case} emulated: "):
        gpu.do(gpu.Job("attn_dist", "attn_dist", case, emulated="sm_100f"))
    assert entered == ["sm_100f"]
    code = 0  # the grid may still run: not a Mismatch, after which a process goes on
    with pytest.raises(EmulationError):
        gpu.do(gpu.Job("attn_dist", "attn_dist", case, emulated="sm_100f"))


def test_sanitizers_are_refused_for_what_is_emulated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would run the kernels of this machine's GPU, and the other target's would get the credit."""
    monkeypatch.setattr(driver, "available", lambda: True)
    monkeypatch.setattr(driver, "compute_capability", lambda index: (9, 0))
    with pytest.raises(SystemExit):
        gpu.main(["check", "attn_dist", "--emulated", "sm_100f", "--sanitizers", "memcheck"])
    assert "none of what is emulated" in capsys.readouterr().err


def test_a_kernel_that_another_stood_in_for_has_failed(
    blackwell: Emulated, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = by_name(subject)["nvfp4_gemv_tcgen05"]
    (case,) = subject.cases_of(kernel)
    monkeypatch.setitem(subject.cases.CHOICES, kernel.name, subject.cases.CHOICES["nvfp4_gemv"])
    for check in (gpu.check_case, gpu.check_same_bits):
        with pytest.raises(Mismatch, match=r"launched nvfp4_gemv\b.* in the place of nvfp4_gemv_tcgen05"):
            check(subject, kernel, case)


def test_a_call_that_launches_nothing_has_failed(
    blackwell: Emulated, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here one that computes on the CPU what it was given on the GPU, and gets it right."""

    def on_cpu(c: Any = None, **given: Any) -> Any:
        host = {name: value.get() if hasattr(value, "get") else value for name, value in given.items()}
        (found,) = subject.reference(host, "same")
        made = fake_cupy.ComputingArray(found) if c is None else c
        made[...] = found
        return made

    monkeypatch.setattr(subject, "call", on_cpu)
    for kernel in by_name(subject).values():
        with pytest.raises(Mismatch, match=f"launched nothing in the place of {kernel.name}"):
            gpu.check_case(subject, kernel, subject.cases_of(kernel)[0])


def test_one_kernels_cases_can_be_run_alone(
    blackwell: Emulated, subject: Subject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the sanitizers run them."""
    monkeypatch.setattr(driver, "available", lambda: True)
    arguments = ["cases", subject.name, "--small", "--kernel"]
    assert gpu.main([*arguments, "nvfp4_gemv_tcgen05"]) == 0
    assert set(blackwell.launched) == {"nvfp4_gemv_tcgen05"}
    assert capsys.readouterr().out.startswith("nvfp4_gemv_tcgen05 1 cases")
    assert gpu.main([*arguments, "no such kernel"]) == 2


def takes_a_moment(job: gpu.Job) -> list[Report]:
    time.sleep(0.3)
    return []


def sanitizer(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for the tool; `script` is what it does."""
    tool = folder / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.usefixtures("signals_heard")
@pytest.mark.parametrize("jobs", [0, 1])
@pytest.mark.parametrize(
    ("by", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)]
)
def test_an_interrupted_check_begins_nothing_more(
    by: signal.Signals, ends: type[BaseException], jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither cases, of which there is half a minute's worth, nor sanitizers, one of which hangs."""
    monkeypatch.setattr(gpu, "do", takes_a_moment)
    if not jobs:
        monkeypatch.setattr(gpu.Runner, "__init__", functools.partialmethod(gpu.Runner.__init__, lambda job: []))
    sanitizer(tmp_path, f"echo $$ >>{tmp_path}/started; sleep 600", monkeypatch)
    begun = tmp_path / "started"

    def interrupt() -> None:
        while not begun.exists():
            time.sleep(0.05)
        time.sleep(0.3)
        signal.raise_signal(by)

    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]
    threading.Thread(target=interrupt).start()
    start = time.monotonic()
    with pytest.raises(ends):
        gpu.check_all([some_job()], tmp_path, list(gpu.SANITIZERS), 600, jobs, 600)
    assert time.monotonic() - start < 15
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)] == before
    (process,) = begun.read_text().split()
    with pytest.raises(ProcessLookupError):
        os.kill(int(process), 0)


def test_a_sanitizer_that_hangs_is_ended_with_what_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sanitizer(tmp_path, f"sleep 600 & echo $! >{tmp_path}/started; wait", monkeypatch)
    quick = gpu.Runner(lambda job: [])
    *_, hung = gpu.check(*some_job(), tmp_path, ["memcheck"], 1, quick)
    assert (hung.name, hung.passed) == ("memcheck", False) and "did not come back within 1 s" in hung.note
    stat = Path("/proc") / (tmp_path / "started").read_text().strip() / "stat"
    until = time.monotonic() + 10
    while stat.exists() and " Z " not in stat.read_text():
        assert time.monotonic() < until, "what the tool runs goes on"
        time.sleep(0.05)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_as_a_command_its_work_has_a_name_that_other_processes_find(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`python -m` calls the module `__main__`, which is another one in every process."""
    monkeypatch.setattr(driver, "available", lambda: True)
    monkeypatch.setattr(driver, "compute_capability", lambda device: (9, 0))

    def found(do: Any, *rest: Any) -> Any:
        raise SystemExit(f"{do.__module__}.{do.__name__}")

    monkeypatch.setattr("cupymla.bench.processes.Processes", found)
    monkeypatch.setattr(gpu, "Processes", found)
    monkeypatch.setattr("sys.argv", ["gpu", "check", "sparse_mla_fwd", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^cupymla_lab\.gpu\.do$"):
        runpy.run_module("cupymla_lab.gpu", run_name="__main__", alter_sys=True)


@pytest.mark.parametrize("words", [["--limit", "0"], ["--limit", "nan"], ["--timeout", "-1"], ["--jobs", "-1"]])
def test_numbers_that_make_no_sense_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        gpu.main(["check", *words])
    assert refused.value.code == 2
    assert f"argument {words[0]}: " in capsys.readouterr().err


def test_an_unknown_operator_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        gpu.main(["check", "attn_dist", "attn_disk"])
    assert refused.value.code == 2
    assert "no operator attn_disk; there are sparse_mla_fwd, " in capsys.readouterr().err
