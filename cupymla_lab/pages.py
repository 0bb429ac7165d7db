"""The generated parts of the documentation, from benchmark files, evidence and the list of public functions.

    python -m cupymla_lab pages

It rewrites what stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->` on the pages of `PARTS`. A test compares
the pages with what this module makes.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupymla
from cupymla import evidence
from cupymla.bench import machine, report
from cupymla.bench import run as bench
from cupymla.build import pack
from cupymla.ops import registry

from . import examples, gpu_tests
from .models import described, lasting_ms, side_by_side
from .subjects import Subject

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
    """A bar of the README's picture and, but for some, a row of its table.

    Attributes:
        problem: the case in words.
        operator: whose benchmark file it is in.
        case: its name there.
        peer: the name of what was timed beside it.
        words: what that is, in words.
        short: the problem in the words of the picture.
        in_table: whether the table has it, too.
    """

    problem: str
    operator: str
    case: str
    peer: str
    words: str
    short: str
    in_table: bool = True


SELECTING = "DeepGEMM and FlashInfer, deterministic"
"""What is timed beside the indexer with its selection."""

COMPARISONS = (
    Comparison(
        "sparse attention forward: 4096 queries, 128 heads, 2048 of 8192 tokens",
        "sparse_mla_fwd",
        "h128_d576_k2048_q4096_kv8192",
        "FlashMLA",
        "FlashMLA",
        "sparse attention, forward",
    ),
    Comparison(
        "its backward",
        "sparse_mla_bwd",
        "h128_d576_k2048_q4096_kv8192",
        "cuDNN",
        "cuDNN",
        "sparse attention, backward",
    ),
    Comparison(
        "decode, fp8 cache: 8 requests, 64 heads, 2048 tokens",
        "sparse_mla_decode",
        "v32_d576_h64_b8_n1_k2048",
        "FlashMLA, scheduled before",
        "FlashMLA, schedule ready",
        "sparse attention, fp8 decode",
    ),
    Comparison(
        "indexer: 4096 queries, 64 heads, 2048 of 131072 tokens selected",
        "indexer_topk",
        "fp8_h64_t4096_l131072_k2048_causal",
        SELECTING,
        SELECTING,
        "indexer with top-k selection",
        in_table=False,
    ),
    Comparison(
        "top 2048 of 131072 scores, 4096 rows, ties by index",
        "topk",
        "t4096_l131072_k2048",
        "FlashInfer, deterministic",
        "FlashInfer, deterministic",
        "top-k selection",
        in_table=False,
    ),
    Comparison(
        "NVFP4 weights, 7168 x 16384, times one vector",
        "nvfp4_gemv",
        "m7168_k16384_l1_n1",
        "cuBLAS bf16",
        "cuBLAS with bf16 weights",
        "NVFP4 weights times one vector",
        in_table=False,
    ),
    Comparison(
        "paged decode, 64 sequences of 1 to 8192 tokens, dense bias",
        "xl_paged_attention",
        "mha16x128_b64_c1-8192_dense",
        "torch SDPA, gathered",
        "torch SDPA, cache already contiguous and padded",
        "paged decode, ragged, bias",
        in_table=False,
    ),
    Comparison(
        "paged decode, 32 sequences of 2048 tokens, dense bias",
        "xl_paged_attention",
        "mha16x64_b32_c2048_dense",
        "torch SDPA, gathered",
        "torch SDPA, cache already contiguous",
        "paged decode, equal lengths, bias",
        in_table=False,
    ),
)


# Benchmarks ----------------------------------------------------------------------------------------------------------


def newest(name: str) -> Path | None:
    """The newest file of that name, of any GPU, of one day the last by its GPU; None where there is none."""
    files = sorted((machine.ROOT / "docs" / "benchmarks").glob(f"*/{name}.json"), reverse=True)
    return max(files, key=lambda file: str(json.loads(file.read_text(encoding="utf-8"))["date"]), default=None)


def benchmark(operator: str) -> report.Benchmark | None:
    """What is recorded last of an operator; None where nothing is."""
    file = newest(operator)
    return report.Benchmark.read(file) if file else None


def _digits(microseconds: float) -> str:
    return f"{microseconds:.0f}" if microseconds >= 100 else f"{microseconds:.1f}"


def _beside(row: report.BaselineRow | None) -> str:
    """The time of a baseline, or why there is none."""
    if row is None:
        return ""
    return (row.error or "").partition(":")[0] if row.us is None else _digits(row.us)


_SHORT_US = 100.0
"""What takes less has a part of an empty kernel's time that shows."""


def performance(operator: str) -> str:
    """A performance table of an operator's page: every recorded case, and what was timed beside it.

    Members of a family have theirs beside it.
    """
    found = benchmark(operator)
    member = operator in {entry.name for entry in registry.MEMBERS}
    marker = f"performance-{operator}" if member else "performance"
    families = {entry.family for entry in registry.MEMBERS}
    title = f"`{operator}`: " if registry.named(operator).family in families else ""
    if found is None:
        return report.marked_text(marker, f"{title}{'no' if title else 'No'} benchmark is recorded yet.")
    # One that did not run has no version.
    labels = {row.name: row.label for row in found.baselines if row.version}
    labelled = [(row, row.label if row.version else labels.get(row.name, row.label)) for row in found.baselines]
    peers = list(dict.fromkeys(label for _, label in labelled))
    times = {(row.case, label): row for row, label in labelled}
    columns = ["case", "us", "TFLOPS", "TB/s", "bound", "share", *(f"{name}, us" for name in peers)]
    rows = [
        [
            f"`{row.case}`",
            _digits(row.us),
            f"{row.tflops:.0f}" if row.tflops >= 100 else f"{row.tflops:.1f}",
            f"{row.tbps:.2f}",
            row.bound,
            "" if row.of_ceiling is None else f"{row.of_ceiling:.2f}",
            *(_beside(times.get((row.case, name))) for name in peers),
        ]
        for row in found.rows
    ]
    limits = found.ceilings
    fp8 = limits.get("cublas_fp8_tflops")
    copied = any(row.bound == "copy" for row in found.rows)
    copying = f", copying {limits['copy_tbps']:.2f} TB/s" if copied else ""
    if copied or min(row.us for row in found.rows) < _SHORT_US:
        copying += f", an empty kernel {limits['empty_us']:.1f} us"
    heading = (
        f"{title}{found.gpu}, driver {found.driver}, {found.date}. Ceilings of the same run: cuBLAS bf16 "
        f"{limits['cublas_bf16_tflops']:.0f}{f', fp8 {fp8:.0f}' if fp8 else ''} TFLOPS, "
        f"reading {limits['read_tbps']:.2f} TB/s{copying}."
    )
    return report.marked_table(marker, heading, columns, rows)


def host() -> str:
    """What a call costs the host, as `scripts/bench --host` wrote it."""
    file = newest("host")
    assert file is not None
    content = json.loads(file.read_text(encoding="utf-8"))
    ways = [
        way for way in (*bench.HOST_COLUMNS, *bench.FRAMEWORK_COLUMNS) if any(way in row for row in content["rows"])
    ]
    rows = [
        [f"`{row['operator']}`", str(row["launches"]), *(f"{row[way]:.1f}" if way in row else "" for way in ways)]
        for row in content["rows"]
    ]
    heading = f"{content['gpu']}, driver {content['driver']}, {content['date']}."
    return report.marked_table("host", heading, ["operator", "launches", *ways], rows)


ModelRow = Mapping[str, Any]


def _recorded_models() -> dict[str, Any]:
    """What `python -m cupymla_lab models` wrote last; no rows where it has not."""
    file = newest("models")
    return {"rows": []} if file is None else json.loads(file.read_text(encoding="utf-8"))


def models() -> str:
    """What transformers' models take alone and with cupymla, as `python -m cupymla_lab models` wrote it."""
    content = _recorded_models()
    if not content["rows"]:
        return report.marked_text("models", "No run is recorded yet.")
    rest = {described(row): row for row in content["rows"] if row["attention"] == "none"}
    cells = [
        [work, _cost(own), _cost(ours), _faster(own, ours, 1), _attention_faster(own, ours, rest.get(work))]
        for work, (own, ours) in side_by_side(content["rows"]).items()
    ]
    timed = [row for row in content["rows"] if row["what"] != "error"]
    heading = f"{content['gpu']}, {_runs({**content, 'rows': timed})}; time, and the most memory."
    columns = ["work", "transformers alone", "with cupymla", "faster", "attention alone"]
    return report.marked_table("models", heading, columns, cells)


MODELS_IN_README: Mapping[str, str] = {
    "training step, 32 heads, 8192 tokens": "training step, 8192 tokens",
    "prefill in chunks of 1024, 64 heads, 32768 tokens": "prefill, 32768 tokens",
    "prefill in chunks of 1024, 64 heads, 131072 tokens": "prefill, 131072 tokens",
    "decode step, 64 heads, 32768 tokens": "decode step, 32768 tokens",
    "decode step, 64 heads, 8192 tokens, batch 8": "decode step, 8 x 8192 tokens",
}
"""Works of the README's table of models, and their words there."""


def readme_models() -> str:
    """The README's table of transformers' models, and their picture."""
    content = _recorded_models()
    found = side_by_side(content["rows"])
    cells, rows = [], []
    for work, words in MODELS_IN_README.items():
        own, ours = found[work]
        if own is None or ours is None:
            raise ValueError(f"{work} is not recorded with transformers alone and with cupymla")
        costs = [f"{report.in_digits(lasting_ms(row))} ms, {row['peak_gib']:.1f} GiB" for row in (own, ours)]
        cells.append([words, *costs, f"{lasting_ms(own) / lasting_ms(ours):.1f}x"])
        rows += [own, ours]
    heading = f"Two layers, {content['gpu']}, {_runs({**content, 'rows': rows})}. Of a prefill, the second one."
    table = report.table(["GLM-5's architecture", "transformers alone", "with cupymla", "faster"], cells)
    file = newest("models")
    assert file is not None
    image = file.with_suffix(".png").relative_to(machine.ROOT).as_posix()
    return report.marked_text("readme-models", f"{heading}\n\n{table}\n\n![time and memory of models]({image})")


def model_errors() -> str:
    """Errors of families with cupymla and of their own bfloat16 code, as `python -m cupymla_lab models` wrote them."""
    content = _recorded_models()
    rows = [row for row in content["rows"] if row["what"] == "error" and "logits_ours" in row]
    if not rows:
        return report.marked_text("model_errors", "No run is recorded yet.")
    cells = [
        [
            f"`{row['family']}`",
            str(row["heads"]),
            str(row.get("index_heads", 32)),
            f"{row['logits_own']:.2%}",
            f"{row['logits_ours']:.2%}",
            f"{row['gradient_ratio_median']:.2f}",
            f"{row['gradient_ratio']:.2f}",
            f"`{row['gradient']}`",
        ]
        for row in rows
    ]
    heading = f"{content['gpu']}, {_runs({**content, 'rows': rows})}; errors relative to float32."
    errors = ["logits, its own", "with cupymla", "gradients, median ratio", "largest", "of"]
    columns = ["family", "heads", "index heads", *errors]
    return report.marked_table("model_errors", heading, columns, cells)


def _runs(content: Mapping[str, Any]) -> str:
    """The days and versions of a file's rows."""
    days = sorted({row.get("date", content["date"]) for row in content["rows"]})
    versions = sorted({row.get("transformers", content["transformers"]) for row in content["rows"]})
    return f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, transformers {' and '.join(versions)}"


def _faster(own: ModelRow | None, ours: ModelRow | None, digits: int) -> str:
    """How many times as fast, and again in a second pass where there was one."""
    if not own or not ours or "ms" not in own or "ms" not in ours:
        return ""
    again = f", again {own['again_ms'] / ours['again_ms']:.{digits}f}x" if "again_ms" in own else ""
    return f"{own['ms'] / ours['ms']:.{digits}f}x{again}"


def _attention_faster(own: ModelRow | None, ours: ModelRow | None, rest: ModelRow | None) -> str:
    """The same of what is attention: without the time of the step that has none."""
    if not own or not ours or not rest or not {"ms"} <= own.keys() & ours.keys() & rest.keys():
        return ""
    return f"{(own['ms'] - rest['ms']) / (ours['ms'] - rest['ms']):.1f}x, without {rest['ms']:.1f} ms"


def _cost(row: ModelRow | None) -> str:
    if row is None:
        return "not run"
    if "ms" not in row:
        return str(row["failed"]).partition(":")[0]
    again = f", again {row['again_ms']:.1f}" if "again_ms" in row else ""
    return f"{row['ms']:.1f} ms{again}, {row['peak_gib']:.1f} GiB"


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison with its numbers.

    Attributes:
        gpu: that of the run.
        ours, theirs: times, with their unit.
        ratio: how fast cupymla is, 1 for equally fast.
    """

    entry: Comparison
    gpu: str
    ours: str
    theirs: str
    ratio: float


def compared() -> tuple[str, list[Compared]]:
    """Of which GPU and when, and the comparisons with the numbers that are recorded."""
    found = []
    runs = []
    for entry in COMPARISONS:
        run = benchmark(entry.operator)
        if run is None:
            raise ValueError(f"no benchmark of {entry.operator} is recorded in docs/benchmarks")
        runs.append(run)
        (ours,) = (row for row in run.rows if row.case == entry.case)
        (us,) = (row.us for row in run.baselines if (row.case, row.name) == (entry.case, entry.peer))
        if us is None:
            raise ValueError(f"{entry.peer} has no time for {entry.case}")
        times = f"{_digits(ours.us)} us", f"{_digits(us)} us"
        found.append(Compared(entry, _model(run.gpu), *times, us / ours.us))
    dates = sorted({run.date for run in runs})
    gpus = " and ".join(dict.fromkeys(run.gpu for run in runs))
    return f"{gpus}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}", found


def _model(gpu: str) -> str:
    """The word of a GPU's product name that tells it from others: "H100" of "NVIDIA H100 80GB HBM3"."""
    return gpu.removeprefix("NVIDIA ").partition(" ")[0]


def comparison() -> str:
    """The README's table: problems, each with what was measured beside it in the same run; and how it is elsewhere."""
    where, found = compared()
    rows = []
    for one in found:
        if one.entry.in_table:
            speed = f"{one.ratio:.2f}x{' (slower)' * _loses(one)}"
            rows.append([one.entry.problem, one.gpu, one.ours, f"{one.entry.words}: {one.theirs}", speed])
    table = report.table(["problem", "GPU", "cupymla", "measured beside it", "cupymla's speed"], rows)
    backward, decode = "sparse_mla_bwd", "sparse_mla_decode"
    said = [
        f"cuDNN's backward is faster in {_lost(backward, 'cuDNN')} cases,",
        f"and than ours with `deterministic=True` in {_lost(backward, 'cuDNN, not deterministic')}.",
        f"FlashMLA's decode is faster in {_lost(decode, 'FlashMLA, scheduled before')} with its schedule ready,",
        f"in {_lost(decode, 'FlashMLA')} without.",
        _of_indexer(),
    ]
    below = textwrap.fill(" ".join(said), 120, break_long_words=False, break_on_hyphens=False)
    return report.marked_text("peers", f"{where}.\n\n{table}\n\n{below}")


def _lost(operator: str, peer: str) -> str:
    """In how many of its cases what was timed beside an operator is faster: "3 of 16"."""
    run = benchmark(operator)
    assert run is not None
    ours = {row.case: row.us for row in run.rows}
    theirs = [(row.us, ours[row.case]) for row in run.baselines if row.name == peer and row.us is not None]
    return f"{sum(us < own for us, own in theirs)} of {len(theirs)}"


def _of_indexer() -> str:
    """How much faster the indexer with its selection is than two libraries, one after the other."""
    runs = [benchmark(operator) for operator in ("indexer_topk", "paged_indexer_topk")]
    gpus = " and ".join(dict.fromkeys(_model(run.gpu) for run in runs if run is not None))
    dense, paged = (_speeds(run, SELECTING) for run in runs if run is not None)
    return f"The indexer's selection: {dense} as fast as DeepGEMM with FlashInfer, paged {paged} ({gpus})."


def _speeds(run: report.Benchmark, peer: str) -> str:
    """How fast an operator is beside what was timed with it, over all cases: "1.11 to 1.59x"."""
    ours = {row.case: row.us for row in run.rows}
    found = [row.us / ours[row.case] for row in run.baselines if row.name == peer and row.us is not None]
    return f"{min(found):.2f} to {max(found):.2f}x"


def _loses(one: Compared) -> bool:
    """Whether the other library is faster."""
    return one.ratio < 1


WIDTH = 800
"""Of the README's picture, in pixels."""


def picture() -> str:
    """The README's picture, an SVG: a bar for each comparison, and a line where both are equally fast."""
    where, found = compared()
    left, width, row, top = 380, 330, 44, 62
    scale = width / max(3.0, *(one.ratio for one in found))
    height = top + row * len(found) + 34
    base = left + scale
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="12" y="20" font-size="13" font-weight="bold">Speed beside other libraries, measured in the same '
        "run</text>",
        f'<text x="12" y="36" fill="#666666" font-size="11">{where}</text>',
    ]
    for number, one in enumerate(found):
        y = top + row * number
        color = "#cc6677" if _loses(one) else "#4477aa"
        lines += [
            f'<text x="12" y="{y + 13}">{one.entry.short}</text>',
            f'<text x="12" y="{y + 28}" fill="#666666" font-size="11">beside {one.entry.words} ({one.gpu})</text>',
            f'<rect x="{left}" y="{y + 4}" width="{one.ratio * scale:.0f}" height="22" fill="{color}"/>',
            f'<text x="{left + max(1, one.ratio) * scale + 6:.0f}" y="{y + 20}">{one.ratio:.2f}x</text>',
        ]
    end = top + row * len(found)
    lines += [
        f'<line x1="{base:.0f}" x2="{base:.0f}" y1="{top - 6}" y2="{end}" stroke="black" stroke-dasharray="4 3"/>',
        f'<text x="12" y="{end + 18}" fill="#666666" font-size="11">blue: faster than the other library; '
        "red: slower</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


# Support -------------------------------------------------------------------------------------------------------------


def support(rows: Sequence[evidence.Support] | None = None) -> str:
    """The short support table: operators by GPU generation. A cell says the least that holds for all of its kernels.

    A family counts as one operator. Operators of which the same holds share a row.
    """
    every = evidence.support_rows() if rows is None else rows
    heads = {
        member.name: entry.name
        for entry in registry.OPERATORS
        for member in registry.MEMBERS
        if member.folder == entry.folder
    }
    operators: dict[tuple[str, ...], list[str]] = {}
    for operator in dict.fromkeys(heads.get(row.operator, row.operator) for row in every):
        of = {
            name: [
                row.status for row in every if heads.get(row.operator, row.operator) == operator and row.arch in targets
            ]
            for name, targets in GENERATIONS.items()
        }
        words = tuple(min(found, key=STATUSES.index, default="none") for found in of.values())
        operators.setdefault(words, []).append(f"`{operator}`")
    cells = [[", ".join(names), *words] for words, names in operators.items()]
    heading = "On the CPU every operator runs as a NumPy reference."
    return report.marked_table("support-summary", heading, ["operators", *GENERATIONS], cells)


def example_runs(results: Sequence[gpu_tests.FileResult] | None = None) -> str:
    """When each example last passed on a GPU, and whether its files are still the same."""
    every = gpu_tests.read() if results is None else results
    ran = {name: (result, seconds) for result in every for name, seconds in result.examples.items()}
    current = examples.content_hash()
    cells = []
    for name, example in examples.RUNS.items():
        said = "not run"
        if name in ran:
            result, seconds = ran[name]
            passed = f"passed on {result.gpu}, {result.date}, in {seconds:.0f} s"
            said = passed if result.examples_hash == current else f"not run; edited since it {passed}"
        cells.append([f"`{' '.join((f'{example.program}.py', *example.arguments))}`", said])
    heading = "Each is run as a program of its own, and ends with 0 where its results are right."
    return report.marked_table("examples", heading, ["example", "on a GPU"], cells)


# Reference -----------------------------------------------------------------------------------------------------------


def written_in(name: str) -> str:
    """Where a public function's docstring is: the module and name of the function that is written there."""
    function = inspect.unwrap(getattr(cupymla, name))
    return f"{function.__module__}.{function.__name__}"


def reference() -> str:
    """The body of the reference page: a directive of mkdocstrings for every public function."""
    lines = []
    for name in registry.public_functions():
        options = ["    options:", f"      heading: cupymla.{name}", "      heading_level: 2", ""]
        lines += [f"::: {written_in(name)}", *options]
    return report.marked_text("functions", "\n".join(lines))


# Pages ---------------------------------------------------------------------------------------------------------------

PARTS: Mapping[str, tuple[Callable[[], str], ...]] = {
    "README.md": (comparison, readme_models, support),
    "docs/support.md": (evidence.support_markdown, example_runs),
    "docs/reference.md": (reference,),
    "docs/benchmarks.md": (host,),
    "docs/transformers.md": (models, model_errors),
    **{
        f"docs/operators/{entry.folder}.md": tuple(
            functools.partial(performance, each.name) for each in registry.subjects() if each.folder == entry.folder
        )
        for entry in registry.OPERATORS
    },
}


PICTURE = "docs/benchmarks/comparison.svg"
COUNTS = f"tests/evidence/{pack.COUNTS}"


def counts() -> str:
    """How many cases each kernel has, for the support table: JSON, by operator, kernel and target."""
    subjects = [Subject(entry.name) for entry in registry.subjects() if entry.kernels]
    found = {
        f"{subject.name}.{kernel.name}.{kernel.arch}": len(subject.cases_of(kernel))
        for subject in subjects
        for kernel in subject.entry.kernels
    }
    return json.dumps(found, indent=2, sort_keys=True) + "\n"


def renewed(name: str, page: str) -> str:
    """A page of `PARTS` with its generated parts made anew. Raises ValueError where it has no markers for one."""
    for make in PARTS[name]:
        page = report.replaced(page, make())
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: rewrite the pages, and name those that changed."""
    argparse.ArgumentParser(prog="python -m cupymla_lab pages", description=__doc__).parse_args(arguments)
    (machine.ROOT / PICTURE).write_text(picture(), encoding="utf-8")
    # The support table tells of them.
    (machine.ROOT / COUNTS).write_text(counts(), encoding="utf-8")
    evidence.forget_counts()
    for name in PARTS:
        file = machine.ROOT / name
        before = file.read_text(encoding="utf-8")
        after = renewed(name, before)
        if after != before:
            file.write_text(after, encoding="utf-8")
            print(name)
    return 0
