"""The mutation survey of docs/emulation.md, as a table.

python tests/emulate/survey.py gemm                      # the GEMM of gemm.cu
python tests/emulate/survey.py 02_mma_tma PTX-FOLDER     # a tutorial that `tutorials.py ptx` has compiled
python tests/emulate/survey.py attn_dist-h128            # an operator's kernel, by a problem of operator_subjects.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import gemm
import operator_subjects
import tutorials

from cupymla.errors import CupymlaError
from cupymla_lab.emulate import EmulationError, Settings, Site, mutation
from cupymla_lab.emulate.host.machine import HostError


def subject(name: str, folder: Path | None) -> tuple[Callable[[Settings], float], tuple[Site, ...]]:
    """What runs a kernel, and its sites."""
    if name == "gemm":
        runner = gemm.Runner("host")
        return runner.run, runner.kernel.sites
    if name in operator_subjects.PROBLEMS:
        return operator_subjects.subject(operator_subjects.PROBLEMS[name])
    assert folder is not None, name
    tutorial = next(each for each in tutorials.TUTORIALS if each.name == name)
    other = tutorials.Runner(tutorial, (folder / f"{name}.ptx").read_text(), "host", k=320)
    # With five tiles along K both the loop that the compiler unrolls by four and its remainder run.
    # See test_emulated_kernels.py for what the tutorials leave away.
    return lambda settings: other.run(replace(settings, checks=("proxy",), stalls=False)), other.kernel.sites


def apart(run: Callable[[Settings], float], seconds: float) -> Callable[[Settings], float]:
    """The same in a process of its own, which is given up after a while: a mutant may loop without ever waiting."""
    context = multiprocessing.get_context("fork")

    def told(settings: Settings, answers: Connection) -> None:
        try:
            answers.send((run(settings), 0, ""))
        except EmulationError as failure:
            answers.send((0.0, failure.code, ""))
        except CupymlaError as error:
            answers.send((0.0, 0, str(error) or type(error).__name__))

    def given_up_in_time(settings: Settings) -> float:
        answers, theirs = context.Pipe(duplex=False)
        process = context.Process(target=told, args=(settings, theirs))
        process.start()
        theirs.close()
        answer: tuple[float, int, str] = (0.0, 0, "it does not end")
        try:
            if answers.poll(seconds):
                answer = answers.recv()
        except EOFError:
            answer = (0.0, 0, "the process has died")
        process.kill()
        process.join()
        result, code, error = answer
        if code:
            raise EmulationError(code, (0,) * 4)  # its number is what the table shows
        if error:
            raise HostError(error)
        return result

    return given_up_in_time


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for every mutant."""
    compiled = [each.name for each in tutorials.TUTORIALS]
    known = ["gemm", *operator_subjects.PROBLEMS, *compiled]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=known, metavar="NAME", help="one of " + ", ".join(known))
    parser.add_argument("folder", type=Path, nargs="?", metavar="PTX-FOLDER", help="of a tutorial's PTX")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--patience", type=float, default=0.5, help="seconds that a kernel may stand still")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a run is given up, and caught")
    parser.add_argument(
        "--lines", type=int, nargs="+", help="only the mutants in these lines of the PTX, as a table names them"
    )
    parser.add_argument(
        "--races", choices=("hardware", "specified"), help="accesses that nothing orders are failures too"
    )
    options = parser.parse_args(arguments)
    if options.name in compiled and options.folder is None:
        parser.error(f"{options.name} wants the folder of its PTX")
    run, sites = subject(options.name, options.folder)
    runs = [replace(each, patience_seconds=options.patience) for each in mutation.RUNS if each.seed <= options.seeds]
    if options.races:
        runs = [replace(each, races=options.races) for each in runs]
    for settings in runs:
        assert run(settings) == 0, settings
    run = apart(run, options.limit)
    started, verdicts = time.monotonic(), []
    print("| taken away | eager | lazy | random |\n| --- | --- | --- | --- |")
    for site in sites:
        if options.lines is not None and site.line not in options.lines:
            continue
        found = mutation.survey(run, [site], runs)
        verdicts += found
        if found:
            cells = " | ".join(verdict.how or "-" for verdict in found)
            print(f"| {site.mutation}: `{site.text[:60]}` (line {site.line}) | {cells} |", flush=True)
    print(mutation.shares(verdicts), f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
