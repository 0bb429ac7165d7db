"""Small models of transformers' DSA families, on a CPU."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import transformers

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


def in_parts(model: Any, ids: Any, cache: Any, **options: Any) -> Any:
    """Logits of chunks of 9 and 6 tokens, then of one at a time."""
    bounds = [0, 9, 15, *range(16, ids.shape[1] + 1)]
    padding = options.pop("attention_mask", None)
    found = []
    with torch.no_grad():
        for start, end in itertools.pairwise(bounds):
            if padding is not None:
                options["attention_mask"] = padding[:, :end]
                options["position_ids"] = (padding.cumsum(-1) - 1).clamp(min=0)[:, start:end]
            found.append(states(model, ids[:, start:end], **{FORWARD: cache, "use_cache": True}, **options))
    return torch.cat(found, 1)
