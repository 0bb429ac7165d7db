"""From checked arguments to a call: the NumPy reference on the CPU, the kernel on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import tensor
from ...arch import Gpu
from ...build import KernelSource
from ...errors import InputError
from ...tensor import View
from ..calls import Calls
from . import cuda, plan, reference, spec

Array = npt.NDArray[Any]

_BIAS_ARRAYS = ("pos_bias_u", "matrix_bd", "rel_bias", "pos_bias_v", "pos_emb", "alibi_slopes")


def sources(gpu: Gpu, **arguments: Any) -> tuple[KernelSource, ...]:
    """The kernels that a call on such a GPU compiles. Raises InputError, UnsupportedError.

    Where the driver has no room for clusters that the plan asks for, the call compiles another kernel.
    """
    _, problem = spec.read(**arguments)
    chosen = plan.plan(problem, gpu.arch, gpu.capability, gpu.multiprocessors).source
    sizes = (problem.num_seqs, problem.num_heads, problem.extent, problem.capacity)
    if problem.bias != "fused" or 0 in sizes:
        return (chosen,)
    code = plan.QUERY_CODE[problem.dtype]
    return chosen, plan.auxiliary("relative_scores", gpu.arch.name, head_size=problem.head_size, query=code)


def _on_cpu(views: spec.Views, problem: spec.Problem) -> Callable[[], Any]:
    query, k_cache, v_cache = map(tensor.to_numpy, (views.query, views.k_cache, views.v_cache))
    tables, lens = tensor.to_numpy(views.block_tables), tensor.to_numpy(views.context_lens)
    bias: dict[str, Any] = {name: to_numpy(getattr(views, name)) for name in _BIAS_ARRAYS}
    outputs = Output(views.out, views.query, query.dtype), Output(views.lse, views.query, np.float32)

    def run() -> Any:
        out, lse = reference.xl_paged_attention(
            query,
            k_cache,
            v_cache,
            tables,
            lens,
            **bias,
            scale=problem.scale,
            rel_extend=problem.rel_extend,
            bias_scaled=problem.bias_scaled,
            kv_layout=problem.kv_layout,
            kv_dtype=problem.kv_dtype,
            k_scale=scale_value(views.k_scale),
            v_scale=scale_value(views.v_scale),
            return_lse=True,
            lse_base=problem.lse_base,
        )
        result = outputs[0].write(out)
        return (result, outputs[1].write(lse)) if problem.return_lse else result

    return run


def to_numpy(seen: View | None) -> Array | None:
    """An optional argument's array."""
    return None if seen is None else tensor.to_numpy(seen)


def scale_value(scale: float | View) -> float | Array:
    """A cache scale as a number or an array."""
    return scale if isinstance(scale, float) else tensor.to_numpy(scale)


class Output:
    """One output of a CPU call: the caller's array, or one that the first run makes and later runs write again.

    Where arrays cannot be written (JAX), every run makes a new one.
    """

    def __init__(self, provided: View | None, like: View, dtype: npt.DTypeLike) -> None:
        self._target = provided
        self._like = like
        self._dtype = dtype

    def write(self, result: Array) -> Any:
        """Store a result, rounded once; returns the array that holds it."""
        with np.errstate(over="ignore"):
            rounded = result.astype(self._dtype)
        if self._target is not None:
            tensor.to_numpy(self._target)[...] = rounded
            return self._target.owner
        made = tensor.from_numpy(rounded, like=self._like)
        with contextlib.suppress(InputError):
            self._target = tensor.view_output(made, "out")
        return made


CALLS = Calls(spec.ARGUMENTS, spec.read, cuda.wanted, cuda.bind, _on_cpu, look=spec.look, memory=cuda.memory)
"""Those of the public function."""
