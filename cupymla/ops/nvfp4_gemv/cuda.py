"""Binding nvfp4_gemv to its kernel: parameter record, outputs, launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ... import build, driver
from ...arch import Arch
from ...launch import Geometry, Launcher
from ...tensor import View
from ..gpu import Launches, Results, check_record
from . import plan
from .spec import OUT_DTYPES, Problem, Views
from .tiles import TileBinding, fits, row_and_batch
from .validation import Operand

_BY_BYTES, _BY_ROWS, _BY_WORDS = 0, 1, 2

_WHOLE = {_BY_BYTES: "no", _BY_ROWS: "rows", _BY_WORDS: "words"}


class Parameters(ctypes.Structure):
    """Mirrors `Parameters` in cuda/nvfp4_gemv/sm80/params.cuh; its size is compared with the kernel's own."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "sfa", "b", "sfb", "alpha", "bias", "c")),
        *((name, ctypes.c_int64) for name in ("a_batch_bytes", "a_row_bytes")),
        *((name, ctypes.c_int64) for name in ("sfa_batch_bytes", "sfa_row_bytes")),
        *((name, ctypes.c_int64) for name in ("b_batch_bytes", "b_row_bytes")),
        *((name, ctypes.c_int64) for name in ("sfb_batch_bytes", "sfb_row_bytes")),
        *((name, ctypes.c_int64) for name in ("alpha_batch", "alpha_row")),
        *((name, ctypes.c_int64) for name in ("bias_batch", "bias_row")),
        *((name, ctypes.c_int64) for name in ("c_batch", "c_row", "c_column")),
        *((name, ctypes.c_int64) for name in ("part_rows", "k")),
        *((name, ctypes.c_uint32) for name in ("n", "parts", "long_parts", "items", "phase_chunks")),
        ("alpha_value", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("out_type", "swizzled", "a_aligned", "b_aligned", "sfa_access")),
    )


class Steps:
    """In what steps addresses of a call's arrays lie, which decides how its kernel may copy them.

    Attributes:
        a, b: the bits of the strides between rows and batches, in bytes.
        whole: the name in `plan.WHOLE` of the variant that runs where everything begins at multiples of 16 bytes.
    """

    def __init__(self, views: Views, problem: Problem, arch: Arch, multiprocessors: int) -> None:
        self.a = _steps(views.a, 1)
        self.b = _steps(views.b, 2 if problem.weight_only else 1)
        self._swizzled = problem.scale_layout != "linear"
        self._sfa = _batch_steps(views.sfa) if self._swizzled else _steps(views.sfa, 1)
        self._row_scales = plan.CHUNK // problem.format.block
        self.whole = "no"
        if plan.may_be_whole(problem, arch, multiprocessors) and (self.a | self.b) % 16 == 0:
            self.whole = _WHOLE[self.sfa_access(0)]

    def sfa_access(self, address: int) -> int:
        """In what pieces scales of a may be copied that begin at an address."""
        places = address | self._sfa
        if not self._swizzled and places % self._row_scales == 0:
            return _BY_ROWS
        return _BY_WORDS if places % 4 == 0 else _BY_BYTES


class StreamBinding(Launches):
    """The streaming kernel with everything that one problem and one set of strides fix; `point` adds the addresses.

    It launches the variant that the addresses of the last `point` allow. One thread at a time may use it.
    """

    def __init__(self, views: Views, problem: Problem, c_strides: tuple[int, int, int]) -> None:
        self._problem = problem
        arch, device = driver.arch_of(problem.device), problem.device.index
        multiprocessors = driver.multiprocessor_count(device)
        self._steps = Steps(views, problem, arch, multiprocessors)
        # The variant that is likely to run, at addresses that are multiples of 16; what all have in common is its.
        likely = self._steps.whole
        source = plan.plan(problem, arch, likely)
        kernel = build.kernel(source, device)
        facts = kernel.facts
        check_record(source, facts, Parameters)
        work = plan.assign_work(problem.m, problem.n, problem.k, problem.batches, multiprocessors, facts)
        self._may_be_whole = likely != "no" and plan.is_whole(work, problem.k)
        self._parameters = _parameters(views, problem, work, c_strides)
        self._geometry = Geometry((work.ctas, 1, 1), facts["threads"], facts["smem_bytes"])
        self._variants = {likely: Launcher(kernel, self._geometry, (self._parameters,))}
        super().__init__(self._variants[likely])

    def point(self, views: Views, results: Sequence[int], workspace: int) -> None:
        """Set every address, and what their alignment allows. The views' layouts are those of the binding.

        Raises CompileError where the variant that they ask for is not compiled yet and cannot be.
        """
        parameters = self._parameters
        parameters.a = a = views.a.view.ptr
        parameters.b = b = views.b.view.ptr
        parameters.sfa = sfa = views.sfa.view.ptr
        parameters.sfb = None if views.sfb is None else views.sfb.view.ptr
        parameters.alpha = None if views.alpha is None else views.alpha.view.ptr
        parameters.bias = None if views.bias is None else views.bias.view.ptr
        (parameters.c,) = results
        parameters.a_aligned = (a | self._steps.a) % 16 == 0
        parameters.b_aligned = (b | self._steps.b) % 16 == 0
        parameters.sfa_access = access = self._steps.sfa_access(sfa)
        fits = self._may_be_whole and parameters.a_aligned and parameters.b_aligned
        whole = _WHOLE[access] if fits else "no"
        self.launcher = self._variants.get(whole) or self._laid_out(whole)
        self._launchers = [self.launcher]

    def scale(self, *numbers: float) -> None:
        """Set an alpha that is a number."""
        (self._parameters.alpha_value,) = numbers

    def _laid_out(self, whole: str) -> Launcher:
        device = self._problem.device
        # Another variant than that of the call which made the binding may be wanted first while a graph is captured.
        with driver.beside_captures():
            kernel = build.kernel(plan.plan(self._problem, driver.arch_of(device), whole), device.index)
        return self._variants.setdefault(whole, Launcher(kernel, self._geometry, (self._parameters,)))


def _batch_steps(operand: Operand) -> int:
    """The batch stride of an array of bytes, 0 where there is one batch: what addresses are sums of."""
    return operand.strides[-1] if operand.shape[-1] > 1 else 0


def _steps(operand: Operand, element_bytes: int) -> int:
    """The bits of the strides in bytes between rows and batches, as far as there is more than one."""
    rows = operand.strides[0] * element_bytes if operand.shape[0] > 1 else 0
    return rows | _batch_steps(operand) * element_bytes


def _parameters(views: Views, problem: Problem, work: plan.Work, c_strides: tuple[int, int, int]) -> Parameters:
    element_bytes = 2 if problem.weight_only else 1
    alpha_row, alpha_batch = row_and_batch(views.alpha)
    bias_row, bias_batch = row_and_batch(views.bias)
    sfb = views.sfb
    return Parameters(
        a_batch_bytes=views.a.strides[-1],
        a_row_bytes=views.a.strides[0],
        sfa_batch_bytes=views.sfa.strides[-1],
        sfa_row_bytes=views.sfa.strides[0],
        b_batch_bytes=views.b.strides[-1] * element_bytes,
        b_row_bytes=views.b.strides[0] * element_bytes,
        sfb_batch_bytes=0 if sfb is None else sfb.strides[-1],
        sfb_row_bytes=0 if sfb is None else sfb.strides[0],
        alpha_batch=alpha_batch,
        alpha_row=alpha_row,
        bias_batch=bias_batch,
        bias_row=bias_row,
        c_row=c_strides[0],
        c_column=c_strides[1],
        c_batch=c_strides[2],
        k=problem.k,
        n=problem.n,
        **work.fields,
        alpha_value=views.alpha_value,
        out_type=OUT_DTYPES.index(problem.out_dtype),
        swizzled=int(problem.scale_layout != "linear"),
    )


Binding = StreamBinding | TileBinding


def _bind(views: Views, problem: Problem, tiled: bool) -> Binding:
    """The kernel that the plan chooses; `tiled` says whether TMA can read the arrays."""
    c_strides = _c_strides(views, problem)
    if tiled:
        arch, multiprocessors = driver.arch_of(problem.device), driver.multiprocessor_count(problem.device.index)
        chosen = plan.plan_tiles(problem, arch, multiprocessors)
        if chosen is not None:
            return TileBinding(views, problem, c_strides, *chosen)
    return StreamBinding(views, problem, c_strides)


def wanted(views: Views, problem: Problem) -> Results:
    """Shape and dtype of c."""
    m, n, batches = problem.m, problem.n, problem.batches
    shape: tuple[int, ...] = (m, n)
    if views.batch_first is not None:
        shape = (batches, m, n) if views.batch_first else (m, n, batches)
    return ((shape, problem.out_dtype),)


def _c_strides(views: Views, problem: Problem) -> tuple[int, int, int]:
    """Of rows, columns and batches; a fresh c is C-contiguous in the caller's axis order."""
    if views.c is not None:
        row, column, batch = views.c.strides
        return row, column, batch
    n, batches = problem.n, problem.batches
    if views.batch_first is None or views.batch_first:
        return n, 1, problem.m * n
    return n * batches, batches, 1


def bind(views: Views, problem: Problem, results: Sequence[View], recorded: bool) -> Binding:
    """The kernel for these layouts and remainders of addresses by 16; see `cupymla.ops.calls.Calls`.

    Raises UnsupportedError, CompileError, DriverError.
    """
    return _bind(views, problem, fits(views, problem))
