"""A compiled kernel as CuPy users know it, for scripts that launch it on their own."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from . import arch as arches
from . import build
from .build.source import KernelSource
from .errors import InputError, UnsupportedError, shown
from .ops import registry
from .ops.work_assignment import WorkAssignment

_MAX_CTAS = 2**31 - 1  # the extent of grid.x (CUDA C++ Programming Guide)


class AssignWork(Protocol):
    """How a kernel's work is assigned to the CTAs of a launch, as `RawKernel.assign_work` says it."""

    def __call__(self, multiprocessors: int, **sizes: int) -> WorkAssignment:
        """The grid for a GPU with that many multiprocessors, and the fields of the record that go with it.

        Args:
            multiprocessors: of the GPU, which CuPy has as `cupy.cuda.Device().attributes["MultiProcessorCount"]`.
            sizes: the keywords of `raw_work_assignment` in the operator's `plan` module, for nvfp4_gemv `m`, `n`, `k`
                and `batches`. The error for another word lists them.

        Raises:
            InputError: a size that is unknown, missing or out of range.
            UnsupportedError: the operator's plan assigns the work of complete calls only, or more work than a launch
                can have.
        """
        ...


class RawKernel(NamedTuple):
    """A kernel on its own.

    Attributes:
        module: the `cupy.RawModule` that holds it; `module.get_function(entry)` is the kernel.
        entry: its name in the module.
        facts: what a launch needs to know: "threads", "cluster", "smem_bytes", "parameter_bytes" and the kernel's own.
        parameters: the `ctypes.Structure` whose fields are the kernel's parameter record, which is its last parameter.
        parameter_sizes: size in bytes of every kernel parameter, in order; a 128 is a tensor map.
        assign_work: gives the grid, and the fields of the record that go with it, for sizes: see `AssignWork`.
    """

    module: Any
    entry: str
    facts: Mapping[str, int]
    parameters: type[ctypes.Structure]
    parameter_sizes: tuple[int, ...]
    assign_work: AssignWork


def raw_module(operator: str, *, arch: str | None = None, **variant: Any) -> RawKernel:
    """Compile a kernel, or find it compiled, and give it as a `cupy.RawModule` with its launch facts.

    Args:
        operator: an operator that has a kernel, such as "sparse_mla_fwd".
        arch: the target, such as "sm_90a"; by default that of CUDA device 0.
        variant: which of the operator's kernels; the parameters of `variant` in its `plan` module, for
            sparse_mla_fwd `d_qk`, `heads`, `dtype`, `any_scale` and `split`. The error for another word lists them.

    Raises:
        InputError: an unknown operator, target or variant.
        UnsupportedError: the operator has no kernel for the target.
        CompileError: it does not compile.
        ImportError: there is no CuPy.
    """
    known = [entry.name for entry in registry.OPERATORS if entry.kernels]
    if operator not in known:
        raise InputError("operator", "one of " + ", ".join(known), repr(operator))
    target = arches.named(arch) if arch is not None else _device_arch()
    package = registry.named(operator).module
    plan = import_module(f"{package}.plan")
    known_words = inspect.signature(plan.variant).parameters
    for word in variant:
        if word not in known_words:
            raise InputError("variant", "keywords among " + ", ".join(known_words), repr(word), operator)
    source = plan.variant(target, **variant)
    record = _record(import_module(f"{package}.cuda"), source)
    compiled = build.cubin(source)
    assign_work = partial(_assign_work, operator, source, compiled.facts)
    return RawKernel(build.raw_module(compiled), source.entry, compiled.facts, record, compiled.parameters, assign_work)


def _assign_work(
    operator: str, source: KernelSource, facts: Mapping[str, int], multiprocessors: int, **sizes: int
) -> WorkAssignment:
    plan = import_module(f"{registry.named(operator).module}.plan")
    if not hasattr(plan, "raw_work_assignment"):
        supported = "what plan.py and cuda.py of the operator do for complete calls"
        raise UnsupportedError(f"a work assignment of {operator} by sizes alone", source.arch, supported)
    known = inspect.signature(plan.raw_work_assignment).parameters
    words = {word: entry for word, entry in known.items() if entry.kind is entry.KEYWORD_ONLY}
    wanted = "keywords " + ", ".join(words)
    for word, size in {"multiprocessors": multiprocessors, **sizes}.items():
        least = 1 if word == "multiprocessors" else 0
        if word != "multiprocessors" and word not in words:
            raise InputError("sizes", wanted, repr(word), operator)
        if word in words and words[word].annotation == "bool":
            if type(size) is not bool:
                raise InputError(word, "True or False", shown(size), operator)
        elif type(size) is not int or size < least:
            raise InputError(word, f"an int of at least {least}", shown(size), operator)
    for word, entry in words.items():
        if entry.default is entry.empty and word not in sizes:
            raise InputError("sizes", wanted, f"no {word}", operator)
    assigned: WorkAssignment = plan.raw_work_assignment(source, facts, multiprocessors, **sizes)
    if assigned.ctas > _MAX_CTAS:
        raise UnsupportedError(f"{operator} in {assigned.ctas} CTAs", source.arch, f"up to {_MAX_CTAS}")
    return assigned


def _record(module: Any, source: KernelSource) -> type[ctypes.Structure]:
    """The parameter record of a variant, where an operator's kernels have more than one."""
    chosen: type[ctypes.Structure] = module.record(source) if hasattr(module, "record") else module.Parameters
    return chosen


def _device_arch() -> arches.Arch:
    from . import driver
    from .device import Device

    if not driver.available():
        supported = "a target by name, such as arch='sm_90a'"
        raise UnsupportedError("raw_module without arch=", "a machine without a CUDA GPU", supported)
    return driver.arch_of(Device("cuda", 0))
