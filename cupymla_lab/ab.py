"""Benchmark cases timed with several variants in turn (A/B): kernels as they are here, kernels of another `cuda/`
folder, a constant of the operator's package set otherwise.

What a change to a kernel gives is often less than what a GPU's clock does between two runs. So variants take turns in
one process, and the variation over the rounds stands beside the time.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from cupymla import build
from cupymla.bench import run as measure
from cupymla.bench.timing import Timer
from cupymla.build import Kernel, KernelSource
from cupymla.cli.commands import with_kernels
from cupymla.cli.terminal import Terminal, exit_with
from cupymla.errors import InputError
from cupymla.ops.case import Case
from cupymla.ops.registry import KernelEntry
from cupymla.testing.operators import as_tuple

from .subjects import Subject

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Variant:
    """What a call is prepared with.

    Attributes:
        label: as the table names it.
        applied: makes a block inside which calls are prepared this way.
    """

    label: str
    applied: Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Turns:
    """What one variant took for one case.

    Attributes:
        case: its name.
        variant: the variant's label.
        us: median over the rounds of the median times of each, in microseconds.
        variation: largest less smallest of these, over their median.
        ratio: `us` over that of the first variant.
        same_bits: whether the outputs, and what is written beside them, are those of the first variant, bit by bit.
    """

    case: str
    variant: str
    us: float
    variation: float
    ratio: float
    same_bits: bool


def here() -> Variant:
    """Everything as it is."""
    return Variant("here", contextlib.nullcontext)


def kernels_of(folder: Path, option: str = "--baseline") -> Variant:
    """Kernels compiled from another `cuda/` folder, whose parameter records must be those of this package.

    Raises InputError, in the name of the command's option, for a folder that holds no kernels.
    """
    root = folder.absolute()
    if not any(root.glob("*/*/*.cu")):
        raise InputError(option, "a folder like this project's cuda/", str(folder))

    @contextlib.contextmanager
    def applied() -> Iterator[None]:
        ours = build.kernel

        def kernel(source: KernelSource, device: int) -> Kernel:
            return ours(replace(source, root=str(root)), device)

        with mock.patch.object(build, "kernel", kernel):
            yield

    return Variant(str(folder), applied)


def constant(subject: Subject, setting: str) -> Variant:
    """One constant of the operator's package with another value, such as "plan._MERGE_PAIRS=2".

    Where other modules have taken the constant by its name, they keep the value that it had.

    Raises InputError for what is no such setting.
    """
    place, equals, text = setting.partition("=")
    module_name, _, name = place.rpartition(".")
    wanted = "MODULE.NAME=VALUE, such as plan.LIMIT=8, of a constant of the operator's package"
    if not (equals and module_name and name):
        raise InputError("--set", wanted, repr(setting), subject.name)
    try:
        module = import_module(f"{subject.entry.module}.{module_name}")
        value = ast.literal_eval(text)
    except (ImportError, ValueError, SyntaxError) as error:
        raise InputError("--set", wanted, f"{setting!r} ({error})", subject.name) from error
    known = getattr(module, name, None)
    if name.startswith("__") or not isinstance(known, bool | int | float | str | tuple):
        raise InputError("--set", wanted, f"{setting!r}: {module.__name__} has no constant {name}", subject.name)
    if type(value) is not type(known) and not (type(known) is float and type(value) is int):
        raise InputError("--set", f"a value like {name}, which is {known!r}", repr(setting), subject.name)

    @contextlib.contextmanager
    def applied() -> Iterator[None]:
        with mock.patch.object(module, name, value):
            yield

    return Variant(setting, applied)


def variants(subject: Subject, folders: Sequence[Path], settings: Sequence[str]) -> list[Variant]:
    """Everything as it is, then kernels of other folders, then settings. Raises InputError for what is none."""
    others = [kernels_of(folder) for folder in folders]
    return [here(), *others, *(constant(subject, setting) for setting in settings)]


@contextlib.contextmanager
def constants(subject: Subject, settings: Sequence[str]) -> Iterator[None]:
    """A block in which constants of the operator's package have other values; settings as `constant` takes them."""
    with contextlib.ExitStack() as all_of_them:
        for setting in settings:
            all_of_them.enter_context(constant(subject, setting).applied())
        yield


@contextlib.contextmanager
def chosen(subject: Subject, kernel: KernelEntry, case: Case) -> Iterator[None]:
    """A block in which a kernel runs a case, though its target has another one as well (`CHOICES` of cases).

    What a thread remembers of calls that it made before goes before the choice.
    """
    choice = subject.choice(kernel)
    with constants(subject, choice.settings(case) if choice else ()):
        yield


def prepared(subject: Subject, inputs: dict[str, Any], variant: Variant) -> Any:
    """A prepared call of a variant. What the calling thread remembers of other variants is left alone."""

    def prepare() -> Any:
        with variant.applied():
            return subject.call.prepare(**inputs)

    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(prepare).result()


def same_bits(ours: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two calls gave equal bits. C-contiguous arrays of CuPy or NumPy, and None for what was not asked for."""
    pairs = [(a, b) for a, b in zip(ours, others, strict=True) if a is not None]
    return all(bool((a.reshape(-1).view("uint8") == b.reshape(-1).view("uint8")).all()) for a, b in pairs)


def take_turns(
    subject: Subject, case: Case, inputs: dict[str, Any], variants: Sequence[Variant], timer: Timer, rounds: int
) -> list[Turns]:
    """Time a case's inputs with each variant, in turn, `rounds` times."""
    calls = [prepared(subject, inputs, variant) for variant in variants]
    outputs = []
    for call in calls:
        beside = [inputs[name] for name in subject.written_in(inputs)]
        for array in beside:
            array.fill(0)  # of a cache, too: each variant then writes the same into the same
        outputs.append((*as_tuple(call()), *(array.copy() for array in beside)))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, taken in zip(calls, times, strict=True):
            taken.append(timer.us(call))
    medians = [statistics.median(taken) for taken in times]
    return [
        Turns(
            case=case.name,
            variant=variant.label,
            us=round(us, 2),
            variation=round((max(taken) - min(taken)) / us, 4),
            ratio=round(us / medians[0], 4),
            same_bits=same_bits(outputs[0], output),
        )
        for variant, us, taken, output in zip(variants, medians, times, outputs, strict=True)
    ]


def compare(
    subject: Subject, case: Case, variants: Sequence[Variant], timer: Timer, rounds: int = ROUNDS
) -> list[Turns]:
    """Time a benchmark case on this machine's GPU with each variant; the first is what the others are compared with."""
    import cupy

    found = take_turns(subject, case, subject.cases.inputs(case, 0, cupy), variants, timer, rounds)
    cupy.get_default_memory_pool().free_all_blocks()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Raises InputError and UnsupportedError; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cupymla_lab ab", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("operators", nargs="*", metavar="OP", help="default: every operator with a kernel for this GPU")
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="only this case; repeatable")
    parser.add_argument(
        "--baseline", action="append", default=[], type=Path, metavar="CUDA", help="another cuda/ folder; repeatable"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="MODULE.NAME=VALUE",
        help="another value of a constant of the operator's package, such as plan.LIMIT=8; repeatable",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON on standard output and nothing else")
    options = parser.parse_args(arguments)
    terminal = Terminal(options.json)
    work = []
    for subject in [Subject(entry.name) for entry in with_kernels(options.operators)]:
        others = variants(subject, options.baseline, options.set)
        work += [(subject, case, others) for case in measure.chosen(subject, options.case)]
    timer = Timer()
    found: list[Turns] = []
    with terminal.progress("timed", len(work)) as step:
        for subject, case, others in work:
            found += compare(subject, case, others, timer)
            step(case.name)
    cells = [
        (t.case, t.variant, f"{t.us:.1f}", f"{t.ratio:.3f}", f"{t.variation:.1%}", "equal" if t.same_bits else "differ")
        for t in found
    ]
    columns = ("case", "variant", "us", "over here", "variation of rounds", "bits")
    terminal.table("Variants in turn", columns, cells)
    terminal.json([asdict(turns) for turns in found])
    return 0


if __name__ == "__main__":
    exit_with(main)
