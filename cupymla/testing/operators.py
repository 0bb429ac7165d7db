"""An operator's parts as the test kit uses them: the call, its cases, its reference, its kernels on a GPU.

Beside what `cupymla.ops.case` asks of every `cases` module, the kit reads `OUTPUTS`: the names of the call's output
parameters, in the order in which it returns them; and, where there are any, `WRITTEN`: what it writes beside them,
`UPDATES`: inputs that it writes to in part, and `EXACT`, where its bits are those of the reference.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .. import arch as arches
from ..arch import Gpu
from ..build import KernelSource
from ..errors import InputError
from ..ops import registry
from ..ops.case import Case, Choice
from ..ops.registry import KernelEntry, OperatorEntry
from . import compare
from .compare import Report

Array = npt.NDArray[Any]

_FEW_CASES = 30
"""So many names an error shows; of more the nearest."""


class Subject:
    """One operator under test.

    Attributes:
        entry: its registry row.
        call: the public `Operator`.
        cases: its cases module.
    """

    def __init__(self, name: str) -> None:
        self.entry: OperatorEntry = registry.named(name)
        self.call: Any = getattr(import_module(self.entry.module), name)
        self.cases: Any = import_module(f"{self.entry.module}.{self.entry.cases}")
        self._reference: Any = getattr(import_module(f"{self.entry.module}.reference"), name)

    @property
    def name(self) -> str:
        """The operator's name."""
        return self.entry.name

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the output parameters, in the order in which the call returns them."""
        names: tuple[str, ...] = self.cases.OUTPUTS
        return names

    def named(self, returned: Any) -> dict[str, Any]:
        """What a call returned, by name. Raises ValueError where it is more than the operator's outputs."""
        arrays = as_tuple(returned)
        return dict(zip(self.outputs[: len(arrays)], arrays, strict=True))

    @property
    def written(self) -> tuple[str, ...]:
        """Names of arrays among the inputs of cases that a call writes to."""
        return (*getattr(self.cases, "WRITTEN", ()), *self.updates)

    @property
    def updates(self) -> tuple[str, ...]:
        """Those of them that a call writes to in part: what it leaves alone has to stay."""
        return getattr(self.cases, "UPDATES", ())

    def written_in(self, inputs: dict[str, Any]) -> tuple[str, ...]:
        """Those of `written` that these inputs hold."""
        return tuple(name for name in self.written if inputs.get(name) is not None)

    def choice(self, kernel: KernelEntry) -> Choice | None:
        """What makes a kernel run where its target has another one as well; None where it has not."""
        if sum(other.arch == kernel.arch for other in self.entry.kernels) == 1:
            return None
        choices: dict[str, Choice] = self.cases.CHOICES
        return choices[kernel.name]

    def those(self, cases: Iterable[Case], names: Sequence[str]) -> list[Case]:
        """Those of the operator's cases that have these names, in their order. Raises InputError for an unknown one."""
        known = {case.name: case for case in cases}
        for name in names:
            if name not in known:
                shown = list(known)
                if len(known) > _FEW_CASES:
                    alike = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
                    shown = alike or [n for n in known if name in n][:3] or shown[:3]
                expected = f"a case of {self.entry.module.replace('.', '/')}/cases.py such as {', '.join(shown)}"
                raise InputError("--case", expected, repr(name), self.name)
        return [known[name] for name in names]

    def sources(self, inputs: dict[str, Any], gpu: Gpu) -> tuple[KernelSource, ...]:
        """The kernels that a call on such a GPU compiles, wherever its inputs are. Raises UnsupportedError."""
        run: Any = import_module(f"{self.entry.module}.run")
        found: tuple[KernelSource, ...] = run.sources(gpu, **inputs)
        return found

    def reference(self, inputs: dict[str, Any], precision: Literal["float64", "same"]) -> tuple[Array, ...]:
        """What the operator's reference makes of NumPy inputs: as many arrays as the call returns."""
        return as_tuple(self._reference(**inputs, precision=precision))

    def expected(self, inputs: dict[str, Any], precision: Literal["float64", "same"]) -> dict[str, Array]:
        """What the reference makes of NumPy inputs, by name: what the call returns, then what it writes beside it.

        The inputs stay as they are: what is written beside is written into arrays of its own.
        """
        kind = np.float64 if precision == "float64" else None
        own = {
            name: inputs[name].copy()
            if name in self.updates
            else np.full(inputs[name].shape, np.nan, kind or inputs[name].dtype)
            for name in self.written_in(inputs)
        }
        return {**self.named(self.reference(inputs | own, precision)), **own}

    def reports(self, inputs: dict[str, Any], results: Mapping[str, Array]) -> list[Report]:
        """How results of NumPy inputs, by name, compare with the references: what a call returned and what it wrote
        beside it, all that the references make and nothing else."""
        with np.errstate(all="ignore"):
            return self.compared(results, self.expected(inputs, "same"), self.expected(inputs, "float64"))

    def compared(
        self, results: Mapping[str, Array], same: Mapping[str, Array], exact: Mapping[str, Array]
    ) -> list[Report]:
        """The same, where what is expected in both precisions is known."""
        if results.keys() != same.keys():
            raise ValueError(f"{self.name}: results {', '.join(results)} where {', '.join(same)} are expected")
        with np.errstate(all="ignore"):
            every = [(name, _as(got, same[name]), same[name], exact[name]) for name, got in results.items()]
            if getattr(self.cases, "EXACT", False):
                return [compare.compare_bits(name, got, wanted) for name, got, _, wanted in every]
            return [compare.compare(*each) for each in every]


def _as(got: Array, like: Array) -> Array:
    """Bytes of narrow floats as such."""
    return got.view(like.dtype) if got.dtype == np.uint8 and like.dtype.itemsize == 1 else got


def as_tuple(result: Any) -> tuple[Any, ...]:
    """What a call returned, as a tuple of its outputs."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def arguments_on(xp: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """NumPy arguments copied to xp's memory with their strides; everything else as it is."""
    from .poison import strided_like

    return {name: strided_like(xp, value) if isinstance(value, np.ndarray) else value for name, value in inputs.items()}


def kernels_for(entry: OperatorEntry, capability: tuple[int, int]) -> tuple[KernelEntry, ...]:
    """The kernels of an operator, all of one target, that a GPU of this compute capability runs; there may be none.

    A target that lists this GPU goes before one that does not, a newer one before an older.
    """
    targets = [arches.named(kernel.arch) for kernel in entry.kernels]
    fitting = [arch for arch in targets if arch.runs_on(capability)]
    best = max(fitting, key=lambda arch: arch.preference, default=None)
    return tuple(kernel for kernel in entry.kernels if best and kernel.arch == best.name)


def targets_on(entry: OperatorEntry, archs: Sequence[str]) -> list[str]:
    """The targets of an operator's kernels that GPUs of these architectures run, each once.

    Where no kernel is compiled for an architecture itself it is what `kernels_for` takes: sm_90 where there is no
    sm_90a.
    """
    chosen = []
    for name in archs:
        fitting = kernels_for(entry, arches.named(name).capability)
        chosen += [name] if name in entry.targets else [kernel.arch for kernel in fitting]
    return list(dict.fromkeys(chosen))


def unit(entry: OperatorEntry, kernel: KernelEntry) -> KernelSource:
    """A kernel's translation unit without definitions: what stands for all its variants where content is hashed."""
    return KernelSource(f"{entry.folder}/{kernel.folder}/{kernel.name}.cu", kernel.name, (), kernel.arch)


def units(entry: OperatorEntry, kernel: KernelEntry) -> tuple[KernelSource, ...]:
    """That one, and the further ones that a kernel's evidence speaks for."""
    further = (
        KernelSource(f"{entry.folder}/{path}.cu", path.rpartition("/")[2], (), kernel.arch) for path in kernel.units
    )
    return (unit(entry, kernel), *further)


def variants(entry: OperatorEntry, archs: Sequence[str] | None = None) -> list[KernelSource]:
    """The kernel variants of an operator that are compiled ahead of use, for the given targets or for all."""
    targets = dict.fromkeys(kernel.arch for kernel in entry.kernels if archs is None or kernel.arch in archs)
    if not targets:
        return []
    plan: Any = import_module(f"{entry.module}.plan")
    found = [source for target in targets for source in plan.sources(target)]
    if entry in registry.MEMBERS:
        own = {kernel.name for kernel in entry.kernels}
        return [source for source in found if source.entry in own]
    return found


def defining(sources: Sequence[KernelSource], settings: Sequence[str]) -> list[KernelSource]:
    """The kernel variants that are compiled with all of these definitions, each "NAME=VALUE".

    Raises InputError for a definition that none of them has.
    """
    for setting in settings:
        name = setting.partition("=")[0]
        values = {f"{known}={value}" for source in sources for known, value in source.defines if known == name}
        names = {known for source in sources for known, _ in source.defines}
        if setting not in values:
            raise InputError("--define", "one of " + ", ".join(sorted(values or names)), repr(setting))
    wanted = set(settings)
    return [source for source in sources if wanted <= {f"{name}={value}" for name, value in source.defines}]
