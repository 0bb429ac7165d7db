"""Correctness cases of invert_indices; see `cupymla.ops.case`."""

from __future__ import annotations

from cupymla.ops.invert_indices.cases import InvertCase, _case

CASES: tuple[InvertCase, ...] = (
    _case(1, 1, 1),
    _case(3, 5, 4),
    _case(300, 40, 1),
    _case(7, 300, 513),
    _case(6, 700, 1024, "distinct", ids="distinct"),
    _case(0, 7, 5, "no_queries"),
    _case(2, 24577, 40, "ranges"),  # on few multiprocessors: with many there are many ranges anyway
    _case(3, 0, 5, "no_tokens"),
    _case(5, 60, 100, "few", "duplicates", ids="few"),
    _case(90, 2, 9, "few", "duplicates", ids="few"),
    _case(40, 9, 10, "same", "duplicates", ids="same"),
    _case(40, 100, 200, "same", "duplicates", ids="same"),
    _case(60, 30, 60, "random", "duplicates"),
    _case(700, 3, 3, "lists", "long", ids="distinct"),
    _case(100, 400, 30, "skewed", "long", ids="skewed"),
    _case(4200, 3, 2, "windows", "long", ids="distinct"),
    _case(4200, 4, 3, "windows_few", "long", ids="few", lengths=True),
    _case(4500, 2, 1, "windows_same", "long", ids="same"),
    _case(4100, 2, 35, "windows_runs", "long", ids="same"),
    _case(30, 50, 70, "hostile", "masks", ids="hostile"),
    _case(9, 30, 600, "hostile_lengths", "masks", ids="hostile", lengths=True),
    _case(40, 30, 20, "lengths", "masks", lengths=True),
    _case(9, 30, 20, "none", "masks", ids="none"),
    _case(30, 20, 40, "batch3", "batch", batch=3, lengths=True, ids="hostile"),
    _case(3, 40, 20, "batch0", "batch", batch=0),
    _case(1, 40, 20, "batch5", "batch", batch=5, lengths=True),
    _case(9, 700, 600, "padded", "strides", layout="padded"),
    _case(9, 200, 600, "padded_lengths", "strides", layout="padded", lengths=True, batch=2),
    _case(20, 50, 30, "strided", "strides", layout="strided", lengths=True, batch=2),
    _case(20, 50, 30, "singleton", "strides", layout="singleton", lengths=True),
    _case(20, 50, 30, "singleton_batch", "strides", layout="singleton", batch=2),
    _case(1030, 60, 9, "chunks", "long", ids="skewed", lengths=True),  # lists of both kinds, a last chunk of fewer
)


LARGE: tuple[InvertCase, ...] = (
    _case(4096, 8192, 2048, "large", "large", ids="distinct"),
    _case(4096, 8192, 2048, "random", "large", lengths=True),
    _case(4096, 131072, 2048, "hostile", "large", ids="hostile"),
    _case(4096, 8192, 2048, "same", "large", ids="same"),
    _case(4096, 32768, 2048, "skewed", "large", ids="skewed"),
    _case(1 << 20, 100000, 8, "queries", "large"),
    _case(1 << 20, 5, 8, "queries_few", "large", ids="few"),
    _case(3, 3000000, 2048, "tokens", "large"),
)
"""For a GPU alone: real sizes, lists that take a CTA long, more windows and ranges."""
