"""The kernels that there are of the backward, by the words of their variants. Pure: no array, no driver."""

from __future__ import annotations

from ...arch import Arch
from ...build.source import KernelSource
from ...errors import InputError, shown
from ..mla import D_QK, DTYPES
from ..variants import BOTH, FLAGS, require_choice, require_target
from . import units
from .launches import STAGES, Stage
from .paths import ARCHS, PATHS, two_phase
from .paths.blackwell import Blackwell
from .paths.cluster import Cluster
from .paths.fixed_order import Rows
from .paths.packed_queries import GROUP_HEADS, PackedQueries
from .paths.path import BLOCK_HEADS, DKV_DTYPES, Path
from .paths.single import Single
from .spec import OPERATOR


def variant(
    arch: Arch,
    *,
    stage: str = "attention",
    d_qk: int = 576,
    dtype: str = "bfloat16",
    block_heads: int = 128,
    partials: bool = False,
    packed: bool = False,
    queries: int = 1,
) -> KernelSource:
    """One kernel. What its translation unit does not take (`units`) makes no variant of it.

    Args:
        arch: the target.
        stage: one of `STAGES`.
        d_qk: 576 or 512.
        dtype: "bfloat16" or "float16": of the arrays; dkv's in the stage `round`, which on sm_90a may be
            "float32", too.
        block_heads: heads of one head block, 64 or 128 (more are taken in several head blocks); for the
            attention stage.
        partials: whether every entry's row is stored on its own instead of added up; for the stages `attention` and,
            with `packed`, `dq_dkv`.
        packed: whether these rows have 16 bits a column; with `partials`, on sm_90a with 128 heads a head block, for
            the stages `attention`, `dq_dkv` and `sum`.
        queries: neighbouring ones that are packed: 1, or on sm_90a 4 of up to 16 heads or 2 of up to 32,
            whatever `block_heads` is; without `partials`.

    Raises InputError, and UnsupportedError when the target has no kernel.
    """
    require_target(OPERATOR, arch, ARCHS, BOTH)
    choices = {"stage": (stage, STAGES), "d_qk": (d_qk, D_QK), "block_heads": (block_heads, BLOCK_HEADS)}
    require_choice(OPERATOR, **choices, partials=(partials, FLAGS), packed=(packed, FLAGS))
    counts = (1, *GROUP_HEADS) if arch.name == PackedQueries.arch_name else (1,)
    require_choice(OPERATOR, f" on {arch.name}", queries=(queries, counts))
    path = _path(arch, block_heads, "packed" if packed else "float32" if partials else "added", queries)
    if packed and not (isinstance(path, Cluster) and partials):
        expected = "False but with partials=True and block_heads=128 on sm_90a"
        raise InputError("packed", expected, shown(packed), OPERATOR)
    require_choice(OPERATOR, dtype=(dtype, _dtypes(stage, path)))
    stages = _stages(arch) if queries == 1 else tuple(units.PACKED)
    if queries > 1 and partials:
        raise InputError("partials", f"False with queries={queries}", shown(partials), OPERATOR)
    if stage not in stages:
        where = f" on {arch.name}" if queries == 1 else ""
        expected = "one of " + ", ".join(stages) + f" with queries={queries}{where}"
        raise InputError("stage", expected, shown(stage), OPERATOR)
    if stage in two_phase.STAGES and partials and not packed:
        raise InputError("partials", f"False, or packed as well, with stage={stage!r}", shown(partials), OPERATOR)
    return path.source(stage, d_qk, dtype)


def _path(arch: Arch, block_heads: int, rows: Rows, queries: int) -> Path:
    """One that has the kernels of these words, if any has."""
    if queries > 1:
        return PackedQueries(rows, queries=queries, block_heads=GROUP_HEADS[queries])
    if arch.name == Blackwell.arch_name:
        return Blackwell(rows, block_heads=block_heads)
    return Single(rows) if block_heads == BLOCK_HEADS[0] else Cluster(rows)


def _stages(arch: Arch) -> tuple[Stage, ...]:
    """Stages of queries that take their rows by themselves."""
    paths = (path for kind in PATHS if kind.arch_name == arch.name for path in kind.every())
    launched = {stage for path in paths if path.queries == 1 for stage in path.stages}
    return tuple(stage for stage in STAGES if stage in launched)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """Every kernel that a path launches, of one target or of all."""
    found = (
        path.source(stage, d_qk, dtype)
        for kind in PATHS
        if arch_name in (None, kind.arch_name)
        for path in kind.every()
        for stage in path.stages
        for d_qk in D_QK
        for dtype in _dtypes(stage, path)
    )
    return tuple(dict.fromkeys(found))


def _dtypes(stage: str, path: Path) -> tuple[str, ...]:
    """What a stage may be compiled for: every dkv is made from sums of their own on sm_90a, those in float32, too."""
    return DKV_DTYPES if path.sums_in_runs and stage == "round" else DTYPES
