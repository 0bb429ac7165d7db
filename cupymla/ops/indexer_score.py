"""The one order of an index score's operations, in NumPy, as in cuda/common/indexer_score.cuh.

    z_h   = q_h . k
    w_h   = weight_h * q_scale_h, one rounding
    sum_c = fma(w_h, max(z_h, 0), ...) over the heads h = 2c, 2c + 1, 8 + 2c, 8 + 2c + 1, ..., from +0, c = 0..3
    score = ((sum_0 + sum_1) + (sum_2 + sum_3)) * k_scale

Kernels have these bits wherever the tensor cores' own sums z_h are what fp32 rounding of the exact sums gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

COLUMN_GROUP = 8
"""Heads that a product's four lanes have two each of."""


def fma32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32 numbers, rounded once to float32.

    The product is exact in float64. Where the sum is not, it is rounded to odd there, and rounding that to float32 is
    rounding once. Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using
    rounding to odd", IEEE Transactions on Computers 57 (2008).
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = np.broadcast_to(c.astype(np.float64), product.shape)
    total = product + addend
    with np.errstate(invalid="ignore", over="ignore"):
        # Knuth's error of a sum.
        part = total - product
        error = (product - (total - part)) + (addend - part)
        bits = total.view(np.int64)
        away = np.where((error > 0) == (total > 0), 1, -1)
        inexact = np.isfinite(total) & np.isfinite(error) & (error != 0) & (bits & 1 == 0)
        odd: Array = np.where(inexact, bits + away, bits).view(np.float64)
        return odd.astype(np.float32)


def scores(products: Array, weights: Array, k_scale: Array | None, relu: bool) -> Array:
    """Scores [..., T, L] in float32.

    Args:
        products: z [..., T, H, L] float32.
        weights: w [..., T, H] float32.
        k_scale: [..., L] float32, or None for ones.
        relu: whether products below zero count as zero; a NaN passes.
    """
    heads = products.shape[-2]
    fill = -heads % COLUMN_GROUP
    if fill:
        products = np.concatenate([products, np.zeros_like(products[..., :1, :]).repeat(fill, axis=-2)], axis=-2)
        weights = np.concatenate([weights, np.zeros_like(weights[..., :1]).repeat(fill, axis=-1)], axis=-1)
    if relu:
        products = np.maximum(products, np.float32(0))
    with np.errstate(invalid="ignore", over="ignore"):
        sums = []
        for quad in range(4):
            total = np.zeros((*products.shape[:-2], products.shape[-1]), np.float32)
            for first in range(0, products.shape[-2], COLUMN_GROUP):
                for head in (first + 2 * quad, first + 2 * quad + 1):
                    total = fma32(weights[..., head, None], products[..., head, :], total)
            sums.append(total)
        score: Array = (sums[0] + sums[1]) + (sums[2] + sums[3])
        return score if k_scale is None else score * k_scale[..., None, :]
