"""What the MLA operators' GPU tests share: problems on the host and on the GPU, what is right, other frameworks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupymla.ops.mla_cases import MlaCase
from cupymla.testing import compare, operators
from cupymla_lab.subjects import Subject


class OnGpu:
    """An operator's problems, made from one of its cases unless another is named.

    Attributes:
        subject: the operator.
        call: its public function.
        case: the case.
    """

    def __init__(self, operator: str, case: str) -> None:
        self.subject = Subject(operator)
        self.call: Any = self.subject.call
        self.case: MlaCase = next(known for known in self.subject.cases.CASES if known.name == case)

    def problem(self, cp: Any, seed: int = 0, case: MlaCase | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments on the host and on the GPU."""
        host = self.subject.cases.inputs(self.case if case is None else case, seed)
        return host, operators.arguments_on(cp, host)

    def require_right(self, host: dict[str, Any], results: Any, given: dict[str, Any] | None = None) -> None:
        """CuPy results meet the accuracy criterion against what the reference makes of the host's arguments.

        Args:
            host: the arguments.
            results: what the call returned.
            given: its arguments on the GPU, where it writes to some of them.
        """
        found = self.subject.named(results)
        found |= {name: (given or {})[name] for name in self.subject.written_in(host)}
        compare.require(self.subject.reports(host, {name: array.get() for name, array in found.items()}))

    def outputs_like(self, cp: Any, results: Any) -> dict[str, Any]:
        """NaN of these results' shapes and dtypes, for a call to write to, by the names of its parameters."""
        made = {name: cp.empty_like(array) for name, array in self.subject.named(results).items()}
        for array in made.values():
            array.fill(np.nan)
        return made


def overwrite(arguments: dict[str, Any], changed: dict[str, Any]) -> None:
    """Give the arrays among the arguments the contents of those of another problem."""
    for name, value in changed.items():
        if hasattr(value, "shape"):
            arguments[name][...] = value


def torch_with_gpu() -> Any:
    """The module torch; skips the test without one that sees a GPU."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch


def jax_with_gpu() -> Any:
    """The module jax; skips the test without one that sees a GPU."""
    jax = pytest.importorskip("jax")
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("jax sees no GPU")
    return jax


def in_torch(torch: Any, host: dict[str, Any]) -> dict[str, Any]:
    """NumPy arguments as torch tensors on the GPU; everything else as it is."""

    def moved(array: np.ndarray[Any, Any]) -> Any:
        # NumPy's bf16 is ml_dtypes', which torch does not take: the bits travel as int16.
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).cuda().view(torch.bfloat16)
        return torch.from_numpy(np.ascontiguousarray(array)).cuda()

    return {name: moved(value) if isinstance(value, np.ndarray) else value for name, value in host.items()}


def in_jax(jax: Any, host: dict[str, Any]) -> dict[str, Any]:
    """NumPy arguments as JAX arrays; everything else as it is."""
    return {name: jax.numpy.asarray(v) if isinstance(v, np.ndarray) else v for name, v in host.items()}
