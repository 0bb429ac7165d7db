"""Correctness cases of indexer_bwd; see `cupymla.ops.case`."""

from __future__ import annotations

from typing import Any

from cupymla.ops.indexer_bwd.cases import GradientCase, _case


def _shapes(name: str, **traits: Any) -> tuple[GradientCase, ...]:
    return (
        *(_case(3, 300, 200, heads, name, **traits) for heads in (64, 32, 16, 128)),
        *(_case(3, 90, 65, heads, name, channels=64, dtype="fp16", **traits) for heads in (64, 32, 16, 128)),
    )


CASES: tuple[GradientCase, ...] = (
    *_shapes(""),
    *_shapes("det", deterministic=True),
    *(_case(6, 90, 63, heads, "filled") for heads in (1, 20, 33, 100)),
    _case(2, 700, 641, 16, "stages", channels=64),
    _case(2, 40, 1, 16, "one"),
    *(_case(2, 200, 128, 16, "tile" + "_det" * det, deterministic=det) for det in (False, True)),
    _case(3, 300, 130, 16, "fp32", "options", dk_dtype="float32"),
    _case(3, 300, 130, 16, "fp32_det", "options", dk_dtype="float32", deterministic=True, dtype="fp16"),
    _case(3, 300, 130, 16, "no_relu", "options", relu=False),
    _case(3, 300, 130, 16, "no_relu_fp16", "options", relu=False, dtype="fp16", deterministic=True),
    _case(3, 300, 130, 16, "bf16_weights", "options", bf16_weights=True),
    _case(7, 300, 130, 16, "lengths", "masks", lengths=True),
    _case(20, 19, 33, 16, "causal", "masks", causal=True),
    _case(9, 40, 70, 16, "causal_stride4", "masks", causal=True, q_start=-3, k_stride=4, lengths=True),
    _case(5, 60, 150, 16, "hostile_ids", "ids", ids="hostile"),
    _case(5, 60, 150, 66, "hostile_ids_det", "ids", ids="hostile", deterministic=True),
    _case(3, 60, 70, 16, "no_ids", "ids", ids="none", values="hostile"),
    _case(6, 60, 130, 16, "same_det", "ids", ids="same", deterministic=True),
    _case(3, 100, 90, 16, "zeros", "values", values="zeros"),
    _case(6, 50, 20, 20, "hostile", "values", values="hostile", dtype="fp16", channels=64),
    _case(6, 50, 20, 16, "hostile_det", "values", values="hostile", deterministic=True),
    _case(6, 200, 100, 16, "wide", "values", values="wide", dtype="fp16", deterministic=True),
    _case(3, 60, 70, 16, "lists_det", "options", deterministic=True, given_lists=True),
    _case(3, 100, 90, 16, "batch_strided", "strides", batch=2, strided=True, lengths=True),
    _case(3, 100, 90, 16, "batch_strided_det", "strides", batch=2, strided=True, lengths=True, deterministic=True),
    _case(0, 100, 8, 16, "no_queries"),
    _case(3, 0, 8, 16, "no_keys"),
    _case(3, 100, 0, 16, "no_entries", deterministic=True),
)
