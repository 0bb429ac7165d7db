"""transformers' models at real attention sizes on a GPU: generated tokens, padding, chunks.

Weights are random, half of the tokens are selected. What is right is the model's own code in float32 with the same
weights; how much may be wrong, what its own bfloat16 code is off by.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cupymla import UnsupportedError  # noqa: E402
from cupymla_lab.models import ERROR_TOPK, VOCABULARY, Work, model_of  # noqa: E402

pytestmark = pytest.mark.gpu

FAMILIES = ("deepseek_v32", "glm_moe_dsa", "hy_v4")
"""Those that every version has; `python -m cupymla_lab models` compares all six."""

HEADS, HIDDEN, TOKENS, NEW = 32, 1024, 2 * ERROR_TOPK, 64
SHORT = 700  # tokens of the second sequence of a batch, more than are selected


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """The same model three times: its own code in float32 and in bfloat16, and with cupymla."""
    work = Work("error", HEADS, TOKENS, family=request.param)
    eager = replace(work, attention="eager")
    own = model_of(eager, HIDDEN, torch.bfloat16)
    return model_of(eager, HIDDEN, torch.bfloat16).float(), own, model_of(work, HIDDEN, torch.bfloat16)


def batch(side: str) -> tuple[Any, dict[str, Any]]:
    """Two sequences, one of them padded; and the arguments that say so."""
    ids = torch.randint(1, VOCABULARY, (2, TOKENS), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, slice(TOKENS - SHORT) if side == "left" else slice(SHORT, None)] = 0
    return ids * mask, masked(mask)


def masked(mask: Any) -> dict[str, Any]:
    """A mask, and positions that count what it leaves."""
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def logits(model: Any, ids: Any, **given: Any) -> Any:
    with torch.no_grad():
        return model(ids, use_cache=False, **given).logits.float()


def off(found: Any, right: Any) -> float:
    return float((found - right).norm() / right.norm())


def test_generated_tokens_are_those_of_float32_wherever_it_has_a_clear_favourite(models: tuple[Any, Any, Any]) -> None:
    """A batch with padding in front; every step is judged behind the tokens that were generated before it."""
    exact, own, ours = models
    ids, given = batch("left")
    done = ours.generate(
        ids, attention_mask=given["attention_mask"], max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    assert done.shape == (2, TOKENS + NEW)
    given = masked(torch.cat((given["attention_mask"], torch.ones_like(done[:, TOKENS:])), -1))
    right, rounded = (logits(model, done, **given)[:, TOKENS - 1 : -1] for model in (exact, own))
    error = 2 * (rounded - right).abs().amax(-1)  # of a logit, twice that of its own code
    first, second = right.topk(2).values.unbind(-1)
    picked = right.gather(-1, done[:, TOKENS:, None])[..., 0]
    clear = first - second > 2 * error
    print(f"{int(clear.sum())} of {clear.numel()} tokens are clear")
    assert clear.any() and bool((picked == first)[clear].all())
    assert bool((first - picked <= 2 * error).all())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(models: tuple[Any, Any, Any], side: str) -> None:
    ids, given = batch(side)
    right, rounded, found = (logits(model, ids, **given)[given["attention_mask"].bool()] for model in models)
    assert off(found, right) <= 2 * off(rounded, right)


@pytest.mark.parametrize("steps", [(TOKENS,), (300, 300, 300, TOKENS - 908, *(8 * (1,)))], ids=["whole", "chunks"])
def test_a_cached_prefill(models: tuple[Any, Any, Any], steps: tuple[int, ...]) -> None:
    """In one piece, or in chunks and then token by token."""
    exact, own, ours = models
    ids, _ = batch("left")
    ids = ids[:1]
    right, rounded = (logits(model, ids) for model in (exact, own))
    cache, found = transformers.DynamicCache(config=ours.config), []
    with torch.no_grad():
        for part in ids.split(steps, -1):
            found.append(ours(part, past_key_values=cache, use_cache=True).logits.float())
    result = torch.cat(found, 1)
    for part in (slice(None), slice(-8, None)):  # the last eight are steps of decoding
        assert off(result[:, part], right[:, part]) <= 2 * off(rounded[:, part], right[:, part])


def test_weights_of_attention_are_refused(models: tuple[Any, Any, Any]) -> None:
    ids, _ = batch("left")
    with pytest.raises(UnsupportedError, match="output_attentions"):
        models[2](ids, output_attentions=True)


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_trainer(family: str, tmp_path: Path) -> None:
    """transformers' own training loop, with gradient checkpointing: a sequence is learned."""
    pytest.importorskip("accelerate")
    model = model_of(Work("train", HEADS, TOKENS, family=family), HIDDEN, torch.bfloat16)
    row = torch.randint(1, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    steps = 6
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
