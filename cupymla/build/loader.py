"""A cubin made ready to launch on one device, through the driver's context-independent library calls.

The device's primary context is used, the one CuPy, torch and JAX run in. Source: CUDA Driver API, "Library
Management" and "Primary Context Management".
"""

from __future__ import annotations

import atexit
import ctypes
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import driver
from .cubin import Cubin


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
    doing = f"loading {cubin.entry} for {cubin.arch} on cuda:{device}"
    with driver.on_device(device):
        library = _handle("cuLibraryLoadData", doing, cubin.data, None, None, None, None, None, None)
        kernel = _handle("cuLibraryGetKernel", doing, library, cubin.entry.encode())
        function = _handle("cuKernelGetFunction", doing, kernel)
        driver.allow(function, cubin.facts.get("smem_bytes", 0), cubin.facts.get("cluster", 1))
    return Kernel(function, cubin.facts, cubin, device, library)


def _handle(name: str, doing: str, *arguments: int | bytes | None) -> int:
    """What a driver function writes through its first argument. Its other arguments are addresses, null or 0."""
    made = ctypes.c_void_p()
    call = driver.function(name, *(ctypes.c_void_p,) * (1 + len(arguments)))
    code = call(ctypes.addressof(made), *arguments)
    if code:
        raise driver.error(code, doing)
    return made.value or 0


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
