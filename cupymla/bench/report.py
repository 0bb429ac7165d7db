"""Measurements on disk: JSON that a program reads, PNG that a person reads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from .machine import gpu_slug
from .names import written_out


@dataclass(frozen=True, slots=True)
class Row:
    """One timed case.

    Attributes:
        case: its name.
        us: one call between two CUDA events, as measured, in microseconds.
        tflops: the case's operations per time less the empty kernel's, in 10**12 per second.
        tbps: its bytes, likewise.
        bound: which ceiling binds: "compute", the matrix rate of its operands, or "memory", reading, or "copy",
            reading and writing alike.
        of_ceiling: the share of it; None where that rate was not measured.
    """

    case: str
    us: float
    tflops: float
    tbps: float
    bound: str
    of_ceiling: float | None


@dataclass(frozen=True, slots=True)
class BaselineRow:
    """Another implementation of a case, timed in turns with it.

    Attributes:
        case: the case's name.
        name: of the library, and what was called.
        version: of it, "" where it is not known.
        us, tflops, tbps, of_ceiling: as of `Row`, with the case's operations, bytes and ceiling; None where it was not
            timed.
        difference: from the operator's outputs, the largest of an element, as a share of the largest magnitude; None
            where they were not compared.
        error: why it was not timed: "wrong: ..." where its outputs are not the operator's, or "failed: ...".
    """

    case: str
    name: str
    version: str
    us: float | None = None
    tflops: float | None = None
    tbps: float | None = None
    of_ceiling: float | None = None
    difference: float | None = None
    error: str | None = None

    @property
    def label(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}".rstrip()

    def compared(self, row: Row) -> str:
        """Its time over the operator's, "wrong" or "failed"."""
        if self.us is None:
            return (self.error or "").partition(":")[0]
        return f"{self.us / row.us:.2f}"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What was measured of one operator on one GPU in one run.

    Attributes:
        gpu: product name.
        driver: its driver's release.
        date: ISO 8601, UTC.
        commit: the sources' commit, "-dirty" appended when they differed from it.
        ceilings: cublas_bf16_tflops, copy_tbps, read_tbps, empty_us and cublas_fp8_tflops, measured in the same run.
        rows: the cases.
        baselines: of these cases, in the same run.
    """

    gpu: str
    driver: str
    date: str
    commit: str
    ceilings: dict[str, float]
    rows: list[Row] = field(default_factory=list)
    baselines: list[BaselineRow] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> Benchmark:
        """A benchmark file. Raises OSError, ValueError, TypeError, KeyError when it is none."""
        content = json.loads(file.read_text(encoding="utf-8"))
        rows = [Row(**row) for row in content["rows"]]
        return cls(**{**content, "rows": rows, "baselines": [BaselineRow(**row) for row in content["baselines"]]})

    def write(self, folder: Path, operator: str) -> Path:
        """Write `<folder>/<gpu>/<operator>.json`; returns the file.

        Rows of an earlier run whose cases were not timed now are dropped: they had other ceilings.
        """
        return write(folder, operator, asdict(self))

    def table(self) -> list[tuple[str, ...]]:
        """Rows under `TABLE_COLUMNS`: each case, and below it its baselines."""
        lines: list[tuple[str, ...]] = []
        for row in self.rows:
            us, tflops, tbps, share = _numbers(row)
            lines.append((row.case, us, tflops, tbps, share, row.bound, ""))
            for one in self.beside(row):
                lines.append((f"- {one.label}", *_numbers(one), row.bound, one.compared(row)))
        return lines

    def beside(self, row: Row) -> list[BaselineRow]:
        """The baselines of a case."""
        return [one for one in self.baselines if one.case == row.case]


TABLE_COLUMNS = ("case", "us", "TFLOPS", "TB/s", "share", "bound", "time over ours")


def _numbers(row: Row | BaselineRow) -> tuple[str, str, str, str]:
    """Time, rates and share as tables and plots show them."""
    found = ((row.us, ".1f"), (row.tflops, ".1f"), (row.tbps, ".2f"), (row.of_ceiling, ".0%"))
    us, tflops, tbps, share = ("-" if value is None else format(value, form) for value, form in found)
    return us, tflops, tbps, share


def write(folder: Path, name: str, content: Mapping[str, Any]) -> Path:
    """Write measurements as `<folder>/<gpu>/<name>.json`; returns the file.

    Args:
        folder: of the benchmark files of all GPUs, `docs/benchmarks` in a checkout.
        name: the operator's, or what was measured.
        content: `machine.provenance()`, then the ceilings measured in the same run if rates were computed, and rows.
    """
    file = folder / gpu_slug(content["gpu"]) / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return file


def marked_table(name: str, heading: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a line above it, between the markers by which `replaced` finds it on a page."""
    return marked_text(name, f"{heading}\n\n{table(columns, rows)}")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [
        f"| {' | '.join(columns)} |",
        f"|{' --- |' * len(columns)}",
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]
    return "\n".join(lines)


def marked_text(name: str, text: str) -> str:
    """Text between the markers by which `replaced` finds it on a page."""
    return f"<!-- {name}:begin -->\n{text}\n<!-- {name}:end -->"


def replaced(page: str, made: str) -> str:
    """A page with what `marked_table` or `marked_text` made in the place of what it has between these markers.

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
        text = renewed(page.read_text(encoding="utf-8"), folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("--page", f"a page with markers, and files in {folder} to match", repr(error)) from None
    page.write_text(text, encoding="utf-8")


_ROW_INCHES, _LINE_INCHES = 0.14, 0.12  # a row's height is one of the first, and one of the second for each line
LABEL_SIZE = 8.0


def panels(names: Sequence[str], count: int, width: float) -> tuple[Any, Any]:
    """A figure with panels side by side, which have a row for each name."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    lines = max((name.count("\n") + 1 for name in names), default=1)
    height = 1.3 + (_ROW_INCHES + _LINE_INCHES * lines) * len(names)
    figure, axes = pyplot.subplots(1, count, figsize=(width, height), squeeze=False, layout="constrained")
    return figure, axes[0]


def frame(axes: Any, count: int, left: float, right: float) -> None:
    """Let a panel have so many rows of bars, the first one on top, from `left` to `right`."""
    axes.set_xlim(left, right)
    axes.set_ylim(count - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=LABEL_SIZE)
    axes.spines[["top", "right"]].set_visible(False)


def _bars(
    axes: Any,
    values: Sequence[float],
    columns: Mapping[str, Sequence[str]],
    color: str | Sequence[str],
    left: float,
    right: float,
) -> None:
    """A bar in each row, from `left` on, and beside the axes a column of text for each heading.

    A bar that ends beyond `right` is cut off there: its number is in the text.
    """
    from matplotlib.transforms import blended_transform_factory, offset_copy

    rows = range(len(values))
    axes.barh(rows, [max(value - left, 0.0) for value in values], left=left, color=color, height=0.7)
    frame(axes, len(values), left, right)
    beside = blended_transform_factory(axes.transAxes, axes.transData)
    x = 0.0
    for heading, texts in columns.items():
        # Right-aligned, with half an em for each letter, which is more than a digit takes.
        x += 0.62 * LABEL_SIZE * (max(map(len, (heading, *texts))) + 2)
        place = offset_copy(beside, axes.figure, x=x, units="points")
        above = offset_copy(axes.transAxes, axes.figure, x=x, y=4, units="points")
        axes.text(1, 1, heading, transform=above, ha="right", va="bottom", fontsize=LABEL_SIZE, color="#555555")
        for row, text in zip(rows, texts, strict=True):
            axes.text(1, row, text, transform=place, ha="right", va="center", fontsize=LABEL_SIZE)


_COLORS = {
    "compute": ("#4477aa", "#a9c1d9"),
    "memory": ("#cc7722", "#ecc9a0"),
    "copy": ("#228833", "#a8d3b1"),
}
"""Of bars, by what binds: the operator's, and the baselines' beside it."""


def draw_benchmark(found: Benchmark, operator: str, file: Path) -> None:
    """Bars of the share of its ceiling that each case reaches, baselines below it, numbers beside. Needs matplotlib."""
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    bars: list[tuple[str, str, float, tuple[str, ...]]] = []
    for row in found.rows:
        dark, light = _COLORS[row.bound]
        bars.append((_label(operator, row.case), dark, row.of_ceiling or 0.0, (*_numbers(row), "")))
        for one in found.beside(row):
            bars.append((one.label, light, one.of_ceiling or 0.0, (*_numbers(one), one.compared(row))))
    labels = [label for label, *_ in bars]
    figure, (panel,) = panels(labels, 1, max(9.0, 6.4 + 0.066 * max(map(len, labels), default=0)))
    shares = [100 * share for _, _, share, _ in bars]
    headings = ("us", "TFLOPS", "TB/s", "share", *(("time / ours",) if found.baselines else ()))
    columns = {heading: [cells[place] for *_, cells in bars] for place, heading in enumerate(headings)}
    # Ceilings are measured: what beats one by a little ends beyond it.
    _bars(panel, shares, columns, [color for _, color, _, _ in bars], 0, max(100.0, *shares))
    panel.axvline(100, color="#222222", linewidth=1)
    panel.set_yticks(range(len(labels)), labels, fontsize=LABEL_SIZE)
    beside = {one.label for one in found.baselines}
    for tick in panel.get_yticklabels():
        tick.set_color("#666666" if tick.get_text() in beside else "#000000")
    panel.set_xticks(range(0, 101, 20))
    panel.set_xlabel("share of the ceiling that binds, percent", fontsize=LABEL_SIZE + 1)
    bounds = dict.fromkeys(row.bound for row in found.rows)
    handles = [Patch(color=_COLORS[bound][0], label=f"cupymla, bound by {bound}") for bound in bounds]
    if found.baselines:
        handles += [Patch(color=_COLORS[bound][1], label=f"baseline, bound by {bound}") for bound in bounds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=LABEL_SIZE, frameon=False)
    limits = found.ceilings
    fp8 = f", fp8 {limits['cublas_fp8_tflops']:.0f}" if "cublas_fp8_tflops" in limits else ""
    copied = f", copy {limits['copy_tbps']:.2f}" if "copy" in bounds else ""
    figure.suptitle(
        f"{operator} on {found.gpu}, {found.date}\n"
        f"ceilings: cuBLAS bf16 {limits['cublas_bf16_tflops']:.0f}{fp8} TFLOPS, "
        f"read {limits['read_tbps']:.2f}{copied} TB/s, empty kernel {limits['empty_us']:.1f} us",
        fontsize=10,
    )
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _label(operator: str, case: str) -> str:
    """The case's name written out; as it is, where it is none of a benchmark as it is now."""
    try:
        return written_out(operator, case)
    except ValueError:
        return case


def in_digits(value: float) -> str:
    """A number with three significant digits, or all before the point, and no exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten, by their exponents, between which a logarithmic axis has room for bars of these values."""
    low, high = min(values), max(values)
    # From the decade below, so that the smallest bar is one: it has a tenth of a decade at least.
    return math.floor(math.log10(low) - 0.1), math.ceil(math.log10(high))


def draw_demo(title: str, names: Sequence[str], ms: Sequence[float], shares: Sequence[float], file: Path) -> None:
    """Two panels of bars: time in milliseconds, and the worst error as a share of its limit. Needs matplotlib."""
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter

    figure, (time_panel, error_panel) = panels(names, 2, 11.0)
    figure.get_layout_engine().set(w_pad=0.15)
    low, high = decades(ms)
    time_panel.set_xscale("log")
    _bars(time_panel, ms, {"ms": [in_digits(value) for value in ms]}, "#4477aa", 10.0**low, 10.0**high)
    # Every decade has its label, and nothing between them has one.
    powers = range(low, high + 1)
    time_panel.set_xticks([10.0**power for power in powers], [f"{10.0**power:g}" for power in powers])
    time_panel.xaxis.set_minor_formatter(NullFormatter())
    time_panel.set_yticks(range(len(names)), names, fontsize=LABEL_SIZE)
    time_panel.set_xlabel("time of one call, milliseconds", fontsize=LABEL_SIZE + 1)
    right = 100 if max(shares) <= 1 else 200
    columns = {"error": [f"{share:.0%}" for share in shares]}
    _bars(error_panel, [100 * share for share in shares], columns, "#cc6677", 0, right)
    error_panel.axvline(100, color="#222222", linewidth=1)
    above = error_panel.get_xaxis_transform()
    error_panel.text(100, 1.02, "limit", transform=above, ha="center", va="bottom", fontsize=LABEL_SIZE)
    error_panel.set_xticks(range(0, right + 1, right // 5))
    error_panel.set_yticks([])
    error_panel.set_xlabel("largest error against float64, percent of its limit", fontsize=LABEL_SIZE + 1)
    figure.suptitle(title, fontsize=11)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
