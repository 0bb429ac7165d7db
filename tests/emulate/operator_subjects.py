"""Operators' sm_100a kernels as subjects of the mutation survey: problems that make every ring come round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupymla.emulate import Settings, Site
from cupymla.ops.mla_cases import MlaCase, sized
from cupymla.testing import compare
from cupymla.testing.emulated import Emulated, emulated
from cupymla.testing.operators import Array, Subject


@dataclass(frozen=True, slots=True)
class Problem:
    """What a kernel is run on.

    Attributes:
        operator: whose kernel.
        case: sizes and options.
        lengths: topk_length.
        multiprocessors: so few that one cluster takes all queries.
    """

    operator: str
    case: MlaCase
    lengths: tuple[int, ...]
    multiprocessors: int

    def inputs(self) -> dict[str, Any]:
        """Arguments. The statistics are those of whole rows, which mutants do not care about."""
        inputs: dict[str, Any] = Subject(self.operator).cases.inputs(self.case, 0)
        return inputs | {"topk_length": np.array(self.lengths, np.int32)}


def _dist(heads: int, slots: int, lengths: tuple[int, ...], multiprocessors: int) -> Problem:
    case = sized(heads, 512, slots, len(lengths), 400, "", "masks", normalize="l1")
    return Problem("attn_dist", case, lengths, multiprocessors)


def _backward(heads: int, slots: int, length: int) -> Problem:
    """One query, whose slots name different tokens: sums of dkv then have the same bits in any order."""
    case = sized(heads, 576, slots, 1, 2 * slots, "", "masks", selection="full", dkv_dtype="float32")
    return Problem("sparse_mla_bwd", case, (length,), 2)


PROBLEMS = {
    "attn_dist-h64": _dist(64, 150, (150, 3, 150, 1, 141, 5), 1),
    "attn_dist-h128": _dist(128, 300, (300, 3, 300, 1, 291, 5), 2),
    "sparse_mla_bwd-h64": _backward(64, 650, 641),  # six blocks
    "sparse_mla_bwd-h128": _backward(128, 350, 341),  # six blocks
}


def subject(problem: Problem) -> tuple[Callable[[Settings], float], tuple[Site, ...]]:
    """What runs a kernel, and its sites. The first run has to keep the comparison law, others to repeat its bits."""
    operator, inputs = Subject(problem.operator), problem.inputs()

    def results(settings: Settings) -> tuple[tuple[Array, ...], Emulated]:
        with emulated("sm_100a", problem.multiprocessors, settings) as machine:
            return machine.run(operator, inputs), machine

    first, machine = results(Settings(patience_seconds=20.0))
    exact, same = operator.reference(inputs, "float64"), operator.reference(inputs, "same")
    for name, got, like, right in zip(operator.outputs, first, same, exact, strict=False):
        compare.require([compare.compare(name, got, like.astype(got.dtype), right)])

    def run(settings: Settings) -> float:
        found, _ = results(settings)
        return float(not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(found, first, strict=True)))

    return run, machine.sites
