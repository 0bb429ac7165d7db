"""Many kernels compiled ahead of their first use, each by a process of its own.

Compilers run one at a time inside a process, so processes rather than threads. A worker is a plain interpreter that
is told what to compile on its standard input; unlike multiprocessing's it needs nothing of the caller's `__main__`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import config
from ..errors import CupymlaError
from . import folders
from .cubin import Cubin, Resources
from .source import KernelSource, find_cutlass

_WORKER = "import sys, json; sys.path[:0] = json.loads(sys.argv[1]); from cupymla.build.precompile import work; work()"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one kernel.

    Attributes:
        source: what was asked for.
        cached: whether the cache had it already.
        kept: whether the cache has it now.
        seconds: how long its compilation took, whenever that was.
        resources: registers, spills, stack and static shared memory; None when it failed.
        facts: its launch facts.
        error: why it failed, with the compiler's log; empty when it did not.
    """

    source: KernelSource
    cached: bool = False
    kept: bool = False
    seconds: float = 0.0
    resources: Resources | None = None
    facts: dict[str, int] | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether the kernel is compiled."""
        return not self.error

    @property
    def smem_bytes(self) -> int:
        """Static and dynamic shared memory of a block together."""
        static = self.resources.static_smem_bytes if self.resources else 0
        return static + (self.facts or {}).get("smem_bytes", 0)


def check_settings() -> None:
    """Read every setting that a compilation reads, so that a wrong one is one error and not each kernel's.

    Raises InputError for a setting that nothing can be done with.
    """
    config.check()
    folders.layers()
    find_cutlass()


def precompile(
    sources: Iterable[KernelSource],
    jobs: int | None = None,
    progress: Callable[[Outcome], None] | None = None,
    fail_on_spill: bool | None = None,
) -> list[Outcome]:
    """Compile kernels into the cache.

    Args:
        sources: what to compile; duplicates are compiled once.
        jobs: how many processes at most; None for one per usable core.
        progress: called in this thread after each kernel, in the order in which they finish.
        fail_on_spill: as for `build.cubin`.

    Returns:
        One outcome per distinct source, in the order given. A kernel that fails is an outcome, not an exception.
    """
    wanted = list(dict.fromkeys(sources))
    outcomes: dict[KernelSource, Outcome] = {}
    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        try:
            for done in as_completed([pool.submit(_in_worker, source, fail_on_spill) for source in wanted]):
                outcome = done.result()
                outcomes[outcome.source] = outcome
                if progress:
                    progress(outcome)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [outcomes[source] for source in wanted]


def _in_worker(source: KernelSource, fail_on_spill: bool | None) -> Outcome:
    started = time.monotonic()
    path = json.dumps([str(Path(__file__).resolve().parents[2]), *sys.path])
    task = json.dumps({"source": asdict(source), "fail_on_spill": fail_on_spill})
    command = [sys.executable, "-c", _WORKER, path]
    done = subprocess.run(command, input=task, capture_output=True, encoding="utf-8", errors="replace", check=False)
    seconds = time.monotonic() - started
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return Outcome(source, seconds=seconds, error=f"the compiling process died ({done.returncode}): {done.stderr}")
    # Its standard error is not shown, and each worker would say the same.
    for text in answer["warned"]:
        folders.warn_once(text)
    if answer["error"]:
        return Outcome(source, seconds=seconds, error=answer["error"])
    return Outcome(
        source,
        cached=answer["cached"],
        kept=answer["kept"],
        seconds=answer["seconds"],
        resources=Resources(**answer["resources"]),
        facts=answer["facts"],
    )


def work() -> None:
    """Compile the one kernel described on standard input and describe the result on standard output."""
    from . import cubin

    task = json.load(sys.stdin)
    fields: dict[str, Any] = task["source"]
    source = KernelSource(**{**fields, "defines": tuple((name, value) for name, value in fields["defines"])})
    try:
        answer = _described(cubin(source, task["fail_on_spill"]))
    except CupymlaError as error:
        answer = {"error": str(error) or type(error).__name__}
    print(json.dumps({**answer, "warned": folders.warned()}))


def _described(made: Cubin) -> dict[str, Any]:
    return {
        "error": "",
        "cached": made.cached,
        "kept": made.path is not None,
        "seconds": made.seconds,
        "resources": asdict(made.resources),
        "facts": dict(made.facts),
    }
