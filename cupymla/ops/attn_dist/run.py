"""From checked arguments to a prepared call: the NumPy reference on the CPU."""

from __future__ import annotations

from typing import Any

from ... import tensor
from ..mla import CpuOutput
from ..mla_reference import stored
from ..operator import CpuCall, Prepared
from . import reference
from .plan import plan
from .spec import Problem, Views

Result = Any


def prepare(views: Views, problem: Problem, stream: object) -> Prepared[Result]:
    """Bind a call to its arrays. `stream` as the public function takes it; it means nothing on the CPU."""
    if views.q.device.kind == "cpu":
        return _on_cpu(views, problem)
    plan(problem, views.q.device)


def _on_cpu(views: Views, problem: Problem) -> CpuCall[Result]:
    dist = CpuOutput("dist", views.dist, views.q)
    shared = problem.shared

    def run() -> Result:
        array = tensor.to_numpy
        value = reference.attn_dist(
            array(views.q),
            array(views.kv),
            array(views.indices),
            array(views.lse),
            sm_scale=shared.sm_scale,
            topk_length=None if views.topk_length is None else array(views.topk_length),
            causal=shared.causal,
            q_start=shared.q_start,
            k_stride=shared.k_stride,
            lse_base=shared.lse_base,
            normalize=problem.normalize,
        )
        return dist.write(stored(value, "float32"))

    return CpuCall(run)
