"""`python -m cupymla_lab COMMAND ...`: the laboratory's commands, each a module of its own with its own options."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from cupymla.cli.terminal import Terminal, exit_with
from cupymla.errors import CupymlaError, InputError, UnsupportedError

COMMANDS = {
    "demo": ("demo", "show the operators, and a Blackwell kernel in the engine"),
    "emulate": ("emulate.command", "translate PTX, and run it on a Hopper GPU or on the host's processor"),
    "without-gpu": ("without_gpu", "run operators' cases in an engine, and write evidence"),
    "gpu": ("gpu", "run operators' cases on a GPU, with repetitions and sanitizers, and write evidence"),
    "gpu-tests": ("gpu_tests", "run the tests that need a GPU, and record what came of them"),
    "same-code": ("same_code", "keep evidence of kernels whose machine code is that of the sources that ran"),
    "machine-code": ("machine_code", "registers, spills and SASS of kernels, beside those of another folder"),
    "ab": ("ab", "time kernels of two folders, or two values of a constant, in turn"),
    "backward-paths": ("backward_paths", "time every path of sparse_mla_bwd's plan, in turn"),
    "profile": ("profile", "read hardware counters of benchmark cases with Nsight Compute"),
    "power": ("power", "measure what calls cost in energy"),
    "variance": ("variance", "compare gradients from run to run"),
    "training-step": ("training_step", "time a training step of a DSA layer"),
    "models": ("models", "time transformers' models alone and with cupymla"),
    "scaling": ("scaling", "time sparse attention over several GPUs"),
    "pages": ("pages", "renew the generated parts of the documentation"),
    "stubs": ("stubs", "write what editors and type checkers read of the public functions"),
}


def usage() -> str:
    """The commands, a line each."""
    rows = [f"  {name:14} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: python -m cupymla_lab COMMAND ...", "", *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its status: 2 for bad arguments or a machine that cannot do it."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] not in COMMANDS:
        print(f"unknown command {words[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    module = import_module(f"cupymla_lab.{COMMANDS[words[0]][0]}")
    try:
        return int(module.main(words[1:]))
    except CupymlaError as error:
        print(f"error: {error}", file=sys.stderr)
        Terminal("--json" in words).json({"error": str(error)})
        return 2 if isinstance(error, InputError | UnsupportedError) else 1


if __name__ == "__main__":
    exit_with(main)
