"""What tests have done in processes of their own, which start quickly: they import no more than this."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any


class Harmless(Exception):
    """What the work below raises where its process is as good as before."""


class CannotTravel(Exception):
    """An error that pickle makes nothing of: it takes more than a message."""

    def __init__(self, message: str, more: int) -> None:
        super().__init__(message)
        self.more = more


class HarmlessButCannotTravel(Harmless, CannotTravel):
    """The two in one."""


class CannotBeRead:
    """What can be sent, and not be read."""

    def __reduce__(self) -> Any:
        return _cannot, ()


def _cannot() -> None:
    raise RuntimeError("no such thing here")


def work(what: Any) -> Any:
    """Do as told; otherwise what was told, and in which process."""
    if what == "harmless but cannot travel":
        raise HarmlessButCannotTravel("wrong numbers", 2)
    if what == "cannot be sent":
        return lambda: None
    if what == "cannot be read":
        return CannotBeRead()
    if what == "say":
        print("said by the work", flush=True)
        print("x" * 1_000_000, file=sys.stderr, flush=True)
    if what == "leave a child":
        if os.fork() == 0:
            time.sleep(600)
        os._exit(4)
    if what == "a moment":
        time.sleep(2)
    if what == "hang":
        time.sleep(600)
    if what == "harmless":
        raise Harmless(f"{os.getpid()}")
    if what == "raise":
        raise CannotTravel("no GPU any more", 2)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        os._exit(3)
    return what, os.getpid()
