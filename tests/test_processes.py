"""Work in processes: what hangs, ends or gives up its process fails alone, and what is left gets another process."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cupymla.testing.processes import Lost, Processes


class Harmless(Exception):
    """What the work below raises where its process is as good as before."""


class CannotTravel(Exception):
    """An error that pickle makes nothing of: it takes more than a message."""

    def __init__(self, message: str, more: int) -> None:
        super().__init__(message)
        self.more = more


def work(what: str) -> tuple[str, int]:
    """Do as told; otherwise what was told, and in which process."""
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


def test_a_process_stays_while_nothing_is_wrong_with_it() -> None:
    with Processes(work, 1, 60, (Harmless,)) as processes:
        said, first = processes.result("one")
        assert said == "one" and first != os.getpid()
        with pytest.raises(Harmless, match=f"^{first}$"):
            processes.result("harmless")
        assert processes.result("two") == ("two", first)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", "^CannotTravel: no GPU any more$"),
        ("killed", "exit status -9"),
        ("exit", "exit status 3"),
    ],
)
def test_lost_work_costs_its_process_alone(what: str, message: str) -> None:
    with Processes(work, 1, 60, (Harmless,)) as processes:
        _, first = processes.result("one")
        with pytest.raises(Lost, match=message):
            processes.result(what)
        said, second = processes.result("two")
        assert said == "two" and second != first


def test_what_hangs_is_ended() -> None:
    with Processes(work, 1, 60, (Harmless,)) as processes:
        _, first = processes.result("one")
        processes._seconds = 0.5
        with pytest.raises(Lost, match=r"did not come back within 0\.5 s"):
            processes.result("hang")
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        processes._seconds = 60
        assert processes.result("two")[0] == "two"


def test_threads_share_processes_and_none_outlives_the_block() -> None:
    with Processes(work, 2, 60, (Harmless,)) as processes, ThreadPoolExecutor(6) as threads:
        found = list(threads.map(processes.result, [str(number) for number in range(12)]))
    assert [said for said, _ in found] == [str(number) for number in range(12)]
    used = {process for _, process in found}
    assert 1 <= len(used) <= 2
    for process in used:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
