"""transformers' models at real attention sizes on a GPU, and the same tests with small models on a CPU.

Weights are random, half of the tokens are selected. What is right is the model's own code in float32 with the same
weights; how much may be wrong, what its own bfloat16 code is off by.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers_kit import Rounded, in_parts, masked, off, states, topk_of_rounded  # noqa: E402

from cupymla import UnsupportedError  # noqa: E402
from cupymla.interop import torch as mla  # noqa: E402
from cupymla.interop import transformers as dsa  # noqa: E402
from cupymla_lab.models import (  # noqa: E402
    ERROR_TOPK,
    FAMILIES,
    VOCABULARY,
    Work,
    errors_beside,
    logits_and_gradients,
    model_of,
)

STEPS = 8  # of decoding, behind a prefill in chunks


@dataclass(frozen=True)
class Case:
    """A model and the sizes that it is tested at."""

    family: str
    heads: int = 2
    index_heads: int = 16  # so many that hardly a score is 0, of which the own code selects any
    device: str = "cpu"
    hidden: int = 64
    tokens: int = 40
    topk: int = 48
    new: int = 6
    all_rope: bool = False
    """Whether fp8 caches hold rows of all layers of a family that has some without RoPE."""

    @property
    def chunks(self) -> tuple[int, ...]:
        part = self.tokens // 4 - 1
        return part, part, part, self.tokens - 3 * part - STEPS


REAL: dict[str, Any] = {"device": "cuda", "hidden": 1024, "tokens": 2 * ERROR_TOPK, "topk": ERROR_TOPK, "new": 64}

CASES = (
    Case("glm_moe_dsa", 64, 64, **REAL),
    Case("glm_moe_dsa", 32, 32, **REAL),
    Case("deepseek_v32", 64, 16, **REAL),
    Case("hy_v4", 64, 64, **REAL),
    Case("dots3_note_text", 64, 64, **REAL),
    Case("mistral_large4", 64, 16, **REAL),
    Case("glm5_next", 64, 16, **REAL),
)
"""`python -m cupymla_lab models` has the rest: 32 heads of all families, the other number of index heads of 64."""

FP8 = (
    *(case for case in CASES if case.family not in ("mistral_large4", "glm5_next")),
    Case("mistral_large4", 64, 64, all_rope=True, **REAL),
)


def at(cases: Sequence[Case], *small: str, topk: int = 48) -> pytest.MarkDecorator:
    """A test of models that the installed version has: those on a GPU, which are marked, and small ones on a CPU.

    Few keys that are left out make errors of few tokens a matter of luck, so small models select all, but for `topk`.
    """
    tested = [(case, f"{case.family}-{case.heads}-{case.index_heads}", [pytest.mark.gpu]) for case in cases]
    tested += [(Case(family, topk=topk, all_rope=True), family, []) for family in small]
    known = [
        pytest.param(case, id=name, marks=marks)
        for case, name, marks in tested
        if case.family in transformers.CONFIG_MAPPING
    ]
    return pytest.mark.parametrize("models", known, indirect=True)


class Models:
    """The same model three times: its own code in float32 and in bfloat16, and with cupymla."""

    def __init__(self, case: Case) -> None:
        self.case = case
        work = Work("error", case.heads, case.tokens, family=case.family, index_heads=case.index_heads)
        options: dict[str, Any] = {"index_topk": case.topk}
        if case.family == "mistral_large4" and case.all_rope:
            options["no_rope_layers"] = [1, 1, 1]
        self.exact, self.own, self.ours = (
            model_of(replace(work, attention=kind), case.hidden, torch.bfloat16, case.device, **options)
            for kind in ("eager", "eager", "cupymla")
        )
        self.exact.float()

    def some_tokens(self, batch: int) -> Any:
        ids = torch.randint(1, VOCABULARY, (batch, self.case.tokens), generator=torch.Generator().manual_seed(1))
        return ids.to(self.case.device)

    def batch(self, side: str) -> tuple[Any, Any]:
        """Two sequences, one of them padded, but longer than what is selected; and the mask."""
        ids = self.some_tokens(2)
        kept, padding = torch.ones_like(ids), self.case.tokens // 3
        kept[1, slice(padding) if side == "left" else slice(-padding, None)] = 0
        return ids * kept, kept

    def cache(self) -> Any:
        return transformers.DynamicCache(config=self.ours.config)

    @functools.cached_property
    def sequences(self) -> list[Any]:
        return list(self.some_tokens(8).split(1))

    @functools.cached_property
    def right(self) -> list[dict[str, Any]]:
        """Logits and gradients in float32."""
        return logits_and_gradients(self.exact, self.sequences)

    @functools.cached_property
    def rounded(self) -> list[dict[str, Any]]:
        """The same of the own code in bfloat16."""
        return logits_and_gradients(self.own, self.sequences)

    def wrong(self) -> dict[str, tuple[float, float]]:
        """Errors of logits and of gradients that are more than twice those of the own code, with the latter."""
        found = logits_and_gradients(self.ours, self.sequences)
        assert found[0].keys() == self.right[0].keys()
        errors = errors_beside(self.right, self.rounded, found)
        assert len(errors) > 10
        return {name: (ours, own) for name, (own, ours) in errors.items() if not ours <= 2 * own}


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest) -> Iterator[Models]:
    yield Models(request.param)
    torch._dynamo.reset()  # what was compiled holds memory


def logits(model: Any, ids: Any, kept: Any, **options: Any) -> Any:
    with torch.no_grad():
        return states(model, ids, **masked(kept), **options).float()


@at(CASES)
def test_errors_of_logits_and_of_every_gradient(models: Models) -> None:
    assert not models.wrong()


@at(CASES, "mistral_large4")
def test_gradient_checkpointing(models: Models) -> None:
    """Layers that share a selection or keys get them in the second forward pass, too."""
    models.ours.train().gradient_checkpointing_enable()
    try:
        assert models.ours.is_gradient_checkpointing
        assert not models.wrong()
    finally:
        models.ours.gradient_checkpointing_disable()


@at(CASES[:1])
def test_compiled(models: Models) -> None:
    """Forward and backward."""
    models.ours.compile()
    try:
        assert not models.wrong()
    finally:
        models.ours._compiled_call_impl = None


def generated(models: Models, **options: Any) -> tuple[Any, Any]:
    """A batch with padding in front and greedy tokens behind it; and the mask of both."""
    ids, kept = models.batch("left")
    case = models.case
    done = models.ours.generate(
        ids, attention_mask=kept, max_new_tokens=case.new, do_sample=False, pad_token_id=0, **options
    )
    assert done.shape == (2, case.tokens + case.new)
    return done, torch.cat((kept, torch.ones_like(done[:, case.tokens :])), -1)


def assert_favourites(models: Models, done: Any, kept: Any, right: Any = None) -> None:
    """Every generated token is the favourite behind the tokens before it, wherever there is a clear one.

    `right`: logits that decide, of bfloat16, so they may be wrong themselves; of float32 where there are none.
    """
    steps = slice(models.case.tokens - 1, -1)
    exact, own = (logits(model, done, kept)[:, steps] for model in (models.exact, models.own))
    error = 2 * (own - exact).abs().amax(-1)  # of a logit, twice that of the own code
    right, error = (exact, error) if right is None else (right[:, steps], 2 * error)
    picked = right.gather(-1, done[:, models.case.tokens :, None])[..., 0]
    first, second = right.topk(2).values.unbind(-1)
    clear = first - second > 2 * error
    print(f"{int(clear.sum())} of {clear.numel()} tokens are clear")
    assert clear.any() and bool((picked == first)[clear].all())
    assert bool((first - picked <= 2 * error).all())


@at(CASES, "mistral_large4", "glm5_next")
def test_generated_tokens_are_those_of_float32_wherever_it_has_a_clear_favourite(models: Models) -> None:
    assert_favourites(models, *generated(models))


@at(CASES, "dots3_note_text")
def test_padding_behind(models: Models) -> None:
    ids, kept = models.batch("right")
    right, own, ours = (logits(model, ids, kept)[kept.bool()] for model in (models.exact, models.own, models.ours))
    assert off(ours, right) <= 2 * off(own, right)


@at(CASES, "hy_v4", "glm5_next")
def test_a_prefill_in_chunks_and_steps_of_decoding(models: Models) -> None:
    """A batch with padding in front."""
    ids, kept = models.batch("left")
    right, own = (logits(model, ids, kept) for model in (models.exact, models.own))
    ours = in_parts(models.ours, ids, models.cache(), models.case.chunks, attention_mask=kept).float()
    for part in (kept.bool(), (slice(None), slice(-STEPS, None))):
        assert off(ours[part], right[part]) <= 2 * off(own[part], right[part])


@contextlib.contextmanager
def fp8_caches(models: Models) -> Iterator[None]:
    dsa.enable(models.ours, cache="fp8")
    try:
        yield
    finally:
        dsa.enable(models.ours)


@at(FP8, "deepseek_v32", "mistral_large4", topk=16)
def test_an_fp8_cache_is_as_good_as_its_unpacked_values(models: Models) -> None:
    """A prefill in chunks, then steps of decoding: what is off is less than what the own code's bfloat16 is off by."""
    ids, kept = models.batch("left")
    with fp8_caches(models):
        cache = models.cache()
        ours = in_parts(models.ours, ids, cache, models.case.chunks, attention_mask=kept).float()
        assert any(layer.keys.dtype == torch.uint8 for layer in cache.layers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla, "indexer_topk", topk_of_rounded)
        cache = Rounded(config=models.ours.config)
        same = in_parts(models.ours, ids, cache, models.case.chunks, attention_mask=kept).float()
    right, own = (logits(model, ids, kept) for model in (models.exact, models.own))
    for part in (kept.bool(), (slice(None), slice(-STEPS, None))):
        print(f"{off(ours[part], same[part]):.2%}, the own code {off(own[part], right[part]):.2%}")
        assert off(ours[part], same[part]) <= off(own[part], right[part])


def assert_fp8_favourites(models: Models, **options: Any) -> None:
    """What `generate` picks with an fp8 cache are favourites of the whole forward pass on unpacked values."""
    with fp8_caches(models):
        done, kept = generated(models, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla, "indexer_topk", topk_of_rounded)
        cache = Rounded(config=models.ours.config)
        right = in_parts(models.ours, done, cache, done.shape[1:], attention_mask=kept).float()
    assert_favourites(models, done, kept, right)


@at(FP8, "hy_v4", topk=16)
def test_generated_tokens_with_an_fp8_cache(models: Models) -> None:
    assert_fp8_favourites(models)


@at(CASES[:1], "glm_moe_dsa", topk=16)
def test_generated_tokens_with_a_static_cache(models: Models) -> None:
    """On a GPU transformers compiles the steps of decoding."""
    assert_favourites(models, *generated(models, cache_implementation="static"))


@at(CASES[:1], "glm_moe_dsa", topk=16)
def test_generated_tokens_with_a_static_fp8_cache(models: Models) -> None:
    """The same."""
    assert_fp8_favourites(models, cache_implementation="static")


@at(CASES[:1])
def test_weights_of_attention_are_refused(models: Models) -> None:
    with pytest.raises(UnsupportedError, match="output_attentions"):
        models.ours(models.some_tokens(1), output_attentions=True)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES[:2])
def test_trainer(family: str, tmp_path: Path) -> None:
    """transformers' own training loop, with gradient checkpointing: a sequence is learned."""
    pytest.importorskip("accelerate")
    tokens, steps = 2 * ERROR_TOPK, 6
    model = model_of(Work("train", 64, tokens, family=family), 1024, torch.bfloat16)
    row = torch.randint(1, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(1))
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        gradient_checkpointing=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    # In bfloat16 a step of this size is lost in weights as large as those of norms.
    ours = {n: p for n, p in model.named_parameters() if "self_attn" in n and "_proj" in n and ".indexer." not in n}
    before = {name: p.detach().clone() for name, p in ours.items()}
    trainer = transformers.Trainer(model, options, train_dataset=[{"input_ids": row, "labels": row}] * steps)
    trainer.train()
    assert model.is_gradient_checkpointing
    assert before and not [name for name, p in ours.items() if torch.equal(p, before[name])]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == steps and losses[-1] < 0.9 * losses[0], losses
