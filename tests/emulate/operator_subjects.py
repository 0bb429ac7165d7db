"""Operators' sm_100f kernels as subjects of the mutation survey: problems that make every ring come round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupymla.ops.mla_cases import MlaCase, sized
from cupymla.testing import compare
from cupymla.testing.operators import Array
from cupymla_lab.emulate import Settings, Site
from cupymla_lab.emulated import Emulated, emulated
from cupymla_lab.subjects import Subject


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


def _dist(heads: int, entries: int, lengths: tuple[int, ...], multiprocessors: int) -> Problem:
    case = sized(heads, 512, entries, len(lengths), 400, "", "masks", normalize="l1")
    return Problem("attn_dist", case, lengths, multiprocessors)


def _forward(heads: int, lengths: tuple[int, ...]) -> Problem:
    case = sized(heads, 512, max(lengths), len(lengths), 400, "", "masks", selection="full")
    return Problem("sparse_mla_fwd", case, lengths, 2 if heads > 64 else 1)


def _forward_blocks(heads: int, lengths: tuple[int, ...]) -> Problem:
    """All heads of a pair, or of a CTA by itself, and scores so far apart that blocks move the base, and with it the
    output, many times."""
    case = sized(heads, 576, max(lengths), len(lengths), 600, "", "masks", selection="full", sm_scale=0.25)
    return Problem("sparse_mla_fwd", case, lengths, 2 if heads > 64 else 1)


def _backward(heads: int, entries: int, length: int) -> Problem:
    """One query, whose entries name different tokens: sums of dkv then have the same bits in any order."""
    case = sized(heads, 576, entries, 1, 2 * entries, "", "masks", selection="full", dkv_dtype="float32")
    return Problem("sparse_mla_bwd", case, (length,), 2)


def _phase1(heads: int) -> Problem:
    """Eight queries, of which the one pair of CTAs takes the first four together: three of four blocks, one of none."""
    lengths = (500, 390, 0, 500, 3, 130, 1, 500)
    case = sized(heads, 512, 500, len(lengths), 600, "", "masks", selection="full")
    return Problem("sparse_mla_bwd_phase1", case, lengths, 2)


PROBLEMS = {
    # Behind the last four, the producers wait for the end of the passes, for which the planner waits for the epilogue.
    "attn_dist-h64": _dist(64, 150, (150, 3, 150, 1, 141, 5, 0, 0, 0, 3), 1),
    "attn_dist-h128": _dist(128, 300, (300, 3, 300, 1, 291, 5, 0, 0, 0, 3), 2),
    # Lengths are handed on in four batches.
    "sparse_mla_fwd-h64": _forward(5, (70, *[0] * 14, 1, 66, *[0] * 14, 2, *[0] * 9, 3, *[0] * 9)),
    "sparse_mla_fwd-h128": _forward(69, (150, *[0] * 14, 1, 130, *[0] * 14, 2, *[0] * 9, 3, *[0] * 9)),
    # Nine times Q and 22 blocks through five or ten stages: queries of up to four blocks, three of one behind each
    # other, whose successor's Q finds free stages, and one of none.
    "sparse_mla_fwd-h64-blocks": _forward_blocks(64, (66, 250, 195, 66, 0, 250, 3, 60, 32, 130)),
    "sparse_mla_fwd-h128-blocks": _forward_blocks(128, (130, 500, 390, 130, 0, 500, 3, 120, 64, 260)),
    "sparse_mla_bwd-h64": _backward(64, 650, 641),  # six blocks
    "sparse_mla_bwd-h128": _backward(128, 350, 341),  # six blocks
    "sparse_mla_bwd_phase1-h128": _phase1(128),
}

for _name in ("sparse_mla_bwd-h64", "sparse_mla_bwd-h128"):
    # The same with the distribution, which named barriers are there for.
    _plain = PROBLEMS[_name]
    PROBLEMS[f"{_name}-dist"] = replace(_plain, case=replace(_plain.case, wants_dist=True))


def subject(problem: Problem) -> tuple[Callable[[Settings], float], tuple[Site, ...]]:
    """What runs a kernel, and its sites. The first run has to meet the accuracy criterion, others to repeat its
    bits."""
    operator, inputs = Subject(problem.operator), problem.inputs()

    def results(settings: Settings) -> tuple[dict[str, Array], Emulated]:
        with emulated("sm_100f", problem.multiprocessors, settings) as machine:
            return machine.results(operator, inputs), machine

    first, machine = results(Settings(patience_seconds=20.0))
    compare.require(operator.reports(inputs, first))

    def run(settings: Settings) -> float:
        found, _ = results(settings)
        return float(not all(np.array_equal(found[name], first[name], equal_nan=True) for name in first))

    return run, machine.sites
