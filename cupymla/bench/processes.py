"""Work in a few processes that outlive it, where work may never come back.

A kernel that faults leaves its process without a GPU, and one that hangs leaves it without hope: what a process had in
hand then counts as failed, and another process takes its place for what is left.

A worker is a plain interpreter that is told over a socket what to do; unlike multiprocessing's it needs nothing of the
caller's `__main__`. It leads a process group of its own, so that the compilers it runs end with it, and it ends when
the process that started it does, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Generic, NoReturn, TypeVar

from ..errors import CupymlaError, InputError

Work = TypeVar("Work")
Result = TypeVar("Result")

_WORKER = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); import cupymla.bench.processes as p; p.serve()"
_CUT_OFF = "cut off before it came back"
_TO_END_SECONDS = 10.0
_SLICE_SECONDS = 0.2
"""How long a wait goes on before it looks whether there is still something to wait for."""


class Lost(CupymlaError):
    """Work whose process hung, ended, or said that it is of no more use."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process says of one piece of work: its result, or what it raised and whether the process goes on."""

    result: Any
    raised: Exception | None
    goes_on: bool


# In the worker -------------------------------------------------------------------------------------------------------


def serve() -> None:
    """Do what comes over standard input, a socket, until nothing more does, or until its process is of no more use."""
    # Beyond the standard ones, which may be closed.
    connection = Connection(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    with contextlib.suppress(OSError):
        # Standard output is for what the command says, which may be JSON.
        os.dup2(2, 1)
    threading.Thread(target=_end_with_starter, args=(connection.fileno(),), daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):
        told = connection.recv_bytes()
        while True:
            work = connection.recv_bytes()
            answer = _answer(told, work)
            connection.send_bytes(_pickled(answer))
            if not answer.goes_on:
                return


def _end_with_starter(descriptor: int) -> None:
    """End this process, and what it runs, when the other end of the connection is gone."""
    ended = select.poll()
    ended.register(descriptor, 0)
    ended.poll()
    os.killpg(0, signal.SIGKILL)


def _answer(told: bytes, work: bytes) -> Answer:
    harmless: tuple[type[Exception], ...] = ()
    try:
        do, harmless = pickle.loads(told)
        return Answer(do(pickle.loads(work)), None, True)
    except harmless as error:
        return Answer(None, error if _travels(error) else _lost(error), True)
    except Exception as error:
        return Answer(None, _lost(error), False)


def _lost(error: Exception) -> Lost:
    """What stands for an error that may not be one that can be sent."""
    return Lost(f"{type(error).__name__}: {error}")


def _travels(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


def _pickled(answer: Answer) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as error:
        return pickle.dumps(Answer(None, Lost(f"its result cannot be sent: {_lost(error)}"), answer.goes_on))


# Beside it -----------------------------------------------------------------------------------------------------------


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and what it has started."""
    # Where it was not waited for yet, so that the number is still its own.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and what it has started, and wait for it."""
    _kill(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_TO_END_SECONDS)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has, by itself; leaves it to be waited for."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """A block that SIGTERM and SIGHUP end as an exception does, so that it ends what it has started.

    For one that mostly waits. It does nothing outside of the main thread, which alone is told of signals, nor of a
    signal that something else has been made of.
    """

    def end(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    told: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        told = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for each in told:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in told:
            signal.signal(each, signal.SIG_DFL)


def status_of(command: Sequence[str], output: IO[str], seconds: float, over: threading.Event) -> int:
    """Run a command; returns its exit status.

    Args:
        command: the program and its arguments.
        output: what it writes, errors too, goes into this file.
        seconds: how long it may take.
        over: when it is set, the command is ended.

    Raises:
        Lost: it did not come back in time, or was ended; nothing that it started is left.
        OSError: it could not be started.
    """
    if over.is_set():
        raise Lost(_CUT_OFF)
    with ended_in_order():
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            until = time.monotonic() + seconds
            while not _has_ended(process):
                if over.wait(0.05):
                    raise Lost(_CUT_OFF)
                if time.monotonic() >= until:
                    raise Lost(_late(seconds))
        finally:
            _end(process)
    return process.returncode


def _late(seconds: float) -> str:
    return f"did not come back within {seconds:g} s"


class _Process:
    """One process, started when it first has something to do, and again after it was lost."""

    def __init__(self, told: bytes, over: threading.Event) -> None:
        self._told = told
        self._over = over
        self._in_use = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def result(self, work: bytes, seconds: float) -> Any:
        with self._in_use:
            try:
                answer = self._exchanged(work, seconds)
            except BaseException:
                # Whatever it was: an answer that comes later would be taken for that of other work.
                self._stop()
                raise
            if not answer.goes_on:
                self._stop()
        if answer.raised is not None:
            raise answer.raised
        return answer.result

    def end(self) -> None:
        """End the process, if there is one; `over` is set, so that there will be no other. For any thread."""
        process = self._process
        if process is not None:
            _kill(process)
        with self._in_use:
            self._stop()

    def _exchanged(self, work: bytes, seconds: float) -> Answer:
        until = time.monotonic() + seconds
        if self._over.is_set():
            raise Lost(_CUT_OFF)
        try:
            process, connection = self._connected()
            connection.send_bytes(work)
            if not self._answers(process, connection, until):
                raise Lost(_late(seconds))
            said = connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise Lost(_CUT_OFF if self._over.is_set() else self._how_it_ended(error)) from error
        try:
            answer: Answer = pickle.loads(said)
        except Exception as error:
            return Answer(None, Lost(f"its result cannot be read: {_lost(error)}"), True)
        return answer

    def _answers(self, process: subprocess.Popen[bytes], connection: Connection, until: float) -> bool:
        """Wait for an answer; whether there was one in time. Raises Lost and EOFError where there will be none."""
        while True:
            left = until - time.monotonic()
            if connection.poll(max(0.0, min(left, _SLICE_SECONDS))):
                return True
            if self._over.is_set():
                raise Lost(_CUT_OFF)
            if left <= 0:
                return False
            # What it has forked may hold the connection open.
            if _has_ended(process) and not connection.poll(0):
                raise EOFError

    def _connected(self) -> tuple[subprocess.Popen[bytes], Connection]:
        if self._process is None or self._connection is None:
            path = json.dumps([str(Path(__file__).resolve().parents[2]), *sys.path])
            ours, theirs = socket.socketpair()
            with theirs:
                self._connection = Connection(ours.detach())
                # Spawned, not forked: a driver that was opened before a fork is of no use after it.
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _WORKER, path], stdin=theirs.fileno(), start_new_session=True
                )
            self._connection.send_bytes(self._told)
        return self._process, self._connection

    def _how_it_ended(self, error: Exception) -> str:
        process = self._process
        if process is None:
            return f"its process could not be started: {error}"
        until = time.monotonic() + _TO_END_SECONDS
        while not _has_ended(process):
            if time.monotonic() > until:
                return "its process stopped listening"
            time.sleep(0.01)
        self._stop()
        return f"its process ended with exit status {process.returncode}"

    def _stop(self) -> None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is not None:
            _end(process)
        if connection is not None:
            connection.close()


class Processes(Generic[Work, Result]):
    """So many processes that do one thing to whatever they are given.

    Args:
        do: a module's function of one argument, not one of `__main__`; it, the argument and what it returns are
            pickled.
        count: how many processes.
        seconds: how long one piece of work may take, the start of its process included; None: any time.
        harmless: what `do` raises where its process is as good as before.

    Attributes:
        over: set at the end of the block; what has not come back by then, or begins after it, is Lost.

    Raises:
        InputError: there is to be no process, or no time.
    """

    def __init__(
        self,
        do: Callable[[Work], Result],
        count: int,
        seconds: float | None,
        harmless: tuple[type[Exception], ...] = (),
    ) -> None:
        if count < 1:
            raise InputError("count", "at least 1", count)
        if seconds is not None and not seconds > 0:
            raise InputError("seconds", "a number above 0", seconds)
        self.over = threading.Event()
        self._seconds = math.inf if seconds is None else seconds
        told = pickle.dumps((do, harmless))
        self._all = [_Process(told, self.over) for _ in range(count)]
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        for process in self._all:
            self._idle.put(process)

    def result(self, work: Work) -> Result:
        """What comes of work, in the first process that is free; to be called from several threads at once.

        Raises what `do` raised, where that is harmless and can be pickled, Lost for everything else that befalls it,
        and what pickling the work raises.
        """
        told = pickle.dumps(work)
        with self._one() as process:
            result: Result = process.result(told, self._seconds)
            return result

    @contextlib.contextmanager
    def _one(self) -> Iterator[_Process]:
        process = self._idle.get()
        try:
            yield process
        finally:
            self._idle.put(process)

    def __enter__(self) -> Processes[Work, Result]:
        return self

    def __exit__(self, *raised: object) -> None:
        self.over.set()
        for process in self._all:
            process.end()
