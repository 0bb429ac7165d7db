"""Correctness cases of sparse_mla_decode; see `cupymla.ops.case`."""

from __future__ import annotations

from cupymla.ops.sparse_mla_decode.cases import DecodeCase, _case

CASES: tuple[DecodeCase, ...] = (
    _case("v32", 2, 1, 16, 100),
    _case("v32", 1, 2, 64, 200),
    _case("v4", 2, 1, 64, 70, page=1),
    _case("v4", 1, 3, 8, 130),
    _case("bf16", 2, 1, 16, 100, page=16),
    _case("bf16", 1, 1, 128, 70, d_qk=512),
    _case("v32", 1, 1, 128, 300),
    _case("v32", 1, 1, 1, 1, page=1),
    _case("v32", 2, 3, 20, 193, page=3),
    _case("bf16", 1, 2, 33, 257),
    _case("v4", 1, 1, 100, 64),
    _case("v32", 0, 2, 16, 10, "no_requests"),
    _case("v32", 2, 1, 16, 0, "no_entries"),
    _case("v32", 3, 2, 16, 150, "requests", "lengths", lengths="requests"),
    _case("v4", 2, 3, 64, 150, "rows", "lengths", lengths="rows", invalid=0.2),
    _case("bf16", 4, 2, 8, 150, "rows", "lengths", lengths="rows"),
    _case("v32", 2, 2, 16, 150, "holes", "masks", invalid=0.4),
    _case("bf16", 2, 2, 64, 150, "holes", "masks", invalid=0.4),
    _case("v4", 2, 1, 16, 90, "all_invalid", "masks", invalid=1.0),
    _case("v4", 2, 1, 16, 40, "second", "sources", extra=90, extra_page=16, sink=True),
    _case("v32", 2, 2, 64, 70, "second_lengths", "sources", extra=130, extra_page=1, lengths="rows", invalid=0.1),
    _case("bf16", 3, 1, 8, 60, "second_requests", "sources", extra=70, lengths="requests", sink=True),
    _case("v32", 1, 2, 16, 100, "sink", "options", sink=True),
    _case("v4", 1, 1, 64, 100, "lse2", "options", lse_base="2", sink=True),
    _case("bf16", 1, 1, 16, 100, "negative_scale", "options", sm_scale=-0.07),
    _case("v32", 1, 1, 64, 100, "zero_scale", "options", sm_scale=0.0),
    _case("v32", 2, 1, 16, 400, "splits3", "splits", splits=3),
    _case("v4", 1, 2, 64, 400, "splits4", "splits", splits=4, lengths="rows"),
    _case("bf16", 1, 1, 64, 520, "splits16", "splits", splits=16),
    _case("v32", 1, 1, 32, 330, "splits1", "splits", splits=1),
    _case("v32", 1, 2, 16, 2048, "shares", "shares", lengths="rows", sink=True),
    _case("v32", 1, 1, 64, 470, "halves_non_finite", "halves", splits=1, spoiled=True, invalid=0.1),
    _case("v32", 1, 1, 64, 330, "halves_large_scales", "halves", splits=2, large=True, sm_scale=2.0**-22),
    _case("v32", 1, 1, 128, 330, "pair", "pairs", splits=1, invalid=0.2),
    _case("v4", 1, 2, 100, 200, "pair", "pairs", splits=1, extra=70, extra_page=16, lengths="rows", sink=True),
    _case("v32", 2, 1, 72, 700, "pair", "pairs", splits=3, lengths="rows"),
    _case("v32", 1, 1, 66, 200, "pair_non_finite", "pairs", splits=1, spoiled=True),
    _case("v4", 1, 1, 66, 130, "pair_large_scales", "pairs", splits=1, large=True, sm_scale=2.0**-22, invalid=0.2),
    # Few valid entries, and scores of all sizes: the base of exponentials moves far from block to block.
    _case("v32", 2, 1, 16, 400, "moving_base", "bases", splits=1, invalid=0.98, sm_scale=0.3),
    _case("v32", 2, 1, 64, 400, "moving_base", "bases", splits=1, invalid=0.98, sm_scale=0.3),
    _case("v32", 2, 1, 68, 400, "moving_base", "bases", splits=1, invalid=0.98, sm_scale=0.3),
    _case("v32", 2, 2, 16, 150, "non_finite", "poison", spoiled=True),
    _case("v4", 2, 2, 64, 150, "non_finite", "poison", spoiled=True, splits=2),
    _case("bf16", 2, 2, 16, 100, "non_finite", "poison", spoiled=True),
    _case("v32", 2, 1, 16, 130, "large_scales", "scales", large=True, sm_scale=2.0**-22),
    _case("v4", 1, 1, 64, 130, "large_scales", "scales", large=True, sm_scale=2.0**-22, invalid=0.2),
    _case("v32", 1, 2, 16, 100, "fp16", "dtypes", dtype="fp16"),
    _case("v4", 1, 1, 64, 140, "fp16", "dtypes", dtype="fp16", invalid=0.1),
    _case("bf16", 1, 1, 16, 100, "fp16", "dtypes", dtype="fp16"),
    _case("bf16", 1, 1, 64, 100, "fp16", "dtypes", dtype="fp16", spoiled=True),
    _case("v32", 2, 2, 16, 100, "strided", "strides", strided=True, page=5, lengths="rows", sink=True),
    _case("v4", 2, 2, 64, 100, "strided", "strides", strided=True, page=5, lengths="requests", extra=20, extra_page=2),
    _case("bf16", 2, 2, 16, 100, "strided", "strides", strided=True, page=5),
)


LARGE: tuple[DecodeCase, ...] = (
    _case("v32", 130, 2, 64, 1000, "large", "large", lengths="rows", invalid=0.1),
    _case("v4", 140, 1, 128, 600, "large", "large", extra=700, lengths="requests", sink=True),
    _case("bf16", 200, 1, 16, 2048, "large", "large"),
    _case("v32", 7, 1, 128, 5000, "large", "large", lengths="rows"),
    _case("v32", 150, 1, 128, 1000, "large_pair", "large", lengths="rows", splits=1, invalid=0.1),
)
"""For a GPU alone: more rows than multiprocessors, clusters of all sizes."""
