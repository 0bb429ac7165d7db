"""Inputs for nvfp4_gemv with E8M0 scales over their whole range, for the engine and for a GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupymla.ops.nvfp4_gemv import formats

ONE = 127
BLOCK = 32
EDGES = (0, 1, 5, 9, 126, 127, 131, 132, 133, 134, 200, 253, 254)
"""Around the ends and around the largest scale that one factor holds."""


def pairs_of(rng: np.random.Generator, rows: int, k: int) -> npt.NDArray[np.uint8]:
    """Any codes."""
    return rng.integers(0, 256, (rows, k // 2), dtype=np.uint8)


def every_code_and_scale(n: int, b_dtype: str) -> tuple[dict[str, Any], npt.NDArray[Any]]:
    """Row s has every E2M1 code under scale code s, in one block; column j picks code j. Also what comes of it."""
    codes = np.tile(np.arange(BLOCK, dtype=np.uint8) % 16, (256, 1))
    chosen = np.eye(BLOCK, dtype=np.uint8)[:n]
    host: dict[str, Any] = {
        "a": formats.pack_pairs(codes), "sfa": np.arange(256, dtype=np.uint8)[:, np.newaxis], "format": "mxfp4",
        "out_dtype": "float32",
    }  # fmt: skip
    if b_dtype == "e2m1":
        host |= {"b": formats.pack_pairs(chosen * 2), "sfb": np.full((n, 1), ONE, np.uint8)}
    else:
        host["b"] = chosen.astype(ml_dtypes.bfloat16 if b_dtype == "bfloat16" else np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = (formats.MXFP4.decode_scales(host["sfa"]) * formats.E2M1[codes[:, :n]]).astype(np.float32)
    return host, expected


def neighbours_far_apart(n: int, b_dtype: str) -> dict[str, Any]:
    """Each block's scales of a are as large as b's are small, and the next block's are others altogether."""
    rng = np.random.default_rng(20 + n)
    m, blocks = 70, 21
    middle = rng.choice(EDGES, blocks)

    def near(rows: int, code: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.asarray(np.clip(code + rng.integers(-2, 3, (rows, blocks)), 0, 254))

    host: dict[str, Any] = {
        "a": pairs_of(rng, m, blocks * BLOCK), "sfa": near(m, middle).astype(np.uint8), "format": "mxfp4",
        "out_dtype": "float32",
    }  # fmt: skip
    if b_dtype == "e2m1":
        host |= {"b": pairs_of(rng, n, blocks * BLOCK), "sfb": near(n, 254 - middle).astype(np.uint8)}
    else:
        exponents = np.clip(near(n, 254 - middle), 8, 246) - ONE
        values = rng.standard_normal((n, blocks, BLOCK)) * 2.0 ** exponents[:, :, np.newaxis]
        host["b"] = values.reshape(n, -1).astype(ml_dtypes.bfloat16)
    return host


def blocks_past_float32(fmt: str, n: int) -> dict[str, Any]:
    """Weight-only, vectors near bfloat16's largest number: blocks sum past float32 until they are scaled."""
    rng = np.random.default_rng(n)
    signs, magnitudes = rng.choice([1, -1], (n, 128)), rng.uniform(1.5e38, 3.3e38, (n, 128))
    block, scale = (16, 1) if fmt == "nvfp4" else (32, 40)
    return {
        "a": rng.integers(0, 256, (20, 64), dtype=np.uint8),
        "b": (signs * magnitudes).astype(ml_dtypes.bfloat16),
        "sfa": np.full((20, 128 // block), scale, np.uint8),
        "format": fmt,
        "out_dtype": "float32",
    }
