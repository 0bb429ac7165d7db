"""Small models of transformers' DSA families, on a CPU; and what models of any size are checked with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from cupymla.interop import torch as mla

VOCABULARY, TOKENS = 97, 24

OLDER = transformers.__version__ < "5.18"
"""Whether this is 5.17, whose configurations and arguments have other words."""

INDEXED = "deepseek_sparse_attention" if OLDER else "indexed_attention"
FORWARD = "past_key_values" if OLDER else "cache"
"""A layer's type; what a model's forward calls its cache."""

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "mlp_layer_types": ["dense"] * 2,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}

OWN: dict[str, dict[str, Any]] = {
    "deepseek_v32": {},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "hy_v4": {},
    # A layer that shares keys and runs its own indexer, and one without RoPE.
    "mistral_large4_text": {
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense"] * 3,
        "kv_source_layers": [0, 1, 1],
        "no_rope_layers": [0, 1, 1],
        "indexer_types": ["full", "full", "shared"],
    },
    "dots3_note_text": {
        "layer_types": ["sliding_attention", "indexed_attention"],
        "sliding_window": 8,
        "swa_kv_lora_rank": 64,
        "swa_q_lora_rank": 32,
        "swa_head_dim": 96,
        "swa_qk_rope_head_dim": 64,
        "swa_qk_nope_head_dim": 32,
        "swa_v_head_dim": 32,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
    },
    # A layer with linear attention, one that ranks pools, and one that shares its selection.
    "glm5_next_text": {
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense"] * 3,
        "layer_types": ["linear_attention", *[INDEXED] * 2],
        "indexer_types": ["full", "full", "shared"],
        "qk_rope_head_dim": 0,
        "index_kpool": 2,
        "linear_head_dim": 32,
        "linear_num_heads": 2,
        "hc_mult": 2,
    },
}
"""What each family wants beside SIZES."""

HERE = [family for family in OWN if family in transformers.CONFIG_MAPPING]
"""Families that the installed version has: all of them from 5.24 on."""


def model_of(family: str, dtype: Any = torch.bfloat16, topk: int = 64, **options: Any) -> Any:
    """A model with the weights of all models of its family and topk."""
    config = transformers.AutoConfig.for_model(family, **SIZES | OWN[family] | {"index_topk": topk} | options)
    torch.manual_seed(0)
    headless = family in ("mistral_large4_text", "glm5_next_text")
    kind = transformers.AutoModel if headless else transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than they start, so that attention is no average; rounded, so that every dtype has the same.
            parameter.mul_(3 if parameter.ndim > 1 else 1).copy_(parameter.bfloat16())
    return model.to(dtype).eval()


def tokens(batch: int = 2, count: int = TOKENS) -> Any:
    """Tokens, none of them padding."""
    return torch.randint(1, VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(1))


def states(model: Any, ids: Any, **options: Any) -> Any:
    """Logits, or the hidden states of a model without a head."""
    found = model(ids, **{"use_cache": False} | options)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def off(found: Any, right: Any) -> float:
    """The relative error of the whole."""
    return float((found - right).norm() / right.norm())


def masked(kept: Any) -> dict[str, Any]:
    """A padding mask, and positions that count what it leaves."""
    return {"attention_mask": kept, "position_ids": (kept.cumsum(-1) - 1).clamp(min=0)}


def in_parts(model: Any, ids: Any, cache: Any, sizes: Sequence[int] = (9, 6), **options: Any) -> Any:
    """Logits of chunks of so many tokens, then of one at a time; an `attention_mask` is one of padding."""
    bounds = [0, *itertools.accumulate(sizes)]
    bounds += range(bounds[-1] + 1, ids.shape[1] + 1)
    padding = options.pop("attention_mask", None)
    found = []
    with torch.no_grad():
        for start, end in itertools.pairwise(bounds):
            if padding is not None:
                options |= masked(padding[:, :end])
                options["position_ids"] = options["position_ids"][:, start:]
            found.append(states(model, ids[:, start:end], **{FORWARD: cache, "use_cache": True}, **options))
    return torch.cat(found, 1)


def rounded(rows: Any) -> Any:
    """Rows [..., 576] as fp8 rows hold them, in their dtype."""
    flat = rows.reshape(-1, 576)
    cache = torch.zeros(1, len(flat), 656, dtype=torch.uint8, device=rows.device)
    slots = torch.arange(len(flat), device=rows.device)
    latents, rotated = flat.split((512, 64), -1)
    mla.concat_and_cache_mla(latents, rotated, cache, slots, cache_format="v32_fp8", scale_rule="pow2")
    return mla.gather_mla_cache(cache, slots, cache_format="v32_fp8").to(rows.dtype).view(rows.shape)


class Rounded(transformers.DynamicCache):  # type: ignore[misc]
    """A cache of latent rows that are rounded to what fp8 rows hold, in the model's dtype."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        rows = torch.cat((key_states, value_states), -1)  # before 5.24 the keys alone are the rows
        if rows.shape[-1] == 576:  # not of a layer with a sliding window
            key_states, value_states = rounded(rows).split((key_states.shape[-1], value_states.shape[-1]), -1)
        return super().update(key_states, value_states, *args, **kwargs)


def topk_of_rounded(queries: Any, keys: Any, weights: Any, topk: int, *, starts: Any, ends: Any) -> tuple[Any, Any]:
    """`indexer_topk` on queries and keys as fp8 holds them, in float32 and with a score for every key."""
    q, k = (codes.float() * scales for codes, scales in map(mla.quantize_fp8, (queries, keys)))
    scores = torch.einsum("bshl,bsh->bsl", torch.einsum("bshd,bld->bshl", q, k).relu(), weights.float())
    places = torch.arange(keys.shape[1], device=keys.device)
    seen = (places >= starts[..., None]) & (places < ends[..., None])
    # Stable, since of equal scores the smaller key is selected.
    best = scores.masked_fill(~seen, -torch.inf).sort(descending=True, stable=True).indices[..., :topk]
    ids = torch.where(seen.gather(-1, best), best, keys.shape[1]).sort().values
    return torch.where(ids < keys.shape[1], ids, -1).int(), seen.sum(-1).clamp(max=topk).int()
