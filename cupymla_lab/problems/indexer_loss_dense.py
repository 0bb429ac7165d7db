"""Correctness cases of indexer_loss_dense; see `cupymla.ops.case`."""

from __future__ import annotations

from typing import Any

from cupymla.ops.indexer_loss_dense.cases import DenseCase, _case


def _small(queries: int, keys: int, name: str, intent: str, **traits: Any) -> DenseCase:
    sizes: dict[str, Any] = {"heads": 16, "mla_heads": 16, "channels": 64, "mla_channels": 512} | traits
    return _case(queries, keys, sizes.pop("heads"), sizes.pop("mla_heads"), name, intent, **sizes)


CASES: tuple[DenseCase, ...] = (
    *(_case(3, 200, heads, mla_heads) for heads, mla_heads in ((64, 128), (32, 64), (16, 16), (128, 32))),
    *(
        _case(5, 130, heads, mla_heads, dtype="fp16", channels=64)
        for heads, mla_heads in ((64, 32), (32, 16), (16, 64))
    ),
    *(_case(6, 140, heads, mla_heads, "filled") for heads, mla_heads in ((1, 3), (20, 20), (33, 100), (100, 200))),
    _small(9, 300, "", "shapes"),
    _small(24, 600, "stages", "shapes", given_lse=True),
    _small(1, 1, "one", "shapes"),
    _small(9, 130, "no_relu", "options", relu=False),
    _small(9, 130, "bf16_weights", "options", bf16_weights=True),
    _small(9, 130, "fp32", "options", dk_dtype="float32"),
    _small(9, 130, "lse", "options", given_lse=True),
    _small(9, 130, "lse_base2", "options", given_lse=True, lse_base="2", slopes=True),
    _small(9, 130, "scale", "options", sm_scale=-0.11),
    _small(20, 19, "causal", "masks", causal=True),
    _small(40, 40, "causal_stride4", "masks", causal=True, q_start=-3, k_stride=4),
    _small(9, 300, "causal_late", "masks", causal=True, q_start=250, slopes=True),
    _small(21, 270, "windows", "masks", limits="windows"),
    _small(21, 270, "windows_causal", "masks", limits="windows", causal=True, q_start=200, given_lse=True),
    _small(9, 130, "zeros", "values", values="zeros"),
    _small(24, 300, "hostile", "values", values="hostile", limits="apart"),
    _small(24, 300, "hostile_fp16", "values", values="hostile", limits="apart", dtype="fp16", relu=False, slopes=True),
    _case(24, 200, 20, 20, "hostile", "values", values="hostile", limits="apart"),
    _small(7, 150, "batch_strided", "strides", batch=2, strided=True, limits="windows", given_lse=True, slopes=True),
    _small(0, 100, "no_queries", "shapes"),
    _small(3, 0, "no_keys", "shapes"),
)


LARGE: tuple[DenseCase, ...] = (
    _case(160, 500, 64, 128, "large", "large"),
    _case(150, 900, 32, 64, "large_causal", "large", causal=True, q_start=700, given_lse=True),
    _case(200, 1300, 16, 16, "large_fp16", "large", dtype="fp16", limits="windows"),
    # So many rows that each consumer has its own, an odd number of column tiles.
    _small(530, 300, "large_many_rows", "large", causal=True),
)
"""For a GPU alone: CTAs that take several tiles of rows, and slices of them."""

REPEATED: tuple[DenseCase, ...] = (
    _case(512, 2048, 64, 128, "repeated", "large", causal=True, q_start=1536),
    _small(2300, 8192, "repeated_blocks", "large", dtype="fp16", given_lse=True),
)
"""For runs that are compared with each other: 512 CTAs or more of the products, which an H200 takes in several waves,
for less than a millisecond. Of the first one slices of dk; the second has two blocks of rows."""
