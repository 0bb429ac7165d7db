"""Importing the package is free: no framework, no CUDA library, no GPU, no side effect."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cupymla
from cupymla.ops import registry

HEAVY = ("torch", "jax", "cupy", "cuda.bindings", "cuda.core", "matplotlib", "rich")


def loaded_after(statement: str) -> list[str]:
    """Which heavy packages a fresh interpreter holds after `statement`."""
    program = f"{statement}\nimport sys\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return run.stdout.split()


@pytest.mark.parametrize(
    "statement", ["import cupymla", "import cupymla.cli", "import cupymla.ops.registry, cupymla.testing"]
)
def test_import_loads_nothing_heavy(statement: str) -> None:
    assert loaded_after(statement) == []


def test_import_takes_no_time() -> None:
    """The best of several, for other work on the machine costs time too."""
    program = "import time; start = time.perf_counter(); import cupymla; print(time.perf_counter() - start)"
    command = [sys.executable, "-c", program]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(5)]
    assert min(map(float, runs)) < 0.3


def test_naming_an_operator_loads_no_framework() -> None:
    """Argument validation looks at arrays through DLPack; it needs no framework to be there."""
    names = [entry.name for entry in registry.OPERATORS]
    assert loaded_after("import cupymla\n" + "\n".join(f"cupymla.{name}" for name in names)) == []


def test_import_maps_no_cuda_library() -> None:
    """A CPU machine has no libcuda, and a GPU machine must not open it before the first call."""
    program = "import cupymla\nprint(open('/proc/self/maps').read())"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "libcuda" not in run.stdout
    assert "libnvrtc" not in run.stdout


@pytest.mark.parametrize("entry", registry.OPERATORS, ids=lambda entry: entry.name)
def test_every_registered_name_is_reachable(entry: registry.OperatorEntry) -> None:
    for name in entry.functions:
        assert callable(getattr(cupymla, name))
        assert name in dir(cupymla)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sparse_mla_sideways'"):
        _ = cupymla.sparse_mla_sideways  # type: ignore[attr-defined]
