"""`emulate`: translate a kernel for Blackwell, and run it on a Hopper GPU or on the host's processor."""

from __future__ import annotations

import argparse
import ctypes
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupymla.cli.terminal import Terminal
from cupymla.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np

    from . import Translation

_ALIGNMENT, _GUARD_BYTES, _GUARD = 256, 1 << 16, 0xA5
SCALARS = {"i32": ctypes.c_int32, "u32": ctypes.c_uint32, "i64": ctypes.c_int64, "u64": ctypes.c_uint64}
SCALARS_OF_FLOAT = {"f32": ctypes.c_float, "f64": ctypes.c_double}
CHECKS = ("tcgen05", "proxy", "init")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Raises InputError and UnsupportedError; returns the exit status."""
    name = "python -m cupymla_lab emulate"
    parser = argparse.ArgumentParser(prog=name, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON on standard output and nothing else")
    add_options(parser)
    return emulate(parser.parse_args(arguments))


def add_options(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument("file", type=Path, metavar="KERNEL.ptx", help="PTX text")
    command.add_argument("--entry", metavar="NAME", help="the kernel, where there are several")
    command.add_argument("--out", type=Path, metavar="FOLDER", help="write the translation, and arrays after a run")
    run = command.add_argument_group("running it (docs/emulation.md has an example)")
    run.add_argument("--block", type=int, metavar="N", help="threads per CTA; without it nothing is run")
    run.add_argument("--grid", default="1,1,1", metavar="X,Y,Z", help="CTAs (default: 1,1,1)")
    run.add_argument("--smem", type=int, default=0, metavar="BYTES", help="dynamic shared memory")
    run.add_argument("--cluster", type=int, default=1, metavar="N", help="CTAs per cluster, along x")
    run.add_argument("--arg", action="append", default=[], metavar="SPEC", help="i32:5, f32:0.5, or a file A.npy")
    run.add_argument("--mode", action="append", choices=("eager", "lazy", "random"), help="default: all three")
    run.add_argument("--seed", type=int, default=0, help="of mode random (default: 0)")
    run.add_argument(
        "--without", action="append", default=[], choices=CHECKS, metavar="CHECK",
        help=f"a check to turn off, of {', '.join(CHECKS)}; repeatable",
    )  # fmt: skip
    run.add_argument("--resident-clusters", type=int, default=0, metavar="N", help="that run at a time (default: all)")
    run.add_argument("--on", choices=("gpu", "host"), help="default: a Hopper GPU where there is one")


def emulate(options: argparse.Namespace) -> int:
    """`emulate`."""
    from cupymla.cli.tables import folder_for

    from . import translate
    from .instructions import row_for
    from .loads import early_uses

    terminal = Terminal(options.json)
    try:
        text = options.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("KERNEL.ptx", "a file of text that can be read", f"{options.file} ({error})") from error
    if options.out:
        folder_for("--out", options.out)
    if options.arg and options.block is None:
        raise InputError("--block", "threads per CTA, for a run with these --arg", "none")
    translation = translate(text, str(options.file))
    if options.entry not in (None, *translation.kernels):
        raise InputError("--entry", "one of " + ", ".join(translation.kernels), repr(options.entry))
    rows: Counter[tuple[str, str]] = Counter()
    for site in translation.sites:
        opcode = site.text.split("@", 1)[-1].split(maxsplit=1)[1] if site.text.startswith("@") else site.text
        row = row_for(opcode.split()[0].rstrip(";"), opcode.count(",") + 1)
        rows[(row.name, row.how) if row else ("the end of a thread", "observed")] += 1
    if options.out:
        (options.out / f"{options.file.stem}.sm_90a.ptx").write_text(translation.text, encoding="utf-8")
    terminal.table("Translated", ("instruction", "how", "times"), [(*key, str(n)) for key, n in rows.items()])
    early = early_uses(text, str(options.file))
    for use in early:
        terminal.line(f"line {use.line} uses {use.register} before tcgen05.wait::ld: {use.instruction}")
    results = _run(options, terminal, translation, text) if options.block is not None else []
    sites = [asdict(site) for site in translation.sites]
    uses = [asdict(use) for use in early]
    terminal.json({"kernels": translation.kernels, "sites": sites, "early_uses": uses, "runs": results})
    return 0 if all(result["error"] is None for result in results) else 1


def _run(options: argparse.Namespace, terminal: Terminal, translation: Translation, text: str) -> list[dict[str, Any]]:
    from cupymla import driver
    from cupymla.errors import DriverError
    from cupymla.launch import Geometry

    from . import MODES, EmulationError, HostError, Settings
    from .run import fitting_machine

    where = options.on or fitting_machine()
    entry = options.entry or (translation.kernels[0] if len(translation.kernels) == 1 else None)
    if entry is None:
        raise InputError("--entry", "one of " + ", ".join(translation.kernels), None)
    if where == "gpu" and not driver.available():
        raise UnsupportedError("running on a GPU", "this machine, which has none", "--on host")
    try:
        x, y, z = (int(part) for part in options.grid.split(","))
    except ValueError as error:
        raise InputError("--grid", "three numbers, such as 4,1,1", options.grid) from error
    geometry = Geometry((x, y, z), options.block, options.smem, options.cluster)
    checks = tuple(check for check in CHECKS if check not in options.without)
    machine = _Machine(where, translation, text, entry, options.block)
    results = []
    first: tuple[str, list[Any]] | None = None
    for mode in options.mode or MODES:
        outcome = None
        arguments = [_argument(spec) for spec in options.arg]
        try:
            resident = options.resident_clusters
            settings = Settings(mode, options.seed, checks, resident_clusters=resident)  # type: ignore[arg-type]
            outcome = machine.run(geometry, arguments, settings)
            if outcome is None:
                first = first or (mode, arguments)
                outcome = _difference(*first, arguments)
        except (EmulationError, HostError, DriverError) as failure:
            outcome = str(failure)
        results.append({"mode": mode, "on": where, "error": outcome})
        terminal.line(f"{mode} on the {where}: {outcome or 'no failure'}")
        if options.out:
            _save(options.out, mode, options.arg, arguments)
    return results


def _difference(mode: str, wanted: list[Any], found: list[Any]) -> str | None:
    """Which array another mode has left otherwise, bit by bit; None where all are the same."""
    import numpy as np

    pairs = [pair for pair in zip(wanted, found, strict=True) if isinstance(pair[0], np.ndarray)]
    for number, (one, other) in enumerate(pairs, start=1):
        if one.tobytes() != other.tobytes():
            return f"array {number} is not what mode {mode} left"
    return None


def _argument(spec: str) -> Any:
    """A ctypes number or a NumPy array."""
    import numpy as np

    if spec.endswith(".npy"):
        try:
            return np.ascontiguousarray(np.load(spec))
        except (OSError, ValueError, EOFError) as error:
            raise InputError("--arg", "a file of an array", f"{spec} ({error})") from error
    kind, _, value = spec.partition(":")
    known: dict[str, Any] = {**SCALARS, **SCALARS_OF_FLOAT}
    try:
        wanted = int(value, 0) if kind in SCALARS else float(value)
        number: Any = known[kind](wanted)
    except (KeyError, ValueError) as error:
        kinds = ", ".join(known)
        raise InputError("--arg", f"KIND:NUMBER with a kind of {kinds}, or a file A.npy", spec) from error
    if kind in SCALARS and number.value != wanted:
        raise InputError("--arg", f"a number that {kind} can hold", spec)
    return number


def _save(folder: Path, mode: str, specs: list[str], arguments: list[Any]) -> None:
    """Write each array after a run; those of one file are told apart by their places in the parameter list."""
    import numpy as np

    stems = [Path(spec).stem for spec in specs if spec.endswith(".npy")]
    for place, (spec, argument) in enumerate(zip(specs, arguments, strict=True)):
        if isinstance(argument, np.ndarray):
            stem = Path(spec).stem
            named = stem if stems.count(stem) == 1 else f"{stem}.{place}"
            np.save(folder / f"{named}.{mode}.npy", argument)


class _Machine:
    """A kernel on the GPU or the host, with arrays that are copied there and back."""

    def __init__(self, where: str, translation: Translation, text: str, entry: str, threads: int) -> None:
        from . import build
        from .host import machine
        from .run import load

        if where == "host" and not machine.available():
            raise UnsupportedError("running on the host", "this machine", "x86-64 with a C++ compiler, or a GPU")
        self._gpu = load(build(text, translation.name, threads), entry) if where == "gpu" else None
        self._host = machine.HostProgram(translation, entry) if where == "host" else None

    def run(self, geometry: Any, arguments: list[Any], settings: Any) -> str | None:
        """Run once, the arrays then hold the results; what went wrong without being noticed, or None."""
        import numpy as np

        arrays = [argument for argument in arguments if isinstance(argument, np.ndarray)]
        if self._host:
            held = [_Guarded(array) for array in arrays]
            pointers = iter(copy.array.ctypes.data for copy in held)
            self._host.launch(geometry, [self._parameter(a, pointers) for a in arguments], settings)
            for number, (array, copy) in enumerate(zip(arrays, held, strict=True), start=1):
                array[...] = copy.array
                if copy.was_overrun():
                    return f"array {number} was written past its ends"
        elif self._gpu:
            import cupy

            copies = [cupy.asarray(array.view(np.uint8)) for array in arrays]
            pointers = iter(copy.data.ptr for copy in copies)
            self._gpu.launch(geometry, [self._parameter(a, pointers) for a in arguments], settings=settings)
            for array, copy in zip(arrays, copies, strict=True):
                array[...] = copy.get().view(array.dtype).reshape(array.shape)
        return None

    @staticmethod
    def _parameter(argument: Any, pointers: Any) -> Any:
        return argument if isinstance(argument, ctypes._SimpleCData) else ctypes.c_uint64(next(pointers))


class _Guarded:
    """A copy of an array, aligned as a GPU's allocator does, between bytes that nobody should write to."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        import numpy as np

        self._raw = np.full(array.nbytes + 2 * _GUARD_BYTES + _ALIGNMENT, _GUARD, np.uint8)
        self._start = _GUARD_BYTES + -(self._raw.ctypes.data + _GUARD_BYTES) % _ALIGNMENT
        self._end = self._start + array.nbytes
        self.array: np.ndarray[Any, Any] = self._raw[self._start : self._end].view(array.dtype).reshape(array.shape)
        self.array[...] = array

    def was_overrun(self) -> bool:
        """Whether a guard byte has changed."""
        return bool((self._raw[: self._start] != _GUARD).any() or (self._raw[self._end :] != _GUARD).any())
