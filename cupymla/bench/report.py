"""Measurements on disk: JSON that a program reads, PNG that a person reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from .machine import gpu_slug


@dataclass(frozen=True, slots=True)
class Row:
    """One timed case, or another way to the same result, which then counts the case's operations and bytes.

    Attributes:
        case: its name; for another way, what it is follows the name.
        us: one launch between two CUDA events, as measured, in microseconds.
        tflops: the case's operations per time less the empty kernel's, in 10**12 per second.
        tbps: its bytes, likewise.
        of_ceiling: the share of the ceiling that binds: the bf16 matrix rate for MLA operators, else reading.
    """

    case: str
    us: float
    tflops: float
    tbps: float
    of_ceiling: float


@dataclass(frozen=True, slots=True)
class RivalRow:
    """Another library's time for a case.

    Attributes:
        case: its name.
        name: the library and what it was given.
        us: as of `Row`.
    """

    case: str
    name: str
    us: float


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What was measured of one operator on one GPU in one run.

    Attributes:
        gpu: product name.
        driver: its driver's release.
        date: ISO 8601, UTC.
        commit: the sources' commit, "-dirty" appended when they differed from it.
        ceilings: cublas_bf16_tflops, copy_tbps, read_tbps, empty_us, measured in the same run.
        rows: the cases.
        rivals: what else was timed on them in the same run.
    """

    gpu: str
    driver: str
    date: str
    commit: str
    ceilings: dict[str, float]
    rows: list[Row] = field(default_factory=list)
    rivals: list[RivalRow] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> Benchmark:
        """A benchmark file. Raises OSError, ValueError, TypeError when it is none."""
        content = json.loads(file.read_text())
        rows = [Row(**row) for row in content["rows"]]
        return cls(**{**content, "rows": rows, "rivals": [RivalRow(**row) for row in content.get("rivals", ())]})

    def write(self, folder: Path, operator: str) -> Path:
        """Write `<folder>/<gpu>/<operator>.json`; returns the file.

        Rows of an earlier run whose cases were not timed now are dropped: they had other ceilings.
        """
        return write(folder, operator, asdict(self))


def write(folder: Path, name: str, content: Mapping[str, Any]) -> Path:
    """Write measurements as `<folder>/<gpu>/<name>.json`; returns the file.

    Args:
        folder: of the benchmark files of all GPUs, `docs/benchmarks` in a checkout.
        name: the operator's, or what was measured.
        content: `machine.provenance()`, then the ceilings measured in the same run if rates were computed, and rows.
    """
    file = folder / gpu_slug(content["gpu"]) / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n")
    return file


def marked_table(name: str, heading: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a line above it, between the markers by which `replaced` finds it on a page."""
    lines = [
        f"<!-- {name}:begin -->",
        heading,
        "",
        f"| {' | '.join(columns)} |",
        f"|{' --- |' * len(columns)}",
        *(f"| {' | '.join(cells)} |" for cells in rows),
        f"<!-- {name}:end -->",
    ]
    return "\n".join(lines)


def replaced(page: str, made: str) -> str:
    """A page with what `marked_table` made in the place of what it has between these markers.

    Raises ValueError for a page without them.
    """
    lines = made.splitlines()
    begin, end = page.index(lines[0]), page.index(lines[-1]) + len(lines[-1])
    return page[:begin] + made + page[end:]


def renew(page: Path, folder: Path | None, renewed: Callable[[str, Path], str]) -> None:
    """Rewrite a page, as a command's `--page` asks, with the tables of its `--out`, a GPU's folder.

    Raises InputError, and leaves the page alone, where there is no folder, or page and files are not what `renewed`
    takes.
    """
    if folder is None:
        raise InputError("--out", "a GPU's folder of benchmark files, beside --page", None)
    try:
        text = renewed(page.read_text(), folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("--page", f"a page with markers, and files in {folder} to match", repr(error)) from None
    page.write_text(text)


def _axes(rows: int, panels: int, width: float) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(width, 1.6 + 0.42 * rows), squeeze=False, layout="constrained")
    return figure, axes


def _bars(axes: Any, names: Sequence[str], values: Sequence[float], labels: Sequence[str], color: str) -> None:
    bars = axes.barh(range(len(names)), values, color=color)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    # A line that marks 100 percent may pass behind a label, but not through its letters.
    background = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.bar_label(bars, labels, padding=3, fontsize=8, bbox=background)
    axes.margins(x=0.22)
    axes.spines[["top", "right"]].set_visible(False)


def draw_benchmark(found: Benchmark, operator: str, file: Path) -> None:
    """Bars of each case's share of its ceiling, with the time beside. Needs matplotlib."""
    from matplotlib import pyplot

    figure, axes = _axes(len(found.rows), 1, 10.0)
    panel = axes[0][0]
    names = [row.case for row in found.rows]
    labels = [f"{r.of_ceiling:.0%}   {r.us:.1f} us, {r.tflops:.0f} TFLOPS, {r.tbps:.2f} TB/s" for r in found.rows]
    _bars(panel, names, [100 * row.of_ceiling for row in found.rows], labels, "#4477aa")
    panel.axvline(100, color="#222222", linewidth=1)
    panel.set_xlim(0, 160)
    panel.set_xticks(range(0, 101, 20))
    panel.set_xlabel("share of the ceiling that binds, percent")
    limits = found.ceilings
    panel.set_title(
        f"{operator} on {found.gpu}, {found.date}\n"
        f"ceilings: cuBLAS bf16 {limits['cublas_bf16_tflops']:.0f} TFLOPS, read {limits['read_tbps']:.2f} TB/s, "
        f"empty kernel {limits['empty_us']:.1f} us",
        fontsize=10,
    )
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def in_digits(value: float) -> str:
    """A number with three significant digits, or all before the point, and no exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def draw_demo(title: str, names: Sequence[str], ms: Sequence[float], shares: Sequence[float], file: Path) -> None:
    """Two panels of bars: time in milliseconds, and the worst error as a share of its limit. Needs matplotlib."""
    from matplotlib import pyplot

    figure, axes = _axes(len(names), 2, 13.0)
    time_panel, error_panel = axes[0]
    _bars(time_panel, names, ms, [f"{in_digits(value)} ms" for value in ms], "#4477aa")
    time_panel.set_xscale("log")
    time_panel.set_xlabel("time of one call, milliseconds")
    time_panel.set_title("time", fontsize=10)
    _bars(error_panel, names, [100 * s for s in shares], [f"{share:.0%}" for share in shares], "#cc6677")
    error_panel.axvline(100, color="#222222", linewidth=1)
    error_panel.text(
        100, 1.0, "limit", transform=error_panel.get_xaxis_transform(), ha="center", va="bottom", fontsize=8
    )
    error_panel.set_xlim(0, 125)
    error_panel.set_yticklabels([])
    error_panel.set_xlabel("largest error against float64, percent of its limit")
    error_panel.set_title("error", fontsize=10)
    figure.suptitle(title, fontsize=11)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
