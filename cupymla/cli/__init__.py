"""The command line: `cupymla doctor | list | demo | precompile | bench | cache`, or `python -m cupymla`.

Importing this module loads next to nothing; a command brings in what it needs when it runs. Exit status: 0 done,
1 something failed or is missing, 2 it cannot be done here (bad arguments, no GPU where one is needed).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .. import __version__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cupymla" if Path(sys.argv[0]).name == "__main__.py" else "cupymla",
        description="Fast attention and low-precision kernels for any array that speaks DLPack.",
    )
    parser.add_argument("--version", action="version", version=f"cupymla {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="print JSON on standard output and nothing else")
        return command

    add("doctor", "Say what this machine has, what it lacks, and what to do about it.")

    listing = add("list", "List operators, their kernels, and the evidence that each kernel is right.")
    listing.add_argument("--markdown", action="store_true", help="print the support table of docs/support.md")

    demo = add("demo", "Run every operator on a problem sized for this machine, check it and time it.")
    demo.add_argument(
        "--out", type=Path, default=Path("demo-output"), help="folder for the plot (default: demo-output)"
    )

    precompile = add("precompile", "Compile kernels into the cache; needs no GPU.")
    precompile.add_argument("operators", nargs="*", metavar="OP", help="default: all")
    precompile.add_argument(
        "--arch", action="append", metavar="SM",
        help="what GPUs of a target run, such as sm_90a; repeatable (default: all targets)",
    )  # fmt: skip
    precompile.add_argument(
        "--define", action="append", default=[], metavar="NAME=VALUE",
        help="only variants with this definition, as the table names it; repeatable",
    )  # fmt: skip
    precompile.add_argument(
        "--shared", action="store_true",
        help="let others read the folder of CUPYMLA_CACHE_DIR, for their CUPYMLA_READONLY_CACHE",
    )  # fmt: skip
    precompile.add_argument("--jobs", type=int, metavar="N", help="compiler processes (default: one per core)")

    bench = add("bench", "Time operators on this machine's GPU against ceilings measured in the same run.")
    bench.add_argument("operators", nargs="*", metavar="OP", help="default: every operator with a kernel for this GPU")
    bench.add_argument("--case", action="append", default=[], metavar="NAME", help="only this case; nothing is written")
    bench.add_argument("--out", type=Path, metavar="FOLDER", help="write FOLDER/<gpu>/<op>.json and .png")
    bench.add_argument("--commit", metavar="HASH", help="the commit to record (default: ask git)")
    bench.add_argument(
        "--limit", type=float, default=300.0, metavar="SECONDS",
        help="how long a case may take before its row is left out and the next one is timed (default: 300)",
    )  # fmt: skip
    bench.add_argument(
        "--baselines", type=Path, metavar="FILE.py", help="time what this file has beside (docs/baselines.md)"
    )
    bench.add_argument("--host", action="store_true", help="time the host's part of a call instead")
    cache = commands.add_parser("cache", help="Look at or clear the cache of compiled kernels.")
    actions = cache.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("ls", "List the compiled kernels."),
        ("clear", "Remove them from the cache folder; read-only layers stay."),
        ("path", "Print the cache folder."),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("--json", action="store_true", help="print JSON on standard output and nothing else")
    return parser


def run() -> NoReturn:
    """What the installed command `cupymla` and `python -m cupymla` call: a command, then the end of the process."""
    from .terminal import exit_with

    exit_with(main)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, or print the help where none is named; returns the exit status.

    Args:
        arguments: the words after the program's name; None takes them from the process.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    from ..errors import CupymlaError, InputError, UnsupportedError
    from .commands import COMMANDS
    from .terminal import Terminal

    try:
        return COMMANDS[options.command](options)
    except CupymlaError as error:
        print(f"error: {error}", file=sys.stderr)
        Terminal(options.json).json({"error": str(error)})
        return 2 if isinstance(error, InputError | UnsupportedError) else 1
