"""Work in a few processes that outlive it, where work may never come back.

A kernel that faults leaves its process without a GPU, and one that hangs leaves it without hope: what a process had in
hand then counts as failed, and another process takes its place for what is left.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from ..errors import CupymlaError

Work = TypeVar("Work")
Result = TypeVar("Result")

_TO_END_SECONDS = 10.0


class Lost(CupymlaError):
    """Work whose process hung, ended, or said that it is of no more use."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process says of one piece of work: its result, or what it raised and whether the process goes on."""

    result: Any
    raised: Exception | None
    goes_on: bool


def _serve(connection: Connection, do: Callable[[Any], Any], harmless: tuple[type[Exception], ...]) -> None:
    """Do what comes until nothing more does, or until `do` raises what is not harmless."""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            work = connection.recv()
            try:
                answer = Answer(do(work), None, True)
            except harmless as error:
                answer = Answer(None, error, True)
            except Exception as error:
                # Not the error itself: it may not be one that can be sent.
                answer = Answer(None, Lost(f"{type(error).__name__}: {error}"), False)
            connection.send(answer)
            if not answer.goes_on:
                return


class _Process:
    """One process, started when it first has something to do, and again after it was lost."""

    def __init__(self, do: Callable[[Any], Any], harmless: tuple[type[Exception], ...]) -> None:
        self._do = do
        self._harmless = harmless
        self._process: Any = None
        self._connection: Connection | None = None

    def result(self, work: Any, seconds: float | None) -> Any:
        connection = self._connected()
        try:
            connection.send(work)
            if not connection.poll(seconds):
                self.end()
                raise Lost(f"did not come back within {seconds:g} s")
            answer: Answer = connection.recv()
        except (EOFError, OSError) as error:
            code = self._ended()
            raise Lost(f"its process ended with exit status {code}") from error
        if not answer.goes_on:
            self.end()
        if answer.raised is not None:
            raise answer.raised
        return answer.result

    def _connected(self) -> Connection:
        if self._connection is None:
            # Spawned, not forked: a driver that was opened before a fork is of no use after it.
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self._do, self._harmless), daemon=True)
            self._process.start()
            theirs.close()
        return self._connection

    def _ended(self) -> int | None:
        self._process.join(_TO_END_SECONDS)
        code: int | None = self._process.exitcode
        self.end()
        return code

    def end(self) -> None:
        """Let the process end, or make it; without one this does nothing."""
        if self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.join(_TO_END_SECONDS)
            self._process = self._connection = None


class Processes(Generic[Work, Result]):
    """So many processes that do one thing to whatever they are given.

    Args:
        do: a module's function of one argument; it, the argument and what it returns are pickled.
        count: how many processes.
        seconds: how long one piece of work may take, the start of its process included; None: any time.
        harmless: what `do` raises where its process is as good as before.
    """

    def __init__(
        self,
        do: Callable[[Work], Result],
        count: int,
        seconds: float | None,
        harmless: tuple[type[Exception], ...] = (),
    ) -> None:
        self._seconds = seconds
        self._all = [_Process(do, harmless) for _ in range(count)]
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        for process in self._all:
            self._idle.put(process)

    def result(self, work: Work) -> Result:
        """What comes of work, in the first process that is free; to be called from several threads at once.

        Raises what `do` raised, where that is harmless, and Lost for everything else.
        """
        with self._one() as process:
            result: Result = process.result(work, self._seconds)
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
        for process in self._all:
            process.end()
