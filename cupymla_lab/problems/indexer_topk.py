"""Correctness cases of indexer_topk; see `cupymla.ops.case`."""

from __future__ import annotations

from typing import Any

from cupymla.ops.indexer_topk.cases import IndexerTopkCase, _case

_ALL: dict[str, Any] = {"return_values": True, "return_lse": True}


CASES: tuple[IndexerTopkCase, ...] = (
    _case(3, 200, 20, scales=True),
    _case(3, 200, 20, heads=64, return_values=True),
    _case(2, 70, 30, dtype="bf16", return_values=True, return_lse=True),
    _case(2, 70, 30, dtype="fp16", channels=64, return_values=True, return_lse=True),
    _case(3, 200, 20, heads=1, **_ALL),
    _case(2, 200, 20, heads=128, scales=True, **_ALL),
    _case(3, 200, 1, **_ALL),
    _case(2, 2100, 2047, heads=8, channels=64, **_ALL),
    _case(1, 4500, 4096, heads=8, channels=64, **_ALL),
    _case(3, 300, 60, "plateau", "values", values="plateau", heads=8, **_ALL),
    _case(2, 300, 60, "plateau_no_relu", "values", values="plateau", heads=8, relu=False, **_ALL),
    _case(3, 300, 200, "hostile", "values", values="exact_hostile", heads=8, **_ALL),
    _case(3, 300, 200, "hostile", "values", values="exact_hostile", dtype="bf16", heads=8, **_ALL),
    _case(1, 8300, 200, "negative", "values", values="negative", heads=1, channels=64, **_ALL),
    _case(2, 40, 60, "short", return_values=True, return_lse=True),
    _case(0, 100, 5, "no_queries", return_values=True, return_lse=True),
    _case(3, 0, 5, "no_keys", return_values=True, return_lse=True),
    _case(3, 130, 9, "lse2", "options", return_values=True, return_lse=True, lse_base="2"),
    _case(3, 130, 9, "no_relu", "options", relu=False, return_values=True),
    _case(3, 130, 9, "bf16_weights", "options", bf16_weights=True),
    _case(20, 19, 8, "causal", "masks", causal=True, return_values=True, return_lse=True),
    _case(9, 140, 30, "causal", "masks", causal=True, q_start=130, heads=32),
    _case(
        30, 9, 4, "causal_stride4", "masks", causal=True, q_start=-3, k_stride=4, return_values=True, return_lse=True
    ),
    _case(11, 270, 40, "windows", "masks", limits="windows", return_values=True, return_lse=True),
    _case(11, 270, 40, "windows_causal", "masks", limits="windows", causal=True, q_start=200, dtype="bf16"),
    _case(3, 8300, 300, "shared", heads=8, channels=64, return_values=True, return_lse=True),
    _case(3, 130, 20, "batch", "batch", batch=2, limits="windows", scales=True, return_values=True, return_lse=True),
    _case(
        3, 70, 20, "batch_strided", "strides", batch=2, dtype="bf16", strided=True, return_values=True, return_lse=True
    ),
)


LARGE: tuple[IndexerTopkCase, ...] = (
    _case(300, 200001, 2048, "chunks", "large", heads=32, return_values=True, return_lse=True),
    _case(300, 200001, 2048, "chunks_causal", "large", heads=32, causal=True, q_start=199701),
    _case(3000, 3001, 2048, "causal", "large", heads=64, causal=True, return_values=True),
    _case(300, 30001, 2048, "causal", "large", heads=8, causal=True, q_start=29701, **_ALL),
    _case(50, 40000, 2048, "causal", "large", heads=8, causal=True, q_start=39950, **_ALL),
    _case(66000, 200, 20, "many_queries", "large", heads=8, channels=64, return_values=True),
    _case(2, (1 << 20) + 77, 2048, "long", "large", heads=8, channels=64, **_ALL),
    _case(150, 40000, 2048, "plateau", "large", values="plateau", heads=8, channels=64, **_ALL),
    _case(150, 9000, 200, "negative", "large", values="negative", heads=1, channels=64, **_ALL),
    _case(200, 9000, 1000, "batch", "large", batch=30, limits="windows", return_values=True, return_lse=True),
)
"""For a GPU alone: rows that are scored in several parts."""
