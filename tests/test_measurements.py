"""Rates follow from times as documented; files of measurements hold the agreed keys; plots are drawn."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupymla import cli, driver
from cupymla.bench import frameworks, machine, report, timing
from cupymla.bench import run as bench
from cupymla.bench.names import written_out
from cupymla.bench.processes import Lost
from cupymla.bench.timing import Ceilings
from cupymla.errors import InputError
from cupymla.ops import registry
from cupymla_lab import models, pages, scaling, training_step, without_gpu
from cupymla_lab.subjects import Subject

LIMITS = Ceilings(cublas_bf16_tflops=800.0, copy_tbps=4.0, read_tbps=4.5, empty_us=3.5)


@pytest.mark.parametrize(
    ("flops", "moved", "dtype", "bound", "share"),
    [
        (100_000_000, 45_000_000, "bfloat16", "memory", 1.0),
        (4_000_000_000, 9_000_000, "bfloat16", "compute", 0.5),
        (4_000_000_000, 9_000_000, "fp8", "compute", 0.25),
        (4_000_000_000, 18_000_000, "fp8", "memory", 0.4),
    ],
)
def test_rates_are_taken_without_the_empty_kernel(flops: int, moved: int, dtype: str, bound: str, share: float) -> None:
    """13.5 us as read are 10 us of work: 45 MB are 4.5 TB/s of 4.5, 4 GFLOP 400 TFLOPS of 800, or of 1600 in fp8."""
    subject: Any = SimpleNamespace(cases=SimpleNamespace(flops=lambda case: flops, bytes_moved=lambda case: moved))
    case: Any = SimpleNamespace(name="case", dtype=dtype)
    row = bench.row(subject, case, 13.5, replace(LIMITS, cublas_fp8_tflops=1600.0))
    assert (row.us, row.tflops, row.tbps) == (13.5, flops / 1e7, moved / 1e7)
    assert (row.bound, row.of_ceiling) == (bound, share)
    if bound == "memory":
        subject.cases.BOUND_BY_COPYING = True
        copied = bench.row(subject, case, 13.5, LIMITS if dtype != "fp8" else replace(LIMITS, cublas_fp8_tflops=1600.0))
        assert (copied.bound, copied.of_ceiling) == ("copy", round(share * 4.5 / 4.0, 4))
    if dtype == "fp8":
        unknown = bench.row(subject, case, 13.5, LIMITS)
        assert (unknown.bound, unknown.of_ceiling) == ("compute", None)


def test_products_of_fp8_are_held_against_fp8() -> None:
    """Cases say by their names that both operands are: the ceiling goes by `dtype`."""
    cases = [case for entry in registry.subjects() for case in Subject(entry.name).cases.BENCH]
    named = [case for case in cases if case.name.startswith("fp8_")]
    assert {getattr(case, "dtype", None) for case in named} == {"fp8"}


def test_benchmark_files_read_back_and_hold_the_agreed_keys(tmp_path: Path) -> None:
    rows = [report.Row("m7168_k16384_l1_n1", 18.1, 20.0, 4.1, "memory", 0.9)]
    beside = [
        report.BaselineRow("m7168_k16384_l1_n1", "another library", "1.2", 36.2, 10.0, 2.05, 0.45, 1e-3),
        report.BaselineRow("m7168_k16384_l1_n1", "a wrong one", "3", error="wrong: c: NaN in 3 wrong places"),
    ]
    made = report.Benchmark("NVIDIA H200", "580.1", "2026-01-02", "abc", LIMITS.as_dict(), rows, beside)
    file = made.write(tmp_path, "nvfp4_gemv")
    assert file == tmp_path / "h200" / "nvfp4_gemv.json"
    assert report.Benchmark.read(file) == made
    content = json.loads(file.read_text())
    assert list(content) == ["gpu", "driver", "date", "commit", "ceilings", "rows", "baselines"]
    assert list(content["ceilings"]) == ["cublas_bf16_tflops", "copy_tbps", "read_tbps", "empty_us"]
    assert list(content["rows"][0]) == ["case", "us", "tflops", "tbps", "bound", "of_ceiling"]
    assert list(content["baselines"][0]) == [
        "case", "name", "version", "us", "tflops", "tbps", "of_ceiling", "difference", "error",
    ]  # fmt: skip
    assert made.table() == [
        ("m7168_k16384_l1_n1", "18.1", "20.0", "4.10", "90%", "memory", ""),
        ("- another library 1.2", "36.2", "10.0", "2.05", "45%", "memory", "2.00"),
        ("- a wrong one 3", "-", "-", "-", "-", "memory", "wrong"),
    ]


def test_committed_benchmarks_read_back_and_cases_are_written_out() -> None:
    for entry in registry.subjects():
        names = {case.name for case in Subject(entry.name).cases.BENCH}
        for file in (machine.ROOT / "docs" / "benchmarks").glob(f"*/{entry.name}.json"):
            found = report.Benchmark.read(file)
            assert {row.case for row in found.baselines} <= {row.case for row in found.rows}
            names |= {row.case for row in found.rows}
        written = {written_out(entry.name, name) for name in names}
        assert len(written) == len(names) and not any("_" in text for text in written)
    for operator, name in (("topk", "t1_l5_k2_more"), ("topk", "t1_l5"), ("none", "t1_l5_k2")):
        with pytest.raises(ValueError, match="benchmark cases of"):
            written_out(operator, name)
    assert written_out("attn_dist", "h1_d576_k2048_q1_kv8192_sorted_det") == (
        "1 head, d 576, top-k 2048, 1 query, 8192 keys, sorted, deterministic"
    )


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has a name and a driver, and runs nothing."""
    for name, told in (
        ("available", True),
        ("device_count", 2),
        ("device_name", "NVIDIA H200"),
        ("compute_capability", (9, 0)),
    ):
        monkeypatch.setattr(driver, name, lambda *_, told=told: told)
    monkeypatch.setattr(machine, "driver_text", lambda: "580.1")
    monkeypatch.setattr(machine, "commit", lambda: "abc")


@pytest.mark.usefixtures("h200")
def test_measurements_begin_with_where_they_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of scaling, of a training step and of host times, as their commands write them."""
    measured = training_step.StepRow("case", dict.fromkeys(training_step.COLORS, 2e3), 1e4, 8e5, 3 << 28, 6, 7)
    monkeypatch.setattr(training_step, "Timer", lambda: None)
    monkeypatch.setattr(timing, "ceilings", lambda timer: LIMITS)
    monkeypatch.setattr(training_step, "measure", lambda *_: measured)
    monkeypatch.setattr(scaling, "measure_jax", lambda problem, devices: 8.0 / devices)
    monkeypatch.setattr(bench, "host_overhead", lambda subject: {"case": "case", "bare": 1.0})
    monkeypatch.setattr("sys.argv", ["scaling", "--out", str(tmp_path), "--frameworks", "jax"])
    assert training_step.main(["--out", str(tmp_path), "--commit", "def"]) == 0
    assert scaling.main() == 0
    assert cli.main(["bench", "attn_dist", "--host", "--out", str(tmp_path)]) == 0
    found = {file.name: json.loads(file.read_text()) for file in (tmp_path / "h200").glob("*.json")}
    assert (tmp_path / "h200" / "training_step.png").stat().st_size > 10_000
    rest = {"training_step.json": ["ceilings", "rows"], "host.json": ["rows"]}
    rest |= {"scaling.json": ["problem", "layer", "rows"]}
    assert {name: list(content) for name, content in found.items()} == {
        name: ["gpu", "driver", "date", "commit", *keys] for name, keys in rest.items()
    }
    assert {name: content["commit"] for name, content in found.items()} == {
        "training_step.json": "def", "scaling.json": "abc", "host.json": "abc",
    }  # fmt: skip
    assert [row["speedup"] for row in found["scaling.json"]["rows"]] == [1, 2]


@pytest.mark.usefixtures("h200")
def test_scaling_keeps_rows_of_more_gpus_than_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "measure_jax", lambda problem, devices: problem.topk / devices)

    def run(commit: str, *options: str) -> list[tuple[Any, ...]]:
        assert scaling.main(["--out", str(tmp_path), "--frameworks", "jax", "--commit", commit, *options]) == 0
        rows = json.loads((tmp_path / "h200" / "scaling.json").read_text())["rows"]
        return [(row["devices"], row["ms"], row.get("commit")) for row in rows]

    assert run("old", "--devices", "1", "2", "4") == [(1, 2048, None), (2, 1024, None), (4, 512, None)]
    assert run("new", "--devices", "1", "2") == [(1, 2048, None), (2, 1024, None), (4, 512, "old")]
    assert run("newer", "--devices", "2") == [(2, 1024, None), (1, 2048, "new"), (4, 512, "old")]
    assert run("other", "--devices", "1", "--problem", '{"topk": 64}') == [(1, 64, None)]


class Beside:
    """What stands for `Processes`: work is done here, by a function that loses what `lost` names."""

    def __init__(self, do: Any, count: int, seconds: float) -> None:
        assert (do, count, seconds) == (bench.do, 1, 7.0)

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def result(self, job: bench.Job) -> bench.Timed:
        if not job.operator:
            return bench.Timed(ceilings=LIMITS)
        if job.case.startswith("h64"):
            raise Lost("did not come back within 7 s")
        return bench.Timed(1000.0, (bench.BaselineTime("other", "1.0", 2000.0, 1e-3),))


@pytest.mark.usefixtures("h200")
def test_a_case_that_is_lost_costs_its_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cupymla.bench.processes.Processes", Beside)
    names = [case.name for case in Subject("attn_dist").cases.BENCH]
    lost = [name for name in names if name.startswith("h64")]
    assert cli.main(["bench", "attn_dist", "nvfp4_gemv", "--limit", "7", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert all(f"attn_dist {name}: did not come back within 7 s" in told for name in lost)
    kept = report.Benchmark.read(tmp_path / "h200" / "attn_dist.json")
    assert lost and [row.case for row in kept.rows] == [name for name in names if name not in lost]
    assert {row.name for row in kept.baselines} == {"other"} and kept.ceilings == LIMITS.as_dict()
    assert report.Benchmark.read(tmp_path / "h200" / "nvfp4_gemv.json").rows
    assert cli.main(["bench", "nvfp4_gemv", "--limit", "7"]) == 0


@pytest.mark.usefixtures("h200")
def test_a_limit_that_is_none_is_refused_and_lost_ceilings_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for limit in ("0", "-1", "nan"):
        assert cli.main(["bench", "attn_dist", "--limit", limit]) == 2
        assert f"argument '--limit': expected a time above 0, in seconds, got {float(limit)}" in capsys.readouterr().err

    def lost(self: Beside, job: bench.Job) -> bench.Timed:
        raise Lost("did not come back within 7 s")

    monkeypatch.setattr("cupymla.bench.processes.Processes", Beside)
    monkeypatch.setattr(Beside, "result", lost)
    assert cli.main(["bench", "attn_dist", "--limit", "7"]) == 1
    assert "the ceilings: did not come back within 7 s" in capsys.readouterr().err


class Drawn:
    """A plot as it was drawn.

    Attributes:
        panels: its axes, from left to right.
        texts: every text that is seen, with its place in pixels.
    """

    def __init__(self, figure: Any) -> None:
        from matplotlib.text import Text

        figure.canvas.draw()
        self._size = figure.bbox
        self.panels = figure.axes
        # Ticks outside of an axis keep their labels, and do not show them.
        hidden = {
            label
            for panel in self.panels
            for axis, (low, high) in ((panel.xaxis, panel.get_xlim()), (panel.yaxis, sorted(panel.get_ylim())))
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
            for label in (tick.label1, tick.label2)
            if not low <= tick.get_loc() <= high
        }
        seen = (text for text in figure.findobj(Text) if text.get_text() and text.get_visible() and text not in hidden)
        self.texts = [(text.get_text(), text.get_window_extent()) for text in seen]

    def require_legible(self) -> None:
        """No text on another one, all of each within the picture."""
        for number, (name, box) in enumerate(self.texts):
            assert self._size.x0 <= box.x0 and box.x1 <= self._size.x1, name
            assert self._size.y0 <= box.y0 and box.y1 <= self._size.y1, name
            for other, place in self.texts[:number]:
                apart = box.x1 <= place.x0 or place.x1 <= box.x0 or box.y1 <= place.y0 or place.y1 <= box.y0
                assert apart, f"{name!r} on {other!r}"

    def require_bars(self, panel: int, begin: float, ends: Sequence[float]) -> None:
        """A panel's bars all begin there, which is where its axis does, and end there."""
        assert self.panels[panel].get_xlim()[0] == begin
        bars = self.panels[panel].patches
        assert [bar.get_x() for bar in bars] == [begin] * len(ends)
        assert [bar.get_x() + bar.get_width() for bar in bars] == pytest.approx(ends)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Drawn]]:
    """Draws: a function of `report`, all of its arguments but the file."""
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    figures: list[Any] = []

    def draw(function: Callable[..., None], *arguments: object) -> Drawn:
        function(*arguments, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
        return Drawn(figures[-1])

    with monkeypatch.context() as patch:
        patch.setattr(pyplot, "close", figures.append)
        yield draw
    for figure in figures:
        pyplot.close(figure)


DEMO_TIMES = {
    "CPU": ([861, 803, 348, 444, 2358, 871], 0.3),
    "GPU": ([2.31, 6.8, 300, 1.1, 0.018, 0.12], 1.3),
    "decades": ([0.01, 1, 10, 100, 0.1, 1000], 1.0),
    "one operator": ([7.0], 40.0),
}
"""Milliseconds, and the worst share of a limit."""


@pytest.mark.parametrize(("times", "worst"), DEMO_TIMES.values(), ids=DEMO_TIMES)
def test_the_demos_plot_is_legible(drawn: Callable[..., Drawn], times: list[float], worst: float) -> None:
    names = [f"{entry.name}\n{Subject(entry.name).cases.BENCH[0].name}" for entry in registry.OPERATORS]
    names, shares = names[: len(times)], [worst, *(0.01 * number for number in range(5))][: len(times)]
    plot = drawn(report.draw_demo, "cupymla on NVIDIA H200", names, times, shares)
    plot.require_legible()
    low, high = plot.panels[0].get_xlim()
    assert math.log10(low).is_integer() and math.log10(high).is_integer()
    assert low < min(times) <= 10.1 * low * 10**0.1 and max(times) <= high < 10 * max(times)
    plot.require_bars(0, low, times)
    decades = [f"{10.0**power:g}" for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    labels = (*plot.panels[0].get_xticklabels(), *plot.panels[0].get_xticklabels(minor=True))
    assert [label.get_text() for label in labels if label.get_text()] == decades
    assert plot.panels[1].get_xlim() == (0, 100 if worst <= 1 else 200)
    plot.require_bars(1, 0, [100 * share for share in shares])
    assert {f"{share:.0%}" for share in shares} <= {text for text, _ in plot.texts}


def test_the_models_plot_is_legible(drawn: Callable[..., Drawn]) -> None:
    """Every work of the command, the longest names and numbers among them; those that ran one way are left out."""
    rows = []
    for number, work in enumerate(work for work in models.WORKS if work.what != "error"):
        ms, again = 3.0**number % 20000 + 0.5, {"again_ms": 600.0} if work.what == "prefill" else {}
        rows.append(asdict(work) | {"ms": ms, "peak_gib": 1.5 * 1.2**number % 70 + 0.4} | again)
    pairs = [(own, ours) for own, ours in models.side_by_side(rows).values() if own and ours]
    assert 5 < len(pairs) < len(rows) / 2
    plot = drawn(models.draw, rows, "two layers of transformers' models on NVIDIA H200, 2026-11-29")
    plot.require_legible()
    begin = plot.panels[1].get_xlim()[0]
    plot.require_bars(1, begin, [own["peak_gib"] for own, _ in pairs] + [ours["peak_gib"] for _, ours in pairs])
    shares = {f" {report.in_digits(b['peak_gib'])} ({a['peak_gib'] / b['peak_gib']:.1f}x)" for a, b in pairs}
    assert shares | {"second prefill in chunks of 1024\n64 heads, 131072 tokens", " 600"} <= {
        text for text, _ in plot.texts
    }


@pytest.mark.parametrize(("operator", "best"), [("topk", 0.9), ("sparse_mla_fwd", 1.04)])
def test_a_benchmarks_plot_is_legible(drawn: Callable[..., Drawn], operator: str, best: float) -> None:
    """Cases with none, one or two baselines, one of which is wrong."""
    names = [case.name for case in Subject(operator).cases.BENCH]
    shares = [best / (1 + number) for number in range(len(names))]
    rows = [
        report.Row(name, 12345.6, 1234.5, 4.25, "compute" if number % 2 else "memory", shares[number])
        for number, name in enumerate(names)
    ]
    right = [report.BaselineRow(name, "another library", "1.2.3", 99999.9, 1.5, 0.25, 0.1, 1e-3) for name in names[::2]]
    wrong = [report.BaselineRow(name, "a wrong one", "", error="wrong: c: shape") for name in names[::4]]
    made = report.Benchmark(
        "NVIDIA H100 80GB HBM3", "580.1", "2026-01-02", "abc", LIMITS.as_dict(), rows, right + wrong
    )
    plot = drawn(report.draw_benchmark, made, operator)
    plot.require_legible()
    texts = {text for text, _ in plot.texts}
    assert {*(written_out(operator, name) for name in names), "12345.6", "1234.5", "4.25", f"{best:.0%}"} <= texts
    assert {"another library 1.2.3", "8.10", "a wrong one", "wrong"} <= texts
    assert plot.panels[0].get_xlim()[1] == pytest.approx(max(100, 100 * best))
    ends = []
    for number, share in enumerate(shares):
        ends += [100 * share, *([10.0] if number % 2 == 0 else []), *([0.0] if number % 4 == 0 else [])]
    plot.require_bars(0, 0, ends)
    colors = [bar.get_facecolor() for bar in plot.panels[0].patches]
    assert len({*colors}) == 3, "compute, memory, and the baselines of what memory bounds"
    assert plot.panels[0].get_ylim() == (len(ends) - 0.5, -0.5)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
    ],
)
def test_gpu_folders(name: str, slug: str) -> None:
    assert machine.gpu_slug(name) == slug


def test_an_unknown_case_is_the_same_error_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    subject = Subject("attn_dist")
    name = subject.cases.BENCH[0].name
    assert [case.name for case in bench.chosen(subject, [name])] == [name]
    with pytest.raises(InputError) as caught:
        bench.chosen(subject, [name + "0"])
    messages = [str(caught.value)]
    with pytest.raises(SystemExit):
        without_gpu.main(["attn_dist", "--case", name + "0"])
    messages.append(capsys.readouterr().err)
    for message in messages:
        assert "'--case': expected a case of cupymla/ops/attn_dist/cases.py such as " in message
        assert f", got '{name}0'" in message
    assert ", ".join(case.name for case in subject.cases.BENCH) in messages[0], "a few are all shown"
    assert messages[1].count("such as") == 1
    with pytest.raises(InputError, match="such as h"):
        subject.those(subject.cases.CASES, ["nothing like it"])


def test_a_training_step_is_that_of_dsa_attention() -> None:
    """The same results and gradients as of the operator that frameworks differentiate."""
    torch = pytest.importorskip("torch")
    from cupymla.interop import torch as mla

    step = training_step.Step(heads=2, tokens=24, topk=8)
    made = training_step.run(step, training_step.arrays(step, np), np)

    def tensor(name: str) -> Any:
        array = made[name]
        narrow = array.dtype.name == "bfloat16"
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if narrow else torch.from_numpy(array)

    q, kv, iq, ik, iw = (tensor(name).clone().requires_grad_() for name in ("q", "kv", "index_q", "index_k", "weights"))
    weight = torch.ones(step.tokens, requires_grad=True)
    options: Any = {"loss_weight": weight, "topk_length": tensor("count"), "sm_scale": 576**-0.5}
    out, _, aux = mla.dsa_attention(q, kv, iq, ik, iw, tensor("indices"), **options)
    torch.testing.assert_close(out, tensor("out"))
    torch.autograd.backward((out, aux), (tensor("dout"), torch.ones_like(aux)))
    results = ("dq", "dkv", "d_index_q", "d_index_k", "d_weights", "loss")
    for given, name in zip((q, kv, iq, ik, iw, weight), results, strict=True):
        torch.testing.assert_close(given.grad, tensor(name), msg=name)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_training_step_is_measured() -> None:
    found = training_step.measure(training_step.Step(64, 512, 128), timing.Timer())
    assert set(found.operator_us) == set(training_step.COLORS)
    assert 0 < max(found.operator_us.values()) < found.step_us
    # The selection, the distribution and the gradient of its scores at least.
    assert found.working_bytes >= 3 * 512 * 128 * 4


def test_host_times_are_those_of_the_quietest_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of one round: no call's least time is picked by itself."""
    times = iter([4.0, 6.0, 15.0, 3.5, 7.0, 13.0, 5.0, 5.5, 14.0])
    order: list[str] = []

    def host_us(call: Any, synchronize: Any, batch: int) -> float:
        order.append(call())
        assert batch == 200  # as the call takes no time
        return next(times)

    monkeypatch.setattr(timing, "host_us", host_us)
    calls = {"bare": lambda: "b", "prepared": lambda: "p", "ordinary": lambda: "o"}
    found = timing.host_us_in_turns(calls, lambda: None, rounds=3)
    assert found == {"bare": 3.5, "prepared": 7.0, "ordinary": 13.0}
    assert order == ["b", "p", "o"] * 3


@pytest.mark.parametrize(("name", "found"), [("sparse_mla_fwd", {"torch": 0, "torch_grad": 2}), ("topk", {"torch": 0})])
def test_host_times_of_torch_are_taken_with_gradients_and_without(
    name: str, found: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of microseconds stands how many tensors of a call require a gradient."""
    torch = pytest.importorskip("torch")
    from cupymla.interop import torch as bridge

    to_torch = frameworks.to_torch
    monkeypatch.setattr(frameworks, "_jax_us", lambda *_: None)
    monkeypatch.setattr(frameworks, "to_torch", lambda array, device: to_torch(array, "cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        timing, "host_us_in_turns", lambda calls, *_, **__: {way: call() for way, call in calls.items()}
    )

    def called(**given: Any) -> int:
        return sum(isinstance(value, torch.Tensor) and value.requires_grad for value in given.values())

    monkeypatch.setitem(vars(bridge), name, called)
    assert frameworks.overhead(Subject(name)) == found


def test_the_page_has_a_column_for_each_way_that_was_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"operator": "one", "launches": 1, "bare": 1.0, "torch": 2.0}
    file = tmp_path / "host.json"
    monkeypatch.setattr(pages, "newest", lambda name: file)
    for rows, columns in (
        ([one], "bare | torch |"),
        ([one, {**one, "torch_grad": 3.0}], "bare | torch | torch_grad |"),
    ):
        file.write_text(json.dumps({"gpu": "H", "driver": "1", "date": "2", "rows": rows}), encoding="utf-8")
        assert f"| operator | launches | {columns}\n" in pages.host()


def test_slow_calls_have_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []

    def host_us(call: Any, synchronize: Any, batch: int) -> float:
        batches.append(batch)
        return 1.0

    monkeypatch.setattr(timing, "host_us", host_us)
    assert timing.host_us_in_turns({"bare": lambda: None}, lambda: time.sleep(0.01), seconds=0.0) == {"bare": 1.0}
    assert batches == [20]
