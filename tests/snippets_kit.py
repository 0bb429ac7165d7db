"""The docs' programs, each in a process of its own.

Processes are forked from one that has imported the frameworks and the package, which takes longer than most programs
do, and has the engine compile as tests do. On a machine with a GPU each is an interpreter of its own, as for users.

Run as a program, this is that process: it reads programs from its input as JSON, a line each, and answers in kind.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

import cupymla
from cupymla import driver
from cupymla_lab.emulate.host import library

ROOT = Path(__file__).resolve().parent.parent
FRAMEWORKS: dict[str, tuple[str, ...]] = {
    "numpy": (),
    "torch": ("torch._dynamo", "cupymla.interop.torch"),
    "jax": ("cupymla.interop.jax",),
    "transformers": (),
}
"""With what else of each several programs import."""
GROUP = pytest.mark.xdist_group("snippets")
"""Of tests that run programs: one worker has them all, and one process to fork from."""


def require_success(code: str, **settings: str) -> None:
    """Run a program to its end. `settings` are environment variables, of machines with a GPU."""
    if driver.available():
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **settings}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return
    server = _server()
    assert server.stdin and server.stdout
    server.stdin.write(json.dumps(code) + "\n")
    server.stdin.flush()
    status, told = json.loads(server.stdout.readline())
    assert status == 0, told[-4000:]


@functools.cache
def _server() -> subprocess.Popen[str]:
    """This file as a program."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = subprocess.Popen([sys.executable, __file__], text=True, env=environment, **pipes)  # type: ignore[call-overload]
    made: subprocess.Popen[str] = started
    atexit.register(_end, made)
    return made


def _end(server: subprocess.Popen[str]) -> None:
    """It ends when there are no more programs."""
    server.communicate()


def _forked(code: str) -> tuple[int, str]:
    """The exit status of a program and what it printed, with its traceback."""
    with tempfile.TemporaryFile() as told:
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                for number in (1, 2):
                    os.dup2(told.fileno(), number)
                try:
                    main = type(sys)("__main__")
                    sys.modules["__main__"], sys.argv = main, ["-c"]
                    exec(compile(code, "<program>", "exec"), main.__dict__)
                    atexit._run_exitfuncs()
                    status = 0
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        told.seek(0)
        return status, told.read().decode(errors="replace")


def _serve() -> None:
    for name, others in FRAMEWORKS.items():
        if importlib.util.find_spec(name):
            for module in (name, *others):
                importlib.import_module(module)
    for name in cupymla.__all__:
        getattr(cupymla, name)
    library.OPTIMISATION = "-O0"
    for line in sys.stdin:
        print(json.dumps(_forked(json.loads(line))), flush=True)


if __name__ == "__main__":
    _serve()
