"""The compile service: sources in, cached cubins and loaded kernels out. Knows no operator and no tensor."""

from __future__ import annotations

from ..errors import CompileError
from . import compiler
from .cubin import Cubin, Image, Resources, frozen
from .source import KernelSource, content_hash

__all__ = ["Cubin", "KernelSource", "Resources", "content_hash", "cubin"]


def cubin(source: KernelSource) -> Cubin:
    """Compile `source`."""
    compiled = compiler.compile(source)
    image = Image(compiled.data)
    if source.entry not in image.kernels:
        raise CompileError(str(source.file), f"has no kernel {source.entry}; it has: {', '.join(image.kernels)}")
    return Cubin(compiled.data, source.entry, source.arch, frozen(image.facts()), compiled.resources, compiled.log)
