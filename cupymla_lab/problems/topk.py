"""Correctness cases of topk; see `cupymla.ops.case`."""

from __future__ import annotations

from cupymla.ops.topk.cases import TopkCase, _case

CASES: tuple[TopkCase, ...] = (
    _case(3, 1, 1),
    _case(2, 300, 7),
    _case(2, 70, 70, return_values=True),
    _case(1, 100, 257, "short", return_values=True),
    _case(2, 100, 257, "short", order="score", return_values=True),
    _case(0, 100, 5, "no_rows"),
    _case(3, 0, 5, "no_columns"),
    _case(3, 5000, 64),
    _case(2, 9000, 2047, order="score"),
    _case(2, 5000, 1),
    _case(2, 9000, 4096, return_values=True),
    _case(1, 9000, 5000, "past_streamed"),
    *(_case(2, columns, 2048, return_values=True) for columns in (8192, 8193, 32768)),
    _case(2, 32769, 1000, return_values=True),
    _case(1, 49999, 700, return_values=True),
    _case(1, 33000, 300, order="score", return_values=True),
    _case(9, 8192, 50, "windows", "masks", limits="windows", padding=1, return_values=True),
    _case(5, 9001, 300, "windows", "masks", limits="windows", padding=3, dtype="bfloat16", return_values=True),
    _case(1, 9000, 9000, "sorted_in_pieces", order="score", return_values=True),
    _case(2, 200, 20, "batch", "batch", batch=2, limits="windows", padding=3, return_values=True),
    _case(7, 6001, 100, "batch", "batch", batch=2, limits="windows", padding=3, return_values=True),
    _case(5, 300, 50, "windows", "masks", limits="windows"),
    _case(9, 6000, 50, "windows", "masks", limits="windows"),
    _case(9, 5000, 50, "windows", "masks", limits="windows", order="score", dtype="float16"),
    _case(2, 300, 20, "padded", "strides", padding=1, return_values=True),
    _case(3, 6000, 100, "padded", "strides", padding=1, dtype="bfloat16", return_values=True),
    *(
        _case(1, 5000, 512, kind, "values", scores=kind, order=order, return_values=True)
        for kind in ("plateau", "equal", "close", "close_large", "bucket", "nan", "few_numbers", "nothing")
        for order in ("index", "score")
    ),
    *(_case(1, 5000, 512, kind, "values", scores=kind) for kind in ("ascending", "descending", "periodic", "outliers")),
    *(_case(1, 9000, 512, kind, "values", scores=kind) for kind in ("plateau", "equal", "nan", "outliers", "periodic")),
    _case(1, 9000, 256, "negative_plateau", "values", scores="negative_plateau"),
    _case(67, 9000, 256, "two_values", "values", scores="two_values"),
    _case(3, 4096, 2048, "geometric", "values", scores="geometric", return_values=True),
    *(_case(1, 300, 30, dtype=dtype, intent="dtypes", return_values=True) for dtype in ("bfloat16", "float16")),
    *(_case(2, 6000, 300, "plateau", "dtypes", dtype=dtype, scores="plateau") for dtype in ("bfloat16", "float16")),
)


LARGE: tuple[TopkCase, ...] = (
    _case(3, 131072, 2048, "cluster", "large", return_values=True),
    _case(2, 131072, 2048, "cluster_plateau", "large", scores="plateau"),
    _case(32, 131072, 2048, "clusters_of_three", "large", return_values=True),
    _case(60, 98304, 2048, "clusters_of_two", "large", scores="nan", return_values=True),
    _case(100, 49152, 2048, "kept_by_one", "large", scores="bucket", return_values=True),
    _case(140, 40000, 2048, "cta_a_row", "large"),
    _case(100, 49152, 1024, "negative_plateau", "large", scores="negative_plateau", return_values=True),
    _case(16, 262144, 2048, "clusters_of_four", "large"),
    _case(40, 200001, 2048, "streamed_by_two", "large", order="score", return_values=True),
    *(_case(3, 500000, 2048, kind, "large", scores=kind, return_values=True) for kind in ("ascending", "descending")),
    *(_case(140, 60000, 2048, kind, "large", scores=kind) for kind in ("ascending", "descending")),
    _case(70000, 130, 20, "many_rows", "large"),
    _case(1000, 8192, 2048, "short_nan", "large", scores="nan", return_values=True),
    _case(1000, 32768, 2048, "short_close", "large", scores="close", return_values=True),
    _case(1000, 4096, 2048, "short_plateau", "large", scores="plateau", return_values=True),
    _case(1, 1100003, 2048, "past_bitmap", "large", return_values=True),
    _case(2, 70001, 4096, "large_k", "large", order="score"),
)
"""For a GPU alone: rows of clusters, more rows than grid.y could have, rows that no bitmap covers."""
