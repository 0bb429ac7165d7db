"""transformers' DSA families with caches in fp8: the installed package, on a CPU."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers_kit import FORWARD, HERE, TOKENS, Rounded, in_parts, model_of, rounded, states, tokens  # noqa: E402

from cupymla.errors import InputError, UnsupportedError  # noqa: E402
from cupymla.interop import torch as mla  # noqa: E402
from cupymla.interop import transformers as dsa  # noqa: E402
from cupymla.interop.transformers import attention, fp8  # noqa: E402
from cupymla.interop.transformers import cache as room  # noqa: E402

ROTATED = [family for family in HERE if family != "glm5_next_text"]
"""Families of rows that fp8 holds: those with RoPE."""

ALL_ROTATED: dict[str, Any] = {"mistral_large4_text": {"no_rope_layers": [1, 1, 1]}}
"""Options of families that have layers without RoPE."""


@pytest.mark.parametrize("family", ROTATED)
def test_attention_is_that_of_the_dequantised_cache(family: str) -> None:
    """Bit for bit, where every key is selected: fp8 rows cost their rounding and nothing else."""
    model = model_of(family, **ALL_ROTATED.get(family, {}))
    dsa.enable(model, cache="fp8")
    cache = transformers.DynamicCache(config=model.config)
    ours = in_parts(model, tokens(), cache)
    layers = [layer for layer in cache.layers if hasattr(layer, room.MARK)]
    assert layers and all(layer.keys.dtype == torch.uint8 for layer in layers if layer.get_seq_length())
    dsa.enable(model)
    assert torch.equal(ours, in_parts(model, tokens(), Rounded(config=model.config)))


@pytest.mark.parametrize("family", ROTATED)
def test_errors_are_at_most_twice_those_of_the_own_code_on_the_same_rows(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of logits, against float32 that reads rounded rows, too."""
    options = ALL_ROTATED.get(family, {})
    models = [model_of(family, dtype, **options) for dtype in (torch.float32, torch.bfloat16, torch.bfloat16)]
    kind = next(type(module) for module in models[0].modules() if getattr(module, "indexer", None) is not None)
    expand = kind.expand_kv

    def expand_rounded(self: Any, kv_nope: Any, k_rot: Any) -> Any:
        if kv_nope.shape[-1] == 512:
            kv_nope, k_rot = rounded(torch.cat((kv_nope, k_rot), -1)).split((512, 64), -1)
        return expand(self, kv_nope, k_rot)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(kind, "expand_kv", expand_rounded)
        exact, own = (states(model, tokens()) for model in models[:2])
    dsa.enable(models[2], cache="fp8")
    ours = in_parts(models[2], tokens(), transformers.DynamicCache(config=models[2].config))
    assert (ours - exact).norm() <= 2 * (own - exact).norm()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str) -> None:
    """A padded sequence in a batch has the logits of the sequence alone."""
    model = model_of("glm_moe_dsa", topk=6)
    dsa.enable(model, cache="fp8")
    ids, kept = tokens(), torch.ones(2, TOKENS, dtype=torch.long)
    real = slice(5, None) if side == "left" else slice(0, TOKENS - 5)
    kept[0] = 0
    kept[0, real] = 1

    def cache() -> Any:
        return transformers.DynamicCache(config=model.config)

    padded = in_parts(model, ids, cache(), attention_mask=kept)
    torch.testing.assert_close(padded[:1, real], in_parts(model, ids[:1, real], cache()), atol=0.02, rtol=0.02)
    torch.testing.assert_close(padded[1:], in_parts(model, ids[1:], cache()), atol=0.02, rtol=0.02)


def test_generate_with_dynamic_and_static_caches_and_beams() -> None:
    """One token at a time is what the whole forward on the dequantised cache picks."""
    model, ids = model_of("glm_moe_dsa"), tokens()
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    dsa.enable(model, cache="fp8")
    dynamic = model.generate(ids, **options)
    assert torch.equal(dynamic, model.generate(ids, cache_implementation="static", **options))
    beams = model.generate(ids, num_beams=2, **options)
    dsa.enable(model)
    assert torch.equal(dynamic, model.generate(ids, past_key_values=Rounded(config=model.config), **options))
    assert torch.equal(beams, model.generate(ids, past_key_values=Rounded(config=model.config), num_beams=2, **options))


def layer_of(batch: int = 2) -> tuple[Any, Any]:
    """A layer of a dynamic cache in fp8, and 301 index keys of two sequences."""
    cache = transformers.DynamicCache(config=model_of("glm_moe_dsa").config)
    attention.give_room(cache, 0, in_fp8=True)
    keys = torch.randn(batch, 301, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    return cache.layers[0], keys


def same_index_keys(layer: Any, keys: Any) -> bool:
    """Whether a layer's first index keys are these."""
    count = keys.shape[1]
    codes, scales = fp8.index_parts(layer.indexer_keys)
    wanted, scale = mla.quantize_fp8(keys)
    same = torch.equal(codes[:, :count].view(torch.uint8), wanted.view(torch.uint8))
    return bool(same and torch.equal(scales[:, :count], scale[..., 0]))


def test_index_keys_are_those_that_the_writer_quantises() -> None:
    """Whatever chunks they come in, while their block grows, after a crop and for other sequences."""
    layer, keys = layer_of()
    latents = torch.ones(2, 1, 301, 512).bfloat16(), torch.ones(2, 1, 301, 64).bfloat16()
    layer.update(*latents)
    for start, end in ((0, 200), (200, 300), (300, 301)):
        layer.update_indexer(keys[:, start:end])
    assert layer.indexer_keys.shape == (2, 2 * room.STEP, 132)
    assert same_index_keys(layer, keys)
    held = layer.indexer_keys
    layer.crop(-101)
    layer.update_indexer(-keys[:, 200:])
    assert same_index_keys(layer, torch.cat((keys[:, :200], -keys[:, 200:]), 1))
    assert not torch.equal(held, layer.indexer_keys), "what somebody holds stays"
    copied = copy.deepcopy(layer)
    layer.batch_select_indices(torch.tensor([1]))
    assert same_index_keys(layer, keys[1:, :200])
    assert same_index_keys(copied, keys[:, :200])


def test_a_full_static_cache_fails_and_writes_nothing() -> None:
    """Behind the rows of a sequence are those of the next one."""
    model, ids = model_of("glm_moe_dsa"), tokens()
    dsa.enable(model, cache="fp8")
    cache = transformers.StaticCache(config=model.config, max_cache_len=TOKENS)
    with torch.no_grad():
        states(model, ids, **{FORWARD: cache, "use_cache": True})
        before = cache.layers[0].keys.clone()
        with pytest.raises(IndexError):
            states(model, ids[:, :1], **{FORWARD: cache, "use_cache": True})
    assert torch.equal(cache.layers[0].keys, before)


def test_rows_take_the_bytes_of_their_format() -> None:
    """788 bytes a token and layer, where bfloat16 takes 1408."""
    layer, keys = layer_of()
    layer.update(torch.ones(2, 1, 301, 512).bfloat16(), torch.ones(2, 1, 301, 64).bfloat16())
    layer.update_indexer(keys)
    rows = 2 * 2 * room.STEP
    assert layer.keys.untyped_storage().nbytes() == rows * 656
    assert layer.indexer_keys.untyped_storage().nbytes() == rows * 132


def test_training_keeps_the_rows_of_the_models_dtype() -> None:
    """Gradients are those without fp8; they cannot pass through rows that are fp8 already."""
    model, ids = model_of("glm_moe_dsa"), tokens()
    found = []
    kinds: tuple[Literal["fp8"] | None, ...] = (None, "fp8")
    for kind in kinds:
        dsa.enable(model, cache=kind)
        model.zero_grad()
        states(model, ids, use_cache=True).float().pow(2).mean().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*found)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        states(model, ids, **{FORWARD: cache, "use_cache": True})
    with pytest.raises(UnsupportedError, match="gradients of keys in an fp8 cache"):
        states(model, ids, **{FORWARD: cache, "use_cache": True})


def test_a_cache_keeps_its_kind() -> None:
    """Rows that are there decide, whatever the model was enabled with since."""
    model, ids = model_of("glm_moe_dsa"), tokens()
    whole = {}
    kinds: tuple[Literal["fp8"] | None, ...] = (None, "fp8")
    for first, then in zip(kinds, reversed(kinds), strict=True):
        cache = transformers.DynamicCache(config=model.config)
        dsa.enable(model, cache=first)
        with torch.no_grad():
            whole[first] = states(model, ids, **{FORWARD: cache, "use_cache": True})
            dsa.enable(model, cache=then)
            states(model, ids[:, :1], **{FORWARD: cache, "use_cache": True})
        assert cache.layers[0].keys.dtype == (torch.uint8 if first else torch.bfloat16)
        assert cache.get_seq_length() == TOKENS + 1
    assert not torch.equal(whole[None], whole["fp8"])


def test_the_end_of_enabled_gives_the_kind_of_caches_back() -> None:
    model = model_of("glm_moe_dsa")

    def dtype() -> Any:
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            states(model, tokens(), **{FORWARD: cache, "use_cache": True})
        return cache.layers[0].keys.dtype

    kinds: tuple[Literal["fp8"] | None, ...] = (None, "fp8")
    for outer, inner in zip(kinds, reversed(kinds), strict=True):
        dsa.enable(model, cache=outer)
        before = dtype()
        with dsa.enabled(model, cache=inner):
            assert dtype() != before
        assert dtype() == before


def test_what_has_no_fp8_rows_is_refused() -> None:
    """Another word, index keys of 64 channels, rows without RoPE, a layer of another kind; nothing changes."""
    with pytest.raises(InputError, match="argument 'cache': expected 'fp8' or None, got 'int8'"):
        dsa.enable(model_of("glm_moe_dsa"), cache="int8")  # type: ignore[arg-type]
    model = model_of("glm_moe_dsa", index_head_dim=64)
    with pytest.raises(UnsupportedError, match="an fp8 cache of index keys of 64 channels"):
        dsa.enable(model, cache="fp8")
    assert model.config._attn_implementation == "eager"
    model = model_of("glm_moe_dsa")
    model.model.layers[0].self_attn.qk_rope_head_dim = 0
    with pytest.raises(UnsupportedError, match="an fp8 cache of rows without RoPE"):
        dsa.enable(model, cache="fp8")
    model = model_of("glm_moe_dsa")
    dsa.enable(model, cache="fp8")
    cache = transformers.DynamicCache()
    cache.layers.append(transformers.cache_utils.DynamicLayer())
    with pytest.raises(UnsupportedError, match="an fp8 cache in a DynamicLayer"), torch.no_grad():
        states(model, tokens(), **{FORWARD: cache, "use_cache": True})
