"""Which classes of transformers are DeepSeek sparse attention, and the conventions in which their indexers differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VERSIONS = ((5, 17), (5, 24))
"""The oldest and the newest transformers (major, minor) that the tests ran."""

CACHE_NAMES = frozenset(("cache", "past_key_values"))
"""What caches are called: in transformers 5.24, and in 5.17."""

FP8 = "_cupymla_fp8"
"""Attribute of an attention module: whether its layer of a cache holds fp8."""


@dataclass(frozen=True)
class Family:
    """A family of models: its module's classes and its indexer's conventions.

    Source: transformers 5.24, models/<family>/modeling_<family>.py.
    """

    name: str
    attention: str
    """Class of the attention module."""
    indexer: str
    """Class of the indexer module."""
    interleaved: bool = True
    """Index heads are rotated in neighbouring pairs, otherwise in halves."""
    rope_last: bool = False
    """The last channels of an index head are rotated, not the first."""
    attention_interleaved: bool = True
    """The same of the attention's own heads and keys; read by `interop.jax.dsa`."""
    latent_query: bool = True
    """The index queries are made of the attention's query latent, not of the hidden states."""
    pools: bool = False
    """The indexer ranks pools of keys (`pools`)."""
    scaled_latents: bool = False
    """Latents count by the square root of the hidden size over their own; read by `interop.jax.dsa`."""

    @property
    def indexer_arguments(self) -> tuple[str, ...]:
        """What the indexer's forward takes, less the cache behind it, which has one of `CACHE_NAMES`."""
        latents = ("q_resid",) if self.latent_query else ()
        if self.pools:
            return ("hidden_states", *latents, "attention_mask")
        return ("hidden_states", *latents, "position_embeddings", "attention_mask", "position_ids")


FAMILIES: tuple[Family, ...] = (
    Family("deepseek_v32", "DeepseekV32Attention", "DeepseekV32Indexer", interleaved=False),
    Family("glm_moe_dsa", "GlmMoeDsaAttention", "GlmMoeDsaIndexer"),
    Family(
        "hy_v4",
        "HYV4Attention",
        "HYV4Indexer",
        interleaved=False,
        rope_last=True,
        attention_interleaved=False,
    ),
    Family("mistral_large4", "MistralLarge4TextAttention", "MistralLarge4TextIndexer", latent_query=False),
    Family("dots3_note", "Dots3NoteTextAttention", "Dots3NoteTextIndexer", scaled_latents=True),
    Family("glm5_next", "Glm5NextTextAttention", "Glm5NextTextIndexer", pools=True),
)


def family_of(module: Any) -> Family | None:
    """The family of an attention module, or None where it is something else."""
    names = {kind.__name__ for kind in type(module).__mro__}
    return next((family for family in FAMILIES if family.attention in names), None)
