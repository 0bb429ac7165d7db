"""Baselines: files of them are read as documented, what is wrong is reported and not timed, the rest alternates."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupymla import cli, xl_paged_attention
from cupymla.bench import baselines, machine, timing
from cupymla.bench import run as bench
from cupymla.bench.baselines import agreement, attention, packages
from cupymla.bench.frameworks import to_torch
from cupymla.bench.processes import Lost
from cupymla.bench.timing import Ceilings
from cupymla.errors import InputError
from cupymla.ops.mla_cases import sized
from cupymla.ops.xl_paged_attention import cases
from cupymla.testing.compare import Mismatch
from cupymla_lab.subjects import Subject

torch = pytest.importorskip("torch")

LIMITS = Ceilings(cublas_bf16_tflops=800.0, copy_tbps=4.0, read_tbps=4.5, empty_us=3.5)
CASE = "h128_d576_k2048_q4096_kv8192"
FILE = """
def make(case, inputs):
    return None if case.topk == 1024 else (lambda: None, "1.0")

BASELINES = {"sparse_mla_fwd/h128_*": {"mine": make}, "topk/*": {"other": make}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


# The protocol ---------------------------------------------------------------------------------------------------------


def test_a_files_makers_serve_the_cases_of_their_patterns(file: Path) -> None:
    assert list(baselines.makers("sparse_mla_fwd", CASE, file)) == ["mine"]
    assert not baselines.makers("sparse_mla_fwd", CASE.replace("h128", "h64"), file)
    assert not baselines.makers("sparse_mla_bwd", CASE, file)
    assert not baselines.makers("sparse_mla_fwd", CASE)
    assert list(baselines.makers("topk", "t4096_l4096_k2048", file)) == ["other"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import no_such_module", "No module named"),
        ("x = 1", "BASELINES is None"),
        ("BASELINES = {'sparse_mla_fwd/h128_*': print}", "callables by name"),
        ("BASELINES = {'sparse_mla_fwd/h128_*': {'mine': 3}}", "callables by name"),
        ("BASELINES = {'sparse_mla_fwd/h127_*': {'mine': print}}", "patterns of benchmark cases"),
    ],
)
def test_a_file_that_is_none_is_refused(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(text)
    with pytest.raises(InputError, match=told):
        baselines.load(path)
    with pytest.raises(InputError, match="No such file"):
        baselines.load(tmp_path / "missing.py")


def test_what_a_maker_may_return() -> None:
    case: Any = SimpleNamespace(name=CASE)

    def made(result: Any) -> Any:
        return baselines.make("mine", lambda case, inputs: result, case, {}, ("out", "lse"))

    assert made(None) is None
    by_order = made((lambda: (1, 2), "1.0"))
    assert (by_order.version, by_order.outputs(by_order.call())) == ("1.0", {"out": 1, "lse": 2})
    assert by_order.outputs(7) == {"out": 7} and by_order.outputs({"lse": 3}) == {"lse": 3}
    assert made((lambda: 5, "1.0", lambda found: {"lse": found})).outputs(5) == {"lse": 5}
    wrongs: tuple[Any, ...] = (lambda: 5, (lambda: 5,), (lambda: 5, 1.0), (lambda: 5, "1.0", {}), (5, "1.0"))
    for wrong in wrongs:
        with pytest.raises(InputError, match="baseline mine"):
            made(wrong)


# Whether outputs are the same -----------------------------------------------------------------------------------------


def _outputs() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    out = rng.standard_normal((50, 40)).astype(ml_dtypes.bfloat16)
    lse = rng.standard_normal(50).astype(np.float32)
    lse[7], lse[8] = np.inf, -np.inf
    return {"out": out, "lse": lse, "d_sink": None}


def test_another_rounding_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = _outputs()
    neighbours = (ours["out"].view(np.int16) + np.arange(40, dtype=np.int16) % 2).view(ml_dtypes.bfloat16)
    for block in (1 << 24, 33):
        monkeypatch.setattr(agreement, "_BLOCK", block)
        found = agreement.difference("x", {}, ours, {"out": neighbours, "lse": ours["lse"]})
        assert 2**-9 < found < 2**-7
    assert agreement.difference("x", {}, ours, {"out": to_torch(neighbours, "cpu")}) == found
    assert agreement.difference("x", {}, ours, {"lse": ours["lse"]}) == 0


def _one_element(out: Any) -> None:
    out[3, 4] += 0.2


def _swapped_rows(out: Any) -> None:
    out[[2, 9]] = out[[9, 2]]


def _scaled(out: Any) -> None:
    out *= ml_dtypes.bfloat16(1.0156)


def _nan(out: Any) -> None:
    out[1, 1] = np.nan


@pytest.mark.parametrize("spoil", [_one_element, _swapped_rows, _scaled, _nan])
def test_what_is_wrong_is_seen(spoil: Callable[[Any], None]) -> None:
    ours = _outputs()
    theirs = ours["out"].copy()
    spoil(theirs)
    with pytest.raises(Mismatch, match="out: "):
        agreement.difference("x", {}, ours, {"lse": ours["lse"], "out": theirs})


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ({}, "outputs none"),
        ({"dout": np.zeros(3)}, "outputs dout"),
        ({"d_sink": np.zeros(3)}, "outputs d_sink"),
        ({"lse": np.zeros(49, np.float32)}, "shape"),
        ({"lse": np.zeros(50, np.float32)}, "inf in 1 wrong places"),
    ],
)
def test_what_cannot_be_compared_is_wrong(theirs: dict[str, Any], told: str) -> None:
    with pytest.raises(Mismatch, match=told):
        agreement.difference("x", {}, _outputs(), theirs)


def test_a_top_k_is_its_scores_in_any_order() -> None:
    scores = np.array([[1.0, 5.0, 3.0, 3.0, 0.0, -0.0], [4.0, 4.0, 4.0, 9.0, 2.0, 1.0]], np.float32)
    ours = {"indices": np.array([[1, 2, 3, 4], [0, 1, 3, 4]], np.int32), "count": np.array([4, 4], np.int32)}

    def difference(*rows: list[int]) -> float:
        return agreement.difference("topk", {"scores": scores}, ours, {"indices": torch.tensor(rows).int()})

    assert difference([3, 5, 1, 2], [4, 3, 2, 0]) == 0
    for rows in ([3, 4, 1, 0], [4, 3, 2, 0]), ([3, 4, 1, -1], [4, 3, 2, 0]):
        with pytest.raises(Mismatch, match="not equal"):
            difference(*rows)
    with pytest.raises(Mismatch, match="selected twice"):
        difference([3, 3, 1, 4], [4, 3, 2, 0])


def test_an_indexers_selection_is_its_scores_too() -> None:
    subject = Subject("indexer_topk")
    inputs = subject.cases.inputs(subject.cases.CASES[0], 0)
    ours = subject.named(subject.call(**inputs))

    def difference(indices: np.ndarray[Any, Any]) -> float:
        return agreement.difference("indexer_topk", inputs, ours, {"indices": torch.from_numpy(indices)})

    assert difference(ours["indices"][:, ::-1].copy()) == 0
    wrong = ours["indices"].copy()
    wrong[0, 0] = next(key for key in range(200) if key not in wrong[0])
    with pytest.raises(Mismatch):
        difference(wrong)


def test_a_distribution_is_compared_in_rows_that_sum_to_1() -> None:
    dist = np.random.default_rng(1).random((5, 30), dtype=np.float32)
    assert agreement.difference("attn_dist", {}, {"dist": dist}, {"dist": dist / dist.sum(-1, keepdims=True)}) < 1e-6
    with pytest.raises(Mismatch):
        agreement.difference("attn_dist", {}, {"dist": dist}, {"dist": dist**2})


# Timing ---------------------------------------------------------------------------------------------------------------


class NumpyAsCupy(ModuleType):
    """What a timed case needs of CuPy, from NumPy."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def get_default_memory_pool() -> Any:
        return SimpleNamespace(free_all_blocks=lambda: None)


class FakeTimer:
    """Takes a microsecond for each call that it is given."""

    def alternating_us(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        assert all(call() is not None for call in calls.values())
        return {name: 1.0 + number for number, name in enumerate(calls)}


def test_a_wrong_baseline_is_reported_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", NumpyAsCupy("cupy"))
    subject = Subject("topk")
    case = next(case for case in subject.cases.CASES if case.name == "t3_l5000_k64")

    def maker(select: Callable[[Any], Any]) -> baselines.Maker:
        def make(case: Any, inputs: dict[str, Any]) -> Any:
            return lambda: {"indices": select(inputs["scores"])}, "2.5"

        return make

    def right(scores: Any) -> Any:
        return torch.from_numpy(scores).topk(64).indices.int()

    def fails(case: Any, inputs: dict[str, Any]) -> Any:
        raise RuntimeError("no such shape")

    makers = {
        "smallest": maker(lambda scores: np.argsort(scores, -1)[:, :64].astype(np.int32)),
        "torch": maker(right),
        "refuses": fails,
        "other shapes": lambda case, inputs: None,
    }
    us, found = bench.time_case(subject, case, FakeTimer(), makers)  # type: ignore[arg-type]
    assert us == 1.0 and [one.name for one in found] == ["smallest", "torch", "refuses"]
    smallest, right_one, refuses = (one.row(subject, case, LIMITS) for one in found)
    assert (smallest.us, smallest.of_ceiling, smallest.difference) == (None, None, None)
    assert (smallest.error or "").startswith("wrong: selected scores: ") and smallest.label == "smallest 2.5"
    assert (right_one.us, right_one.error, right_one.difference) == (2.0, None, 0.0)
    assert right_one.of_ceiling == bench.row(subject, case, 2.0, LIMITS).of_ceiling
    assert refuses.us is None and refuses.error == "failed: RuntimeError: no such shape"


class CountingTimer(timing.Timer):
    """One without a GPU, whose calls take the host as long as they say."""

    def __init__(self) -> None:
        nothing = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
        self._start = self._end = nothing
        self.held: set[float] = set()

    def _once(self, call: Callable[[], object], hold_us: float) -> float:
        self.held.add(hold_us)
        call()
        return 5.0


def test_calls_alternate_and_slow_hosts_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], ""

    def call(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            nonlocal order
            order += name
            now[0] += seconds

        return run

    monkeypatch.setattr(timing, "time", SimpleNamespace(sleep=lambda s: None, perf_counter=lambda: now[0]))
    timer = CountingTimer()
    assert timer.alternating_us({"a": call("a", 5e-6), "b": call("b", 1e-4)}, repeats=12) == {"a": 5.0, "b": 5.0}
    assert order == "ab" * (timing.WARM_UP + 12)
    (held,) = timer.held
    assert held == pytest.approx(200.0)
    timer.held.clear()
    timer.us(call("a", 5e-6))
    assert timer.held == {0.0}


@pytest.mark.gpu
def test_a_slow_hosts_time_stays_out() -> None:
    """The host takes longer for the call than the flush does; an empty kernel is all that there is to time."""
    import cupy

    kernel = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")

    def call() -> None:
        time.sleep(5e-4)
        kernel((1,), (32,), ())

    assert timing.Timer().us(call) < 100
    product = timing.fp8_matmul()
    if product is not None:
        product()
        cupy.cuda.get_current_stream().synchronize()


def test_a_baseline_that_ends_the_process_costs_itself_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "provenance", lambda commit: dict.fromkeys(("gpu", "driver", "date", "commit"), ""))
    jobs: list[bench.Job] = []

    def result(job: bench.Job) -> bench.Timed:
        jobs.append(job)
        if job.with_baselines:
            raise Lost("its process ended with exit status 1")
        return bench.Timed(1000.0)

    subject = Subject("sparse_mla_fwd")
    case = subject.those(subject.cases.BENCH, [CASE])[0]
    made, wrong = bench.run(subject, [case], LIMITS, result, commit="abc", file=file)
    assert [row.case for row in made.rows] == [CASE] and not made.baselines
    assert wrong == {f"{CASE}, beside mine": "its process ended with exit status 1"}
    assert [job.with_baselines for job in jobs] == [True, False] and jobs[0].file == file


def test_the_command_refuses_a_wrong_file_before_it_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subjects = [Subject("topk")]
    monkeypatch.setattr("cupymla.cli.commands.with_kernels", lambda names: subjects)
    monkeypatch.setattr("cupymla.bench.processes.Processes", None)
    assert cli.main(["bench", "topk", "--baselines", str(tmp_path / "missing.py")]) == 2
    assert "argument '--baselines': expected a file that defines BASELINES" in capsys.readouterr().err


# Installed packages ---------------------------------------------------------------------------------------------------

PACKAGES = {
    "flash_mla": """
import torch

def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512):
    assert q.shape[1] % 64 == 0 and kv.shape[1] == indices.shape[1] == 1
    keys = kv[indices[:, 0].long(), 0].float()
    scores = torch.einsum("shd,skd->shk", q.float(), keys) * sm_scale
    out = torch.einsum("shk,skd->shd", scores.softmax(-1), keys[..., :d_v])
    return out.bfloat16(), scores.amax(-1), scores.logsumexp(-1)
""",
    "deep_gemm": """
import torch

def fp8_mqa_logits(q, kv, weights, starts, ends, clean_logits):
    keys, scales = kv
    products = torch.einsum("thd,ld->thl", q.float(), keys.float()).relu()
    logits = (products * weights[..., None]).sum(1) * scales
    place = torch.arange(len(keys))
    seen = (place >= starts[:, None]) & (place < ends[:, None])
    return logits.masked_fill(~seen, float("-inf"))
""",
    "cudnn": """
import torch

class DSA:
    def __init__(self, *arrays, softmax_scale, deterministic):
        assert not deterministic

    SparseAttentionBackward = None

    def check_support(self):
        return True

    def compile(self):
        pass

    def scratch_workspace_bytes(self):
        return 8

    @staticmethod
    def sparse_attention_backward_wrapper(
        q, kv, out, dout, lse, sink, indices, *, softmax_scale, deterministic, workspace, dq, dkv
    ):
        q, kv = (tensor.float().requires_grad_() for tensor in (q, kv))
        keys = kv[indices.long()]
        p = torch.softmax(torch.einsum("shd,skd->shk", q, keys) * softmax_scale, -1)
        made = torch.einsum("shk,skd->shd", p, keys[..., :512])
        gradients = torch.autograd.grad(made, (q, kv), dout.float())
        dq.copy_(gradients[0])
        dkv.copy_(gradients[1])

    @staticmethod
    def indexer_backward_wrapper(
        q, weights, k, target, predicted, indices, *, grad_loss, loss_coeff, deterministic,
        d_index_q, d_weights, d_index_k
    ):
        assert not deterministic and all(array.dtype == torch.bfloat16 for array in (q, weights, k))
        gradient = (target.sum(-1, keepdim=True) * predicted - target) * grad_loss * (loss_coeff / q.shape[1])
        target.copy_(gradient)
        moving = [array[0].double().requires_grad_() for array in (q, weights, k)]
        products = torch.einsum("thd,tsd->ths", moving[0], moving[2][indices[0].long()]).relu()
        scores = torch.einsum("ths,th->ts", products, moving[1])
        made = torch.autograd.grad(scores, moving, gradient[0].double())
        for result, one in zip((d_index_q, d_weights, d_index_k), made):
            result.copy_(one[None])

    @staticmethod
    def sparse_attn_score_recompute_wrapper(q, kv, lse, indices, scale, *, out):
        scores = torch.einsum("bshd,bskd->bshk", q.float(), kv[:, indices[0].long()].float()) * scale
        p = torch.exp(scores - lse[..., None]).sum(2)
        out.copy_(p / p.sum(-1, keepdim=True))

DSA.SparseAttentionBackward = DSA
""",
    "flashinfer": """
def top_k(input, k, sorted=False, deterministic=False):
    return input.topk(k)
""",
}


BACKWARD = ["cuDNN", "cuDNN, not deterministic"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in PACKAGES.items():
        (tmp_path / f"{name}.py").write_text(text + '\n__version__ = "7.1"\n')
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("operator", "case", "names"),
    [
        ("sparse_mla_fwd", sized(16, 576, 128, 3, 300, selection="full", intent="shapes"), ["FlashMLA"]),
        ("sparse_mla_fwd", sized(64, 512, 128, 2, 200, selection="full", intent="shapes"), ["FlashMLA"]),
        ("sparse_mla_bwd", sized(16, 576, 65, 6, 200, "_dist", "options", wants_dist=True, selection="full"), BACKWARD),
        (
            "sparse_mla_bwd",
            sized(16, 576, 65, 6, 200, "_det", "options", selection="full", deterministic=True),
            BACKWARD,
        ),
        ("attn_dist", sized(16, 576, 65, 6, 200, intent="options", selection="full"), ["cuDNN"]),
        ("indexer_bwd", "bf16_h16_d128_t2_l200_k128_tile", BACKWARD),
        ("indexer_bwd", "bf16_h16_d128_t2_l200_k128_tile_det", BACKWARD),
        ("indexer_logits", "fp8_h32_d128_t3_l200", ["DeepGEMM"]),
        ("topk", "t3_l5000_k64", ["FlashInfer", "FlashInfer, deterministic"]),
    ],
)
def test_an_installed_package_is_found_and_agrees(operator: str, case: Any, names: list[str]) -> None:
    """Of packages that compute as the real ones are documented to: what is tested is how they are called."""
    subject = Subject(operator)
    if isinstance(case, str):
        case = next(one for one in subject.cases.CASES if one.name == case)
    inputs = subject.cases.inputs(case, 0)
    ours = subject.named(subject.call(**inputs))
    tensors = {
        name: to_torch(value, "cpu") if isinstance(value, np.ndarray) else value for name, value in inputs.items()
    }
    found = baselines.makers(operator, "any")
    assert list(found) == names
    for name, maker in found.items():
        baseline = baselines.make(name, maker, case, tensors, subject.outputs)
        if names == BACKWARD and ("_det" in case.name) != ("not deterministic" in name):
            assert baseline is None
            continue
        assert baseline is not None and baseline.version == "7.1"
        agreement.difference(operator, inputs, ours, baseline.outputs(baseline.call()))


@pytest.mark.usefixtures("installed")
def test_what_a_package_cannot_run_is_left_to_it() -> None:
    maker = baselines.makers("sparse_mla_fwd", CASE)["FlashMLA"]
    for case in Subject("sparse_mla_fwd").cases.BENCH:
        if case.dtype == "float16" or case.topk % 128 or case.sink != "none" or case.options or case.lengths != "none":
            assert maker(case, {}) is None
    assert not packages.makers("sparse_mla_bwd_phase1")


# torch's attention ----------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32"}


@pytest.mark.parametrize("lens", [(300, 128, 5), (256,)], ids=str)
@pytest.mark.parametrize("form", [{}, {"bias": "dense"}, {"bias": "relative", "extent": 40}], ids=str)
def test_torchs_attention_agrees(lens: tuple[int, ...], form: dict[str, Any]) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    case = cases.make("speed", context_lens=lens, **SIZES, **form)
    inputs = cases.inputs(case, 3)
    wanted = xl_paged_attention(**inputs)[0]
    named = attention.attention(torch, case, inputs, flex_attention)
    assert tuple(named) == attention.KINDS and str(attention.PAGE) in attention.KINDS[2]
    for name, call in named.items():
        found = attention._read(call())["out"]
        assert isinstance(found, torch.Tensor)
        np.testing.assert_allclose(found.numpy(), wanted, atol=2e-5, err_msg=name)


def test_pages_that_are_listed_are_a_sequences_own() -> None:
    """The compiled attention reads what the lists name, the one above all pages."""
    lens = torch.tensor([300, 128, 5])
    keys = torch.arange(3.0 * 2 * 300 * 4).view(3, 2, 300, 4)
    laid, _, numbers, mask = attention._paged(torch, keys, keys, lens)
    listed = mask.to_dense()[:, 0, 0].bool()
    assert (listed == ((numbers >= 0) & (numbers * attention.PAGE < lens[:, None]))).all()
    assert mask.full_kv_num_blocks[:, 0, 0].tolist() == [2, 1, 0]
    for sequence, length in enumerate(lens.tolist()):
        whole, ends = length // attention.PAGE, length % attention.PAGE != 0
        assert mask.kv_num_blocks[sequence, 0, 0] == ends
        pages = mask.full_kv_indices[sequence, 0, 0, :whole], mask.kv_indices[sequence, 0, 0, : int(ends)]
        assert [numbers[sequence, part.long()].tolist() for part in pages] == [list(range(whole)), [whole] * ends]
    for sequence, page in torch.nonzero(listed).tolist():
        number = int(numbers[sequence, page])
        rows = min(int(lens[sequence]) - number * attention.PAGE, attention.PAGE)
        found = laid[0, :, page * attention.PAGE :][:, :rows]
        assert torch.equal(found, keys[sequence, :, number * attention.PAGE :][:, :rows])
