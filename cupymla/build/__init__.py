"""The compile service: sources in, cached cubins and loaded kernels out. Knows no operator and no tensor."""

from __future__ import annotations

import threading
from dataclasses import replace

from .. import config
from ..errors import CompileError
from . import cache, compiler
from .cubin import Cubin, Image, Resources, frozen
from .loader import Kernel, load, raw_module
from .source import KernelSource, code_hash, content_hash

__all__ = [
    "Cubin",
    "Kernel",
    "KernelSource",
    "Resources",
    "code_hash",
    "content_hash",
    "cubin",
    "forget",
    "kernel",
    "ptx",
    "raw_module",
]

_cubins: dict[KernelSource, Cubin] = {}
_kernels: dict[tuple[KernelSource, int], Kernel] = {}
_turns: dict[KernelSource, threading.Lock] = {}
_lock = threading.Lock()


def cubin(source: KernelSource, fail_on_spill: bool | None = None) -> Cubin:
    """The compiled form of `source`: from memory, else from disk, else from the compiler.

    Args:
        source: what to compile.
        fail_on_spill: whether a register spill is an error; None leaves it to CUPYMLA_FAIL_ON_SPILL.

    Raises:
        CompileError: it does not compile, lacks the entry, or spills although it may not.
        UnsupportedError: the compiler does not know the target.
        InputError: an environment variable names something unusable.
    """
    found = _cubins.get(source)
    if found is None:
        with _lock:
            turn = _turns.setdefault(source, threading.Lock())
        with turn:
            found = _cubins.get(source) or _from_disk_or_compiler(source)
            _cubins[source] = found
    strict = config.fail_on_spill() if fail_on_spill is None else fail_on_spill
    if strict and found.resources.spills:
        spilled = f"{found.resources.spill_store_bytes} bytes stored, {found.resources.spill_load_bytes} loaded"
        raise CompileError(str(source.file), f"{source} spills registers: {spilled}", found.log)
    return found


def kernel(source: KernelSource, device: int) -> Kernel:
    """`source` compiled and loaded on a device, once per process.

    Args:
        source: what to load.
        device: CUDA ordinal.

    Raises:
        DriverError: the driver refuses it.
        CompileError, UnsupportedError, InputError: like `cubin`.
    """
    found = _kernels.get((source, device))
    if found is None:
        compiled = cubin(source)
        with _lock:
            found = _kernels.get((source, device)) or load(compiled, device)
            _kernels[source, device] = found
    return found


def ptx(source: KernelSource) -> str:
    """The PTX of `source`: from disk, else from the compiler, which makes no cubin then.

    Raises CompileError, UnsupportedError, InputError.
    """
    content, chain = content_hash(source), compiler.toolchain()
    name = cache.key(source, content, chain)
    found = cache.load_ptx(source, name)
    if found is None:
        with cache.locked(source, name):
            found = cache.load_ptx(source, name)
            if found is None:
                found = compiler.ptx(source)
                # A file edited while the compiler ran would be kept under the hash of its old content.
                if content_hash(source) == content:
                    cache.store_ptx(source, name, found)
    return found


def forget() -> None:
    """Drop what this process remembers of compiled kernels, so that edited sources count; loaded kernels stay."""
    with _lock:
        _cubins.clear()


def _from_disk_or_compiler(source: KernelSource) -> Cubin:
    content = content_hash(source)
    try:
        chain = compiler.toolchain()
    except CompileError:
        # A prepared cache serves machines without a compiler; only without both is the missing compiler an error.
        found = cache.load_any(source, content)
        if found:
            return found
        raise
    name = cache.key(source, content, chain)
    found = cache.load(source, name)
    if found:
        return found
    with cache.locked(source, name):
        return cache.load(source, name) or _compile(source, name, content, chain)


def _compile(source: KernelSource, name: str, content: str, chain: compiler.Toolchain) -> Cubin:
    """The cubin of one pass of the compiler, kept with the PTX that it was made from."""
    compiled = compiler.compile(source)
    try:
        image = Image(compiled.data)
        facts = frozen(image.facts())
    except ValueError as error:
        raise CompileError(str(source.file), f"unreadable cubin: {error}", compiled.log) from error
    if source.entry not in image.kernels:
        there = ", ".join(image.kernels) or "none"
        raise CompileError(str(source.file), f"has no kernel '{source.entry}'; its kernels: {there}", compiled.log)
    made = Cubin(
        data=compiled.data,
        entry=source.entry,
        arch=source.arch,
        facts=facts,
        parameters=image.parameters(source.entry),
        resources=compiled.resources,
        log=compiled.log,
        seconds=compiled.seconds,
        toolchain=str(chain),
    )
    if content_hash(source) != content:  # as in `ptx`
        return made
    return replace(made, path=cache.store(source, name, content, made, compiled.ptx))
