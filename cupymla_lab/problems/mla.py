"""Correctness cases that operators of sparse MLA attention share."""

from __future__ import annotations

from typing import Any

from cupymla.ops.mla_cases import MlaCase, sized


def _small(
    intent: str, suffix: str, h: int = 16, d: int = 576, k: int = 65, q: int = 5, kv: int = 200, **options: Any
) -> MlaCase:
    return sized(h, d, k, q, kv, f"_{suffix}", intent, **options)


COMMON: tuple[MlaCase, ...] = (
    *(sized(h, d, 130, 3, 300, intent="shapes") for h in (1, 8, 16, 32, 64, 65, 128, 192) for d in (576, 512)),
    *(sized(16, 576, k, 3, 300, intent="shapes") for k in (63, 64, 65, 127, 128)),
    # With one token to attend to, the gradients are 0 but for rounding errors; a sink gives them something to be.
    sized(16, 576, 1, 3, 300, "_sink", intent="shapes", sink="finite"),
    sized(16, 576, 65, 4, 1, "_sink", intent="shapes", selection="duplicates", sink="finite"),
    *(sized(64, 576, 130, q, 1000, intent="shapes") for q in (1, 70)),
    sized(128, 576, 256, 2, 1000, intent="shapes", selection="full"),
    sized(128, 512, 512, 2, 1000, intent="shapes", selection="full"),
    sized(16, 576, 200, 3, 65, intent="shapes"),
    sized(16, 576, 65, 0, 100, intent="shapes"),
    sized(16, 576, 65, 3, 0, intent="shapes", selection="nothing"),
    _small("masks", "lengths", q=11, lengths="hostile"),
    _small("masks", "lengths_full", q=11, h=128, k=192, lengths="hostile", selection="full"),
    _small("masks", "causal", q=70, kv=70, causal=True),
    _small("masks", "causal_start", q=16, kv=200, causal=True, q_start=90),
    _small("masks", "causal_before", q=16, kv=200, causal=True, q_start=-5),
    _small("masks", "causal_stride4", q=70, kv=40, causal=True, k_stride=4),
    _small("masks", "causal_stride4_start", q=70, kv=40, causal=True, k_stride=4, q_start=30),
    _small("masks", "causal_stride4_before", q=70, kv=40, causal=True, k_stride=4, q_start=-9),
    _small("masks", "causal_lengths", q=70, kv=90, h=64, causal=True, lengths="hostile"),
    # Small forms, since `cupymla_lab.without_gpu` leaves out large cases.
    _small("masks", "lengths_full", q=7, h=64, lengths="hostile", selection="full"),
    _small("masks", "causal_lengths", q=8, kv=60, causal=True, q_start=50, lengths="hostile"),
    _small("empty rows", "empty", q=7, selection="empty"),
    _small("empty rows", "empty", q=7, h=128, d=512, selection="empty"),
    _small("empty rows", "nothing", q=4, h=64, selection="nothing"),
    _small("empty rows", "few", q=9, k=400, kv=500, selection="few"),
    _small("duplicates", "duplicates", q=6, selection="duplicates"),
    _small("duplicates", "duplicates", q=6, h=128, k=130, selection="duplicates"),
    _small("duplicates", "overlap90", q=12, h=64, k=130, kv=300, selection="overlap90"),
    _small("strides", "strided", q=6, h=16, layout="strided", lengths="hostile"),
    _small("strides", "strided", q=6, h=65, d=512, layout="strided"),
    _small("strides", "strided_batch", q=4, h=64, batch=3, layout="strided", lengths="hostile"),
    _small("strides", "singleton", q=4, layout="singleton"),
    _small("strides", "singleton_batch", q=4, batch=2, layout="singleton"),
    _small("dtypes", "fp16", q=4, dtype="float16"),
    _small("dtypes", "fp16", q=4, h=128, d=512, k=130, dtype="float16"),
    _small("dtypes", "fp16_strided", q=4, h=64, dtype="float16", layout="strided"),
    _small("batch", "batch", q=4, batch=3),
    _small("batch", "batch_causal", q=40, kv=40, h=64, batch=2, causal=True, lengths="hostile"),
    _small("batch", "batch_causal", q=4, kv=30, batch=2, causal=True, q_start=26, lengths="hostile"),
    _small("batch", "batch_of_none", q=4, batch=0),
)
"""What every MLA operator has to get right."""

SCALES: tuple[MlaCase, ...] = (
    _small("options", "scale_half", q=6, sm_scale=0.5),
    _small("options", "scale_negative", q=6, sm_scale=-0.1),
    _small("options", "scale_zero", q=6, sm_scale=0.0),
    _small("options", "base2", q=6, lse_base="2", selection="empty"),
)
"""For the operators that have a softmax."""

EXTREMES: tuple[MlaCase, ...] = (
    _small("options", "scale_huge", q=6, sm_scale=1e9),
    _small("options", "scale_huge_fp16", q=6, sm_scale=1e9, dtype="float16"),
)
"""For the forward alone: one entry takes the whole softmax, and the others' shares are rounding noise."""

SINKS: tuple[MlaCase, ...] = (
    _small("options", "sink", q=6, sink="finite"),
    _small("options", "sink_infinite", q=7, h=128, sink="infinite", selection="empty"),
    _small("options", "sink_strided", q=6, h=65, sink="infinite", layout="strided"),
    _small("options", "sink_base2", q=6, h=64, d=512, sink="finite", lse_base="2", batch=2),
)
"""For the operators that take a sink."""
