"""Work in processes: what hangs, ends or gives up its process fails alone, and what is left gets another process."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from process_work import CannotBeRead, Harmless, work

from cupymla.bench.processes import Lost, Processes, status_of
from cupymla.errors import InputError

ROOT = Path(__file__).resolve().parents[1]


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


def alive(process: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(true: Callable[[], bool], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "this takes too long"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("harmless but cannot travel", "^HarmlessButCannotTravel: wrong numbers$"),
        ("cannot be sent", "its result cannot be sent: .*lambda"),
        ("cannot be read", "its result cannot be read: RuntimeError: no such thing here"),
    ],
)
def test_what_cannot_be_pickled_is_lost_alone(what: str, message: str) -> None:
    with Processes(work, 1, 60, (Harmless,)) as processes:
        _, first = processes.result("one")
        with pytest.raises(Lost, match=message):
            processes.result(what)
        assert processes.result("two") == ("two", first)


def test_work_that_cannot_be_sent_or_read_costs_nothing_else() -> None:
    with Processes(work, 1, 60) as processes:
        with pytest.raises((pickle.PicklingError, AttributeError)):
            processes.result(lambda: None)
        with pytest.raises(Lost, match="RuntimeError: no such thing here"):
            processes.result(CannotBeRead())
        assert processes.result("two")[0] == "two"


@pytest.mark.usefixtures("signals_heard")
def test_an_interrupted_wait_leaves_no_answer_to_other_work() -> None:
    """Ctrl-C that a caller survives: the next answer is that of the next work."""
    with Processes(work, 1, 60) as processes:
        processes.result("one")
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            processes.result("a moment")
        assert processes.result("two")[0] == "two"


def test_a_process_that_cannot_be_started_is_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Processes(work, 1, 60) as processes:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/no such interpreter")
            for _ in range(2):
                with pytest.raises(Lost, match=r"could not be started: .*no such interpreter"):
                    processes.result("one")
        assert processes.result("two")[0] == "two"


@pytest.mark.parametrize("seconds", [1e9, float("inf"), None])
def test_any_limit_can_be_waited_for(seconds: float | None) -> None:
    with Processes(work, 1, seconds) as processes:
        assert processes.result("one")[0] == "one"


@pytest.mark.parametrize(("count", "seconds"), [(0, 1), (-1, 1), (1, 0), (1, -1), (1, float("nan"))])
def test_no_processes_and_no_time_are_refused(count: int, seconds: float) -> None:
    with pytest.raises(InputError):
        Processes(work, count, seconds)


def test_a_child_of_a_process_that_ended_neither_hides_that_nor_outlives_it() -> None:
    with Processes(work, 1, 60) as processes:
        processes.result("one")
        group = processes._all[0]._process
        assert group is not None
        start = time.monotonic()
        with pytest.raises(Lost, match="ended with exit status 4"):
            processes.result("leave a child")
        assert time.monotonic() - start < 30
        wait_until(lambda: not members(group.pid))


def members(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z" and int(fields[2]) == group:
            found.append(int(folder.name))
    return found


def test_nothing_begins_after_the_block_and_what_runs_is_cut_off() -> None:
    with ThreadPoolExecutor(4) as threads:
        with Processes(work, 2, 60) as processes:
            first = {threads.submit(processes.result, number).result()[1] for number in range(4)}
            waiting = [threads.submit(processes.result, "hang") for _ in range(4)]
            time.sleep(0.5)
            start = time.monotonic()
        assert time.monotonic() - start < 10
        for lost in waiting:
            with pytest.raises(Lost, match="cut off"):
                lost.result(10)
        with pytest.raises(Lost, match="cut off"):
            processes.result("three")
    assert not [process for process in first if alive(process)]


def in_script(body: str, tmp_path: Path, how: str, **others: Any) -> subprocess.Popen[str]:
    """A script that names the work, without a guard of `__main__`."""
    text = f"from cupymla.bench.processes import Processes\nfrom process_work import *\n{body}"
    (tmp_path / "script.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "tests"), str(ROOT)))}
    words = {"file": [str(tmp_path / "script.py")], "-c": ["-c", text], "input": ["-"]}[how]
    started = subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE if how == "input" else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
        **others,
    )
    if how == "input":
        assert started.stdin is not None
        started.stdin.write(text)
        started.stdin.close()
        started.stdin = None
    return started


SAYS = """
with Processes(work, 1, 60) as processes:
    for what in ("say", "two"):
        print(processes.result(what)[0])
"""


@pytest.mark.parametrize("how", ["file", "-c", "input"])
def test_any_caller_will_do_and_its_output_is_its_own(how: str, tmp_path: Path) -> None:
    said, errors = in_script(SAYS, tmp_path, how).communicate(timeout=60)
    assert said == "say\ntwo\n", errors
    assert errors.startswith("said by the work\n") and len(errors) > 1_000_000


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_standard_files_may_be_closed(closed: tuple[int, ...], tmp_path: Path) -> None:
    body = SAYS.replace('"say"', '"one"').replace("print", f"open({str(tmp_path / 'said')!r}, 'a').write")

    def close() -> None:
        for each in closed:
            os.close(each)

    started = in_script(body, tmp_path, "file", preexec_fn=close)
    started.communicate(timeout=60)
    assert (tmp_path / "said").read_text() == "onetwo"


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_with_the_one_that_started_them(by: signal.Signals, tmp_path: Path) -> None:
    """However it ends, and although they hang."""
    body = (
        "with Processes(work, 1, None) as processes:\n"
        "    print(processes.result('one')[1], flush=True)\n"
        "    processes.result('hang')\n"
    )
    started = in_script(body, tmp_path, "file")
    assert started.stdout is not None
    worker = int(started.stdout.readline())
    assert alive(worker)
    started.send_signal(by)
    started.communicate(timeout=60)
    wait_until(lambda: not alive(worker))


def test_a_command_that_does_not_come_back_leaves_nothing_behind(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]
    never = threading.Event()
    with log.open("w") as output:
        assert status_of(["sh", "-c", "echo there; exit 3"], output, 60, never) == 3
        with pytest.raises(Lost, match="did not come back within 1 s"):
            status_of(command, output, 1, never)
    said, child = log.read_text().split()
    assert said == "there"
    wait_until(lambda: not alive(int(child)))
    over = threading.Event()
    threading.Timer(0.5, over.set).start()
    with log.open("w") as output:
        for _ in range(2):
            with pytest.raises(Lost, match="cut off"):
                status_of(command, output, 60, over)
    wait_until(lambda: not alive(int(log.read_text())))
