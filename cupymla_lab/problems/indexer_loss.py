"""Correctness cases of indexer_loss; see `cupymla.ops.case`."""

from __future__ import annotations

from cupymla.ops.indexer_loss.cases import LossCase, _case

CASES: tuple[LossCase, ...] = (
    *(_case(3, 300, 200, heads) for heads in (64, 32, 16, 128)),
    *(_case(3, 90, 65, heads, channels=64, dtype="fp16") for heads in (64, 32, 16, 128)),
    *(_case(6, 90, 63, heads, "filled") for heads in (1, 20, 33, 100)),
    _case(2, 700, 641, 16, "stages", channels=64),
    _case(2, 40, 1, 16, "one"),
    _case(3, 300, 130, 16, "l1", "targets", target="l1"),
    _case(9, 300, 130, 16, "holes", "targets", target="holes"),
    _case(3, 300, 130, 16, "lse", "options", given_lse=True),
    _case(3, 300, 130, 16, "no_relu", "options", relu=False),
    _case(3, 300, 130, 16, "bf16_weights", "options", bf16_weights=True),
    _case(7, 300, 130, 16, "lengths", "masks", lengths=True),
    _case(20, 19, 33, 16, "causal", "masks", causal=True),
    _case(9, 40, 70, 16, "causal_stride4", "masks", causal=True, q_start=-3, k_stride=4, lengths=True),
    _case(5, 60, 150, 16, "hostile_ids", "ids", ids="hostile"),
    _case(3, 60, 70, 16, "no_ids", "ids", ids="none"),
    _case(3, 100, 90, 16, "zeros", "values", values="zeros"),
    _case(6, 50, 20, 20, "hostile", "values", values="hostile", dtype="fp16", channels=64),
    _case(3, 100, 90, 16, "batch_strided", "strides", batch=2, strided=True, lengths=True, given_lse=True),
    _case(0, 100, 8, 16, "no_queries"),
    _case(3, 0, 8, 16, "no_keys"),
    _case(3, 100, 0, 16, "no_entries"),
)
