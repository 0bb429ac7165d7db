"""The generated parts of the documentation, from benchmark files, evidence and the list of public functions.

    python -m cupymla_lab pages

It rewrites what stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->` on the pages of `PARTS`. A test compares
the pages with what this module makes.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import cupymla
from cupymla import evidence
from cupymla.bench import machine, report
from cupymla.ops import registry

GPU = "h200"
"""The folder in `docs/benchmarks` whose numbers the pages show."""

GENERATIONS: Mapping[str, tuple[str, ...]] = {
    "Ampere, Ada (8.x)": ("sm_80", "sm_89"),
    "Hopper (9.0)": ("sm_90", "sm_90a"),
    "Blackwell (10.0, 10.3)": ("sm_100f",),
}
"""Columns of the short support table, and the targets that each stands for."""

STATUSES = ("none", "not run", "emulated", "verified")
"""From the least to the most that can be known of a kernel."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row of the README's table.

    Attributes:
        problem: the case in words.
        operator: whose benchmark file it is in.
        case: its name there.
        peer: the name of what was timed beside it; None to compare with the cuBLAS rate of the same run.
        words: what that is, in words.
    """

    problem: str
    operator: str
    case: str
    peer: str | None
    words: str


COMPARISONS = (
    Comparison(
        "sparse attention forward: 4096 queries, 128 heads, 2048 of 8192 tokens",
        "sparse_mla_fwd",
        "h128_d576_k2048_q4096_kv8192",
        None,
        "cuBLAS bf16 matrix product, 8192 x 8192 x 8192",
    ),
    Comparison(
        "the same, backward",
        "sparse_mla_bwd",
        "h128_d576_k2048_q4096_kv8192",
        None,
        "cuBLAS bf16 matrix product, 8192 x 8192 x 8192",
    ),
    Comparison(
        "NVFP4 weights, 7168 x 16384, times one vector",
        "nvfp4_gemv",
        "m7168_k16384_l1_n1",
        "cuBLAS bf16",
        "cuBLAS with bf16 weights",
    ),
    Comparison(
        "paged decode, 64 sequences of 1 to 8192 tokens, dense bias",
        "xl_paged_attention",
        "mha16x128_b64_c1-8192_dense",
        "torch SDPA, gathered",
        "torch SDPA, cache already contiguous and padded",
    ),
    Comparison(
        "paged decode, 32 sequences of 2048 tokens, dense bias",
        "xl_paged_attention",
        "mha16x64_b32_c2048_dense",
        "torch SDPA, gathered",
        "torch SDPA, cache already contiguous",
    ),
)


# Benchmarks ----------------------------------------------------------------------------------------------------------


def benchmark(operator: str) -> report.Benchmark | None:
    """What is recorded of an operator on `GPU`; None where nothing is."""
    file = machine.ROOT / "docs" / "benchmarks" / GPU / f"{operator}.json"
    return report.Benchmark.read(file) if file.exists() else None


def _digits(microseconds: float) -> str:
    return f"{microseconds:.0f}" if microseconds >= 100 else f"{microseconds:.1f}"


def performance(operator: str) -> str:
    """The performance table of an operator's page: every recorded case, and what was timed beside it."""
    found = benchmark(operator)
    if found is None:
        return report.marked_text("performance", "No benchmark is recorded yet.")
    peers = list(dict.fromkeys(row.name for row in found.rivals))
    times = {(row.case, row.name): row.us for row in found.rivals}
    columns = ["case", "us", "TFLOPS", "TB/s", "share of the ceiling", *(f"{name}, us" for name in peers)]
    rows = [
        [
            f"`{row.case}`",
            _digits(row.us),
            f"{row.tflops:.0f}" if row.tflops >= 100 else f"{row.tflops:.1f}",
            f"{row.tbps:.2f}",
            f"{row.of_ceiling:.2f}",
            *(_digits(times[row.case, name]) if (row.case, name) in times else "" for name in peers),
        ]
        for row in found.rows
    ]
    limits = found.ceilings
    heading = (
        f"{found.gpu}, driver {found.driver}, {found.date}. Ceilings of the same run: cuBLAS bf16 "
        f"{limits['cublas_bf16_tflops']:.0f} TFLOPS, reading {limits['read_tbps']:.2f} TB/s."
    )
    return report.marked_table("performance", heading, columns, rows)


def comparison() -> str:
    """The README's table: five problems, each with what was measured beside it in the same run."""
    rows = []
    runs = []
    for entry in COMPARISONS:
        found = benchmark(entry.operator)
        assert found is not None, entry.operator
        runs.append(found)
        (ours,) = (row for row in found.rows if row.case == entry.case)
        if entry.peer is None:
            limit = found.ceilings["cublas_bf16_tflops"]
            cells = [f"{ours.tflops:.0f} TFLOPS", f"{entry.words}: {limit:.0f} TFLOPS", f"{ours.of_ceiling:.2f} of it"]
        else:
            (theirs,) = (row for row in found.rivals if (row.case, row.name) == (entry.case, entry.peer))
            ratio = theirs.us / ours.us
            said = f"{ratio:.2f}x as fast" if ratio >= 1 else f"{ratio:.2f}x as fast: slower"
            cells = [f"{_digits(ours.us)} us", f"{entry.words}: {_digits(theirs.us)} us", said]
        rows.append([entry.problem, *cells])
    dates = sorted({found.date for found in runs})
    heading = f"{runs[0].gpu}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
    return report.marked_table("peers", heading, ["problem", "cupymla", "measured beside it", "cupymla is"], rows)


# Support -------------------------------------------------------------------------------------------------------------


def support(rows: Sequence[evidence.Support] | None = None) -> str:
    """The short support table: operator by GPU generation. A cell says the least that holds for all of its kernels."""
    every = evidence.support_rows() if rows is None else rows
    cells = []
    for operator in dict.fromkeys(row.operator for row in every):
        of = {
            name: [row.status for row in every if row.operator == operator and row.arch in targets]
            for name, targets in GENERATIONS.items()
        }
        cells.append([f"`{operator}`", *(min(found, key=STATUSES.index, default="none") for found in of.values())])
    heading = "On the CPU every operator runs as a NumPy reference."
    return report.marked_table("support-summary", heading, ["operator", *GENERATIONS], cells)


# Reference -----------------------------------------------------------------------------------------------------------


def public_functions() -> Iterator[tuple[str, list[str]]]:
    """Each operator's name, and its public functions: itself, then what goes with it."""
    for entry in registry.OPERATORS:
        yield entry.name, [entry.name, *entry.companions]


def written_in(name: str) -> str:
    """Where a public function's docstring is: the module and name of the function that is written there."""
    function = inspect.unwrap(getattr(cupymla, name))
    return f"{function.__module__}.{function.__name__}"


def reference() -> str:
    """The body of the reference page: a directive of mkdocstrings for every public function."""
    lines = []
    for operator, names in public_functions():
        lines += [f"## {operator}", ""]
        for name in names:
            lines += [f"::: {written_in(name)}", "    options:", f"      heading: cupymla.{name}", ""]
    return report.marked_text("functions", "\n".join(lines))


# Pages ---------------------------------------------------------------------------------------------------------------

PARTS: Mapping[str, tuple[Callable[[], str], ...]] = {
    "README.md": (comparison, support),
    "docs/support.md": (evidence.support_markdown,),
    "docs/reference.md": (reference,),
    **{
        f"docs/operators/{entry.name}.md": (lambda name=entry.name: performance(name),)  # type: ignore[misc]
        for entry in registry.OPERATORS
    },
}


def renewed(name: str, page: str) -> str:
    """A page of `PARTS` with its generated parts made anew. Raises ValueError where it has no markers for one."""
    for make in PARTS[name]:
        page = report.replaced(page, make())
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: rewrite the pages, and name those that changed."""
    argparse.ArgumentParser(prog="python -m cupymla_lab pages", description=__doc__).parse_args(arguments)
    for name in PARTS:
        file = machine.ROOT / name
        before = file.read_text(encoding="utf-8")
        after = renewed(name, before)
        if after != before:
            file.write_text(after, encoding="utf-8")
            print(name)
    return 0
