"""Contexts of at most topk keys, on a CPU: no index query is made, and nothing else changes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers_kit import FORWARD, HERE, TOKENS, in_parts, model_of, states, tokens  # noqa: E402

from cupymla.interop import torch as mla  # noqa: E402
from cupymla.interop import transformers as dsa  # noqa: E402
from cupymla.interop.transformers import attention, masks, pools  # noqa: E402

CACHED = 20
"""topk of models whose cache grows past it."""

PARTS = 2 + TOKENS - 15
"""How many forward passes `in_parts` makes: of 9 and 6 tokens, then of one."""


def scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have indexers score whatever the length."""
    monkeypatch.setattr(attention, "fits", lambda *_: False)
    monkeypatch.setattr(pools, "selects_all", lambda *_: False)


def query_calls(model: Any) -> tuple[list[int], int]:
    """A list that grows by one for each call of an indexer's projection of queries, and how many indexers there are."""
    calls: list[int] = []
    indexers = [m.indexer for m in model.modules() if getattr(m, "indexer", None) is not None]
    for indexer in indexers:
        indexer.wq_b.register_forward_hook(lambda *_: calls.append(1))
    assert indexers
    return calls, len(indexers)


def both(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], run: Callable[[Any], Any]) -> tuple[int, int]:
    """Calls of an indexer's projection of queries, without and with scores; the results of `run` are the same bits."""
    found, counts = [], []
    for score in (False, True):
        with monkeypatch.context() as patch:
            if score:
                scored(patch)
            model = make()
            calls, indexers = query_calls(model)
            found.append(run(model))
            assert len(calls) % indexers == 0
            counts.append(len(calls) // indexers)
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
    assert found[0]
    return counts[0], counts[1]


def kept(side: str) -> Any:
    """A padding mask of two sequences, the first of which has five tokens of padding."""
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, slice(5) if side == "left" else slice(TOKENS - 5, None)] = 0
    return mask


@pytest.mark.parametrize("family", HERE)
def test_a_dynamic_cache_that_grows_past_topk(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are made from the first key that does not fit, by keys that were written before."""

    def make() -> Any:
        model = model_of(family, topk=CACHED)
        dsa.enable(model)
        return model

    def run(model: Any) -> list[Any]:
        cache = transformers.DynamicCache(config=model.config)
        logits = in_parts(model, tokens(), cache, attention_mask=kept("left"))
        held = [getattr(layer, "indexer_keys", None) for layer in cache.layers]
        return [logits, *(keys for keys in held if keys is not None)]

    pooled = family == "glm5_next_text"  # with 21 keys it has ten full pools of two, which are all selected
    steps = TOKENS - CACHED - int(pooled)
    assert both(monkeypatch, make, run) == (steps, PARTS)


@pytest.mark.parametrize("kind, side", [(None, "right"), ("fp8", "left")])
@pytest.mark.parametrize(
    "static, topk, steps",
    [(False, CACHED, TOKENS - CACHED), (True, TOKENS, 0), (True, TOKENS - 1, PARTS)],
    ids=["dynamic", "static", "static, longer than topk"],
)
def test_caches_and_padding(
    static: bool, topk: int, steps: int, kind: Literal["fp8"] | None, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of a static cache decides: the host does not know how much it holds."""

    def make() -> Any:
        model = model_of("glm_moe_dsa", topk=topk)
        dsa.enable(model, cache=kind)
        return model

    def run(model: Any) -> list[Any]:
        options = {"config": model.config}
        cache = (
            transformers.StaticCache(max_cache_len=TOKENS, **options)
            if static
            else transformers.DynamicCache(**options)
        )
        return [in_parts(model, tokens(), cache, attention_mask=kept(side))]

    assert both(monkeypatch, make, run) == (steps, PARTS)


@pytest.mark.parametrize("family", HERE)
@pytest.mark.parametrize("missing", [0, 1], ids=["L = topk", "L = topk + 1"])
def test_training(family: str, missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed sequences, where the family knows them: outputs and every gradient. glm5_next drops a full pool of two."""
    pooled = family == "glm5_next_text"

    def make() -> Any:
        model = model_of(family, topk=TOKENS - missing * (2 if pooled else 1))
        dsa.enable(model)
        return model

    def run(model: Any) -> list[Any]:
        packed = torch.cat((torch.arange(10), torch.arange(TOKENS - 10)))[None].expand(2, -1)
        output = states(model, tokens(), **({} if pooled else {"position_ids": packed}))
        output.float().pow(3).mean().backward()
        return [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    assert both(monkeypatch, make, run) == (missing, 1)


@pytest.mark.parametrize("cache, steps", [("dynamic", 3), ("static", 6)])
def test_generate(cache: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six tokens behind a prompt of TOKENS: a dynamic cache gets too long for three, a static one is too large."""

    def make() -> Any:
        model = model_of("deepseek_v32", topk=TOKENS + 2)
        dsa.enable(model)
        return model

    def run(model: Any) -> list[Any]:
        options = {"cache_implementation": cache, "output_logits": True, "return_dict_in_generate": True}
        done = model.generate(
            tokens(), attention_mask=torch.ones_like(tokens()), max_new_tokens=6, do_sample=False, **options
        )
        return [done.sequences, *done.logits]

    assert both(monkeypatch, make, run) == (steps, 6)


def test_all_layers_of_a_step_share_what_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """One array of ids and one of numbers for the layers of a step, others for those of the next one."""
    model = model_of("deepseek_v32")
    dsa.enable(model)
    cache = transformers.DynamicCache(config=model.config)
    given: list[tuple[Any, Any]] = []
    decode = mla.sparse_mla_decode

    def noted(q: Any, k_cache: Any, indices: Any, **options: Any) -> Any:
        given.append((indices, options["topk_length"]))
        return decode(q, k_cache, indices, **options)

    monkeypatch.setattr(mla, "sparse_mla_decode", noted)
    with torch.no_grad():
        for _ in range(2):
            states(model, tokens(count=2), **{FORWARD: cache, "use_cache": True})
    first, second, third, _ = given
    assert len(given) == 4 and first[0] is second[0] and first[1] is second[1]
    assert first[0] is not third[0]
    assert first[1].tolist() == [[1, 2], [1, 2]] and third[1].tolist() == [[3, 4], [3, 4]]


def test_visible_keys_follow_their_ranges() -> None:
    """Ids of the first key on, in rows of the other sequence's; none where a query sees none; anew after a change."""
    ranges = torch.tensor([[[[0, 3], [1, 4]]], [[[2, 1], [2, 2]]]], dtype=torch.int32)
    ids, count = masks.visible_keys(ranges, 5)
    assert ids.dtype == count.dtype == torch.int32
    assert ids.tolist()[0] == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]] and count.tolist() == [[3, 3], [0, 0]]
    assert masks.visible_keys(ranges, 5)[0] is ids
    assert masks.visible_keys(ranges, 5, 100)[0][1, 0].tolist() == [102, 103, 104, 105, 106]
    ranges[0, 0, 0, 1] = 2
    assert masks.visible_keys(ranges, 5)[1].tolist() == [[2, 3], [0, 0]]


def large(what: str, kind: str = "") -> tuple[Any, Any]:
    """A model of real attention sizes on the GPU, with topk 2048, and 512 tokens of one sequence."""
    from cupymla_lab import models

    model = models.model_of(models.Work(what, 32, 512, cache=kind), 1024, torch.bfloat16)
    return model, torch.randint(1, models.VOCABULARY, (1, 512), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["", "fp8"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_same_bits_on_a_gpu(batch: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill in two chunks, then steps of decoding."""
    model, ids = large("decode", kind)
    ids = torch.cat([ids.roll(number, -1) for number in range(batch)])
    found = []
    for score in (False, True):
        cache, logits = transformers.DynamicCache(config=model.config), []
        with torch.no_grad(), monkeypatch.context() as patch:
            if score:
                scored(patch)
            for part in ids.split((300, 208, 1, 1, 1, 1), -1):
                logits.append(states(model, part, **{FORWARD: cache, "use_cache": True}))
        found.append(torch.cat(logits, 1))
    assert torch.isfinite(found[0]).all() and torch.equal(*found)


@pytest.mark.gpu
def test_a_cuda_graph_goes_on_with_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays see the keys that replays before them wrote: their ids are made in the graph, not when it was made."""
    model, ids = large("graph")
    found = []
    for score in (False, True):
        cache, token, logits = transformers.StaticCache(config=model.config, max_cache_len=600), ids[:, :1].clone(), []
        options = {FORWARD: cache, "use_cache": True}
        with torch.no_grad(), monkeypatch.context() as patch:
            if score:
                scored(patch)
            states(model, ids[:, :500], **options)
            for place in range(500, 503):
                states(model, token.copy_(ids[:, place : place + 1]), **options)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = states(model, token, **options)
            for place in range(503, 512):
                token.copy_(ids[:, place : place + 1])
                graph.replay()
                logits.append(out.clone())
        found.append(torch.cat(logits, 1))
    assert torch.isfinite(found[0]).all() and torch.equal(*found)
