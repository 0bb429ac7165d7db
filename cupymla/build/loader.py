"""A cubin made ready to launch on one device, through the driver's context-independent library calls.

The device's primary context is used, the one CuPy, torch and JAX run in. Source: CUDA Driver API, "Library
Management" and "Primary Context Management".
"""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DriverError
from .cubin import Cubin

# Above these a kernel has to be allowed more before it is launched (CUDA C++ Programming Guide, "Compute
# Capability 9.0", "Thread Block Clusters").
_SMEM_WITHOUT_OPT_IN = 48 * 1024
_PORTABLE_CLUSTER = 8


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded kernel.

    Attributes:
        function: the CUfunction handle, as an address.
        facts: the launch facts its source states.
        cubin: what it was loaded from.
        device: the CUDA ordinal it is loaded on.
        library: the CUlibrary handle; it stays loaded for the life of the process.
    """

    function: int
    facts: Mapping[str, int]
    cubin: Cubin = field(repr=False)
    device: int
    library: int


def load(cubin: Cubin, device: int) -> Kernel:
    """Load a kernel on a device and allow it the shared memory and the cluster size its facts state.

    Raises DriverError when the driver refuses, such as an image for another architecture.
    """
    from cuda.bindings import driver as cu

    what = f"loading {cubin.entry} for {cubin.arch} on cuda:{device}"
    _check(cu.cuInit(0), what)
    handle = _check(cu.cuDeviceGet(device), what)
    with _primary_context(cu, handle, what):
        library = _check(cu.cuLibraryLoadData(cubin.data, [], [], 0, [], [], 0), what)
        kernel = _check(cu.cuLibraryGetKernel(library, cubin.entry.encode()), what)
        for attribute, value in _attributes(cu, cubin.facts):
            _check(
                cu.cuKernelSetAttribute(attribute, value, kernel, handle), f"{what}: setting {attribute.name}={value}"
            )
        function = _check(cu.cuKernelGetFunction(kernel), what)
    return Kernel(int(function), cubin.facts, cubin, device, int(library))


def file_of(cubin: Cubin) -> Path:
    """A file that holds the cubin: the cache's, else one among the temporary files that lives as long as the process.

    Raises OSError when neither can be had.
    """
    if cubin.path and cubin.path.is_file():
        return cubin.path
    descriptor, name = tempfile.mkstemp(prefix=f"cupymla-{cubin.entry}-", suffix=".cubin")
    file = Path(name)
    atexit.register(file.unlink, missing_ok=True)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(cubin.data)
    return file


def raw_module(cubin: Cubin) -> Any:
    """The cubin as a `cupy.RawModule`; CuPy loads it on whichever device is current at the first `get_function`.

    Raises ImportError without CuPy.
    """
    import cupy

    return cupy.RawModule(path=str(file_of(cubin)))


def _attributes(cu: Any, facts: Mapping[str, int]) -> list[tuple[Any, int]]:
    names = cu.CUfunction_attribute
    wanted = []
    if facts.get("smem_bytes", 0) > _SMEM_WITHOUT_OPT_IN:
        wanted.append((names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, facts["smem_bytes"]))
    if facts.get("cluster", 1) > _PORTABLE_CLUSTER:
        wanted.append((names.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
    return wanted


@contextmanager
def _primary_context(cu: Any, device: Any, doing: str) -> Iterator[None]:
    """The device's primary context as the current one; retained for the life of the process, as its kernels are."""
    context = _check(cu.cuDevicePrimaryCtxRetain(device), doing)
    _check(cu.cuCtxPushCurrent(context), doing)
    try:
        yield
    finally:
        _check(cu.cuCtxPopCurrent(), doing)


def _check(result: tuple[Any, ...], doing: str) -> Any:
    """The value of a driver call. Raises DriverError when its status is not success."""
    from cuda.bindings import driver as cu

    status = result[0]
    if status == cu.CUresult.CUDA_SUCCESS:
        return result[1] if len(result) > 1 else None
    text = cu.cuGetErrorString(status)[1]
    raise DriverError(int(status), status.name, text.decode() if text else "unknown error", doing)
