"""The demonstration of a checkout: the product's and, without a GPU, a kernel for Blackwell in the engine.

    python -m cupymla_lab demo [--out FOLDER] [--json]      what scripts/demo starts

With --json, standard output has the product's JSON alone. The exit status is 1 where either part went wrong.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence

from cupymla import cli, driver
from cupymla.build import compiler
from cupymla.cli import demo as product
from cupymla.cli.terminal import exit_with
from cupymla.errors import CupymlaError

from .emulate import Settings
from .emulate.host import machine
from .emulated import emulated
from .subjects import Subject

OPERATOR = product.COMPILED
CASE = "h128_d576_k256_q2_kv1000"
"""Two queries, run by the very kernel that the product's part has compiled."""

MULTIPROCESSORS = 4
"""Of the GPU that is emulated: two pairs of CTAs, one for each query."""

NEEDED = "x86-64 and a C++ compiler: one called c++ (Debian, Ubuntu: sudo apt install g++), or pip install ziglang"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 where all went well, 2 for bad arguments."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    status = cli.main(["demo", *words])
    if status == 2 or driver.available():
        return status
    with contextlib.redirect_stdout(sys.stderr) if "--json" in words else contextlib.nullcontext():
        print(flush=True)
        return status or run_in_engine()


def run_in_engine() -> int:
    """Run the case, and say how it went; 0 as well where this machine lacks what that takes."""
    arch = product.ELSEWHERE.arch.name
    what = f"{OPERATOR} for {arch} on this machine's processor"
    if not machine.available():
        print(f"not run: {what}: it needs {NEEDED}")
        return 0
    try:
        compiler.toolchain()
    except CupymlaError as error:
        print(f"not run: {what}: {error}")
        return 0
    print(f"{what}; the first run compiles the engine, for about a minute:", flush=True)
    subject = Subject(OPERATOR)
    (case,) = subject.those(subject.cases.CASES, [CASE])
    start = time.monotonic()
    with emulated(arch, MULTIPROCESSORS, Settings("random", seed=1)) as made:
        reports = tuple(made.check(OPERATOR, case))
    seconds = time.monotonic() - start
    shown = product.Shown(OPERATOR, f"emulated {arch}", CASE, CASE, seconds * 1e3, reports)
    verdict = "ok" if shown.passed else "WRONG"
    threads = sum(launch.grid[0] * launch.block for launch in made.launches)
    print(f"  {CASE}: {threads} threads, {seconds:.0f} s in all, error {shown.share:.0%} of its limit, {verdict}")
    for text in shown.failures:
        print(f"  {text}")
    return 0 if shown.passed else 1


if __name__ == "__main__":
    exit_with(main)
