"""The launch ahead of Hopper's attention that lists each query's tokens in ascending order."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from ... import arch, build
from ...device import Device
from ...launch import Geometry, Launcher
from ..gpu import check_record
from ..mla import record_fields
from . import plan
from .spec import Problem, Views


class OrderParameters(ctypes.Structure):
    """Mirrors `OrderParameters` in cuda/sparse_mla_fwd/sm90/order_params.cuh; sizes are compared."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("indices", "topk_length", "lists", "lengths")),
        *((name, ctypes.c_int64) for name in ("indices_batch", "indices_query")),
        *((name, ctypes.c_int64) for name in ("topk_length_batch", "topk_length_query", "q_start", "k_stride")),
        *((name, ctypes.c_int32) for name in ("s_q", "s_kv", "topk", "causal")),
    )


def smem_bytes(facts: Mapping[str, int], s_kv: int) -> int:
    """Shared memory of a launch, by the launch facts of its kernel: with a bit for each token and what goes with it."""
    groups = 1 << (max(0, s_kv - 1) // (32 * facts["word_group"])).bit_length()
    return facts["smem_bytes"] + groups * facts["word_group"] * facts["word_bytes"]


class Order:
    """The launch, for one problem.

    Attributes:
        launcher: it.
    """

    def __init__(self, problem: Problem, chosen: plan.Plan, workspace: plan.Workspace, device: Device) -> None:
        """Bind. Raises CompileError, DriverError."""
        source = plan.variant(arch.named(chosen.source.arch), stage="order")
        kernel = build.kernel(source, device.index)
        facts = kernel.facts
        check_record(source, facts, OrderParameters)
        fields = record_fields(problem)
        del fields["h_q"]
        self._record = OrderParameters(**fields)
        self._workspace = workspace
        geometry = Geometry((chosen.tokens, 1, 1), facts["threads"], smem_bytes(facts, problem.s_kv))
        self.launcher = Launcher(kernel, geometry, (self._record,))

    def point(self, views: Views, workspace: int) -> tuple[int, int]:
        """Set every address; returns those of the lists and of their lengths."""
        record = self._record
        record.indices = views.indices.ptr
        record.topk_length = None if views.topk_length is None else views.topk_length.ptr
        record.lists = workspace + self._workspace.lists
        record.lengths = workspace + self._workspace.lengths
        return record.lists, record.lengths
