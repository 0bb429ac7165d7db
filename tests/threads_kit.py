"""Work in threads of its own, whose failures are the test's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable


def in_threads(works: Iterable[Callable[[], object]]) -> None:
    """Run each in a new thread, all at once; raise what the first to fail raised."""
    failures: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
