"""Binding attn_dist to its kernel: tensor maps, output, launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ... import build, driver
from ...device import Device
from ...launch import Geometry, Launcher
from ...tensor import View
from ...tensormap import encoded
from ..gpu import Launches, Results, check_record, tiles
from ..head_tiles import head_tiles
from ..kv_rows import KvRows, kv_rows
from . import plan, records
from .records import record
from .spec import OPERATOR, Problem, Views

__all__ = ["Binding", "bind", "record", "wanted"]


class Binding(Launches):
    """A loaded kernel with everything that one problem fixes; `point` adds the addresses, `launch` runs it.

    One thread at a time may use it.

    It launches nothing when there is no query.
    """

    def __init__(self, problem: Problem, device: Device, lse: View, dist: View) -> None:
        multiprocessors = driver.multiprocessor_count(device.index)
        chosen = plan.plan(problem, driver.arch_of(device), multiprocessors)
        kernel = build.kernel(chosen.source, device.index)
        facts = kernel.facts
        check_record(chosen.source, facts, record(chosen.source))
        self._problem = problem
        self._tile_heads, self._tile_queries = facts["tile_heads"], facts.get("tile_queries", 1)
        assigned = plan.assign_work(
            chosen.source,
            facts,
            multiprocessors,
            s_q=problem.s_q,
            topk=problem.topk,
            batch=1 if problem.batch is None else problem.batch,
            normalized=problem.options.normalize is not None,
        )
        # Blackwell's kernel reads KV through a map, Hopper's by address.
        self._rows: KvRows | None = None
        self._parameters: records.Hopper | records.Blackwell
        if record(chosen.source) is records.Hopper:
            self._parameters = records.hopper(problem, assigned, lse, dist)
        else:
            self._rows = kv_rows(problem, OPERATOR)
            self._parameters = records.blackwell(problem, self._rows, chosen.tokens, assigned, lse, dist)
        self._pointers: tuple[int, int] | None = None
        launcher = None
        if chosen.tokens:
            shape = (assigned.ctas, 1, 1), facts["threads"], facts["smem_bytes"], facts["cluster"]
            geometry = Geometry(*shape, clustered=bool(facts.get("clustered")))
            maps = [ctypes.c_byte() for _ in range(1 if self._rows is None else 2)]
            launcher = Launcher(kernel, geometry, (*maps, self._parameters))
        super().__init__(launcher)

    def point(self, views: Views, results: Sequence[int], workspace: int) -> None:
        """Set every address. The views' layouts are those the binding was made for."""
        if self.launcher is None:
            return
        parameters = self._parameters
        if isinstance(parameters, records.Hopper):
            parameters.kv = views.kv.ptr
        parameters.indices = views.indices.ptr
        parameters.topk_length = None if views.topk_length is None else views.topk_length.ptr
        parameters.lse = views.lse.ptr
        (parameters.dist,) = results
        # Without tokens no row is ever asked for, but a map has to have an address.
        pointers = views.q.ptr, views.kv.ptr if self._problem.s_kv else views.q.ptr
        if self._pointers != pointers:
            problem = self._problem
            tile = self._tile_heads, self._tile_queries
            request = head_tiles(problem, pointers[0], problem.q_strides, problem.d_qk, *tile)
            self.launcher.replace(0, tiles(request, "q", OPERATOR))
            if self._rows is not None:
                self.launcher.replace(1, encoded(self._rows.tiles(pointers[1])))
            self._pointers = pointers


def wanted(views: Views, problem: Problem) -> Results:
    """Shape and dtype of the result."""
    return ((problem.entry_shape, "float32"),)


def bind(views: Views, problem: Problem, results: Sequence[View], recorded: bool) -> Binding:
    """The kernel for these layouts; see `cupymla.ops.calls.Calls`.

    Raises UnsupportedError, CompileError, DriverError.
    """
    return Binding(problem, views.q.device, views.lse, results[0])
