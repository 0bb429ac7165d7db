"""sparse_mla_bwd's calls: the NumPy reference on the CPU, the kernel on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import tensor
from ...arch import Gpu
from ...build import KernelSource
from ...errors import InputError
from ..calls import Calls
from ..entry_lists import lists_by_token
from ..mla import by_reference
from ..mla_reference import batched
from . import cuda, plan, reference
from .spec import ARGUMENTS, OPERATOR, VALIDATION, Problem, Views, read


def look(views: Views, problem: Problem, stream: object) -> None:
    """Look at the values of indices, and of lists whether they are theirs. Raises InputError; waits for the stream."""
    VALIDATION.look(views, problem, stream)
    if views.lists is None:
        return
    shared = problem.shared
    indices = tensor.fetched(views.indices, stream).reshape(
        1 if shared.batch is None else shared.batch, shared.s_q, shared.topk
    )
    lengths = None if views.topk_length is None else batched(tensor.fetched(views.topk_length, stream), 2)
    expected = lists_by_token(indices, shared.s_kv, lengths)
    for place in np.argwhere(batched(tensor.fetched(views.lists, stream), 2) != expected)[:1]:
        got = f"another number at {place.tolist()}"
        raise InputError("lists", "what invert_indices returns for these indices", got, operator=OPERATOR)


CALLS = Calls(
    ARGUMENTS,
    read,
    cuda.wanted,
    cuda.bind,
    by_reference(ARGUMENTS, reference.sparse_mla_bwd, cuda.wanted),
    look=look,
    size=cuda.workspace_bytes,
)
"""Those of the public function."""


def sources(gpu: Gpu, **arguments: Any) -> tuple[KernelSource, ...]:
    """The kernels that a call on such a GPU compiles. Raises InputError, UnsupportedError."""
    _, problem = read(**arguments)
    chosen = plan.plan(problem, gpu.arch, gpu.multiprocessors)
    return tuple(dict.fromkeys(chosen.source(launch.stage) for launch in chosen.launches()))
