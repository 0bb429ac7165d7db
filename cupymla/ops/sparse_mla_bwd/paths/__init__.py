"""The paths that a backward problem may take, a file each; which one is taken is said here and nowhere else.

The first of `PATHS` that can compute a problem and whose rule says that it pays is the problem's. Each file says when
that is, and why:

| file | path |
| --- | --- |
| `packed_queries` | one CTA for two or four queries of few heads |
| `two_phase` | P and dS of 65 to 128 heads first, then dQ and dKV |
| `cluster` | a 2-CTA cluster for each query of more than 64 heads |
| `single` | one CTA for each query of up to 64 heads |
| `blackwell` | a 2-CTA cluster for each query, on Blackwell |

Two files say what a path may do besides: `fixed_order` stores rows for deterministic sums, `token_order` sorts them for
L2. `docs/benchmarks/*/sparse_mla_bwd.paths.json` has every path's time, and `tests/ops/test_sparse_mla_bwd_paths.py`
compares. Pure: no array, no driver.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....arch import Arch
from ..spec import Problem
from .blackwell import Blackwell
from .cluster import Cluster
from .packed_queries import PackedQueries
from .path import Path
from .single import Single
from .two_phase import TwoPhase

PATHS: tuple[type[Path], ...] = (PackedQueries, TwoPhase, Cluster, Single, Blackwell)
"""In the order in which they are asked."""

ARCHS = tuple(dict.fromkeys(kind.arch_name for kind in PATHS))
"""Targets that have kernels."""


def ways(problem: Problem, arch: Arch) -> Iterator[Path]:
    """Every path that can compute a problem on a target, in the order in which they are asked."""
    return (path for kind in PATHS if kind.arch_name == arch.name for path in kind.ways(problem))


def choose(problem: Problem, arch: Arch, multiprocessors: int) -> Path:
    """The path of a problem, on a target that has kernels and with that many multiprocessors."""
    return next(path for path in ways(problem, arch) if path.pays(problem, multiprocessors))


def workspace_limit(problem: Problem) -> int:
    """Bytes of workspace that are enough on every GPU, for a caller who does not know on which one a call will run."""
    every = (path for kind in PATHS for path in kind.ways(problem))
    return max(path.workspace_limit(problem) for path in every if path.pays_somewhere(problem))
