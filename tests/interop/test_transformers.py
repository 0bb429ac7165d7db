"""transformers' DSA families with cupymla in the place of their own attention: the installed package, on a CPU, and
selections on a GPU, too."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers_kit import FORWARD, HERE, OLDER, SIZES, TOKENS, model_of, states, tokens  # noqa: E402

from cupymla.errors import InputError, UnsupportedError  # noqa: E402
from cupymla.interop import transformers as dsa  # noqa: E402
from cupymla.interop.transformers import cache as room  # noqa: E402
from cupymla.interop.transformers import families, masks  # noqa: E402
from cupymla_lab.models import errors_beside, few_as_one  # noqa: E402

KEYS = [family for family in HERE if family != "glm5_next_text"]
"""Families whose indexers rank keys, and whose layers all know of packed sequences."""

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("family", HERE)
def test_errors_are_at_most_twice_those_of_the_own_code(family: str) -> None:
    """Of logits and of every gradient, against float32: absorbed queries round elsewhere, not more.

    So many sequences that luck, which gradients of few degrees of freedom have on either side, evens out.
    """
    models = model_of(family, torch.float32), model_of(family), model_of(family)
    dsa.enable(models[2])
    exact, own, ours = ([_output_and_gradients(model, ids) for ids in tokens(16).split(1)] for model in models)
    errors = errors_beside(exact, own, ours)
    assert len(errors) > 10 and "output" in errors
    for name, (of_own_code, of_ours) in errors.items():
        assert of_ours <= 2 * of_own_code, name
    largest, of_own = (
        max(float((a["output"] - b["output"]).abs().max()) for a, b in zip(found, exact, strict=True))
        for found in (ours, own)
    )
    assert largest <= 2 * of_own


def _output_and_gradients(model: Any, ids: Any) -> dict[str, Any]:
    model.zero_grad()
    output = states(model, ids)
    output.float().pow(3).mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    indexers = {name for name in gradients if ".indexer." in name}
    assert indexers and all(gradients.pop(name) is None for name in indexers), "as the family's own"
    return {"output": output.detach().float(), **few_as_one(gradients)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", KEYS)
def test_selects_what_the_familys_own_indexer_selects(family: str, device: str) -> None:
    """On the same projections; keys whose scores are within 1e-4 of the last selected one may differ."""
    model = model_of(family, topk=6).to(device)
    attention = next(m for m in model.modules() if getattr(m, "indexer", None) is not None)
    indexer, mine = attention.indexer, copy.deepcopy(attention.indexer)
    mine.__class__ = _replaced(model, type(indexer))
    hidden, latent = _hidden(device)
    positions = torch.arange(TOKENS, device=device)[None]
    rotary = next(m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
    layered = {"layer_type": "indexed_attention"} if family == "dots3_note_text" else {}
    embeddings = rotary(hidden, positions, **layered)
    given = (hidden, latent, embeddings) if family != "mistral_large4_text" else (hidden, embeddings)
    padding = torch.ones(2, TOKENS, dtype=torch.bool, device=device)
    padding[0, :5] = False
    ranges = masks.key_ranges(2, TOKENS, TOKENS, attention_mask=padding)
    seen = masks.dense_mask(ranges, TOKENS)
    scores: list[Any] = []
    topk = torch.Tensor.topk

    def noted(given: Any, *options: Any, **named: Any) -> Any:
        scores.append(given)
        return topk(given, *options, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", noted)
        own = indexer(*given, seen[:, 0], positions)
    ours = mine(*given, ranges[:, 0], positions)
    (table,) = scores
    for row in torch.cartesian_prod(torch.arange(2), torch.arange(TOKENS)).tolist():
        visible = set(seen[row[0], 0, row[1]].nonzero().flatten().tolist())
        a, b = visible & set(own[*row].tolist()), set(ours[*row].tolist()) - {-1}
        assert len(b) == min(6, len(visible)) and b <= visible
        last = table[*row][sorted(a)].min() if a else 0
        assert all(abs(table[*row][key] - last) <= 1e-4 * abs(last) for key in a ^ b)


def _hidden(device: str) -> tuple[Any, Any]:
    """Hidden states and latents of queries."""
    seeds = (torch.Generator().manual_seed(seed) for seed in (2, 3))
    hidden, latent = (
        torch.randn(2, TOKENS, width, generator=seed) for width, seed in zip((64, 32), seeds, strict=True)
    )
    return hidden.bfloat16().to(device), latent.bfloat16().to(device)


def _replaced(model: Any, kind: type) -> type:
    model = copy.deepcopy(model)
    assert dsa.enable(model).replaced
    return next(type(m) for m in model.modules() if type(m) is not kind and type(m).__mro__[1] is kind)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize(
    "padding, topk, sizes",
    [
        (slice(0, 0), 8, [9, 9]),
        (slice(0, 5), 8, [8, 9]),
        (slice(TOKENS - 5, None), 8, [0, 9]),
        (slice(0, 5), 32, [16, 21]),
        (slice(TOKENS - 5, None), 32, [0, 21]),
        (slice(5, 7), 32, [16, 21]),
    ],
    ids=["none", "left", "right", "all left", "all right", "all between"],
)
def test_selects_the_pools_and_the_tail_that_the_familys_own_indexer_selects(
    padding: slice, topk: int, sizes: list[int], static: bool, device: str
) -> None:
    """In chunks of 8, 8 and then 1 token; `sizes`: what both sequences select for the token at 20."""
    model = model_of("glm5_next_text", topk=topk, index_kpool=4).to(device)
    own = model.layers[1].self_attn.indexer
    mine = copy.deepcopy(own)
    mine.__class__ = _replaced(model, type(own))
    hidden, latent = _hidden(device)
    with torch.no_grad():
        for indexer in (own, mine):
            indexer.index_kpool_compress_ape.copy_(torch.arange(4.0, device=device)[:, None].expand(4, 128))
    kept = torch.ones(2, TOKENS, dtype=torch.bool, device=device)
    kept[0, padding] = False
    found = []
    for indexer in (own, mine):
        options = {"config": model.config}
        cache = (
            transformers.StaticCache(max_cache_len=32, **options) if static else transformers.DynamicCache(**options)
        )
        parts = []
        for start, end in itertools.pairwise((0, 8, 16, *range(17, TOKENS + 1))):
            keys, values = (torch.zeros(2, 1, end - start, width, device=device) for width in (512, 0))
            cache.update(keys, values, 1)
            parts += indexer(hidden[:, start:end], latent[:, start:end], kept[:, start:end], cache).unbind(1)
        found.append([[{*row.tolist()} - {-1} for row in part] for part in parts])
    named = [row[row >= 0] for part in parts for row in part]
    assert all(len(row) == len(row.unique()) for row in named), "attention counts each entry"
    assert found[0] == found[1]
    assert [len(row) for row in found[1][20]] == sizes


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str) -> None:
    """A padded sequence has the logits of the sequence alone."""
    model = model_of("glm_moe_dsa")
    dsa.enable(model)
    ids, kept = tokens(), torch.ones(2, TOKENS, dtype=torch.long)
    real = slice(5, None) if side == "left" else slice(0, TOKENS - 5)
    kept[0] = 0
    kept[0, real] = 1
    positions = (kept.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        padded = states(model, ids, attention_mask=kept, position_ids=positions)
        alone = states(model, ids[:1, real])
        whole = states(model, ids[1:])
    torch.testing.assert_close(padded[:1, real], alone)
    torch.testing.assert_close(padded[1:], whole)


@pytest.mark.parametrize("family", KEYS)
def test_packed_sequences(family: str) -> None:
    """Each has the logits of the sequence alone; positions that begin anew tell them apart."""
    model = model_of(family, topk=6)
    dsa.enable(model)
    ids = tokens()
    packed = torch.cat((torch.arange(10), torch.arange(TOKENS - 10)))[None].expand(2, -1)
    with torch.no_grad():
        whole = states(model, ids, position_ids=packed)
        torch.testing.assert_close(whole[:, :10], states(model, ids[:, :10]), atol=0.02, rtol=0.02)
        torch.testing.assert_close(whole[:, 10:], states(model, ids[:, 10:]), atol=0.02, rtol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("topk", [6, TOKENS], ids=["selection", "all"])
def test_compiled(topk: int) -> None:
    """`torch.compile` gives the logits and gradients of the model that is not compiled."""
    model, ids = model_of("glm_moe_dsa", topk=topk), tokens()
    dsa.enable(model)
    found = []
    for call in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        logits = states(call, ids)
        logits.float().pow(2).mean().backward()
        found.append((logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("family", HERE)
def test_prefill_in_chunks_and_decode_are_the_whole_forward(family: str) -> None:
    """Through a dynamic cache that is filled by 8, then 1 token at a time, then cropped and filled again."""
    model = model_of(family, topk=6)
    dsa.enable(model)
    ids = tokens()
    with torch.no_grad():
        whole = states(model, ids)
        cache = transformers.DynamicCache(config=model.config)

        def part(start: int, end: int) -> Any:
            return states(model, ids[:, start:end], **{FORWARD: cache, "use_cache": True})

        parts = [part(0, 8), part(8, 16), *(part(at, at + 1) for at in range(16, TOKENS))]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=0.02, rtol=0.02)
        assert cache.get_seq_length() == TOKENS
        if family not in ("dots3_note_text", "glm5_next_text"):  # whose other layers have forgotten by then
            cache.crop(-6)
            torch.testing.assert_close(part(TOKENS - 6, TOKENS), whole[:, -6:], atol=0.02, rtol=0.02)


def test_a_cache_grows_in_place() -> None:
    """So calls of later steps have the shapes of the first, and nothing is copied."""
    model = model_of("glm_moe_dsa")
    dsa.enable(model)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        states(model, tokens(count=3), past_key_values=cache, use_cache=True)
        states(model, tokens(count=1), past_key_values=cache, use_cache=True)
        layer = cache.layers[0]
        before = layer.keys.data_ptr(), layer.indexer_keys.data_ptr()
        states(model, tokens(count=1), past_key_values=cache, use_cache=True)
    assert (layer.keys.data_ptr(), layer.indexer_keys.data_ptr()) == before
    assert layer.keys.shape[-2] == layer.indexer_keys.shape[1] == 5
    assert room.whole(layer.indexer_keys).shape == (2, room.STEP, 128)
    # A cache whose tensors somebody replaced goes on with what they hold.
    cache.reorder_cache(torch.tensor([1, 1]))
    with torch.no_grad():
        after = states(model, tokens(1, 1).expand(2, 1), past_key_values=cache, use_cache=True)
    torch.testing.assert_close(after[0], after[1])


def test_generate_with_dynamic_and_static_caches() -> None:
    """Greedy tokens are those that the own code picks, wherever it has a clear favourite."""
    ids = tokens()
    exact, own, ours = model_of("glm_moe_dsa", torch.float32), model_of("glm_moe_dsa"), model_of("glm_moe_dsa")
    dsa.enable(ours)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    dynamic = ours.generate(ids, **options)
    assert torch.equal(dynamic, ours.generate(ids, cache_implementation="static", **options))
    with torch.no_grad():
        logits = states(exact, dynamic)[:, TOKENS - 1 : -1]
        error = 2 * (states(own, dynamic)[:, TOKENS - 1 : -1] - logits).abs().max()
    chosen = logits.gather(-1, dynamic[:, TOKENS:, None])[..., 0]
    assert (logits.amax(-1) - chosen <= 2 * error).all()


def test_checkpointing_gives_the_same_gradients() -> None:
    model = model_of("glm_moe_dsa").train()
    dsa.enable(model)

    def gradients() -> list[Any]:
        model.zero_grad()
        states(model, tokens()).float().pow(2).mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    model.gradient_checkpointing_enable()
    for one, two in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(one, two)


def test_disable_gives_the_model_back() -> None:
    """Its classes, its attention, its weights and their names; and so does the end of `enabled`."""
    model = model_of("deepseek_v32")
    kinds, names = [type(m) for m in model.modules()], list(model.state_dict())
    with torch.no_grad():
        before = states(model, tokens())
        with dsa.enabled(model) as report:
            assert list(model.state_dict()) == names
            assert [type(m) for m in model.modules()] != kinds
            assert dsa.enable(model) == report, "enabling twice is enabling once"
            assert "self_attn.indexer" in str(report)
        assert [type(m) for m in model.modules()] == kinds
        assert model.config._attn_implementation == "eager"
        assert not any(name.startswith("_cupymla") for m in model.modules() for name in vars(m))
        assert torch.equal(states(model, tokens()), before)
        dsa.disable(model)
        copied = copy.deepcopy(model)
        dsa.enable(copied)
        assert [type(m) for m in model.modules()] == kinds


def test_layers_without_a_selection_are_left_alone() -> None:
    if "dots3_note_text" not in HERE:
        pytest.skip("this transformers has no family with such layers")
    report = dsa.enable(model_of("dots3_note_text"))
    assert report.left == {"model.layers.0.self_attn": "a layer without a selection: it runs as transformers' SDPA"}
    assert "left alone: model.layers.0.self_attn" in str(report)


def test_attention_of_another_kind_is_left_alone() -> None:
    if "glm5_next_text" not in HERE:
        pytest.skip("this transformers has no family with such layers")
    model = model_of("glm5_next_text")
    others = {n: m for n, m in model.named_modules() if type(m).__name__ == "Glm5NextTextLinearAttention"}
    reason = "Glm5NextTextLinearAttention: no DeepSeek sparse attention"
    assert others and dsa.enable(model).left == dict.fromkeys(others, reason)


@pytest.mark.parametrize(
    "options, what",
    [
        ({"dtype": torch.float32}, "torch.float32 weights"),
        ({"kv_lora_rank": 256}, "kv_lora_rank=256"),
        ({"index_head_dim": 96}, "index_head_dim=96"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_changes(options: dict[str, Any], what: str) -> None:
    model = model_of("glm_moe_dsa", **options)
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(UnsupportedError, match=what):
        dsa.enable(model)
    assert [type(m) for m in model.modules()] == kinds and model.config._attn_implementation == "eager"


@pytest.mark.parametrize("part", ["indexer", "attention"])
def test_a_forward_that_takes_something_else_is_named(part: str) -> None:
    model = model_of("glm_moe_dsa")
    attention = model.model.layers[0].self_attn
    module = attention.indexer if part == "indexer" else attention
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": lambda self, hidden_states, something_else: None})
    with pytest.raises(UnsupportedError, match=r"forward\(hidden_states, something_else\)"):
        dsa.enable(model)
    assert not any("_cupymla" in name for m in model.modules() for name in vars(m))


@pytest.mark.parametrize("function", [dsa.enable, dsa.disable])
def test_what_is_no_model_is_named(function: Callable[[Any], object]) -> None:
    with pytest.raises(InputError, match=r"able: argument 'model': expected a torch\.nn\.Module, got str"):
        function("deepseek-ai/DeepSeek-V3.2")


def test_other_models_and_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **small)
    llama = transformers.LlamaForCausalLM(config)
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM.*deepseek_v32, glm_moe_dsa"):
        dsa.enable(llama)
    monkeypatch.setattr(dsa, "VERSIONS", ((5, 1), (5, 2)))
    with pytest.raises(UnsupportedError, match=rf"transformers {transformers.__version__} .*transformers 5\.1 to 5\.2"):
        dsa.enable(model_of("glm_moe_dsa"))


def test_calls_that_it_cannot_serve_are_refused() -> None:
    """Attention weights as outputs, dropped weights, masks with holes, masks of one's own."""
    model, ids = model_of("glm_moe_dsa", attention_dropout=0.5), tokens()
    dsa.enable(model)
    with pytest.raises(UnsupportedError, match="output_attentions"):
        model(ids, output_attentions=True)
    with pytest.raises(UnsupportedError, match=r"attention_dropout=0\.5"):
        model.train()(ids)
    model.eval()
    holes = torch.ones(2, TOKENS, dtype=torch.long)
    holes[0, 7] = 0
    with pytest.raises(UnsupportedError, match="zeros between ones"):
        model(ids, attention_mask=holes)
    with pytest.raises(UnsupportedError, match="a mask of one's own"):
        model(ids, attention_mask=torch.zeros(2, 1, TOKENS, TOKENS))


def test_the_table_names_each_family_once() -> None:
    assert len({family.attention for family in families.FAMILIES}) == len(families.FAMILIES)


@pytest.mark.parametrize("part", ["kv_b_proj.weight", "sinks"])
def test_few_queries_have_gradients_of_whatever_is_trained(part: str) -> None:
    """So few that they would run as decode, had they none, with all but one parameter frozen."""
    found = []
    for enabled in (False, True):
        model = model_of("hy_v4")
        parameter = model.requires_grad_(False).get_parameter(f"model.layers.0.self_attn.{part}").requires_grad_(True)
        if enabled:
            dsa.enable(model)
        states(model, tokens(count=6)).float().pow(3).mean().backward()
        found.append(parameter.grad.float())
    assert (found[1] - found[0]).norm() < 0.05 * found[0].norm()


class _Adapted(torch.nn.Linear):  # type: ignore[misc, name-defined]
    """As adapters do it: a forward of its own."""

    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


def test_what_would_pass_over_an_adapter_or_a_hook_is_refused() -> None:
    """At `enable`, and in a call where it came later."""
    model = model_of("glm_moe_dsa")
    projection = model.model.layers[0].self_attn.kv_b_proj
    projection.__class__ = _Adapted
    with pytest.raises(UnsupportedError, match="kv_b_proj is _Adapted"):
        dsa.enable(model)
    projection.__class__ = torch.nn.Linear
    hook = projection.register_forward_hook(lambda module, given, out: out)
    with pytest.raises(UnsupportedError, match="or hooked"):
        dsa.enable(model)
    hook.remove()
    indexer = model.model.layers[0].self_attn.indexer
    indexer.forward = indexer.forward
    with pytest.raises(UnsupportedError, match="a forward bound to it"):
        dsa.enable(model)
    del indexer.forward
    dsa.enable(model)
    projection.__class__ = _Adapted
    with pytest.raises(UnsupportedError, match="kv_b_proj changed to _Adapted"):
        model(tokens())


def test_nested_and_saved(tmp_path: Any) -> None:
    """The outer `enabled` stays; a saved configuration does not tell; a model never enabled stays as it is."""
    model = model_of("glm_moe_dsa")
    with dsa.enabled(model):
        with dsa.enabled(model):
            pass
        assert model.config._attn_implementation == "cupymla"
        model.config.save_pretrained(tmp_path)
        other = type(model)(model.config).bfloat16()
        with pytest.raises(UnsupportedError, match="another one's configuration"):
            other(tokens(count=2))
    assert model.config._attn_implementation == "eager"
    assert "cupymla" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    fresh = model_of("glm_moe_dsa", attn_implementation="eager")
    fresh.config._attn_implementation_internal = "sdpa"
    dsa.disable(fresh)
    assert fresh.config._attn_implementation == "sdpa"


def test_a_cache_is_its_holders() -> None:
    """What was read of it stays as it was; copies go ways of their own, and can be pickled; inference mode may end."""
    model, ids = model_of("glm_moe_dsa"), tokens()
    dsa.enable(model)
    cache = transformers.DynamicCache(config=model.config)

    def step(given: Any, count: int) -> Any:
        return states(model, ids[:, :count], past_key_values=given, use_cache=True)

    with torch.inference_mode():
        step(cache, 8)
    with torch.no_grad():
        step(cache, 1)
        held = cache.layers[0].keys
        before = held.clone()
        forked = copy.copy(cache)
        forked.layers = [copy.copy(layer) for layer in cache.layers]
        kept = pickle.loads(pickle.dumps(cache))
        first = step(forked, 4)
        torch.testing.assert_close(step(cache, 4), first)
        torch.testing.assert_close(step(kept, 4), first)
        cache.crop(-6)
        step(cache, 4)
    assert torch.equal(held, before)


@pytest.mark.parametrize("family", HERE)
def test_a_cache_that_the_own_code_began(family: str) -> None:
    """The index keys of a family that keeps them in float32 are read in the model's dtype from then on.

    Before 5.24 the own code does not cache latents, so there is nothing to go on with.
    """
    model = model_of(family, topk=8)
    for kind, options in ((transformers.DynamicCache, {}), (transformers.StaticCache, {"max_cache_len": TOKENS})):
        dsa.disable(model)
        cache = kind(config=model.config, **options)
        with torch.no_grad():
            states(model, tokens(count=20), **{FORWARD: cache, "use_cache": True})
            dsa.enable(model)
            if OLDER:
                with pytest.raises(UnsupportedError, match="a cache of 2 heads' keys, not of latent rows"):
                    states(model, tokens(count=4), **{FORWARD: cache, "use_cache": True})
                continue
            assert torch.isfinite(states(model, tokens(count=4), **{FORWARD: cache, "use_cache": True})).all()
        held = [layer.indexer_keys for layer in cache.layers if getattr(layer, "is_indexer_initialized", False)]
        assert held and all(keys.dtype == torch.bfloat16 for keys in held)


def test_a_mask_of_new_tokens_alone_is_named() -> None:
    model = model_of("glm_moe_dsa")
    dsa.enable(model)
    options = {FORWARD: transformers.DynamicCache(config=model.config), "use_cache": True}
    with torch.no_grad(), pytest.raises(InputError, match=r"'attention_mask': expected .* \[2, 12\], got \[2, 4\]"):
        states(model, tokens(count=8), **options)
        states(model, tokens(count=4), attention_mask=torch.ones(2, 4), **options)


def test_frozen_keys_and_two_calls_through_one_cache() -> None:
    """The rows of the first call are still wanted when gradients are computed behind the second."""
    found = []
    for enabled in (False, True):
        model = model_of("glm_moe_dsa")
        weight = model.requires_grad_(False).get_parameter("model.layers.0.self_attn.q_b_proj.weight")
        weight.requires_grad_(True)
        if enabled:
            dsa.enable(model)
        cache = transformers.DynamicCache(config=model.config)
        parts = [states(model, tokens(count=12), past_key_values=cache, use_cache=True) for _ in range(2)]
        torch.cat(parts, 1).float().pow(3).mean().backward()
        found.append(weight.grad.float())
    assert (found[1] - found[0]).norm() < 0.05 * found[0].norm()
