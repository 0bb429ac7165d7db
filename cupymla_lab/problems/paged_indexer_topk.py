"""Correctness cases of paged_indexer_topk; see `cupymla.ops.case`."""

from __future__ import annotations

from typing import Any

from cupymla.ops.paged_indexer_topk.cases import PagedCase, _case

_ALL: dict[str, Any] = {"return_values": True, "return_lse": True}


CASES: tuple[PagedCase, ...] = (
    _case(3, 1, 208, 20, scales=True, **_ALL),
    _case(2, 2, 256, 20, page=64, heads=64, scales=True, return_values=True),
    _case(2, 1, 256, 300, "short", page=256, heads=8, lens="hostile", **_ALL),
    _case(2, 3, 150, 20, page=1, heads=33, scales=True, return_values=True),
    _case(2, 5, 160, 9, page=5, heads=128, **_ALL),
    _case(2, 8, 192, 30, page=64, heads=64, scales=True, lens="hostile", **_ALL),
    _case(2, 3, 130, 20, page=10, heads=5, channels=64, scales=True, return_values=True),
    _case(2, 2, 144, 20, dtype="bf16", heads=64, **_ALL),
    _case(2, 3, 144, 20, page=1, dtype="bf16", channels=64, heads=3, return_values=True),
    _case(2, 6, 144, 20, page=16, dtype="fp16", heads=128, **_ALL),
    _case(2, 9, 144, 20, page=16, dtype="fp16", heads=20, channels=64, return_values=True),
    _case(2, 7, 160, 20, page=16, heads=1, **_ALL),
    _case(0, 2, 64, 5, "no_requests", **_ALL),
    _case(2, 2, 0, 5, "no_keys", **_ALL),
    _case(9, 2, 320, 30, "hostile", "lengths", lens="hostile", tables="hostile", **_ALL),
    _case(7, 4, 320, 30, "by_query", "lengths", lens="hostile", by_query=True, tables="hostile", **_ALL),
    _case(5, 1, 1280, 40, "one_long", "lengths", lens="one_long", heads=64, scales=True, return_values=True),
    _case(3, 2, 160, 10, "empty", "lengths", lens="empty", **_ALL),
    # Tiles that lie in one block, whose table entries are looked up 32 at a time.
    _case(5, 1, 1280, 100, "blocks", "lengths", page=64, scales=True, lens="hostile", tables="hostile", **_ALL),
    _case(1, 1, 12800, 90, "many_blocks", "lengths", page=128, heads=8, channels=64, tables="hostile", **_ALL),
    _case(3, 2, 208, 10, "bound", "lengths", lens="hostile", max_context=100, tables="hostile", **_ALL),
    _case(2, 2, 208, 30, "token", "options", positions="token", tables="hostile", **_ALL),
    _case(2, 2, 208, 30, "no_relu", "options", relu=False, return_values=True),
    _case(2, 2, 208, 30, "lse2", "options", lse_base="2", bf16_weights=True, **_ALL),
    _case(2, 3, 416, 60, "ties", "values", values="ties", heads=8, tables="hostile", return_values=True),
    _case(2, 3, 208, 60, "hostile", "values", values="hostile", scales=True, return_values=True),
    _case(2, 3, 208, 60, "hostile", "values", values="hostile", dtype="bf16", heads=20, return_values=True),
    _case(2, 3, 208, 30, "strided", "strides", strided=True, scales=True, heads=32, lens="hostile", **_ALL),
    _case(2, 3, 208, 30, "strided", "strides", strided=True, dtype="bf16", heads=32, lens="hostile", **_ALL),
    *(
        _case(3, 1, keys, topk, name, heads=8, channels=64, lens="hostile", tables="hostile", **_ALL)
        for keys, topk, name in ((8192, 2048, "registers"), (8208, 60, "shared"))
    ),
)


LARGE: tuple[PagedCase, ...] = (
    _case(1, 1, 131072, 2048, "cluster", "large", page=64, heads=64, scales=True, **_ALL),
    _case(8, 4, 131072, 2048, "clusters_of_three", "large", page=64, heads=8, lens="hostile", tables="hostile", **_ALL),
    _case(12, 4, 40000, 2048, "hostile", "large", page=16, heads=64, lens="hostile", tables="hostile", **_ALL),
    _case(3, 2, 32784, 2048, "neither", "large", page=16, heads=8, lens="hostile", tables="hostile", **_ALL),
    _case(140, 1, 32768, 2048, "shared", "large", page=64, heads=8, lens="hostile", tables="hostile", **_ALL),
    _case(140, 2, 8192, 2048, "registers", "large", page=64, heads=8, lens="hostile", tables="hostile", **_ALL),
    _case(128, 1, 4096, 2048, "registers_ties", "large", page=64, heads=8, values="ties", **_ALL),
    _case(400, 1, 140032, 2048, "chunks", "large", page=64, heads=32, lens="one_long", return_values=True),
    _case(140, 1, 9024, 200, "negative", "large", page=64, heads=1, values="negative", **_ALL),
    _case(2, 1, (1 << 20) + 64, 2048, "long", "large", page=64, heads=8, channels=64, **_ALL),
    _case(3000, 2, 512, 200, "many_requests", "large", page=64, heads=8, lens="hostile", return_values=True),
    _case(3, 8, 70016, 4096, "many_queries", "large", page=64, heads=128, dtype="bf16", **_ALL),
)
"""For a GPU alone: rows of clusters, of one CTA, short ones; several chunks of requests, more requests than threads,
several query tiles."""
