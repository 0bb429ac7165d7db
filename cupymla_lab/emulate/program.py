"""From PTX to something that can be loaded: translation, the model's object code, the linker.

The translated kernel and the model are assembled by nvJitLink, which comes with the CUDA wheels, by a toolkit's ptxas
and nvlink, or by the driver, whichever of them is there first and new enough for the PTX.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import json
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cupymla import driver
from cupymla.build import cache, compiler, ptx
from cupymla.build.cubin import Image
from cupymla.build.source import KernelSource, content_hash
from cupymla.errors import CompileError

from ..ptx import PtxError
from . import by_content
from .translate import BLACKWELL, TARGET, Site, Translation, translate

MODEL = KernelSource("model/model.cu", "", arch=TARGET, root=str(Path(__file__).resolve().parent))
# Of the kernel, which ptxas otherwise arranges for warps whose lanes come out of calls together. The model's calls let
# them come apart, and lanes then passed one another at shuffles: seen on an H100 (docs/emulation.md).
OPTIMISATION = 0
REGISTER_FILE = 65536
_MOST_REGISTERS = 128


@dataclass(frozen=True, slots=True)
class Program:
    """A translated module, linked with the model.

    Attributes:
        name: what the PTX is called.
        cubin: the image for sm_90a.
        kernels: the names of its kernels.
        sites: its translated instructions.
        cta_bytes: what the model keeps in global memory for each CTA.
        facts: the launch facts that the module states. Of these and the model's own the linker keeps one in the image.
    """

    name: str
    cubin: bytes = field(repr=False)
    kernels: tuple[str, ...]
    sites: tuple[Site, ...] = field(repr=False)
    cta_bytes: int
    facts: dict[str, int]

    def site(self, number: int) -> Site | None:
        """The instruction of that number."""
        return self.sites[number - 1] if 1 <= number <= len(self.sites) else None

    def save(self, file: Path) -> None:
        """Write the cubin to `file` and everything else to a `.json` beside it."""
        file.write_bytes(self.cubin)
        file.with_suffix(".json").write_text(self.rest(), encoding="utf-8")

    def rest(self) -> str:
        """All but the cubin, as JSON."""
        rest = {
            "name": self.name,
            "kernels": self.kernels,
            "sites": [asdict(site) for site in self.sites],
            "cta_bytes": self.cta_bytes,
            "facts": self.facts,
        }
        return json.dumps(rest)

    @staticmethod
    def read(file: Path) -> Program:
        """What `save` wrote."""
        rest = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
        sites = tuple(Site(**site) for site in rest["sites"])
        kernels, facts = tuple(rest["kernels"]), rest["facts"]
        return Program(rest["name"], file.read_bytes(), kernels, sites, rest["cta_bytes"], facts)


def build(text: str, name: str = "<ptx>", threads: int = 0) -> Program:
    """Translate PTX for sm_100f and link it with the model; needs no GPU.

    Args:
        text: the PTX.
        name: what errors call it.
        threads: the largest CTA it is launched with, where that is more than the kernels' own bounds say.

    Raises:
        PtxError: the PTX cannot be translated, or does not assemble once it is.
        CompileError: the model does not compile, or there is no linker that is new enough.
    """
    translation = translate(text, name)
    if not translation.source.startswith(BLACKWELL):
        raise PtxError(name, 0, f"expected PTX for sm_100a or sm_103a for a GPU, found {translation.source}")
    library = model(_registers(_threads(text, threads) * _resident(text)))
    cubin = link(translation, library)
    padding = missing_bytes(translation, cubin)
    if padding:
        translation = translate(text, name, padding)
        cubin = link(translation, library)
        if missing_bytes(translation, cubin):
            raise CompileError(
                name, f"the linker does not put shared memory at a multiple of {translation.alignment} bytes"
            )
    cta_bytes = Image(library).facts()["cta_bytes"]
    return Program(name, cubin, translation.kernels, translation.sites, cta_bytes, dict(translation.facts))


def kept(source: KernelSource, threads: int = 0) -> Program:
    """`build` of a kernel's source, from the cache's folder where it was built before.

    Raises PtxError and CompileError.
    """
    folder = _folder()
    if folder is None:
        return build(ptx(source), str(source), threads)
    chain = compiler.toolchain()
    made_of = (str(source), content_hash(source), str(chain), *_linkers(), str(threads), identity())
    options = (*compiler.flags(chain.backend, source.arch), *compiler.flags(chain.backend, TARGET))
    file = folder / f"program-{by_content.digest(*made_of, *options)}.cubin"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return Program.read(file)
    made = build(ptx(source), str(source), threads)
    # The cubin, which is looked for, last.
    with contextlib.suppress(OSError):
        cache.keep(file.with_suffix(".json"), lambda part: part.write_text(made.rest(), encoding="utf-8"))
        cache.keep(file, lambda part: part.write_bytes(made.cubin))
    return made


def _folder() -> Path | None:
    """Where things are kept, or None where nothing can be."""
    try:
        return by_content.folder()
    except OSError:
        return None


@functools.lru_cache(maxsize=1)
def _linkers() -> tuple[str, ...]:
    """All that `link` might choose among, with their releases."""
    linker, ptxas = _nvjitlink(), shutil.which("ptxas")
    told = (
        subprocess.run(
            (ptxas, "--version"), capture_output=True, encoding="utf-8", errors="replace", check=False
        ).stdout
        if ptxas
        else ""
    )
    release = ".".join(map(str, linker.version())) if linker else ""
    return release, told, str(driver.version()) if driver.available() else ""


def identity() -> str:
    """A digest of the emulator: translator, model, and what reads a translation. Another one is another emulator."""
    return by_content.digest(content_hash(MODEL), *own_files())


@functools.lru_cache(maxsize=1)
def own_files() -> tuple[str, ...]:
    """Digests of what decides on a translation and on what is read of it."""
    here = Path(__file__).resolve().parent
    build_files = [Path(inspect.getfile(part)) for part in (compiler.compile, Image)]
    return by_content.digests([*here.glob("*.py"), *(here.parent / "ptx").glob("*.py"), *build_files])


def missing_bytes(translation: Translation, cubin: bytes) -> dict[str, int]:
    """By how much dynamic shared memory begins too soon, of each kernel where it does.

    It lies behind the static variables. ptxas puts it where its alignment wants it; linkers (nvlink and nvJitLink 12.9
    and 13.0) give it no more than 16 bytes' alignment, and swizzled tiles are not where TMA and descriptors look then.
    """
    image = Image(cubin)
    missing = {kernel: -image.shared_bytes(kernel) % translation.alignment for kernel in translation.kernels}
    return {kernel: count for kernel, count in missing.items() if count}


def _threads(text: str, launched: int) -> int:
    """The largest CTA that a module's kernels keep registers for: as they are launched, 0 where nobody says, or declare
    it; 512 where nobody says and one declares none."""
    found = re.findall(r"\.(?:maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", text)
    if not launched and len(found) < len(re.findall(r"\.entry\b", text)):
        launched = 512
    return max(launched, *(int(x) * int(y or 1) * int(z or 1) for x, y, z in found), 1)


def _resident(text: str) -> int:
    """The most CTAs of an SM that one of a module's kernels leaves registers for."""
    return max((int(count) for count in re.findall(r"\.minnctapersm\s+(\d+)", text)), default=1)


def _registers(threads: int) -> int:
    """How many registers the model's functions may use where that many threads share an SM's."""
    return max(32, min(_MOST_REGISTERS, REGISTER_FILE // max(threads, 1) // 8 * 8))


_lock = threading.Lock()


def model(registers: int) -> bytes:
    """The model as an object to link with, kept in the cache's folder. Raises CompileError."""
    with _lock:
        chain = compiler.toolchain()
        made_of = (content_hash(MODEL), str(chain), *compiler.flags(chain.backend, TARGET), *own_files())
        return _model(registers, by_content.digest(*made_of, str(registers)))


@functools.lru_cache(maxsize=8)
def _model(registers: int, key: str) -> bytes:
    folder = _folder()
    if folder is None:
        return compiler.relocatable(MODEL, registers).data
    file = folder / f"model-{key}.cubin"
    with contextlib.suppress(OSError):
        return file.read_bytes()
    made = compiler.relocatable(MODEL, registers).data
    with contextlib.suppress(OSError):
        cache.keep(file, lambda part: part.write_bytes(made))
    return made


def model_facts() -> dict[str, int]:
    """Sizes of the model's structs, as it states them."""
    return Image(model(_MOST_REGISTERS)).facts()


# Linking ---------------------------------------------------------------------------------------------------------


def link(translation: Translation, library: bytes) -> bytes:
    """Assemble a translation and link it with the model's object.

    Raises PtxError naming the line of the original when ptxas rejects the translation, and CompileError without a
    linker that is new enough.
    """
    needed = _ptx_version(translation.text)
    linker = _nvjitlink()
    if linker is not None and _ptx_of(linker.version()) >= needed:
        return _link_wheel(linker, translation, library)
    if shutil.which("ptxas") and shutil.which("nvlink"):
        return _link_toolkit(translation, library)
    if driver.available():
        return _link_driver(translation, library)
    have = "none" if linker is None else "nvJitLink " + ".".join(map(str, linker.version()))
    raise CompileError(translation.name, f"PTX {needed[0]}.{needed[1]} needs a newer linker than {have}")


def _nvjitlink() -> Any:
    try:
        from cuda.bindings import nvjitlink

        nvjitlink.version()
    except (ImportError, RuntimeError, OSError):
        return None
    return nvjitlink


def _ptx_version(text: str) -> tuple[int, int]:
    found = re.search(r"^\s*\.version\s+(\d+)\.(\d+)", text, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _ptx_of(release: Sequence[int]) -> tuple[int, int]:
    """The newest PTX version that a CUDA release reads (PTX ISA, "Release History")."""
    major, minor = int(release[0]), int(release[1])
    return (major - 4, minor) if major >= 13 else (8, min(minor, 8) if minor < 9 else 8)


def _link_wheel(linker: Any, translation: Translation, library: bytes) -> bytes:
    handle = linker.create(3, [f"-arch={TARGET}", "-lineinfo", f"-O{OPTIMISATION}"])
    try:
        text = translation.text.encode() + b"\0"
        try:
            linker.add_data(handle, linker.InputType.PTX, text, len(text), translation.name)
            linker.add_data(handle, linker.InputType.CUBIN, library, len(library), "model")
            linker.complete(handle)
        except linker.nvJitLinkError as error:
            log = bytearray(linker.get_error_log_size(handle))
            linker.get_error_log(handle, log)
            raise _rejected(translation, log.decode(errors="replace").strip("\0\n ") or str(error)) from error
        cubin = bytearray(linker.get_linked_cubin_size(handle))
        linker.get_linked_cubin(handle, cubin)
        return bytes(cubin)
    finally:
        linker.destroy(handle)


def _link_toolkit(translation: Translation, library: bytes) -> bytes:
    with tempfile.TemporaryDirectory(prefix="cupymla-") as folder:
        place = Path(folder)
        (place / "kernel.ptx").write_text(translation.text, encoding="utf-8")
        (place / "model.o").write_bytes(library)
        assemble = ["ptxas", f"-arch={TARGET}", f"-O{OPTIMISATION}", "-c", "-o", str(place / "kernel.o")]
        assemble.append(str(place / "kernel.ptx"))
        objects = [str(place / name) for name in ("kernel.o", "model.o")]
        for command in (assemble, ["nvlink", f"-arch={TARGET}", "-o", str(place / "whole.cubin"), *objects]):
            done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
            if done.returncode:
                raise _rejected(translation, (done.stdout + done.stderr).strip())
        return (place / "whole.cubin").read_bytes()


def _link_driver(translation: Translation, library: bytes) -> bytes:
    """With the driver's own linker, for the device that it has."""
    log = ctypes.create_string_buffer(8192)
    error_log, error_log_bytes, level = 5, 6, 7  # CUjit_option
    options = (ctypes.c_int * 3)(error_log, error_log_bytes, level)
    values = (ctypes.c_void_p * 3)(ctypes.addressof(log), ctypes.sizeof(log), OPTIMISATION)
    state, image, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
    pointer = ctypes.c_void_p
    create = driver.function("cuLinkCreate", ctypes.c_uint, pointer, pointer, pointer)
    add = driver.function("cuLinkAddData", pointer, ctypes.c_int, pointer, ctypes.c_size_t, *(pointer,) * 4)
    complete = driver.function("cuLinkComplete", pointer, pointer, pointer)
    text = translation.text.encode() + b"\0"
    with driver.on_device(0):
        code = create(3, ctypes.addressof(options), ctypes.addressof(values), ctypes.addressof(state))
        if code:
            raise driver.error(code, "making a linker")
        try:
            for kind, data in ((1, text), (0, library)):
                held = ctypes.create_string_buffer(data, len(data))
                code = add(state, kind, ctypes.addressof(held), len(data), None, None, None, None)
                if code:
                    break
            code = code or complete(state, ctypes.addressof(image), ctypes.addressof(size))
            if code:
                raise _rejected(translation, log.value.decode(errors="replace"))
            return ctypes.string_at(image, size.value)
        finally:
            driver.function("cuLinkDestroy", pointer)(state)


def _rejected(translation: Translation, log: str) -> PtxError:
    """The assembler's complaint, its line turned back into one of the original."""
    found = re.search(r"line (\d+)", log)
    at = int(found[1]) if found else 0
    return PtxError(translation.name, translation.origin(at), f"the translation does not assemble: {log[:2000]}")
