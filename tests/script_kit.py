"""Scripts that launch a kernel on their own, with an interpreter for `cuda.bindings.driver` and CuPy's kernels."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from cuda.bindings import driver as real_driver

import cupymla
from cupymla import build
from cupymla.build import KernelSource
from cupymla.launch import LaunchConfig
from cupymla.raw import RawKernel
from cupymla_lab.emulated import Emulated

EXAMPLES = Path(__file__).resolve().parent.parent / "scripts" / "examples"


def script(name: str) -> Any:
    """A script of scripts/examples as a module; what it does when it is run stays undone."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As where it is run: beside what it imports, and known by its name, which dataclasses ask for.
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]), mock.patch.dict(sys.modules, {name: module}):
        spec.loader.exec_module(module)
    return module


def compiled(operator: str, arch: str, **variant: Any) -> tuple[RawKernel, KernelSource]:
    """What `raw_module` gives, but for CuPy's own loading, which needs a driver; and what it was compiled from."""
    sources: list[KernelSource] = []

    def cubin(source: KernelSource) -> build.Cubin:
        sources.append(source)
        return real(source)

    real = build.cubin
    with mock.patch.object(build, "cubin", cubin), mock.patch.object(build, "raw_module", lambda cubin: None):
        kernel = cupymla.raw_module(operator, arch=arch, **variant)
    return kernel, sources[0]


class Function:
    """A kernel in the place of CuPy's."""

    def __init__(self, machine: Emulated, source: KernelSource) -> None:
        object.__setattr__(self, "_machine", machine)
        object.__setattr__(self, "kernel", SimpleNamespace(ptr=machine.kernel(source, 0).function))

    def __setattr__(self, name: str, value: int) -> None:
        assert name == "max_dynamic_shared_size_bytes"
        self._machine.replacements()["allow"](self.kernel.ptr, value, 1)  # type: ignore[attr-defined]


class Driver(ModuleType):
    """`cuda.bindings.driver`, whose launches and tensor maps are the interpreter's."""

    def __init__(self, machine: Emulated) -> None:
        super().__init__("driver")
        self._function = machine.function

    def __getattr__(self, name: str) -> Any:
        return getattr(real_driver, name)

    def cuLaunchKernel(self, function: int, *launch: Any) -> tuple[int]:
        """Grid and block, three extents each, then shared memory, stream, and where the parameters are."""
        smem, stream, slots, extra = launch[6:]
        config = LaunchConfig((ctypes.c_uint * 3)(*launch[:3]), (ctypes.c_uint * 3)(*launch[3:6]), smem, stream)
        return (self._function("cuLaunchKernelEx")(ctypes.addressof(config), function, slots, extra),)

    def cuTensorMapEncodeTiled(self, dtype: Any, rank: int, ptr: int, *request: Any) -> tuple[int, Any]:
        """Extents, strides, box and steps of elements as lists; then four enumerations."""
        made = ctypes.create_string_buffer(128)
        lists = [[int(number) for number in numbers] for numbers in request[:4]]
        kinds = [int(kind) for kind in request[4:]]
        encode = self._function("cuTensorMapEncodeTiled")
        code = encode(ctypes.addressof(made), int(dtype), rank, ptr, *lists, *kinds)
        return code, SimpleNamespace(getPtr=lambda: ctypes.addressof(made))


def loaded(kernel: RawKernel, source: KernelSource, machine: Emulated) -> RawKernel:
    """A compiled kernel on a machine."""
    return kernel._replace(module=SimpleNamespace(get_function=lambda entry: Function(machine, source)))
