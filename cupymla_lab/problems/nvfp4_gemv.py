"""Correctness cases of nvfp4_gemv; see `cupymla.ops.case`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cupymla.ops.nvfp4_gemv.cases import GemvCase, make

# What operands there are -------------------------------------------------------------------------------------------

_OPERANDS: tuple[dict[str, Any], ...] = tuple(
    {"format": fmt, "b_dtype": b_dtype} for fmt in ("nvfp4", "mxfp4") for b_dtype in ("e2m1", "bfloat16", "float16")
)


def _shapes() -> Iterator[GemvCase]:
    for m, n, k, batches in (
        (128, 1, 256, 1), (1, 1, 2, 1), (3, 2, 18, 2), (129, 16, 514, 3), (257, 5, 1040, 1), (70, 1, 1088, 2),
    ):  # fmt: skip
        for operands in _OPERANDS:
            yield make("shapes", m=m, n=n, k=k, batches=batches, **operands)
    for n in (3, 4, 7, 8, 9, 15):
        yield make("shapes", m=65, n=n, k=224)
    yield make("shapes", m=5, n=2, k=0)
    yield make("shapes", m=0, n=2, k=64)
    yield make("shapes", m=4, n=2, k=64, batches=0)
    for operands in _OPERANDS:
        yield make("shapes", "long", m=4, n=1, k=65_568, **operands)
        yield make("shapes", "phases", m=20, n=16, k=9_248, **operands)
    yield make("shapes", "passes", m=40_000, n=1, k=64)
    yield make("shapes", "unbatched", m=33, n=2, k=96, batch="none")


def _dtypes() -> Iterator[GemvCase]:
    for operands in _OPERANDS:
        for out_dtype in ("bfloat16", "float32"):
            yield make("dtypes", out_dtype, m=130, n=3, k=160, batches=2, out_dtype=out_dtype, **operands)
        for n in (1, 2):
            yield make("dtypes", "full", m=200, n=n, k=512, out_dtype="float32", data="full", **operands)


def _poison() -> Iterator[GemvCase]:
    for operands in _OPERANDS:
        for layout in ("linear", "128x4"):
            for n in (1, 3):
                yield make("poison", f"nan_{layout}", m=140, n=n, k=176, data="nan", scale_layout=layout, **operands)
        yield make("poison", "overflow", m=70, n=2, k=512, data="overflow", **operands)
    yield make("poison", "zero", m=70, n=2, k=512, data="zero", out_dtype="float32")


def _strides() -> Iterator[GemvCase]:
    for operands in _OPERANDS:
        for batch in ("none", "last", "first"):
            sizes = {"m": 131, "n": 2, "k": 208, "batches": 1 if batch == "none" else 3}
            for layout in ("linear", "128x4"):
                tag = f"{batch}_{layout}"
                yield make("strides", tag, **sizes, batch=batch, scale_layout=layout, strided=True, **operands)
    yield make("strides", "competition", m=256, n=1, k=512, batches=4, b_rows=128)


def _options() -> Iterator[GemvCase]:
    for alpha in ("number", "scalar", "rows", "batch"):
        for bias in ("none", "rows", "batch"):
            for out_dtype in ("float16", "bfloat16", "float32"):
                tag = f"alpha_{alpha}_bias_{bias}_{out_dtype}"
                sizes = {"m": 66, "n": 3, "k": 96, "batches": 2}
                yield make("options", tag, **sizes, alpha=alpha, bias=bias, out_dtype=out_dtype)
    for m, k, n in ((1, 16, 1), (127, 80, 2), (128, 64, 3), (300, 176, 16), (140, 1104, 1), (45, 1104, 9)):
        for operands in _OPERANDS:
            yield make("options", "128x4", m=m, k=k, n=n, batches=2, scale_layout="128x4", **operands)


def _tensor() -> Iterator[GemvCase]:
    """What TMA can read, so that a tensor core kernel gets it: 128x4 scales, rows at multiples of 16 bytes."""
    for fmt in ("nvfp4", "mxfp4"):
        common: dict[str, Any] = {"format": fmt, "scale_layout": "128x4"}
        for m, n, k, batches in (
            (128, 1, 256, 1),
            (1, 1, 32, 1),
            (300, 3, 160, 2),
            (129, 16, 1056, 2),
            (70, 9, 3104, 1),
            (140, 1, 3104, 1),
        ):
            yield make("tensor", "tma", m=m, n=n, k=k, batches=batches, **common)
        for n in (1, 8, 16):
            yield make("tensor", "tma_full", m=140, n=n, k=800, out_dtype="float32", data="full", **common)
        for data in ("nan", "overflow", "zero"):
            yield make("tensor", f"tma_{data}", m=140, n=2, k=416, data=data, **common)
        for k, batch in ((18, "none"), (1042, "last"), (334, "first")):
            batches = 1 if batch == "none" else 3
            yield make("tensor", f"tma_{batch}", m=131, n=2, k=k, batches=batches, batch=batch, padded=True, **common)
        for alpha, bias, out_dtype in (
            ("number", "none", "bfloat16"), ("scalar", "rows", "float16"), ("rows", "batch", "float32"),
            ("batch", "none", "float16"), ("none", "rows", "bfloat16"),
        ):  # fmt: skip
            options = {"alpha": alpha, "bias": bias, "out_dtype": out_dtype, **common}
            yield make("tensor", f"tma_{alpha}_{bias}", m=66, n=3, k=288, batches=2, **options)
        yield make("tensor", "tma_competition", m=256, n=1, k=512, batches=4, b_rows=128, **common)


def _whole() -> Iterator[GemvCase]:
    """k without a tail and rows at multiples of 16 bytes: what variants of their own serve on some targets."""
    for operands in _OPERANDS:
        yield make("whole", m=300, n=1, k=1280, batches=2, **operands)
        yield make("whole", "128x4", m=140, n=1, k=768, scale_layout="128x4", data="nan", **operands)
        yield make("whole", "rows", m=135, n=3, k=768, batches=2, data="nan", **operands)
        yield make("whole", "128x4", m=45, n=9, k=1280, scale_layout="128x4", **operands)
        yield make("whole", "phases", m=20, n=16, k=9216, **operands)
        yield make("whole", "long", m=4, n=1, k=65_536, **operands)
        yield make("whole", "padded", m=131, n=2, k=512, batches=3, batch="first", padded=True, **operands)
        for n in (1, 5):
            yield make("whole", "words", m=141, n=n, k=1280, batches=2, words=True, **operands)
    yield make("whole", m=5, n=1, k=0)
    out_dtypes = ("float16", "bfloat16", "float32")
    for i, alpha in enumerate(("number", "scalar", "rows", "batch")):
        for j, bias in enumerate(("none", "rows", "batch")):
            tag, out_dtype = f"whole_alpha_{alpha}_bias_{bias}", out_dtypes[(i + j) % 3]
            yield make("whole", tag, m=66, n=1, k=256, batches=2, alpha=alpha, bias=bias, out_dtype=out_dtype)


CASES: tuple[GemvCase, ...] = (
    *_shapes(), *_dtypes(), *_poison(), *_strides(), *_options(), *_tensor(), *_whole(),
)  # fmt: skip
