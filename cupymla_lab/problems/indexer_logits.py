"""Correctness cases of indexer_logits; see `cupymla.ops.case`."""

from __future__ import annotations

from cupymla.ops.indexer_logits.cases import LogitsCase, _case

CASES: tuple[LogitsCase, ...] = (
    *(_case(3, 200, heads, scales=True) for heads in (64, 32, 16, 8)),
    *(_case(3, 150, heads) for heads in (1, 33, 128)),
    *(_case(5, 130, heads, channels=64, scales=True) for heads in (64, 5)),
    *(_case(3, 70, heads, dtype="bf16") for heads in (64, 32, 16, 3, 128)),
    *(_case(3, 70, heads, dtype="fp16", channels=64) for heads in (64, 9)),
    *(_case(3, 130, heads, "exact", "exact", values="exact", scales=True) for heads in (64, 20)),
    _case(3, 130, 16, "exact", "exact", values="exact", dtype="bf16"),
    _case(3, 130, 16, "no_relu", "options", relu=False, scales=True),
    _case(3, 70, 32, "no_relu", "options", relu=False, dtype="bf16"),
    _case(3, 130, 32, "bf16_weights", "options", bf16_weights=True),
    _case(20, 19, 32, "causal", "masks", causal=True),
    _case(9, 140, 32, "causal", "masks", causal=True, q_start=130),
    _case(9, 640, 64, "causal_unseen", "masks", causal=True, scales=True),
    _case(30, 9, 16, "causal_stride4", "masks", causal=True, q_start=-3, k_stride=4),
    _case(11, 270, 16, "windows", "masks", limits="windows"),
    _case(11, 270, 16, "windows_causal", "masks", limits="windows", causal=True, q_start=200, dtype="bf16"),
    _case(4, 200, 32, "hostile", "values", values="hostile", scales=True),
    _case(4, 200, 32, "hostile", "values", values="hostile", dtype="bf16"),
    _case(4, 200, 20, "hostile_filled", "values", values="hostile", dtype="bf16"),
    _case(4, 100, 20, "hostile_filled", "values", values="hostile", dtype="fp16", relu=False),
    _case(3, 130, 16, "batch", "batch", batch=2, limits="windows", scales=True),
    _case(3, 70, 16, "batch_strided", "strides", batch=2, dtype="bf16", strided=True),
    _case(5, 130, 32, "strided", "strides", scales=True, strided=True),
    _case(0, 100, 16, "no_queries"),
    _case(3, 0, 16, "no_keys"),
)


LARGE: tuple[LogitsCase, ...] = (
    *(_case(200, 3001, heads, "large", "large", scales=True) for heads in (64, 32, 16)),
    *(_case(100, 2001, heads, "large", "large", dtype="bf16") for heads in (64, 32, 128)),
    _case(700, 1500, 64, "large_causal", "large", causal=True, q_start=800, scales=True),
    _case(300, 1500, 32, "large_windows", "large", limits="windows", dtype="fp16", channels=64),
    _case(66000, 40, 1, "many_queries", "large"),
    _case(3, (1 << 20) + 77, 8, "long", "large", channels=64),
)
"""For a GPU alone: CTAs that take several query tiles, stages that are used again, more queries than 2**16."""
