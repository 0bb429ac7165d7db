"""What a training leaves behind: a checkpoint to go on from, and plots of its curves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

State = dict[str, npt.NDArray[Any]]
"""A model and its optimizer, as arrays by name."""

Row = tuple[int, float, float]
"""Step, held-out loss, overlap."""

_HEADER = "header"


class OtherRunError(Exception):
    """A checkpoint is of a run with other options."""


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        identity: what it was started with; a run goes on from a checkpoint of the same alone.
        part: which part is under way.
        step: the next one of it.
        seconds: that it took so far.
        curves: by part.
        state: of the model under way.
        warm: of the one that all later parts begin with, once there is one.
    """

    identity: Mapping[str, Any]
    part: int = 0
    step: int = 0
    seconds: float = 0.0
    curves: dict[str, list[Row]] = field(default_factory=dict)
    state: State | None = None
    warm: State | None = None


class Checkpoint:
    """The files of a checkpoint in a folder: one for what changes, one for the model after the warm-up."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "checkpoint.npz"
        self._warm = folder / "warm.npz"

    def load(self, identity: Mapping[str, Any]) -> Progress:
        """The progress that was saved, or none. Raises OtherRunError."""
        if not self.file.exists():
            return Progress(identity)
        header, state = _read(self.file)
        if header["identity"] != identity:
            its = ", ".join(f"{name} {value}" for name, value in header["identity"].items() if identity[name] != value)
            raise OtherRunError(f"{self.file} is of a run with {its}: remove it, or name another --out")
        curves = {name: [(int(n), a, b) for n, a, b in rows] for name, rows in header["curves"].items()}
        warm = _read(self._warm)[1] if header["part"] else None
        return Progress(identity, header["part"], header["step"], header["seconds"], curves, state, warm)

    def save(self, progress: Progress, is_warm: bool) -> None:
        """Write the progress; `is_warm`: its model is the one that later parts begin with."""
        assert progress.state is not None
        if is_warm:
            _write(self._warm, {}, progress.state)
        names = ("identity", "part", "step", "seconds", "curves")
        _write(self.file, {name: getattr(progress, name) for name in names}, progress.state)

    def remove(self) -> None:
        """Remove it, as a run that has ended does."""
        for file in (self.file, self._warm):
            file.unlink(missing_ok=True)


def _read(file: Path) -> tuple[dict[str, Any], State]:
    with np.load(file) as arrays:
        header = json.loads(str(arrays[_HEADER]))
        return header, {name: arrays[name] for name in arrays.files if name != _HEADER}


def _write(file: Path, header: Mapping[str, Any], state: State) -> None:
    """Write beside it and rename: a run that is stopped here leaves the former one."""
    beside = file.with_name(f"new-{file.name}")
    with beside.open("wb") as opened:
        np.savez(opened, **{_HEADER: np.asarray(json.dumps(header))}, **state)  # type: ignore[arg-type]
    Path(beside).replace(file)


def draw(curves: Mapping[str, list[Row]], column: int, label: str, title: str, file: Path) -> None:
    """One curve for each part, as PNG: from the first step on, and on the right from the end of the warm-up."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    whole, end = figure.subplots(1, 2)
    _, *later = curves
    for number, (name, rows) in enumerate(curves.items()):
        for axes in (whole, end) if name in later else (whole,):
            axes.plot([r[0] for r in rows], [r[column] for r in rows], marker=".", color=f"C{number}", label=name)
    for axes, span in ((whole, "all steps"), (end, "after the warm-up")):
        axes.set_xlabel(f"step ({span})")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    whole.legend()
    figure.savefig(file, dpi=150)
