"""What a command shows: tables and progress bars by rich where it is installed, plain text where it is not."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

PLAIN_WIDTH = 140
TEXT_WIDTH = 80

LEAST_TEXT = 12
"""Characters of a column of text that are left to it before names are broken over lines for its sake."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells give it to a program that SIGINT ended."""


def exit_with(command: Callable[[], int]) -> NoReturn:
    """End the process with a command's status.

    With 1, in silence, where whoever reads its output has seen enough; with 130 and a word after Ctrl-C.
    """
    try:
        try:
            status = command()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more on its way out, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED
    sys.exit(status)


def have_rich() -> bool:
    """Whether rich is installed."""
    return importlib.util.find_spec("rich") is not None


def _plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]
    table = (columns, ["-" * width for width in widths], *rows)
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
    return "\n".join([title, *lines])


def _whole_columns(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> set[int]:
    """Columns of single words that keep their width: the narrowest first, as long as the others have room for text."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    words = [i for i, cells in enumerate(zip(columns, *rows, strict=True)) if not any(" " in cell for cell in cells)]
    kept: set[int] = set()
    room = width - 3 * len(columns) - 1 - sum(min(size, LEAST_TEXT) for size in widths)
    for index in sorted(words, key=lambda i: widths[i]):
        room -= max(0, widths[index] - LEAST_TEXT)
        if room < 0:
            break
        kept.add(index)
    return kept


class Terminal:
    """Where a command writes. With `as_json`, standard output gets the JSON alone; progress goes to standard error."""

    def __init__(self, as_json: bool) -> None:
        self._silent = as_json

    def json(self, content: Any) -> None:
        """Print JSON, when that was asked for."""
        if self._silent:
            print(json.dumps(content, indent=2, default=str))

    def line(self, text: str = "") -> None:
        """Print a line, unless JSON was asked for."""
        if not self._silent:
            print(text, flush=True)

    def paragraph(self, text: str, first: str = "") -> None:
        """Print text in lines of at most 80 columns behind `first`, unless JSON was asked for.

        Words that are longer, such as paths, stay whole.
        """
        lines = textwrap.wrap(
            text,
            TEXT_WIDTH,
            initial_indent=first,
            subsequent_indent=" " * len(first),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines or [first.rstrip()]:
            self.line(line)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table, unless JSON was asked for."""
        if self._silent:
            return
        cells = [[str(cell) for cell in row] for row in rows]
        if not have_rich():
            print(_plain_table(title, columns, cells) + "\n", flush=True)
            return
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console()
        if not console.is_terminal:
            console = Console(width=PLAIN_WIDTH)
        whole = _whole_columns(columns, cells, console.width)
        table = Table(title=escape(title), title_justify="left")
        for index, column in enumerate(columns):
            # What does not fit goes on in the next line: rich would cut it off, and names differ at their ends.
            table.add_column(escape(column), overflow="fold", no_wrap=index in whole)
        for row in cells:
            table.add_row(*map(escape, row))
        console.print(table)

    @contextmanager
    def progress(self, what: str, total: int, *, begins: bool = False) -> Iterator[Callable[[str], None]]:
        """A progress bar on standard error. The value is called with a name when that step is done, or `begins`."""
        if have_rich() and sys.stderr.isatty():
            with _rich_progress(what, total, begins) as step:
                yield step
            return
        count = 0

        def say(name: str) -> None:
            nonlocal count
            count += 1
            print(f"{what} {count}/{total}: {name}", file=sys.stderr, flush=True)

        yield say


@contextmanager
def _rich_progress(what: str, total: int, begins: bool) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=20),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        # The name of a kernel is longer than a terminal is wide; it gets what the others leave.
        TextColumn("{task.fields[name]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    )
    # What is printed meanwhile goes above the bar where both are seen, and nowhere but to standard output elsewhere.
    above = sys.stdout.isatty()
    with Progress(*columns, console=Console(stderr=True), expand=True, redirect_stdout=above) as bar:
        task = bar.add_task(what, total=total, name="")
        called = 0

        def step(name: str) -> None:
            nonlocal called
            called += 1
            bar.update(task, completed=called - begins, name=name)

        yield step
        bar.update(task, completed=total, name="")
