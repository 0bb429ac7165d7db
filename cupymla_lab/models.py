"""What transformers' DSA models cost alone and with `interop.transformers.enable`: training step, prefill, decode step.

    python -m cupymla_lab models --out docs/benchmarks

Random weights at real attention sizes, bfloat16, two layers with dense MLPs. Writes <out>/<gpu>/models.json and .png:
milliseconds, the most memory, the error of logits and gradients against the model's own code in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cupymla.bench import machine, report
from cupymla.cli.terminal import exit_with

LAYERS, CHUNK, VOCABULARY, GIB = 2, 1024, 1024, 2**30

Row = Mapping[str, Any]
Results = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Work:
    """What is timed.

    Attributes:
        what: "train" (forward and backward), "prefill" (of a prompt, in chunks), "decode" (one token a sequence behind
            a prompt), "graph" (the same with a static cache, as a CUDA graph), "module" (one attention module of the
            sizes that the family's configuration has by default, forward and backward) or "error" (no times).
        heads, tokens, batch: of attention, of a sequence, sequences.
        attention: "cupymla"; transformers' own, "sdpa" or "eager"; or "none", zeros in its place.
        family: the model's type.
        cache: "fp8", or nothing: the model's dtype.
        index_heads: of the indexer.
    """

    what: str
    heads: int
    tokens: int
    batch: int = 1
    attention: str = "cupymla"
    family: str = "glm_moe_dsa"
    cache: str = ""
    index_heads: int = 32

    @property
    def name(self) -> str:
        """As `--only` finds it."""
        heads = f"h{self.heads}" if self.index_heads == 32 else f"h{self.heads}x{self.index_heads}"
        return f"{self.family}_{self.what}_{heads}_t{self.tokens}_b{self.batch}_{self.attention}{self.cache}"


FAMILIES = ("glm_moe_dsa", "deepseek_v32", "hy_v4", "mistral_large4", "dots3_note_text", "glm5_next")
"""transformers 5.17 lacks `mistral_large4` and `dots3_note`."""


def _beside(what: str, heads: int, tokens: int, batch: int = 1, own: str = "sdpa") -> tuple[Work, Work]:
    return Work(what, heads, tokens, batch, own), Work(what, heads, tokens, batch)


WORKS: tuple[Work, ...] = (
    *_beside("train", 32, 8192),
    Work("train", 32, 8192, attention="none"),
    *_beside("train", 32, 16384),
    Work("train", 32, 65536),
    *_beside("prefill", 64, 32768),
    *_beside("prefill", 64, 131072),
    *_beside("decode", 64, 1024, own="eager"),
    *_beside("decode", 64, 2048, own="eager"),
    *_beside("decode", 64, 32768, own="eager"),
    Work("decode", 64, 131072),
    *_beside("decode", 64, 8192, 8, own="eager"),
    Work("decode", 64, 32768, 8),
    Work("decode", 64, 32768, 32),
    Work("decode", 64, 131072, cache="fp8"),
    Work("decode", 64, 32768, 32, cache="fp8"),
    Work("prefill", 64, 131072, cache="fp8"),
    Work("graph", 64, 1024),
    Work("graph", 64, 2048),
    Work("graph", 64, 32768),
    Work("graph", 64, 131072),
    Work("graph", 64, 131072, cache="fp8"),
    Work("module", 64, 131072),
    *(Work("error", 32, 1024, family=family) for family in FAMILIES),
    *(Work("error", 64, 1024, family=f, index_heads=n) for f, n in zip(FAMILIES, 3 * (16, 64), strict=True)),
)

ERROR_TOPK = 512
"""Of the rows for errors: half of the tokens are left out."""

ERROR_SEQUENCES = 4

OUT_OF_MEMORY = "out of memory"
"""Why a row has no times that is a result itself."""

LOGITS = "logits"
"""Among the names of gradients."""

FEW = "gradients of fewer than 32 numbers"
"""The name of all such together."""

INDEXED = "indexed_attention"
OPTIONS: dict[str, dict[str, Any]] = {
    "mistral_large4": {
        "num_hidden_layers": 3,
        "kv_source_layers": [0, 1, 1],
        "no_rope_layers": [0, 1, 1],
        "indexer_types": ["full", "full", "shared"],
    },
    "dots3_note_text": {"layer_types": [INDEXED] * LAYERS},
    "glm5_next": {"layer_types": [INDEXED] * LAYERS, "indexer_types": ["full", "shared"], "qk_rope_head_dim": 0},
}
"""What a family wants beside what all have."""

_SMALL = {"hidden_size": 64, "intermediate_size": 64}
EYES: dict[str, dict[str, Any]] = {
    "mistral_large4": {
        "model_type": "pixtral",
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 32,
        **_SMALL,
    },
    "glm5_next": {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "projection_intermediate_size": 64, **_SMALL},
}
"""Families whose models have a head only together with a model of images: a small one of those, which nothing runs."""


def model_of(work: Work, hidden: int, dtype: Any, device: str = "cuda", **own: Any) -> Any:
    """The work's model: the same weights for every attention. `own`: options that its configuration gets besides."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from cupymla.interop import transformers as dsa

    implementation = {"cupymla": "eager", "none": "sdpa"}.get(work.attention, work.attention)
    options = {"num_hidden_layers": LAYERS, "qk_rope_head_dim": 64} | OPTIONS.get(work.family, {})
    if "layer_types" in options and transformers.__version__ < "5.18":
        options["layer_types"] = ["deepseek_sparse_attention"] * LAYERS  # its word for INDEXED
    attention = {
        "hidden_size": hidden,
        "num_attention_heads": work.heads,
        "num_key_value_heads": work.heads,
        "q_lora_rank": hidden // 2,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "index_topk": ERROR_TOPK if work.what == "error" else 2048,
        "index_n_heads": work.index_heads,
        "index_head_dim": 128,
    }
    always = {
        "intermediate_size": hidden,
        "vocab_size": VOCABULARY,
        "mlp_layer_types": ["dense"] * options["num_hidden_layers"],
        "first_k_dense_replace": options["num_hidden_layers"],
        "max_position_embeddings": 200_000,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    kind, eyes = AutoModelForCausalLM, EYES.get(work.family)
    config = AutoConfig.for_model(
        work.family if eyes is None else f"{work.family}_text",
        **{**({} if work.what == "module" else attention), **always, **options, **own},
    )
    if eyes is not None:
        kind = AutoModelForImageTextToText
        config = AutoConfig.for_model(work.family, text_config=config, vision_config=eyes)
    torch.manual_seed(0)
    model = kind.from_config(config, attn_implementation=implementation).to(device, dtype)
    if work.attention == "cupymla":
        dsa.enable(model, cache="fp8" if work.cache else None)
    if work.attention == "none":
        for layer in model.model.layers:
            layer.self_attn.forward = lambda hidden_states, *_, **__: (torch.zeros_like(hidden_states), None, None)
    return model


def milliseconds(step: Callable[[], object], repeats: int = 5, warm: int = 2) -> dict[str, float]:
    """Medians of a step's wall times, after some that do not count: {"ms"}, and {"host_ms"} until the host is free."""
    import torch

    times = []
    for repeat in range(warm + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        queued = time.perf_counter()
        torch.cuda.synchronize()
        if repeat >= warm:
            times.append({"ms": (time.perf_counter() - start) * 1e3, "host_ms": (queued - start) * 1e3})
    return {name: statistics.median(found[name] for found in times) for name in times[0]}


def launch_us() -> float:
    """What a launch of torch's costs the host in this minute: hosts of virtual machines have slow ones."""
    import torch

    number = torch.zeros(1, device="cuda")

    def launch() -> None:
        for _ in range(1000):
            number.add_(1)

    return milliseconds(launch)["host_ms"]


def _tokens(work: Work, count: int) -> Any:
    import torch

    return torch.randint(1, VOCABULARY, (work.batch, count), device="cuda")


def _fill(model: Any, cache: Any, work: Work) -> None:
    for start in range(0, work.tokens, CHUNK):
        ids = _tokens(work, min(CHUNK, work.tokens - start))
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


def measure(work: Work) -> dict[str, Any]:
    """One row: times, or the errors."""
    import torch
    from transformers import DynamicCache, StaticCache

    if work.what == "error":
        return errors(work)
    model = model_of(work, 1024 if work.what == "train" else 2048, torch.bfloat16)
    if work.what == "train":
        ids = _tokens(work, work.tokens)

        def train() -> None:
            model.zero_grad()
            model(ids, labels=ids, use_cache=False).loss.backward()

        return milliseconds(train)
    if work.what == "module":
        return module(model, work)
    with torch.no_grad():
        if work.what == "prefill":
            return prefills(model, work)
        static = work.what == "graph"
        cache = (
            StaticCache(config=model.config, max_cache_len=work.tokens + 64)
            if static
            else DynamicCache(config=model.config)
        )
        _fill(model, cache, work)
        ids = _tokens(work, 1)

        def decode() -> Any:
            return model(ids, past_key_values=cache, use_cache=True).logits

        if not static:
            return {**milliseconds(decode), "launch_us": launch_us()}
        for _ in range(3):
            decode()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode()
        return milliseconds(graph.replay, 9)


def module(model: Any, work: Work) -> dict[str, Any]:
    """Times of the first layer's attention alone, forward and backward, with what the model hands it."""
    import torch

    attention = model.model.layers[0].self_attn
    given: dict[str, Any] = {}

    class Taken(Exception):
        """Ends the model's forward pass in front of its first attention."""

    def take(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given.update(named, **dict(zip(("hidden_states",), arguments, strict=False)))
        raise Taken

    with attention.register_forward_pre_hook(take, with_kwargs=True), torch.no_grad(), contextlib.suppress(Taken):
        model.model(_tokens(work, work.tokens), use_cache=False)
    states = given.pop("hidden_states").detach().requires_grad_()
    gradient = torch.randn_like(states)

    def step() -> None:
        attention.zero_grad()
        states.grad = None
        attention(hidden_states=states, **given)[0].backward(gradient)

    return milliseconds(step, 3, 1)


def prefills(model: Any, work: Work) -> dict[str, Any]:
    """Times of a prompt's first pass, whose lengths are new to the process, and of a second one as "again_ms".

    In the first pass torch's attention plans for each length, in every process. cupymla compiles kernels, once on a
    machine: what is recorded is to be a run with a full cache.
    """
    from transformers import DynamicCache

    def fill() -> None:
        _fill(model, DynamicCache(config=model.config), work)

    _fill(model, DynamicCache(config=model.config), replace(work, tokens=2 * CHUNK))
    first = milliseconds(fill, 1, 0)
    return {**first, "again_ms": milliseconds(fill, 1, 0)["ms"]}


def errors(work: Work) -> dict[str, Any]:
    """Errors of the model's own bfloat16 and of ours, of float32: logits, and the gradient with the largest ratio."""
    import torch

    sequences = [_tokens(work, work.tokens) for _ in range(ERROR_SEQUENCES)]
    exact, own, ours = (
        logits_and_gradients(model_of(replace(work, attention=kind), 1024, torch.bfloat16).to(dtype), sequences)
        for kind, dtype in (("eager", torch.float32), ("eager", torch.bfloat16), ("cupymla", torch.bfloat16))
    )
    off = errors_beside(exact, own, ours)
    logits_own, logits_ours = off.pop(LOGITS)
    ratios = {name: ours / max(own, 1e-12) for name, (own, ours) in off.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    return {
        "logits_own": logits_own,
        "logits_ours": logits_ours,
        "gradient_ratio": ratios[worst],
        "gradient": worst,
        "gradient_ratio_median": statistics.median(ratios.values()),
    }


def errors_beside(exact: Results, own: Results, ours: Results) -> dict[str, tuple[float, float]]:
    """Errors of the own code's and of our logits and gradients, by name: of those that are not zero.

    Each is relative, and the root mean square of several sequences: a gradient of one number can be right by chance.
    """

    def rms(found: Results, name: str) -> float:
        pairs = [(got[name], right[name]) for got, right in zip(found, exact, strict=True)]
        return math.sqrt(statistics.fmean(float((a - b).norm() / b.norm()) ** 2 for a, b in pairs))

    names = [name for name, right in exact[0].items() if float(right.norm()) > 0]
    return {name: (rms(own, name), rms(ours, name)) for name in names}


def logits_and_gradients(model: Any, sequences: Iterable[Any]) -> list[dict[str, Any]]:
    """Of each sequence [1, tokens] the logits, as LOGITS, and the gradients by parameter, in float32."""
    import torch

    found = []
    for ids in sequences:
        model.zero_grad()
        logits = model(ids, use_cache=False).logits.float()
        torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({LOGITS: logits.detach(), **few_as_one(gradients)})
    return found


def few_as_one(gradients: Mapping[str, Any]) -> dict[str, Any]:
    """In float32, and those of fewer than 32 numbers as one: each may be lucky in bfloat16 of either side.

    Of hyper-connections some are next to zero in float32, and have relative errors above 1 in a model's own code.
    """
    import torch

    few = [gradient.float().flatten() for gradient in gradients.values() if gradient.numel() < 32]
    many = {name: gradient.float() for name, gradient in gradients.items() if gradient.numel() >= 32}
    return many | ({FEW: torch.cat(few)} if few else {})


def row_of(work: Work) -> dict[str, Any]:
    """A measured row, or why there is none."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        found = measure(work)
    except torch.OutOfMemoryError:
        found = {"failed": OUT_OF_MEMORY}
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    return {**asdict(work), **found, "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2)}


_WORDS = {
    "train": "training step",
    "prefill": "prefill in chunks of 1024",
    "decode": "decode step",
    "graph": "decode step, static cache, CUDA graph",
    "module": "attention module of GLM-5's sizes, forward and backward",
}


def described(row: Mapping[str, Any]) -> str:
    """What a row timed, in words."""
    batch = "" if row["batch"] == 1 else f", batch {row['batch']}"
    cache = f", {row['cache']} cache" if row.get("cache") else ""
    return f"{_WORDS[row['what']]}, {row['heads']} heads, {row['tokens']} tokens{batch}{cache}"


def side_by_side(rows: Iterable[Row]) -> dict[str, tuple[Row | None, Row | None]]:
    """Of each work that was timed, its row of transformers alone and that with cupymla."""
    found: dict[str, tuple[Row | None, Row | None]] = {}
    for row in rows:
        if row["what"] != "error" and row["attention"] != "none":
            own, ours = found.get(described(row), (None, None))
            found[described(row)] = (own, row) if row["attention"] == "cupymla" else (row, ours)
    return found


def lasting_ms(row: Row) -> float:
    """A row's time when lengths are no longer new: in a first prefill torch's attention plans for each."""
    return float(row.get("again_ms", row["ms"]))


def draw(rows: Iterable[Row], title: str, file: Path) -> None:
    """Bars of time and of memory of the works that ran both ways, transformers alone lighter. Needs matplotlib.

    Beside cupymla's numbers is how many times those alone are as large.
    """
    from matplotlib import pyplot

    pairs = {
        name: (own, ours)
        for name, (own, ours) in side_by_side(rows).items()
        if own and ours and "ms" in own and "ms" in ours
    }
    size = report.LABEL_SIZE
    names = [re.sub(r", (\d+ heads)", r"\n\1", name).replace("prefill", "second prefill") for name in pairs]
    figure, every = report.panels(names, 2, 9.0)
    drawn: dict[str, Callable[[Row], float]] = {"time, ms": lasting_ms, "the most memory, GiB": lambda r: r["peak_gib"]}
    for axes, (label, of) in zip(every, drawn.items(), strict=True):
        values = [of(row) for pair in pairs.values() for row in pair]
        left, right = (10.0**exponent for exponent in report.decades(values))
        report.frame(axes, len(pairs), left, right)
        axes.set_xscale("log")
        for side, (color, who) in enumerate(
            (("#a9c1d9", "transformers alone"), ("#4477aa", "with cupymla (how many times less)"))
        ):
            for place, pair in enumerate(pairs.values()):
                at, value = place + 0.4 * side - 0.2, of(pair[side])
                axes.barh(at, value - left, left=left, color=color, height=0.36, label=who if place == 0 else None)
                times = f" ({of(pair[0]) / value:.1f}x)" if side else ""
                axes.text(value, at, f" {report.in_digits(value)}{times}", va="center", fontsize=size)
        axes.set_xlabel(label, fontsize=size + 1)
        axes.set_yticks(range(len(pairs)), names if axes is every[0] else [""] * len(pairs), fontsize=size)
    handles, labels = every[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=size, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; 1 where a row failed, 2 without a GPU."""
    from cupymla import driver

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of benchmark files")
    parser.add_argument("--commit", help="the commit to record (default: ask git)")
    parser.add_argument("--only", default="", help="regular expression of the rows' names")
    options = parser.parse_args(arguments)
    if not driver.available():
        print("models are timed on a CUDA GPU, and there is none", file=sys.stderr)
        return 2
    import transformers

    rows = {}
    for work in WORKS:
        if re.search(options.only, work.name):
            found = rows[work.name] = row_of(work)
            print(work.name, {n: value for n, value in found.items() if n not in asdict(work)}, flush=True)
    failed = [name for name, row in rows.items() if row.get("failed") not in (None, OUT_OF_MEMORY)]
    if options.out and rows:
        origin = machine.provenance(options.commit)
        run = {"transformers": transformers.__version__, "date": origin["date"], "commit": origin["commit"]}
        earlier = kept(options.out, origin["gpu"])
        # What failed replaces nothing that did not, but for a lack of memory, which is a result.
        fresh = {name: row | run for name, row in rows.items() if name not in earlier or name not in failed}
        rows = earlier | fresh
        ordered = [rows[work.name] for work in WORKS if work.name in rows]
        file = report.write(options.out, "models", {**origin, "transformers": run["transformers"], "rows": ordered})
        draw(
            ordered,
            f"two layers of transformers' models on {origin['gpu']}, {origin['date']}",
            file.with_suffix(".png"),
        )
    return int(bool(failed))


def kept(folder: Path, gpu: str) -> dict[str, dict[str, Any]]:
    """Rows of earlier runs on such a GPU, by their works' names: each says of which run it is."""
    file = folder / machine.gpu_slug(gpu) / "models.json"
    if not file.is_file():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    run = {name: content[name] for name in ("transformers", "date", "commit")}
    rows = [run | row for row in content["rows"]]
    fields = Work.__dataclass_fields__
    return {Work(**{name: row[name] for name in fields if name in row}).name: row for row in rows}


if __name__ == "__main__":
    exit_with(main)
